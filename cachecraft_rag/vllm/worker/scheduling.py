"""The scheduler's side: looks up the chunk-caches of each prompt, and hands them to the workers.

vLLM asks again in every step while a request waits, and after a preemption. The result of the look-up is kept until the
request has waited for captures of others: a prompt that is filled differently after a preemption would continue its
answer differently.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.planning.planner import make_plan
from cachecraft_rag.serving.chunks_in_progress import (
    ChunksInProgress,
    ExpectedCaptures,
    ExpectedVariant,
    Owner,
    WantedChunks,
    expected_variants,
)
from cachecraft_rag.serving.new_variants import exact_only
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.row_checks import LookupResult, RowBounds
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.digests import digest
from cachecraft_rag.vllm.messages import FIELD, Adapter, Ask, Fill, FillReport, StepResult
from cachecraft_rag.vllm.records import cached_report, reused_tokens
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker.adapters.files import AdapterFiles
from cachecraft_rag.vllm.worker.block_hashes import divide_blocks
from cachecraft_rag.vllm.worker.corrections import StatsCorrections
from cachecraft_rag.vllm.worker.fill_memory import UNLIMITED, FillBudget, FillMemory, FillSize
from cachecraft_rag.vllm.worker.interfaces import EngineRequest
from cachecraft_rag.vllm.worker.refusals import request_refusal

logger = logging.getLogger("cachecraft_rag.vllm")

# Longest wait for chunks that other requests compute, until the compute speed has been measured.
_WAIT_S = 10.0
# Longest time for which the capture of unmarked text waits for the server to become idle.
_PATIENCE_S = 10.0
_REMEMBERED = 10_000  # number of filled prompts whose digests are kept

Looked = tuple[LookupResult, Mapping[str, TokenScores]]


@dataclass
class Pending:
    """A request from its first look-up until it has finished.

    salt      salt of its blocks with chunks in vLLM's prefix cache; "" if prefix caching is off
    digest    hash of that salt, which it has in any case, and its tokens
    adapter   LoRA adapter that it uses
    refused   reason why vLLM computes it without chunk-caches
    looked    look-up of its chunk-caches, finished or running
    lacks     chunk-caches that the look-up did not find
    captures  chunk-caches that its latest filling captures; None before it
    size      size of its filling, computed when it was last found to fit
    until     deadline of the wait for chunks that other requests compute; None before that wait. Deadlines and times
              are of `time.monotonic`, in seconds
    waited    True while it waits for those chunks; afterwards they are looked up again
    patience  deadline of the wait for an idle server; None before that wait
    overdue   True once that wait has timed out; the request is then scheduled like any other
    began     time at which its blocks began to be filled
    filling   True while its blocks are being filled
    filled    True once its blocks have been filled, even if a preemption freed them later
    cached    tokens in vLLM's own prefix cache, if that held all chunks
    report    report of the workers
    """

    ask: Ask | None
    salt: str = ""
    digest: int = 0
    adapter: Adapter | None = None
    refused: str = ""
    looked: Future[Looked] | None = None
    lacks: list[ExpectedVariant] | None = None
    captures: ExpectedCaptures | None = None
    size: FillSize | None = None
    until: float | None = None
    waited: bool = False
    patience: float | None = None
    overdue: bool = False
    began: float = 0.0
    filling: bool = False
    filled: bool = False
    cached: int | None = None
    report: FillReport | None = None

    @property
    def owner(self) -> Owner:
        """(tenant or "", adapter or None): chunk-caches serve only requests that have the same two."""
        return ("" if self.ask is None else self.ask.namespace, self.adapter)

    def computes_no_longer(self) -> None:
        """Note that its chunk-caches are computed, or will not be."""
        if self.captures is not None:
            self.captures.computed = True


class Scheduling:
    """The scheduler's side of one server, for vLLM's scheduler thread.

    Args:
        block_size: tokens per vLLM block.
        prefix_caching: True if blocks may serve several requests, which divides them by salts.
        memory: memory of fillings on a GPU.
    """

    def __init__(
        self,
        store: ChunkCacheStore,
        settings: ConnectorSettings,
        *,
        block_size: int,
        prefix_caching: bool,
        memory: FillMemory = UNLIMITED,
    ) -> None:
        self._budget = FillBudget(memory)
        self._store = store
        self._identity = settings.identity
        self._settings = settings
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        # Threads keep a slow remote from delaying a step. Without a remote, a look-up is one query of the catalog.
        self._threads = (
            ThreadPoolExecutor(4, "cachecraft-look-up") if store.config.remote is not None else None
        )
        self._adapters = AdapterFiles(settings.identity.fingerprint)
        self.corrections = StatsCorrections()  # to vLLM's own statistics
        self._known: dict[str, Pending] = {}
        # Running requests, including those that vLLM computes itself, but not those that capture new variants.
        self._busy: set[str] = set()
        # busy requests that have asked for blocks since the last step and got none
        self._short: set[str] = set()
        self._fills: list[Fill] = []
        # filled requests whose first token is not scheduled yet
        self._first_tokens: set[str] = set()
        # digests of filled prompts, the latest last
        self._filled: OrderedDict[int, None] = OrderedDict()
        self._capturing: frozenset[str] = frozenset()  # segments, as last reported by the workers
        self._in_progress = ChunksInProgress(self._captured)
        self._captures_awaited = False  # a request has waited for captures since the last step
        self._reports: dict[str, FillReport] = {}  # `Ask.name` → report to be sent to the front end
        self._row_s: float | None = None  # seconds per computed row of the last fill

    def arrived(self, request: EngineRequest) -> None:
        """Note a new request before vLLM looks into its prefix cache, and keep its blocks with chunks apart there.

        Work in idle time counts as no waiting request from then on. Does nothing for a request without a message of
        this package, and in a second call.
        """
        message = (request.kv_transfer_params or {}).get(FIELD)
        if not message or request.request_id in self._known:
            return
        known = self._known[request.request_id] = self._take_in(request, message)
        if known.ask is not None and known.ask.idle:
            self.corrections.arrived_idle(request.request_id)

    def matched(self, request: EngineRequest, computed: int) -> int | None:
        """Return how many tokens after the first `computed` will be filled; None: ask again in the next step.

        0 if vLLM computes the remaining tokens: the request has no message of this package, is refused, has nothing
        that could be reused or captured, or all of its chunks are in vLLM's prefix cache. None while the look-up runs,
        while other requests compute its chunks, without room for a further filling, and for work in idle time while
        other requests run (a capture of unmarked text waits ten seconds at most).

        The first call looks the chunks up, in another thread if the store has a remote; if that fails, nothing counts
        as stored. The request counts as running until `finished`, unless it is work in idle time.

        Args:
            request: the request.
            computed: first tokens of the prompt that are in vLLM's prefix cache.
        """
        tokens = self._matched(request, computed)
        known = self._known.get(request.request_id)
        if known is None or known.ask is None or not known.ask.idle or known.overdue:
            self._busy.add(request.request_id)
            if tokens is not None:
                self._short.add(request.request_id)
        return tokens

    def _matched(self, request: EngineRequest, computed: int) -> int | None:
        self.arrived(request)
        known = self._known.get(request.request_id)
        if known is None or known.ask is None:
            return 0
        if known.ask.idle and self._busy:
            known.patience = known.patience or time.monotonic() + _PATIENCE_S
            if known.ask.waits or time.monotonic() < known.patience:
                return None
            known.overdue = True
        known.looked = known.looked or self._look_up(known.ask, known.adapter)
        if not known.looked.done():
            return None
        lookup, _ = known.looked.result()
        question = known.ask.prompt.bounds[-2]
        # vLLM computes the rest of the last block itself: that is less than a block, and closer to full prefill. A
        # prompt that was filled before, perhaps for this request before its preemption, gets no such allowance:
        # otherwise its answer would differ from the earlier one.
        was_filled = known.filled or known.digest in self._filled
        spare = 0 if was_filled else self._block_size - 1
        instruction = known.ask.instruction_tokens
        has_all_blocks = computed > instruction or instruction == question
        is_cached = has_all_blocks and computed > 0 and computed >= question - spare
        if not (is_cached or known.filled) and self._others_compute(known, known.ask, lookup):
            return None
        captures = known.ask.config.capture or known.ask.captures is not None
        if not captures and not any(lookup.variants.values()):
            nothing_stored = "nothing of it is stored, and nothing is to be captured"
            known.refused = known.refused or nothing_stored
            return 0
        if is_cached:  # vLLM's own prefix cache has the chunks
            if known.cached is None:
                known.cached = computed
                self._send(known.ask, self._cached(known.ask, computed))
            return 0
        return self._fillable(request, known, known.ask, computed)

    def _fillable(
        self, request: EngineRequest, known: Pending, ask: Ask, computed: int
    ) -> int | None:
        """Return how many tokens will be filled if there is room for them now; None without, 0 if there is never."""
        running_fills = sum(pending.filling for pending in self._known.values())
        if running_fills >= self._settings.fill_at_once:
            return None
        size = self._size(ask, () if known.filled else known.lacks or ())
        refused = self._budget.refusal(size)
        if refused is not None:
            known.refused = refused
            known.ask = None
            return 0
        if not self._budget.fits(size, self._capturing):
            self._captures_awaited = True
            return None
        known.size = size
        return int(request.num_prompt_tokens) - ask.own_tokens - computed

    def allocated(self, request: EngineRequest, blocks: tuple[int, ...], tokens: int) -> None:
        """Note that vLLM has given a request its blocks, see `take_given_up`: `take_fills` returns its filling next.

        Args:
            request: the request.
            blocks: ids of all blocks of the request.
            tokens: number of tokens to be filled, as `matched` returned; 0 if vLLM computes the prompt: no filling.
        """
        self._short.discard(request.request_id)
        known = self._known.get(request.request_id)
        if tokens <= 0 or known is None or known.ask is None or known.looked is None:
            return
        assert known.size is not None, "`matched` returned these tokens"
        last = int(request.num_prompt_tokens) - known.ask.own_tokens
        self._budget.take(request.request_id, known.size)
        is_counted = not known.filled and known.cached is None  # vLLM counts repetitions separately
        if is_counted:
            self.corrections.allocated(request, tokens)
        lookup, scores = known.looked.result()
        self._fills.append(
            Fill(
                request.request_id,
                known.ask,
                lookup,
                scores,
                last - tokens,
                last,
                blocks,
                known.filled,
                known.adapter,
            )
        )
        self._announce(known, known.ask)
        known.filling = known.filled = True
        known.began = time.monotonic()
        self._filled[known.digest] = None
        self._filled.move_to_end(known.digest)
        if len(self._filled) > _REMEMBERED:
            self._filled.popitem(last=False)

    @property
    def idle(self) -> bool:
        """True while none of the requests that vLLM has asked about runs or waits.

        Work in idle time (captures of new variants, audits) does not count. A capture of unmarked text counts once it
        has waited ten seconds for an idle server.
        """
        return not self._busy

    def take_given_up(self) -> list[str]:
        """Return the ids of requests in idle time that are to be given up; [] if there are none.

        They are all audits and captures of new variants whose blocks are being filled, if since the last call another
        request got no blocks; captures of unmarked text go on. vLLM ends them with their next token.
        """
        short = self._short
        self._short = set()
        if not short:
            return []
        return [
            name
            for name, known in self._known.items()
            if known.filling and known.ask and known.ask.waits
        ]

    def take_fills(self) -> list[Fill]:
        """Return the fills that the workers begin in this step, in the order of `allocated`, each once; [] without."""
        fills = self._fills
        self._fills = []
        return fills

    def take_captures_awaited(self) -> bool:
        """Return True if a request has waited for captures, or their memory, since the last call, which resets this."""
        is_awaited = self._captures_awaited
        self._captures_awaited = False
        return is_awaited

    def take_result(self, result: StepResult) -> None:
        """Take the workers' reports and running captures after a step; reports of unknown requests are ignored.

        Only the first report of a request is kept and sent to the front end. A request that the workers have refused is
        computed by vLLM from then on. Memory of captures that are stored is free for other fillings.
        """
        if result.capturing is not None:
            self._capturing = result.capturing
            self._budget.stored(result.capturing)
            self._in_progress.forget_captured()
        for name, report in result.reports.items():
            known = self._known.get(name)
            if known is None:
                continue
            # Only the first report counts: it was made before any preemption.
            if known.report is None:
                known.report = report
                self._send(known.ask, report)
                if known.ask is not None:
                    self.corrections.ended(name, partial(reused_tokens, known.ask.prompt, report))
            rows = report.get("row_layers", 0) // self._identity.layout.layers
            ask = known.ask
            if ask is not None and not ask.idle:
                has_mostly_computed = 2 * rows > ask.prompt.bounds[-1]
                # others end on a GPU before they are computed
                captures = ask.config.capture or bool(ask.captures)
                if has_mostly_computed and captures:
                    self._row_s = (time.monotonic() - known.began) / rows
            if "refused" in report:  # vLLM asks again if none of the prompt is computed yet
                known.computes_no_longer()
                known.ask = None

    def take_reports(self) -> dict[str, FillReport]:
        """Return the reports since the last call, by `Ask.name`; requests without a name are left out."""
        reports = self._reports
        self._reports = {}
        return reports

    def ended(self, names: set[str]) -> None:
        """Note that requests are filled or were given up: their memory for fillings is free, but for their captures."""
        for name in names & self._known.keys():
            known = self._known[name]
            known.filling = False
            known.computes_no_longer()
            if known.ask is not None and not known.ask.idle:
                self._first_tokens.add(name)
        for name in names:
            self._budget.give_back(name)

    def computes_first_token(self, scheduled: Collection[str]) -> bool:
        """Return True if a filled request, not idle work, computes its first token in this step; each counts once."""
        found = self._first_tokens.intersection(scheduled)
        self._first_tokens -= found
        return bool(found)

    def finished(self, request: EngineRequest) -> dict[str, FillReport] | None:
        """Forget a request, and return `FIELD` → its report, which its answer carries in `kv_transfer_params`.

        The report has only "refused" if vLLM computed the prompt without chunk-caches, and only "given_up" for work in
        idle time that stopped. A request that ended before it was filled counts as computed without chunk-caches.
        Returns None for a request without a message of this package, and in a second call.
        """
        self._busy.discard(request.request_id)
        self._short.discard(request.request_id)
        self._first_tokens.discard(request.request_id)
        self.corrections.finished(request.request_id)
        known = self._known.pop(request.request_id, None)
        if known is None:
            return None
        known.computes_no_longer()
        if any(fill.request_id == request.request_id for fill in self._fills):
            # the workers never hear of it
            self._fills = [fill for fill in self._fills if fill.request_id != request.request_id]
            self._budget.give_back(request.request_id)
        if known.report is None and known.ask is not None and known.cached is not None:
            known.report = self._cached(known.ask, known.cached)
        if known.report is not None:
            return {FIELD: known.report.copy()}
        if known.ask is not None and known.ask.idle:
            return {FIELD: {"given_up": True}}
        return {FIELD: {"refused": known.refused or "it ended before its prompt was filled"}}

    def close(self) -> None:
        """End the threads for look-ups, without waiting for look-ups under way; the store stays open."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _send(self, ask: Ask | None, report: FillReport) -> None:
        if ask is not None and ask.name:
            self._reports[ask.name] = report

    def _cached(self, ask: Ask, cached: int) -> FillReport:
        # Only requests with the same settings share blocks of the prefix cache, see `Ask.cache_salt`.
        config = ask.config
        is_exact = not config.reuse or (
            config.recompute_ratio == 1.0 and config.method.early_termination != "published"
        )
        return cached_report(
            ask.prompt,
            cached,
            self._identity.layout.layers,
            outcome="exact" if is_exact else "reused",
        )

    def _take_in(self, request: EngineRequest, message: object) -> Pending:
        try:
            ask = Ask.read(message, request.prompt_token_ids or (), self._settings.key)
        except CacheCraftError as error:
            return self._refused(request, str(error))
        reason = request_refusal(request, is_audit=ask.own_tokens > 1) or ask.left_to_server
        if reason:
            return self._refused(request, reason)
        if len(ask.prompt.segments[-1].token_ids) < 2:
            return self._refused(request, "its question is a single token")
        adapter = None
        salt = ask.cache_salt(self._settings.namespace)
        if request.lora_request is not None:
            try:
                adapter = self._adapters.of(request.lora_request)
            except (OSError, ValueError) as error:
                return self._refused(request, f"the files of its LoRA adapter: {error}")
            salt = digest("adapter salt", salt, adapter.fingerprint)
        identity = hash((salt, *(segment.tokens_digest for segment in ask.prompt.segments)))
        if not self._prefix_caching:
            return Pending(ask, digest=identity, adapter=adapter)
        divide_blocks(request, salt, shared=ask.instruction_tokens, block_size=self._block_size)
        return Pending(ask, salt, identity, adapter)

    def _refused(self, request: EngineRequest, reason: str) -> Pending:
        logger.info("Request %s is computed as any other: %s", request.request_id, reason)
        return Pending(None, refused=reason)

    def _others_compute(self, known: Pending, ask: Ask, lookup: LookupResult) -> bool:
        """Return True if the request waits for chunks that other requests compute or capture.

        If another request has the same chunks in the same order, vLLM's prefix cache has them once that request is
        filled. The wait is at most twice the time that computing those chunks takes. They are looked up again after it.
        """
        if known.lacks is None:
            known.lacks = _lacking(ask, lookup)
        if not ask.config.reuse:
            return False
        wants = [replace(variant, session=ask.session) for variant in known.lacks]
        wanted = WantedChunks(known.owner, wants, ask.config.method.scope, known.salt)
        captured = self._in_progress.capturing(wanted)
        expected = {*captured, *self._in_progress.computing(wanted)}
        if expected:
            if known.until is None:
                known.until = time.monotonic() + self._longest_wait_s(ask, expected)
            known.waited = time.monotonic() < known.until
            self._captures_awaited |= known.waited and bool(captured)
            return known.waited
        if known.waited:
            known.waited = False
            known.looked = None
            known.lacks = None
            return True
        return False

    def _captured(self, owner: Owner) -> frozenset[str]:
        """Return the segments that are being captured, of a tenant only what its requests have announced.

        The workers do not say whose they are, and a wait would tell a tenant what another one has sent.
        """
        tenant, _ = owner
        if not tenant:
            return self._capturing
        return self._capturing & self._in_progress.announced(owner)

    def _announce(self, known: Pending, ask: Ask) -> None:
        """Announce what a filling computes; a repeated one captures nothing."""
        variants = [] if known.filled else list(_captures(ask, known.lacks or ()))
        known.captures = ExpectedCaptures(known.owner, variants, known.salt, idle=ask.idle)
        self._in_progress.announce(known.captures)

    def _longest_wait_s(self, ask: Ask, expected: Iterable[ExpectedVariant]) -> float:
        """Return twice the time that computing these chunks takes, in seconds."""
        if self._row_s is None:
            return _WAIT_S
        lengths = {segment.segment_id: len(segment.token_ids) for segment in ask.prompt.segments}
        return 2.0 * self._row_s * sum(lengths[variant.segment_id] for variant in expected)

    def _size(self, ask: Ask, computed: Iterable[ExpectedVariant]) -> FillSize:
        """Return the size of a filling that computes these chunk-caches."""
        lengths = {segment.segment_id: len(segment.token_ids) for segment in ask.prompt.segments}
        captured = {
            variant.segment_id: lengths[variant.segment_id] for variant in _captures(ask, computed)
        }
        return FillSize(ask.prompt.bounds[-1], captured)

    def _look_up(self, ask: Ask, adapter: Adapter | None) -> Future[Looked]:
        if self._threads is not None:
            return self._threads.submit(self._find, ask, adapter)
        done: Future[Looked] = Future()
        done.set_result(self._find(ask, adapter))
        return done

    def _find(self, ask: Ask, adapter: Adapter | None) -> Looked:
        if not ask.config.reuse:
            return LookupResult({}), {}
        segments = [segment for segment in ask.prompt.segments if segment.kind != "question"]
        tokens = {
            segment.segment_id: (len(segment.token_ids), segment.tokens_digest)
            for segment in segments
        }
        lookup = self._store.find(
            ask.namespace or self._settings.namespace,
            self._identity.fingerprint if adapter is None else adapter.fingerprint,
            list(tokens),
            session=ask.session,
            bounds=RowBounds(self._identity.layout, self._identity.context_length, tokens),
        )
        if ask.idle:
            lookup = exact_only(lookup)
        variant_ids = [
            variant.variant_id for variants in lookup.variants.values() for variant in variants
        ]
        return lookup, self._store.token_scores(variant_ids)


def _lacking(ask: Ask, lookup: LookupResult) -> list[ExpectedVariant]:
    """Return the chunk-caches that a look-up did not find."""
    plan = make_plan(
        ask.prompt, lookup.variants, ask.config, refused=lookup.refused, removed=lookup.removed
    )
    return expected_variants(ask.prompt, plan, ask.session)


def _captures(ask: Ask, computed: Iterable[ExpectedVariant]) -> Iterator[ExpectedVariant]:
    """Yield the computed chunk-caches of a request that will be captured."""
    if ask.captures is not None:
        yield from (variant for variant in computed if len(variant.origin_prefix) in ask.captures)
    elif ask.config.capture:
        yield from computed
