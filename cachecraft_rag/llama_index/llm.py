"""The engine as a LlamaIndex LLM, and its answers as LlamaIndex's responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from llama_index.core.base.llms.generic_utils import (
    astream_completion_response_to_chat_response,
    completion_response_to_chat_response,
    stream_completion_response_to_chat_response,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts import BasePromptTemplate
from pydantic import BaseModel, ValidationError

from cachecraft_rag.checks import check_kind, check_text
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.engine.capabilities import Capability
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index.stock_statistics import note_answer, observe_synthesizers
from cachecraft_rag.llama_index.tools import (
    CallingAnswer,
    calls_of,
    choice_of,
    only_first_call,
    question_of,
)
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.prompt.output_schema import asking_for
from cachecraft_rag.prompt.tools import Tool
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams, check_sampling
from cachecraft_rag.types.documents import Chunk

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

Model = TypeVar("Model", bound=BaseModel)


class CacheCraftLLM(FunctionCallingLLM):
    """The engine as a LlamaIndex LLM, for `Settings.llm` and every component that takes an LLM.

    A call may bring `documents`, texts to answer from, best first: each is a chunk, and its chunk-cache is reused. Of
    a prompt without documents, what was captured before and passages that come again are reused as well (see
    `Engine.stream_text`).

    Earlier chat turns become the history; the text of a system message is put in front of the next user turn, because
    the engine's own instruction precedes every chunk.

    It calls tools, as LlamaIndex's agents ask for, in the form of the model's chat template (`chat_with_tools`).

    Statistics are in `raw` of a whole response and of a stream's last one: `raw["usage"]`, by which LlamaIndex counts
    tokens, and `raw["cachecraft"]`, `RequestStats.as_dict()`. Of a stock engine (`index.as_query_engine(llm=…)`) they
    are in `response.metadata["cachecraft"]`, with those of the calls before the last in "earlier_calls". A stream that
    is left early ends its answer when Python frees it, without `raw`.

    Args:
        engine: you close it yourself.
        sampling: how tokens are drawn, unless a call has its own `sampling=`.
        max_tokens: most tokens of an answer; overrides that of `sampling`.
        session: see `Engine.stream`.
    """

    model_name: str
    context_window: int
    num_output: int
    session: str | None = None
    _engine: AnswerEngine = PrivateAttr()
    _sampling: SamplingParams = PrivateAttr()

    def __init__(
        self,
        engine: AnswerEngine,
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        session: str | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        check_kind("engine", engine, AnswerEngine, advice="Engine.from_pretrained makes one")
        check_sampling(sampling)
        check_text("session", session, optional=True)
        sampling = with_max_tokens(sampling or SamplingParams(), max_tokens)
        super().__init__(
            model_name=engine.decoder.name,
            context_window=engine.decoder.context_length,
            num_output=sampling.max_new_tokens,
            session=session,
            callback_manager=callback_manager or CallbackManager([]),
        )
        self._engine = engine
        self._sampling = sampling
        observe_synthesizers()

    @classmethod
    def class_name(cls) -> str:
        """Return "CacheCraftLLM", the class name in LlamaIndex's events."""
        return "CacheCraftLLM"

    @classmethod
    def from_dict(
        cls, data: dict[str, Any], *, engine: AnswerEngine | None = None, **kwargs: Any
    ) -> CacheCraftLLM:
        """Return the LLM that `to_dict` described, over an open engine (else ConfigError): a dict cannot hold one.

        Of `data` only `session` is read; `kwargs` are other arguments of the class.
        """
        if engine is None:
            raise ConfigError(
                "a dict holds no engine: write CacheCraftLLM.from_dict(data, engine=engine)"
            )
        return cls(engine, session=data.get("session"), **kwargs)

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "CacheCraftLLM holds an open engine and cannot be pickled; open an engine in each process, or run the "
            "pipeline without num_workers"
        )

    @property
    def metadata(self) -> LLMMetadata:
        """A new `LLMMetadata`; the longest answer is that of the class, whatever a call says.

        `is_function_calling_model`, which `FunctionAgent` asks for, is True if engine and chat template support tools.
        """
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.num_output,
            model_name=self.model_name,
            is_chat_model=True,
            is_function_calling_model=self._engine.capabilities.has(Capability.TOOLS)
            and self._engine.prompts.calls.native,
        )

    def begin(
        self,
        question: str,
        *,
        documents: Sequence[str] = (),
        document_ids: Sequence[str] = (),
        history: Sequence[Turn] = (),
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        config: ReuseConfig | None = None,
        tools: Sequence[Tool] = (),
        **unknown: object,
    ) -> Generation:
        """Return the engine's answer, without LlamaIndex's events; the model starts with the first piece.

        The prompt is checked now, and unknown options, a single text as `documents` and another number of ids than of
        documents are refused. If LlamaIndex makes a response in this task, the answer is noted for its metadata.

        Args:
            question: the text to answer.
            documents: texts of the chunks, best first; blank ones are left out.
            document_ids: the chunk id of each document, empty where it is not known; () if none is. A text that was
                edited after its id was noted is hashed again (`ChunkStats.stale_id`).
            history: earlier turns, see `prompt.builder.Turn`.
            sampling: of this answer, in place of the class's with its `max_tokens`; None: the class's.
            max_tokens: overrides that of the sampling; None: no change.
            config: reuse settings of this answer; None: the engine's.
            tools: tools that the model may call, in OpenAI's form; the calls are in the answer's text.
            unknown: other options, which are refused.
        """
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: no such option; there are documents, document_ids, history (with chat: the "
                "messages), max_tokens, sampling (SamplingParams: temperature and others), config and tools"
            )
        # A generator gives its texts once.
        is_list = isinstance(documents, Iterable) and not isinstance(documents, str)
        given = list(documents) if is_list else []
        if not is_list or not all(isinstance(text, str) for text in given):
            raise ConfigError(
                "documents must be a list of texts, each of them a chunk; put a single text into a list"
            )
        ids = list(document_ids) or [""] * len(given)
        if len(ids) != len(given):
            raise ConfigError(
                f"{len(ids)} document_ids for {len(given)} documents; give one for each"
            )
        chunks = [
            Chunk(text, known_id=name)
            for text, name in zip(given, ids, strict=True)
            if text.strip()
        ]
        generation = self._engine.stream(
            question,
            chunks,
            history=history,
            session=self.session,
            sampling=with_max_tokens(sampling or self._sampling, max_tokens),
            config=config,
            tools=tools,
        )
        note_answer(generation)
        return generation

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: object,
    ) -> Model:
        """Return an answer as an object of a pydantic model, to whose JSON schema it is kept (extra "structured").

        Args:
            output_cls: the pydantic model; its JSON schema is also added to the prompt.
            prompt: LlamaIndex's template of the messages.
            llm_kwargs: options of `begin`, apart from `history`.
            prompt_args: values of the template's variables. One without a value stays in the text, or LlamaIndex raises
                KeyError, which depends on its version.

        Raises:
            ConfigError: no answer can be kept to the model, it ends early (`max_tokens`), or a validator refuses it.
        """
        messages, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)
        return validated(output_cls, self.chat(messages, **options).message.content)

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: object,
    ) -> Model:
        """Same as `structured_predict`, without blocking the event loop."""
        messages, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)
        return validated(output_cls, (await self.achat(messages, **options)).message.content)

    def _structured(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        given: dict[str, Any] | None,
        values: Mapping[str, object],
    ) -> tuple[list[ChatMessage], dict[str, object]]:
        sampling = self.keeping_to(output_cls, (given or {}).get("sampling"))
        messages = prompt.format_messages(llm=self, **values)
        last = messages[-1]
        messages[-1] = ChatMessage(
            role=last.role, content=(last.content or "") + asking_for(str(sampling.json_schema))
        )
        return messages, {**(given or {}), "sampling": sampling}

    def keeping_to(
        self, output_cls: type[BaseModel], sampling: SamplingParams | None = None
    ) -> SamplingParams:
        """Return `sampling`, or that of the class, with a pydantic model's schema, to which it keeps an answer."""
        check_sampling(sampling)
        return replace(sampling or self._sampling, json_schema=output_cls)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; `kwargs` are options of `begin`, `formatted` is LlamaIndex's and has no effect."""
        return last_of(responses_of(self.begin(prompt, **kwargs)))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Yield a response for each piece (`delta`) with the text so far, and a last one with `raw`; see `complete`."""
        return responses_of(self.begin(prompt, **kwargs))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Same as `complete`, without blocking the event loop. A cancelled task ends the answer."""
        return await alast_of(aresponses_of(await asyncio.to_thread(self.begin, prompt, **kwargs)))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Same as `stream_complete`, asynchronously; the prompt is tokenised in a thread."""
        return aresponses_of(await asyncio.to_thread(self.begin, prompt, **kwargs))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: object) -> ChatResponse:
        """Answer the last message, the user's or a tool's result; every role but the assistant counts as the user.

        `kwargs` are options of `begin` without `history`, and `tool_choice`: "auto", "none" (all is text), "any" tool,
        or one's name; the last two need the extra "structured". Calls are blocks of the response's message.
        """
        generation, answer = self._begin_chat(messages, kwargs)
        if answer is not None:
            *_, last = answer.responses(responses_of(generation))
            return last
        return completion_response_to_chat_response(last_of(responses_of(generation)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: object) -> ChatResponseGen:
        """Yield a response for each piece (`delta`), the text so far, then one with `raw` and calls; see `chat`."""
        generation, answer = self._begin_chat(messages, kwargs)
        if answer is not None:
            return answer.responses(responses_of(generation))
        return stream_completion_response_to_chat_response(responses_of(generation))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: object) -> ChatResponse:
        """Same as `chat`, without blocking the event loop. A cancelled task ends the answer."""
        generation, answer = await asyncio.to_thread(self._begin_chat, messages, kwargs)
        if answer is not None:
            responses = answer.aresponses(aresponses_of(generation))
            async with aclosing(responses):
                return [response async for response in responses][-1]
        return completion_response_to_chat_response(await alast_of(aresponses_of(generation)))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: object
    ) -> ChatResponseAsyncGen:
        """Same as `stream_chat`, asynchronously; the prompt is tokenised in a thread."""
        generation, answer = await asyncio.to_thread(self._begin_chat, messages, kwargs)
        if answer is not None:
            return answer.aresponses(aresponses_of(generation))
        return astream_completion_response_to_chat_response(aresponses_of(generation))

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: object
    ) -> list[ToolSelection]:
        """Return the calls of tools in a response, in order.

        Without any it returns [], or raises ConfigError, which is a ValueError, if `error_on_no_tool_call`.
        """
        calls = calls_of(response.message)
        if not calls and error_on_no_tool_call:
            raise ConfigError(
                "the answer calls no tool; pass tool_required=True to chat_with_tools, or allow more max_tokens"
            )
        return calls

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: object,
    ) -> dict[str, Any]:
        asked = ChatMessage(content=user_msg) if isinstance(user_msg, str) else user_msg
        messages = [*(chat_history or []), *([asked] if asked is not None else [])]
        made = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        choice = {"tool_choice": "any"} if tool_required else {}
        return {"messages": messages, "tools": made, **choice, **kwargs}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: object,
    ) -> ChatResponse:
        if not allow_parallel_tool_calls:
            only_first_call(response)
        return response

    def _begin_chat(
        self, messages: Sequence[ChatMessage], given: Mapping[str, Any]
    ) -> tuple[Generation, CallingAnswer | None]:
        """Return the answer, and a reader of its calls; None if the model may call no tool."""
        options = dict(given)
        tools = options.get("tools") or ()
        choice = choice_of(options.pop("tool_choice", None), tools)
        question, history = question_of(messages)
        if not tools or choice == "none":
            return self.begin(question, history=history, **options), None
        call_format = self._engine.prompts_with(tools).calls
        is_forced = choice != "auto"
        if is_forced:
            tools = [tool for tool in tools if choice in ("any", tool["function"]["name"])]
            sampling = options.get("sampling") or self._sampling
            check_kind("sampling", sampling, SamplingParams)
            options["sampling"] = replace(sampling, json_schema=call_format.schema(tools))
        answer = CallingAnswer(call_format, tools, forced=is_forced)
        return self.begin(question, history=history, **options), answer


def with_max_tokens(sampling: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """Return the sampling with another limit of an answer's tokens; with None the sampling itself."""
    return sampling if max_tokens is None else replace(sampling, max_new_tokens=max_tokens)


def validated(output_cls: type[Model], text: str | None) -> Model:
    """Return an answer as an object of a pydantic model; ConfigError if it is not JSON of it, such as one cut short."""
    try:
        return output_cls.model_validate_json(text or "")
    except ValidationError as error:
        raise ConfigError(
            f"the answer is no {output_cls.__name__}; allow it more max_tokens: {error}"
        ) from error


def _raw(stats: RequestStats) -> dict[str, object]:
    usage = {"prompt_tokens": stats.tokens_prompt, "completion_tokens": stats.tokens_generated}
    return {"usage": usage | {"total_tokens": sum(usage.values())}, "cachecraft": stats.as_dict()}


def responses_of(generation: Generation) -> CompletionResponseGen:
    """Yield a response per piece, with the text so far, then one with the statistics in `raw`; close the answer."""
    try:
        for piece in generation:
            yield CompletionResponse(text=generation.text, delta=piece)
    finally:
        generation.close()
    yield CompletionResponse(text=generation.text, delta="", raw=_raw(generation.stats))


async def aresponses_of(generation: Generation) -> CompletionResponseAsyncGen:
    """Same as `responses_of`, without blocking the event loop."""
    async with aclosing(generation):
        async for piece in generation:
            yield CompletionResponse(text=generation.text, delta=piece)
    yield CompletionResponse(text=generation.text, delta="", raw=_raw(generation.stats))


def last_of(responses: CompletionResponseGen) -> CompletionResponse:
    """Read all responses and return the last: the whole text and the statistics."""
    *_, last = responses
    return last


async def alast_of(responses: CompletionResponseAsyncGen) -> CompletionResponse:
    """Same as `last_of`; closes the generator."""
    async with aclosing(responses):
        return [response async for response in responses][-1]


@overload
def observed(
    llm: CacheCraftLLM, asked: str, generation: Generation, documents: Mapping[str, object]
) -> CompletionResponseGen: ...


@overload
def observed(
    llm: CacheCraftLLM,
    asked: Sequence[ChatMessage],
    generation: Generation,
    documents: Mapping[str, object],
) -> ChatResponseGen: ...


def observed(
    llm: CacheCraftLLM,
    asked: str | Sequence[ChatMessage],
    generation: Generation,
    documents: Mapping[str, object],
) -> CompletionResponseGen | ChatResponseGen:
    """Return a generator of an answer's responses, with LlamaIndex's events of an LLM call.

    They are completions if a prompt was `asked`, and chat responses for messages: one for each piece, then one with the
    statistics in `raw`. The event of the call's begin is sent now, the others while the responses are read. `documents`
    are the options of the call, as the events name them.

    The answer ends with its reader: LlamaIndex's wrapper does not close it, and event handlers may keep its frames
    alive. So the generator closes the answer at its end, and when it is closed after its first response.
    """
    completions = responses_of(generation)
    is_completion = isinstance(asked, str)
    responses = (
        completions if is_completion else stream_completion_response_to_chat_response(completions)
    )

    @(llm_completion_callback() if is_completion else llm_chat_callback())
    def call(llm: CacheCraftLLM, asked: object, **_documents: object) -> object:
        return responses

    called = call(llm, asked, **documents)

    def pieces() -> Generator[Any, None, None]:
        try:
            yield from called
        finally:
            called.close()
            generation.close()

    return pieces()


@overload
async def aobserved(
    llm: CacheCraftLLM, asked: str, generation: Generation, documents: Mapping[str, object]
) -> AsyncGenerator[CompletionResponse, None]: ...


@overload
async def aobserved(
    llm: CacheCraftLLM,
    asked: Sequence[ChatMessage],
    generation: Generation,
    documents: Mapping[str, object],
) -> AsyncGenerator[ChatResponse, None]: ...


async def aobserved(
    llm: CacheCraftLLM,
    asked: str | Sequence[ChatMessage],
    generation: Generation,
    documents: Mapping[str, object],
) -> AsyncGenerator[CompletionResponse, None] | AsyncGenerator[ChatResponse, None]:
    """Same as `observed`, asynchronously; this coroutine sends the event of the call's begin."""
    completions = aresponses_of(generation)
    is_completion = isinstance(asked, str)
    responses = (
        completions if is_completion else astream_completion_response_to_chat_response(completions)
    )

    @(llm_completion_callback() if is_completion else llm_chat_callback())
    async def call(llm: CacheCraftLLM, asked: object, **_documents: object) -> object:
        return responses

    called = await call(llm, asked, **documents)

    async def pieces() -> AsyncGenerator[Any, None]:
        try:
            async for response in called:
                yield response
        finally:
            await called.aclose()
            generation.close()

    return pieces()
