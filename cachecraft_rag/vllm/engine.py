"""The engine over vLLM: many requests at once and tensor parallelism, with the interface of `Engine`.

`VLLMBackend` makes the requests to vLLM; `VLLMEngine` starts vLLM, and `server.server_engine` runs inside its server.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from prometheus_client import CollectorRegistry

from cachecraft_rag.checks import check_kind, check_mapping, check_path, check_text
from cachecraft_rag.engine.base import AnswerEngine, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.reuse_timing import ReuseTiming
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.calibration import load_calibration
from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.server.settings import OFF
from cachecraft_rag.serving.answer_text import answer_text
from cachecraft_rag.serving.audits.audit import Audit
from cachecraft_rag.serving.audits.predictions import LikeliestTokens
from cachecraft_rag.serving.audits.results import AuditResults
from cachecraft_rag.serving.config import Audits, NewVariants
from cachecraft_rag.serving.new_variants import EXACT, Captured, Dropped, LookUp, missing_of
from cachecraft_rag.serving.request import Request, RequestProgress, SegmentReport
from cachecraft_rag.serving.sampling import SamplingParams as Sampling
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.config import CACHE_FOLDER
from cachecraft_rag.types.prompts import Prompt, Segment, token_array
from cachecraft_rag.vllm.calls import Calls, Serving, Step
from cachecraft_rag.vllm.idle.audits import (
    KEPT,
    FullPrediction,
    IdleAudits,
    PredictedAnswer,
    check_server,
    likeliest_of,
)
from cachecraft_rag.vllm.idle.new_variants import IdleVariants
from cachecraft_rag.vllm.messages import FIELD, Ask, FillReport
from cachecraft_rag.vllm.options import FP8_CACHES, VLLMOptions
from cachecraft_rag.vllm.refusals import missing_arguments, window_of
from cachecraft_rag.vllm.self_check import MOST_TOKENS, Predicted, check_prompt, self_check
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.settings import ConnectorSettings, check_config
from cachecraft_rag.vllm.versions import require_vllm

logger = logging.getLogger("cachecraft_rag.vllm")

# Most tokens whose log-probabilities the self-check compares, fewer if vLLM's `--max-logprobs` is lower; half as many
# of the plain request.
_LIKELIEST = 16
# seconds that the first length is timed, of which the fastest count: a server's first prompts may be slower than others
_WARM_UP_S = 5.0


class VLLMBackend:
    """Requests to the vLLM engine of one model, whose connector fills and captures chunk-caches.

    Args:
        store: the connector's chunk-caches, opened in this process too. Before it removes chunks, it calls this
            object's audits and new variants, which drop all work with these chunks.
        calls: sends requests to vLLM.
        key: the connector's key, which signs messages to it.
        look_up: looks up stored variants.
        registry: receives the metrics of audits, if answers are to be audited.

    Attributes:
        new_variants: captures chunks that were reused and fixed, while the engine is idle.
        audits: compares answers with full prefill, while the engine is idle.
        layer_by_layer: reason why the worker fills all prompts, or those with new chunks, layer by layer, once
            `check_reuse` has run; "" if it does not.
    """

    def __init__(
        self,
        model: VLLMModel,
        store: ChunkCacheStore,
        config: EngineConfig,
        *,
        calls: Calls,
        key: str,
        look_up: LookUp,
        registry: CollectorRegistry,
    ) -> None:
        assert isinstance(config.new_variants, NewVariants), (
            "EngineConfig turns a word into NewVariants"
        )
        assert isinstance(config.audit, Audits), "EngineConfig turns a word or a number into Audits"
        if config.audit.share:
            check_server(calls.vllm_config)
        self._model = model
        self._store = store
        self._namespace = config.namespace
        self._reuse = config.reuse
        self._calls = calls
        self._key = key
        self._look_up = look_up
        self.layer_by_layer = ""
        self.new_variants = IdleVariants(config.new_variants, self._capture_missing)
        results = AuditResults(
            config.audit,
            store,
            namespace=config.namespace,
            fingerprint=model.fingerprint,
            registry=registry,
            target=config.target(),
        )
        self.audits = IdleAudits(
            results,
            self._predicted_in_full,
            wait_for_variants=self.new_variants.settle,
            layers=model.layout.layers,
        )
        store.before_removal.extend((self.new_variants.forget, self.audits.forget))

    def close(self) -> None:
        """Drop all audits and new variants, whose requests go on; wait for results of audits that are being written."""
        self.audits.close()
        self.new_variants.close()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for new variants within their budget, and for audits.

        Returns True once none of them waits or is under way, and at once after `close`; False after `timeout` seconds.
        None waits without limit. Candidates for which the budget is spent are not waited for.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.new_variants.settle(timeout):
            return False
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self.audits.settle(left)

    # -- the self-check -----------------------------------------------------------------------------------------------

    def check_reuse(self) -> None:
        """Run the `self_check` and remove its captures; set `layer_by_layer`.

        It compares what vLLM's own prefill, our passes, and reuse predict. Where sliding windows are longer than its
        prompt, a second check crosses them. If the context is too short for a check, windows are too long for it, the
        store keeps no captures, or vLLM computes the second prompt without chunk-caches, a warning is logged: reuse is
        then unchecked. Raises UnsupportedModelError if reuse is not exact on this model, or vLLM computes the first
        prompt without chunk-caches; ConfigError if vLLM's `max_logprobs` is 0.
        """
        context = self._model.context_length
        prompt = self._check_prompt()
        if prompt is None:
            logger.warning(
                "Reuse is unchecked: a context of %d tokens is too short for the self-check",
                context,
            )
            return
        self._check_reuse_of(prompt)

        model_config = self._calls.vllm_config.model_config
        window = (
            0 if model_config.disable_sliding_window else window_of(model_config.hf_text_config)
        )
        if not prompt.bounds[-2] <= window < context:
            return
        crossing = self._check_prompt(window=window)
        if crossing is None:
            logger.warning(
                "Reuse across the model's sliding windows of %d tokens is unchecked: a check of them takes a context "
                "of more than 1.5 windows, and has at most %d tokens",
                window,
                MOST_TOKENS,
            )
            return
        self._check_reuse_of(crossing, is_second=True)

    def _check_prompt(self, *, window: int = 0) -> Prompt | None:
        return check_prompt(
            len(self._model.tokenizer),
            block_size=int(self._calls.vllm_config.cache_config.block_size),
            context_length=self._model.context_length,
            window=window,
        )

    def _check_reuse_of(self, prompt: Prompt, *, is_second: bool = False) -> None:
        """Run the `self_check` on one prompt and remove its captures."""
        chunk_ids = tuple(segment.segment_id for segment in prompt.segments[:-1])
        captured = RowFilter(chunk_ids=chunk_ids)

        def all_kept() -> bool:
            return len(self._store.rows(captured)) == len(chunk_ids)

        cache_dtype = str(self._calls.vllm_config.cache_config.cache_dtype)
        try:
            self_check(
                self._model.name,
                prompt,
                self._predicted,
                kept=all_kept,
                dtype=self._model.layout.dtype,
                cache_dtype=FP8_CACHES.get(cache_dtype, ""),
                is_second=is_second,
            )
        finally:
            if self._store.rows(captured):  # empty for a read-only store, which cannot evict
                self._store.evict(captured)

    def _predicted(self, asked: Ask | list[int]) -> Predicted:
        """Serve a request of `self_check`: with chunk-caches, or token ids without them."""
        most = self._calls.vllm_config.model_config.max_logprobs
        if most == 0:
            raise ConfigError(
                "the self-check compares the likeliest tokens, and --max-logprobs is 0: set it to 1 or more"
            )
        compared = _LIKELIEST if most < 0 else min(_LIKELIEST, most)  # below 0: no limit
        if isinstance(asked, list):
            step = self._last_step(
                {"prompt_token_ids": asked}, self._one_token(None, logprobs=compared)
            )
            likeliest = _by_likelihood(step)
            return Predicted(dict(likeliest[: max(1, compared // 2)]))

        step = self._last_step(self._prompt(asked), self._one_token(asked, logprobs=compared))
        likeliest = _by_likelihood(step)
        report = step.report.get(FIELD, {"refused": "vLLM has reported nothing about it"})
        # only some requests of the check capture
        self.layer_by_layer = report.get("layer_by_layer", self.layer_by_layer)
        segments = [SegmentReport.from_dict(values) for values in report.get("segments", ())]
        taken = sum(
            len(segment.token_ids) - outcome.recomputed - outcome.not_loaded
            for segment, outcome in zip(asked.prompt.segments, segments, strict=False)
            if outcome.variant_id is not None
        )
        return Predicted(dict(likeliest), taken, report.get("refused", ""))

    # -- the shortest prompt that is reused ---------------------------------------------------------------------------

    def measured_min_prompt_tokens(self) -> int:
        """Return from how many tokens on reuse pays (`ReuseTiming.min_prompt_tokens`), timed now; 0 without a GPU."""
        from vllm.platforms import current_platform

        return self._timing().min_prompt_tokens() if current_platform.is_cuda_alike() else 0

    def _timing(self) -> ReuseTiming:
        def ask(prompt: Prompt, config: ReuseConfig) -> float | None:
            # a new salt, because vLLM's prefix cache would have the prompt after the first time
            asked = Ask(prompt, config, client_salt=secrets.token_hex(8))
            began = time.perf_counter()
            report = self._fill(asked)
            seconds = time.perf_counter() - began
            return None if config.reuse and "refused" in report else seconds

        return ReuseTiming(
            store=self._store,
            layout=self._model.layout,
            vocabulary=len(self._model.tokenizer),
            context_length=self._model.context_length,
            config=self._reuse,
            capture=lambda prompt: self.capture(prompt, range(len(prompt.segments)), primed=True),
            ask=ask,
            warm_up_s=_WARM_UP_S,
        )

    # -- captures -----------------------------------------------------------------------------------------------------

    def capture(
        self,
        prompt: Prompt,
        captures: Sequence[int],
        *,
        primed: bool,
        namespace: str = "",
    ) -> None:
        """Capture segments of a prompt, stored ones too, by a request to vLLM; return once each is stored or dropped.

        Args:
            prompt: system segment and chunks, without a question; segments after the last capture are left out.
            captures: indices of segments, ascending; at least one.
            primed: True if this is priming, and the chunks are captured after their neighbours in the document.
            namespace: tenant of the captures, which all its sessions share; "": the server's own.
        """
        config = replace(self._reuse, reuse=False, capture=True)
        ask = Ask(
            _with_question(prompt.segments[: captures[-1] + 1]),
            config,
            primed=primed,
            captures=tuple(captures),
            when_stored=True,
            # A new salt, because blocks that vLLM has kept from an earlier capture would not be captured again.
            client_salt=secrets.token_hex(8),
            namespace=self.tenant_of(namespace),
        )
        self._fill(ask)

    def note_fixed(self, request: Request, report: FillReport | None) -> None:
        """Note the chunks of an answer that were reused and fixed: they are captured while the engine is idle.

        `NewVariants.share` of its prompt's tokens is added to the budget for that, even if there are no such chunks.
        Does nothing if new variants are "off".

        Args:
            request: the request that was answered.
            report: report of the connector, whose "fixed" names these chunks; None without one.
        """
        entries = report.get("fixed", ()) if report is not None else ()
        fixed = {int(index): int(tokens) for index, tokens in entries}
        candidate = None
        if fixed:
            segments = request.prompt.segments[: max(fixed) + 1]
            is_private = any(segment.private for segment in segments)
            owner = request.session if is_private else None
            candidate = Candidate(segments, fixed, owner, namespace=request.namespace)
        self.new_variants.answered(request.prompt.bounds[-1], candidate)

    def _capture_missing(self, candidate: Candidate) -> Captured:
        """Capture the missing variants of a candidate by a request that runs while the server is idle."""
        look_up = partial(
            self._look_up,
            candidate.segments,
            session=candidate.session,
            namespace=candidate.namespace,
        )
        stored = look_up()
        if stored.removed:
            return Captured(dropped=Dropped.REMOVED)
        missing = missing_of(candidate, stored)
        if not missing:
            return Captured(dropped=Dropped.STORED)

        segments = candidate.segments[: max(missing) + 1]
        stored_before = [index for index in missing if index not in candidate.never_stored]
        if not all(stored.variants.get(segments[index].segment_id) for index in stored_before):
            return Captured(dropped=Dropped.REMOVED)  # the chunk was removed or evicted
        prompt = _with_question(segments)
        # a long passage after the fixed one; vLLM would refuse it
        if prompt.bounds[-1] >= self._model.context_length:
            return Captured(dropped=Dropped.TOO_LONG)

        ask = Ask(
            prompt,
            EXACT,
            candidate.session,
            # A new salt, because blocks that vLLM has kept from an earlier attempt would not be captured.
            client_salt=secrets.token_hex(8),
            captures=tuple(missing),
            when_stored=True,
            idle=True,
            never_stored=tuple(candidate.never_stored),
            namespace=self.tenant_of(candidate.namespace),
        )
        report = self._fill(ask)
        if "segments" not in report:
            was_given_up = "given_up" in report
            return Captured(again=was_given_up, dropped=None if was_given_up else Dropped.FAILED)

        left = missing_of(candidate, look_up())
        texts = {candidate.segments[index].segment_id for index in candidate.never_stored}
        removed = texts & self.new_variants.removed(candidate)
        if removed:  # the workers may have stored them after the removal
            namespace = candidate.namespace or self._namespace
            self._store.evict(RowFilter(namespace=namespace, chunk_ids=tuple(removed)))
        return Captured(
            stored=len(missing) - len(left),
            refused=len(left),
            tokens=report["row_layers"] // self._model.layout.layers,
            dropped=Dropped.REFUSED if left else None,
        )

    def _fill(self, ask: Ask) -> FillReport:
        """Have a prompt filled; return the connector's report."""
        step = self._last_step(self._prompt(ask), self._one_token(ask))
        return step.report.get(FIELD, {})

    # -- answers ------------------------------------------------------------------------------------------------------

    def pieces(self, request: Request, progress: RequestProgress) -> Generator[str]:
        """Yield the answer's text piece by piece; nothing for an empty answer.

        The request to vLLM begins with the first piece; closing the iterator aborts it. `progress` takes up the tokens,
        the report and the end. Once the answer has ended, failed or was closed, its fixed chunks are noted for new
        variants, and it may be audited.
        """
        sampling = request.sampling
        predicted = self.audits.recorder(request)
        ask = Ask(
            request.prompt,
            request.config,
            request.session,
            name=request.request_id,
            namespace=self.tenant_of(request.namespace),
        )
        params = self._params(
            ask,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            structured_outputs=_structured(sampling),
            logprobs=None if predicted is None else KEPT,
        )
        reports: list[FillReport] = []
        if ask.left_to_server:  # no connector will report it
            progress.reported({"refused": ask.left_to_server})
        try:
            self._calls.reports[ask.name] = None
            with closing(self._calls.generate(_shared_prompt(ask), params)) as steps:
                tokens = _tokens(request, progress, steps, reports, predicted)
                yield from answer_text(
                    request, progress, tokens, self._model.tokenizer, self._model.end_tokens
                )
        finally:
            # If the answer was ended here, by a stop string or its reader, vLLM has not sent a report with it.
            report = self._calls.reports.pop(ask.name, None)
            if progress.reports is None and report is not None:
                progress.reported(report)
            progress.end(request, "closed")
            self.note_fixed(request, reports[0] if reports else report)
            is_closed = progress.finish in ("closed", "failed")
            read = progress.generated if is_closed else len(progress.tokens)
            self.audits.ended(request, progress, predicted, tokens=read)

    # -- audits -------------------------------------------------------------------------------------------------------

    def _predicted_in_full(self, request: Request, tokens: Sequence[int]) -> FullPrediction | None:
        """Compute a prompt exactly and the tokens of its answer; return what is predicted at the place of each token.

        None if the request gave way to others. Raises RuntimeError if vLLM has computed the prompt itself.
        """
        *context, question = request.prompt.segments
        with_answer = replace(
            question, token_ids=np.append(question.token_ids, token_array(tokens[:-1]))
        )
        ask = Ask(
            Prompt((*context, with_answer)),
            EXACT,
            request.session,
            # A new salt, because vLLM predicts nothing at tokens that its prefix cache has.
            client_salt=secrets.token_hex(8),
            captures=(),
            idle=True,
            own_tokens=len(tokens),
            namespace=self.tenant_of(request.namespace),
        )
        params = self._one_token(
            ask,
            logprobs=KEPT,
            prompt_logprobs=KEPT if len(tokens) > 1 else None,
            skip_reading_prefix_cache=False,
        )
        *_, last = steps = list(self._calls.generate(self._prompt(ask), params))
        report = last.report.get(FIELD, {})
        if "given_up" in report:
            return None
        if "segments" not in report:
            raise RuntimeError(
                f"the prompt was not computed for the audit: {report.get('refused')}"
            )

        of_prompt = next((step.prompt_logprobs for step in steps if step.prompt_logprobs), ())
        # The answer's tokens are the last ones. vLLM's second model runner reports only the tokens that it computes,
        # the first one all places of the prompt.
        of_answer = of_prompt[len(of_prompt) - len(tokens) + 1 :]
        places: list[LikeliestTokens] = []
        for logprobs in (*of_answer, last.logprobs[-1]):
            assert logprobs is not None, "vLLM predicts every token but the first"
            places.append(likeliest_of(logprobs))
        computed = report["row_layers"] // self._model.layout.layers + len(tokens)
        return FullPrediction(places, computed)

    # -- requests to vLLM ---------------------------------------------------------------------------------------------

    def transfer(self, ask: Ask) -> dict[str, object]:
        """Return vLLM's `kv_transfer_params` of a request, as plain JSON values.

        The keys are "prompt_token_ids", the token ids of the whole prompt, and `messages.FIELD`, the signed message.
        """
        return {"prompt_token_ids": ask.prompt.token_ids, FIELD: ask.message(self._key)}

    def tenant_of(self, namespace: str) -> str:
        """Return the tenant for an `Ask` or `salt_of`: `namespace`, or "" if it is the server's own."""
        return "" if namespace == self._namespace else namespace

    def _prompt(self, ask: Ask) -> dict[str, object]:
        """Return vLLM's prompt of a request that shares no block with others, not even those of its instruction."""
        return {
            "prompt_token_ids": ask.prompt.token_ids,
            "cache_salt": ask.cache_salt(self._namespace),
        }

    def _last_step(self, prompt: dict[str, object], params: object) -> Step:
        (*_, last) = self._calls.generate(prompt, params)
        return last

    def _one_token(self, ask: Ask | None, **sampling: object) -> object:
        """Return vLLM's parameters of a request that only needs its prompt computed."""
        return self._params(ask, max_tokens=1, temperature=0.0, **sampling)

    def _params(self, ask: Ask | None, **sampling: object) -> object:
        """Return vLLM's parameters; they carry a message only if the prompt may be filled from chunk-caches."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra = None
        if ask is not None and not ask.left_to_server:
            extra = {"kv_transfer_params": {FIELD: ask.message(self._key)}}
        return SamplingParams(
            **sampling,
            detokenize=False,
            stop_token_ids=sorted(self._model.end_tokens),
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )


def _shared_prompt(ask: Ask) -> dict[str, object]:
    """Return vLLM's prompt of a question; it shares the blocks before its first chunk with other questions."""
    prompt: dict[str, object] = {"prompt_token_ids": ask.prompt.token_ids}
    return prompt | ({"cache_salt": ask.request_salt} if ask.request_salt else {})


def _by_likelihood(step: Step) -> list[tuple[int, float]]:
    """Return the tokens in place of the last one with their log-probabilities, the likeliest first."""
    log_shares = likeliest_of(step.logprobs[-1]).log_shares
    return sorted(log_shares.items(), key=lambda item: -item[1])


def _with_question(segments: Sequence[Segment]) -> Prompt:
    """Return a prompt of these segments, with the question that a request must have."""
    end = int(segments[-1].token_ids[-1])
    question = Segment("question", "capture", token_array((end, end)), private=True)
    return Prompt((*segments, question))


def _tokens(
    request: Request,
    progress: RequestProgress,
    steps: Iterable[Step],
    reports: list[FillReport],
    predicted: PredictedAnswer | None,
) -> Iterator[int]:
    """Yield the tokens of an answer; `reports` takes up the connector's reports, `predicted` the predictions."""
    for step in steps:
        progress.first_token_s = progress.first_token_s or request.clock()
        if step.report:
            report: FillReport = step.report.get(FIELD, {})
            reports.append(report)
            progress.reported(report)
        if predicted is not None:
            predicted.note(step.tokens, step.logprobs)
        yield from step.tokens


def _structured(sampling: Sampling) -> object:
    """Return the grammar of an answer in vLLM's form, or None."""
    if sampling.json_schema is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=str(sampling.json_schema))


class VLLMEngine(AnswerEngine):
    """Answers questions over chunks with a model that vLLM runs, in separate processes.

    Make one with `from_pretrained`, below `if __name__ == "__main__":`, because those processes import the main module.

    Attributes:
        new_variants: as in `VLLMBackend`.
    """

    store: ChunkCacheStore

    def __init__(
        self,
        model: VLLMModel,
        store: ChunkCacheStore,
        config: EngineConfig,
        *,
        serving: Calls,
        key: str,
    ) -> None:
        """Take over a running `serving`, whose connector has this key; `close` closes it."""
        super().__init__(model, store, config)
        self._serving = serving
        self._opened = ExitStack()  # closed by `close`, after vLLM
        self._backend = VLLMBackend(
            model,
            store,
            config,
            calls=serving,
            key=key,
            look_up=self.look_up,
            registry=self.request_counts.registry,
        )
        self._capturer = self._backend
        self.new_variants = self._backend.new_variants

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        config: EngineConfig | None = None,
        server: Mapping[str, Any] | None = None,
        **options: object,
    ) -> Self:
        """Return an engine over a vLLM that is started here, with the chunk-caches below a store folder.

        The folder is made if it is missing, and its calibration is used; the caller closes the engine. Reuse is checked
        by a few short requests, and on a GPU `min_prompt_tokens` is measured. If an error is raised, vLLM is ended and
        the store is closed.

        Args:
            model: name or folder of a Hugging Face model, or "demo" for the embedded one.
            store: the folder; several processes may share it.
            config, options: all other settings, and fields of `config` by name, which take precedence. Those that vLLM
                decides are refused; `plain_prompts` counts in a server only.
            server: arguments of vLLM's engine by name, such as `tensor_parallel_size`; None: no others.

        Raises:
            UnsupportedModelError: also if these options of vLLM rule reuse out, the heads cannot be divided among the
                ranks, or there are no weight files on this machine.
            ConfigError: also if `server` has model, dtype or kv_transfer_config, or an option that rules out audits.
            TypeError: `server` has a name that vLLM does not know.
        """
        check_text("model", model, empty=False)
        check_path("store", store)
        check_kind(
            "config", config, EngineConfig, optional=True, advice="write EngineConfig(namespace=…)"
        )
        check_mapping("server", server or {})
        chosen = check_config((config or EngineConfig()).with_options(**options))
        require_vllm()
        served = VLLMModel.load(
            model, dtype=chosen.dtype, options=VLLMOptions.from_values(server or {})
        )
        ranks = (server or {}).get("tensor_parallel_size")
        served.require_ranks(1 if ranks is None else ranks)
        folder = Path(store) / CACHE_FOLDER
        settings = ConnectorSettings(str(folder), served.identity, chosen)
        with ExitStack() as opened:
            caches = opened.enter_context(ChunkCacheStore.open(folder, chosen.store))
            serving = opened.enter_context(Serving(_arguments(served, settings, server or {})))
            # vLLM's context may be shorter than that of the model's config.
            context = min(
                served.context_length, int(serving.vllm_config.model_config.max_model_len)
            )
            served = replace(served, context_length=context)
            engine = cls(served, caches, chosen, serving=serving, key=settings.key)
            engine._backend.check_reuse()
            engine.min_prompt_tokens = engine._backend.measured_min_prompt_tokens()
            engine._opened = opened.pop_all()
        engine.calibration = load_calibration(Path(store), served.fingerprint)
        engine._backend.audits.results.seed(engine.calibration, engine.config)
        return engine

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for new variants and audits (`VLLMBackend.settle`); False after `timeout` seconds (None: no limit)."""
        return self._backend.settle(timeout)

    def audit_of(self, request_id: str) -> Audit | None:
        """Return the audit of the tenant's answer; None: unaudited, not yet (see `settle`), not of the last 1,024."""
        return self._backend.audits.results.get(request_id, self.namespace)

    def _prepared(self, request: Request, reuse: ReuseConfig) -> Request:
        """Add the ratio that a quality target chooses."""
        return self._backend.audits.results.with_ratio(request, reuse)

    def calibrated(self, config: ReuseConfig) -> ReuseConfig:
        """Return these settings with the calibrated α for them, if there is one, and with `plain_prompts` "off"."""
        return replace(super().calibrated(config), **OFF)

    def close(self) -> None:
        """Give up work in idle time, end requests and vLLM, and close the store, also if vLLM has not ended in time."""
        if not self._home.here:
            return
        self._backend.close()
        with self._opened:
            self._serving.close()

    def _pieces(self, request: Request, progress: RequestProgress) -> Generator[str]:
        self._home.require()
        yield from self._backend.pieces(request, progress)


def _arguments(
    model: VLLMModel, settings: ConnectorSettings, server: Mapping[str, object]
) -> dict[str, object]:
    required: dict[str, object] = {
        "model": str(model.folder),
        "dtype": model.layout.dtype,
        "enable_prefix_caching": True,
        "kv_transfer_config": settings.transfer_config(),
        "disable_log_stats": True,
    }
    refused = sorted(
        required.keys() & server.keys() - {"enable_prefix_caching", "disable_log_stats"}
    )
    if refused:
        raise ConfigError(f"server: {', '.join(refused)} cannot be set here")
    needed = missing_arguments(model.name, model.arguments, server)
    return required | {"max_model_len": model.context_length} | dict(server) | needed
