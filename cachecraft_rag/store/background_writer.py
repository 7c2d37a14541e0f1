"""Background work of a store: captures and copies are written, uses counted, damaged variants discarded."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from cachecraft_rag.errors import StoreError, says_no_memory
from cachecraft_rag.store.catalog_records import FileRef
from cachecraft_rag.store.durable import DurableVariants, too_large
from cachecraft_rag.store.eviction import Use
from cachecraft_rag.store.layout import Encoded, encode
from cachecraft_rag.store.memory import Memory
from cachecraft_rag.store.remote import RemoteTier
from cachecraft_rag.store.row_checks import row_error, scores_are_wrong
from cachecraft_rag.store.serial_worker import SerialWorker, WorkerEndedError
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.store_reasons import CaptureDrop, Unavailable
from cachecraft_rag.types.variants import Variant, VariantKey

logger = logging.getLogger("cachecraft_rag.store")
T = TypeVar("T")


class BackgroundWriter:
    """Thread that changes the catalog and the disk, and hands captures to the remote, one job after the other.

    Any thread may call any method. Only `shut_down` waits, and `write_uses`, which writes in the caller's thread. If
    the system has no room for a thread, the jobs run in the caller's thread. A capture that cannot be written is
    dropped, and the reason is counted.

    Args:
        queue_bytes: most bytes of waiting captures and copies; further ones are dropped.
        codec: name of the codec for captures; those without an origin prefix are always raw.
        warn_once: called with the kind of a problem, a message and, if any, the fields of a structured log.
    """

    def __init__(
        self,
        durable: DurableVariants,
        memory: Memory,
        remote: RemoteTier | None,
        *,
        queue_bytes: int,
        codec: str,
        warn_once: Callable[..., None],
    ) -> None:
        self._durable = durable
        self._memory = memory
        self._remote = remote
        self._queue_bytes = queue_bytes
        self._codec = codec
        self._warn_once = warn_once
        self._lock = threading.Lock()  # guards the fields below; held for moments only
        self._closed = False
        self._last_created = 0.0
        self._uses: dict[str, Use] = {}
        self._uses_scheduled = False
        self._tickets = itertools.count()
        self._queued: dict[int, int] = {}  # ticket → bytes; a ticket may be returned twice
        self._captures: Counter[str] = Counter()
        # One thread: captures are written in order, and SQLite allows only one writer.
        self._thread = SerialWorker("cachecraft-store-writer")
        weakref.finalize(self, self._thread.end).atexit = False

    def put(self, capture: Capture) -> Future[Variant | Unavailable]:
        """Queue a capture; return a future of the stored variant, or of the reason why the capture is dropped.

        Main memory holds the tensor at once, if it fits there; a capture that is dropped leaves memory too. A shared
        capture that was queued and encoded is also sent to the remote, even if it cannot be stored here (say, because
        the disk is full), unless the catalog says that a chunk was removed, or cannot be read.

        A drop is counted and logged; `CaptureDrop` lists the reasons. For a wrong `kv`, raises what `variant_of` does.
        """
        variant = self._variant_of(capture)
        ticket = next(self._tickets)
        try:
            with self._lock:
                refusal = self._refusal(capture, variant)
                if refusal is None:
                    self._queued[ticket] = variant.nbytes
            if refusal is None:
                self._memory.hold(variant, capture.kv)
                stored = partial(self._done, variant, ticket)
                future = self.submit(partial(self._store, variant, capture), ended=stored)
                self._evict_by_rules()
                if future is not None:
                    return future
                self._done(variant, ticket)
        # after Ctrl-C the job may never run, and would count towards the queue forever
        except BaseException:
            self._done(variant, ticket)
            raise
        refused: Future[Variant | Unavailable] = Future()
        refused.set_result(self._drop(variant, refusal or _closed(variant)))
        return refused

    def keep_copy(self, variant: Variant, encoded: Encoded) -> None:
        """Write a variant from the remote to the local disk in the background, with its token scores if they are known.

        Dropped silently if the queue has no room or the file exists; a failed write is logged, but not counted.
        """
        ticket = next(self._tickets)
        with self._lock:
            if self._closed or self._queued_bytes() + variant.nbytes > self._queue_bytes:
                return
            self._queued[ticket] = variant.nbytes
        try:
            written = partial(self._write_copy, variant, encoded)
            future = self.submit(written, ended=lambda _: self._done(variant, ticket))
        except BaseException:  # Ctrl-C too: the job may never run
            self._done(variant, ticket)
            raise
        if future is None:
            self._done(variant, ticket)

    def record_use(self, variant_id: str, use: Use) -> None:
        """Add a use in the catalog, in batches in the background; after `shut_down` only `write_uses` writes them."""
        is_due = False
        try:
            with self._lock:
                self._uses[variant_id] = (
                    self._uses[variant_id] + use if variant_id in self._uses else use
                )
                is_due = not self._uses_scheduled
                self._uses_scheduled = True
            if is_due:
                self.submit(self.write_uses)
                self._evict_by_rules()
        except BaseException:  # Ctrl-C: the next use tries again
            if is_due:
                self._uses_scheduled = False
            raise

    def discard(self, file: FileRef, chunk_id: str, reason: str) -> None:
        """Remove the row and the file of a variant that can never be served, in the background, with a warning."""
        self.submit(partial(self._discard, file, chunk_id, reason))

    def _evict_by_rules(self) -> None:
        if self._durable.rules_are_due():
            self.submit(self._apply_rules)

    def _apply_rules(self) -> None:
        try:
            self._durable.apply_rules()
        except StoreError as error:
            self._warn_once("rules", f"Eviction rules are applied later: {error}")

    def submit(
        self, job: Callable[[], T], *, ended: Callable[[Future[T]], object] | None = None
    ) -> Future[T] | None:
        """Submit a job to the thread; return the future of its result, or None after `shut_down`: the job is dropped.

        At the interpreter's exit the thread accepts no more jobs: then the job runs in the caller's thread, and its
        exception passes. Otherwise an exception is logged, and the future holds it. `ended` gets the future once it is
        done or cancelled; it is not called for a job that is dropped, or whose exception passes.
        """

        def has_ended(future: Future[T]) -> None:
            log_mistake(future)
            if ended is not None:
                ended(future)

        try:
            return self._thread.submit(job, ended=has_ended)
        except WorkerEndedError:
            if self._closed:
                return None
            future: Future[T] = Future()
            future.set_result(job())
            has_ended(future)
            return future

    def shut_down(self) -> None:
        """Refuse new jobs, and wait without limit for the others; a second call does nothing."""
        with self._lock:
            self._closed = True
        self._thread.shut_down()

    def write_uses(self) -> None:
        """Write, in the caller's thread, the recorded uses; after a failure, which is logged, the next call does.

        A store that is read-only or has lost its folder forgets them.
        """
        with self._lock:
            uses = self._uses
            self._uses = {}
            self._uses_scheduled = False
        if self._durable.read_only or self._durable.gone():
            return
        try:
            self._durable.catalog.record_uses(uses)
        except StoreError as error:
            self._warn_once("used", f"Uses are written down later: {error}")
            with self._lock:  # the next use tries again
                for variant_id, use in uses.items():
                    self._uses[variant_id] = (
                        use + self._uses[variant_id] if variant_id in self._uses else use
                    )

    def counts(self) -> tuple[int, dict[str, int]]:
        """Return the bytes of the waiting tensors, and outcome ("stored" or a `CaptureDrop`) → number of captures."""
        with self._lock:
            return self._queued_bytes(), dict(self._captures)

    def _queued_bytes(self) -> int:
        return sum(self._queued.values())

    def count_drop(self, chunk_id: str, code: CaptureDrop, reason: str) -> None:
        """Count a capture that is not stored, and log it with `warn_once`, once per `code` as a warning."""
        with self._lock:
            self._captures[code] += 1
        fields = {"event": "capture_dropped", "chunk_id": chunk_id, "reason": code}
        self._warn_once(code, f"Chunk-cache of chunk {chunk_id} is not stored: {reason}", fields)

    def _store(self, variant: Variant, capture: Capture) -> Variant | Unavailable:
        """Write one capture. An error of the disk or the catalog becomes a dropped capture."""
        try:
            encoded = encode(variant, capture.layout, capture.kv)
        except ValueError as error:  # a lossy codec cannot encode these values
            why = f"it cannot be encoded: {error}"
            return self._drop(
                variant, Unavailable(variant.variant_id, CaptureDrop.NOT_ENCODABLE, why)
            )
        except (MemoryError, RuntimeError) as error:
            if not says_no_memory(error):
                raise
            why = f"there is not enough memory to encode it: {error}"
            return self._drop(variant, Unavailable(variant.variant_id, CaptureDrop.FAILED, why))
        # A chunk that was removed here may still be on a remote, which counts as stored.
        extra_variant = capture.extra_variant and self._remote is None
        refused = self._written(
            variant,
            encoded,
            capture.token_scores,
            extra_variant=extra_variant,
            sources=capture.sources,
        )
        if refused is not None:
            self._drop(variant, refused)
        else:
            if capture.mark is not None:
                self._mark(capture.key, capture.mark)
            with self._lock:
                self._captures["stored"] += 1
        # Shared captures are sent to the remote even if the disk has no room for them.
        if self._remote is not None and capture.session is None:
            is_withheld = refused is not None and self._may_be_removed(variant, capture.sources)
            if not is_withheld:
                self._remote.put(variant, encoded, capture.token_scores)
        return refused or variant

    def _may_be_removed(self, variant: Variant, sources: Sequence[Variant]) -> bool:
        """Return True if a chunk that the variant holds, or was shaped by, was removed, or if this is unknown."""
        try:
            return self._durable.gone() or self._durable.catalog.refuses(variant, sources)
        except StoreError as error:
            self._warn_once("removals", f"A chunk-cache is not sent to the remote: {error}")
            return True

    def _mark(self, key: VariantKey, mark: tuple[int, int]) -> None:
        try:
            self._durable.catalog.texts.mark(key.namespace, key.fingerprint, key.chunk_id, mark)
        # its text cannot be recognised in prompts, but documents still use it
        except StoreError as error:
            self._warn_once("mark", f"A text cannot be marked: {error}")

    def _written(
        self,
        variant: Variant,
        encoded: Encoded,
        scores: TokenScores,
        *,
        extra_variant: bool = False,
        sources: Sequence[Variant] = (),
    ) -> Unavailable | None:
        """Write a variant; return None, or the reason why it cannot be written."""
        try:
            return self._durable.write(
                variant, encoded, scores, extra_variant=extra_variant, sources=sources
            )
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return Unavailable(
                    variant.variant_id, CaptureDrop.DISK_FULL, f"the disk is full: {error}"
                )
            return Unavailable(
                variant.variant_id, CaptureDrop.FILE_ERROR, f"its file cannot be written: {error}"
            )
        except StoreError as error:
            why = f"the catalog cannot be written: {error}"
            return Unavailable(variant.variant_id, CaptureDrop.CATALOG_ERROR, why)

    def _write_copy(self, variant: Variant, encoded: Encoded) -> None:
        scores = self._remote.token_scores([variant.variant_id]) if self._remote is not None else {}
        try:
            if self._durable.catalog.holds(
                FileRef(variant.variant_id, variant.created), or_at_risk=True
            ):
                return  # another request or process has fetched it too
        except StoreError:  # writing it reports the reason
            pass
        # what has shaped it is known to the engine that sent it
        sources = (replace(variant, home="remote"),)
        known = scores.get(variant.variant_id, TokenScores())
        refused = self._written(variant, encoded, known, sources=sources)
        if refused is not None:
            self._warn_once(
                refused.code, f"A chunk-cache from the remote is not kept on disk: {refused.reason}"
            )

    def _done(
        self, variant: Variant, ticket: int, future: Future[Variant | Unavailable] | None = None
    ) -> None:
        with self._lock:
            self._queued.pop(ticket, None)
        if future is not None and future.cancelled():
            self._drop(
                variant,
                Unavailable(variant.variant_id, CaptureDrop.CANCELLED, "cancelled by the caller"),
            )

    def _discard(self, file: FileRef, chunk_id: str, reason: str) -> None:
        try:
            self._durable.discard(file, chunk_id, reason)
        except StoreError as error:
            self._warn_once("discard", f"A damaged chunk-cache stays in the catalog: {error}")

    def _variant_of(self, capture: Capture) -> Variant:
        # `created` names the file, so no two captures of this process may share it
        with self._lock:
            created = self._last_created = max(time.time(), self._last_created + 1e-6)
        # All chunks are computed after the instruction, and would inherit the errors of a lossy codec.
        codec = self._codec if capture.key.origin_prefix else "raw"
        return variant_of(capture, codec=codec, created=created)

    def _refusal(self, capture: Capture, variant: Variant) -> Unavailable | None:
        """Return the reason why a capture cannot be queued, or None. The caller holds the lock."""
        if self._closed:
            return _closed(variant)
        limits = self._durable.limits
        # other codecs: once the size is known
        if variant.codec == "raw" and variant.nbytes > limits.disk_bytes:
            return too_large(variant, variant.nbytes, limits)
        queued_bytes = self._queued_bytes()
        if queued_bytes + variant.nbytes > self._queue_bytes:
            why = f"too many captures are waiting: {queued_bytes} bytes; a larger queue_bytes would hold more"
            return Unavailable(variant.variant_id, CaptureDrop.QUEUE_FULL, why)
        flaw = row_error(variant)  # a look-up would refuse its row
        if scores_are_wrong(capture.token_scores, variant.tokens):
            flaw = "its token scores do not fit its tokens"
        return Unavailable(variant.variant_id, CaptureDrop.FLAWED, flaw) if flaw else None

    def _drop(self, variant: Variant, why: Unavailable) -> Unavailable:
        self._memory.remove(variant.variant_id, variant.created)
        self.count_drop(variant.key.chunk_id, CaptureDrop(why.code), why.reason)
        return why


def _closed(variant: Variant) -> Unavailable:
    return Unavailable(variant.variant_id, CaptureDrop.CLOSED, "the store is closed")


def log_mistake(future: Future[T]) -> None:
    """Log the exception, if any, of a background job that is done: a bug, and maybe no caller looks at the future."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("A background job failed", exc_info=error)


def variant_of(capture: Capture, *, codec: str, created: float) -> Variant:
    """Return the variant that the catalog will list, without any use, and with `inter` rounded to float32.

    Raises StoreError unless `capture.kv` has the layout and at least one token, and is contiguous and on the CPU.
    """
    kv = capture.kv
    layout = capture.layout
    tokens = kv.shape[2] if kv.dim() == 5 else 0
    dtype = str(kv.dtype).removeprefix("torch.")
    wrong = tuple(kv.shape) != layout.shape(tokens) or dtype != layout.dtype or kv.numel() == 0
    if wrong or not kv.is_contiguous() or kv.device.type != "cpu":
        raise StoreError(
            f"A capture needs a contiguous CPU tensor {list(layout.shape(tokens))} {layout.dtype} with at least one "
            f"token, not {list(kv.shape)} {dtype} on {kv.device}. Call .contiguous().cpu() and check the layout."
        )
    return Variant(
        key=capture.key,
        variant_id=capture.key.variant_id_in(capture.session),
        tokens=tokens,
        tokens_digest=capture.tokens_digest,
        inter=tuple(array("f", capture.inter)),  # in the precision of the catalog
        intra=float(capture.intra),
        cci=float(capture.cci),
        exact_share=float(capture.exact_share),
        session=capture.session,
        codec=codec,
        nbytes=layout.nbytes(tokens),
        reuse_frequency=0.0,
        created=created,
        primed=capture.primed,
    )
