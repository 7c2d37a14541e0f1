"""Keys that each row of a pass sees."""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
    _prepared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def prepared(self, prepare: Callable[..., T], *arguments: Hashable) -> T:
        """Derivation of a kernel, `prepare(self, *arguments)`, made once and shared by all layers of a pass."""
        key = prepare, arguments
        if key not in self._prepared:
            self._prepared[key] = prepare(self, *arguments)
        found: T = self._prepared[key]
        return found
