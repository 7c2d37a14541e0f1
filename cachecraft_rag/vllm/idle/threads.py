"""Threads that compute work in idle time over vLLM: each piece is a request, which gives way to all others there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

from cachecraft_rag.serving.idle.work import Among, IdleWork, Piece, Result


@dataclass(eq=False)
class ThreadRunner(Generic[Piece, Result]):
    """Computes pieces in threads, which start with the first piece. Any thread may call any method.

    name     name of the threads
    compute  computes a piece; returns None if it gave way to other requests
    lanes    one thread for each, which computes the pieces for which it is True; None: all
    """

    name: str
    compute: Callable[[Piece], Result | None]
    lanes: Sequence[Among[Piece] | None] = (None,)
    # vLLM may raise anything; the next piece may succeed
    expected_errors: tuple[type[Exception], ...] = (Exception,)
    _started: bool = False

    def wake(self, work: IdleWork[Piece, Result]) -> None:
        """Start the threads if a piece of `work` may begin; started ones notice more themselves. Returns at once."""
        if self._started or not work.busy:
            return
        self._started = True
        for lane in self.lanes:
            run = partial(self._run, work, lane)
            threading.Thread(target=run, name=self.name, daemon=True).start()

    def give_up(self, piece: Piece) -> None:
        """Do nothing: a request to vLLM goes on."""

    def _run(self, work: IdleWork[Piece, Result], lane: Among[Piece] | None) -> None:
        while (piece := work.next(lane, wait=True)) is not None:
            result: Result | None = None
            failure: BaseException | None = None
            try:
                result = self.compute(piece)
            # any: `finish` logs it, and has to be called, or the piece would be under way forever
            except BaseException as error:  # noqa: BLE001
                failure = error
            work.finish(piece, result, failure)
