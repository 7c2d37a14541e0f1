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
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import QueryBundle
from pydantic import BaseModel

from cachecraft_rag.checks import check_kind, check_names, shown
from cachecraft_rag.engine.base import AnswerEngine, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index.synthesizer import CacheCraftSynthesizer
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store.closeable import Closeable

# Arguments of `index.as_query_engine` about LlamaIndex's own LLM and prompts; the engine has its own.
_LLAMA_INDEX_ONLY = frozenset(
    {
        "chat_content_qa_template",
        "chat_content_refine_template",
        "llm",
        "multimodal",
        "refine_template",
    }
    | {"response_synthesizer", "simple_template", "summary_template", "use_async"}
)
_MODES = ("compact", "simple_summarize")  # as one prompt with all chunks is called


def _retriever(
    index: BaseIndex[Any], options: dict[str, object], *, own: Collection[str]
) -> BaseRetriever:
    """The index's retriever. LlamaIndex ignores unknown options; here they are an error."""
    try:
        retriever = index.as_retriever(**options)
    except TypeError as error:
        raise ConfigError(
            f"the index cannot make a retriever with {', '.join(options)}: {error}"
        ) from error
    takers = [
        type(index).as_retriever,
        *(vars(kind).get("__init__") for kind in type(retriever).__mro__),
    ]
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
    def from_index(
        cls,
        index: BaseIndex[Any],
        *,
        engine: AnswerEngine | None = None,
        model: str | None = None,
        store: PathLike | None = None,
        config: EngineConfig | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        response_mode: str = "compact",
        streaming: bool = False,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        session: str | None = None,
        empty_response: str | None = None,
        with_outcomes: bool = True,
        output_cls: type[BaseModel] | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        callback_manager: CallbackManager | None = None,
        **options: object,
    ) -> Self:
        """Return a query engine over any LlamaIndex index; write it in place of `index.as_query_engine()`.

        Args:
            index: the index whose retriever finds the chunks.
            options: single options of `EngineConfig`; all others go to `index.as_retriever` (`similarity_top_k`,
                `filters` …). The named arguments are those of `from_defaults`.

        Raises:
            ConfigError: an option that is about LlamaIndex's own LLM and prompts, or unknown to the index's retriever.
        """
        if isinstance(index, BaseRetriever):
            raise ConfigError(
                "this is a retriever and not an index: write from_defaults(retriever, …)"
            )
        if refused := sorted(_LLAMA_INDEX_ONLY.intersection(options)):
            raise ConfigError(
                f"{', '.join(refused)}: the model is named by `model`, the prompt by `system`, and every answer is one "
                "pass over all chunks; leave these options out"
            )
        check_kind("index", index, BaseIndex, advice="VectorStoreIndex.from_documents makes one")
        engine_names = EngineConfig.option_names()
        engine_options = {name: options.pop(name) for name in list(options) if name in engine_names}
        named = set(inspect.signature(cls.from_index).parameters) - {"index", "options"}
        return cls.from_defaults(
            _retriever(index, options, own=engine_names | named),
            engine=engine,
            model=model,
            store=store,
            config=config,
            node_postprocessors=node_postprocessors,
            response_mode=response_mode,
            streaming=streaming,
            sampling=sampling,
            max_tokens=max_tokens,
            session=session,
            empty_response=empty_response,
            with_outcomes=with_outcomes,
            output_cls=output_cls,
            text_qa_template=text_qa_template,
            callback_manager=callback_manager,
            **engine_options,
        )

    @classmethod
    def from_defaults(
        cls,
        retriever: BaseRetriever,
        *,
        engine: AnswerEngine | None = None,
        model: str | None = None,
        store: PathLike | None = None,
        config: EngineConfig | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        response_mode: str = "compact",
        streaming: bool = False,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        session: str | None = None,
        empty_response: str | None = None,
        with_outcomes: bool = True,
        output_cls: type[BaseModel] | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        callback_manager: CallbackManager | None = None,
        **engine_options: Any,
    ) -> Self:
        """Return a query engine over any LlamaIndex retriever.

        Args:
            retriever: finds the chunks.
            engine: an open one, instead of `model`, `store`, `config` and `engine_options`; you close it yourself.
            model, store, config: as in `Engine.from_pretrained`; "demo" and "chunk-caches" by default.
            node_postprocessors, callback_manager: LlamaIndex's own.
            response_mode: "compact" or "simple_summarize", which are the same here: every answer is one pass.
            streaming, sampling, max_tokens, session, empty_response, with_outcomes, output_cls, text_qa_template: as
                in `CacheCraftSynthesizer`.
            engine_options: single options of `EngineConfig` by name (`system`, `device` …), which override `config`.
        """
        if isinstance(retriever, BaseIndex):
            raise ConfigError("this is an index and not a retriever: write from_index(index, …)")
        check_kind("retriever", retriever, BaseRetriever, advice="index.as_retriever() makes one")
        if str(getattr(response_mode, "value", response_mode)) not in _MODES:
            raise ConfigError(
                f"response_mode is {shown(response_mode)}; every answer is one pass over all chunks: use "
                f"{' or '.join(_MODES)}"
            )
        check_kind(
            "engine", engine, AnswerEngine, optional=True, advice="Engine.from_pretrained makes one"
        )
        answering: dict[str, Any] = {
            "streaming": streaming,
            "sampling": sampling,
            "max_tokens": max_tokens,
            "session": session,
            "empty_response": empty_response,
            "with_outcomes": with_outcomes,
            "output_cls": output_cls,
            "text_qa_template": text_qa_template,
            "callback_manager": callback_manager,
        }
        opening = {"model": model, "store": store, "config": config, **engine_options}
        to_open = {name: value for name, value in opening.items() if value is not None}
        if engine is None:
            synthesizer = CacheCraftSynthesizer.from_pretrained(**to_open, **answering)
        elif to_open:
            raise ConfigError(
                f"{', '.join(sorted(to_open))}: the engine is open already; leave these options out"
            )
        else:
            synthesizer = CacheCraftSynthesizer(engine, **answering)
        return cls(retriever, synthesizer, node_postprocessors, callback_manager)

    @classmethod
    def from_args(cls, retriever: BaseRetriever, **options: Any) -> Self:  # type: ignore[override]
        """Same as `from_defaults`: LlamaIndex's own method would require OpenAI."""
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
        """Return a copy with another retriever. Both share the engine: close one of them, once neither is needed."""
        return type(self)(
            retriever, self.synthesizer, self._node_postprocessors, self.callback_manager
        )

    def close(self) -> None:
        """Close the synthesizer, and with it an engine that it opened, after pending captures; others stay open."""
        self.synthesizer.close()
