"""Replies of chat completions and completions in OpenAI's form, whole and as streams of events.

Whole replies also have the answer's statistics, under "kv_transfer_params"; streams do not. A stream raises an error of
the answer, without its last event. A caller that stops it early has to close the answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

from cachecraft_rag.prompt.tools import ToolCall
from cachecraft_rag.server.local.answers import Answer
from cachecraft_rag.server.wire import FIELD

Json = dict[str, object]


def usage_of(answer: Answer) -> Json:
    """Return the numbers of tokens of prompt, answer and both so far; `cached_tokens` were taken from chunk-caches."""
    stats = answer.generation.stats
    return {
        "prompt_tokens": stats.tokens_prompt,
        "completion_tokens": stats.tokens_generated,
        "total_tokens": stats.tokens_prompt + stats.tokens_generated,
        "prompt_tokens_details": {"cached_tokens": stats.tokens_reused},
    }


def event(values: Json | str) -> str:
    """Return a server-sent event with these values as JSON, or with a text."""
    data = values if isinstance(values, str) else json.dumps(values, ensure_ascii=False)
    return f"data: {data}\n\n"


async def chat_reply(answer: Answer, model: str, *, with_tokens: bool) -> Json:
    """Read the answer to its end and return it as a chat completion of `model`; `with_tokens` adds its tokens' ids."""
    text, calls = await whole(answer)
    message: Json = {"role": "assistant", "content": text or (None if calls else "")}
    if calls:
        message["tool_calls"] = _calls(answer, calls)
    choice: Json = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": "tool_calls" if calls else answer.finish(),
    }
    if with_tokens:
        choice["token_ids"] = answer.new_tokens()
    return _reply(answer, model, "chat.completion", choice)


async def completion_reply(answer: Answer, model: str) -> Json:
    """Read the answer to its end and return it as a completion of `model`."""
    text, _ = await whole(answer)
    choice: Json = {"index": 0, "text": text, "logprobs": None, "finish_reason": answer.finish()}
    return _reply(answer, model, "text_completion", choice)


async def whole(answer: Answer) -> tuple[str, Sequence[ToolCall]]:
    """Read an answer to its end and return (text, calls of tools)."""
    text = "".join([piece async for piece in answer.pieces()])
    rest, calls = answer.rest()
    return text + rest, calls


async def chat_events(
    answer: Answer, model: str, *, with_usage: bool, with_tokens: bool
) -> AsyncIterator[str]:
    """Yield a chat completion as server-sent events, the last one "[DONE]".

    Args:
        with_usage: add an event with the usage before the last one.
        with_tokens: add the ids of new tokens to each event, as vLLM's `return_token_ids` does.
    """

    def chunk(delta: Json, finish: str | None = None) -> str:
        choice: Json = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        if with_tokens:
            choice["token_ids"] = answer.new_tokens()
        return event(_chunk(answer, model, "chat.completion.chunk", choice, with_usage))

    yield chunk({"role": "assistant", "content": ""})
    async for piece in answer.pieces():
        if piece or with_tokens:
            yield chunk({"content": piece})
    rest, calls = answer.rest()
    if rest:
        yield chunk({"content": rest})
    if calls:
        indexed = [{"index": place} | call for place, call in enumerate(_calls(answer, calls))]
        yield chunk({"tool_calls": indexed})
    yield chunk({}, "tool_calls" if calls else answer.finish())
    if with_usage:
        yield event(_usage_chunk(answer, model, "chat.completion.chunk"))
    yield event("[DONE]")


async def completion_events(answer: Answer, model: str, *, with_usage: bool) -> AsyncIterator[str]:
    """Yield a completion as server-sent events, the last one "[DONE]", and with `with_usage` before it the usage."""

    def chunk(text: str, finish: str | None = None) -> str:
        choice: Json = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return event(_chunk(answer, model, "text_completion", choice, with_usage))

    async for piece in answer.pieces():
        yield chunk(piece)
    yield chunk("", answer.finish())
    if with_usage:
        yield event(_usage_chunk(answer, model, "text_completion"))
    yield event("[DONE]")


def _reply(answer: Answer, model: str, kind: str, choice: Json) -> Json:
    return _head(answer, model, kind) | {
        "choices": [choice],
        "usage": usage_of(answer),
        "kv_transfer_params": {FIELD: answer.statistics()},
    }


def _chunk(answer: Answer, model: str, kind: str, choice: Json, with_usage: bool) -> Json:
    usage: Json = {"usage": None} if with_usage else {}
    return _head(answer, model, kind) | {"choices": [choice]} | usage


def _usage_chunk(answer: Answer, model: str, kind: str) -> Json:
    return _head(answer, model, kind) | {"choices": [], "usage": usage_of(answer)}


def _head(answer: Answer, model: str, kind: str) -> Json:
    return {"id": answer.name, "object": kind, "created": answer.created, "model": model}


def _calls(answer: Answer, calls: Sequence[ToolCall]) -> list[Json]:
    return [
        {
            "id": call_id(answer, place),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(calls)
    ]


def call_id(answer: Answer, place: int) -> str:
    """Return the id of a call by its place, from 0, among the calls of the answer."""
    return f"call_{answer.generation.stats.request_id}_{place}"
