"""Decode steps of concurrent answers, computed in one pass.

Reading the weights is most of a step, and one pass reads them once for all its rows. Each answer is decoded in its
reader's thread. The first thread that wants a step opens a group and stands in line for the engine's lock; whoever
wants one before its turn joins. Then one of them computes for all. So no step comes later than in line on its own, and
a reader who pauses has no step that others would wait for, but for a moment after the pass that served it.

The group's threads stand in line at a lock of its own: whoever gets it either finds its step computed, or computes all
that are not. An interruption can lose neither lock (see `scheduling`), and a step may be computed twice.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from cachecraft_rag.compute.decode import DecodeStep, extend, extend_all
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.scheduling import FairLock
from cachecraft_rag.engine.self_check import TOLERANCE
from cachecraft_rag.engine.tally import Histogram

logger = logging.getLogger("cachecraft_rag")

ROW_BOUNDS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
# After a pass, the next one waits for those who were just served, for this part of the pass's time at most. Without
# that, whoever came while it ran would go on at once, the others would come while theirs runs, and so on for ever.
_PAUSE = 0.05
_MOST_FAILURES = 3  # in a row; then steps stay apart


class LoneSteps(StrEnum):
    """Why every step is computed on its own.

    OFF      the settings say so (`decode_rows=1`)
    DIFFERS  the model's layers give other numbers for several rows at once: rows are not independent in them
    FAILED   several passes in a row raised an error that their steps on their own did not
    """

    OFF = "off"
    DIFFERS = "differs"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DecodeCounts:
    """What decoding has done since the engine was opened.

    rows   of each pass; more than one where answers were computed together
    alone  why they are not; None: they are, whenever steps meet
    """

    rows: Histogram
    alone: LoneSteps | None


class _Wanted(DecodeStep):
    """A step and, once it has been computed, what it predicts: `logits` `[vocabulary]`."""

    __slots__ = ("logits",)

    def __init__(self, buffer: KVBuffer, token: int, position: int) -> None:
        super().__init__(buffer, token, position)
        self.logits: Tensor | None = None


class _Group:
    """Steps that will be computed in one pass; `apart` once that has failed.

    They are held weakly: a step whose thread was interrupted goes with its frame.
    """

    __slots__ = ("apart", "lead", "steps")

    def __init__(self) -> None:
        self.lead, self.apart = FairLock(), False
        self.steps: list[weakref.ref[_Wanted]] = []

    def left(self) -> list[_Wanted]:
        """Those that are still wanted."""
        return [step for ref in self.steps if (step := ref()) is not None and step.logits is None]


class _Served:
    """Whom a pass served, and who of them wants no next step yet."""

    __slots__ = ("_away", "_came", "_until")

    def __init__(self, steps: Sequence[_Wanted], seconds: float) -> None:
        self._away = {id(step.buffer) for step in steps}
        self._came: SimpleQueue[None] = SimpleQueue()  # something is in it once all are back
        self._until = time.monotonic() + _PAUSE * seconds

    def back(self, step: _Wanted) -> None:
        """Its answer wants the next step."""
        self._away.discard(id(step.buffer))
        if not self._away:
            self._came.put(None)

    def wait(self) -> None:
        """Wait until all are back, but not longer than a moment after the pass."""
        if self._away and (left := self._until - time.monotonic()) > 0.0:
            with suppress(Empty):
                self._came.get(timeout=left)


class DecodeSteps:
    """Computes decode steps, those that wait at the same time in one pass. Any thread may call any method.

    Args:
        decoder: the model.
        take_lock: takes the engine's lock, for each pass.
        speed: told how long a step on its own takes.
        most: rows of a pass at most; 1 = each step on its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        take_lock: Callable[[], AbstractContextManager[object]],
        speed: ComputeSpeed,
        *,
        most: int,
    ) -> None:
        self._decoder, self._take_lock, self.speed, self._most = decoder, take_lock, speed, most
        self._guard = threading.Lock()  # of `_open`, and of the steps of that group
        self._open: _Group | None = None  # the one that may be joined
        self._served = _Served((), 0.0)  # by the last pass
        self._rows = Histogram.of(ROW_BOUNDS)  # written with the engine's lock held, as what follows
        self._alone = LoneSteps.OFF if most == 1 else None
        self._compared = False
        self._failures = 0

    def next_logits(self, buffer: KVBuffer, token: int, position: int) -> Tensor:
        """Logits `[vocabulary]` (float32) behind a token at `position`, whose K/V join the buffer."""
        step = _Wanted(buffer, token, position)
        group = self._join(step)
        with group.lead.take():
            if step.logits is None:
                with self._take_lock():
                    if self._has_room(group):
                        self._served.wait()
                    self._compute(step, group)
        assert step.logits is not None, "it was computed, here or by another"
        return step.logits

    def counts(self) -> DecodeCounts:
        """The state now."""
        return DecodeCounts(self._rows, self._alone)

    def _join(self, step: _Wanted) -> _Group:
        with self._guard:
            self._served.back(step)
            group = self._open
            if group is None or not self._has_room(group):
                group = self._open = _Group()
            group.steps.append(weakref.ref(step))
            return group

    def _has_room(self, group: _Group) -> bool:
        return not self._alone and len(group.left()) < self._most

    def _compute(self, own: _Wanted, group: _Group) -> None:
        """Compute a step, and the others of its group with it where that goes. Nobody joins the group any more."""
        with self._guard:
            if self._open is group:
                self._open = None
            steps = group.left()
        started = time.monotonic()
        if len(steps) == 1 or self._alone or group.apart or not self._together(steps):
            steps, group.apart = [own], True
            self._on_its_own(own)
        self._served = _Served(steps, time.monotonic() - started)

    def _on_its_own(self, step: _Wanted) -> None:
        started = time.perf_counter()
        logits = self._decoder.next_logits(extend(self._decoder, step.buffer, [step.token], step.position))
        self.speed.stepped(time.perf_counter() - started)
        self._rows, step.logits = self._rows.plus(1), logits

    def _together(self, steps: Sequence[_Wanted]) -> bool:
        """Compute them in one pass; the first time, each on its own as well. Returns whether that has gone well."""
        try:
            found = self._decoder.logits(extend_all(self._decoder, steps))
        except (RuntimeError, IndexError) as error:  # torch's: one that comes of a single step comes again
            self._failures += 1
            logger.warning("%s decode steps could not be computed together: %s", len(steps), error)
            if self._failures == _MOST_FAILURES:
                self._stay_alone(LoneSteps.FAILED, f"{_MOST_FAILURES} times in a row that failed")
            return False
        self._failures, self._rows = 0, self._rows.plus(len(steps))
        if not self._compared:
            self._compare(steps, found)
            return True
        for step, logits in zip(steps, found, strict=True):
            step.logits = logits
        return True

    def _compare(self, steps: Sequence[_Wanted], together: Tensor) -> None:
        """Compute the steps on their own; is `together` `[steps, vocabulary]` the same but for rounding?"""
        for step in steps:
            self._on_its_own(step)
        alone = torch.stack([step.logits for step in steps if step.logits is not None])
        error = float(((together - alone).norm(dim=-1) / alone.norm(dim=-1)).max())
        if not error <= TOLERANCE[self._decoder.dtype]:
            self._stay_alone(LoneSteps.DIFFERS, f"the logits of {self._decoder.name} differ by {error:.1%}")
        self._compared = True

    def _stay_alone(self, reason: LoneSteps, finding: str) -> None:
        self._alone = reason
        logger.warning("Each decode step is computed on its own from now on (%s): %s", reason, finding)
