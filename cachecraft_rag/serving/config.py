"""Options of background work that runs beside answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, get_args

from cachecraft_rag.checks import (
    check_choice,
    check_flag,
    check_number,
    check_whole,
    refuses_other_names,
)
from cachecraft_rag.errors import ConfigError

When = Literal["off", "idle", "always"]


@refuses_other_names(what="setting of new variants")
@dataclass(frozen=True, slots=True)
class NewVariants:
    """When new variants are computed, and how much may be spent on them.

    when     "idle": while no answer is under way; "always" (not over vLLM): also beside answers, layer by layer in
             turn with them; "off": never
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


@refuses_other_names(what="setting of audits")
@dataclass(frozen=True, slots=True)
class Audits:
    """Limits of audits: comparisons of answers with full prefill of the same prompt, while no answer is under way.

    share      share of the answers with reuse that are audited, 0 to 1; 0: none
    waiting    most answers that wait; beyond it, the oldest are dropped
    kept       most results of a tenant and model that are kept on disk; beyond it, the oldest are removed
    keep_text  whether the text of audited answers is kept with the results, not over vLLM. On disk only that of
               requests without a session
    """

    share: float = 0.0
    waiting: int = 64
    kept: int = 10_000
    keep_text: bool = False

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        check_number("audit", self.share, most=1.0)
        check_whole("waiting", self.waiting, least=1)
        check_whole("kept", self.kept, least=1)
        check_flag("keep_text", self.keep_text)

    @classmethod
    def of(cls, value: str | float) -> Self:
        """Return the audits for "off", "idle" (every answer), or a share from 0 to 1, also as text.

        >>> Audits.of("idle").share, Audits.of("off").share, Audits.of("0.25").share
        (1.0, 0.0, 0.25)
        """
        words = {"off": 0.0, "idle": 1.0}
        if isinstance(value, str):
            try:
                value = words[value] if value in words else float(value)
            except ValueError:
                raise ConfigError(
                    f'audit must be "off", "idle" or a share from 0 to 1, not {value!r}'
                ) from None
        return cls(value)
