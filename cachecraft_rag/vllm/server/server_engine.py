"""The engine inside an API server: it builds prompts, seals requests, primes, and counts."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.observability.request_log import log_request
from cachecraft_rag.planning.calibration import load_calibration
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.server.documents import Asked
from cachecraft_rag.server.facts import facts_of, tokenizer_files
from cachecraft_rag.server.layouts import Layouts
from cachecraft_rag.server.settings import OFF, EndpointSettings
from cachecraft_rag.serving.audits.audit import Audit
from cachecraft_rag.serving.request import Request, RequestProgress, check_asked
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.vllm.calls import Calls
from cachecraft_rag.vllm.engine import VLLMBackend
from cachecraft_rag.vllm.idle.audits import PredictedAnswer
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.options import ModelConfig
from cachecraft_rag.vllm.records import RequestRecord
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.settings import ConnectorSettings


class ServerEngine(AnswerEngine):
    """An engine over the vLLM engine of the API server that it runs in.

    The server's event loop calls methods that look up, capture or read files in threads, because they block.

    Attributes:
        settings: settings of the endpoint.
        system: the server's instruction.
        new_variants: as in `VLLMBackend`.
    """

    store: ChunkCacheStore

    def __init__(
        self,
        model: VLLMModel,
        store: ChunkCacheStore,
        settings: ConnectorSettings,
        *,
        calls: Calls,
    ) -> None:
        config = settings.config
        super().__init__(model, store, config)
        self.settings: EndpointSettings = settings.endpoint
        self.system = config.system
        self._model = model
        self._calls = calls
        self._backend = VLLMBackend(
            model,
            store,
            config,
            calls=calls,
            key=settings.key,
            look_up=self.look_up,
            registry=self.request_counts.registry,
        )
        self._capturer = self._backend
        self.new_variants = self._backend.new_variants
        self._layouts = Layouts(self, system=config.system, best_last=config.best_last)

    @property
    def tenant(self) -> str:
        """Namespace of this engine; "" if it is the server's own."""
        return self._backend.tenant_of(self.namespace)

    @classmethod
    def open(
        cls,
        settings: ConnectorSettings,
        model_config: ModelConfig,
        *,
        chat_template: str | None,
        calls: Calls,
    ) -> Self:
        """Open the engine and its store with vLLM's settings; the caller closes it.

        `model_config` is that of the running vLLM, and `chat_template` None means the model's own. Raises ConfigError
        also if vLLM has another tokenizer than the model's. Earlier results of audits and a calibration that cannot be
        read are only logged.
        """
        if model_config.tokenizer != model_config.model:
            raise ConfigError(
                "the tokenizer is not the model's: its chunk-caches would not fit the model; leave --tokenizer out"
            )
        model = VLLMModel.load(
            model_config.model, dtype=str(model_config.dtype).removeprefix("torch.")
        )
        length = min(model.context_length, int(model_config.max_model_len))
        endpoint = settings.endpoint
        model = replace(
            model,
            name=endpoint.model or model.name,
            context_length=length,
            # The front end has added the options of vLLM that change what the model computes.
            fingerprint=settings.identity.fingerprint,
        )
        if chat_template is not None:
            model.tokenizer.chat_template = chat_template
        with ExitStack() as opened:
            store = opened.enter_context(
                ChunkCacheStore.open(settings.store, settings.config.store)
            )
            engine = cls(model, store, settings, calls=calls)
            if endpoint.root:
                engine.calibration = load_calibration(Path(endpoint.root), model.fingerprint)
                engine._backend.audits.results.seed(engine.calibration, engine.config)
            opened.pop_all()  # the engine's caller closes it
        return engine

    def prepare(self, asked: Asked, *, session: str | None) -> tuple[Request, Ask]:
        """Return a request with its prompt, and the message about it to vLLM's scheduler, named by the request's id.

        The settings of both are those that were asked for, or the server's, with the recompute ratio of a quality
        target or the calibrated α. They reuse and capture nothing if the prompt is too short (`for_prompt`), or begins
        with private text and `session` is None. Chunks that do not fit the context are left out by rank.
        """
        started = time.perf_counter()
        check_asked(asked.question, asked.history, session=session, config=asked.config)
        builder = self._layouts.of(asked.system, asked.tools, private=asked.private_system)
        prompt = builder.build(
            asked.question, asked.chunks, history=asked.history, reserve=asked.reserve
        )
        config = self.for_prompt(self.calibrated(asked.config or self.config), prompt)
        if prompt.segments[0].private and session is None:
            # each chunk-cache after it belongs to a session
            config = replace(config, reuse=False, capture=False)
        request = Request(
            prompt, config, SamplingParams(), session, started, namespace=self.namespace
        )
        request = self._backend.audits.results.with_ratio(request, asked.config or self.config)
        ask = Ask(
            prompt,
            request.config,
            session,
            client_salt=asked.client_salt,
            name=request.request_id,
            namespace=self.tenant,
        )
        return request, ask

    def chosen_ratio(self, asked: ReuseConfig) -> tuple[float, str] | None:
        """Return the quality target's (ratio, reason); None without it, or if `asked` sets ratio, α or no reuse."""
        return self._backend.audits.results.chosen_ratio(asked)

    def predicted_answer(self, request: Request) -> PredictedAnswer | None:
        """Return an empty object for the predictions of an answer to be audited (`AuditWork.recorder`), or None."""
        return self._backend.audits.recorder(request)

    def audit_of(self, request_id: str) -> Audit | None:
        """Return the audit of this tenant's answer by vLLM's id; None: unaudited, not yet, or not of the last 1,024."""
        return self._backend.audits.results.get(request_id, self.namespace)

    def ended(self, record: RequestRecord) -> None:
        """Count and log a request that has ended, without blocking; its new variants and audit wait for idle time."""
        stats = record.stats()
        self.request_counts.add(stats)
        log_request(stats, error=record.error)
        self._backend.note_fixed(record.request, record.report)
        self._backend.audits.ended(record.request, record.progress, record.predicted)

    def transfer(self, ask: Ask) -> dict[str, object]:
        """Return the `kv_transfer_params` of a request, see `VLLMBackend.transfer`: token ids and a signed message."""
        return self._backend.transfer(ask)

    @property
    def layer_by_layer(self) -> str:
        """Reason why prompts, or those with new chunks, are filled layer by layer; "" if none, or before a check."""
        return self._backend.layer_by_layer

    def check_reuse(self) -> None:
        """Check that reuse is exact, see `VLLMBackend.check_reuse`, then measure and set `min_prompt_tokens`."""
        self._backend.check_reuse()
        self.min_prompt_tokens = self._backend.measured_min_prompt_tokens()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for audits and new variants; return False after `timeout` seconds (None: no limit), else True."""
        return self._backend.settle(timeout)

    def calibrated(self, config: ReuseConfig) -> ReuseConfig:
        """Return `config` with the calibrated α, if one fits, and `plain_prompts` "off": `server.unmarked` searches."""
        return replace(super().calibrated(config), **OFF)

    def facts(self) -> dict[str, object]:
        """Return `facts_of` this server, plain JSON values by name: model, layout, settings. Also after `close`."""
        end_tokens = self._model.end_tokens
        return facts_of(self, self.settings, system=self.system, end_tokens=end_tokens)

    def tokenizer_files(self) -> dict[str, str]:
        """Return file name → text of the model's tokenizer, with the chat template in use."""
        assert self._model.folder is not None, "the server loaded it"
        return tokenizer_files(self._model.folder, self._model.tokenizer)

    def close(self) -> None:
        """Give up work in idle time, end requests of this engine, and close the store; the API server ends vLLM itself.

        Requests of clients over HTTP go on.
        """
        if not self._home.here:
            return
        self._backend.close()
        self._calls.close()
        self.store.close()

    def _pieces(self, request: Request, progress: RequestProgress) -> Generator[str]:
        self._home.require()
        yield from self._backend.pieces(request, progress)
