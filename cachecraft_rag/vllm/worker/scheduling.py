"""The scheduler's end: looks up the chunk-caches of each request's prompt, once, and hands them to the workers.

vLLM asks again in every step while a request waits, and after a preemption. The result stays the same: a request that
is filled differently the second time would continue its answer differently.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.planning.planner import make_plan
from cachecraft_rag.serving.admission import FutureCaptures, FutureVariant
from cachecraft_rag.serving.new_variants import exact_only
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.row_checks import LookupResult, RowBounds
from cachecraft_rag.types import TokenScores
from cachecraft_rag.vllm.messages import FIELD, Ask, Fill, News
from cachecraft_rag.vllm.records import cached_report
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker.refusals import request_refusal

logger = logging.getLogger("cachecraft_rag.vllm")

_WAIT_S = 10.0  # longest wait for chunks that others compute, until the speed of computing is known
_PATIENCE_S = 10.0  # longest wait for an idle server of text that nobody marked
_REMEMBERED = 10_000  # prompts that were filled

Looked = tuple[LookupResult, Mapping[str, TokenScores]]


@dataclass
class Pending:
    """A request from its first look-up until it has finished.

    salt     that its blocks in vLLM's prefix cache have; empty without one
    digest   of its salt and tokens
    refused  why it is computed as any other
    looked   the look-up, perhaps under way
    lacks    chunk-caches that the look-up did not find
    until    end of its wait for chunks that others compute, once it has begun
    waited   it has waited, and looks up anew
    patience end of its wait for an idle server, once it has begun
    overdue  it has waited for that long enough, and counts as any other request
    began    when its filling began
    cached   tokens that vLLM's own prefix cache had, where it had all chunks
    report   of the workers
    """

    ask: Ask | None
    salt: str = ""
    digest: int = 0
    refused: str = ""
    looked: Future[Looked] | None = None
    lacks: list[FutureVariant] | None = None
    until: float | None = None
    waited: bool = False
    patience: float | None = None
    overdue: bool = False
    began: float = 0.0
    filling: bool = False
    filled: bool = False
    cached: int | None = None
    report: Mapping[str, Any] | None = None


class Scheduling:
    """One server's scheduler end.

    Args:
        block_size: tokens of a block of vLLM's.
        prefix_caching: blocks may serve several requests, so salts matter.
    """

    def __init__(
        self,
        store: ChunkCacheStore,
        settings: ConnectorSettings,
        *,
        block_size: int,
        prefix_caching: bool,
    ) -> None:
        self._store, self._identity, self._settings = store, settings.identity, settings
        self._block_size, self._prefix_caching = block_size, prefix_caching
        # No step waits for a slow remote. Without a remote a look-up is one query of the catalog.
        self._threads = ThreadPoolExecutor(4, "cachecraft-look-up") if store.config.remote is not None else None
        self._known: dict[str, Pending] = {}
        self._busy: set[str] = set()  # requests under way, vLLM's own too, but for new variants
        self._short: set[str] = set()  # those of them that have asked for blocks since the last step, and got none
        self._fills: list[Fill] = []
        self._filled: OrderedDict[int, None] = OrderedDict()  # digests of prompts, the latest last
        self._capturing: frozenset[str] = frozenset()
        self._captures_wanted = False  # a request has waited for captures since the last step
        self._reports: dict[str, Mapping[str, Any]] = {}  # on their way to the front end, by the names of asks
        self._row_s: float | None = None  # seconds that the last fill took for each row it computed

    def matched(self, request: Any, computed: int) -> int | None:
        """Number of tokens behind the first `computed` that will be filled; None: ask again in the next step."""
        tokens = self._matched(request, computed)
        known = self._known.get(request.request_id)
        if known is None or known.ask is None or not known.ask.idle or known.overdue:
            self._busy.add(request.request_id)
            if tokens is not None:
                self._short.add(request.request_id)
        return tokens

    def _matched(self, request: Any, computed: int) -> int | None:
        message = (request.kv_transfer_params or {}).get(FIELD)
        if not message:
            return 0
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = self._take_in(request, message)
        if known.ask is None:
            return 0
        if known.ask.idle and self._busy:
            known.patience = known.patience or time.monotonic() + _PATIENCE_S
            if known.ask.waits or time.monotonic() < known.patience:
                return None
            known.overdue = True
        known.looked = known.looked or self._look_up(known.ask)
        if not known.looked.done():
            return None
        found, _ = known.looked.result()
        question = known.ask.prompt.bounds[-2]
        # vLLM computes the rest of the last block itself: less than a block, and nearer to full prefill. Not after a
        # preemption, where the answer would go on differently, and not where the same prompt was filled before: it
        # would be answered differently.
        spare = 0 if known.filled or known.digest in self._filled else self._block_size - 1
        cached = computed > 0 and computed >= question - spare
        if not (cached or known.filled) and self._others_compute(known, known.ask, found):
            return None
        if not any(found.variants.values()) and not known.ask.config.capture and known.ask.captures is None:
            known.refused = known.refused or "nothing of it is stored, and nothing is to be captured"
            return 0
        if cached:  # vLLM's own prefix cache has the chunks
            if known.cached is None:
                known.cached = computed
                self._send(known.ask, self._cached(known.ask, computed))
            return 0
        if sum(one.filling for one in self._known.values()) >= self._settings.fill_at_once:
            return None
        return int(request.num_prompt_tokens) - 1 - computed

    def allocated(self, request: Any, blocks: tuple[int, ...], tokens: int) -> None:
        """Note the blocks that vLLM has given the request; `tokens` of their positions are to be filled."""
        self._short.discard(request.request_id)
        known = self._known.get(request.request_id)
        if tokens <= 0 or known is None or known.ask is None or known.looked is None:
            return
        last = int(request.num_prompt_tokens) - 1
        found, scores = known.looked.result()
        self._fills.append(
            Fill(request.request_id, known.ask, found, scores, last - tokens, last, blocks, known.filled)
        )
        known.filling = known.filled = True
        known.began = time.monotonic()
        self._filled[known.digest] = None
        self._filled.move_to_end(known.digest)
        if len(self._filled) > _REMEMBERED:
            self._filled.popitem(last=False)

    @property
    def idle(self) -> bool:
        """True while no request is under way but such that make new variants."""
        return not self._busy

    def take_given_up(self) -> list[str]:
        """New variants under way that make room for requests without blocks: vLLM ends them with their next token."""
        short, self._short = self._short, set()
        return [name for name, one in self._known.items() if short and one.filling and one.ask and one.ask.waits]

    def take_fills(self) -> list[Fill]:
        """Work that the workers begin in this step."""
        fills, self._fills = self._fills, []
        return fills

    def take_wanted(self) -> bool:
        """True if a request has waited for captures since the last call."""
        wanted, self._captures_wanted = self._captures_wanted, False
        return wanted

    def take_news(self, news: News) -> None:
        """Take the workers' report after a step."""
        if news.capturing is not None:
            self._capturing = news.capturing
        for name, report in news.reports.items():
            if (known := self._known.get(name)) is not None:
                if known.report is None:  # the first one: what it was before a preemption
                    known.report = report
                    self._send(known.ask, report)
                rows = report.get("row_layers", 0) // self._identity.layout.layers
                ask = known.ask
                if ask is not None and not ask.idle and 2 * rows > ask.prompt.bounds[-1]:  # mostly it computed
                    self._row_s = (time.monotonic() - known.began) / rows
                if "refused" in report:  # vLLM asks again, where nothing of the prompt is computed yet
                    known.ask = None

    def take_reports(self) -> dict[str, Mapping[str, Any]]:
        """Reports since the last call, by the names that the front end gave."""
        reports, self._reports = self._reports, {}
        return reports

    def ended(self, names: set[str]) -> None:
        """Note that these are filled, or were given up."""
        for name in names & self._known.keys():
            self._known[name].filling = False

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request; returns its report, which goes out with its answer, in `kv_transfer_params`."""
        self._busy.discard(request.request_id)
        self._short.discard(request.request_id)
        known = self._known.pop(request.request_id, None)
        if known is None:
            return None
        self._fills = [fill for fill in self._fills if fill.request_id != request.request_id]
        if known.report is None and known.ask is not None and known.cached is not None:
            known.report = self._cached(known.ask, known.cached)
        if known.report is not None:
            return {FIELD: dict(known.report)}
        if known.ask is not None and known.ask.idle:
            return {FIELD: {"given_up": True}}
        return {FIELD: {"refused": known.refused or "it ended before its prompt was filled"}}

    def close(self) -> None:
        """End the threads for look-ups."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _send(self, ask: Ask | None, report: Mapping[str, Any]) -> None:
        if ask is not None and ask.name:
            self._reports[ask.name] = report

    def _cached(self, ask: Ask, cached: int) -> dict[str, Any]:
        return cached_report(ask.prompt, cached, self._identity.layout.layers, outcome="reused")

    def _take_in(self, request: Any, message: object) -> Pending:
        try:
            ask = Ask.read(message, request.prompt_token_ids or (), self._settings.key)
        except CacheCraftError as error:
            return self._refused(request, str(error))
        salt = ask.cache_salt(self._settings.namespace) if self._prefix_caching else None
        if (reason := request_refusal(request, salt=salt)) is not None:
            return self._refused(request, reason)
        if len(ask.prompt.segments[-1].token_ids) < 2:
            return self._refused(request, "its question is a single token")
        return Pending(ask, salt or "", hash((request.cache_salt, *request.prompt_token_ids)))

    def _refused(self, request: Any, reason: str) -> Pending:
        logger.info("Request %s is computed as any other: %s", request.request_id, reason)
        return Pending(None, refused=reason)

    def _others_compute(self, known: Pending, ask: Ask, found: LookupResult) -> bool:
        """Return whether it waits for chunks that others compute or capture; what it computes itself, it announces
        once its filling begins.

        Where another request has the same chunks in the same order, vLLM's prefix cache has them once that is filled.
        It waits for no longer than the others and it would take to compute them, and looks up anew after it.
        """
        if known.lacks is None:
            plan, lacking = make_plan(ask.prompt, found.variants, ask.config, refused=found.refused), FutureCaptures()
            lacking.expect(ask.prompt, plan, session=ask.session)
            known.lacks = lacking.variants
        if not ask.config.reuse:
            return False
        captured = [one for one in known.lacks if one.segment_id in self._capturing]
        others = [one for one in self._known.values() if one.filling and one.ask is not None and not one.ask.idle]
        if any(known.salt and known.salt == other.salt for other in others):
            coming = known.lacks
        else:
            coming = captured + [one for one in known.lacks if one not in captured and _announced(one, ask, others)]
        if coming:
            if known.until is None:
                lengths = {segment.segment_id: len(segment.token_ids) for segment in ask.prompt.segments}
                rows = sum(lengths[one.segment_id] for one in coming)
                known.until = time.monotonic() + (_WAIT_S if self._row_s is None else 2.0 * rows * self._row_s)
            known.waited = time.monotonic() < known.until
            self._captures_wanted |= known.waited and bool(captured)
            return known.waited
        if known.waited:
            known.waited, known.looked, known.lacks = False, None, None
            return True
        return False

    def _look_up(self, ask: Ask) -> Future[Looked]:
        if self._threads is not None:
            return self._threads.submit(self._found, ask)
        done: Future[Looked] = Future()
        done.set_result(self._found(ask))
        return done

    def _found(self, ask: Ask) -> Looked:
        if not ask.config.reuse:
            return LookupResult({}), {}
        segments = [one for one in ask.prompt.segments if one.kind != "question"]
        tokens = {one.segment_id: (len(one.token_ids), one.tokens_digest) for one in segments}
        bounds = RowBounds(self._identity.layout, self._identity.context_length, tokens)
        find, names = self._store.find, list(tokens)
        found = find(self._settings.namespace, self._identity.fingerprint, names, session=ask.session, bounds=bounds)
        found = exact_only(found) if ask.idle else found
        return found, self._store.token_scores([one.variant_id for some in found.variants.values() for one in some])


def _announced(lacking: FutureVariant, ask: Ask, others: Iterable[Pending]) -> bool:
    """Return whether one of these requests, which are being filled, will capture what serves here."""
    wanted = replace(lacking, session=ask.session)
    return any(
        coming.serves(wanted, ask.config.scope)
        for other in others
        if other.ask is not None
        for coming in _captures(other.ask, other.lacks or ())
    )


def _captures(ask: Ask, computed: Iterable[FutureVariant]) -> Iterator[FutureVariant]:
    """Those of the chunk-caches computed for a request that will be captured."""
    if ask.captures is not None:
        yield from (one for one in computed if len(one.origin_prefix) in ask.captures)
    elif ask.config.capture:
        yield from computed
