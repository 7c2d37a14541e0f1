"""Parsing of a chat request with `documents` into chunks, instruction, history and question."""

from __future__ import annotations

import json
import operator
from collections.abc import AsyncIterable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, cast

from cachecraft_rag.checks import check_flag, check_mapping, check_names, check_text
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import Turn, TurnRole
from cachecraft_rag.prompt.tools import Tool, checked_tools
from cachecraft_rag.server.settings import OFF, ClientSettings
from cachecraft_rag.server.wire import (
    FIELD,
    MOST_BODY,
    MOST_DOCUMENTS,
    MOST_PRIMED,
    PRIVATE_SYSTEM,
    STRICT_IDS,
)
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.documents import Chunk

# text with more characters per token of the context is refused before it is tokenised
_CHARACTERS_PER_TOKEN = 64

# Settings that do not change captured values.
_HARMLESS = frozenset({"reuse", "capture", "method.loading", "min_prompt_tokens"})
_EXAMPLE = 'write "documents": [{"text": "…"}, …], best first'
# fields that may hold a document's text: ours, and those of LangChain, of Haystack and of most agents
_TEXT_FIELDS = ("text", "page_content", "content")
_TEXT_PARTS = ("text", "input_text", "output_text")  # of chat completions and of responses
# fields of a message that would be lost, and what to send instead
_LOST = {"function_call": "write tool_calls", "audio": "send its text as content"}
_ROLES: Mapping[str, Literal["user", "assistant", "system", "tool"]] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
}


def _is_absent(value: object) -> bool:
    return value is None


# Fields of a request → test for harmless values, and advice.
Unsupported = Mapping[str, tuple[Callable[[object], bool], str]]
# Those of a chat request that do not work with a prompt of segments.
UNSUPPORTED: Unsupported = {
    "n": (lambda value: value in (None, 1), "ask again for another answer"),
    "echo": (operator.not_, "leave it out"),
    "prompt_logprobs": (_is_absent, "leave it out"),
    "use_beam_search": (operator.not_, "leave it out"),
    "truncate_prompt_tokens": (_is_absent, "documents that do not fit are left out by rank"),
    "chat_template": (_is_absent, "the model's own is used"),
    "chat_template_kwargs": (operator.not_, "leave them out"),
    "continue_final_message": (operator.not_, "end with the user's message"),
    "add_generation_prompt": (lambda value: value is not False, "leave it out"),
    "return_token_offsets": (operator.not_, "leave it out"),
    "return_prompt_text": (operator.not_, "leave it out"),
}


class PlainRequest(Protocol):
    """The field of a request that holds fields of the body which OpenAI does not have, as in vLLM's requests."""

    model_extra: Mapping[str, object] | None


class ToolParameter(Protocol):
    """vLLM's form of a tool."""

    def model_dump(self) -> dict[str, Any]:
        """Return the tool as JSON values, in OpenAI's form."""


class ChatRequest(PlainRequest, Protocol):
    """The fields of a chat request that both servers read; vLLM's `ChatCompletionRequest` has them."""

    documents: list[dict[str, object]] | None
    messages: Sequence[object]
    tools: Sequence[Tool | ToolParameter] | None
    tool_choice: object
    max_tokens: int | None
    max_completion_tokens: int | None
    cache_salt: str | None


@dataclass(frozen=True)
class Asked:
    """A request with documents.

    question  the user's; "" if the history ends with the result of a tool
    chunks   the documents in the order of the request, best first
    history  the turns before the question
    tools    tools that the model may call
    system   instruction of the request; None: the server's instruction
    config   reuse settings of the request; None: the server's settings
    reserve  number of tokens kept free for the answer
    client_salt  `cache_salt` of the request; "" if it has none
    private_system  True if the request says that its instruction or its tools hold one user's text
    """

    question: str
    chunks: tuple[Chunk, ...]
    history: tuple[Turn, ...]
    system: str | None
    config: ReuseConfig | None
    reserve: int
    client_salt: str
    tools: tuple[Tool, ...] = ()
    private_system: bool = False

    @classmethod
    def read(
        cls,
        request: ChatRequest,
        default: ReuseConfig,
        *,
        context_length: int,
        allowed: ClientSettings = "all",
    ) -> Self:
        """Return the request with documents in a chat request, which stays as it is.

        System messages are joined into the instruction, and neighbouring messages of one role into a turn. `reserve` is
        the request's `max_completion_tokens`, or else `max_tokens`, or else 128.

        Args:
            request: the chat request.
            default: the server's reuse settings.
            context_length: most tokens of prompt and answer together.
            allowed: settings that the request may change: "none"; "all"; "safe": all, but they shape no captures.

        Raises ConfigError for fields that do not work together with documents; for more than 64 characters per token
        of the context in all; for a last message that is neither the user's nor the result of a tool; and with
        `strict_ids` for a document whose id is that of another text.
        """
        for name, (fine, advice) in UNSUPPORTED.items():
            if not fine(getattr(request, name, None)):
                raise ConfigError(f"{name} cannot be used together with documents: {advice}")
        check_documents(request.documents)
        chunks = _chunks(request.documents or [], strict=_flag(request, STRICT_IDS))
        tools = checked_tools(
            tool if isinstance(tool, Mapping) else tool.model_dump() for tool in request.tools or ()
        )
        system, turns = _conversation(request.messages)
        size = sum(len(chunk.text) for chunk in chunks) + sum(len(text) for _, text in turns)
        size += len(json.dumps(tools)) if tools else 0
        if size > (most := _CHARACTERS_PER_TOKEN * context_length):
            raise ConfigError(
                f"documents, messages and tools have {size} characters, and the model's context is {context_length} "
                f"tokens; send at most {most}: the best documents only"
            )
        answer = (
            request.max_tokens
            if request.max_completion_tokens is None
            else request.max_completion_tokens
        )
        question = turns.pop()[1] if turns[-1][0] == "user" else ""
        return cls(
            question=question,
            chunks=chunks,
            history=tuple(turns),
            system=system,
            config=_config(_reuse_settings(request), default, allowed),
            reserve=SamplingParams().max_new_tokens if answer is None else answer,
            client_salt=request.cache_salt or "",
            tools=tuple(tools),
            private_system=_flag(request, PRIVATE_SYSTEM),
        )


def plain_config(
    request: PlainRequest, default: ReuseConfig, allowed: ClientSettings
) -> ReuseConfig | None:
    """Return the reuse settings of a request without documents; None if it, or the server, turns reuse off.

    A request turns it off with `plain_prompts` "off", whatever it is `allowed`, or with `reuse` False; the server with
    `reuse` False in `default`, which holds for all that a request does not set (`EndpointSettings.plain_prompts` is the
    caller's to check). `capture` is the request's if `allowed` is "all". Otherwise captures follow later, by the
    server's settings, and `capture` is the server's unless a "safe" request turns it off.
    """
    given = _reuse_settings(request)
    if isinstance(given, Mapping) and given.get("plain_prompts") == "off":
        return None
    capture = default.capture
    # captured later, by the server's own settings
    if isinstance(given, Mapping) and allowed == "safe":
        capture = capture and given.get("capture") is not False
        given = {**given, "capture": False}
    config = _config(given, default, allowed) or default
    config = replace(config, capture=config.capture if allowed == "all" else capture)
    return config if config.reuse else None


def owner_of(session: str | None, salt: str) -> str | None:
    """Return the owner of passages of unmarked text: the session, else a name made of `salt`; None: all share them."""
    return session if session is not None or not salt else f"salt {digest(salt)}"


async def whole_body(pieces: AsyncIterable[bytes]) -> bytes:
    """Return a body that arrives in pieces. Raises ConfigError after 24 MiB (`MOST_BODY`), without reading the rest."""
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > MOST_BODY:
            raise ConfigError(
                f"the body has more than {MOST_BODY} bytes; send fewer documents at once"
            )
    return bytes(body)


def read_body(body: bytes, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises ConfigError for names not in `names`, if given; all may be missing."""
    try:
        parsed = json.loads(body)
        check_mapping("the body", parsed)
        if names is not None:
            check_names(parsed, names, what="field")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body must be a JSON object: {error}") from error
    return dict(parsed)


def read_chunk_ids(body: Mapping[str, object]) -> tuple[str, ...]:
    """Return the ids in the field "chunk_ids" of a body, in order; ConfigError unless it is a list of texts, or []."""
    ids = body.get("chunk_ids")
    if not isinstance(ids, list):
        raise ConfigError('write {"chunk_ids": ["…"]}')
    for chunk_id in ids:
        check_text("each of chunk_ids", chunk_id)
    return tuple(ids)


def read_documents(documents: object) -> tuple[Chunk, ...]:
    """Return the chunks of a field "documents", in order (`check_documents`); an `id` of another text is replaced."""
    check_documents(documents)
    return _chunks(cast(list[Mapping[str, object]], documents))


@dataclass(frozen=True, slots=True)
class PrimingRequest:
    """A request to prime one document.

    chunks    the document's chunks, in order
    related   chunks of other documents that a document of one chunk is captured after, most similar first
    estimate  True if the request only asks what would be computed
    """

    chunks: tuple[Chunk, ...]
    related: tuple[Chunk, ...]
    estimate: bool


def read_priming(body: bytes, *, context_length: int) -> PrimingRequest:
    """Return the request to prime in the body of an HTTP request.

    Of the fields "documents", "related" and "estimate" only the first is required; it is the list of one document's
    chunks, which may be []. The chunks of both lists have at most 4,194,304 characters together, and each at most 64
    per token of the context.
    """
    given = read_body(body, ("documents", "related", "estimate"))
    related = given.get("related", [])
    check_flag("estimate", given.get("estimate", False))
    chunks = read_documents(given.get("documents"))
    related_chunks = read_documents(related)
    sizes = [len(chunk.text) for chunk in (*chunks, *related_chunks)]
    if sum(sizes) > MOST_PRIMED:
        raise ConfigError(
            f"the documents have {sum(sizes)} characters; send at most {MOST_PRIMED} in one request"
        )
    most = _CHARACTERS_PER_TOKEN * context_length
    for place, size in enumerate(sizes):
        if size > most:
            raise ConfigError(
                f"documents[{place}] has {size} characters, and the model's context is {context_length} tokens; split "
                f"it into chunks of at most {most}"
            )
    return PrimingRequest(chunks, related_chunks, bool(given.get("estimate")))


def _chunks(
    documents: Sequence[Mapping[str, object]], *, strict: bool = False
) -> tuple[Chunk, ...]:
    """Return the chunks. An `id` that is the id of another text gives way to the right one; `strict` refuses it."""
    chunks = tuple(
        Chunk(_document_text(document) or "", known_id=_known_id(document.get("id")))
        for document in documents
    )
    for place, chunk in enumerate(chunks):
        if strict and chunk.stale_id:
            raise ConfigError(
                f"documents[{place}]: {chunk.stale_id} is not the id of its text, which is {chunk.chunk_id}; send the "
                f"text as it was retrieved, leave out its id, or leave out {STRICT_IDS}"
            )
    return chunks


def _document_text(document: Mapping[str, object]) -> str | None:
    """Return a document's text; None if no field holds it."""
    texts = (document.get(name) for name in _TEXT_FIELDS)
    return next((text for text in texts if isinstance(text, str)), None)


def _known_id(given: object) -> str:
    """Return the `id` of a document as a chunk's `known_id`; ids of databases may be numbers, and are ignored."""
    return given if isinstance(given, str) else ""


def _flag(request: PlainRequest, name: str) -> bool:
    """Return a flag in the request's field `FIELD` that is no reuse setting; False without it."""
    given = (request.model_extra or {}).get(FIELD)
    value = given.get(name, False) if isinstance(given, Mapping) else False
    check_flag(name, value)
    return bool(value)


def _reuse_settings(request: PlainRequest) -> object:
    """Return the reuse settings in a request, or None."""
    given = (request.model_extra or {}).get(FIELD)
    flags = (STRICT_IDS, PRIVATE_SYSTEM)
    if not isinstance(given, Mapping) or not any(name in given for name in flags):
        return given
    return {name: value for name, value in given.items() if name not in flags} or None


def check_documents(documents: object) -> None:
    """Raise ConfigError, with what to write instead, for anything but a list of at most 1,000 objects with a text.

    The text is in the first of the fields "text", "page_content" and "content" that holds one; it may be "", and has no
    half surrogate pairs.
    """
    if not isinstance(documents, list):
        raise ConfigError(f"documents must be a list; {_EXAMPLE}")
    if len(documents) > MOST_DOCUMENTS:
        raise ConfigError(
            f"{len(documents)} documents are too many; send at most {MOST_DOCUMENTS}, the best ones"
        )
    for place, document in enumerate(documents):
        text = _document_text(document) if isinstance(document, Mapping) else None
        if text is None:
            raise ConfigError(
                f'documents[{place}] must be an object whose field "text" is a string; {_EXAMPLE}'
            )
        _check_characters(text, f"documents[{place}]")


def _check_characters(text: str, where: str) -> None:
    """Raise ConfigError for half a surrogate pair: JSON can contain one, but it is no character for a tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        why = f"{where}: the character at {error.start} is half a surrogate pair, which is not valid text; remove it"
        raise ConfigError(why) from error


def _conversation(messages: Sequence[object]) -> tuple[str | None, list[Turn]]:
    """Return the instruction or None, and the turns; neighbouring messages of the same role are joined."""
    instructions: list[str] = []
    turns: list[tuple[TurnRole, list[str]]] = []
    # ids of the calls that have no result yet, and where their results belong
    awaited: dict[str, int] = {}
    for place, message in enumerate(messages):
        given = message if isinstance(message, Mapping) else {}
        role = _ROLES.get(str(given.get("role")))
        if role is None:
            raise ConfigError(
                f"messages[{place}]: roles are system, user, assistant and tool; write the "
                "text of others into a message of the user's"
            )
        for name, advice in _LOST.items():
            if given.get(name):
                raise ConfigError(f"messages[{place}]: {name}: {advice}")
        text = _text(given.get("content"), place)
        if role == "system":
            instructions.append(text)
        elif role == "tool":
            index = awaited.pop(str(given.get("tool_call_id")), None)
            if index is None:
                raise ConfigError(
                    f"messages[{place}]: no call before it has its tool_call_id, or the call has a result already"
                )
            turns[index][1].append(text)
        else:
            if awaited:
                raise ConfigError(
                    f"messages[{place}]: the calls before it lack a result; send one message of role tool for each"
                )
            calls = _calls(given.get("tool_calls"), place) if role == "assistant" else {}
            if text or not calls:
                if turns and turns[-1][0] == role:
                    turns[-1][1].append(text)
                else:
                    turns.append((role, [text]))
            if calls:
                turns.append(("calls", [json.dumps(list(calls.values()))]))
                # the results may come in any order
                awaited = {name: len(turns) + number for number, name in enumerate(calls)}
                turns += [("result", []) for _ in calls]
    if awaited or not turns or turns[-1][0] not in ("user", "result"):
        raise ConfigError(
            "the last message must be the user's question about the documents, or the result of a tool"
        )
    return "\n\n".join(instructions) or None, [(role, "\n\n".join(texts)) for role, texts in turns]


def _calls(given: object, place: int) -> dict[str, dict[str, object]]:
    """Return the calls of tools in a message by their ids, as the prompt builder takes them."""
    calls: dict[str, dict[str, object]] = {}
    for call in given if isinstance(given, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ConfigError(f"messages[{place}]: its tool_calls are no calls of functions")
        arguments = function.get("arguments") or "{}"
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, Mapping):
            raise ConfigError(
                f"messages[{place}]: the arguments of a call must be the text of a JSON object"
            )
        name = str(call.get("id"))
        if name in calls:
            raise ConfigError(f"messages[{place}]: two of its calls have the same id")
        calls[name] = {"name": str(function.get("name")), "arguments": dict(parsed)}
    return calls


def _text(content: object, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        _check_characters(content, f"messages[{place}]")
        return content
    parts = list(content) if isinstance(content, Sequence) else [content]
    texts = [
        part.get("text")
        for part in parts
        if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
    ]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"messages[{place}]: messages hold text only; leave out images, sound and files"
        )
    return _text("".join(map(str, texts)), place)


def _config(given: object, default: ReuseConfig, allowed: ClientSettings) -> ReuseConfig | None:
    """Return the server's settings, changed by those of a request; None without such. Raises ConfigError."""
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            f'{FIELD} must be an object with settings of reuse, such as {{"recompute_ratio": 0.2}}'
        )
    # Python clients send all settings. Those of `OFF` have their defaults there.
    config = default.changed_by({**given, **OFF})
    changed = config.differences(default)
    if changed and allowed == "none":
        raise ConfigError(f"{FIELD}: this server sets {', '.join(changed)} itself; leave it out")
    if allowed == "safe" and config.capture and shaping_settings(config, default):
        # its settings would change chunk-caches that also serve other requests
        return replace(config, capture=False)
    return config


def shaping_settings(config: ReuseConfig, default: ReuseConfig) -> list[str]:
    """Return the names of the settings that differ from the server's and change captured values; [] if none does.

    All settings do but `reuse`, `capture`, `method.loading` and `min_prompt_tokens`.
    """
    return [name for name in config.differences(default) if name not in _HARMLESS]


def uncaptured_note(config: ReuseConfig | None, default: ReuseConfig) -> str:
    """Return why a request with these settings (None: the server's, `default`) captures nothing, for its statistics.

    It is "" if the request captures, or changes no setting that would shape captured values, or if the server captures
    nothing at all.
    """
    if config is None or config.capture or not default.capture:
        return ""
    shaping = shaping_settings(config, default)
    if not shaping:
        return ""
    return f"nothing was captured: {', '.join(shaping)} would shape chunk-caches that serve others, too"
