"""Time of a prefill, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol, get_args

Part = Literal[
    "planning", "loading", "placing", "probe", "drift", "attention", "layers", "logits", "other"
]  # fmt: skip
PARTS: tuple[Part, ...] = get_args(Part)


class Timer(Protocol):
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

    def __call__(self, part: Part) -> AbstractContextManager[None]:
        """A block of this part."""
        ...

    def within(self, part: Part) -> Timer:
        """A timer for which every part is this one."""
        ...


class Untimed:
    """Measures nothing; see `Timer`."""

    _block = nullcontext()

    def __call__(self, part: Part) -> AbstractContextManager[None]:
        """The same block for all."""
        return self._block

    def within(self, part: Part) -> Timer:
        """Itself."""
        return self


UNTIMED = Untimed()


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

    def within(self, part: Part) -> Timer:
        """See `Timer`."""
        return _Within(self, part)


class _Within:
    def __init__(self, timer: Timer, part: Part) -> None:
        self._timer, self._part = timer, part

    def __call__(self, part: Part) -> AbstractContextManager[None]:
        return self._timer(self._part)

    def within(self, part: Part) -> Timer:
        return self
