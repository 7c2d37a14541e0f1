"""`ChunkCacheStore`: chunk-caches in memory, on disk and on a remote, written in the background."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

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
from cachecraft_rag.store.background_writer import BackgroundWriter, log_mistake
from cachecraft_rag.store.catalog import Catalog
from cachecraft_rag.store.catalog.found_texts import MarkedText
from cachecraft_rag.store.catalog_records import (
    DamagedRow,
    FileRef,
    Limits,
    Listed,
    RowFilter,
    Totals,
)
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
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.store_reasons import (
    CaptureDrop,
    Damaged,
    EvictionReason,
    LoadFailure,
    Unavailable,
)
from cachecraft_rag.types.variants import LoadedVariant, Payload, TierName, Variant

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("cachecraft_rag.store")
T = TypeVar("T")


class ChunkCacheStore(Closeable):
    """Chunk-caches by identity. Every method may be called from any thread; several processes may share one folder.

    After `close` look-ups, loads and reads of the catalog raise StoreError, and captures are dropped.
    """

    def __init__(self, root: Path, config: StoreConfig) -> None:
        """Use `open`."""
        self.root = root
        self._home = HomeProcess("chunk-cache store")
        self._memory = Memory(
            config.host_bytes, device=config.device, device_bytes=config.device_bytes
        )
        self._durable = DurableVariants(
            root,
            limits=config.given_limits,
            defaults=Limits(**DEFAULT_LIMITS),
            busy_timeout_s=config.busy_timeout_s,
            on_removed=self._memory.remove,
            throttle=Throttle(config.read_bytes_per_s),
            policy=None if config.eviction is None else policy_named(config.eviction),
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
        # Called with chunk ids before their chunk-caches are removed, so that no running capture stores them again.
        self.before_removal: list[Callable[[Sequence[str]], None]] = []
        self._lookups: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._load_failures: Counter[tuple[str, str]] = Counter()
        self._readers = ThreadPoolExecutor(
            config.readers, thread_name_prefix="cachecraft-store-reader"
        )
        try:
            self._remote = (
                RemoteTier(config.remote) if isinstance(config.remote, RemoteConfig) else None
            )
        except ConfigError:
            self._durable.close()
            raise
        self._writer = BackgroundWriter(
            self._durable,
            self._memory,
            self._remote,
            queue_bytes=config.queue_bytes,
            codec=config.codec,
            warn_once=self._warn_once,
        )
        if self._durable.read_only:
            self._warn_once(
                CaptureDrop.READ_ONLY,
                f"{root} cannot be written: what it holds is reused, and nothing is added to it",
            )

    @classmethod
    def open(cls, root: str | Path, config: StoreConfig | None = None, **settings: Any) -> Self:
        """Open or create the store in the folder `root`; `settings` override fields of `config`.

        Files that killed writers have left are deleted. Limits and a policy that are set are stored with the folder,
        and variants beyond the limits on bytes and on all variants are evicted.

        Returns:
            The store, which is to be closed. In a folder that can be written, a store of another version is moved to
            its folder "set-aside", with a warning, and a new one is made in its place. A store that cannot be written
            is opened all the same, with a warning and without these changes, see `read_only`.

        Raises:
            ConfigError: `root` is no path, `config` is no `StoreConfig`, a setting is unknown or invalid, the URL or
                the keys of the remote cannot be used, or a package that the codec or the remote needs is not installed.
        """
        check_path("root", root)
        check_kind("config", config, StoreConfig, optional=True)
        check_names(settings, StoreConfig.__dataclass_fields__, what="store setting")
        return cls(Path(root).absolute(), replace(config or StoreConfig(), **settings))

    @property
    def read_only(self) -> bool:
        """True if the store could not be written when it was opened: its contents are reused, and nothing is added."""
        return self._durable.read_only

    # -- the request's path -------------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None = None,
    ) -> dict[str, list[Variant]]:
        """Return chunk id → variants: shared ones, and private ones of this session. One query, no tensors.

        Every given chunk id is a key of the result; its list may be empty and has no order. Damaged variants are left
        out, see `find`. Chunks with fewer variants here than `RemoteConfig.ask_below` are looked up on the remote too,
        within its time limit; only shared variants are there. If the catalog cannot be read or the folder is gone, a
        warning is logged and nothing is found there: the answer is then computed without reuse. A remote that fails
        raises nothing either.

        Args:
            namespace: the tenant.
            fingerprint: identity of the model.
            chunk_ids: ids of the chunks.
            session: session whose private variants are found too; None: shared variants only.
        """
        return self.find(namespace, fingerprint, chunk_ids, session=session).variants

    def find(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None = None,
        bounds: RowBounds | None = None,
    ) -> LookupResult:
        """Return the variants of chunks, with reasons for rows that were refused; see `lookup` for the variants.

        Damaged rows are refused, and with `bounds` also rows that do not fit the model or the chunks. Refused rows are
        removed in the background, from the remote or from a catalog that can be written. Rows of a remote that only
        this process cannot use stay there: they have an unknown codec, or are not signed with its key. The outcome of
        each chunk is counted (`StoreStats.lookups`).

        Args:
            namespace: the tenant.
            fingerprint: identity of the model.
            chunk_ids: ids of the chunks.
            session: session whose private variants are found too; None: shared variants only.
            bounds: limits from model and prompt; must know every given chunk. The variants then carry the model's
                layout. None: any row of the right form is returned.

        Returns:
            `variants` maps every given chunk id to a list, which may be empty; `refused` maps a chunk id to the reason
            why a row was refused. `remote` is the outcome of the look-up in a remote, or None if no remote was asked.

        Raises:
            KeyError: a row was found of a chunk that `bounds` does not know.
        """
        self._check_open()
        check_text("namespace", namespace)
        check_text("session", session, optional=True)
        lookup = LookupResult({chunk_id: [] for chunk_id in chunk_ids})
        self._find_here(lookup, namespace, fingerprint, session=session, bounds=bounds)
        if self._remote is not None:
            # After the catalog, not at the same time: the catalog takes a millisecond, and the remote need not be asked
            # for chunks that it has.
            few = [
                name
                for name, here in lookup.variants.items()
                if len(here) < self._remote.config.ask_below
            ]
            there = (
                self._remote.find(namespace, fingerprint, few, bounds) if few else LookupResult({})
            )
            # for variants in both places, the catalog's row is kept
            for chunk_id, offers in there.variants.items():
                here = {variant.variant_id for variant in lookup.variants[chunk_id]}
                lookup.variants[chunk_id] += [
                    variant for variant in offers if variant.variant_id not in here
                ]
            lookup.refused.update(there.refused)
            lookup = replace(lookup, remote=there.remote)
        lookup = self._without_removed(lookup, namespace)
        with self._lock:
            self._lookups.update(lookup.outcomes())
        return lookup

    def _find_here(
        self,
        lookup: LookupResult,
        namespace: str,
        fingerprint: str,
        *,
        session: str | None,
        bounds: RowBounds | None,
    ) -> None:
        """Fill in the variants of the catalog."""
        payload = Payload(bounds.layout if bounds is not None else None)

        def find(catalog: Catalog) -> tuple[dict[str, list[Variant]], list[DamagedRow]]:
            return catalog.find(
                namespace, fingerprint, list(lookup.variants), session=session, payload=payload
            )

        nothing: tuple[dict[str, list[Variant]], list[DamagedRow]] = ({}, [])
        variants, damaged = self._asked("Nothing can be reused", find, instead=nothing)
        flawed = [(row.file, row.chunk_id, row.reason) for row in damaged]
        for variant in itertools.chain.from_iterable(variants.values()):
            if bounds is not None and (flaw := bounds.flaw(variant)):
                flawed.append(
                    (FileRef(variant.variant_id, variant.created), variant.key.chunk_id, flaw)
                )
            else:
                lookup.variants[variant.key.chunk_id].append(variant)
        for file, chunk_id, reason in flawed:
            lookup.refused[chunk_id] = reason
            self._writer.discard(file, chunk_id, reason)

    def _without_removed(self, lookup: LookupResult, namespace: str) -> LookupResult:
        """Return the look-up without variants that hold or were shaped by a removed chunk.

        Those on the remote are removed there: other engines may have sent them. So are inexact ones that are older than
        the latest removal, because a remote does not say what has shaped them beside their origin prefix. Rows in the
        catalog are there only if a removal was interrupted.
        """
        names = set(lookup.variants)
        for variant in itertools.chain.from_iterable(lookup.variants.values()):
            names.update(variant.key.origin_prefix)
        nothing: frozenset[str] = frozenset()
        removed = self._asked(
            "Removed chunks are not known",
            lambda catalog: catalog.removals.among(names, namespace),
            instead=nothing,
        )
        latest = self._asked(
            "Removed chunks are not known",
            lambda catalog: catalog.removals.latest(namespace) if self._remote is not None else 0.0,
            instead=0.0,
        )
        if not removed and not latest:
            return lookup
        kept: dict[str, list[Variant]] = {}
        for chunk_id, variants in lookup.variants.items():
            kept[chunk_id] = []
            for variant in variants:
                on_remote = variant.home == "remote"
                is_unknown = on_remote and variant.exact_share < 1.0 and variant.created <= latest
                if not variant.key.holds(removed) and not is_unknown:
                    kept[chunk_id].append(variant)
                elif on_remote:
                    self._remove_from_remote([variant])
        return replace(lookup, variants=kept, removed=removed.intersection(kept))

    def _remove_from_remote(self, variants: Iterable[Variant]) -> None:
        for variant in variants:
            if self._remote is not None and variant.session is None:
                self._remote.remove(variant)

    def token_scores(self, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        """Return variant id → token scores, for every given id; {} without ids. The arrays are copies.

        Scores have `inter` None where none were stored, they are damaged, or the variant is unknown; and for all
        variants, with a warning, if the catalog cannot be read or the folder is gone. Those of a variant on the remote
        are known only if this process has seen its row in a look-up.
        """
        known: dict[str, TokenScores] = self._asked(
            "No token scores", lambda catalog: catalog.token_scores(variant_ids), instead={}
        )
        scores = {variant_id: known.get(variant_id, TokenScores()) for variant_id in variant_ids}
        if self._remote is not None:
            unknown = [
                variant_id
                for variant_id, variant_scores in scores.items()
                if variant_scores.inter is None
            ]
            scores |= self._remote.token_scores(unknown)
        return scores

    def seen_texts(self, names: Sequence[str]) -> set[str]:
        """Note that these texts were seen in prompts; return the names of those that had been seen before.

        `names` are digests of the texts, see `prompt.unmarked.candidates_of`. A repeated name in `names` counts as seen
        before. The newest 65,536 names are remembered. Does nothing and returns an empty set if the folder cannot be
        written or is gone, or the catalog cannot be used. The latter two are logged.
        """
        self._check_open()
        if self._durable.read_only:
            return set()
        return self._asked(
            "Texts cannot be counted", lambda catalog: catalog.texts.seen(names), instead=set()
        )

    def marked_texts(
        self,
        namespace: str,
        fingerprint: str,
        marks: Mapping[int, object],
        *,
        session: str | None = None,
    ) -> list[MarkedText]:
        """Return the captured texts that have one of these marks; [] if no text has one.

        Also [], with a warning, if the catalog cannot be read or the folder is gone. A text occurs once for each of its
        marks that is asked for. They are in no order, and any field of a text may be damaged.

        Args:
            namespace: the tenant.
            fingerprint: identity of the model.
            marks: the marks are the keys; the values are not used.
            session: session whose private texts are found too; None: shared texts only.
        """
        return self._asked(
            "No text is recognised",
            lambda catalog: catalog.texts.marked(namespace, fingerprint, marks, session=session),
            instead=[],
        )

    def _asked(self, problem: str, ask: Callable[[Catalog], T], *, instead: T) -> T:
        """Return the catalog's answer; `instead`, with a warning, if it cannot be read or the folder is gone."""
        self._check_open()
        try:
            return instead if self._gone() else ask(self._durable.catalog)
        except StoreError as error:
            self._warn_once(problem, f"{problem}: {error}")
            return instead

    def open_variants(
        self, variants: Sequence[Variant]
    ) -> list[LoadedVariant | StoredVariant | Unavailable]:
        """Call `open_variant` for each variant; return the results in the same order, [] without variants.

        The transfers of those on the remote that are not in memory all begin first, so they run concurrently. Each
        `StoredVariant` of the result must be closed, see `open_variant`.
        """
        self._check_open()
        streams: dict[str, RemoteStream | Unavailable] = {}
        if self._remote is not None:
            on_remote = [variant for variant in variants if variant.home == "remote"]
            to_fetch = [variant for variant in on_remote if self._memory.read(variant) is None]
            streams = {variant.variant_id: self._remote.open(variant) for variant in to_fetch}
        return [self.open_variant(variant, streams.get(variant.variant_id)) for variant in variants]

    def open_variant(
        self, variant: Variant, stream: RemoteStream | Unavailable | None = None
    ) -> LoadedVariant | StoredVariant | Unavailable:
        """Return the tensor if it is in memory, otherwise the opened variant, or the reason why it cannot be served.

        Of an opened variant the header is verified and the tensor is allocated, but not filled. Read it, then pass it
        to `keep`; or, if that fails, close it and pass its `variant` to `lost`. A tensor from memory counts as a load,
        and one from main memory is copied to the device in the background, if there is a device tier. A variant that
        cannot be served is passed to `lost` here: it is counted, and removed if its bytes are missing or damaged.

        Args:
            variant: a variant from a look-up.
            stream: the payload, if its transfer from the remote has already begun; or the reason why it cannot begin.
                A stream is closed if it is not needed. None: a transfer begins if it is needed.
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
                stored.allocate(pinned=self._memory.pinned)
                return stored
            except MemoryError as error:
                stored.close()
                stored = unreadable(variant.variant_id, error)
        self.lost(variant, stored)
        return stored

    def host_copy(self, kv: torch.Tensor) -> torch.Tensor:
        """Return a capture `[layers, 2, tokens, kv_heads, head_dim]` in main memory; one on a CPU is returned itself.

        The copy of one on a GPU is page-locked if it fits the host tier and the system grants such memory. Nothing is
        stored. Also possible after `close`.
        """
        from cachecraft_rag.kernels.memory import to_host  # it imports torch

        return to_host(kv, pinned=self._memory.host.admits(kv.nbytes))

    def keep(self, stored: StoredVariant, *, whole: bool = True) -> None:
        """Count a load, by tier, and close the variant; if it was read as a `whole`, keep it.

        Main memory keeps the tensor itself if it fits the budget and was not released; others leave for it. A variant
        from the remote is also written to disk, in the background, if the queue of writes has room. Raises nothing,
        also after `close`: a copy that cannot be written is logged.
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
        """Return True if main memory would keep this variant, that is, if its tensor fits the host tier's whole budget.

        Otherwise the loader may release it once it is placed. False if its tensor is not allocated.
        """
        return stored.kv is not None and self._memory.host.admits(stored.kv.nbytes)

    def lost(self, variant: Variant, why: Unavailable) -> None:
        """Count and log that a variant could not be read; one whose reason is `Damaged` is removed where it was found.

        It is removed in the background, from the remote or from a catalog that can be written; after `close` it stays.
        An opened variant is not closed here. Raises nothing: a failure is logged.
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

        Waits for the disk or the remote. A tensor that was read is verified and kept, see `keep`; one that cannot be
        read is passed to `lost`.
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
        """Run a job on one of the reading threads; return True, or False if the job is dropped.

        After `close` the job is dropped. False also if the system has no room for a thread; another reading thread may
        then still run the job. An exception of the job is logged as an error, not raised.
        """
        self._home.require()
        try:
            self._readers.submit(job).add_done_callback(log_mistake)
        except RuntimeError:  # how an executor says that it is shutting down
            return False
        return True

    def put(self, capture: Capture) -> Future[Variant | Unavailable]:
        """Store a chunk-cache in the background, without waiting. The caller must not write to `capture.kv` again.

        Memory holds a tensor that fits its budget at once, but `lookup` returns the variant only after its row is
        committed. A capture replaces an older one of the same identity atomically, and others are evicted for it if the
        store is full. A shared capture is also sent to the remote, even if the disk has no room for it.

        Returns:
            A future of the stored variant, or of the reason why the capture was dropped; then memory drops it too, and
            the drop is counted and logged. After `close` all captures are dropped. Cancelling the future drops a
            capture that still waits.

        Raises:
            ConfigError: `capture` is no `Capture`.
        """
        self._home.require()
        check_kind("capture", capture, Capture)
        return self._writer.put(capture)

    def count_drop(self, chunk_id: str, code: CaptureDrop, reason: str) -> None:
        """Count and log a capture that was dropped before `put`; the first drop with this `code` is a warning."""
        self._writer.count_drop(chunk_id, code, reason)

    def used(self, variant_id: str, recomputed: float, tokens: int) -> None:
        """Record a use, which raises the eviction score in memory and catalog; a variant that is gone is passed over.

        `recomputed` is the share of the chunk that was recomputed, from 0 to 1, and `tokens` is the chunk's number of
        tokens; see `eviction.Use.of` for values out of range. Uses are written in batches in the background; a failure
        is logged, and the next batch tries again. After `close` nothing is written.
        """
        self._home.require()
        use = Use.of(recomputed, tokens)
        self._memory.record_use(variant_id, use)
        self._writer.record_use(variant_id, use)

    # -- administration -----------------------------------------------------------------------------------------------

    def stats(self, *, ask_remote: bool = True) -> StoreStats:
        """Return sizes, budgets and counts; with `ask_remote` also the remote's sizes, which takes at most two seconds.

        If the folder was deleted, its sizes are 0, with a warning, and the counts of this process remain; this is so
        after `close` too. A remote that does not answer raises nothing: its sizes are None. Otherwise raises StoreError
        if the catalog cannot be read or the store is closed, and ForkError in a fork of the process that opened it.
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
        """Return counts of this process on the remote, and with `ask` its sizes; None without a remote.

        Asking takes at most two seconds. The sizes are None without `ask`, and if the remote does not answer. Also
        possible after `close`; never raises.
        """
        return self._remote.stats(ask=ask) if self._remote is not None else None

    def counts(self) -> dict[str, Any]:
        """Return memory use in bytes, and what this process has counted, without asking the catalog or the remote.

        The keys are fields of `StoreStats`: host_bytes, device_bytes, queued_bytes, lookups, loads, load_failures,
        captures and evictions. Also possible after `close`.
        """
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
        """Return a page of all variants, private ones too, highest eviction score first; [] after the last one.

        Damaged rows count towards `offset` and `limit` but are left out, so any page may be shorter than `limit`.

        Args:
            chosen: which rows; None: all.
            offset: number of rows before the page.
            limit: most rows of the page.

        Raises:
            ConfigError: `offset` is negative, `limit` is below 1, or `chosen` is no `RowFilter`.
        """
        check_kind("chosen", chosen, RowFilter, optional=True)
        check_whole("offset", offset)
        check_whole("limit", limit, least=1)
        self._require_folder()
        return self._durable.catalog.rows(chosen or RowFilter(), offset=offset, limit=limit)

    def evict(
        self, chosen: RowFilter | None = None, *, down_to_bytes: int | None = None
    ) -> Evicted:
        """Remove the chosen variants: all, or those with the lowest scores until the files have `down_to_bytes` bytes.

        Their rows and files are removed, and this process's memory drops them; chunk-caches on a remote stay there. If
        `chosen` has chunk ids, the functions in `before_removal` are called with them first. With one of these, an
        `Engine` on this store waits for its running captures of these chunks: otherwise they would be stored again.
        Captures in other processes are not waited for.

        Args:
            chosen: which variants; None: any. An empty list of chunk ids chooses none.
            down_to_bytes: bytes that all files of the store may have afterwards; more are left if the variants that are
                not chosen have more. None: all chosen variants are removed.

        Returns:
            The number of the variants that were removed, and their bytes on disk; both 0 if none was removed. A file
            that cannot be deleted counts too, with a warning in the log.

        Raises:
            ConfigError: `down_to_bytes` is negative, `chosen` is no `RowFilter`, or there is neither `down_to_bytes`
                nor a filter that chooses by something.

        Exceptions of the functions in `before_removal` pass.
        """
        check_kind("chosen", chosen, RowFilter, optional=True)
        check_whole("down_to_bytes", down_to_bytes, optional=True)
        self._require_folder()
        chosen = chosen or RowFilter()
        if chosen.chunk_ids is not None:
            for callback in self.before_removal:
                callback(chosen.chunk_ids)
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

        All variants of these chunks leave, and all variants of other chunks that were captured after one of them, or
        after a reused variant that it had shaped: as rows, files and in memory. Until `readmit_chunks` no process that
        shares the folder stores such a variant: a capture of one is dropped (`CaptureDrop.REMOVED`), and look-ups
        return none. On a remote, the variants that this store knows of are removed in the background, and others when a
        look-up meets them.

        As in `evict`, the functions in `before_removal` are called first.

        Args:
            chunk_ids: ids of the chunks; without any nothing happens.
            namespace: the tenant; None: all.

        Returns:
            The number of the variants that were removed from the folder, and their bytes on disk.

        Raises:
            ConfigError: a chunk id is no text or holds a NUL, or `namespace` is no text.

        Exceptions of the functions in `before_removal` pass.
        """
        names = RowFilter(namespace=namespace, chunk_ids=tuple(chunk_ids)).chunk_ids or ()
        self._require_folder()
        if not names:
            return Evicted(0, 0)
        for callback in self.before_removal:
            callback(names)
        try:
            rows = self._durable.remove_chunks(names, namespace=namespace)
        finally:
            self._finish_interrupted()
        self._remove_from_remote(row.variant for row in rows if isinstance(row, Listed))
        if self._remote is not None:
            for scope in self._durable.catalog.scopes(namespace):
                found = self._remote.find(*scope, names)
                self._remove_from_remote(itertools.chain.from_iterable(found.variants.values()))
        files = {file_of(row) for row in rows}
        return Evicted(len(files), sum(file.file_bytes for file in files))

    def readmit_chunks(
        self, chunk_ids: Sequence[str], *, namespace: str | None = None
    ) -> frozenset[str]:
        """Let these chunks be stored again, because a document with their text was added; return those still removed.

        Args:
            chunk_ids: ids of the chunks; () only returns the removed ones. Ids that were not removed are ignored.
            namespace: the tenant; None: all.
        """
        names = RowFilter(namespace=namespace, chunk_ids=tuple(chunk_ids)).chunk_ids
        self._require_folder()
        removals = self._durable.catalog.removals
        if names:
            removals.readmit(names, namespace)
        return removals.noted(namespace)

    def check(
        self, *, repair: bool = False, progress: Callable[[Progress], None] | None = None
    ) -> CheckReport:
        """Compare rows and files, read every byte, and report flaws; with `repair` fix them.

        Safe while other processes read and write: files that a running writer uses are skipped. The rate limit of
        reading applies. A remote is not checked.

        Args:
            repair: remove what is damaged or left over, and count wrong sums again. Foreign files, files that cannot be
                read at present, and a damaged SQLite file are reported only.
            progress: called after each row with the number of rows so far and in all; its text is "". None: never.

        Returns:
            The report; without flaws its `findings` are empty. They include flaws that were repaired. Files that cannot
            be deleted are logged.
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
        """Wait until all captures and uses so far are written, and sent to the remote or dropped there.

        Returns True then, and False after `timeout` seconds, in all; None waits without limit. After `close` it returns
        True. A capture that could not be written does not raise here, and counts as done: `put` returns its future.
        Raises ConfigError for a `timeout` that is neither None nor a number from 0 to a million, and ForkError in a
        fork of the process that opened the store.
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

        Waits without limit for what is being written, and for jobs of the reading threads. Then captures that wait to
        be sent to the remote have `RemoteConfig.close_timeout_s` seconds; later ones are dropped. What cannot be
        written is dropped and logged. In a forked process it does nothing.
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


def _by_tier(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    by_tier: dict[str, dict[str, int]] = {}
    for (tier, code), count in counts.items():
        by_tier.setdefault(tier, {})[code] = count
    return by_tier
