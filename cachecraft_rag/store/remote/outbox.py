"""Chunk-caches on their way to a remote, within a limit of bytes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from concurrent.futures import Future, wait

from cachecraft_rag.store.remote.base import Parcel
from cachecraft_rag.store.remote.connection import Connection

logger = logging.getLogger("cachecraft_rag.store")


class Outbox:
    """Takes parcels from any thread without waiting; the connection's event loop sends one after the other.

    Attributes:
        queued_bytes: bytes of the parcels that wait or are being sent.
        captures: outcome → number of parcels: "sent", "already there", "no room", "too many are waiting", "too slow",
            "the remote is left alone" or "failed".
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._config = connection.config
        self._lock = threading.Lock()
        self._turn = asyncio.Lock()
        self._under_way: set[Future[None]] = set()
        self.queued_bytes = 0
        self.captures: Counter[str] = Counter()

    def offer(self, parcel: Parcel) -> bool:
        """Queue a parcel; return False if it is dropped, because too many bytes wait or the connection is closed.

        At its turn it is sent unless the breaker is not closed or the remote has an entry of the same variant other
        than `replaces`. Once it is sent, `replaces` and the oldest entries of its chunk beyond
        `RemoteTuning.variants_per_chunk` are removed from the remote. A transfer that fails is counted in `captures`
        and logged; a drop because of a closed connection is not counted.
        """
        with self._lock:
            if self.queued_bytes + parcel.nbytes > self._config.tuning.queue_bytes:
                self.captures["too many are waiting"] += 1
                return False
            self.queued_bytes += parcel.nbytes
        try:
            future = self._connection.submit(self._send(parcel))
        except RuntimeError:  # the connection was closed
            with self._lock:
                self.queued_bytes -= parcel.nbytes
            return False
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return True

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all parcels so far are sent or dropped; False after `timeout_s` seconds (None: no limit)."""
        return not wait(self._under_way.copy(), timeout_s).not_done

    async def _send(self, parcel: Parcel) -> None:
        outcome = "failed"
        try:
            async with self._turn:
                if self._connection.allows():
                    async with asyncio.timeout(self._config.tuning.put_timeout_s):
                        outcome = await self._deliver(parcel)
                else:
                    outcome = "the remote is left alone"
        except OSError as error:  # a TimeoutError too
            outcome = "too slow" if isinstance(error, TimeoutError) else "failed"
            logger.info("A chunk-cache could not be sent to the remote: %s", error)
        except Exception:  # of the remote's library or of ours: the future's result is read nowhere
            logger.exception("A chunk-cache could not be sent to the remote")
        finally:
            with self._lock:
                self.queued_bytes -= parcel.nbytes
                self.captures[outcome] += 1

    async def _deliver(self, parcel: Parcel) -> str:
        backend = self._connection.backend
        variant = parcel.name.rpartition("-")[0]
        there = [name for name in await backend.names(parcel.place) if name != parcel.replaces]
        if any(name.startswith(variant) for name in there):
            return "already there"
        if not await backend.write(parcel):
            return "no room"
        oldest = sorted(there, key=lambda name: name.rpartition("-")[2])
        crowd = oldest[: max(0, len(there) + 1 - self._config.tuning.variants_per_chunk)]
        for name in crowd if parcel.replaces is None else (parcel.replaces, *crowd):
            await backend.remove(name)
        return "sent"
