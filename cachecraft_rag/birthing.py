"""Births on their way to the store: described and written in the background, one at a time.

No answer waits for its own births. A later question that needs a chunk which is still being born waits for it
(`wait_for`): the rest of the birth is a fraction of what computing the chunk a second time would cost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from cachecraft_rag.births import BirthDescriber, BirthRecorder, RecordedBirth
from cachecraft_rag.prompt import Segment
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.turns import FairLock
from cachecraft_rag.types import Birth, KVLayout, VariantKey

logger = logging.getLogger("cachecraft_rag.birthing")


@dataclass(frozen=True)
class BirthContext:
    """What all births of one pass share.

    segments, bounds  of the prompt they were born in
    exact_shares      per segment, see `planner.exact_shares`
    session           whose they are if something private stood before them
    sink_tokens       see `ReuseConfig`
    primed            see `types.Variant`
    """

    segments: Sequence[Segment]
    bounds: Sequence[int]
    exact_shares: Sequence[float]
    session: str | None
    sink_tokens: int
    primed: bool = False


class BirthQueue:
    """Takes recorded births and stores them in the background.

    Args:
        store, namespace, fingerprint, layout: where and as what they are stored.
        turn: held for the short spells of computing, so that requests go first come, first served with them.
        max_bytes: most memory for births that wait; those of a pass that finds more waiting are dropped.
    """

    def __init__(
        self,
        store: ChunkCacheStore,
        *,
        namespace: str,
        fingerprint: str,
        layout: KVLayout,
        turn: FairLock,
        max_bytes: int = 2 << 30,
    ) -> None:
        self._store, self._turn = store, turn
        self._namespace, self._fingerprint, self._layout = namespace, fingerprint, layout
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cachecraft-births")
        self._guard = threading.Lock()
        self._pending: dict[str, Future[None]] = {}
        self._max_bytes, self._waiting_bytes = max_bytes, 0

    def submit(self, recorder: BirthRecorder, keys: Tensor, context: BirthContext) -> None:
        """Queue what a pass recorded; returns at once.

        It is dropped, which is no concern of its answer, after `close` and where births come faster than they are
        stored.

        Args:
            keys: `[layers, keys, kv_heads, head_dim]`, the pass's rotated keys; must not change below the births' ends.
        """
        for birth in recorder.births:
            key = self._key(birth, context)
            private = any(segment.private for segment in context.segments[: birth.segment + 1])
            if private and context.session is None:  # nobody could ever be served this
                continue
            session = context.session if private else None
            nbytes = birth.nbytes
            with self._guard:
                if self._waiting_bytes > self._max_bytes:
                    logger.warning("births are dropped: %d MB of them wait already", self._waiting_bytes // 10**6)
                    return
                try:
                    job = self._worker.submit(
                        self._store_birth, birth, recorder, keys, context=context, key=key, session=session
                    )
                except RuntimeError:  # how an executor says that it, or the interpreter, is shutting down
                    logger.info("the births of an answer that outlived its engine are dropped")
                    return
                self._pending[key.chunk_id] = job
                self._waiting_bytes += nbytes
            job.add_done_callback(partial(self._forget, key.chunk_id, nbytes))

    def wait_for(self, segment_ids: Iterable[str]) -> None:
        """Block until none of these segments is being born any more."""
        with self._guard:
            jobs = [self._pending[name] for name in segment_ids if name in self._pending]
        wait(jobs)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._worker.shutdown(wait=True)

    def _forget(self, chunk_id: str, nbytes: int, job: Future[None]) -> None:
        with self._guard:
            self._waiting_bytes -= nbytes
            if self._pending.get(chunk_id) is job:
                del self._pending[chunk_id]
        if (error := job.exception()) is not None:  # nobody waits for a birth, and a mistake must not go unheard
            logger.error("the birth of chunk %s failed and is not stored", chunk_id, exc_info=error)

    def _key(self, birth: RecordedBirth, context: BirthContext) -> VariantKey:
        prefix = tuple(segment.segment_id for segment in context.segments[: birth.segment])
        return VariantKey(self._namespace, self._fingerprint, context.segments[birth.segment].segment_id, prefix)

    def _store_birth(
        self,
        birth: RecordedBirth,
        recorder: BirthRecorder,
        keys: Tensor,
        *,
        context: BirthContext,
        key: VariantKey,
        session: str | None,
    ) -> None:
        describer = BirthDescriber(birth, recorder.settings, bounds=context.bounds, sink_tokens=context.sink_tokens)
        for layer in range(self._layout.layers):
            with self._turn.take():
                describer.add_layer(layer, keys[layer])
        found = describer.statistics()
        stored = self._store.put(
            Birth(
                key=key,
                layout=self._layout,
                tokens_digest=context.segments[birth.segment].tokens_digest,
                kv=birth.kv.cpu(),
                token_scores=found.token_scores,
                inter=found.inter,
                intra=found.intra,
                cci=found.cci,
                exact_share=context.exact_shares[birth.segment],
                session=session,
                primed=context.primed,
            )
        )
        stored.result()
