"""Write-back: captures are described and stored in the background, one at a time.

No answer waits for its own captures. A later question that needs a chunk whose capture is still under way waits for it
(`wait_for`): finishing the capture costs a fraction of computing the chunk again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from cachecraft_rag.compute.captures.capture import AttentionAccumulator, CaptureRecorder, RecordedChunk
from cachecraft_rag.compute.driver import Call, Work
from cachecraft_rag.planning.found_text import text_mark
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types import (
    Capture,
    CaptureDrop,
    KVLayout,
    RemovedChunks,
    Segment,
    Unavailable,
    Variant,
    VariantKey,
)

logger = logging.getLogger("cachecraft_rag.write_back")

Ended = Callable[[Any, BaseException | None], object]


@dataclass(frozen=True)
class CaptureContext:
    """Facts shared by all captures of one prefill.

    segments, bounds  of the prompt they were captured in
    exact_shares      per segment, see `planner.exact_shares`
    session           whose they are if something private stood before them
    primed            see `types.Variant`
    another           segments that are captured once more, see `types.Capture`
    removed           chunks that must not be stored any more
    """

    segments: Sequence[Segment]
    bounds: Sequence[int]
    exact_shares: Sequence[float]
    session: str | None
    primed: bool = False
    another: Collection[int] = ()
    removed: RemovedChunks = field(default_factory=RemovedChunks)


class WriteBackQueue:
    """Describes and stores recorded captures. Any thread may call any method.

    Args:
        store, namespace, fingerprint, layout: where and as what they are stored.
        start: drives the steps of one capture in the background, and calls its second argument with their result and
            their error.
        max_bytes: most memory for captures that wait; those of a pass that finds more waiting are dropped.
    """

    def __init__(
        self,
        store: ChunkCacheStore,
        *,
        namespace: str,
        fingerprint: str,
        layout: KVLayout,
        start: Callable[[Work[Any], Ended], object],
        max_bytes: int = 2 << 30,
    ) -> None:
        self._store, self._start = store, start
        self._namespace, self._fingerprint, self._layout = namespace, fingerprint, layout
        self._guard = threading.Lock()
        self._pending: dict[str, Future[None]] = {}
        self._max_bytes, self._waiting_bytes, self._closed = max_bytes, 0, False
        # Each is held by the request that may capture, so this forgets it when that does.
        self._followers: weakref.WeakSet[RemovedChunks] = weakref.WeakSet()

    def follow(self, removed: RemovedChunks) -> RemovedChunks:
        """From now on, add the chunks that are removed to this set."""
        with self._guard:
            self._followers.add(removed)
        return removed

    def remove(self, chunk_ids: Sequence[str]) -> None:
        """Prepare the removal of these chunks: nothing that began before captures them any more, and what is on its way
        to the store is there when this returns.
        """
        with self._guard:
            for removed in self._followers:
                removed.update(chunk_ids)
        self.wait_for(chunk_ids)

    def submit(self, recorder: CaptureRecorder, keys: Tensor, context: CaptureContext) -> None:
        """Queue the captures of a prefill; returns at once.

        Captures are dropped, without an effect on the answer, after `close` and where more than `max_bytes` wait.

        Args:
            keys: `[layers, keys, kv_heads, head_dim]`, rotated; must not change up to the last capture's end.
        """
        for capture in recorder.captures:
            name = context.segments[capture.segment].segment_id
            if (refusal := self._refusal(capture, context)) is not None:
                self._store.count_drop(name, *refusal)
                continue
            job: Future[None] = Future()
            with self._guard:
                self._pending[name] = job
                self._waiting_bytes += capture.nbytes
            ended = partial(self._ended, name, capture.nbytes, job)
            self._start(self.steps(capture, recorder, keys, context=context), ended)

    def steps(
        self, capture: RecordedChunk, recorder: CaptureRecorder, keys: Tensor, *, context: CaptureContext
    ) -> Work[Variant | Unavailable]:
        """Describe and store one capture, a layer at a time; arguments as of `submit`."""
        key = self._key(capture, context)
        describer = AttentionAccumulator(capture, recorder.settings, bounds=context.bounds)
        for layer in range(self._layout.layers):
            yield Call(partial(describer.add_layer, layer, keys[layer]))
        if key.chunk_id in context.removed:  # a removal from here on waits for this capture
            why = "its chunk was removed meanwhile"
            self._store.count_drop(key.chunk_id, CaptureDrop.REMOVED, why)
            return Unavailable(key.variant_id, CaptureDrop.REMOVED, why)
        segment = context.segments[capture.segment]
        stored: Variant | Unavailable = yield self._store.put(
            Capture(
                key=key,
                layout=self._layout,
                tokens_digest=segment.tokens_digest,
                kv=capture.kv.cpu(),
                exact_share=context.exact_shares[capture.segment],
                session=context.session if _private(capture, context) else None,
                primed=context.primed,
                another=capture.segment in context.another,
                mark=text_mark(segment.token_ids) if segment.kind == "chunk" else None,
                **vars(describer.statistics()),
            )
        )
        return stored

    def pending(self, segment_ids: Iterable[str] | None = None) -> frozenset[str]:
        """The segments whose captures are under way, of these or of all."""
        with self._guard:
            under_way = frozenset(self._pending)
        return under_way if segment_ids is None else under_way & frozenset(segment_ids)

    @property
    def crowded(self) -> bool:
        """True if more than a quarter of the memory for captures that wait is taken."""
        return 4 * self._waiting_bytes > self._max_bytes

    def wait_for(self, segment_ids: Iterable[str], timeout: float | None = None) -> bool:
        """Block until no capture of these segments is under way, or for `timeout` seconds; returns whether none is."""
        with self._guard:
            jobs = [self._pending[name] for name in segment_ids if name in self._pending]
        return not wait(jobs, timeout).not_done

    def close(self) -> None:
        """Finish what is queued, and take nothing more."""
        with self._guard:
            self._closed = True
        self.wait_for(self.pending())

    def _refusal(self, capture: RecordedChunk, context: CaptureContext) -> tuple[CaptureDrop, str] | None:
        if _private(capture, context) and context.session is None:  # no request could ever be served this
            return CaptureDrop.PRIVATE, "it is private, and there is no session"
        with self._guard:
            waiting, closed = self._waiting_bytes, self._closed
        if waiting > self._max_bytes:
            return CaptureDrop.WRITE_BACK_FULL, f"captures are dropped: {waiting // 10**6} MB are waiting already"
        if closed:
            return CaptureDrop.CLOSED, "an answer ended after its engine was closed; its captures are dropped"
        return None

    def _ended(
        self, chunk_id: str, nbytes: int, job: Future[None], _stored: object, error: BaseException | None
    ) -> None:
        try:
            if error is not None:
                logger.error("the capture of chunk %s failed and is not stored", chunk_id, exc_info=error)
                self._store.count_drop(chunk_id, CaptureDrop.FAILED, f"describing it failed: {type(error).__name__}")
        finally:
            with self._guard:
                self._waiting_bytes -= nbytes
                if self._pending.get(chunk_id) is job:
                    del self._pending[chunk_id]
            job.set_result(None)

    def _key(self, capture: RecordedChunk, context: CaptureContext) -> VariantKey:
        prefix = tuple(segment.segment_id for segment in context.segments[: capture.segment])
        return VariantKey(self._namespace, self._fingerprint, context.segments[capture.segment].segment_id, prefix)


def _private(capture: RecordedChunk, context: CaptureContext) -> bool:
    """Tell whether something private stands in it or before it."""
    return any(segment.private for segment in context.segments[: capture.segment + 1])
