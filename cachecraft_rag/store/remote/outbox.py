"""What is on its way to a remote: chunk-caches within a limit of bytes, and uses."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

from cachecraft_rag.store.remote.base import Backend, Parcel

logger = logging.getLogger("cachecraft_rag.store")
GATHER_S = 0.1  # uses of one answer come together and go out together
MOST_GAINS = 100_000


class Outbox:
    """Takes from any thread, never waits; `run` sends in the tier's event loop, one parcel after the other."""

    def __init__(
        self, backend: Backend, *, queue_bytes: int, timeout_s: float, loop: asyncio.AbstractEventLoop,
        allowed: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`allowed` says whether the remote may be asked anything now; while it may not, parcels are dropped."""
        self._backend, self._allowed, self._loop = backend, allowed, loop
        self._queue_bytes, self._timeout_s = queue_bytes, timeout_s
        self._lock = threading.RLock()  # taken by itself: Ctrl-C in the first line of the condition's would lose it
        self._state = threading.Condition(self._lock)
        self._parcels: deque[Parcel] = deque()
        self._gains: dict[str, float] = {}
        self._busy = self._hurried = False
        self._wake = asyncio.Event()
        self.queued_bytes = 0
        self.captures: Counter[str] = Counter()  # by outcome

    def offer(self, parcel: Parcel) -> bool:
        """Queue a chunk-cache; False when it is dropped."""
        with self._lock:
            fits = self.queued_bytes + parcel.nbytes <= self._queue_bytes
            if fits:
                self._parcels.append(parcel)
                self.queued_bytes += parcel.nbytes
            else:
                self.captures["too many are waiting"] += 1
        return fits and self._rouse()

    def gain(self, name: str, gain: float) -> None:
        """Score += gain for `place/name`, soon."""
        with self._lock:
            if name in self._gains or len(self._gains) < MOST_GAINS:
                self._gains[name] = self._gains.get(name, 0.0) + gain
        self._rouse()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until nothing is left to send; False when that takes longer than `timeout_s`."""
        with self._lock:
            self._hurried = True
        self._rouse()
        with self._lock:
            done = self._state.wait_for(lambda: not (self._parcels or self._gains or self._busy), timeout_s)
            self._hurried = False
            return done

    def _rouse(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop is closed
            return False
        return True

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self._parcels and not self._hurried:
                await asyncio.sleep(GATHER_S)
            while self._take():
                parcel, gains = self._current
                try:
                    await self._send(parcel, gains)
                finally:
                    self._done(parcel)

    def _take(self) -> bool:
        with self._lock:
            parcel = self._parcels.popleft() if self._parcels else None
            gains, self._gains = self._gains, {}
            self._current = parcel, gains
            self._busy = parcel is not None or bool(gains)
            return self._busy

    def _done(self, parcel: Parcel | None) -> None:
        with self._lock:
            self.queued_bytes -= parcel.nbytes if parcel is not None else 0
            self._busy = False
            self._state.notify_all()

    async def _send(self, parcel: Parcel | None, gains: dict[str, float]) -> None:
        outcome = "the remote is left alone"
        if self._allowed():
            if gains:  # on their own: a use that cannot be counted must not keep a chunk-cache from being sent
                await self._tried(self._backend.raise_score(gains))
            if parcel is not None:
                if parcel.instead_of is not None:
                    await self._tried(self._backend.remove_row(parcel.place, parcel.instead_of))
                outcome = await self._tried(self._backend.put(parcel))
        if parcel is not None:
            with self._lock:
                self.captures[outcome] += 1

    async def _tried(self, sending: Coroutine[Any, Any, str | None]) -> str:
        """What became of it. Time-outs too: a capture that others have to compute for themselves."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await sending or ""
        except OSError as error:
            logger.info("A chunk-cache or its use count could not be sent to the remote: %s", error)
            return "too slow" if isinstance(error, TimeoutError) else "failed"
