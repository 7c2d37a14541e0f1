"""The response synthesizer: nodes in, an answer out, with LlamaIndex's events and the request's statistics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import ExitStack, aclosing, closing
from contextvars import ContextVar
from typing import Any, Self

from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]  # re-exported silently
from llama_index.core.instrumentation.events.base import BaseEvent  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.synthesis import (
    GetResponseEndEvent,
    GetResponseStartEvent,
)
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore
from llama_index.core.schema import QueryType as QueryTextType
from llama_index.core.types import RESPONSE_TEXT_TYPE
from pydantic import BaseModel

from cachecraft_rag.checks import check_flag, check_kind, check_text, shown
from cachecraft_rag.engine.base import AnswerEngine, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.loading import engine_loader
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index.llm import CacheCraftLLM, aobserved, observed, validated
from cachecraft_rag.llama_index.sources import Sources
from cachecraft_rag.prompt.output_schema import asking_for
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store.closeable import Closeable

_CONTEXT = "\u27e6cachecraft-template\u27e7"
dispatcher = get_dispatcher(__name__)


class AnswerStatsEvent(BaseEvent):
    """An answer of the synthesizer or chat engine has ended; `stats` is that of `response.metadata["cachecraft"]`."""

    stats: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Return "CacheCraftAnswerStatsEvent", the class name among LlamaIndex's events."""
        return "CacheCraftAnswerStatsEvent"


class _AnswerRecord:
    """Statistics of one answer, and its nodes, which take up their outcomes."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.statistics: dict[str, object] = {}

    def fill(self, counted: dict[str, object]) -> None:
        """Take `RequestStats.as_dict()` of an ended answer, put its outcomes into its nodes, and send the event."""
        self.sources.note_outcomes(counted)
        self.statistics.update(counted, chunk_ids=self.sources.chunk_ids)
        dispatcher.event(AnswerStatsEvent(stats=dict(self.statistics)))


# Of this task's answer, between `synthesize`, `get_response` and the response object: LlamaIndex passes only texts from
# one to the other. A context variable keeps concurrent answers apart.
_record: ContextVar[_AnswerRecord | None] = ContextVar("cachecraft_record", default=None)


def _current_record() -> _AnswerRecord:
    """Return the record of this task's answer; an empty one where `get_response` was called alone."""
    return _record.get() or _AnswerRecord(Sources(()))


class CacheCraftSynthesizer(BaseSynthesizer, Closeable):
    """A response synthesizer that passes the nodes to the engine as chunks, so that their chunk-caches are reused.

    A node's chunk is the text the model sees of it (`MetadataMode.LLM`), without its `file_path`.
    `response.metadata["cachecraft"]` is `RequestStats.as_dict()` plus `chunk_ids`, which maps node ids to chunk ids;
    for a stream it is complete at the stream's end, as is the outcome in the metadata of each source node.
    `get_response` returns text alone; its statistics are in the `AnswerStatsEvent`. Pass the nodes best first, as
    retrievers return them: the engine puts the best one last, directly before the question.

    Args:
        engine: you close it yourself.
        streaming: return `StreamingResponse` and `AsyncStreamingResponse`.
        sampling, session: see `Engine.stream`.
        max_tokens: most tokens of an answer, in place of those of `sampling`.
        empty_response: the answer if there are no nodes, instead of LlamaIndex's "Empty Response".
        with_outcomes: note in the metadata of each source node its chunk id and what became of it; False: no notes.
        output_cls: a pydantic model that the answer keeps to; the response is a `PydanticResponse`. Not for streams.
        text_qa_template: LlamaIndex's, with {context_str} first and {query_str} after it. Text before the chunks
            belongs in the engine's instruction (`system`).
    """

    def __init__(
        self,
        engine: AnswerEngine,
        *,
        streaming: bool = False,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        session: str | None = None,
        empty_response: str | None = None,
        with_outcomes: bool = True,
        output_cls: type[BaseModel] | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        check_flag("streaming", streaming)
        if output_cls is not None and (streaming or not hasattr(output_cls, "model_validate_json")):
            raise ConfigError(
                "output_cls must be a pydantic model, and its answers come whole: leave out streaming=True"
            )
        check_flag("with_outcomes", with_outcomes)
        check_text("empty_response", empty_response, optional=True)
        llm = CacheCraftLLM(engine, sampling=sampling, max_tokens=max_tokens, session=session)
        # Otherwise both helpers would count with OpenAI's tokenizer. The engine, not they, makes the chunks fit.
        count = engine.decoder.tokenizer.encode
        super().__init__(
            llm=llm,
            callback_manager=callback_manager,
            prompt_helper=PromptHelper(llm.context_window, llm.num_output, tokenizer=count),
            chat_prompt_helper=ChatPromptHelper(
                llm.context_window, llm.num_output, tokenizer=count
            ),
            streaming=streaming,
            empty_response=empty_response,
            output_cls=output_cls,
        )
        self._template = _checked_template(text_qa_template)
        self._with_outcomes = with_outcomes
        self.engine = engine
        self.llm = llm
        self._opened = ExitStack()

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        config: EngineConfig | None = None,
        streaming: bool = False,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        session: str | None = None,
        empty_response: str | None = None,
        with_outcomes: bool = True,
        output_cls: type[BaseModel] | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        callback_manager: CallbackManager | None = None,
        **engine_options: object,
    ) -> Self:
        """Load a model and open (or make) a store folder, as `Engine.from_pretrained`; `close` closes both.

        `engine_options` are single options of `EngineConfig` by name (`system`, `device` …), which override `config`.
        The other arguments are those of the class; they are checked after the model was loaded.
        """
        with ExitStack() as opened:
            engine = opened.enter_context(
                engine_loader()(model, store=store, config=config, **engine_options)
            )
            made = cls(
                engine,
                streaming=streaming,
                sampling=sampling,
                max_tokens=max_tokens,
                session=session,
                empty_response=empty_response,
                with_outcomes=with_outcomes,
                output_cls=output_cls,
                text_qa_template=text_qa_template,
                callback_manager=callback_manager,
            )
            made._opened = opened.pop_all()
        return made

    def sources(self, nodes: Iterable[NodeWithScore]) -> Sources:
        """Return the sources of an answer over these nodes: copies, with notes if `with_outcomes` says so."""
        return Sources(nodes, with_outcomes=self._with_outcomes)

    def close(self) -> None:
        """Close the engine that `from_pretrained` opened and write its pending captures; another stays open."""
        self._opened.close()

    def synthesize(
        self, query: QueryTextType, nodes: list[NodeWithScore], *args: object, **settings: object
    ) -> RESPONSE_TYPE:
        """Answer from nodes, best first, as LlamaIndex's synthesizers do; the sources are copies of the nodes.

        Without nodes the model is not asked: the answer is `empty_response`, a text also with `output_cls`, without
        statistics. The model does not see LlamaIndex's further source nodes (`args`). `settings` are options of
        `get_response`.
        """
        sources = self.sources(nodes)
        settings["document_ids"] = sources.noted_ids
        token = _record.set(_AnswerRecord(sources))
        try:
            return super().synthesize(query, sources.nodes, *args, **settings)
        finally:
            _record.reset(token)

    async def asynthesize(
        self, query: QueryTextType, nodes: list[NodeWithScore], *args: object, **settings: object
    ) -> RESPONSE_TYPE:
        """Same as `synthesize`, without blocking the event loop."""
        sources = self.sources(nodes)
        settings["document_ids"] = sources.noted_ids
        token = _record.set(_AnswerRecord(sources))
        try:
            return await super().asynthesize(query, sources.nodes, *args, **settings)
        finally:
            _record.reset(token)

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: object
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from texts, best first: a string, a generator of pieces if this streams, or an `output_cls`.

        Without texts the model answers the question alone; only `synthesize` uses `empty_response`. `response_kwargs`
        are options of `CacheCraftLLM.begin`, apart from `documents`. Statistics are in the `AnswerStatsEvent`. Raises
        ConfigError if the answer is no complete JSON of the `output_cls`, for example because `max_tokens` ended it.
        """
        question, asked = self._asked(query_str, text_chunks, response_kwargs)
        answer: RESPONSE_TEXT_TYPE
        if self._streaming:
            generation = self.llm.begin(question, **asked)
            answer = _deltas(
                observed(self.llm, question, generation, asked), generation, _current_record()
            )
        else:
            answer = self._whole(self.llm.complete(question, **asked))
        dispatcher.event(GetResponseEndEvent())
        return answer

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: object
    ) -> RESPONSE_TEXT_TYPE:
        """Same as `get_response`, without blocking the event loop; a stream is an asynchronous generator."""
        question, asked = self._asked(query_str, text_chunks, response_kwargs)
        answer: RESPONSE_TEXT_TYPE
        if self._streaming:
            generation = await asyncio.to_thread(self.llm.begin, question, **asked)
            answer = _adeltas(
                await aobserved(self.llm, question, generation, asked),
                generation,
                _current_record(),
            )
        else:
            answer = self._whole(await self.llm.acomplete(question, **asked))
        dispatcher.event(GetResponseEndEvent())
        return answer

    def _prepare_response_output(
        self, response_str: RESPONSE_TEXT_TYPE | None, source_nodes: list[NodeWithScore]
    ) -> RESPONSE_TYPE:
        response = super()._prepare_response_output(response_str, source_nodes)
        record = _record.get()
        if record is not None:
            response.metadata = {**(response.metadata or {}), "cachecraft": record.statistics}
        return response

    def _asked(
        self, query: str, texts: Sequence[str], options: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """A query as the template puts it, and options of `CacheCraftLLM.begin`."""
        texts = texts if isinstance(texts, str) else list(texts)
        dispatcher.event(GetResponseStartEvent(query_str=query, text_chunks=list(texts)))
        question = query if self._template is None else _question_in(self._template, query)
        if self._output_cls is not None:
            options["sampling"] = self.llm.keeping_to(self._output_cls, options.get("sampling"))
            question += asking_for(str(options["sampling"].json_schema))
        return question, {**options, "documents": texts}

    def _whole(self, response: CompletionResponse) -> Any:
        """The text of a response, or the object that it is; notes its statistics."""
        raw: Any = response.raw
        _current_record().fill(raw["cachecraft"])
        return (
            response.text
            if self._output_cls is None
            else validated(self._output_cls, response.text)
        )

    def _get_prompts(self) -> PromptDictType:
        if self._template is None:
            return {}
        return {"text_qa_template": self._template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if others := prompts.keys() - {"text_qa_template"}:
            raise ConfigError(
                f"{', '.join(sorted(others))}: there is one prompt, text_qa_template, because every answer is "
                "one pass over all chunks"
            )
        if "text_qa_template" in prompts:
            self._template = _checked_template(prompts["text_qa_template"])


def _checked_template(template: BasePromptTemplate | None) -> BasePromptTemplate | None:
    """The template. Raises ConfigError for one that does not fit the layout: instruction, chunks, question."""
    check_kind(
        "text_qa_template",
        template,
        BasePromptTemplate,
        optional=True,
        advice="write PromptTemplate('…')",
    )
    if template is not None:
        _question_in(template, "?")
    return template


def _question_in(template: BasePromptTemplate, query: str) -> str:
    """Return the text that a template puts after the chunks."""
    missing = {"context_str", "query_str"} - set(template.template_vars)
    before, mark, question = template.format(context_str=_CONTEXT, query_str=query).partition(
        _CONTEXT
    )
    if missing or not mark or _CONTEXT in question:
        raise ConfigError("text_qa_template needs {context_str} once, and {query_str} after it")
    if before.strip():
        raise ConfigError(
            f"text_qa_template: {shown(before.strip()[:80])} would stand before every chunk; give it to the engine as "
            "its instruction (system=…), and begin the template with {context_str}"
        )
    return question.strip()


def _deltas(
    responses: CompletionResponseGen, generation: Generation, record: _AnswerRecord
) -> Generator[str, None, None]:
    """The pieces of an answer; its statistics are filled in at the end in any case."""
    try:
        with closing(responses):
            for response in responses:
                if response.delta:
                    yield response.delta
    finally:
        record.fill(generation.stats.as_dict())


async def _adeltas(
    responses: AsyncGenerator[CompletionResponse, None],
    generation: Generation,
    record: _AnswerRecord,
) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(responses):
            async for response in responses:
                if response.delta:
                    yield response.delta
    finally:
        record.fill(generation.stats.as_dict())
