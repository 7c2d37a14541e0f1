"""Write-back: describe and store captures in the background, one at a time.

An answer does not wait for its own captures. A later question that needs a chunk while it is being captured waits for
the capture (`wait_for`): finishing it costs a fraction of computing the chunk again.
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

import torch
from torch import Tensor

from cachecraft_rag.compute.captures.capture import (
    AttentionAccumulator,
    CaptureRecorder,
    RecordedChunk,
)
from cachecraft_rag.compute.driver import Call, Work
from cachecraft_rag.kernels.gpu.streams import launched, wait_on_host, wait_on_stream
from cachecraft_rag.planning.found_text import text_mark
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.captures import Capture, RemovedChunks
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.prompts import Segment
from cachecraft_rag.types.store_reasons import CaptureDrop, Unavailable
from cachecraft_rag.types.variants import Variant, VariantKey

logger = logging.getLogger("cachecraft_rag.write_back")

Ended = Callable[[Any, BaseException | None], object]


@dataclass(frozen=True)
class CaptureContext:
    """Facts shared by all captures of one prefill.

    segments        segments of the prompt they were captured in
    bounds          `[segments + 1]`, segment bounds of the prompt
    exact_shares    exact share of each segment, see `planner.exact_shares`
    session         session that the captures belong to if their context is private; None: `submit` drops these
    primed          see `types.variants.Variant`
    extra_variants  segments that are captured once more, see `types.captures.Capture`
    removed         chunks that must not be stored any more
    reused          variant that was reused for each segment, or None; () if no capture is inexact
    namespace       tenant of the captures; "": that of the describer
    fingerprint     fingerprint of the model that computed them; None: that of the describer
    """

    segments: Sequence[Segment]
    bounds: Sequence[int]
    exact_shares: Sequence[float]
    session: str | None
    primed: bool = False
    extra_variants: Collection[int] = ()
    removed: RemovedChunks = field(default_factory=RemovedChunks)
    reused: Sequence[Variant | None] = ()
    namespace: str = ""
    fingerprint: str | None = None


class CaptureDescriber:
    """Describes and stores recorded captures. Any thread may call any method but `submit`.

    It has no thread: `start` runs the steps of each capture, in the step loop or a worker's thread for captures. Do not
    call methods that wait there.

    Args:
        store: the store to write to.
        namespace: namespace of the stored variants, unless their context names another one.
        fingerprint: fingerprint of the model, unless their context has that of the model with an adapter.
        layout: layout of a chunk-cache.
        start: runs the steps of one capture in the background, then calls its second argument, in any thread, with
            their result and None, or None and their error.
        max_bytes: limit for waiting captures, in bytes, without the buffers that they read; while more are waiting, new
            captures are dropped.
    """

    def __init__(
        self,
        store: ChunkCacheStore,
        *,
        namespace: str,
        fingerprint: str,
        layout: KVLayout,
        start: Callable[[Work[object], Ended], object],
        max_bytes: int = 2 << 30,
    ) -> None:
        self._store = store
        self._start = start
        self._namespace = namespace
        self._fingerprint = fingerprint
        self._layout = layout
        self._max_bytes = max_bytes

        self._guard = threading.Lock()  # for everything below
        # (tenant, chunk id) → its captures under way; several requests may capture a chunk at once
        self._pending: dict[tuple[str, str], list[Future[None]]] = {}
        self._waiting_bytes = 0  # of the captures' own tensors
        self._keys_bytes = 0  # of the prompts' buffers that these captures read
        self._closed = False
        # A set is held by the request that may capture, and leaves this one together with the request.
        # each with its tenant
        self._followers: weakref.WeakKeyDictionary[RemovedChunks, str] = weakref.WeakKeyDictionary()

    def follow(self, removed: RemovedChunks, namespace: str = "") -> RemovedChunks:
        """Return this set; while it lives, `remove` adds to it the ids of this tenant ("": the describer's)."""
        with self._guard:
            self._followers[removed] = namespace or self._namespace
        return removed

    def remove(self, chunk_ids: Sequence[str], namespace: str | None = None) -> None:
        """Add these ids to the sets of `follow` of a tenant (None: all): nothing of these, nor after them, is stored.

        What is stored stays. Waits without limit for captures of these chunks under way, of all tenants. `namespace` is
        the tenant's full name, not "".
        """
        with self._guard:
            for removed, owner in self._followers.items():
                if namespace in (None, owner):
                    removed.update(chunk_ids)
        self.wait_for(chunk_ids)

    def submit(self, recorder: CaptureRecorder, keys: Tensor, context: CaptureContext) -> None:
        """Begin to describe the captures of a prefill and return at once.

        Call it in the thread that computed the prefill, because captures wait for the work launched by this thread.
        Captures that are dropped or fail are counted in the store and logged; an error of `start` itself is raised too.

        Args:
            recorder: recorder of the prefill.
            keys: `[layers, keys, kv_heads, head_dim]`, rotated; must not change up to the last capture's end. Not kept
                if the recorder does not need them.
            context: facts about the prompt.
        """
        computed = launched(keys.device)
        needed = keys if recorder.needs_keys else None
        kept_bytes = 0 if needed is None else needed.untyped_storage().nbytes()
        for capture in recorder.captures:
            keys_bytes = kept_bytes // len(recorder.captures)
            chunk_id = context.segments[capture.segment].segment_id
            refusal = self._refusal(capture, context)
            if refusal is not None:
                self._store.count_drop(chunk_id, *refusal)
                continue

            job: Future[None] = Future()
            owned = (context.namespace or self._namespace, chunk_id)
            with self._guard:
                self._pending.setdefault(owned, []).append(job)
                self._waiting_bytes += capture.nbytes
                self._keys_bytes += keys_bytes
            steps = self.steps(capture, recorder, needed, context=context, computed=computed)
            ended = partial(self._ended, owned, capture.nbytes, keys_bytes, job)
            try:
                self._start(steps, ended)
            except BaseException as error:  # whatever it is, no request may wait for this capture
                ended(None, error)
                raise

    def steps(
        self,
        capture: RecordedChunk,
        recorder: CaptureRecorder,
        keys: Tensor | None,
        *,
        context: CaptureContext,
        computed: torch.cuda.Event | None = None,
    ) -> Work[Variant | Unavailable]:
        """Return the steps that describe one capture, a `Call` for each layer, and store it, see `submit`.

        Of steps that `submit` did not begin, `pending`, `wait_for`, `close` and `max_bytes` know nothing, and a
        private capture needs `context.session`: without one it would be shared.
        A capture is not stored, but counted in the store and logged, if after the last layer its chunk or one before it
        is in `context.removed`. The result is the stored variant, or the reason why the capture is dropped. `computed`
        is an event after the prefill, if another thread may run these steps on another stream of the GPU.
        """
        if not recorder.needs_keys:
            keys = None
        key = self._key(capture, context)
        read = capture.tensors() if keys is None else [*capture.tensors(), keys]
        wait_on_stream(computed, *read)
        del read
        accumulator = AttentionAccumulator(capture, recorder.settings, bounds=context.bounds)
        if keys is not None:
            for layer in range(self._layout.layers):
                yield Call(partial(_describe_layer, accumulator, layer, keys[layer]))

        # the store refuses what is removed from here on
        if key.holds(context.removed):
            reason = "its chunk, or one before it, was removed"
            self._store.count_drop(key.chunk_id, CaptureDrop.REMOVED, reason)
            return Unavailable(key.variant_id, CaptureDrop.REMOVED, reason)

        segment = context.segments[capture.segment]
        statistics = accumulator.statistics()
        described = Capture(
            key=key,
            layout=self._layout,
            tokens_digest=segment.tokens_digest,
            kv=self._store.host_copy(capture.kv),
            exact_share=context.exact_shares[capture.segment],
            session=context.session if _is_private(capture, context) else None,
            primed=context.primed,
            extra_variant=capture.segment in context.extra_variants,
            mark=text_mark(segment.token_ids) if segment.kind == "chunk" else None,
            sources=tuple(filter(None, context.reused[: capture.segment])),
            inter=statistics.inter,
            intra=statistics.intra,
            cci=statistics.cci,
            token_scores=statistics.token_scores,
        )
        stored: Variant | Unavailable = yield self._store.put(described)
        return stored

    def pending(
        self, segment_ids: Iterable[str] | None = None, *, namespace: str | None = None
    ) -> frozenset[str]:
        """Return the ids of the segments with a capture under way, of these segments or by default of all.

        `namespace`: the tenant of the captures, not ""; None: all.
        """
        with self._guard:
            under_way = frozenset(
                chunk_id for owner, chunk_id in self._pending if namespace in (None, owner)
            )
        return under_way if segment_ids is None else under_way & frozenset(segment_ids)

    @property
    def crowded(self) -> bool:
        """True if waiting captures, with the buffers that they read, fill more than a quarter of `max_bytes`."""
        return 4 * (self._waiting_bytes + self._keys_bytes) > self._max_bytes

    def wait_for(self, segment_ids: Iterable[str], timeout: float | None = None) -> bool:
        """Wait for all tenants' captures of these segments submitted so far; False after `timeout` s (None: never)."""
        wanted = frozenset(segment_ids)
        with self._guard:
            jobs = [
                job
                for (_, chunk_id), under_way in self._pending.items()
                if chunk_id in wanted
                for job in under_way
            ]
        return not wait(jobs, timeout).not_done

    def close(self) -> None:
        """Refuse (drop) new captures, and wait without limit for those that were submitted."""
        with self._guard:
            self._closed = True
        self.wait_for(self.pending())

    def _refusal(
        self, capture: RecordedChunk, context: CaptureContext
    ) -> tuple[CaptureDrop, str] | None:
        """Return why this capture is dropped; None if it is not."""
        if _is_private(capture, context) and context.session is None:
            return CaptureDrop.PRIVATE, "it is private, and there is no session"

        with self._guard:
            waiting_bytes = self._waiting_bytes
            is_closed = self._closed
        if waiting_bytes > self._max_bytes:
            megabytes = waiting_bytes // 10**6
            return (
                CaptureDrop.WRITE_BACK_FULL,
                f"captures are dropped: {megabytes} MB are waiting already",
            )
        if is_closed:
            return (
                CaptureDrop.CLOSED,
                "an answer ended after its engine was closed; its captures are dropped",
            )
        return None

    def _ended(
        self,
        owned: tuple[str, str],
        nbytes: int,
        keys_bytes: int,
        job: Future[None],
        _stored: object,
        error: BaseException | None,
    ) -> None:
        _, chunk_id = owned
        try:
            if error is not None:
                logger.error(
                    "the capture of chunk %s failed and is not stored", chunk_id, exc_info=error
                )
                self._store.count_drop(
                    chunk_id, CaptureDrop.FAILED, f"describing it failed: {type(error).__name__}"
                )
        finally:
            with self._guard:
                self._waiting_bytes -= nbytes
                self._keys_bytes -= keys_bytes
                self._pending[owned].remove(job)
                if not self._pending[owned]:
                    del self._pending[owned]
            job.set_result(None)

    def _key(self, capture: RecordedChunk, context: CaptureContext) -> VariantKey:
        chunk_id = context.segments[capture.segment].segment_id
        prefix = tuple(segment.segment_id for segment in context.segments[: capture.segment])
        namespace = context.namespace or self._namespace
        fingerprint = context.fingerprint or self._fingerprint
        return VariantKey(namespace, fingerprint, chunk_id, prefix)


def _describe_layer(accumulator: AttentionAccumulator, layer: int, keys: Tensor) -> None:
    """Add one layer and wait for it: drivers decide by the time that a call takes."""
    accumulator.add_layer(layer, keys)
    wait_on_host(keys.device)


def _is_private(capture: RecordedChunk, context: CaptureContext) -> bool:
    """Return True if the captured segment or one before it is private."""
    return any(segment.private for segment in context.segments[: capture.segment + 1])
