"""Computing work in idle time by the engine in this process: as tasks of its step loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from cachecraft_rag.compute.driver import Work
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.serving.idle.work import IdleWork, Piece, Result
from cachecraft_rag.serving.loop.step_loop import StepLoop
from cachecraft_rag.serving.loop.task import LoopTask, Priority

# Errors of the disk, the device (torch raises RuntimeError) or memory; others are mistakes of ours.
_EXPECTED_ERRORS = (CacheCraftError, OSError, RuntimeError, MemoryError)


@dataclass(eq=False)
class LoopRunner(Generic[Piece, Result]):
    """Computes pieces as tasks of the step loop, one at a time; to be used in the loop's thread.

    steps  makes the steps that compute a piece
    """

    loop: StepLoop
    steps: Callable[[Piece], Work[Result]]
    priority: Priority = Priority.IDLE
    expected_errors: tuple[type[Exception], ...] = _EXPECTED_ERRORS
    _task: LoopTask | None = None
    _is_unwanted: bool = False  # the result of the task

    def wake(self, work: IdleWork[Piece, Result]) -> None:
        """Begin with the next piece, unless one is under way. If the loop ends before the piece, `work` is closed."""
        piece = work.next() if self._task is None else None
        if piece is None:
            return

        def ended(result: Result | None, error: BaseException | None) -> None:
            self._task = None
            # The loop itself has given the task up, because it ends: no other piece may begin.
            if result is None and error is None and not self._is_unwanted:
                work.close()
            work.finish(piece, result, error)

        self._is_unwanted = False
        self._task = LoopTask(lambda _: self.steps(piece), ended, self.priority)
        self.loop.start(self._task)

    def give_up(self, piece: Piece) -> None:
        """End the piece under way before its next step."""
        if self._task is not None:
            self._is_unwanted = True
            self._task.closed = True
            self.loop.wake()
