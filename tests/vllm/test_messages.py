"""Messages between the parts of a server: only they can make them, and nothing is lost on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.vllm.messages import Ask, StepResult

KEY = "a key"
PROMPT = Prompt(
    (
        Segment("system", "s", (1, 2)),
        Segment("chunk", "a", (3, 4, 5)),
        Segment("chunk", "b", (6,)),
        Segment("question", "q", (7, 8, 9), private=True, closing=1),
    )
)
ASK = Ask(
    PROMPT,
    ReuseConfig(method=ReuseMethod(drift=0.2, alpha=0.3)),
    "ada",
    captures=(1,),
    details=True,
)


def sent(ask: Ask) -> dict[str, Any]:
    """Over the wire: plain JSON."""
    return dict(json.loads(json.dumps(ask.message(KEY))))


def test_an_ask_arrives_as_it_was_sent() -> None:
    assert Ask.read(sent(ASK), PROMPT.token_ids, KEY) == ASK
    plain = Ask(PROMPT, ReuseConfig(), primed=True, when_stored=True)
    assert Ask.read(sent(plain), PROMPT.token_ids, KEY) == plain


def test_a_request_without_the_key_is_refused() -> None:
    message = sent(ASK)
    with pytest.raises(ConfigError, match="sealed"):
        Ask.read(message, PROMPT.token_ids, "another key")
    for change in (
        {"session": "bob"},
        {"config": {}},
        {"segments": []},
        {"seal": ""},
        {"seal": None},
        {"more": 1},
    ):
        with pytest.raises(ConfigError, match="sealed"):
            Ask.read(message | change, PROMPT.token_ids, KEY)
    with pytest.raises(ConfigError, match="sealed"):
        Ask.read(message, [*PROMPT.token_ids[:-1], 0], KEY)
    with pytest.raises(ConfigError, match="sealed"):
        Ask.read(message | {"session": object()}, PROMPT.token_ids, KEY)
    with pytest.raises(ConfigError, match="sealed"):
        Ask.read(message | {"session": object(), "seal": ""}, PROMPT.token_ids, KEY)
    with pytest.raises(ConfigError, match="sealed"):
        Ask.read(message, [*PROMPT.token_ids[:-1], 2**40], KEY)
    # the same tokens, cut elsewhere
    other_bounds = [*message["segments"]]
    other_bounds[1] = [*other_bounds[1][:2], 2, *other_bounds[1][3:]]
    other_bounds[2] = [*other_bounds[2][:2], 2, *other_bounds[2][3:]]
    with pytest.raises(ConfigError, match="sealed"):
        Ask.read(message | {"segments": other_bounds}, PROMPT.token_ids, KEY)
    with pytest.raises(ConfigError, match="no mapping"):
        Ask.read(["segments"], PROMPT.token_ids, KEY)


def test_a_sealed_ask_of_another_shape_is_refused() -> None:
    chunks_only = Ask(Prompt(PROMPT.segments[:-1]), ReuseConfig())
    with pytest.raises(ConfigError, match="a system segment, chunks and a question"):
        Ask.read(sent(chunks_only), chunks_only.prompt.token_ids, KEY)
    empty = Ask(Prompt((*PROMPT.segments[:-1], Segment("question", "q", ()))), ReuseConfig())
    with pytest.raises(ConfigError, match="cannot be read"):
        Ask.read(sent(empty), empty.prompt.token_ids, KEY)


def test_salts_differ_wherever_blocks_may_differ() -> None:
    other_order = Prompt(
        (PROMPT.segments[0], PROMPT.segments[2], PROMPT.segments[1], PROMPT.segments[3])
    )
    asks = [
        ASK,
        replace(ASK, session=None),
        replace(ASK, session="bob"),
        replace(ASK, config=ReuseConfig()),
        replace(ASK, prompt=other_order),
        replace(ASK, prompt=Prompt(PROMPT.segments[1:])),
    ]
    salts = {ask.cache_salt(namespace) for ask in asks for namespace in ("default", "acme")}
    salts |= {replace(ASK, client_salt="x").cache_salt("default")}
    assert len(salts) == 2 * len(asks) + 1
    next_question = Prompt((*PROMPT.segments[:-1], Segment("question", "r", (1, 1))))
    assert replace(ASK, prompt=next_question).cache_salt("default") == ASK.cache_salt("default")


def test_no_salt_of_a_client_reaches_the_blocks_of_others() -> None:
    asks = [
        replace(ASK, session=None, namespace="acme"),
        replace(ASK, session="ann"),
        replace(ASK, session="ann", namespace="acme"),
    ]
    salts = {ask.request_salt for ask in asks} | {ask.cache_salt("default") for ask in asks}
    assert len(salts) == 2 * len(asks)
    # an unkeyed digest, which clients can compute too
    forged = {replace(ASK, session=None, client_salt=salt).request_salt for salt in salts}
    assert not forged & salts
    assert len(forged) == len(salts)


def test_news_of_ranks_are_joined() -> None:
    first, second = (
        StepResult({"r": {"rank": 0}}, frozenset({"a"})),
        StepResult({"r": {"rank": 1}, "s": {}}, None),
    )
    assert first.joined(second) == StepResult({"r": {"rank": 0}, "s": {}}, frozenset({"a"}))
    assert second.joined(first).capturing == {"a"}
