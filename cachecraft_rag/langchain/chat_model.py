"""LangChain's chat model over an engine; documents come with the call, as documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import (
    BaseChatModel,
    agenerate_from_stream,
    generate_from_stream,
)
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json_schema import dereference_refs
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from typing_extensions import is_typeddict

from cachecraft_rag.checks import check_names, config_errors
from cachecraft_rag.engine.base import AnswerEngine, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.loading import engine_loader
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain.schemas import answer_schema
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.prompt.output_schema import asking_for
from cachecraft_rag.prompt.tools import CallReader
from cachecraft_rag.retrievers.langchain import note
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types.documents import (
    OUTCOME_KEY,
    REASON_KEY,
    SEARCHED_KEY,
    Chunk,
    noted_chunk_id,
    outcome_notes,
)

# in the words of other chat models
_FINISH = {"end": "stop", "stop": "stop", "length": "length", "closed": "closed"}
# meaningless for a local model
_SERVER_SETTINGS = {"api_key", "max_retries", "stream_usage", "streaming", "timeout"}
_SAMPLING = {"max_tokens", "temperature", "top_p", "seed"}


class ChatCacheCraft(Closeable, BaseChatModel):
    """A chat model over an engine. The documents to answer from, best first, are an argument of the call.

    >>> chat = ChatCacheCraft.from_pretrained("demo")  # doctest: +SKIP
    >>> chat.invoke("How do I descale the kettle?", documents=retriever.invoke("descale kettle"))  # doctest: +SKIP

    `usage_metadata["input_token_details"]` counts prompt tokens reused from chunk-caches (`cache_read`) and those of
    newly captured chunk-caches (`cache_creation`). Of messages without documents, what was captured before and passages
    that come again are reused as well (see `Engine.stream_text`); those are captured later, in idle time.
    `response_metadata["cachecraft"]` is `RequestStats.as_dict()` plus "documents": the `id` of each document, in the
    order given, the `chunk_id` of the text the model read of it, "cachecraft_outcome" and "cachecraft_reason". The
    documents themselves do not change; `with_outcomes` returns copies with these notes. "searched" is a tuple of the
    texts that `ConversationRetriever` searched for, () without it. Of a stream the last chunk has all of this; a stream
    that its reader leaves early has none.

    The conversation follows the documents in the prompt, so no chunk-cache depends on it. The same goes for system
    messages, because they may hold a user's text. An instruction for all requests belongs in the engine (`system=`).

    engine       the caller closes it, unless it came from `from_pretrained`
    session      whose private chunk-caches may be used besides the shared ones (see `Engine.stream`); None: those only
    reuse        how chunk-caches are reused; None: as the engine is configured
    max_tokens, temperature, top_p, seed, stop  see `SamplingParams`

    All but `engine` and `reuse` may also be given with a call, for that call alone.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    engine: AnswerEngine = Field(exclude=True, repr=False)
    session: str | None = None
    reuse: ReuseConfig | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    _opened: ExitStack = PrivateAttr(default_factory=ExitStack)

    def __init__(self, **settings: Any) -> None:
        with config_errors():
            super().__init__(**settings)

    @model_validator(mode="before")
    @classmethod
    def _without_settings_of_servers(cls, values: dict[str, object]) -> dict[str, object]:
        """Ignore server settings (a timeout …), so that this model can replace a remote one in an application."""
        return {name: value for name, value in values.items() if name not in _SERVER_SETTINGS}

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        config: EngineConfig | None = None,
        **settings: object,
    ) -> Self:
        """Load a model and open (or make) a store of chunk-caches, as `Engine.from_pretrained` does.

        Close the chat model when done (or use a `with` block), so that pending captures are written. `settings` are
        fields of this class (such as `reuse`), and options of `EngineConfig`, which override `config`. Settings of a
        server's model (`api_key`, `timeout` …) are ignored.
        """
        check_settings(settings, cls)
        names = EngineConfig.option_names() - cls.model_fields.keys()
        options = {name: settings.pop(name) for name in names & settings.keys()}
        with ExitStack() as opened:
            engine = opened.enter_context(
                engine_loader()(model, store=store, config=config, **options)
            )
            chat = cls(engine=engine, **settings)
            chat._opened = opened.pop_all()
        return chat

    def close(self) -> None:
        """Close the engine that `from_pretrained` opened, which writes pending captures; one passed in stays open."""
        self._opened.close()

    def bind_tools(
        self,
        tools: Sequence[object],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: object,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools, which it calls in the form of its chat template; this model stays as it is.

        Args:
            tools: functions, in any form that LangChain takes; without any, the model answers without tools.
            tool_choice: "auto", None or False: the model decides. "none": the prompt has the tools, but the answer is
                all text. "any", "required" or True: one of the tools is called. The name of a tool: this one is called.
                OpenAI's and Anthropic's dicts of these are taken too. A call that was asked for is sure to follow, with
                arguments of the tool's schema, unless `max_tokens` ends the answer; this needs the extra "structured".
            kwargs: settings of the calls, such as `max_tokens`; they and the tools' schemas are checked when the model
                is called.

        Raises:
            ConfigError: another `tool_choice`, a call asked for without tools, or a tool that only a provider's server
                can run, such as `{"type": "web_search"}`.
        """
        made = [_function_tool(tool) for tool in tools]
        return self.bind(tools=made, tool_choice=_choice_of(tool_choice, made), **kwargs)

    def with_structured_output(
        self,
        schema: Any,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: object,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return the model with answers that keep to the whole of a schema; this model stays as it is.

        The result returns an object of a pydantic model, else the JSON value. With `include_raw` it returns a dict of
        the message ("raw"), the object or value or None ("parsed"), and the parser's error or None ("parsing_error").

        Each token is drawn among those that lead to JSON of the schema, whatever `method` and `strict` say. If an
        answer ends early (`max_tokens`), LangChain's parser returns the part that was written, or it raises
        OutputParserException. `schema`, in any form of `answer_schema`, is also added to the question. `kwargs` are
        settings of the calls, such as `max_tokens`. Needs the extra "structured".
        """
        if method not in ("json_schema", "function_calling", "json_mode"):
            raise ConfigError(
                f"method is {method!r}; each of json_schema, function_calling and json_mode does the same"
            )
        json_schema = answer_schema(schema)
        kept_to = {"kwargs": {"method": method}, "schema": json_schema}
        model = self.bind(json_schema=json_schema, ls_structured_output_format=kept_to, **kwargs)
        parser = parser_of(schema)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        ).with_fallbacks(
            [RunnablePassthrough.assign(parsed=lambda _: None)], exception_key="parsing_error"
        )
        return RunnableMap(raw=model) | parsed

    @property
    def model_name(self) -> str:
        """Name of the model, as the engine was opened with it."""
        return self.engine.decoder.name

    def get_token_ids(self, text: str) -> list[int]:
        """Return a text's token ids without special tokens; LangChain's default would download GPT-2's tokenizer."""
        return self.engine.prompts.text_ids(text)

    @property
    def _llm_type(self) -> str:
        return "cachecraft"

    @property
    def _identifying_params(self) -> Mapping[str, object]:
        """Everything an answer depends on besides the messages; LangChain's own answer cache is keyed by it."""
        engine = self.engine
        return {
            "model_name": self.model_name,
            "fingerprint": engine.decoder.fingerprint,
            "namespace": engine.namespace,
            "system": engine.prompts.system.segment_id,
            "session": self.session,
            "reuse": repr(self.reuse or engine.config),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "default_stop": list(self.stop),
        }

    def _open(
        self, messages: list[BaseMessage], stop: list[str] | None, given: Mapping[str, Any]
    ) -> _Call:
        """Return a call whose model has not started yet; `given` are the settings that it brings."""
        settings = dict(given)
        documents = documents_of(settings.pop("documents", None) or (), "documents")
        session = settings.pop("session", self.session)
        tools = settings.pop("tools", ())
        choice = settings.pop("tool_choice", None)
        schema = settings.pop("json_schema", None)
        if unknown := settings.keys() - _SAMPLING:
            known = sorted(
                {"documents", "json_schema", "session", "stop", "tools", "tool_choice"} | _SAMPLING
            )
            raise ConfigError(
                f"{', '.join(sorted(unknown))}: no setting of this model; a call may bring {', '.join(known)}"
            )
        history, question = conversation(messages)
        if schema is not None and question:
            question += asking_for(str(SamplingParams(json_schema=schema).json_schema))

        calls = None
        if tools and choice != "none":
            call_format = self.engine.prompts_with(tools).calls
            is_forced = choice not in ("auto", None)
            offered = tools
            if is_forced:
                offered = [tool for tool in tools if choice in ("any", tool["function"]["name"])]
                schema = call_format.schema(offered)
            names = [tool["function"]["name"] for tool in offered]
            calls = CallReader(call_format, names, forced=is_forced)

        values: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING} | settings
        # `SamplingParams` refuses a string in place of a list.
        stop_strings: Any = self.stop if stop is None else stop
        sampling = SamplingParams(
            max_new_tokens=values.pop("max_tokens"),
            stop=stop_strings,
            json_schema=schema,
            **values,
        )
        chunks = [
            Chunk(document.page_content, known_id=noted_chunk_id(document.metadata))
            for document in documents
        ]
        generation = self.engine.stream(
            question,
            chunks,
            history=history,
            session=session,
            sampling=sampling,
            config=self.reuse,
            tools=tools,
        )
        return _Call(generation, documents, chunks, calls, session)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: object,
    ) -> Iterator[ChatGenerationChunk]:
        """Stream the answer; the last chunk has no text, only the statistics. LangChain itself calls the callbacks."""
        call = self._open(messages, stop, kwargs)
        try:
            for piece in call.generation:
                if text := call.visible(piece):
                    yield ChatGenerationChunk(message=AIMessageChunk(content=text))
        finally:
            call.generation.close()
        if call.calls is not None:
            yield _rest_of(call.calls, call.generation)
        yield self._last(call)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: object,
    ) -> AsyncIterator[ChatGenerationChunk]:
        """`_stream` that never blocks the event loop; tokenisation of the prompt runs in a thread."""
        call = await asyncio.to_thread(self._open, messages, stop, kwargs)
        try:
            async for piece in call.generation:
                if text := call.visible(piece):
                    yield ChatGenerationChunk(message=AIMessageChunk(content=text))
        finally:
            call.generation.close()
        if call.calls is not None:
            yield _rest_of(call.calls, call.generation)
        yield self._last(call)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # LangChain's default runs the whole answer in one thread; a few answers would then occupy the whole pool.
        return await agenerate_from_stream(self._astream(messages, stop, **kwargs))

    def _last(self, call: _Call) -> ChatGenerationChunk:
        """Return the last chunk of a stream: the tokens and statistics of the whole answer."""
        stats = call.generation.stats
        usage = UsageMetadata(
            input_tokens=stats.tokens_prompt,
            output_tokens=stats.tokens_generated,
            total_tokens=stats.tokens_prompt + stats.tokens_generated,
            input_token_details=InputTokenDetails(
                cache_read=stats.tokens_reused,
                cache_creation=self._captured_tokens(call),
            ),
        )
        metadata = {
            "finish_reason": _FINISH[stats.finish or "closed"],
            "model_name": self.model_name,
            "model_provider": "cachecraft",
            "cachecraft": call.statistics(),
        }
        message = AIMessageChunk(
            content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last"
        )
        return ChatGenerationChunk(message=message)

    def _captured_tokens(self, call: _Call) -> int:
        """Return the number of tokens whose chunk-caches were captured with this call."""
        captures = (self.reuse or self.engine.config).capture
        # Captures after a private instruction need a session that owns them.
        is_unowned = self.engine.prompts.system.private and call.session is None
        if not call.documents or not captures or is_unowned:
            return 0
        return sum(
            chunk.tokens for chunk in call.generation.stats.chunks if chunk.outcome == "computed"
        )


@dataclass
class _Call:
    """A call of the model: its answer, and the documents it answers from.

    chunks  of the documents, in their order
    calls   finds the calls of tools in the answer; None if the model has no tools
    """

    generation: Generation
    documents: list[Document]
    chunks: list[Chunk]
    calls: CallReader | None
    session: str | None

    def visible(self, piece: str) -> str:
        """Take one more piece of the answer; return the text that a reader may see now, without calls of tools."""
        return piece if self.calls is None else self.calls.push(piece)

    def statistics(self) -> dict[str, object]:
        """Return the statistics of the answer so far, with "documents" and "searched" as in `ChatCacheCraft`."""
        stats = self.generation.stats
        outcomes = {chunk.chunk_id: asdict(chunk) for chunk in stats.chunks}
        noted = (_searched_of(document) for document in self.documents)
        searched = next(filter(None, noted), ())
        return stats.as_dict() | {
            "documents": [
                {
                    "id": document.id,
                    "chunk_id": chunk.chunk_id,
                    **outcome_notes(outcomes.get(chunk.chunk_id)),
                }
                for document, chunk in zip(self.documents, self.chunks, strict=True)
            ],
            "searched": searched,
        }


def _searched_of(document: Document) -> tuple[str, ...]:
    """Return the texts that `ConversationRetriever` noted in a document, () if it noted none."""
    try:
        return tuple(json.loads(document.metadata[SEARCHED_KEY]))
    except (KeyError, TypeError, ValueError):  # a value of the application under the same key
        return ()


def with_outcomes(documents: Iterable[Document], answer: AIMessage) -> list[Document]:
    """Return copies of the documents of an answer, with what became of each as text in its metadata.

    The notes are "cachecraft_outcome" and "cachecraft_reason", so every database takes a copy. `documents` are those
    that `answer` was given, in the same order (another number: ConfigError); of a streamed answer pass all chunks,
    added up.
    """
    documents = list(documents)
    noted = answer.response_metadata.get("cachecraft", {}).get("documents")
    if noted is None or len(noted) != len(documents):
        raise ConfigError(
            f"the answer was given {len(noted or ())} documents, not these {len(documents)}; pass the whole message of "
            "ChatCacheCraft and the documents of its call"
        )
    copies = []
    for document, values in zip(documents, noted, strict=True):
        copy = document.model_copy()
        note(copy, {key: values[key] for key in (OUTCOME_KEY, REASON_KEY)})
        copies.append(copy)
    return copies


def parser_of(schema: Any) -> Runnable[Any, Any]:
    """Return LangChain's parser of an answer: to an object if `schema` is a pydantic model, else to a JSON value."""
    is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
    return PydanticOutputParser(pydantic_object=schema) if is_model else JsonOutputParser()


def _function_tool(tool: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's form. Raises ConfigError if it is no function, and what LangChain raises."""
    if isinstance(tool, dict):
        kind = tool.get("type")
        has_parameters = "input_schema" in tool or "parameters" in tool
        if kind == "function" and "function" not in tool:  # OpenAI's flat form
            named = {name: value for name, value in tool.items() if name != "type"}
            tool = {"type": "function", "function": named}
        elif kind not in (None, "function", "object") and not has_parameters:
            raise ConfigError(
                f"a tool of type {kind!r} runs on a provider's server; pass a function instead"
            )
    if is_typeddict(tool):
        tool = dereference_refs({"title": tool.__name__} | answer_schema(tool))
        tool.pop("$defs", None)
    made = convert_to_openai_tool(tool)
    function = made.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"a tool needs a function with a name, not {made!r}")
    return made


def _choice_of(
    choice: str | bool | dict[str, Any] | None, tools: Sequence[Mapping[str, Any]]
) -> str:
    """Return "auto", "none", "any" or the name of a tool. Raises ConfigError for anything else."""
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else function
        # Anthropic's {"type": "any"} names no tool
        choice = name or choice.get("type", choice)
    names = {None: "auto", False: "auto", True: "any", "required": "any"}
    name = names.get(choice, choice) if isinstance(choice, str | bool | None) else choice
    called = ["any", *(tool["function"]["name"] for tool in tools)] if tools else []
    known = ["auto", "none", *called]
    if name not in known:
        raise ConfigError(f"tool_choice is {choice!r}; there are {', '.join(known)}")
    return str(name)


def _rest_of(calls: CallReader, generation: Generation) -> ChatGenerationChunk:
    """Return the calls of an answer that has ended, or the text that might have been a call."""
    text, finished_calls = calls.finish()
    request_id = generation.stats.request_id
    chunks = [
        tool_call_chunk(
            name=call.name, args=call.arguments, id=f"call_{request_id}_{number}", index=number
        )
        for number, call in enumerate(finished_calls)
    ]
    return ChatGenerationChunk(message=AIMessageChunk(content=text, tool_call_chunks=chunks))


def check_settings(settings: Mapping[str, object], *classes: type[BaseModel]) -> None:
    """Raise ConfigError for a name in `settings` that `from_pretrained` of these classes does not know."""
    fields = {name for owner in classes for name in owner.model_fields} - {"engine", "llm"}
    known = {"store", "config"} | EngineConfig.option_names() | fields
    check_names(settings.keys() - _SERVER_SETTINGS, known, what="setting")


def documents_of(given: Any, name: str) -> list[Document]:
    """Return `given` as a new list, a single document as a list of one; `name` is that of the argument, for errors."""
    # LangChain's documents can be iterated over, which gives their fields
    is_list = isinstance(given, Iterable) and not isinstance(given, str | Document)
    documents = list(given) if is_list else [given]
    if not all(isinstance(document, Document) for document in documents):
        raise ConfigError(
            f"{name!r} must be a list of LangChain's documents (Document(text) makes one): leave out the step that "
            "joins them into one text, or nothing can be reused"
        )
    return documents


def history_of(input: Mapping[str, object], key: str) -> list[BaseMessage]:
    """Return the messages under `key` of a chain's input, as a list; [] without any.

    Items may have any form that LangChain takes for a message, such as ("human", "…") or a text of the user.
    """
    given = input.get(key) or []
    # LangChain would turn each letter, key or field of these into a message.
    if isinstance(given, str | Mapping | BaseMessage) or not isinstance(given, Iterable):
        raise ConfigError(
            f"{key!r} must be a list of messages, not {given!r}; write [('human', '…'), ('ai', '…')]"
        )
    return convert_to_messages(given)


def conversation(messages: Iterable[BaseMessage]) -> tuple[list[Turn], str]:
    """Return the earlier turns, pairs of role and text as in `turns_of`, and the text of the last one, the question.

    The question is "" without messages, and after a tool's result, which is an earlier turn. Raises ConfigError for the
    messages that `turns_of` refuses, and if the last turn is the assistant's.
    """
    turns = turns_of(messages)
    if turns[-1][0] == "result":
        return turns, ""
    *history, (role, question) = turns
    if role != "user":
        raise ConfigError(
            "the conversation ends with the assistant; the last message must be the user's or a tool's"
        )
    return history, question


def turns_of(messages: Iterable[BaseMessage]) -> list[Turn]:
    """Return the messages as turns: pairs of a role ("user", "assistant", "calls" or "result") and a text.

    Neighbouring messages of the same role are one turn, joined by an empty line. The first turn is the user's: it
    begins with the system messages from anywhere in the conversation, and is "" if the assistant began without any. The
    calls of a message follow its text as one turn of JSON, a list of {"name", "arguments"}, and then a turn for the
    result of each. Parts of an assistant's message that are not text are left out, and so is a tool's result without
    its call. Of several results with one call id, the last counts. Raises ConfigError for a message of an unknown kind,
    for more than text in a message that is not the assistant's, and for a call without a result.
    """
    messages = list(messages)
    instructions = [_text(message) for message in messages if _role(message) == "system"]
    tool_messages = [message for message in messages if isinstance(message, ToolMessage)]
    results = {message.tool_call_id: _text(message) for message in tool_messages}
    turns: list[tuple[Any, list[str]]] = [("user", instructions)]
    for message in messages:
        role = _role(message)
        text = _text(message)
        calls = message.tool_calls if isinstance(message, AIMessage) else []
        if role in ("system", "tool") or (calls and not text):
            pass
        elif role == turns[-1][0]:
            turns[-1][1].append(text)
        else:
            turns.append((role, [text]))
        if calls:
            if missing := [str(call["id"]) for call in calls if call["id"] not in results]:
                raise ConfigError(
                    f"the conversation has no ToolMessage with the result of call {', '.join(missing)}"
                )
            made = [{"name": call["name"], "arguments": call["args"]} for call in calls]
            turns.append(("calls", [json.dumps(made, ensure_ascii=False)]))
            turns += [("result", [results[call["id"]]]) for call in calls]  # type: ignore[index]
    return [(role, "\n\n".join(texts)) for role, texts in turns]


def _role(message: BaseMessage) -> str:
    # the type of a streamed chunk is the name of its class, such as AIMessageChunk
    kind = message.type.removesuffix("MessageChunk").lower()
    name = message.role if isinstance(message, ChatMessage) else kind
    role = {"human": "user", "ai": "assistant"}.get(name, name)
    if role not in ("user", "assistant", "system", "tool"):
        raise ConfigError(
            f"the model knows no {name} messages; write their text into a message of the user's"
        )
    return role


def _text(message: BaseMessage) -> str:
    # an answer's reasoning parts are left out
    if isinstance(message.content, list) and _role(message) != "assistant":
        kinds = {part.get("type") for part in message.content if isinstance(part, dict)} - {"text"}
        if kinds:
            raise ConfigError(
                f"the model reads text only, and a message holds {', '.join(sorted(map(str, kinds)))}"
            )
    return str(message.text)
