"""Keys that each row of a pass sees."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Visibility:
    """Keys that each row sees: those at or before its own position, within the window, except absent ones.

    The rows of a partial prefill are a sorted subset of the prompt's positions. FlashAttention's `causal=True` is
    aligned to the bottom right and is wrong for such rows, so visibility is decided by position.

    positions  int64 `[rows]` on the device of the queries: positions of the rows, ascending, without repeats
    window     number of keys that a row sees, including its own, so 1 or more; None = no limit
    absent     int64 on the same device, keys that no row sees; None = no key is absent
    """

    positions: Tensor
    window: int | None = None
    absent: Tensor | None = None
    _prepared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def prepared(self, prepare: Callable[..., T], *arguments: Hashable) -> T:
        """Return `prepare(self, *arguments)`, which is computed once and shared by all layers of a pass.

        Later calls with the same function and equal arguments return the same object, so do not change it.
        """
        key = (prepare, arguments)
        if key not in self._prepared:
            self._prepared[key] = prepare(self, *arguments)
        result: T = self._prepared[key]
        return result
