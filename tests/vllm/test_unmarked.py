"""Reuse for stock clients of a server: prompts without documents over HTTP, and the parts that decide about them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer

from cachecraft_rag.observability.request_counts import RequestCounts
from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.prompt.builder import STAND_IN
from cachecraft_rag.server.response_input import messages_of
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.catalog_records import Listed
from cachecraft_rag.types.digests import digest, digest_of_tokens
from cachecraft_rag.types.documents import chunk_id_of
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.records import Records
from cachecraft_rag.vllm.server.message_places import Searched, searched_messages
from cachecraft_rag.vllm.server.unmarked import (
    Origin,
    PlainPrompts,
    SearchingClient,
    ServedPrompts,
)
from tests.prompt.test_unmarked import passage, prompt_of
from tests.vllm.http_server import START_S, ServerProcess

HERE = Origin(None, "", ReuseConfig())


def words(start: int) -> list[str]:
    """Passages that no other test has sent."""
    return [passage(seed) for seed in range(start, start + 8)]


# -- what vLLM's prefix cache is likely to have ------------------------------------------------------------------------


def asked(lengths: tuple[int, ...]) -> Ask:
    ids = iter(range(sum(lengths)))
    kinds = ["system", *["chunk"] * (len(lengths) - 2), "question"]
    segments = tuple(
        Segment(kind, f"{kind} {place}", tuple(next(ids) for _ in range(n)))  # type: ignore[arg-type]
        for place, (kind, n) in enumerate(zip(kinds, lengths, strict=True))
    )
    return Ask(Prompt(segments), ReuseConfig())


def test_the_longest_beginning_that_was_served() -> None:
    served = ServedPrompts(10_000)
    served.note(range(100), HERE, None)
    assert served.longest(range(200), HERE) == (96, None)
    assert served.longest([*range(50), 7], HERE) == (48, None)
    assert served.longest([7, *range(100)], HERE) == (0, None)
    for other in (
        Origin("ada", "", HERE.config),
        Origin(None, "salt", HERE.config),
        Origin(None, "", ReuseConfig(method=ReuseMethod(alpha=1.0))),
    ):
        assert served.longest(range(200), other) == (0, None)


def test_what_chunk_caches_served_counts_from_the_end_of_the_last_of_them() -> None:
    served, ask = ServedPrompts(10_000), asked((20, 60, 40))
    served.note(range(120), HERE, ask)
    assert served.longest(range(79), HERE) == (0, None)
    assert served.longest(range(100), HERE) == (96, ask)
    served.note(range(64), HERE, None)  # vLLM has computed the beginning, too
    assert served.longest(range(79), HERE) == (64, None)
    assert served.longest(range(200), HERE) == (112, ask)


def test_no_more_is_remembered_than_the_prefix_cache_holds() -> None:
    served = ServedPrompts(160)
    for start in range(5):
        served.note(range(1000 * start, 1000 * start + 80), HERE, None)
    assert [
        served.longest(range(1000 * start, 1000 * start + 80), HERE)[0] for start in range(5)
    ] == [0, 0, 0, 80, 80]
    without = ServedPrompts(0)
    without.note(range(80), HERE, None)
    assert without.longest(range(80), HERE) == (0, None)


def stand_in() -> Any:
    """An engine of which no more is used."""
    return SimpleNamespace(
        request_counts=RequestCounts(),
        min_prompt_tokens=0,
        decoder=SimpleNamespace(tokenizer=None),
    )


def test_a_mistake_after_an_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def notes() -> dict[str, Candidate]:
        raise KeyError("of this test")

    prompts = PlainPrompts(stand_in(), Records(lambda _: None), cached_tokens=0)
    prompts.note(notes)
    prompts._threads.shutdown()
    assert "of this test" in caplog.text


def test_a_prompt_that_cannot_be_searched_is_left_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    sent = []

    class Client:
        async def generate(self, *given: object, **_: object) -> AsyncGenerator[SimpleNamespace]:
            sent.append(given)
            yield SimpleNamespace(finished=False)

    async def ask() -> list[object]:
        client = SearchingClient(Client(), prompts, HERE, whole)  # type: ignore[arg-type]
        return [output async for output in client.generate(prompt, params, "request")]

    def whole(given: Mapping[str, Any]) -> Searched:
        return Searched((range(len(given["prompt_token_ids"])),), ("prompt",))

    engine: Any = stand_in()
    prompts = PlainPrompts(engine, Records(lambda _: None), cached_tokens=10_000)
    prompt = {"type": "token", "prompt_token_ids": [2**63] * 400}
    params: Any = SimpleNamespace(n=1, prompt_logprobs=None, extra_args=None)
    assert len(asyncio.run(ask())) == 1
    assert sent == [(prompt, params, "request")]
    assert "OverflowError" in caplog.text


def test_the_input_of_a_response_is_searched_like_messages() -> None:
    from openai.types.responses import ResponseFunctionToolCallOutputItem

    text = "The mill of Arden dates from 1701 and leaks. " * 5
    question = {"role": "user", "content": [{"type": "input_text", "text": text}]}
    output = {"type": "function_call_output", "call_id": "7", "output": text}
    as_object = ResponseFunctionToolCallOutputItem(**output, id="1", status="completed")
    call = {"type": "function_call", "call_id": "7", "name": "search", "arguments": "{}"}
    asked = SimpleNamespace(instructions=text, input=[question, call, output, as_object])
    messages = messages_of(asked)
    assert searched_messages(messages, search_system=False) == [1, 3, 4]
    assert searched_messages(messages, search_system=True) == [0, 1, 3, 4]
    as_text = SimpleNamespace(instructions=None, input=text)
    assert searched_messages(messages_of(as_text), search_system=True) == [1]


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def start(model: Path, folder: Path, *options: str) -> ServerProcess:
    """Start a server that reuses the last chunk before the question like the others.

    By default it is recomputed in full, which would hide in a prompt of three passages whether all three are found.
    """
    store, log = folder / "store", folder / "log"
    settings = {"CACHECRAFT_NEW_VARIANTS": "idle", "CACHECRAFT_REUSE_NEAREST_SHARE": "0"}
    return ServerProcess(model, store, log, "--max-model-len", "8192", *options, settings=settings)


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("plain")
    options = ("--reuse-plain-prompts", "--session-header", "X-Mine", "--dtype", "float32")
    made = start(model_folder("Llama"), folder, *options)
    yield made
    made.stop()


def rows(server: ServerProcess) -> list[Listed]:
    """What is stored, but for the passage that stands in for neighbours: one of the first tests has it captured."""
    with ChunkCacheStore.open(server.store / "caches") as store:
        found = store.rows(RowFilter(), limit=10_000)
    return [one for one in found if one.variant.key.chunk_id != chunk_id_of(STAND_IN)]


def wait_for(server: ServerProcess, count: int) -> None:
    """Wait until so many chunk-caches are stored: they are captured in idle time."""
    deadline = time.monotonic() + START_S
    while len(found := rows(server)) < count:
        assert time.monotonic() < deadline, [one.variant.key for one in found]
        time.sleep(0.2)


def stats_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Statistics of an answer that was not streamed."""
    return dict(answer["kv_transfer_params"]["cachecraft"]["stats"])


def exact(stats: dict[str, Any]) -> bool:
    return all(one["outcome"] in ("exact", "computed") for one in stats["chunks"])


def ask(
    server: ServerProcess, *passages: str, question: str = "Which is it?", **body: Any
) -> dict[str, Any]:
    answer = server.chat(None, prompt_of(*passages, question=question), max_tokens=2, **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def reused(stats: dict[str, Any]) -> int:
    """Tokens of passages that came from chunk-caches."""
    return sum(
        one["tokens"] - one["computed"]
        for one in stats["chunks"]
        if one["outcome"] in ("exact", "reused") and one["reason_code"] != "prefix_cached"
    )


@pytest.mark.slow
def test_the_third_time_a_stock_client_s_passages_are_reused(server: ServerProcess) -> None:
    import openai

    text, before = words(100), len(rows(server))
    first = stats_of(ask(server, text[0], text[1], text[2]))
    second = stats_of(ask(server, text[3], text[2], text[0], text[1]))
    assert reused(first) == reused(second) == 0
    assert exact(first)
    assert exact(second)
    wait_for(server, before + 3)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    third = prompt_of(text[1], text[4], text[0], text[2])
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": third}], max_tokens=2
    )
    found = httpx.get(f"{server.url}/v1/cachecraft/requests/{answer.id}").json()["stats"]
    whole = sum(map(len, text[:3]))  # a token is a byte here
    assert found["tokens_reused"] >= 0.75 * whole
    assert reused(found) >= 0.9 * whole
    assert found["tokens_recomputed"] > 0
    assert not exact(found)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == found["tokens_reused"]
    pieces = list(
        client.completions.create(
            model=model,
            prompt=prompt_of(text[2], text[5], text[1], text[0]),
            max_tokens=2,
            stream=True,
        )
    )
    found = httpx.get(f"{server.url}/v1/cachecraft/requests/{pieces[0].id}").json()["stats"]
    assert reused(found) >= 0.75 * whole


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("n", 2), ("prompt_logprobs", 1)])
def test_a_stock_client_reads_why_its_prompt_is_left_to_vllm(
    server: ServerProcess, name: str, value: int
) -> None:
    prompt = prompt_of(*words(1100)[:3], question="Which is it?")
    answer = server.chat(None, prompt, max_tokens=2, temperature=1.0, **{name: value}).json()
    assert len(answer["choices"]) == (value if name == "n" else 1)
    assert answer["kv_transfer_params"]["cachecraft"]["note"].startswith("left to vLLM: it asks ")
    if name == "n":
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 2,
            "n": value,
            "temperature": 1.0,
        }
        *_, (_, last) = streamed(server, "chat/completions", body)
        found = httpx.get(f"{server.url}/v1/cachecraft/requests/{last['id']}").json()
        assert found["note"] == "left to vLLM: it asks for several answers (n)"


@pytest.mark.slow
def test_the_third_time_passages_of_responses_are_reused(server: ServerProcess) -> None:
    """In the user's message, in the output of a tool, and streamed."""
    import openai

    text, before = words(1000), len(rows(server))
    whole = sum(map(len, text[:3]))
    counts = server.counts()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    how: dict[str, Any] = {"model": model, "max_output_tokens": 2, "temperature": 0}
    for order in ([0, 1, 2], [2, 0, 1]):
        prompt = prompt_of(*(text[place] for place in order))
        first = client.responses.create(input=prompt, **how)
        found = httpx.get(f"{server.url}/v1/cachecraft/requests/{first.id}").json()["stats"]
        assert reused(found) == 0
    wait_for(server, before + 3)
    prompt = prompt_of(text[1], text[3], text[0], text[2])
    third = client.responses.create(input=prompt, instructions="Be brief.", **how)
    found = httpx.get(f"{server.url}/v1/cachecraft/requests/{third.id}").json()["stats"]
    assert reused(found) >= 0.75 * whole
    assert third.usage is not None
    assert third.usage.input_tokens_details.cached_tokens == found["tokens_reused"]
    call = {"type": "function_call", "call_id": "7", "name": "search", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "7"}
    asked: list[Any] = [
        {"role": "user", "content": "Which is it?"},
        call,
        {**output, "output": "\n\n".join(text[place] for place in (2, 4, 0, 1))},
    ]
    events = list(client.responses.create(input=asked, stream=True, **how))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    found = httpx.get(f"{server.url}/v1/cachecraft/requests/{last.response.id}").json()["stats"]
    assert reused(found) >= 0.75 * whole
    client.responses.create(input="Hello!", **how)
    searched = {
        labels: value - counts[name, labels]
        for (name, labels), value in server.counts().items()
        if name == "cachecraft_searched_messages_total" and value != counts[name, labels]
    }
    assert searched == {  # by result and role
        ("noted", "user"): 2,
        ("stored", "user"): 1,
        ("stored", "tool"): 1,
        ("nothing", "user"): 1,
    }


def streamed(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, data) of each server-sent event; the name is "" where the stream names none."""
    asked = {"temperature": 0, "stream": True} | body
    name = ""
    with httpx.stream("POST", f"{server.url}/v1/{path}", json=asked, timeout=600) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data" and value != "[DONE]":
                yield name, json.loads(value)
                name = ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["documents", "chat", "completion"])
def test_all_events_of_a_stream_have_the_id_of_its_statistics(
    server: ServerProcess, kind: str
) -> None:
    passages = words(1300 + 100 * len(kind))[:2]
    documents = [{"text": passage} for passage in passages]
    bodies: dict[str, dict[str, Any]] = {
        # Documents are captured after each other; other tests look at what unmarked text leaves in the store.
        "documents": {
            "documents": documents,
            "messages": [{"role": "user", "content": "Which?"}],
            "cachecraft": {"capture": False},
        },
        "chat": {"messages": [{"role": "user", "content": prompt_of(*passages)}]},
        "completion": {"prompt": prompt_of(*passages)},
    }
    path = "completions" if kind == "completion" else "chat/completions"
    suffix = "-0" if kind == "completion" else ""  # of the prompt's place in the request
    names = []
    for _ in range(2):
        events = [data for _, data in streamed(server, path, {"max_tokens": 3} | bodies[kind])]
        assert len(events) >= 3
        (name,) = {event["id"] for event in events}
        found = httpx.get(f"{server.url}/v1/cachecraft/requests/{name}{suffix}").json()["stats"]
        assert found["request_id"] == f"{name}{suffix}"
        assert found["tokens_generated"] == 3
        names.append(name)
    assert len(set(names)) == 2


@pytest.mark.slow
def test_events_of_a_response_are_named_numbered_and_have_the_id_of_its_statistics(
    server: ServerProcess,
) -> None:
    body = {"input": prompt_of(*words(2200)[:2]), "max_output_tokens": 16}
    events = list(streamed(server, "responses", body))
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert {"response.created", "response.output_text.delta"} <= {name for name, _ in events}
    (name,) = {data["response"]["id"] for _, data in events if "response" in data}
    found = httpx.get(f"{server.url}/v1/cachecraft/requests/{name}").json()["stats"]
    assert found["request_id"].startswith(name)
    assert found["tokens_generated"] == 16


@pytest.mark.slow
def test_results_of_tools_are_reused_from_the_third_time_on(
    server: ServerProcess, model_folder: Callable[[str], Path]
) -> None:
    """An agent's conversation of six turns, whose searches return eight of twenty passages each."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder("Llama"))
    ids = {
        text: tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (passage(seed, words=14) for seed in range(2000, 2020))
    }
    names = {text: digest("text", digest_of_tokens(tokens)) for text, tokens in ids.items()}
    dice = random.Random(1)
    messages: list[dict[str, Any]] = []
    shown: list[str] = []
    prompts_with: Counter[str] = Counter()
    for number in range(6):
        results = dice.sample(list(ids), 8)
        call = {"name": "search", "arguments": "{}"}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        messages += [
            {"role": "user", "content": f"Question {number}: which is it?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": "\n\n".join(results)},
        ]
        shown += results
        answer = server.chat(None, messages=messages, max_tokens=2)
        assert answer.status_code == 200, answer.text
        stats = stats_of(answer.json())
        messages.append({"role": "assistant", "content": f"The answer to number {number}."})
        known = {text for text in shown if prompts_with[text] >= 2}
        old = sum(len(ids[text]) for text in shown if text in known)
        known_names = {names[text] for text in known}
        # A prompt is served from vLLM's prefix cache, exactly, or from chunk-caches, but not from both.
        served = sum(
            chunk["tokens"]
            for chunk in stats["chunks"]
            if chunk["chunk_id"] in known_names and chunk["outcome"] in ("exact", "reused")
        )
        assert served >= 0.75 * old, number
        prompts_with.update(set(shown))
        captured = {names[text] for text in ids if prompts_with[text] >= 2}
        deadline = time.monotonic() + START_S
        while captured - {row.variant.key.chunk_id for row in rows(server)}:
            assert time.monotonic() < deadline, number
            time.sleep(0.2)
    assert old > 0


@pytest.mark.slow
def test_a_passage_that_a_prompt_holds_twice_is_reused_twice(server: ServerProcess) -> None:
    """As in an agent's conversation, where a search returns what an earlier one has found."""
    text, before = words(900), len(rows(server))
    for order in ([0, 1, 2], [2, 0, 1]):
        ask(server, *(text[place] for place in order))
    wait_for(server, before + 3)
    order = [1, 0, 1, 2, 0]
    prompt = prompt_of(*(text[place] for place in order), question="Which is it?")
    stats = stats_of(server.chat(None, prompt, max_tokens=2).json())
    assert reused(stats) >= 0.9 * sum(len(text[place]) for place in order)
    full, exact_reuse = (
        server.chat(None, prompt, cachecraft=settings).json()["choices"][0]["token_ids"]
        for settings in ({"plain_prompts": "off"}, {"recompute_ratio": 1.0})
    )
    assert exact_reuse == full


# the third one brings the first one's passages in another order
TURNS = ((0, 1, 2), (3, 2, 0, 1), (1, 4, 0, 2))


def reused_in_turns(
    server: ServerProcess,
    text: list[str],
    ask_about: Callable[[list[str]], object],
    *,
    captured: int = 3,
) -> tuple[list[float], float]:
    """How many passages each turn reuses, and the last one's reused tokens as a share of the first one's passages.

    The last turn waits until the second one has captured so many.
    """
    tokens = ("cachecraft_tokens_total", ("reused",))
    counts = [server.counts()]
    for turn in TURNS:
        stored = len(rows(server))
        ask_about([text[place] for place in turn])
        counts.append(server.counts())
        if turn is TURNS[1]:
            wait_for(server, stored + captured)
    # the budget is spent on the whole prompt, so a short passage may get no token of it
    kinds = [
        ("cachecraft_chunks_total", ("reused", str(reason)))
        for reason in (Reason.FIXED, Reason.REUSED)
    ]
    found = [
        sum(after.get(kind, 0) - before.get(kind, 0) for kind in kinds)
        for before, after in pairwise(counts)
    ]
    return found, (counts[-1][tokens] - counts[-2][tokens]) / sum(map(len, text[:3]))


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_the_third_time_llama_index_reuses_passages_over_its_own_client(
    server: ServerProcess, chat: bool
) -> None:
    from llama_index.core import SummaryIndex
    from llama_index.core.schema import TextNode
    from llama_index.llms.openai_like import OpenAILike

    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    llm = OpenAILike(
        model=model,
        api_base=f"{server.url}/v1",
        api_key="none",
        is_chat_model=chat,
        context_window=4096,
        max_tokens=2,
    )

    def ask_about(passages: list[str]) -> None:
        index = SummaryIndex([TextNode(text=one) for one in passages])
        index.as_query_engine(llm=llm).query("Which is it?")

    chunks, share = reused_in_turns(server, words(600 + 100 * chat), ask_about)
    assert chunks == [0, 0, 3]
    assert share >= 0.75


def langchain_at(server: ServerProcess) -> Callable[[list[str]], object]:
    """Asks LangChain's own chain and client about passages, in its documentation's prompt: they stand in the system
    message.
    """
    from langchain_classic.chains import create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnableLambda
    from langchain_openai import ChatOpenAI

    instruction = "Use the given context to answer the question. Context:\n\n{context}"
    prompt = ChatPromptTemplate.from_messages([("system", instruction), ("human", "{input}")])
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    chat = ChatOpenAI(model=model, base_url=f"{server.url}/v1", api_key="none", max_tokens=2)
    turn: list[Document] = []
    chain = create_retrieval_chain(
        RunnableLambda(lambda _: turn), create_stuff_documents_chain(chat, prompt)
    )

    def ask_about(passages: list[str]) -> None:
        turn[:] = [Document(one) for one in passages]
        chain.invoke({"input": "Which is it?"})

    return ask_about


@pytest.mark.slow
def test_the_third_time_langchain_reuses_passages_over_its_own_client(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    server = start(
        model_folder("Llama"),
        tmp_path,
        "--reuse-plain-prompts",
        "--search-system",
        "--dtype",
        "float32",
    )
    try:
        # the text before the first passage comes again, too
        chunks, share = reused_in_turns(server, words(800), langchain_at(server), captured=4)
        assert chunks == [0, 0, 4]
        assert share >= 0.75
    finally:
        server.stop()


@pytest.mark.slow
def test_a_system_message_is_vllm_s_unless_asked_for(server: ServerProcess) -> None:
    text, before, stored = words(900), server.counts(), len(rows(server))
    ask_about = langchain_at(server)
    for turn in (*TURNS, TURNS[2]):
        ask_about([text[place] for place in turn])
    changed = {
        name
        for (name, labels), value in server.counts().items()
        if value != before.get((name, labels))
    }
    assert "cachecraft_tokens_total" not in changed
    assert len(rows(server)) == stored


@pytest.mark.slow
def test_a_prompt_that_comes_again_is_exact(server: ServerProcess) -> None:
    text, before = words(200), len(rows(server))
    how = {"logprobs": True, "top_logprobs": 3}
    full = ask(server, *text[:3], **how, cachecraft={"plain_prompts": "off"})
    assert "cachecraft" not in (full["kv_transfer_params"] or {})
    for again in range(4):
        answer = ask(server, *text[:3], **how)
        assert exact(stats_of(answer))
        assert_same_logprobs(answer, full)
        if again == 1:
            wait_for(server, before + 6)  # each passage alone, and after those before it
    # Not from vLLM's prefix cache: these settings have another salt.
    filled = ask(server, *text[:3], **how, cachecraft={"recompute_ratio": 0.2})
    assert reused(stats_of(filled)) > 0.9 * sum(map(len, text[:3]))
    assert exact(stats_of(filled))
    assert_same_logprobs(filled, full)
    other = ask(
        server,
        *text[:3],
        question="And what of the oven, the hood and the toaster?",
        cachecraft={"method": {"drift": 0.3}},
    )
    assert exact(stats_of(other))


def assert_same_logprobs(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = (
        {
            (place, one["token"]): one["logprob"]
            for place, token in enumerate(answer["choices"][0]["logprobs"]["content"])
            for one in token["top_logprobs"]
        }
        for answer in (one, other)
    )
    assert first == pytest.approx(second, abs=1e-3)


@pytest.mark.slow
def test_private_text_shapes_nothing_that_others_are_served(server: ServerProcess) -> None:
    """Canaries before, between and after passages, in an earlier turn, an instruction and a session."""
    text, before = words(300), {one.variant.variant_id for one in rows(server)}
    canary = "My name is Canary-4711 and my number is 0815; nobody else may ever read it, not even a part of it."
    for order in ([0, 1, 2], [2, 1, 0]):
        passages = [text[place] for place in order]
        messages = [
            {"role": "system", "content": canary},
            {"role": "user", "content": canary},
            {"role": "assistant", "content": canary},
            {"role": "user", "content": canary + "\n\n" + prompt_of(*passages, question=canary)},
        ]
        answer = server.chat(None, messages=messages, max_tokens=2).json()
        assert reused(stats_of(answer)) == 0
    for order in ([3, 4, 5], [5, 4, 3]):
        hers = ask(
            server, *(text[place] for place in order), question=canary, headers={"X-Mine": "ada"}
        )
    deadline, new = time.monotonic() + START_S, []
    # An earlier test's passages may still be captured meanwhile, so a number of rows alone would not do.
    while min(sum(row.variant.session == user for row in new) for user in (None, "ada")) < 3:
        assert time.monotonic() < deadline, [row.variant.key for row in new]
        time.sleep(0.2)
        new = [row for row in rows(server) if row.variant.variant_id not in before]
    shared = [one.variant for one in rows(server) if one.variant.session is None]
    system = httpx.get(f"{server.url}/v1/cachecraft").json()
    assert system["system"]
    (before_them,) = {one.key.origin_prefix for one in shared if one.key.origin_prefix}
    # the server's own instruction, which no client writes, and text without an owner
    assert len(before_them) == 2
    assert before_them[1] == chunk_id_of(STAND_IN)
    statistics = f"{server.url}/v1/cachecraft/requests/{hers['id']}"
    assert httpx.get(statistics, headers={"X-Mine": "ada"}).status_code == 200
    shown = httpx.get(f"{server.url}/metrics").text + (server.store.parent / "log").read_text()
    for user in ({}, {"X-Mine": "bob"}):
        theirs = prompt_of(text[2], text[5], text[0], text[4], text[1])
        answer = server.chat(None, theirs, max_tokens=2, headers=user)
        others = stats_of(answer.json())
        assert reused(others) >= 0.75 * sum(len(text[place]) for place in (0, 1, 2))
        outcomes = [one["outcome"] for one in others["chunks"]]
        assert outcomes.count("computed") >= 2  # Ada's
        shown += f"{others} {answer.headers} {httpx.get(statistics, headers=user).text}"
        assert httpx.get(statistics, headers=user).status_code == 404
    assert "Canary" not in shown
    assert "kettle" not in shown
    salted = stats_of(ask(server, text[2], text[0], text[1], cache_salt="mine"))
    # shared ones serve it, too
    assert reused(salted) >= 0.75 * sum(len(text[place]) for place in (0, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["chat/completions", "responses", "completions", "messages"])
def test_nothing_that_others_are_served_was_captured_after_a_client_s_private_text(
    server: ServerProcess, path: str
) -> None:
    """Neither after its instruction nor after text before the passages, on any endpoint."""
    text = words(3000 + 100 * len(path))
    before = {row.variant.variant_id for row in rows(server)}
    canary = f"The user is Ada of {path}, born in 1983, and nobody else may ever read this. " * 6

    def send(order: list[int], session: str | None) -> None:
        prompt = prompt_of(*(text[place] for place in order))
        body: dict[str, Any] = {
            "chat/completions": {
                "messages": [
                    {"role": "system", "content": canary},
                    {"role": "user", "content": prompt},
                ]
            },
            "responses": {"instructions": canary, "input": prompt},
            "completions": {"prompt": f"{canary}\n\n{prompt}"},
            "messages": {
                "system": canary,
                "messages": [{"role": "user", "content": prompt}],
            },
        }[path]
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        answer = httpx.post(
            f"{server.url}/v1/{path}",
            json=body | {limit: 2, "temperature": 0, "model": model},
            headers={} if session is None else {"X-Mine": session},
            timeout=600,
        )
        assert answer.status_code == 200, answer.text

    for order in ([0, 1, 2], [2, 1, 0]):
        send(order, None)
        send([place + 3 for place in order], "ada")

    def new() -> list[Listed]:
        return [row for row in rows(server) if row.variant.variant_id not in before]

    searched = path != "messages"  # vLLM serves Anthropic's interface alone
    deadline = time.monotonic() + START_S
    while (
        searched
        and min(sum(row.variant.session == owner for row in new()) for owner in (None, "ada")) < 3
    ):
        assert time.monotonic() < deadline, [row.variant.key for row in new()]
        time.sleep(0.2)
    shared = [row.variant for row in new() if row.variant.session is None]
    assert {variant.key.origin_prefix[1:] for variant in shared} <= {(chunk_id_of(STAND_IN),)}
    assert len({variant.key.origin_prefix[:1] for variant in shared}) == searched
    theirs = ask(server, text[4], text[0], text[3], text[1], headers={"X-Mine": "bob"})
    chunks = (theirs.get("kv_transfer_params") or {}).get("cachecraft", {"stats": {"chunks": []}})
    variants = {row.variant.variant_id: row.variant for row in new()}
    for chunk in chunks["stats"]["chunks"]:
        used = variants.get(chunk.get("variant_id"))
        assert used is None or used.session in (None, "bob")
    assert "Ada" not in httpx.get(f"{server.url}/metrics").text


@pytest.mark.slow
def test_a_conversation_goes_on_after_what_it_was_served(server: ServerProcess) -> None:
    text, before = words(400), len(rows(server))
    for order in ([0, 1, 2], [2, 0, 1]):
        ask(server, *(text[place] for place in order))
    wait_for(server, before + 3)
    first = [{"role": "user", "content": prompt_of(text[1], text[2], text[0])}]
    served = server.chat(None, messages=first, max_tokens=2).json()
    assert reused(stats_of(served)) > 0
    turns = [
        *first,
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": "And the toaster?"},
    ]
    follow_up = stats_of(server.chat(None, messages=turns, max_tokens=2).json())
    assert {one["reason_code"] for one in follow_up["chunks"]} == {"prefix_cached"}
    assert not exact(follow_up)


@pytest.mark.slow
def test_off_by_default_nothing_changes(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    server = start(model_folder("Llama"), tmp_path, "--dtype", "float32")
    try:
        text, before = words(500), len(rows(server))
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
            answer = ask(server, *(text[place] for place in order))
            assert answer["kv_transfer_params"] is None
            assert answer["usage"]["prompt_tokens_details"] is None
        assert len(rows(server)) == before
        with (
            ChunkCacheStore.open(server.store / "caches") as store,
            store._durable.catalog._db.reading() as connection,
        ):
            assert connection.execute("SELECT count(*) FROM seen_texts").fetchone() == (0,)
    finally:
        server.stop()
