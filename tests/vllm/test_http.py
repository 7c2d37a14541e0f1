"""A real server over HTTP: any OpenAI client, both frameworks and the facade; bad requests, cancelling, `kill -9`."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from cachecraft_rag.client.http import HTTPEngine
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ServerError
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.prompt.builder import PromptBuilder, Turn
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk, Document
from cachecraft_rag.vllm.messages import Ask, salt_of
from tests.vllm.conftest import TEXTS, Server
from tests.vllm.http_server import ServerProcess

pytestmark = pytest.mark.slow

SHORT = SamplingParams(max_new_tokens=12)
YES = {"type": "boolean"}
# Loaded whole, so that no speed decides; the question's own settings keep it apart from vLLM's prefix cache.
REUSE = ReuseConfig(capture=False, method=ReuseMethod(alpha=0.5, probe_min_rows=0, loading="whole"))
METHOD = {"alpha": 0.5, "probe_min_rows": 0, "loading": "whole"}
LOOSE = {"method": METHOD, "capture": False}
QUESTIONS = (
    "How is the kettle descaled?",
    "Who repairs it?",
    "What does the guarantee cover?",
    "How cold is it?",
)
ORDERS = ([0, 1, 2], [2, 0, 3], [4, 3, 1], [5, 0, 4])


ADMIN = "the key of the administrator"
CONTEXT = 3500  # of the server; the model's own is 8192
LONG = 2700  # tokens of an answer that is still being written when something else happens


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "keys").write_text(ADMIN)
    options = (
        "--admin-key-file",
        str(folder / "keys"),
        "--max-model-len",
        str(CONTEXT),
        "--session-header",
        "X-Mine",
        "--",
        "--disable-log-stats",
    )
    options += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    made = ServerProcess(model_folder("Llama"), folder / "store", folder / "log", *options)
    yield made
    made.stop()


SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the handbook.",
        "parameters": {
            "type": "object",
            "properties": {"all": {"type": "boolean"}},
            "required": ["all"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@pytest.fixture
def store(server: ServerProcess) -> Path:
    """The server's store folder."""
    return server._log.parent / "store"


def documents(order: list[int]) -> list[dict[str, str]]:
    return [{"text": TEXTS[i]} for i in order]


def chunks(order: list[int]) -> list[Chunk]:
    return [Chunk(TEXTS[i]) for i in order]


def stats_in(answer: dict[str, Any]) -> dict[str, Any]:
    """Statistics in an answer that was not streamed."""
    return dict(answer["kv_transfer_params"]["cachecraft"]["stats"])


def stored_share(stats: list[dict[str, Any]]) -> float:
    """Share of the chunks' tokens that came from chunk-caches."""
    all_chunks = [chunk for one in stats for chunk in one["chunks"]]
    return 1 - sum(chunk["computed"] for chunk in all_chunks) / sum(
        chunk["tokens"] for chunk in all_chunks
    )


def test_the_rag_loop_with_every_client(
    server: ServerProcess, store: Path, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    import openai
    from langchain_core.documents import Document as LangChainDocument
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    from cachecraft_rag.langchain import ChatCacheCraft
    from cachecraft_rag.llama_index import CacheCraftQueryEngine

    first = [
        server.chat(documents(order), question).json()
        for question, order in zip(QUESTIONS, ORDERS, strict=True)
    ]
    assert {chunk["outcome"] for chunk in stats_in(first[0])["chunks"]} == {"computed"}

    # Once more, by each client; the settings differ, so vLLM's own prefix cache has none of it.
    texts = []
    with (
        HTTPEngine.connect(server.url, admin_key=ADMIN) as engine,
        Engine.from_pretrained(
            str(model_folder("Llama")), store=store, reuse=REUSE, dtype="float32"
        ) as here,
    ):
        assert engine.decoder.fingerprint == here.decoder.fingerprint
        assert (engine.decoder.context_length, here.decoder.context_length) == (CONTEXT, 8192)
        assert engine.decoder.tokenizer.get_vocab() == here.decoder.tokenizer.get_vocab()
        for question, order in zip(QUESTIONS, ORDERS, strict=True):
            stream, expected = (
                one.stream(question, chunks(order), sampling=SHORT, config=REUSE)
                for one in (engine, here)
            )
            texts.append("".join(stream))
            assert texts[-1] == "".join(expected)
            assert_same_chunks(stream.stats, expected.stats)
            assert stored_share([stream.stats.as_dict()]) >= 0.9
        kept = engine.stream(
            QUESTIONS[0], chunks([0, 1]), sampling=replace(SHORT, json_schema=YES), config=REUSE
        )
        assert json.loads("".join(kept)) in (True, False)

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        for question, order, text in zip(QUESTIONS[:2], ORDERS, texts, strict=False):
            asked: dict[str, Any] = {
                "model": model,
                "messages": [{"role": "user", "content": question}],
            }
            asked |= {"max_tokens": 12, "temperature": 0}
            answer = client.chat.completions.create(
                **asked, extra_body={"documents": documents(order), "cachecraft": LOOSE}
            )
            assert same_text(answer.choices[0].message.content, text)
            found = httpx.get(f"{server.url}/v1/cachecraft/requests/{answer.id}").json()["stats"]
            assert {chunk["reason_code"] for chunk in found["chunks"]} == {"prefix_cached"}
            assert stored_share([found]) >= 0.9
            pieces = client.chat.completions.create(
                **asked,
                stream=True,
                extra_body={
                    "documents": documents(order),
                    "cachecraft": LOOSE | {"method": METHOD | {"drift": 0.3}},
                },
            )
            name, streamed = "", ""
            for piece in pieces:
                name, streamed = piece.id, streamed + (piece.choices[0].delta.content or "")
            assert streamed
            found = httpx.get(f"{server.url}/v1/cachecraft/requests/{name}").json()["stats"]
            assert found["tokens_generated"] == 12
            assert {chunk["tier"] for chunk in found["chunks"]} <= {"host", "disk"}
            assert stored_share([found]) >= 0.9

        class Fixed(BaseRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                order = ORDERS[QUESTIONS.index(query_bundle.query_str)]
                return [NodeWithScore(node=TextNode(text=TEXTS[i]), score=1.0) for i in order]

        chat = ChatCacheCraft(engine=engine, max_tokens=12, reuse=REUSE)
        queries = CacheCraftQueryEngine.from_defaults(Fixed(), engine=engine, sampling=SHORT)
        for question, order, text in zip(QUESTIONS[:2], ORDERS, texts, strict=False):
            message = chat.invoke(question, documents=[LangChainDocument(TEXTS[i]) for i in order])
            assert message.content == text
            response = queries.query(question)
            found = response.metadata["cachecraft"]
            assert len(found["chunks"]) == len(order)
            assert stored_share([found]) >= 0.9


def same_text(served: str | None, expected: str) -> bool:
    """Byte tokens need not be whole characters; vLLM's detokenizer and ours differ in how they end such a text."""
    left, right = ((text or "").rstrip("\ufffd") for text in (served, expected))
    return left.startswith(right[: len(right) // 2]) and right.startswith(left[: len(left) // 2])


def assert_same_chunks(served: RequestStats, expected: RequestStats) -> None:
    fields = ("chunk_id", "outcome", "tokens", "recomputed", "computed", "variant_id")
    assert [[getattr(one, name) for name in fields] for one in served.chunks] == [
        [getattr(one, name) for name in fields] for one in expected.chunks
    ]
    assert (served.tokens_reused, served.tokens_prompt) == (
        expected.tokens_reused,
        expected.tokens_prompt,
    )


def test_the_facade_indexes_primes_and_forgets(
    server: ServerProcess, store: Path, tmp_path: Path
) -> None:
    document = Document(
        "manual", "\n\n".join(f"{text} Page {i}. " * 4 for i, text in enumerate(TEXTS[:3]))
    )
    with CacheCraft.connect(server.url, store=tmp_path, admin_key=ADMIN) as rag:
        rag.add_documents([document])
        estimate = rag.estimate_priming()
        assert estimate.captures >= 2
        assert estimate.disk_budget > 0
        assert rag.prime() == estimate.captures
        assert rag.estimate_priming().captures == 0
        answer = rag.ask("Which page is about the kettle?", top_k=1, sampling=SHORT, config=REUSE)
        assert {chunk.outcome for chunk in answer.stats.chunks} <= {"exact", "reused"}
        assert answer.stats.tokens_reused > 0
        again = rag.ask("Which page is about the kettle?", top_k=1, sampling=SHORT, config=REUSE)
        assert again.text == answer.text
        # vLLM's own prefix cache has it by now
        assert again.stats.tokens_reused >= answer.stats.tokens_reused
        turns = [("user", "Which page is about the kettle?"), ("assistant", answer.text)]
        more = rag.ask("And the toaster?", top_k=1, sampling=SHORT, history=turns, session="ada")
        assert more.stats.finish is not None
        removed = rag.remove_documents(["manual"])
        assert removed.chunk_caches >= 1
    with ChunkCacheStore.open(store / "caches") as caches:
        left = [row.variant.key for row in caches.rows() if row.variant.primed]
        assert not any(key.origin_prefix for key in left)  # the instruction belongs to no document


def test_without_documents_it_is_vllm(
    server: ServerProcess, model_folder: Callable[[str], Path]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder("Llama")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        output = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    for body in (
        {},
        {"cachecraft": {"nonsense": 1}, "kv_transfer_params": {"cachecraft": {"segments": []}}},
    ):
        answer = server.chat(None, QUESTIONS[0], **body).json()
        assert answer["prompt_token_ids"] == ids
        assert answer["choices"][0]["token_ids"] == output[0, len(ids) :].tolist()
    assert "stats" not in (answer["kv_transfer_params"] or {}).get("cachecraft", {})
    missing = httpx.get(f"{server.url}/v1/cachecraft/requests/{answer['id']}")
    assert (missing.status_code, "remembered" in missing.text) == (404, True)


def test_tools_and_their_results_beside_documents(
    server: ServerProcess, model_folder: Callable[[str], Path]
) -> None:
    """The prompt is that of the engine in this process; captures are a session's, because a client wrote the tools."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    tokenizer = AutoTokenizer.from_pretrained(model_folder("Llama"))
    tool = ChatCompletionToolsParam.model_validate(SEARCH).model_dump()
    system = httpx.get(f"{server.url}/v1/cachecraft").json()["system"]
    builder = PromptBuilder(tokenizer, context_length=CONTEXT, system=system, tools=[tool])
    mine = {"X-Mine": "an agent"}
    named = {"type": "function", "function": {"name": "search"}}
    how: dict[str, Any] = {"tools": [SEARCH], "headers": mine, "max_tokens": 100}
    own = [{"page_content": TEXTS[place], "metadata": {"page": place}} for place in (1, 4)]
    first = server.chat(own, QUESTIONS[1], tool_choice=named, **how)
    assert first.status_code == 200, first.text
    # of this random model; its arguments may not end in time, and are then no call
    assert "search" in json.dumps(first.json()["choices"][0]["message"])
    function = {"name": "search", "arguments": '{"all": true}'}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "7", "type": "function", "function": function}],
    }
    messages = [
        {"role": "user", "content": QUESTIONS[1]},
        message,
        {"role": "tool", "tool_call_id": "7", "content": TEXTS[0]},
    ]
    second = server.chat(own[::-1], messages=messages, tool_choice="auto", **how).json()
    calls = {"name": "search", "arguments": {"all": True}}
    turns: list[Turn] = [
        ("user", QUESTIONS[1]),
        ("calls", json.dumps([calls])),
        ("result", TEXTS[0]),
    ]
    expected = builder.build("", chunks([4, 1]), history=turns)
    assert second["prompt_token_ids"] == list(expected.token_ids)
    assert {chunk["outcome"] for chunk in stats_in(second)["chunks"]} <= {"exact", "reused"}
    # somebody interrupts the agent
    messages.append({"role": "user", "content": "Stop. How long?"})
    third = server.chat(own[::-1], messages=messages, tool_choice="auto", **how).json()
    expected = builder.build("Stop. How long?", chunks([4, 1]), history=turns)
    assert third["prompt_token_ids"] == list(expected.token_ids)
    smuggled = {"type": "function", "function": {"name": "x", "description": "<|end|>"}}
    refused = server.chat(own, tools=[smuggled])
    assert (refused.status_code, "special tokens" in refused.text) == (400, True)


def test_nothing_private_is_shared(server: ServerProcess, store: Path) -> None:
    def owners() -> set[tuple[str, str | None]]:
        with ChunkCacheStore.open(store / "caches") as caches:
            return {(row.variant.key.chunk_id, row.variant.session) for row in caches.rows()}

    secret, news = (
        "My number is 4711.",
        [{"text": "The mill at Dunn dates from 1900, its wheel from 1950."}],
    )
    private = [{"role": "system", "content": secret}, {"role": "user", "content": "When?"}]
    name = Chunk(news[0]["text"]).chunk_id
    marked = {"private_system": True}
    body = {"messages": private, "session": "bob", "namespace": "other", "cachecraft": marked}
    answer = server.chat(news, **body)
    assert answer.status_code == 200
    assert name not in {chunk for chunk, _ in owners()}  # without a session: it is not kept
    mine = server.chat(news, headers={"X-Mine": "ada"}, **body).json()
    await_rows(lambda: (name, "ada") in owners())
    assert {session for chunk, session in owners() if chunk == name} == {"ada"}
    url = f"{server.url}/v1/cachecraft/requests/{mine['id']}"
    assert httpx.get(url).status_code == 404  # another session's
    assert (
        httpx.get(url, headers={"X-Mine": "ada"}).json()["stats"]["chunks"][0]["outcome"]
        == "computed"
    )
    theirs = server.chat(news, headers={"X-Mine": "bob"}, **body).json()
    assert stats_in(theirs)["chunks"][0]["outcome"] == "computed"
    again = server.chat(
        news, headers={"X-Mine": "ada"}, **body | {"cachecraft": {**marked, "capture": False}}
    ).json()
    assert stats_in(again)["chunks"][0]["outcome"] == "exact"


def await_rows(there: Callable[[], bool]) -> None:
    """Captures are stored in the background."""
    import time

    for _ in range(3000):
        if there():
            return
        time.sleep(0.1)
    raise AssertionError("it was never stored")


def test_metrics_count_what_was_asked(server: ServerProcess, store: Path) -> None:
    own = [
        {"text": f"{text} It is so since {year}."}
        for text, year in zip(TEXTS[:3], range(1990, 1993), strict=True)
    ]
    before = server.counts()
    answers = [server.chat(own, QUESTIONS[0]).json()]
    names = {Chunk(one["text"]).chunk_id for one in own}
    with ChunkCacheStore.open(store / "caches") as caches:
        await_rows(lambda: names <= {row.variant.key.chunk_id for row in caches.rows(limit=1000)})
    answers += [server.chat(own[::-1], question, cachecraft=LOOSE).json() for question in QUESTIONS]
    stats = [stats_in(one) for one in answers]
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        timeout=600,
        json={
            "messages": [{"role": "user", "content": "And how cold?"}],
            "documents": own,
            "stream": True,
            "max_tokens": 5,
            "temperature": 0,
            "cachecraft": LOOSE,
        },
    ) as answer:
        pieces = [
            json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")
        ]
    stats.append(
        httpx.get(f"{server.url}/v1/cachecraft/requests/{pieces[0]['id']}").json()["stats"]
    )
    assert server.chat(own, QUESTIONS[0], n=2).status_code == 400
    stale = [{"text": TEXTS[0], "id": Chunk(TEXTS[1]).chunk_id}]
    wrong = server.chat(stale, QUESTIONS[0], cachecraft={"strict_ids": True})
    assert (wrong.status_code, "not the id of its text" in wrong.text) == (400, True)
    assert server.chat(own, QUESTIONS[0], max_tokens=10**6).status_code == 400
    assert server.chat(None, QUESTIONS[0]).status_code == 200  # vLLM's own: not counted
    server.settles()

    after = server.counts()
    added = {
        key: value - before.get(key, 0)
        for key, value in after.items()
        if value != before.get(key, 0)
    }

    def by(name: str) -> Counter[tuple[str, ...]]:
        return Counter(
            {labels: int(value) for (found, labels), value in added.items() if found == name}
        )

    expected = Counter((one["finish"],) for one in stats) + Counter({("refused",): 3})
    assert by("cachecraft_requests_total") == expected
    chunks_of = [chunk for one in stats for chunk in one["chunks"]]
    assert by("cachecraft_chunks_total") == Counter(
        (one["outcome"], one["reason_code"]) for one in chunks_of
    )
    kinds = ("reused", "recomputed", "computed", "generated")
    tokens = {(kind,): sum(one[f"tokens_{kind}"] for one in stats) for kind in kinds}
    assert by("cachecraft_tokens_total") == +Counter(tokens)
    assert by("cachecraft_ttft_seconds_count") == {(): len(stats)}
    assert by("cachecraft_request_seconds_count") == {(): len(stats)}
    assert by("cachecraft_captures_total")["stored", ""] >= len(own)
    # Counted where vLLM runs; instructions are looked up and loaded, too. What vLLM's prefix cache has is not loaded.
    loaded = Counter(chunk["tier"] for chunk in chunks_of if chunk["tier"] is not None)
    assert all(by("cachecraft_loads_total")[tier,] >= count > 0 for tier, count in loaded.items())
    assert by("cachecraft_lookups_total")["not_stored",] >= len(own)
    assert by("cachecraft_lookups_total")["found",] >= len(own) * len(QUESTIONS)
    assert after["cachecraft_variants", ()] >= len(own)
    assert after["cachecraft_store_readable", ()] == 1
    assert server.metric("vllm:num_requests_running") == 0  # vLLM's own are there as before
    scraped = httpx.get(f"{server.url}/metrics", timeout=60).text
    for path in (Path(__file__).resolve().parents[2] / "examples/monitoring").iterdir():
        for name in re.findall(r"\b(?:cachecraft_(?!remote_|waiting_)|vllm:)\w+", path.read_text()):
            assert name in scraped, name  # without a remote, and with vLLM's own queue


def test_sessions_share_no_blocks_of_the_prefix_cache(server: ServerProcess) -> None:
    """Response times would reveal what another session has sent."""
    question = " ".join(f"Is rule {number} of the kettle still valid?" for number in range(40))

    def hits(**how: Any) -> float:
        before = server.metric("vllm:prefix_cache_hits_total")
        assert server.chat(None, question, **how).status_code == 200
        server.settles()
        return server.metric("vllm:prefix_cache_hits_total") - before

    ann, bob = {"X-Mine": "ann"}, {"X-Mine": "bob"}
    assert hits(headers=ann) == 0
    assert hits(headers=ann) > 0
    assert hits(headers=bob) == 0
    assert hits() == 0
    assert hits(headers=ann, cache_salt="mine") == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/invocations"])
def test_no_salt_of_a_client_reaches_a_session_s_blocks_on_vllm_s_routes(
    server: ServerProcess, path: str
) -> None:
    question = " ".join(f"Is rule {number} of the grinder still valid?" for number in range(40))
    session = f"a reader of {path}"
    asked = server.chat(None, question, headers={"X-Mine": session}).json()
    messages = [{"role": "user", "content": question}]
    body = {"model": asked["model"], "messages": messages, "max_tokens": 2}

    def hits(salt: str) -> float:
        server.settles()
        before = server.metric("vllm:prefix_cache_hits_total")
        reply = httpx.post(f"{server.url}{path}", json=body | {"cache_salt": salt}, timeout=600)
        assert reply.status_code == 200, reply.text
        server.settles()
        return server.metric("vllm:prefix_cache_hits_total") - before

    forged = salt_of(session, "")  # an unkeyed digest, which clients can compute too
    assert hits(forged) == 0
    assert hits(forged) > 0
    assert hits(f"another {path}") == 0


def test_the_log_ends_its_start_with_a_request_that_works(server: ServerProcess) -> None:
    log = server._log.read_text()
    command = log[log.index("curl http") :]
    words = shlex.split(command[: command.index("}'") + 2])
    url, body = words[1], json.loads(words[words.index("-d") + 1])
    assert url == f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=600)
    assert answer.status_code == 200
    assert stats_in(answer.json())["chunks"]


def test_vllm_s_own_metrics_count_what_was_reused(server: ServerProcess) -> None:
    """Routers and autoscalers read these."""
    own = [{"text": f"{text} It is so by rule {i}."} for i, text in enumerate(TEXTS[:4], 70)]
    names = {
        "hits": "vllm:external_prefix_cache_hits_total",
        "queries": "vllm:external_prefix_cache_queries_total",
        "cached": "vllm:prompt_tokens_cached_total",
    }

    def added(
        order: list[int], question: str, **asked: Any
    ) -> tuple[dict[str, float], dict[str, Any]]:
        before = {key: server.metric(name) for key, name in names.items()}
        answer = server.chat([own[i] for i in order], question, **asked)
        server.settles()
        numbers = {key: server.metric(name) - before[key] for key, name in names.items()}
        return numbers, answer.json()

    fresh, answer = added([0, 1, 2, 3], QUESTIONS[0])
    stats = stats_in(answer)
    reused_at_first = stats["tokens_reused"]  # the instruction, at most
    assert fresh["hits"] <= reused_at_first
    assert fresh["queries"] >= stats["tokens_computed"]
    wait_for_captures(server, {Chunk(one["text"]).chunk_id for one in own})
    moved, answer = added([2, 0, 3, 1], QUESTIONS[1], cachecraft=LOOSE)
    stats = stats_in(answer)
    assert stats["tokens_reused"] > 0.3 * stats["tokens_prompt"]
    assert moved["cached"] == stats["tokens_reused"]
    assert moved["hits"] <= stats["tokens_reused"]
    assert moved["hits"] > 0


def test_the_dashboard_asks_vllm_for_what_is_there(server: ServerProcess) -> None:
    server.chat(question="How often is it descaled, and how?")
    dashboard = Path(__file__).parents[2] / "examples" / "monitoring" / "dashboard.json"
    names = set(re.findall(r"vllm:\w+", dashboard.read_text()))
    assert "vllm:inter_token_latency_seconds_bucket" in names
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    there = set(re.findall(r"^vllm:\w+", text, re.MULTILINE))
    assert names <= there


def wait_for_captures(server: ServerProcess, names: set[str]) -> None:
    with ChunkCacheStore.open(server.store / "caches") as caches:
        await_rows(lambda: names <= {row.variant.key.chunk_id for row in caches.rows(limit=1000)})


def test_accounts_are_right_however_an_answer_ends(server: ServerProcess, store: Path) -> None:
    own = [{"text": f"{text} So says page {i}."} for i, text in enumerate(TEXTS[:3])]
    names = {Chunk(one["text"]).chunk_id for one in own}
    before = server.counts()
    (first,) = stats = [stats_in(server.chat(own, QUESTIONS[0]).json())]
    with ChunkCacheStore.open(store / "caches") as caches:
        await_rows(lambda: names <= {row.variant.key.chunk_id for row in caches.rows(limit=1000)})
    length = server.chat(own[::-1], QUESTIONS[1], cachecraft=LOOSE).json()
    stats.append(stats_in(length))
    used = length["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (
        0
        < used
        == stats[-1]["tokens_reused"]
        < length["usage"]["prompt_tokens"]
        == stats[-1]["tokens_prompt"]
    )
    text = length["choices"][0]["message"]["content"]
    letter = next(one for one in text[1:] if one.isprintable() and one != "\ufffd")
    stopped = server.chat(
        own[::-1],
        QUESTIONS[1],
        cachecraft=LOOSE | {"method": METHOD | {"drift": 0.35}},
        stop=[letter],
    ).json()
    stats.append(httpx.get(f"{server.url}/v1/cachecraft/requests/{stopped['id']}").json()["stats"])
    body: dict[str, Any] = {
        "documents": own[::-1],
        "stream": True,
        "max_tokens": LONG,
        "ignore_eos": True,
    }
    body |= {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0,
    }
    # Closed by its reader while it is written. On a busy machine it may be complete before; then another is asked.
    while [one["finish"] for one in stats[3:]].count("closed") < 2:
        assert len(stats) < 20
        asked = body | {
            "messages": [{"role": "user", "content": "Go on!"}],
            "cachecraft": LOOSE | {"method": METHOD | {"drift": 0.2 + 0.01 * len(stats)}},
        }
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", timeout=600, json=asked
        ) as answer:
            lines = (
                json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")
            )
            name = [next(lines) for _ in range(4)][-1]["id"]
        server.settles()
        stats.append(httpx.get(f"{server.url}/v1/cachecraft/requests/{name}").json()["stats"])
    assert [one["finish"] for one in stats[:2]] == ["length", "length"]
    assert {one["finish"] for one in stats[2:]} <= {"stop", "length", "closed"}
    for one in stats[1:]:
        assert {chunk["outcome"] for chunk in one["chunks"]} <= {"exact", "reused"}
        assert one["tokens_reused"] > 0
    assert {chunk["outcome"] for chunk in first["chunks"]} == {"computed"}
    give_up(server, 1)  # perhaps while it is being filled
    server.settles()
    stats.append(
        httpx.get(f"{server.url}/v1/cachecraft/requests/chatcmpl-given-up-1").json()["stats"]
    )
    for path, asked in (("completions", {"prompt": "x"}), ("responses", {"input": "x"})):
        refused = httpx.post(f"{server.url}/v1/{path}", json=asked | {"documents": own}, timeout=60)
        assert (refused.status_code, "/v1/chat/completions" in refused.text) == (400, True)
    assert httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=600
    ).is_success
    after = server.counts()
    kinds = ("reused", "recomputed", "computed", "generated")
    for one in stats:
        assert sum(one[f"tokens_{kind}"] for kind in kinds[:3]) == one["tokens_prompt"]
    for kind in kinds:
        added = after["cachecraft_tokens_total", (kind,)] - before.get(
            ("cachecraft_tokens_total", (kind,)), 0
        )
        assert added == sum(one[f"tokens_{kind}"] for one in stats)
    assert "Avg prompt throughput" not in server._log.read_text()


MALFORMED = int(os.environ.get("TESTS_MALFORMED", "60"))
PATHS = ("chat/completions", "cachecraft/prime", "cachecraft/evict")


def bad_bodies(dice: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Requests that are wrong in one place or more, and where they go."""
    deep: Any = "x"
    for _ in range(200):
        deep = [deep] if dice.random() < 0.5 else {"text": deep}
    junk: list[Any] = [
        None,
        7,
        -1,
        1e300,
        True,
        10**30,
        -(2**63) - 1,
        [2**70, -5],
        ["9" * 5000],
        [],
        {},
        [None],
        [[]],
        deep,
        "",
        "x",
        "\ud800",
        "\x00",
        "\u202eabc\ufeff",
        "🫖" * 3000,
        {"text": 1},
        [{"text": "a" * 200_000}],
        [{"text": "\udfff"}],
        [{"text": "x", "id": 10**40}],
        [{"text": "", "title": "t"}],
        [{"txt": "x"}],
        [{"text": "x"}] * 1001,
        {"recompute_ratio": 1e308},
        {"method": {"selector": "\ud83d"}},
        {"method": {"alpha": [1]}},
        {"session": "other"},
        {"segments": [["chunk", "x", -3, False, True]], "seal": "0" * 32},
    ]
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "documents": documents([0]),
        "max_tokens": 2,
    }
    further = [
        "temperature",
        "cachecraft",
        "n",
        "tools",
        "cache_salt",
        "stop",
        "kv_transfer_params",
        "request_id",
        "model",
        "stream",
        "\ud800",
    ]
    asked: dict[str, tuple[dict[str, Any], list[str]]] = {
        PATHS[0]: (chat, [*chat, *further]),
        PATHS[1]: ({"documents": documents([0])}, ["documents", "estimate", "\ud800"]),
        PATHS[2]: ({"chunk_ids": ["x"]}, ["chunk_ids", "documents"]),
    }
    for number in range(count):
        path = dice.choice((PATHS[0], PATHS[0], *PATHS))
        good, fields = asked[path]
        body = good | {
            name: dice.choice(junk)
            for name in dice.sample(fields, dice.randint(1, min(3, len(fields))))
        }
        raw = json.dumps(body).encode()
        match number % 10:
            case 4 | 9:  # broken off
                raw = raw[: dice.randrange(len(raw))]
            case 5:  # no UTF-8
                place = dice.randrange(len(raw))
                raw = raw[:place] + dice.randbytes(5) + raw[place:]
            case 6:  # deeper than any parser goes
                raw = b'{"documents": ' + dice.choice((b"[", b'{"text":')) * dice.choice(
                    (900, 100_000)
                )
            case 7:  # not an object
                raw = json.dumps(dice.choice(junk)).encode()
        yield path, raw


def test_malformed_requests_harm_no_other_request(server: ServerProcess) -> None:
    """TESTS_MALFORMED says how many."""
    good = server.chat(documents([0, 1]), QUESTIONS[0], cachecraft=LOOSE).json()["choices"][0][
        "token_ids"
    ]
    statuses: Counter[int] = Counter()
    headers = {"Content-Type": "application/json", "X-CacheCraft-Admin-Key": ADMIN}
    with httpx.Client(headers=headers, timeout=600) as client:
        for path, raw in bad_bodies(random.Random(5), MALFORMED):
            answer = client.post(f"{server.url}/v1/{path}", content=raw)
            assert answer.status_code in (200, 400, 404, 422), (path, raw[:300], answer.text)
            statuses[answer.status_code] += 1
            if answer.status_code != 200:
                error = answer.json()  # FastAPI has its own form for bodies that are no JSON
                assert error["error"]["message"] if "error" in error else error["detail"]
        for path in PATHS[1:]:
            for raw in (
                b"",
                b"[]",
                b"{",
                b'{"documents": 3}',
                b'{"chunk_ids": [7]}',
                b'{"more": 1}',
            ):
                answer = client.post(f"{server.url}/v1/{path}", content=raw)
                assert answer.status_code == 400, (path, raw, answer.text)
        # a text that is too long, a body that is too long
        for text, many in (("k", 9_000_000), ("\u2603", 5_000_000)):
            answer = client.post(
                f"{server.url}/v1/{PATHS[1]}", json={"documents": [{"text": text * many}]}
            )
            assert answer.status_code == 400
            assert "send" in answer.json()["error"]["message"]
    assert statuses[400] > MALFORMED / 2
    again = server.chat(documents([0, 1]), QUESTIONS[0], cachecraft=LOOSE).json()["choices"][0][
        "token_ids"
    ]
    assert again == good
    server.settles()


def test_cancelled_requests_free_their_blocks(server: ServerProcess) -> None:
    with HTTPEngine.connect(server.url) as engine:
        long = SamplingParams(max_new_tokens=LONG)
        streams = [
            engine.stream(f"{question} {i}", chunks(ORDERS[i % 4]), sampling=long)
            for i, question in enumerate(QUESTIONS * 2)
        ]
        for stream in streams:
            next(stream, None)
            stream.close()
        assert all(stream.stats.finish in ("closed", "end") for stream in streams)
        threads = [threading.Thread(target=give_up, args=(server, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.settles()
        assert "".join(engine.stream(QUESTIONS[0], chunks([0, 1]), sampling=SHORT))


def give_up(server: ServerProcess, number: int) -> None:
    """Ask without streaming, and hang up after a moment."""
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            f"{server.url}/v1/chat/completions",
            headers={"X-Request-Id": f"given-up-{number}"},
            json={
                "messages": [{"role": "user", "content": f"Who? {number}"}],
                "documents": documents(ORDERS[number]),
                "max_tokens": LONG,
                "ignore_eos": True,
            },
            timeout=0.3,
        )


def has_long_answer(engine: HTTPEngine, question: str) -> bool:
    """True if the answer does not end within a hundred tokens."""
    answer = engine.stream(question, chunks([0]), sampling=SamplingParams(max_new_tokens=100))
    assert "".join(answer) is not None
    return answer.stats.finish == "length"


def test_after_kill_9_the_next_server_reuses_from_disk(
    server: ServerProcess,
    store: Path,
    model_folder: Callable[[str], Path],
    make_server: Callable[..., Server],
) -> None:
    before = server.chat(documents([3, 2, 1]), QUESTIONS[1])
    assert before.status_code == 200
    server.settles()
    with HTTPEngine.connect(server.url, admin_key=ADMIN) as engine:
        missing = engine.primer().missing(chunks([1]))
        question = next(asked for asked in QUESTIONS if has_long_answer(engine, asked))
        stream = engine.stream(question, chunks([0]), sampling=SamplingParams(max_new_tokens=LONG))
        next(stream)
        server.kill_front()
        with pytest.raises(ServerError, match=r"does not answer|halfway"):
            list(stream)
        with pytest.raises(ServerError, match="does not answer"):
            list(engine.stream(QUESTIONS[0], chunks([0])))
    folder = model_folder("Llama")
    with Engine.from_pretrained(str(folder), store=store, dtype="float32") as here:
        assert here.primer().missing(chunks([1])) == missing
        prompt = here.prompts.build(QUESTIONS[1], chunks([3, 2, 1]))
    # in this process, without HTTP: that starts much faster
    restarted = make_server(folder, store / "caches")
    (answer,) = restarted.ask([Ask(prompt, REUSE)], tokens=1)
    stored = answer.report["segments"][1:-1]
    assert [one["tier"] for one in stored] == ["disk"] * 3
    assert sum(one["not_loaded"] for one in stored) == 0
