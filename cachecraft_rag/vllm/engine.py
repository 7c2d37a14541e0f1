"""The engine whose model runs in vLLM: many requests at once and tensor parallelism, with the interface of `Engine`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from cachecraft_rag.checks import check_kind, check_mapping, check_path, check_text
from cachecraft_rag.engine.base import PathLike, StoreEngine
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.calibration import load_calibration
from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.answer_text import answer_text
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.new_variants import EXACT, Dropped, missing_of
from cachecraft_rag.serving.request import Request, RequestProgress, SegmentReport
from cachecraft_rag.serving.sampling import SamplingParams as Sampling
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.config import CACHE_FOLDER
from cachecraft_rag.types import Prompt, Segment
from cachecraft_rag.vllm.calls import Calls, Serving, Step
from cachecraft_rag.vllm.messages import FIELD, Ask
from cachecraft_rag.vllm.new_variants import Captured, IdleVariants
from cachecraft_rag.vllm.options import VLLMOptions
from cachecraft_rag.vllm.self_check import Predicted, check_prompt, self_check
from cachecraft_rag.vllm.served_model import ServedModel
from cachecraft_rag.vllm.settings import OFF, ConnectorSettings, check_config
from cachecraft_rag.vllm.versions import require_vllm

logger = logging.getLogger("cachecraft_rag.vllm")

_LIKELIEST = 16  # tokens whose log probabilities the self-check compares; of the plain request the first half


class VLLMEngine(StoreEngine):
    """Answers questions over chunks with a model that vLLM runs, in processes of its own.

    Make one with `from_pretrained`, below `if __name__ == "__main__":`, because those processes import the main module.
    """

    def __init__(
        self, model: ServedModel, store: ChunkCacheStore, config: EngineConfig, *, serving: Calls, key: str
    ) -> None:
        """Take over a running `serving`, whose connector has this key; `close` closes it."""
        super().__init__(model, store, config)
        self._model, self._serving, self._key = model, serving, key
        self._opened = ExitStack()  # closed by `close`, besides vLLM
        assert isinstance(config.new_variants, NewVariants), "EngineConfig makes one of a word"
        self.new_variants = IdleVariants(config.new_variants, self._capture_missing)
        store.before_removal.append(self.new_variants.forget)

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        config: EngineConfig | None = None,
        server: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Start vLLM and open (or make) the chunk-caches below a store folder.

        Args:
            model, store, config, options: as in `Engine.from_pretrained`; what vLLM decides itself is refused.
            server: arguments of vLLM's engine by name, such as `tensor_parallel_size` or `gpu_memory_utilization`.

        Raises:
            ModelNotFoundError, UnsupportedModelError, StoreError, ConfigError: each says what to do; also vLLM's own
            exceptions where it cannot start.
        """
        check_text("model", model, empty=False)
        check_path("store", store)
        check_kind("config", config, EngineConfig, optional=True, advice="write EngineConfig(namespace=…)")
        check_mapping("server", server or {})
        chosen = check_config((config or EngineConfig()).with_options(**options))
        require_vllm()
        served = ServedModel.load(model, dtype=chosen.dtype, options=VLLMOptions.from_values(server or {}))
        served.require_ranks((server or {}).get("tensor_parallel_size", 1))
        folder = Path(store) / CACHE_FOLDER
        settings = ConnectorSettings(str(folder), served.identity, chosen)
        with ExitStack() as opened:
            caches = opened.enter_context(ChunkCacheStore.open(folder, chosen.store))
            serving = opened.enter_context(Serving(_arguments(served, settings, server or {})))
            # vLLM's own: that of the model's config may be longer.
            context = min(served.context_length, int(serving.vllm_config.model_config.max_model_len))
            served = replace(served, context_length=context)
            engine = cls(served, caches, chosen, serving=serving, key=settings.key)
            engine.check_reuse()
            engine._opened = opened.pop_all()
        engine.calibration = load_calibration(Path(store), served.fingerprint)
        return engine

    def check_reuse(self) -> None:
        """Run the `self_check` and remove its captures. A context too short for a check is logged."""
        context = self._model.context_length
        block_size = int(self._serving.vllm_config.cache_config.block_size)
        prompt = check_prompt(len(self._model.tokenizer), block_size=block_size, context_length=context)
        if prompt is None:
            logger.warning("Reuse is unchecked: a context of %d tokens is too short for the self-check", context)
            return
        stored = RowFilter(chunk_ids=tuple(segment.segment_id for segment in prompt.segments[:-1]))

        def kept() -> bool:
            return len(self.store.rows(stored)) == len(stored.chunk_ids or ())

        try:
            self_check(self._model.name, prompt, self._predicted, kept=kept, dtype=self._model.layout.dtype)
        finally:
            if self.store.rows(stored):  # or a store that is read-only would refuse
                self.store.evict(stored)

    def _predicted(self, ask: Ask | list[int]) -> Predicted:
        """Serve one request of `self_check`."""
        plain, asked = (ask, None) if isinstance(ask, list) else (None, ask)
        prompt = {"prompt_token_ids": plain} if asked is None else self._prompt(asked)
        params = self._params(asked, max_tokens=1, temperature=0.0, logprobs=_LIKELIEST)
        (*_, last) = self._serving.generate(prompt, params)
        likeliest = sorted(last.logprobs.items(), key=lambda one: -one[1])
        if asked is None:
            return Predicted(dict(likeliest[: _LIKELIEST // 2]))
        report = last.report.get(FIELD, {"refused": "vLLM has reported nothing about it"})
        reports = [SegmentReport.from_dict(one) for one in report.get("segments", ())]
        taken = sum(
            len(segment.token_ids) - report.recomputed - report.not_loaded
            for segment, report in zip(asked.prompt.segments, reports, strict=False)
            if report.variant_id is not None
        )
        return Predicted(dict(likeliest), taken, report.get("refused", ""))

    def capture(self, prompt: Prompt, captures: Sequence[int], *, primed: bool) -> None:
        """See `PrimedEngine.capture`."""
        asked = _asking(prompt.segments[: captures[-1] + 1])
        config = replace(self.config, reuse=False, capture=True)
        self._filled(Ask(asked, config, primed=primed, captures=tuple(captures), when_stored=True))

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until new variants are captured, as far as the budget allows; returns whether they are."""
        return self.new_variants.settle(timeout)

    def note_fixed(self, request: Request, report: Mapping[str, Any] | None) -> None:
        """Note, of an answer that has ended, what was reused and fixed: it is captured in idle time."""
        fixed = {int(index): int(tokens) for index, tokens in (report or {}).get("fixed", ())}
        segments = request.prompt.segments[: max(fixed, default=-1) + 1]
        session = request.session if any(one.private for one in segments) else None
        candidate = Candidate(segments, fixed, session) if fixed else None
        self.new_variants.answered(request.prompt.bounds[-1], candidate)

    def _capture_missing(self, candidate: Candidate) -> Captured:
        """Capture what is still missing of a candidate, by a request that the scheduler computes in idle time."""
        found = self.look_up(candidate.segments, session=candidate.session)
        missing = missing_of(candidate, found)
        if not missing:
            return Captured(dropped=Dropped.STORED)
        segments = candidate.segments[: max(missing) + 1]
        had = [index for index in missing if index not in candidate.first]
        if not all(found.variants.get(segments[index].segment_id) for index in had):
            return Captured(dropped=Dropped.REMOVED)  # or evicted; it had one
        asking = _asking(segments)
        if asking.bounds[-1] >= self._model.context_length:  # vLLM would refuse it: a passage behind the stand-in
            return Captured(dropped=Dropped.TOO_LONG)
        # Blocks that vLLM has kept of an earlier try capture nothing, hence a salt of its own.
        salt = secrets.token_hex(8)
        how: Any = {"captures": tuple(missing), "when_stored": True, "idle": True, "first": tuple(candidate.first)}
        ask = Ask(asking, EXACT, candidate.session, client_salt=salt, **how)
        report = self._filled(ask)
        if "segments" not in report:
            given_up = "given_up" in report
            return Captured(again=given_up, dropped=None if given_up else Dropped.FAILED)
        left = missing_of(candidate, self.look_up(candidate.segments, session=candidate.session))
        texts = {candidate.segments[index].segment_id for index in candidate.first}
        if removed := texts & self.new_variants.removed(candidate):  # the workers have stored them all the same
            self.store.evict(RowFilter(namespace=self.namespace, chunk_ids=tuple(removed)))
        return Captured(
            stored=len(missing) - len(left),
            refused=len(left),
            tokens=report["row_layers"] // self._model.layout.layers,
            dropped=Dropped.REFUSED if left else None,
        )

    def _filled(self, ask: Ask) -> Mapping[str, Any]:
        """Have a prompt filled; returns the report."""
        (*_, last) = self._serving.generate(self._prompt(ask), self._params(ask, max_tokens=1, temperature=0.0))
        report: Mapping[str, Any] = last.report.get(FIELD, {})
        return report

    def calibrated(self, config: ReuseConfig) -> ReuseConfig:
        """See `AnswerEngine.calibrated`."""
        return replace(super().calibrated(config), **OFF)

    def close(self) -> None:
        """Finish the captures under way, and end vLLM."""
        if not self._home.here:
            return
        self.new_variants.close()
        with self._opened:
            self._serving.close()

    def _pieces(self, request: Request, progress: RequestProgress) -> Generator[str]:
        self._home.require()
        sampling = request.sampling
        ask = Ask(request.prompt, request.config, request.session, name=request.request_id)
        params = self._params(
            ask,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            structured_outputs=_structured(sampling),
        )
        reported: list[Mapping[str, Any]] = []
        try:
            self._serving.reports[ask.name] = None
            with closing(self._serving.generate(self._prompt(ask), params)) as steps:
                tokens = _tokens(request, progress, steps, reported)
                yield from answer_text(request, progress, tokens, self._model.tokenizer, self._model.end_tokens)
        finally:
            # Where the answer ended here, at a stop string or with its reader, vLLM has sent none with it.
            report = self._serving.reports.pop(ask.name, None)
            if progress.reports is None and report is not None:
                progress.reported(report)
            progress.end(request, "closed")
            self.note_fixed(request, next(iter(reported), report))

    def _prompt(self, ask: Ask) -> dict[str, Any]:
        return {"prompt_token_ids": ask.prompt.token_ids, "cache_salt": ask.cache_salt(self.namespace)}

    def _params(self, ask: Ask | None, **sampling: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            **sampling,
            detokenize=False,
            stop_token_ids=sorted(self._model.end_tokens),
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if ask is None else {"kv_transfer_params": {FIELD: ask.message(self._key)}},
        )


def _asking(segments: Sequence[Segment]) -> Prompt:
    """A prompt of these, with the question that a request must have."""
    end = segments[-1].token_ids[-1]
    return Prompt((*segments, Segment("question", "capture", (end, end), private=True)))


def _tokens(
    request: Request, progress: RequestProgress, steps: Iterable[Step], reported: list[Mapping[str, Any]]
) -> Iterator[int]:
    for step in steps:
        progress.drew_first(at=request.clock())
        if step.report:
            reported.append(step.report.get(FIELD, {}))
            progress.reported(reported[-1])
        yield from step.tokens


def _structured(sampling: Sampling) -> Any:
    """The grammar of an answer in vLLM's words, None without one."""
    if sampling.json_schema is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=str(sampling.json_schema))


def _arguments(model: ServedModel, settings: ConnectorSettings, server: Mapping[str, Any]) -> dict[str, Any]:
    own = {
        "model": str(model.folder),
        "dtype": model.layout.dtype,
        "enable_prefix_caching": True,
        "kv_transfer_config": settings.transfer_config(),
        "disable_log_stats": True,
    }
    taken = sorted(own.keys() & server.keys() - {"enable_prefix_caching", "disable_log_stats"})
    if taken:
        raise ConfigError(f"server: {', '.join(taken)} cannot be set here")
    return own | {"max_model_len": model.context_length} | dict(server)
