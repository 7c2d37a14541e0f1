"""The query engine: any LlamaIndex retriever in front of the synthesizer."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.base import BaseIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import QueryBundle

from cachecraft_rag.checks import check_kind, check_names, shown
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index.synthesizer import SETTINGS, CacheCraftSynthesizer
from cachecraft_rag.store.closeable import Closeable

# Arguments of `index.as_query_engine` about LlamaIndex's own LLM and prompts; the engine has its own.
_LLAMA_INDEX_ONLY = frozenset(
    {"chat_content_qa_template", "chat_content_refine_template", "llm", "multimodal", "refine_template"}
    | {"response_synthesizer", "simple_template", "summary_template", "use_async"}
)
_MODES = ("compact", "simple_summarize")  # as one prompt with all chunks is called
# Options that `from_index` passes to `from_defaults`, besides the options of `EngineConfig`.
_OWN_OPTIONS = SETTINGS | {"config", "engine", "model", "node_postprocessors", "response_mode", "store"}


def _retriever(index: BaseIndex[Any], options: dict[str, Any], *, own: Collection[str]) -> BaseRetriever:
    """The index's retriever. LlamaIndex ignores unknown options; here they are an error."""
    try:
        retriever = index.as_retriever(**options)
    except TypeError as error:
        raise ConfigError(f"the index cannot make a retriever with {', '.join(options)}: {error}") from error
    takers = [type(index).as_retriever, *(vars(kind).get("__init__") for kind in type(retriever).__mro__)]
    known = {
        parameter.name
        for taker in takers
        if inspect.isfunction(taker)
        for parameter in inspect.signature(taker).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    check_names(options, (known - {"self", "index", "args"}) | {"vector_store_kwargs"} | set(own))
    return retriever


class CacheCraftQueryEngine(RetrieverQueryEngine, Closeable):
    """Any LlamaIndex retriever, then `CacheCraftSynthesizer`. Make it with `from_index` or `from_defaults`.

    Close it at the end (or use a `with` block); otherwise pending captures may be lost.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        response_synthesizer: CacheCraftSynthesizer,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not isinstance(response_synthesizer, CacheCraftSynthesizer):
            raise ConfigError(
                "CacheCraftQueryEngine needs a CacheCraftSynthesizer; from_defaults and from_index make one"
            )
        super().__init__(retriever, response_synthesizer, node_postprocessors, callback_manager)
        self.synthesizer = response_synthesizer

    @classmethod
    def from_index(cls, index: BaseIndex[Any], **options: Any) -> Self:
        """In place of `index.as_query_engine()`, over any LlamaIndex index.

        Args:
            options: those of `from_defaults`; all others go to `index.as_retriever` (`similarity_top_k`, `filters` …).

        Raises:
            ConfigError: an option of `as_query_engine` that is about LlamaIndex's own LLM and prompts, or a retriever.
        """
        if isinstance(index, BaseRetriever):
            raise ConfigError("this is a retriever and not an index: write from_defaults(retriever, …)")
        if refused := sorted(_LLAMA_INDEX_ONLY.intersection(options)):
            raise ConfigError(
                f"{', '.join(refused)}: the model is named by `model`, the prompt by `system`, and every answer is one "
                "pass over all chunks; leave these options out"
            )
        check_kind("index", index, BaseIndex, advice="VectorStoreIndex.from_documents makes one")
        names = _OWN_OPTIONS | EngineConfig.option_names()
        own = {name: options.pop(name) for name in list(options) if name in names}
        return cls.from_defaults(_retriever(index, options, own=names), **own)

    @classmethod
    def from_defaults(
        cls,
        retriever: BaseRetriever,
        *,
        engine: AnswerEngine | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        response_mode: str = "compact",
        **options: Any,
    ) -> Self:
        """Over any LlamaIndex retriever.

        Args:
            engine: an open one, instead of `model`, `store`, `config` and `options`; you close it yourself.
            node_postprocessors, callback_manager: LlamaIndex's own.
            response_mode: "compact" or "simple_summarize", which are the same here: every answer is one pass.
            options: `model`, `store`, `config` and others of `CacheCraftSynthesizer.from_pretrained`.

        Raises:
            ConfigError: an index instead of a retriever, or settings of an engine beside an open one.
        """
        if isinstance(retriever, BaseIndex):
            raise ConfigError("this is an index and not a retriever: write from_index(index, …)")
        check_kind("retriever", retriever, BaseRetriever, advice="index.as_retriever() makes one")
        if str(getattr(response_mode, "value", response_mode)) not in _MODES:
            raise ConfigError(
                f"response_mode is {shown(response_mode)}; every answer is one pass over all chunks: use "
                f"{' or '.join(_MODES)}"
            )
        check_kind("engine", engine, AnswerEngine, optional=True, advice="Engine.from_pretrained makes one")
        options = {name: value for name, value in options.items() if value is not None}
        options["callback_manager"] = callback_manager
        if engine is None:
            synthesizer = CacheCraftSynthesizer.from_pretrained(**options)
        elif to_open := options.keys() - SETTINGS:
            raise ConfigError(f"{', '.join(sorted(to_open))}: the engine is open already; leave these options out")
        else:
            synthesizer = CacheCraftSynthesizer(engine, **options)
        return cls(retriever, synthesizer, node_postprocessors, callback_manager)

    @classmethod
    def from_args(cls, retriever: BaseRetriever, **options: Any) -> Self:  # type: ignore[override]
        """`from_defaults`; LlamaIndex's own would require OpenAI."""
        return cls.from_defaults(retriever, **options)

    @property
    def engine(self) -> AnswerEngine:
        """The engine that answers."""
        return self.synthesizer.engine

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        self._check(query_bundle)
        return super()._query(query_bundle)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        self._check(query_bundle)
        return await super()._aquery(query_bundle)

    def _check(self, query_bundle: QueryBundle) -> None:
        """Raise the engine's ConfigError for an empty question; retrievers fail on it in various other ways."""
        if not query_bundle.query_str.strip():
            self.engine.prompts.build(query_bundle.query_str, [])

    def with_retriever(self, retriever: BaseRetriever) -> CacheCraftQueryEngine:
        """A copy with another retriever; both share the engine."""
        return type(self)(retriever, self.synthesizer, self._node_postprocessors, self.callback_manager)

    def close(self) -> None:
        """Write pending captures and close what was opened here; an engine that was passed in stays open."""
        self.synthesizer.close()
