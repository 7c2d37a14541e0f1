"""Which answers are under way, so that work in the background can keep out of their way."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# A reader who takes longer than this over one piece, or has forgotten the answer, does not stop the background's work.
_PAUSE_S = 1.0


@dataclass(eq=False)
class Answering:
    """One answer under way; `read_since` is when its reader was given a piece, infinite while the model works."""

    read_since: float = math.inf

    def hand_over(self) -> None:
        """The reader has the next piece now. Takes no lock."""
        self.read_since = time.monotonic()

    def go_on(self) -> None:
        """The reader asked for the next piece. Takes no lock."""
        self.read_since = math.inf


class Activity:
    """The answers that are under way. Any thread may call any method; finalisers only those of `Answering`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers: set[Answering] = set()

    def begin(self) -> Answering:
        """An answer has been asked for; hand what this returns to `end`."""
        answer = Answering()
        with self._changed:
            self._answers.add(answer)
        return answer

    def end(self, answer: Answering) -> None:
        """It has ended; may be told twice."""
        with self._changed:
            self._answers.discard(answer)
            self._changed.notify_all()

    @contextmanager
    def during(self) -> Iterator[None]:
        """An answer is under way while the block runs."""
        answer = self.begin()
        try:
            yield
        finally:
            self.end(answer)

    @property
    def idle(self) -> bool:
        """Whether the model works for nobody, and no reader is about to ask for the next piece."""
        with self._changed:
            return self._idle()

    def wait_idle(self, timeout_s: float, *, unless: Callable[[], bool]) -> bool:
        """Wait until it is idle, or this long, or until `unless()`; returns whether it is idle."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle() or unless(), timeout_s)
            return self._idle()

    def _idle(self) -> bool:
        now = time.monotonic()
        return all(now - answer.read_since > _PAUSE_S for answer in self._answers)
