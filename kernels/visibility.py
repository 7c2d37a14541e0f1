"""Keys that each row of a pass sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Visibility:
    """A row sees the keys at or before its own position: in a sliding window the last of them, and none that is absent.

    The rows of a partial prefill are a sorted subset of the prompt's positions. FlashAttention's `causal=True` is
    aligned to the bottom right and is wrong for such rows, so what is visible goes by position.

    positions  int64 `[rows]`, ascending, without repeats
    window     a row sees at most this many keys, its own included; None = all before it
    absent     int64, keys that no row sees; None = all are there
    """

    positions: Tensor
    window: int | None = None
    absent: Tensor | None = None
    _prepared: dict[Callable[..., Any], Any] = field(default_factory=dict, init=False, repr=False)

    def prepared(self, prepare: Callable[[Visibility], T]) -> T:
        """Derivation of a kernel, made at the first call and shared by all layers of a pass."""
        if prepare not in self._prepared:
            self._prepared[prepare] = prepare(self)
        found: T = self._prepared[prepare]
        return found
