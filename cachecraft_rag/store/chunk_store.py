"""`ChunkCacheStore`: chunk-caches in memory, on disk and on a remote, written in the background."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cachecraft_rag.checks import (
    MOST_SECONDS,
    check_callable,
    check_kind,
    check_number,
    check_path,
    check_text,
    check_whole,
    listed,
)
from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.store.background_writer import BackgroundWriter, log_mistake
from cachecraft_rag.store.catalog.eviction_rules import EvictionRule
from cachecraft_rag.store.catalog.found_texts import MarkedText
from cachecraft_rag.store.catalog.variant_finder import VariantFinder
from cachecraft_rag.store.catalog_records import FileRef, Limits, Listed, RowFilter, Totals
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.config import DEFAULT_LIMITS, StoreConfig, StoreStats
from cachecraft_rag.store.durable import CheckReport, DurableVariants, Evicted, file_of
from cachecraft_rag.store.eviction import Use, policy_named
from cachecraft_rag.store.files.disk import Throttle
from cachecraft_rag.store.layout import READ_ERRORS, StoredVariant, open_source, unreadable
from cachecraft_rag.store.memory import Memory
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.store.remote import RemoteConfig, RemoteStats, RemoteStream, RemoteTier
from cachecraft_rag.store.row_checks import LookupResult, RowBounds
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.kv_layout import HeadShare
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.store_reasons import (
    CaptureDrop,
    Damaged,
    EvictionReason,
    LoadFailure,
    Unavailable,
)
from cachecraft_rag.types.variants import HeldChunk, LoadedVariant, TierName, Variant

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("cachecraft_rag.store")
T = TypeVar("T")


class ChunkCacheStore(Closeable):
    """Chunk-caches by identity. Every method may be called from any thread; several processes may share one folder.

    After `close` look-ups, loads and reads of the catalog raise StoreError, and captures are dropped. `namespace` is a
    tenant's, `fingerprint` a model's; `session` None means shared variants only. A problem that occurs again is logged
    as a warning the first time, later as info.
    """

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        rules: Sequence[EvictionRule] = (),
        share: HeadShare | None = None,
    ) -> None:
        """Use `open`."""
        self.root = root
        self._home = HomeProcess("chunk-cache store")
        self._memory = Memory(
            config.host_bytes,
            device=config.device,
            device_bytes=config.device_bytes,
            share=share,
        )
        self._durable = DurableVariants(
            root,
            limits=config.given_limits,
            defaults=Limits(**DEFAULT_LIMITS),
            busy_timeout_s=config.tuning.busy_timeout_s,
            on_removed=self._memory.remove,
            throttle=Throttle(config.tuning.read_bytes_per_s),
            policy=None if config.eviction is None else policy_named(config.eviction),
            rules=rules,
        )
        policy = self._durable.catalog.policy
        self._memory.follow(policy)
        self.throttle = self._durable.disk.throttle
        self.config = replace(config, **asdict(self._durable.limits))
        self.limits = self._durable.limits
        self.eviction = policy.name
        self._lock = threading.Lock()  # guards the fields below; held for moments only
        self._closed = False
        self._warned: set[str] = set()
        # Called with chunk ids and their tenant (None: all) before their chunk-caches are removed, so that no running
        # capture stores them again.
        self.before_removal: list[Callable[[Sequence[str], str | None], None]] = []
        self._lookups: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._load_failures: Counter[tuple[str, str]] = Counter()
        self._readers = ThreadPoolExecutor(
            config.tuning.readers, thread_name_prefix="cachecraft-store-reader"
        )
        self._remote = self._new_remote(config)
        self._writer = BackgroundWriter(
            self._durable,
            self._memory,
            self._remote,
            queue_bytes=config.tuning.queue_bytes,
            codec=config.codec,
            warn_once=self._warn_once,
        )
        self._finder = VariantFinder(
            self._durable.catalog,
            self._remote,
            is_usable=self._is_usable,
            discard=self._writer.discard,
            warn_once=self._warn_once,
        )
        self._warn_if_read_only(has_rules=bool(rules))

    def _warn_if_read_only(self, *, has_rules: bool) -> None:
        if self._durable.read_only:
            self._warn_once(
                CaptureDrop.READ_ONLY,
                f"{self.root} cannot be written: what it holds is reused, and nothing is added to it"
                + (", or evicted by the rules" if has_rules else ""),
            )

    def _new_remote(self, config: StoreConfig) -> RemoteTier | None:
        if not isinstance(config.remote, RemoteConfig):
            return None
        try:
            return RemoteTier(config.remote)
        except ConfigError:
            self._durable.close()
            raise

    @classmethod
    def open(
        cls,
        root: str | Path,
        config: StoreConfig | None = None,
        *,
        rules: Sequence[EvictionRule] = (),
        share: HeadShare | None = None,
        **settings: Any,
    ) -> Self:
        """Open or create the store in the folder `root`; `settings` override fields of `config`.

        Chunk-caches that one of the `rules` evicts leave now and while the store is used, see `catalog.eviction_rules`.
        With a `share`, loaded tensors and memory have the heads of one tensor-parallel rank only; files have all.

        Limits and a policy that are set are stored with the folder, and chunk-caches beyond `disk_bytes` and
        `max_variants` leave. A store of another version is moved to "set-aside"; a folder that cannot be written is
        opened `read_only`. Both log a warning.
        """
        check_path("root", root)
        check_kind("config", config, StoreConfig, optional=True)
        config = replace(config or StoreConfig(), **settings)
        check_kind("rules", rules, (list, tuple), advice="write rules=[rule]")
        for rule in rules:
            check_callable("each of rules", rule, optional=False)
        return cls(Path(root).absolute(), config, rules, share)

    @property
    def read_only(self) -> bool:
        """True if the store could not be written when it was opened: its contents are reused, and nothing changes."""
        return self._durable.read_only

    # -- the request's path -------------------------------------------------------------------------------------------

    def find(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None = None,
        bounds: RowBounds | None = None,
    ) -> LookupResult:
        """Return the variants of chunks, shared ones and those of `session`, and why rows were refused; no tensors.

        Every given chunk id is a key of the result's `variants`. Damaged rows are refused. With `bounds`, rows that do
        not fit the model or the chunks are refused too, and variants carry the model's layout. Refused rows are removed
        in the background, except rows of a remote that only this process cannot use (an unknown codec, another key).
        Chunks with fewer variants here than `RemoteTuning.ask_below` are looked up on the remote too, within its time
        limit. If the catalog cannot be read or the folder is gone, a warning is logged and nothing is found: the answer
        is then computed without reuse.
        """
        self._check_open()
        check_text("namespace", namespace)
        check_text("session", session, optional=True)
        lookup = self._finder.find(
            namespace, fingerprint, chunk_ids, session=session, bounds=bounds
        )
        with self._lock:
            self._lookups.update(lookup.outcomes())
        return lookup

    def held(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None = None,
    ) -> list[HeldChunk]:
        """Return what this store holds of each chunk, in the order given: shared variants and those of `session`.

        A remote is not asked, captures that are not written yet do not count, and the call is not counted as a look-up.
        If the catalog cannot be read, a warning is logged, and every chunk has 0 tokens. Damaged rows are removed.
        """
        self._check_open()
        check_text("namespace", namespace)
        check_text("session", session, optional=True)
        lookup = self._finder.find_here(namespace, fingerprint, chunk_ids, session=session)
        return [
            HeldChunk(
                chunk_id,
                tokens=max((variant.tokens for variant in lookup.variants[chunk_id]), default=0),
                in_memory=any(variant in self._memory for variant in lookup.variants[chunk_id]),
            )
            for chunk_id in chunk_ids
        ]

    def token_scores(self, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        """Return, for every given id, variant id → a copy of its token scores; `inter` is None if they are not known.

        Known are those in the catalog, if it can be read, and those on the remote whose row a look-up here has seen.
        """
        return self._finder.token_scores(variant_ids)

    def seen_texts(self, names: Sequence[str]) -> set[str]:
        """Note that texts of these names (see `FoundTexts.seen`) were in prompts; return the names seen before.

        Returns an empty set, and notes nothing, if the folder cannot be written, or the catalog cannot be used.
        """
        self._check_open()
        if self._durable.read_only:
            return set()
        return self._finder.ask(
            "Texts cannot be counted", lambda catalog: catalog.texts.seen(names), instead=set()
        )

    def marked_texts(
        self,
        namespace: str,
        fingerprint: str,
        marks: Collection[int],
        *,
        session: str | None = None,
    ) -> list[MarkedText]:
        """Return the stored texts, shared or of `session`, with one of these marks; [] for an unreadable catalog."""
        return self._finder.ask(
            "No text is recognised",
            lambda catalog: catalog.texts.marked(namespace, fingerprint, marks, session=session),
            instead=[],
        )

    def open_variants(
        self, variants: Sequence[Variant]
    ) -> list[LoadedVariant | StoredVariant | Unavailable]:
        """Call `open_variant` for each variant; return the results in the same order.

        The transfers of those on the remote all begin first, so they run concurrently. A variant that is given twice is
        opened twice.
        """
        self._check_open()
        streams: dict[str, RemoteStream | Unavailable] = {}
        if self._remote is not None:
            on_remote = [variant for variant in variants if variant.home == "remote"]
            to_fetch = {
                variant.variant_id: variant
                for variant in on_remote
                if self._memory.read(variant) is None
            }
            streams = {name: self._remote.open(variant) for name, variant in to_fetch.items()}
        return [
            self.open_variant(variant, streams.pop(variant.variant_id, None))
            for variant in variants
        ]

    def open_variant(
        self, variant: Variant, stream: RemoteStream | Unavailable | None = None
    ) -> LoadedVariant | StoredVariant | Unavailable:
        """Return the tensor if it is in memory, otherwise the opened variant, or the reason why it cannot be served.

        Of an opened variant the header is read and verified, and the tensor is allocated, but not filled. Read it, then
        pass it to `keep`; or, if that fails, close it and pass its `variant` to `lost`. A tensor from memory counts as
        a load, and one from main memory is copied to the device in the background, if there is a device tier. A variant
        that cannot be served is passed to `lost` here. `stream` is its transfer from the remote, if that has begun, or
        the reason why it cannot begin.
        """
        self._check_open()
        # Memory identifies a variant by its id only; a file carries the full identity.
        ours = variant.variant_id == variant.key.variant_id_in(variant.session)
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
            why = "it is on a remote, and this store has none"
            stored = Unavailable(variant.variant_id, LoadFailure.NO_REMOTE, why)
        else:
            stream = stream or self._remote.open(variant)
            stored = stream if isinstance(stream, Unavailable) else open_source(stream, variant)
        if isinstance(stored, StoredVariant):
            try:
                stored.allocate(pinned=self._memory.pinned, share=self._memory.share)
                return stored
            except MemoryError as error:
                stored.close()
                stored = unreadable(variant.variant_id, error)
        self.lost(variant, stored)
        return stored

    def host_copy(self, kv: torch.Tensor) -> torch.Tensor:
        """Return a capture's tensor, or from a GPU a copy in main memory, page-locked if the host tier will hold it."""
        from cachecraft_rag.kernels.memory import to_host  # it imports torch

        is_held = self._memory.share is None and self._memory.host.admits(kv.nbytes)
        return to_host(kv, pinned=is_held)

    def keep(self, stored: StoredVariant, *, whole: bool = True) -> None:
        """Count a load, by tier, and close the variant; if it was read as a `whole`, keep it.

        Main memory keeps the tensor itself if it fits the budget and was not released. A variant from the remote is
        also written to disk, in the background, if the queue of writes has room.
        """
        stored.close()
        self._count_load(stored.tier)
        if whole:
            if stored.kv is not None:
                self._memory.host.add(stored.variant, stored.kv)
            if (
                isinstance(stored.source, RemoteStream)
                and (encoded := stored.source.encoded()) is not None
            ):
                self._writer.keep_copy(replace(stored.variant, home="disk"), encoded)

    def keeps(self, stored: StoredVariant) -> bool:
        """Return True if `keep` would hold its tensor in main memory; else the loader may release it once placed."""
        return stored.kv is not None and self._memory.host.admits(stored.kv.nbytes)

    def lost(self, variant: Variant, why: Unavailable) -> None:
        """Count and log that a variant could not be read; one that is `Damaged` is removed where it was found.

        The removal runs in the background. An opened variant is not closed here.
        """
        remote = self._remote if variant.home == "remote" else None
        with self._lock:
            self._load_failures[variant.home, str(why.code)] += 1
        fields = {
            "event": "load_failed",
            "chunk_id": variant.key.chunk_id,
            "variant_id": variant.variant_id,
            "tier": variant.home,
            "reason": why.code,
        }
        logger.info(
            "Chunk-cache %s was not loaded: %s",
            variant.variant_id,
            why.reason,
            extra={"cachecraft": fields},
        )
        if isinstance(why, Damaged):
            if remote is not None:
                remote.remove(variant)
            else:
                file = FileRef(variant.variant_id, variant.created)
                self._writer.discard(file, variant.key.chunk_id, why.reason)

    def load(self, variant: Variant) -> LoadedVariant | Unavailable:
        """Return the whole tensor from memory, disk or remote, or the reason why it cannot be served.

        Waits for the disk or the remote; see `open_variant`, `keep` and `lost` for the effects. Records no use.
        """
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
        """Queue a job for the reading threads; return False if it is dropped, after `close`. Its exception is logged.

        Without room for a thread it returns False too, but another reading thread may still run the job.
        """
        self._home.require()
        try:
            self._readers.submit(job).add_done_callback(log_mistake)
        except RuntimeError:  # how an executor says that it is shutting down
            return False
        return True

    def put(self, capture: Capture) -> Future[Variant | Unavailable]:
        """Queue a capture; return a future of its variant, which look-ups find then, or of the reason of its drop.

        Raises StoreError if its `kv` is not as `Capture` says.
        """
        self._home.require()
        check_kind("capture", capture, Capture)
        return self._writer.put(capture)

    def count_drop(self, chunk_id: str, code: CaptureDrop, reason: str) -> None:
        """Count and log a capture that was dropped before `put`; the first drop with this `code` is a warning."""
        self._writer.count_drop(chunk_id, code, reason)

    def used(self, variant_id: str, recomputed: float, tokens: int) -> None:
        """Record a use, which raises the eviction score in memory and catalog (written in batches); see `Use.of`.

        `recomputed` is the share of the chunk's `tokens` (1 or more) that was recomputed, 0 to 1. Ignores unknown ids.
        """
        self._home.require()
        use = Use.of(recomputed, tokens)
        self._memory.record_use(variant_id, use)
        self._writer.record_use(variant_id, use)

    # -- administration -----------------------------------------------------------------------------------------------

    def stats(self, *, ask_remote: bool = True) -> StoreStats:
        """Return sizes, budgets and counts; with `ask_remote` also the remote's sizes, which takes at most two seconds.

        If the folder was deleted, its sizes are 0, with a warning, also after `close`. A remote that does not answer
        has the sizes None.
        """
        self._home.require()
        totals = Totals(0, 0, 0, 0) if self._gone() else self._durable.catalog.totals()
        return StoreStats(
            variants=totals.variants,
            chunks=totals.chunks,
            disk_bytes=totals.file_bytes + totals.reserved_bytes,
            disk_budget=self.limits.disk_bytes,
            host_budget=self.config.host_bytes,
            device_budget=self._memory.device.budget_bytes,
            remote=self.remote_stats(ask=ask_remote),
            **self.counts(),
        )

    def remote_stats(self, *, ask: bool) -> RemoteStats | None:
        """Return this process's counts on the remote, with `ask` also sizes (at most two seconds); None without one."""
        return self._remote.stats(ask=ask) if self._remote is not None else None

    def counts(self) -> dict[str, Any]:
        """Return, by name, the bytes held and the outcomes among the fields of `StoreStats`; possible after `close`."""
        queued_bytes, captures = self._writer.counts()
        with self._lock:
            return {
                "host_bytes": self._memory.host.used_bytes,
                "device_bytes": self._memory.device.used_bytes,
                "queued_bytes": queued_bytes,
                "lookups": dict(self._lookups),
                "loads": dict(self._loads),
                "load_failures": _by_tier(self._load_failures),
                "captures": {str(outcome): count for outcome, count in captures.items()},
                "evictions": self._evictions(),
            }

    def rows(
        self, chosen: RowFilter | None = None, *, offset: int = 0, limit: int = 100
    ) -> list[Listed]:
        """Return a page of the chosen variants (None: all), private ones too, highest score first; [] after the last.

        Damaged rows count towards `offset` and `limit` but are left out, so any page may be shorter than `limit`.
        """
        check_kind("chosen", chosen, RowFilter, optional=True)
        check_whole("offset", offset)
        check_whole("limit", limit, least=1)
        self._require_folder()
        return self._durable.catalog.rows(chosen or RowFilter(), offset=offset, limit=limit)

    def evict(
        self, chosen: RowFilter | None = None, *, down_to_bytes: int | None = None
    ) -> Evicted:
        """Remove the chosen variants: all, or the lowest-scored until the store's files have at most `down_to_bytes`.

        Rows and files are removed, and this process's memory drops them; chunk-caches on a remote stay there. If
        `chosen` has chunk ids, the functions in `before_removal` are called first with these and the namespace: an
        `Engine` on this store then waits for captures of these chunks that are being stored, and drops those that are
        still being computed. Without chunk ids, and in other processes, such captures may be stored afterwards.

        Returns the number of variants removed and their bytes on disk. A file that cannot be deleted counts too, with a
        warning. Raises ConfigError if there is neither `down_to_bytes` nor a filter that chooses by something.
        """
        check_kind("chosen", chosen, RowFilter, optional=True)
        check_whole("down_to_bytes", down_to_bytes, optional=True)
        self._require_folder()
        chosen = chosen or RowFilter()
        if chosen.chunk_ids is not None:
            for callback in self.before_removal:
                callback(chosen.chunk_ids, chosen.namespace)
        if chosen == RowFilter() and down_to_bytes is None:
            raise ConfigError(
                "evict needs a filter or down_to_bytes; down_to_bytes=0 removes everything."
            )
        try:
            return self._durable.evict(chosen, down_to_bytes=down_to_bytes)
        finally:
            self._finish_interrupted()

    def remove_chunks(self, chunk_ids: Sequence[str], *, namespace: str | None = None) -> Evicted:
        """Remove chunks because their documents were removed: nothing here may hold or be shaped by them any more.

        `before_removal` is called as in `evict`. All variants of these chunks leave, and all variants of other chunks
        that were captured after one of them, or after a reused variant that it may have shaped. Until `readmit_chunks`
        no process that shares the folder stores such a variant (`CaptureDrop.REMOVED`), and look-ups return none. On a
        remote, these chunks, after one look-up per model, and variants known here are removed in the background, and
        others when a look-up meets them. The texts of the namespace's audits and a "set-aside" store are deleted.
        `namespace` None means all.

        Returns the number of variants removed from the folder, and their bytes on disk. Without ids it does nothing.
        """
        names = _checked_ids(chunk_ids, namespace)
        self._require_folder()
        return self._removed(names, namespace=namespace, refused=names)

    def _removed(
        self, names: Sequence[str], *, namespace: str | None, refused: Sequence[str]
    ) -> Evicted:
        """Remove what holds these chunks or was shaped by them; refuse from now on those of `refused`."""
        if not names:
            return Evicted(0, 0)
        for callback in self.before_removal:
            callback(names, namespace)
        try:
            rows = self._durable.remove_chunks(names, namespace=namespace, refused=refused)
        finally:
            self._finish_interrupted()
        if self._remote is not None:
            self._remote.remove_shared(row.variant for row in rows if isinstance(row, Listed))
            for scope in self._durable.catalog.scopes(namespace):
                remote_copies = self._remote.find(*scope, names)
                self._remote.remove_shared(
                    itertools.chain.from_iterable(remote_copies.variants.values())
                )
        files = {file_of(row) for row in rows}
        return Evicted(len(files), sum(file.file_bytes for file in files))

    def readmit_chunks(
        self, chunk_ids: Sequence[str], *, namespace: str | None = None
    ) -> frozenset[str]:
        """Let these chunks be stored again, because a document with their text was added.

        Returns the ids of all chunks still removed in `namespace`; without `chunk_ids` it does nothing else. None means
        all namespaces; chunks that were removed in all are let in again everywhere, also if one is named.
        """
        names = _checked_ids(chunk_ids, namespace)
        self._require_folder()
        removals = self._durable.catalog.removals
        if names:
            removals.readmit(names, namespace)
        return removals.noted(namespace)

    def sync_chunks(self, chunk_ids: Collection[str], *, namespace: str | None = None) -> Evicted:
        """Remove every chunk-cache that holds another text than these chunks, or was shaped by one.

        Those of instructions stay. Chunks that leave are refused from then on, as after `remove_chunks`, but passages
        of unmarked text are not; `before_removal` is called for both. If any leave, so do variants of which it is not
        known what has shaped them. Given chunks that were removed earlier are let in again. A first capture of another
        chunk that is under way is not waited for; the next call removes it.

        Args:
            chunk_ids: ids of the chunks that stay; () removes all but the instructions.
            namespace: the tenant; None: all.

        Returns:
            The number of the variants that were removed from the folder, and their bytes on disk.
        """
        held = frozenset(_checked_ids(chunk_ids, namespace))
        self._require_folder()
        others = self._durable.catalog.others(held, namespace=namespace)
        removed = self._removed(
            (*others.chunks, *others.passages), namespace=namespace, refused=tuple(others.chunks)
        )
        back = tuple(held & self.readmit_chunks((), namespace=namespace))
        if back:
            self.readmit_chunks(back, namespace=namespace)
        return removed

    def check(
        self, *, repair: bool = False, progress: Callable[[Progress], None] | None = None
    ) -> CheckReport:
        """Compare rows and files, read every byte, and report flaws; with `repair` also remove damaged rows and files.

        Safe while other processes read and write: files that a running writer uses are skipped. The rate limit of
        reading applies. A remote is not checked. Foreign files, files that cannot be read at present, and a damaged
        SQLite file are reported only. `progress` is called after each row.
        """
        self._require_folder()
        try:
            return self._durable.check(repair=repair, progress=progress)
        except OSError as error:
            raise StoreError(
                f"{self.root} cannot be read ({error}). Check the disk and the folder's permissions."
            ) from error
        finally:
            self._finish_interrupted()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all captures and uses so far are written, and sent to the remote, or dropped.

        Returns False after `timeout` seconds in all (None: no limit), otherwise True. A capture or use that could not
        be written counts as done; for a capture see its future.
        """
        self._home.require()
        check_number("timeout", timeout, most=MOST_SECONDS, optional=True)
        done = threading.Event()
        until = None if timeout is None else time.monotonic() + timeout
        written = self._writer.submit(done.set) is None or done.wait(timeout)
        left = None if until is None else max(0.0, until - time.monotonic())
        return written and (self._remote is None or self._remote.flush(left))

    def close(self) -> None:
        """Write waiting captures and uses, then close the folder; a second call does nothing.

        Waits without limit for writes and reads under way. Then captures that wait to be sent to the remote have
        `RemoteTuning.close_timeout_s` seconds; those not sent by then are dropped. Failures are logged. In a forked
        process it does nothing.
        """
        # a fork has no waiting captures, and the files belong to its parent
        if not self._home.here:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._writer.shut_down()
        self._readers.shutdown()
        if self._remote is not None:
            self._remote.close()
        self._writer.write_uses()
        self._durable.close()

    # -- small parts --------------------------------------------------------------------------------------------------

    def _evictions(self) -> dict[str, dict[str, int]]:
        counts = Counter(
            {("disk", str(why)): count for why, count in self._durable.evictions().items()}
        )
        tiers = self._memory.device, self._memory.host
        counts += Counter({(tier.name, str(EvictionReason.BUDGET)): tier.evicted for tier in tiers})
        return _by_tier(counts)

    def _finish_interrupted(self) -> None:
        """Delete in the background files that a removal interrupted by Ctrl-C has left."""
        if self._durable.has_interrupted:
            self._writer.submit(self._durable.finish_interrupted)

    def _warn_once(self, kind: str, message: str, fields: Mapping[str, str] | None = None) -> None:
        """Log the first problem of a kind as a warning, later ones as info: a full disk fails at every capture."""
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        extra = {"cachecraft": fields} if fields is not None else None
        logger.log(logging.WARNING if first else logging.INFO, "%s", message, extra=extra)

    def _count_load(self, tier: TierName) -> None:
        with self._lock:
            self._loads[tier] += 1

    def _is_usable(self) -> bool:
        self._check_open()
        return not self._gone()

    def _gone(self) -> bool:
        """Return True if the folder has vanished; log a warning once."""
        gone = self._durable.gone()
        if gone:
            self._warn_once(
                CaptureDrop.FOLDER_GONE,
                f"The folder {self.root} was deleted, or is out of reach: nothing of it is reused, and nothing is "
                "kept. Open the store again to go on with a new one",
            )
        return gone

    def _require_folder(self) -> None:
        """Raise StoreError if the folder has vanished."""
        self._check_open()
        if self._durable.gone():
            raise StoreError(
                f"The folder {self.root} was deleted, or is out of reach. Open the store again."
            )

    def _check_open(self) -> None:
        self._home.require()
        if self._closed:
            raise StoreError(f"The store {self.root} is closed. Open it again to use it.")


def _checked_ids(chunk_ids: Iterable[str], namespace: str | None) -> tuple[str, ...]:
    """Return ids that may be removed. Raises ConfigError for a wrong one: a single text would count as its letters."""
    ids = tuple(listed("chunk_ids", chunk_ids))
    return RowFilter(namespace=namespace, chunk_ids=ids).chunk_ids or ()


def _by_tier(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    by_tier: dict[str, dict[str, int]] = {}
    for (tier, code), count in counts.items():
        by_tier.setdefault(tier, {})[code] = count
    return by_tier
