"""Time of a prefill, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

Part = Literal["planning", "loading", "placing", "probe", "drift", "attention", "layers", "logits", "other"]
PARTS: tuple[Part, ...] = get_args(Part)


Timer = Callable[[Part], AbstractContextManager[None]]
"""Called with the part that begins: `with timer("attention"): …`.

planning   look-up, plan and opening what it reuses
loading    waiting for what is being loaded
placing    chunk-caches into the request's buffer, and rows among them; rotating both
probe      all that a probe computes
drift      the correction of tokens that are not recomputed
attention  of the rows
layers     the rest of the model's layers: projections, MLP, norms
logits     of the last token
other      everything else
"""

_BLOCK = nullcontext()


def untimed(_part: Part) -> AbstractContextManager[None]:
    """Measure nothing."""
    return _BLOCK


def within(timer: Timer, part: Part) -> Timer:
    """A timer for which every part is this one."""
    return timer if timer is untimed else lambda _part: timer(part)


class PartTimer:
    """Each moment counts for the innermost part that is open, so the parts sum up to the whole. For one thread.

    Args:
        clock: what seconds are read from.

    Attributes:
        seconds: of each part, `total` their sum.

    >>> now = iter([0.0, 1.0, 4.0, 6.0])
    >>> timer = PartTimer(lambda: next(now))
    >>> with timer("layers"), timer("attention"):
    ...     pass
    >>> timer.seconds["layers"], timer.seconds["attention"], timer.total
    (3.0, 3.0, 6.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._clock, self._open, self._since = clock, list[Part](), 0.0

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    def _turn(self) -> None:
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def __call__(self, part: Part) -> Iterator[None]:
        """See `Timer`."""
        self._turn()
        self._open.append(part)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()
