"""`ChunkCacheStore`: memory before disk, writing in the background, and numbers about both."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from cachecraft_rag.checks import (
    MOST_SECONDS,
    check_kind,
    check_names,
    check_number,
    check_path,
    check_text,
    check_whole,
)
from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.store.catalog import FileRef, Limits, Listed, RowFilter, Totals
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.config import DEFAULT_LIMITS, StoreConfig, StoreStats
from cachecraft_rag.store.durable import GONE, READ_ONLY, CheckReport, DurableVariants, Evicted
from cachecraft_rag.store.eviction import reuse_gain
from cachecraft_rag.store.expected import Expected, Found
from cachecraft_rag.store.finder import Finder
from cachecraft_rag.store.layout import READ_ERRORS, Encoded, StoredVariant, encode, open_source, unreadable
from cachecraft_rag.store.memory import Memory
from cachecraft_rag.store.new_variant import flaw_of, variant_of
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.store.remote import RemoteConfig, RemoteStream, RemoteTier
from cachecraft_rag.store.throttle import Throttle
from cachecraft_rag.types import Capture, Damaged, LoadedVariant, Progress, TokenScores, Unavailable, Variant

logger = logging.getLogger("cachecraft_rag.store")
T = TypeVar("T")


class ChunkCacheStore(Closeable):
    """Chunk-caches by identity. Every method may be called from any thread; several processes may share one folder."""

    def __init__(self, root: Path, config: StoreConfig) -> None:
        """Use `open`."""
        self.root = root
        self._home = HomeProcess("chunk-cache store")
        self._memory = Memory(config.host_bytes, device=config.device, device_bytes=config.device_bytes)
        self._durable = DurableVariants(
            root,
            limits=config.told_limits,
            defaults=Limits(**DEFAULT_LIMITS),
            busy_timeout_s=config.busy_timeout_s,
            on_removed=self._memory.remove,
            throttle=Throttle(config.read_bytes_per_s),
        )
        self.throttle = self._durable.disk.throttle
        self.config, self.limits = replace(config, **asdict(self._durable.limits)), self._durable.limits
        self._asked = threading.local()
        self._lock = threading.Lock()  # guards the fields below; held for moments only
        self._closed = False
        self._queued_bytes = 0
        self._last_created = 0.0
        self._gains: dict[str, float] = {}
        self._gains_scheduled = False
        self._warned: set[str] = set()
        self._lookups: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._captures: Counter[str] = Counter()
        # One thread: captures are written in order, and SQLite has one writer anyhow. At the end of the interpreter the
        # executor's own exit handler waits for it, so a program that forgets `close` still stores what it put.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cachecraft-store-writer")
        self._readers = ThreadPoolExecutor(config.readers, thread_name_prefix="cachecraft-store-reader")
        try:
            self._remote = RemoteTier(config.remote) if isinstance(config.remote, RemoteConfig) else None
        except ConfigError:
            self._durable.close()
            raise
        self._finder = Finder(self._durable, self._remote, discard=self._discard_soon, warn=self._warn_once)
        if self._durable.read_only:
            self._warn_once(READ_ONLY, f"{root} cannot be written: what it holds is reused, and nothing is added to it")

    @classmethod
    def open(cls, root: str | Path, config: StoreConfig | None = None, **settings: Any) -> Self:
        """Open or create the store in the folder `root`; `settings` go before the same fields of `config`.

        Raises StoreError when the folder or its catalog cannot be used, ConfigError for an unknown or impossible
        setting.
        """
        check_path("root", root)
        check_kind("config", config, StoreConfig, optional=True)
        check_names(settings, StoreConfig.__dataclass_fields__, what="store setting")
        return cls(Path(root), replace(config or StoreConfig(), **settings))

    # -- the request's path -------------------------------------------------------------------------------------------

    def lookup(
        self, namespace: str, fingerprint: str, chunk_ids: Sequence[str], *, session: str | None = None
    ) -> dict[str, list[Variant]]:
        """The variants of each chunk: shared ones and those private to exactly this session. One query, no tensors.

        Every asked chunk id is a key. The remote is asked for chunks of which too little is here, and waited for no
        longer than its look-up may take. A catalog that cannot be read gives empty lists and one warning: the answer
        then computes everything, which is better than no answer. Raises StoreError only after `close`.
        """
        return self.find(namespace, fingerprint, chunk_ids, session=session).variants

    def find(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None = None,
        expected: Expected | None = None,
    ) -> Found:
        """As `lookup`, and why what is stored of a chunk is refused. With `expected`, nothing is given that cannot be
        of this model and these chunks; such a row leaves the catalog, or the remote. Raises StoreError only after
        `close`.
        """
        self._check_open()
        check_text("namespace", namespace)
        check_text("session", session, optional=True)
        found = self._finder.find(
            namespace, fingerprint, list(chunk_ids), session=session, expected=expected, gone=self._gone()
        )
        with self._lock:
            self._lookups.update(found.outcomes())
        return found

    def token_scores(self, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        """What is known of the tokens of each variant, by variant id; every asked id is a key."""
        self._check_open()
        try:
            found = {} if self._gone() else self._durable.catalog.token_scores(variant_ids)
        except StoreError as error:
            self._warn_once("token_scores", f"Token scores cannot be read: {error}")
            found = {}
        found = {variant_id: found.get(variant_id, TokenScores()) for variant_id in variant_ids}
        if self._remote is not None:
            unknown = [name for name, scores in found.items() if scores.inter is None and scores.received is None]
            found |= self._remote.token_scores(unknown)
        return found

    def open_variants(self, variants: Sequence[Variant]) -> list[LoadedVariant | StoredVariant | Unavailable]:
        """`open_variant` for each, in the same order; what comes from the remote comes at the same time."""
        self._check_open()
        variants = list(variants)
        far = [variant for variant in variants if variant.home == "remote" and self._memory.read(variant) is None]
        there = far if self._remote is not None else []
        streams = {v.variant_id: self._remote.open(v) for v in there} if self._remote else {}
        return [self.open_variant(variant, streams.get(variant.variant_id)) for variant in variants]

    def open_variant(
        self, variant: Variant, stream: RemoteStream | Unavailable | None = None
    ) -> LoadedVariant | StoredVariant | Unavailable:
        """The tensor if memory has it; else the stored variant, opened to be read; or why it cannot be served.

        What was opened must be handed back: to `keep`, or to `lost`. A variant whose file is missing or damaged leaves
        the catalog, in the background. Raises StoreError only after `close`.

        Args:
            stream: its payload, where it is on its way from the remote already.
        """
        self._check_open()
        ours = variant.variant_id == variant.key.variant_id  # memory knows it by its id alone; a file says what it is
        if ours and (held := self._memory.read(variant)) is not None:
            if isinstance(stream, RemoteStream):
                stream.close()
            self._count_load(held.tier)
            if self._memory.device.budget_bytes:
                self.read_in_background(partial(self._memory.promote, held, variant))
            return held
        stored: StoredVariant | Unavailable
        if variant.home == "disk":
            stored = self._durable.disk.open(variant)
        elif self._remote is None:
            stored = Unavailable(variant.variant_id, "it is on a remote, and this store has none")
        else:
            stream = stream or self._remote.open(variant)
            stored = stream if isinstance(stream, Unavailable) else open_source(stream, variant)
        if isinstance(stored, StoredVariant):
            try:
                stored.allocate(pinned=self._memory.pinned)
                return stored
            except MemoryError as error:
                stored.close()
                stored = unreadable(variant.variant_id, error)
        self.lost(variant, stored)
        return stored

    def keep(self, stored: StoredVariant, *, whole: bool = True) -> None:
        """Take note of a load; `whole`: all of it was read, and memory keeps it, and the disk what was remote."""
        stored.close()
        self._count_load(stored.tier)
        if whole:
            self._memory.host.add(stored.variant, stored.kv)
            if isinstance(stored.source, RemoteStream) and (encoded := stored.source.encoded()) is not None:
                self._keep_copy(replace(stored.variant, home="disk"), encoded)

    def lost(self, variant: Variant, why: Unavailable) -> None:
        """Take note that a variant could not be had; what is missing or damaged leaves the catalog, or the remote."""
        remote = self._remote if variant.home == "remote" else None
        self._count_load(_kind(why.reason) + (" (remote)" if remote else ""))
        if isinstance(why, Damaged):
            if remote is not None:
                remote.remove(variant)
            else:
                self._discard_soon(FileRef(variant.variant_id, variant.created), variant.key.chunk_id, why.reason)

    def load(self, variant: Variant) -> LoadedVariant | Unavailable:
        """The whole tensor, from memory or else from disk or remote (see `keep`); or why it cannot be served."""
        stored = self.open_variant(variant)
        if not isinstance(stored, StoredVariant):
            return stored
        try:
            kv = stored.read_all()
        except READ_ERRORS as error:
            stored.close()
            why = unreadable(variant.variant_id, error)
            self.lost(variant, why)
            return why
        self.keep(stored)
        return LoadedVariant(variant.variant_id, kv, stored.tier)

    def read_in_background(self, job: Callable[[], None]) -> bool:
        """Run a job on one of the threads that read; False, and it is dropped, after `close`."""
        self._home.require()
        try:
            self._readers.submit(job).add_done_callback(_log_mistake)
        except RuntimeError:  # how an executor says that it is shutting down
            return False
        return True

    def put(self, capture: Capture) -> Future[Variant | Unavailable]:
        """Store a chunk-cache in the background; the caller never waits and must not write to `capture.kv` any more.

        Memory has the tensor at once, but `lookup` shows the variant only when its row is committed. The future gives
        the stored variant, or the reason why the capture was dropped (also logged). A capture of the same identity replaces
        the older one in one step. Raises StoreError when the tensor is not what its layout says: that is a mistake in
        the caller.
        """
        self._home.require()
        check_kind("capture", capture, Capture)
        variant = self._variant_of(capture)
        with self._lock:
            reason = self._refusal(capture, variant)
            if not reason:
                self._queued_bytes += variant.nbytes
        future = None
        if not reason:
            self._memory.host.add(variant, capture.kv)
            future = self._in_background(partial(self._store, variant, capture))
            if future is not None:
                future.add_done_callback(partial(self._after_put, variant))
            else:
                self._after_put(variant)
        if future is None:
            future = Future()
            future.set_result(self._drop(variant, reason or "the store is closed"))
        return future

    def used(self, variant_id: str, cfo: float, tokens: int) -> None:
        """Record a use: f_r grows by `eviction.reuse_gain`. Written in the background, in batches."""
        self._home.require()
        # Clipped as CFO is by definition; written so that NaN counts as the dearest use: SQLite would refuse it.
        gain = reuse_gain(cfo if cfo <= 1.0 else 1.0, tokens)
        self._memory.raise_frequency(variant_id, gain)
        if self._remote is not None:
            self._remote.raise_frequency(variant_id, gain)
        with self._lock:
            self._gains[variant_id] = self._gains.get(variant_id, 0.0) + gain
            due, self._gains_scheduled = not self._gains_scheduled, True
        if due:
            self._in_background(self._write_gains)

    # -- administration -----------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Sizes, budgets and counts; a remote is asked too. Raises StoreError when the catalog cannot be read.

        Of a folder that is gone nothing is left; the counts of this process go on.
        """
        self._home.require()
        totals = Totals(0, 0, 0, 0) if self._gone() else self._durable.catalog.totals()
        remote = self._remote.stats() if self._remote is not None else None
        with self._lock:
            return StoreStats(
                variants=totals.variants,
                chunks=totals.chunks,
                disk_bytes=totals.file_bytes + totals.reserved_bytes,
                disk_budget=self.limits.disk_bytes,
                host_bytes=self._memory.host.used_bytes,
                host_budget=self.config.host_bytes,
                device_bytes=self._memory.device.used_bytes,
                device_budget=self._memory.device.budget_bytes,
                queued_bytes=self._queued_bytes,
                lookups=dict(self._lookups),
                loads=dict(self._loads),
                captures=dict(self._captures),
                remote=remote,
            )

    def rows(self, chosen: RowFilter | None = None, *, offset: int = 0, limit: int = 100) -> list[Listed]:
        """A page of what is stored, private variants included, the most worthy first. Raises StoreError."""
        check_kind("chosen", chosen, RowFilter, optional=True)
        check_whole("offset", offset)
        check_whole("limit", limit, least=1)
        self._require_folder()
        return self._durable.catalog.rows(chosen or RowFilter(), offset=offset, limit=limit)

    def evict(self, chosen: RowFilter | None = None, *, down_to_bytes: int | None = None) -> Evicted:
        """Remove the chosen variants, least worthy first; all, or until all files together have `down_to_bytes`.

        Raises ConfigError when neither says what to remove, StoreError when the catalog cannot be written.
        """
        check_kind("chosen", chosen, RowFilter, optional=True)
        check_whole("down_to_bytes", down_to_bytes, optional=True)
        self._require_folder()
        chosen = chosen or RowFilter()
        if chosen == RowFilter() and down_to_bytes is None:
            raise ConfigError("evict needs a filter or down_to_bytes; down_to_bytes=0 removes everything.")
        catalog = self._durable.catalog
        return self._durable.evict(lambda writer: catalog.evict(chosen, writer=writer, down_to_bytes=down_to_bytes))

    def check(self, *, repair: bool = False, progress: Callable[[Progress], None] | None = None) -> CheckReport:
        """Compare rows and files, read every byte, and report what is wrong; with `repair` put it right.

        Safe while other processes read and write: what a living writer is busy with is left alone. `progress` is told
        after each row. Raises StoreError when the catalog or the folder cannot be read.
        """
        self._require_folder()
        try:
            return self._durable.check(repair=repair, progress=progress)
        except OSError as error:
            raise StoreError(
                f"{self.root} cannot be read ({error}). Check the disk and the folder's permissions."
            ) from error

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything put or used so far is written, and sent to the remote or given up there.

        False when that takes longer than `timeout` seconds.
        """
        self._home.require()
        check_number("timeout", timeout, most=MOST_SECONDS, optional=True)
        done, until = threading.Event(), None if timeout is None else time.monotonic() + timeout
        written = self._in_background(done.set) is None or done.wait(timeout)
        left = None if until is None else max(0.0, until - time.monotonic())
        return written and (self._remote is None or self._remote.flush(left))

    def close(self) -> None:
        """Write what is waiting, then let go of everything; a remote gets `close_timeout_s`. May be called twice."""
        if not self._home.here:  # a fork of its process: nothing waits here, and its files are that one's
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._writer.shutdown()
        self._readers.shutdown()
        if self._remote is not None:
            self._remote.close()
        self._write_gains()
        self._durable.close()

    # -- in the background --------------------------------------------------------------------------------------------

    def _in_background(self, job: Callable[[], T]) -> Future[T] | None:
        """Hand a job to the writer thread; None when the store is closed.

        At the end of the interpreter no thread takes jobs any more, but an engine nobody closed still hands over what
        it bore: that is then done by the caller itself.
        """
        try:
            future = self._writer.submit(job)
        except RuntimeError:  # how an executor says that it, or the interpreter, is shutting down
            if self._closed:
                return None
            future = Future()
            future.set_result(job())
        future.add_done_callback(_log_mistake)
        return future

    def _store(self, variant: Variant, capture: Capture) -> Variant | Unavailable:
        """Write one capture. Whatever the disk or the catalog objects to becomes a dropped capture."""
        try:
            encoded = encode(variant, capture.layout, capture.kv)
        except ValueError as error:  # a lossy codec and values that it cannot take
            return self._drop(variant, f"it cannot be encoded: {error}")
        stored = self._write(variant, capture, encoded)
        if self._remote is not None and capture.session is None:  # also what the disk has no room for
            self._remote.put(variant, encoded, capture.token_scores)
        return stored

    def _write(self, variant: Variant, capture: Capture, encoded: Encoded) -> Variant | Unavailable:
        try:
            reason = self._durable.write(variant, encoded, capture.token_scores)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            reason = f"{'the disk is full' if full else 'its file cannot be written'}: {error}"
        except StoreError as error:
            reason = f"the catalog cannot be written: {error}"
        if reason:
            return self._drop(variant, reason)
        with self._lock:
            self._captures["stored"] += 1
        return variant

    # -- the remote ---------------------------------------------------------------------------------------------------

    def _keep_copy(self, variant: Variant, encoded: Encoded) -> None:
        """Write what came from the remote to the local disk, in the background, if the queue has room."""
        with self._lock:
            if self._closed or self._queued_bytes + variant.nbytes > self.config.queue_bytes:
                return
            self._queued_bytes += variant.nbytes
        future = self._in_background(partial(self._write_copy, variant, encoded))
        if future is None:
            self._after_put(variant)
        else:
            future.add_done_callback(lambda _: self._after_put(variant))

    def _write_copy(self, variant: Variant, encoded: Encoded) -> None:
        scores = self._remote.token_scores([variant.variant_id]) if self._remote is not None else {}
        try:
            if self._durable.catalog.holds(FileRef(variant.variant_id, variant.created), or_at_risk=True):
                return  # another request, or a process on the same folder, fetched it too
            reason = self._durable.write(variant, encoded, scores.get(variant.variant_id, TokenScores()))
        except (OSError, StoreError) as error:
            reason = str(error)
        if reason:
            self._warn_once(_kind(reason), f"A chunk-cache from the remote is not kept on disk: {reason}")

    # -- small parts --------------------------------------------------------------------------------------------------

    def _after_put(self, variant: Variant, future: Future[Variant | Unavailable] | None = None) -> None:
        with self._lock:
            self._queued_bytes -= variant.nbytes
        if future is not None and future.cancelled():
            self._drop(variant, "cancelled by the caller")

    def _discard_soon(self, file: FileRef, chunk_id: str, reason: str) -> None:
        self._in_background(partial(self._discard, file, chunk_id, reason))

    def _discard(self, file: FileRef, chunk_id: str, reason: str) -> None:
        try:
            self._durable.discard(file, chunk_id, reason)
        except StoreError as error:
            self._warn_once("discard", f"A damaged chunk-cache stays in the catalog: {error}")

    def _write_gains(self) -> None:
        with self._lock:
            gains, self._gains, self._gains_scheduled = self._gains, {}, False
        if self._durable.read_only or self._durable.gone():
            return
        try:
            self._durable.catalog.raise_frequencies(gains)
        except StoreError as error:
            self._warn_once("used", f"Uses are written down later: {error}")
            with self._lock:  # the next use tries again
                for variant_id, gain in gains.items():
                    self._gains[variant_id] = self._gains.get(variant_id, 0.0) + gain

    def _variant_of(self, capture: Capture) -> Variant:
        with self._lock:  # `created` names the file, so no two captures of this process may share it
            created = self._last_created = max(time.time(), self._last_created + 1e-6)
        return variant_of(capture, codec=self.config.codec, created=created)

    def _refusal(self, capture: Capture, variant: Variant) -> str:
        """Why a capture cannot even be queued, or ""; the caller holds the lock."""
        if self._closed:
            return "the store is closed"
        if variant.codec == "raw" and variant.nbytes > self.limits.disk_bytes:  # others: when its size is known
            return f"larger than the whole byte budget: {variant.nbytes} of {self.limits.disk_bytes} bytes"
        if self._queued_bytes + variant.nbytes > self.config.queue_bytes:
            return f"too many captures are waiting: {self._queued_bytes} bytes; a larger queue_bytes would hold more"
        return flaw_of(capture, variant)

    def _drop(self, variant: Variant, reason: str) -> Unavailable:
        self._memory.remove(variant.variant_id, variant.created)
        with self._lock:
            self._captures[_kind(reason)] += 1
        self._warn_once(_kind(reason), f"Chunk-cache of chunk {variant.key.chunk_id} is not stored: {reason}")
        return Unavailable(variant.variant_id, reason)

    def _warn_once(self, kind: str, message: str) -> None:
        """A warning for the first of its kind; the others at level INFO, because a full disk says so at every capture."""
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        logger.log(logging.WARNING if first else logging.INFO, "%s", message)

    def _count_load(self, outcome: str) -> None:
        with self._lock:
            self._loads[outcome] += 1

    def _gone(self) -> bool:
        """Whether the folder has vanished; says so once."""
        gone = self._durable.gone()
        if gone:
            self._warn_once(
                GONE,
                f"The folder {self.root} was deleted, or is out of reach: nothing of it is reused, and nothing is "
                "kept. Open the store again to go on with a new one",
            )
        return gone

    def _require_folder(self) -> None:
        """What an administrator asks of a folder that has vanished is an error."""
        self._home.require()
        if self._durable.gone():
            raise StoreError(f"The folder {self.root} was deleted, or is out of reach. Open the store again.")

    def _check_open(self) -> None:
        self._home.require()
        if self._closed:
            raise StoreError(f"The store {self.root} is closed. Open it again to use it.")


def _kind(reason: str) -> str:
    """The part of a reason that repeats, to count by."""
    return reason.partition(":")[0]


def _log_mistake(future: Future[T]) -> None:
    """Nobody may be waiting for the future, and a mistake in our own code must not go unheard."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("A background job of the store failed", exc_info=error)
