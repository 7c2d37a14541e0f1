"""Chat requests with documents, taken apart; needs no vLLM."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.server.documents import Asked, PrimingRequest, check_documents, read_priming
from cachecraft_rag.server.wire import MOST_DOCUMENTS, MOST_PRIMED
from cachecraft_rag.types.documents import Chunk

DOCUMENTS = [{"text": "Vinegar.", "title": "kettle"}, {"text": "Crumbs."}]
USER = {"role": "user", "content": "How?"}


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def call(*given: str) -> dict[str, Any]:
    """A message with calls of tools: ids and arguments in turn."""
    calls = [
        {"id": name, "type": "function", "function": {"name": "search", "arguments": arguments}}
        for name, arguments in zip(given[::2], given[1::2], strict=True)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


CALLS = call("7", '{"for": "lime"}', "8", "")
RESULTS = [
    {"role": "tool", "tool_call_id": "8", "content": "Nothing."},
    {"role": "tool", "tool_call_id": "7", "content": [{"type": "text", "text": "Vinegar."}]},
]


def request(**given: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "messages": [USER],
        "documents": DOCUMENTS,
        "tools": None,
        "tool_choice": None,
        "max_tokens": None,
        "max_completion_tokens": None,
        "cache_salt": None,
        "model_extra": {},
    }
    return SimpleNamespace(**fields | given)


def read(**given: Any) -> Asked:
    return Asked.read(request(**given), ReuseConfig(alpha=0.5), context_length=100)


def test_chunks_history_and_question() -> None:
    asked = read(
        messages=[
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "What"}, {"type": "text", "text": " is it?"}],
            },
            {"role": "assistant", "content": "A kettle."},
            {"role": "user", "content": "And"},
            {"role": "user", "content": "how?"},
        ],
        max_completion_tokens=7,
        cache_salt="mine",
        model_extra={"cachecraft": {"recompute_ratio": 0.2}},
    )
    assert asked.chunks == (Chunk("Vinegar."), Chunk("Crumbs."))
    assert asked.history == (("user", "What is it?"), ("assistant", "A kettle."))
    assert (asked.question, asked.system, asked.reserve, asked.client_salt) == (
        "And\n\nhow?",
        "Be brief.",
        7,
        "mine",
    )
    assert asked.config == ReuseConfig(alpha=0.5, recompute_ratio=0.2, plain_prompts="off")
    plain = read()
    assert (plain.system, plain.config, plain.reserve, plain.history) == (None, None, 128, ())
    assert read(documents=[]).chunks == ()
    other_fields = [
        {"page_content": "Vinegar.", "metadata": {"page": 3}, "id": None},
        {"content": "Crumbs.", "score": 0.7, "id": 12},
    ]
    assert [(chunk.chunk_id, chunk.stale_id) for chunk in read(documents=other_fields).chunks] == [
        (Chunk(text).chunk_id, "") for text in ("Vinegar.", "Crumbs.")
    ]
    stale = [{"text": "a", "id": "mine"}]
    (chunk,) = read(documents=stale).chunks
    assert (chunk.chunk_id, chunk.stale_id) == (Chunk("a").chunk_id, "mine")
    assert read(documents=stale, model_extra={"cachecraft": {"strict_ids": False}}).config is None
    strict = {"cachecraft": {"strict_ids": True, "recompute_ratio": 0.2}}
    known = [{"text": "a", "id": Chunk("a").chunk_id}]
    assert read(documents=known, model_extra=strict).config == asked.config
    with pytest.raises(ConfigError, match="not the id of its text"):
        read(documents=stale, model_extra=strict)
    with pytest.raises(ConfigError, match="strict_ids"):
        read(documents=stale, model_extra={"cachecraft": {"strict_ids": "yes"}})


def test_tools_their_calls_and_results() -> None:
    history = (
        ("user", "How?"),
        (
            "calls",
            '[{"name": "search", "arguments": {"for": "lime"}}, {"name": "search", "arguments": {}}]',
        ),
        ("result", "Vinegar."),
        ("result", "Nothing."),
    )
    asked = read(messages=[USER, CALLS, *RESULTS], tools=[TOOL])
    assert (asked.history, asked.question, asked.tools) == (history, "", (TOOL,))
    asked = read(messages=[USER, CALLS, *RESULTS, {"role": "user", "content": "Stop."}])
    assert (asked.history, asked.question) == (history, "Stop.")
    said = [USER, {**CALLS, "content": "Let me look."}, *RESULTS, {"role": "assistant"}, USER]
    asked = read(messages=said)
    assert asked.history == (
        history[0],
        ("assistant", "Let me look."),
        *history[1:],
        ("assistant", ""),
    )
    assert (asked.question, asked.tools) == ("How?", ())
    # neighbours of one role are joined, also if the second one calls tools
    said = [USER, {"role": "assistant", "content": "Wait."}, {**CALLS, "content": "I look."}]
    asked = read(messages=[*said, *RESULTS], tools=[TOOL])
    assert asked.history[:3] == (history[0], ("assistant", "Wait.\n\nI look."), history[1])


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"documents": {}}, "must be a list; write"),
        (
            {"documents": ["text"]},
            r"documents\[0\] must be an object whose field \"text\" is a string; write",
        ),
        ({"documents": [{"text": "a"}, {"text": None}]}, r"documents\[1\] must be an object"),
        ({"documents": [{"metadata": {"text": "a"}}]}, r"documents\[0\] must be an object whose"),
        ({"documents": [{"text": "a"}] * (MOST_DOCUMENTS + 1)}, "send at most"),
        ({"documents": [{"text": "a" * 6500}]}, "send at most 6400: the best"),
        (
            {"documents": [{"text": "half \ud83e"}]},
            r"documents\[0\]: the character at 5 is half a surrogate",
        ),
        (
            {"messages": [{"role": "user", "content": "\udd16"}]},
            r"messages\[0\]: the character at 0 is half",
        ),
        ({"n": 2}, "ask again"),
        ({"echo": True}, "leave it out"),
        ({"prompt_logprobs": 0}, "leave it out"),
        ({"chat_template": "x"}, "the model's own"),
        ({"continue_final_message": True}, "end with the user's"),
        ({"add_generation_prompt": False}, "leave it out"),
        ({"truncate_prompt_tokens": 5}, "left out by rank"),
        ({"tools": [{}]}, "each tool must be"),
        ({"messages": [USER, CALLS, RESULTS[0]]}, "last message must be"),
        ({"messages": [USER, CALLS, RESULTS[0], USER]}, r"messages\[3\].*lack a result"),
        ({"messages": [USER, CALLS, RESULTS[0], RESULTS[0]]}, r"messages\[3\].*tool_call_id"),
        ({"messages": [USER, call("7", "[1]"), RESULTS[0]]}, "the text of a JSON object"),
        ({"messages": [USER, {**CALLS, "tool_calls": [{}]}]}, "no calls of functions"),
        ({"messages": []}, "the last message must be the user's"),
        (
            {"messages": [USER, {"role": "assistant", "content": "x"}]},
            "the last message must be the user's",
        ),
        (
            {"messages": [{"role": "critic", "content": "x"}, USER]},
            r"messages\[0\].*write the text of others",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "hold text only"),
        ({"messages": ["x"]}, r"messages\[0\]"),
        ({"model_extra": {"cachecraft": []}}, "must be an object"),
        ({"model_extra": {"cachecraft": {"session": "bob"}}}, "session: no such setting"),
        ({"model_extra": {"cachecraft": {"recompute_ratio": 2}}}, "recompute_ratio"),
    ],
)
def test_what_cannot_be_served_says_what_to_do(given: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        read(**given)


def test_documents_are_checked_before_anything_else() -> None:
    check_documents([])
    check_documents(DOCUMENTS)
    with pytest.raises(ConfigError, match="best first"):
        check_documents(None)


def priming(body: object) -> PrimingRequest:
    return read_priming(
        body if isinstance(body, bytes) else json.dumps(body).encode(), context_length=100
    )


def test_what_is_primed_and_what_is_too_much() -> None:
    vinegar, crumbs = Chunk("Vinegar."), Chunk("Crumbs.")
    assert priming({"documents": DOCUMENTS, "estimate": True}) == PrimingRequest(
        (vinegar, crumbs), (), True
    )
    assert priming({"documents": []}) == PrimingRequest((), (), False)
    after = priming({"documents": DOCUMENTS[:1], "related": DOCUMENTS[1:]})
    assert after == PrimingRequest((vinegar,), (crumbs,), False)
    many = [{"text": "k" * 6400}] * (MOST_PRIMED // 6400)
    assert len(priming({"documents": many}).chunks) == len(many)
    for body, advice in (
        (
            {"documents": [{"text": "k" * 6401}]},
            r"documents\[0\] has 6401 characters.*at most 6400",
        ),
        (
            {"documents": [*many, {"text": "k" * 6400}]},
            f"send at most {MOST_PRIMED} in one request",
        ),
        ({"documents": [{"text": "k"}] * 1001}, "send at most 1000"),
        ({"documents": [], "related": "k"}, "documents must be a list"),
        ({"documents": DOCUMENTS, "estimate": 1}, "estimate must be True or False"),
        (
            {"documents": DOCUMENTS, "session": "bob"},
            "the body must be a JSON object: session: no such field",
        ),
        ([], "the body must be"),
        (b"[" * 100_000, "the body must be a JSON object"),
        (b"\xff", "the body must be a JSON object"),
    ):
        with pytest.raises(ConfigError, match=advice):
            priming(body)
