"""The engine inside an API server: it lays out prompts, seals requests, primes, and counts."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from cachecraft_rag import __version__
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.observability.request_log import log_request
from cachecraft_rag.planning.calibration import load_calibration
from cachecraft_rag.prompt.builder import PromptBuilder
from cachecraft_rag.serving.request import Request, check_asked
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.vllm.calls import Calls
from cachecraft_rag.vllm.engine import VLLMEngine
from cachecraft_rag.vllm.messages import FIELD, Ask
from cachecraft_rag.vllm.records import RequestRecord
from cachecraft_rag.vllm.served_model import PROTOCOL, TOKENIZER_FILES, ServedModel
from cachecraft_rag.vllm.server.documents import Asked
from cachecraft_rag.vllm.settings import ConnectorSettings, EndpointSettings

_INSTRUCTIONS = 32  # prompt builders that are kept, besides the server's own


class ServerEngine(VLLMEngine):
    """A `VLLMEngine` over the vLLM engine of the API server that it runs in.

    Its methods block, so the server's event loop calls them in threads.
    """

    def __init__(
        self, model: ServedModel, store: ChunkCacheStore, settings: ConnectorSettings, *, calls: Calls
    ) -> None:
        super().__init__(model, store, settings.config, serving=calls, key=settings.key)
        self.settings: EndpointSettings = settings.endpoint
        self.system, self._best_last = settings.config.system, settings.config.best_last
        self._builder_of = lru_cache(_INSTRUCTIONS)(self._new_builder)
        self._building = threading.Lock()

    @classmethod
    def open(cls, settings: ConnectorSettings, model_config: Any, *, chat_template: str | None, calls: Calls) -> Self:
        """Open it with vLLM's settings. Raises CacheCraftError where the model cannot be served over HTTP."""
        if model_config.tokenizer != model_config.model:
            raise ConfigError("another tokenizer than the model's own: its chunk-caches would not be the model's")
        model = ServedModel.load(model_config.model, dtype=str(model_config.dtype).removeprefix("torch."))
        length = min(model.context_length, int(model_config.max_model_len))
        own = settings.endpoint
        # Its fingerprint: the front end has added the options of vLLM that change what the model computes.
        fingerprint = settings.identity.fingerprint
        model = replace(model, name=own.model or model.name, context_length=length, fingerprint=fingerprint)
        if chat_template is not None:
            model.tokenizer.chat_template = chat_template
        engine = cls(model, ChunkCacheStore.open(settings.store, settings.config.store), settings, calls=calls)
        if own.root:
            engine.calibration = load_calibration(Path(own.root), model.fingerprint)
        return engine

    def prepare(self, asked: Asked, *, session: str | None) -> tuple[Request, Ask]:
        """Lay out the prompt of a request, and make the message to vLLM's scheduler.

        Raises ConfigError, ContextLengthError as `AnswerEngine.stream`.
        """
        started = time.perf_counter()
        check_asked(asked.question, asked.history, session=session, config=asked.config)
        builder = self._builder(asked.system)
        prompt = builder.build(asked.question, asked.chunks, history=asked.history, reserve=asked.reserve)
        config = self.calibrated(asked.config or self.config)
        request = Request(prompt, config, SamplingParams(), session, started)
        return request, Ask(prompt, config, session, client_salt=asked.client_salt, name=request.request_id)

    def ended(self, record: RequestRecord) -> None:
        """Count and log a request that has ended."""
        stats = record.stats()
        self.request_counts.add(stats)
        log_request(stats)
        self.note_fixed(record.request, record.report)

    def transfer(self, ask: Ask) -> dict[str, Any]:
        """vLLM's `kv_transfer_params` of a request."""
        return {"prompt_token_ids": ask.prompt.token_ids, FIELD: ask.message(self._key)}

    def facts(self) -> dict[str, Any]:
        """Facts that a client needs, as plain JSON values."""
        return {
            "protocol": PROTOCOL,
            "version": __version__,
            "model": self._model.name,
            "fingerprint": self._model.fingerprint,
            "layout": asdict(self._model.layout),
            "context_length": self._model.context_length,
            "end_tokens": sorted(self._model.end_tokens),
            "namespace": self.namespace,
            "system": self.system,
            "session_header": self.settings.session_header,
            "reuse": asdict(self.config),
            "client_settings": self.settings.client_settings,
            "plain_prompts": self.settings.plain_prompts,
        }

    def tokenizer_files(self) -> dict[str, str]:
        """Files of the model's tokenizer as texts, by name; with the chat template that is used."""
        folder, files = self._model.folder, dict[str, str]()
        assert folder is not None, "the server loaded it"
        for name in TOKENIZER_FILES:
            if (path := folder / name).is_file():
                files[name] = path.read_text(encoding="utf-8")
        if template := getattr(self._model.tokenizer, "chat_template", None):
            files["chat_template.jinja"] = template
        return files

    def close(self) -> None:
        """Close the store; the API server ends vLLM itself."""
        super().close()
        self.store.close()

    def _builder(self, system: str | None) -> PromptBuilder:
        """The prompt builder for an instruction; one that is not the server's may hold somebody's private text."""
        if system is None or system == self.system:
            return self.prompts
        with self._building:  # the tokenizer is not thread-safe while a builder copies it
            return self._builder_of(system)

    def _new_builder(self, system: str) -> PromptBuilder:
        model, private = self._model, not self.settings.shared_system
        return PromptBuilder(
            model.tokenizer,
            context_length=model.context_length,
            system=system,
            private_system=private,
            best_last=self._best_last,
        )
