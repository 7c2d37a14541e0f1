"""The engine: chunks and a question in, an answer out, token by token.

One request: prompt → look-up → plan → load → partial prefill → decode; new births go to the store in the background
once the answer is out. Passes of concurrent requests take turns; each request owns its buffer, so none sees another's
state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from cachecraft_rag.birthing import BirthContext, BirthQueue
from cachecraft_rag.closing import Closing
from cachecraft_rag.config import ReuseConfig, SamplingParams
from cachecraft_rag.decode import Sampler, TextStream
from cachecraft_rag.focus import FocusMonitor
from cachecraft_rag.models import Decoder
from cachecraft_rag.planner import Plan, exact_shares, make_plan, with_selection
from cachecraft_rag.prefill import PrefillInput, PrefillOutput, Reused, decode_step, prefill
from cachecraft_rag.prompt import DEFAULT_SYSTEM, Prompt, PromptBuilder, Turn
from cachecraft_rag.stats import ChunkStats, Finish, RequestStats
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.turns import FairLock
from cachecraft_rag.types import Chunk, LoadedVariant, Variant


class Generation(Iterator[str]):
    """The answer as an iterator of text pieces. `text` and `stats` are complete once it is exhausted or closed."""

    def __init__(self, pieces: Generator[str], stats: Callable[[], RequestStats]) -> None:
        self._pieces, self._stats = pieces, stats
        self.text = ""

    def __next__(self) -> str:
        piece = next(self._pieces)
        self.text += piece
        return piece

    @property
    def stats(self) -> RequestStats:
        """Numbers of the request so far; `finish` is None until it has ended."""
        return self._stats()

    def close(self) -> None:
        """End the answer here; what was born is kept."""
        self._pieces.close()


@dataclass
class _Request:
    """What one request was asked and what it has gathered so far."""

    prompt: Prompt
    config: ReuseConfig
    sampling: SamplingParams
    session: str | None
    started: float
    planned_s: float = 0.0
    loaded_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    plan: Plan = field(default_factory=lambda: Plan(()))
    loaded: dict[str, LoadedVariant] = field(default_factory=dict)
    output: PrefillOutput | None = None
    generated: int = 0
    finish: Finish | None = None

    def clock(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.started


class Engine(Closing):
    """Answers questions over chunks with one model and one store.

    Args:
        decoder: the model; one that nobody has tried yet should pass `selfcheck.self_check` first.
        store: where its chunk-caches live; may be shared with other engines and processes.
        namespace: the tenant; chunk-caches never cross it.
        config: how caches are reused; a call may bring its own.
        system: the instruction in front of every prompt; `private_system` where it holds one user's text.
        best_last: see `PromptBuilder`.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: ChunkCacheStore,
        *,
        namespace: str = "default",
        config: ReuseConfig | None = None,
        system: str = DEFAULT_SYSTEM,
        private_system: bool = False,
        best_last: bool = True,
    ) -> None:
        self.decoder, self.store, self.namespace = decoder, store, namespace
        self.config = config or ReuseConfig()
        self.prompts = PromptBuilder(
            decoder.tokenizer,
            context_length=decoder.context_length,
            system=system,
            private_system=private_system,
            best_last=best_last,
        )
        self.turn = FairLock()  # one pass at a time: two at once would only halve each other's cores
        self.births = BirthQueue(
            store, namespace=namespace, fingerprint=decoder.fingerprint, layout=decoder.layout, turn=self.turn
        )

    def stream(
        self,
        question: str,
        chunks: Sequence[Chunk],
        *,
        history: Sequence[Turn] = (),
        session: str | None = None,
        sampling: SamplingParams | None = None,
        config: ReuseConfig | None = None,
    ) -> Generation:
        """Answer a question over ordered chunks (best first). The prompt is checked now, the model runs on the first
        piece.

        Args:
            history: earlier turns of the conversation, user first; they stand behind the chunks.
            session: whose private chunk-caches may be used besides the shared ones.

        Raises:
            ContextLengthError: question, history and answer do not fit the model's context.
            ConfigError: the question is empty or the history does not alternate.
        """
        started = time.perf_counter()
        sampling = sampling or SamplingParams()
        prompt = self.prompts.build(question, chunks, history=history, reserve=sampling.max_new_tokens)
        request = _Request(prompt, config or self.config, sampling, session, started)
        return Generation(self._pieces(request), lambda: _stats(request, self.decoder.layout.layers))

    def close(self) -> None:
        """Finish the births under way. The store stays open: whoever opened it closes it."""
        self.births.close()

    def _pieces(self, request: _Request) -> Generator[str]:
        self._resolve(request)
        request.output = output = self._compute(request)
        try:
            yield from self._decode(request, output)
        finally:
            request.finish = request.finish or "closed"
            request.ended_s = request.clock()
            self._settle(request, output)

    def _resolve(self, request: _Request) -> None:
        """Plan, load what the plan reuses, and plan again without what turned out to be missing or corrupt."""
        stored: dict[str, list[Variant]] = {}
        if request.config.reuse:
            ids = [segment.segment_id for segment in request.prompt.segments[:-1]]
            self.births.wait_for(ids)
            stored = self.store.lookup(self.namespace, self.decoder.fingerprint, ids, session=request.session)
        lost: dict[str, str] = {}
        while True:
            plan = make_plan(request.prompt, stored, request.config, lost=lost)
            request.planned_s = request.clock() - request.loaded_s
            wanted = {s.variant.variant_id: s.variant for s in plan.segments if s.variant is not None}
            missing = [variant for name, variant in wanted.items() if name not in request.loaded]
            if not missing:
                break
            for result in self.store.load_many(missing):
                if isinstance(result, LoadedVariant):
                    request.loaded[result.variant_id] = result
                else:
                    lost[result.variant_id] = result.reason
            request.loaded_s = request.clock() - request.planned_s
        reused = [s.variant.variant_id for s in plan.segments if s.outcome == "reused" and s.variant is not None]
        request.plan = with_selection(plan, self.store.token_inter(reused), request.config)
        request.planned_s = request.clock() - request.loaded_s

    def _compute(self, request: _Request) -> PrefillOutput:
        prompt, bounds = request.prompt, request.prompt.bounds
        rows: list[tuple[int, int]] = []  # position; the segment whose focus decides how long it is recomputed, or -1
        reused, births = [], []
        for index, planned in enumerate(request.plan.segments):
            start, stop = bounds[index], bounds[index + 1]
            if planned.variant is None:
                rows += [(position, -1) for position in range(start, stop)]
                if request.config.births and prompt.segments[index].kind != "question":
                    births.append(index)
            else:
                rows += [(start + offset, index) for offset in planned.recompute]
                kv = request.loaded[planned.variant.variant_id].kv
                reused.append(Reused(start, kv.to(self.decoder.device, non_blocking=True)))
        work = PrefillInput(
            token_ids=prompt.token_ids,
            bounds=bounds,
            positions=[position for position, _ in rows],
            owners=[owner for _, owner in rows],
            reused=reused,
            births=births,
            capacity=bounds[-1] + request.sampling.max_new_tokens,
        )
        with self.turn:
            return prefill(self.decoder, work, monitor=_monitor(request))

    def _decode(self, request: _Request, output: PrefillOutput) -> Iterator[str]:
        sampling = request.sampling
        sampler, text = Sampler(sampling), TextStream(self.decoder.tokenizer, sampling.stop)
        position, logits = request.prompt.bounds[-1], output.logits
        while True:
            token = sampler.draw(logits)
            if request.generated == 0:
                request.first_token_s = request.clock()
            if token in self.decoder.end_tokens:
                request.finish = "end"
                break
            request.generated += 1
            if piece := text.push(token):
                yield piece
            if text.stopped:
                request.finish = "stop"
                break
            if request.generated == sampling.max_new_tokens:
                request.finish = "length"
                break
            with self.turn:
                logits = decode_step(self.decoder, output.merged, token, position)
            position += 1
        rest = text.finish()
        if text.stopped:  # by a stop string in what was held back, too
            request.finish = "stop"
        if rest:
            yield rest

    def _settle(self, request: _Request, output: PrefillOutput) -> None:
        """After the answer: count the uses and hand over the births; returns at once."""
        for planned in request.plan.segments:
            if planned.variant is not None:
                self.store.used(planned.variant.variant_id, cfo=planned.cfo or 0.0, tokens=planned.variant.tokens)
        prompt = request.prompt
        shares = exact_shares(request.plan, [len(segment.token_ids) for segment in prompt.segments])
        context = BirthContext(prompt.segments, prompt.bounds, shares, request.session, request.config.sink_tokens)
        self.births.submit(output.recorder, output.merged.kv[:, 0], context)


def _monitor(request: _Request) -> FocusMonitor | None:
    """Early termination for this request, where it is on and there is something to end."""
    if request.config.focus == "off" or not any(planned.recompute for planned in request.plan.segments):
        return None
    chunks = len(request.prompt.segments) - 2
    return FocusMonitor(chunks, rule=request.config.focus, window=request.config.focus_window)


def _stats(request: _Request, layers: int) -> RequestStats:
    output, plan = request.output, request.plan
    lengths = [len(segment.token_ids) for segment in request.prompt.segments]
    recomputed = sum(len(planned.recompute) for planned in plan.segments)
    kept = sum(n for n, planned in zip(lengths, plan.segments, strict=False) if planned.variant is not None)
    total = sum(lengths)
    return RequestStats(
        ttft_s=request.first_token_s,
        plan_s=request.planned_s,
        load_s=request.loaded_s,
        prefill_s=max(0.0, request.first_token_s - request.planned_s - request.loaded_s),
        total_s=request.ended_s or request.clock(),
        tokens_prompt=total,
        tokens_reused=kept - recomputed,
        tokens_recomputed=recomputed,
        tokens_computed=total - kept,
        tokens_generated=request.generated,
        recompute_share=output.row_layers / (total * layers) if output is not None else 0.0,
        focus_layer=output.monitor.layer if output is not None and output.monitor is not None else None,
        finish=request.finish,
        chunks=tuple(_chunk_stats(request)),
    )


def _chunk_stats(request: _Request) -> Iterator[ChunkStats]:
    for segment, planned in zip(request.prompt.segments, request.plan.segments, strict=False):
        if segment.kind != "chunk":
            continue
        variant = planned.variant
        yield ChunkStats(
            chunk_id=segment.segment_id,
            outcome=planned.outcome,
            reason=planned.reason,
            tokens=len(segment.token_ids),
            recomputed=len(planned.recompute),
            cfo=planned.cfo,
            beta_prime=planned.adjusted,
            variant_id=variant.variant_id if variant is not None else None,
            tier=request.loaded[variant.variant_id].tier if variant is not None else None,
        )
    for chunk_id in request.prompt.trimmed:
        yield ChunkStats(chunk_id, "trimmed", "the prompt was full: chunks are left out from the last-ranked on")
