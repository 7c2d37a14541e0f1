"""Write-back: captures are described and stored in the background, one at a time.

No answer waits for its own captures. A later question that needs a chunk whose capture is still under way waits for it
(`wait_for`): finishing the capture costs a fraction of computing the chunk again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from cachecraft_rag.compute.capture import AttentionAccumulator, CaptureRecorder, RecordedChunk
from cachecraft_rag.compute.removed import Removed
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types import Capture, CaptureDrop, KVLayout, Segment, Unavailable, Variant, VariantKey

logger = logging.getLogger("cachecraft_rag.write_back")


@dataclass(frozen=True)
class CaptureContext:
    """What all captures of one prefill share.

    segments, bounds  of the prompt they were captured in
    exact_shares      per segment, see `planner.exact_shares`
    session           whose they are if something private stood before them
    primed            see `types.Variant`
    another           see `types.Capture`
    removed           chunks that are captured no more
    """

    segments: Sequence[Segment]
    bounds: Sequence[int]
    exact_shares: Sequence[float]
    session: str | None
    primed: bool = False
    another: bool = False
    removed: Removed = field(default_factory=Removed)


class WriteBackQueue:
    """Takes recorded captures and stores them in the background.

    Args:
        store, namespace, fingerprint, layout: where and as what they are stored.
        take_lock: gives the lock that is held while a layer is described, so that captures and requests take turns.
        max_bytes: most memory for captures that wait; those of a pass that finds more waiting are dropped.
    """

    def __init__(
        self,
        store: ChunkCacheStore,
        *,
        namespace: str,
        fingerprint: str,
        layout: KVLayout,
        take_lock: Callable[[], AbstractContextManager[object]],
        max_bytes: int = 2 << 30,
    ) -> None:
        self._store, self._take_lock = store, take_lock
        self._namespace, self._fingerprint, self._layout = namespace, fingerprint, layout
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cachecraft-captures")
        self._guard = threading.Lock()
        self._pending: dict[str, Future[Variant | Unavailable]] = {}
        self._max_bytes, self._waiting_bytes = max_bytes, 0
        # Each is held by the request that may capture, so this forgets it when that does.
        self._followers: weakref.WeakSet[Removed] = weakref.WeakSet()

    def follow(self, removed: Removed) -> Removed:
        """From now on, add the chunks that are removed to this."""
        with self._guard:
            self._followers.add(removed)
        return removed

    def remove(self, chunk_ids: Sequence[str]) -> None:
        """These chunks are about to be removed: whatever began before captures them no more, and what is on its way to
        the store is there when this returns.
        """
        with self._guard:
            for removed in self._followers:
                removed.add(chunk_ids)
        self.wait_for(chunk_ids)

    def submit(self, recorder: CaptureRecorder, keys: Tensor, context: CaptureContext) -> None:
        """Queue what a prefill recorded; returns at once.

        Captures are dropped, without an effect on the answer, after `close` and where more than `max_bytes` wait.

        Args:
            keys: `[layers, keys, kv_heads, head_dim]`, rotated; must not change up to the last capture's end.
        """
        for capture in recorder.captures:
            key, nbytes = self._key(capture, context), capture.nbytes
            if _private(capture, context) and context.session is None:  # no request could ever be served this
                self._store.count_drop(key.chunk_id, CaptureDrop.PRIVATE, "it is private, and there is no session")
                continue
            with self._guard:
                waiting = self._waiting_bytes
            if waiting > self._max_bytes:
                why = f"captures are dropped: {waiting // 10**6} MB are waiting already"
                self._store.count_drop(key.chunk_id, CaptureDrop.WRITE_BACK_FULL, why)
                continue
            job: Future[Variant | Unavailable] | None = None
            with self._guard:
                try:
                    job = self._worker.submit(
                        self.store_now, capture, recorder, keys, context=context, take_turn=self._take_lock
                    )
                except RuntimeError:  # how an executor says that it, or the interpreter, is shutting down
                    pass
                else:
                    self._pending[key.chunk_id] = job
                    self._waiting_bytes += nbytes
            if job is None:
                why = "an answer ended after its engine was closed; its captures are dropped"
                self._store.count_drop(key.chunk_id, CaptureDrop.CLOSED, why)
                continue
            job.add_done_callback(partial(self._forget, key.chunk_id, nbytes))

    def store_now(
        self,
        capture: RecordedChunk,
        recorder: CaptureRecorder,
        keys: Tensor,
        *,
        context: CaptureContext,
        take_turn: Callable[[], AbstractContextManager[object]],
    ) -> Variant | Unavailable:
        """Describe and store one capture in this thread, and tell what became of it; arguments as of `submit`.

        Args:
            take_turn: is held while a layer is described; what it raises ends this, and nothing is stored.
        """
        key = self._key(capture, context)
        describer = AttentionAccumulator(capture, recorder.settings, bounds=context.bounds)
        for layer in range(self._layout.layers):
            with take_turn():
                describer.add_layer(layer, keys[layer])
        found = describer.statistics()
        if key.chunk_id in context.removed:  # what is removed from here on waits for this job
            why = "its chunk was removed meanwhile"
            self._store.count_drop(key.chunk_id, CaptureDrop.REMOVED, why)
            return Unavailable(key.variant_id, CaptureDrop.REMOVED, why)
        stored = self._store.put(
            Capture(
                key=key,
                layout=self._layout,
                tokens_digest=context.segments[capture.segment].tokens_digest,
                kv=capture.kv.cpu(),
                token_scores=found.token_scores,
                inter=found.inter,
                intra=found.intra,
                cci=found.cci,
                exact_share=context.exact_shares[capture.segment],
                session=context.session if _private(capture, context) else None,
                primed=context.primed,
                another=context.another,
            )
        )
        return stored.result()

    def pending(self, segment_ids: Iterable[str] | None = None) -> frozenset[str]:
        """The segments whose captures are under way, of these or of all."""
        with self._guard:
            under_way = frozenset(self._pending)
        return under_way if segment_ids is None else under_way & frozenset(segment_ids)

    def wait_for(self, segment_ids: Iterable[str], timeout: float | None = None) -> bool:
        """Block until no capture of these segments is under way, or for `timeout` seconds; returns whether none is."""
        with self._guard:
            jobs = [self._pending[name] for name in segment_ids if name in self._pending]
        return not wait(jobs, timeout).not_done

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._worker.shutdown(wait=True)

    def _forget(self, chunk_id: str, nbytes: int, job: Future[Variant | Unavailable]) -> None:
        with self._guard:
            self._waiting_bytes -= nbytes
            if self._pending.get(chunk_id) is job:
                del self._pending[chunk_id]
        if (error := job.exception()) is not None:  # no caller looks at this future
            logger.error("the capture of chunk %s failed and is not stored", chunk_id, exc_info=error)
            self._store.count_drop(chunk_id, CaptureDrop.FAILED, f"describing it failed: {type(error).__name__}")

    def _key(self, capture: RecordedChunk, context: CaptureContext) -> VariantKey:
        prefix = tuple(segment.segment_id for segment in context.segments[: capture.segment])
        return VariantKey(self._namespace, self._fingerprint, context.segments[capture.segment].segment_id, prefix)


def _private(capture: RecordedChunk, context: CaptureContext) -> bool:
    """Whether something private stands in it or before it."""
    return any(segment.private for segment in context.segments[: capture.segment + 1])
