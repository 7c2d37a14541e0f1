"""Time of a prefill, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

Part = Literal[
    "planning", "loading", "placing", "probe", "drift", "attention", "layers", "logits", "other"
]
PARTS: tuple[Part, ...] = get_args(Part)


Timer = Callable[[Part], AbstractContextManager[None]]
"""Called with the part that begins: `with timer("attention"): …`.

planning   look-up, plan, and opening of reused variants
loading    waiting for chunk-caches that are being loaded
placing    chunk-caches and computed rows into the request's buffer, and the rotation of both
probe      everything that a probe computes
drift      drift correction of tokens that are not recomputed
attention  attention of the rows
layers     the rest of the model's layers: projections, MLP, norms
logits     logits of the last token
other      everything else
"""

_BLOCK = nullcontext()


def untimed(_part: Part) -> AbstractContextManager[None]:
    """Return a context that measures nothing: a `Timer` for use without measuring."""
    return _BLOCK


def within(timer: Timer, part: Part) -> Timer:
    """Return a timer that counts the time of every part as `part`, by `timer`; for `untimed`, `untimed` itself."""
    if timer is untimed:
        return untimed
    return lambda _part: timer(part)


class PartTimer:
    """A timer that counts each moment for the innermost open part, so the parts sum up to the whole. For one thread.

    Args:
        clock: returns the time in seconds.

    Attributes:
        seconds: seconds of each part.

    >>> now = iter([0.0, 1.0, 4.0, 6.0])
    >>> timer = PartTimer(lambda: next(now))
    >>> with timer("layers"), timer("attention"):
    ...     pass
    >>> timer.seconds["layers"], timer.seconds["attention"], timer.total
    (3.0, 3.0, 6.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._clock = clock
        self._open: list[Part] = []
        self._since = 0.0

    @property
    def total(self) -> float:
        """Sum of all parts, in seconds, up to the last begin or end of a part."""
        return sum(self.seconds.values())

    def _count_until_now(self) -> None:
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def __call__(self, part: Part) -> Iterator[None]:
        """Count the time of the `with` block for `part`, except for parts within it."""
        self._count_until_now()
        self._open.append(part)
        try:
            yield
        finally:
            self._count_until_now()
            self._open.pop()
