"""Options of background work that runs beside answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cachecraft_rag.checks import check_choice, check_number, check_whole

When = Literal["off", "idle", "always"]


@dataclass(frozen=True, slots=True)
class NewVariants:
    """When new variants are computed, and how much may be spent on them.

    when     "idle": while no answer is under way; "always": also beside answers, layer by layer in turn with them;
             "off": never
    share    tokens that may be computed for new variants, for each token of a prompt that was served
    waiting  most prompts that wait; beyond it, the prompts that would have saved least are dropped
    """

    when: When = "idle"
    share: float = 1.0
    waiting: int = 256

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        check_choice("new_variants", self.when, get_args(When))
        check_number("share", self.share)
        check_whole("waiting", self.waiting, least=1)
