"""Replies of `/v1/responses` in OpenAI's form, whole and as a stream of events, with errors as in `replies`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from cachecraft_rag.prompt.tools import ToolCall
from cachecraft_rag.server.local.answers import Answer
from cachecraft_rag.server.local.fields import Body
from cachecraft_rag.server.local.replies import Json, call_id, whole
from cachecraft_rag.server.wire import FIELD


class _Event(Protocol):
    """Writes server-sent events, which are numbered."""

    def __call__(self, kind: str, **values: object) -> str:
        """Return the next event, of this kind and with these values."""


async def response_reply(answer: Answer, model: str, body: Body) -> Json:
    """Read the answer to its end and return it as a response; the request's `body` has the settings that it repeats."""
    text, calls = await whole(answer)
    return _ended(answer, model, body, _items(answer, text, calls))


async def response_events(answer: Answer, model: str, body: Body) -> AsyncIterator[str]:
    """Yield a response as server-sent events; the last, response.completed or .incomplete, has usage and statistics."""
    number = 0

    def event(kind: str, **values: object) -> str:
        nonlocal number
        data = json.dumps({"type": kind, "sequence_number": number} | values, ensure_ascii=False)
        number += 1
        return f"event: {kind}\ndata: {data}\n\n"

    begun = _response(answer, model, body, status="in_progress")
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    message_id = _message_id(answer)
    place = {"item_id": message_id, "output_index": 0, "content_index": 0}
    text = ""
    async for piece in answer.pieces():
        if piece and not text:
            for line in _opening(event, message_id, place):
                yield line
        if piece:
            text += piece
            yield event("response.output_text.delta", delta=piece, logprobs=[], **place)
    rest, calls = answer.rest()
    if rest or not (text or calls):
        if not text:
            for line in _opening(event, message_id, place):
                yield line
        text += rest
        yield event("response.output_text.delta", delta=rest, logprobs=[], **place)
    items = _items(answer, text, calls)
    for index, item in enumerate(items):
        for line in _closing(event, index, item, text, place):
            yield line
    final = _ended(answer, model, body, items)
    yield event(f"response.{final['status']}", response=final)


def _opening(event: _Event, message_id: str, place: Json) -> list[str]:
    item = _message(message_id, "", status="in_progress") | {"content": []}
    return [
        event("response.output_item.added", output_index=0, item=item),
        event("response.content_part.added", part=_part(""), **place),
    ]


def _closing(event: _Event, index: int, item: Json, text: str, place: Json) -> list[str]:
    """Return the events that end an item: the message with this text, or a call, which also begins here."""
    if item["type"] == "message":
        return [
            event("response.output_text.done", text=text, logprobs=[], **place),
            event("response.content_part.done", part=_part(text), **place),
            event("response.output_item.done", output_index=index, item=item),
        ]
    where = {"item_id": item["id"], "output_index": index}
    begun = item | {"arguments": "", "status": "in_progress"}
    arguments = item["arguments"]
    return [
        event("response.output_item.added", output_index=index, item=begun),
        event("response.function_call_arguments.delta", delta=arguments, **where),
        event(
            "response.function_call_arguments.done",
            arguments=arguments,
            name=item["name"],
            **where,
        ),
        event("response.output_item.done", output_index=index, item=item),
    ]


def _items(answer: Answer, text: str, calls: Sequence[ToolCall]) -> list[Json]:
    items = [_message(_message_id(answer), text)] if text or not calls else []
    for place, call in enumerate(calls):
        name = call_id(answer, place)
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}",
                "call_id": name,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def _message_id(answer: Answer) -> str:
    return f"msg_{answer.generation.stats.request_id}"


def _message(name: str, text: str, *, status: str = "completed") -> Json:
    return {
        "type": "message",
        "id": name,
        "role": "assistant",
        "status": status,
        "content": [_part(text)],
    }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _ended(answer: Answer, model: str, body: Body, items: list[Json]) -> Json:
    is_cut = answer.finish() == "length"
    response = _response(answer, model, body, status="incomplete" if is_cut else "completed")
    stats = answer.generation.stats
    response["output"] = items
    response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    response["usage"] = {
        "input_tokens": stats.tokens_prompt,
        "input_tokens_details": {"cached_tokens": stats.tokens_reused, "cache_write_tokens": 0},
        "output_tokens": stats.tokens_generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.tokens_prompt + stats.tokens_generated,
    }
    response["kv_transfer_params"] = {FIELD: answer.statistics()}
    return response


def _response(answer: Answer, model: str, body: Body, *, status: str) -> Json:
    return {
        "id": answer.name,
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "store": False,
        "usage": None,
    }
