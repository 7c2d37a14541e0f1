"""Clients' own instructions over a real server: chunk-caches and vLLM's prefix cache are shared after each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.config import CACHE_FOLDER
from cachecraft_rag.types.documents import chunk_id_of
from tests.vllm.http_server import START_S, ServerProcess

pytestmark = pytest.mark.slow

BLOCK = 32  # tokens, see `ServerProcess`; the tokenizer has one token for each byte
INSTRUCTIONS = {
    name: " ".join(
        f"{name} answers in plain words, by rule {rule} of the house." for rule in range(9)
    )
    for name in ("The workshop", "The library")
}
LONG_TEXTS = [
    " ".join(f"{thing} number {place} was made in {1800 + 7 * place}." for place in range(9))
    for thing in ("The kettle", "The toaster", "The mill")
]
ORDERS = [[0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]]
SESSION = "X-Mine"
EXACT = {"cachecraft": {"recompute_ratio": 1.0}}
FULL_PREFILL = {"cachecraft": {"reuse": False, "capture": False}}


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("instructions")
    made = ServerProcess(
        model_folder("Llama"), folder / "store", folder / "log", "--session-header", SESSION
    )
    yield made
    made.stop()


def ask(
    server: ServerProcess,
    order: list[int] | None,
    *,
    instruction: str = "The workshop",
    about: str = "",
    **body: Any,
) -> dict[str, Any]:
    """Ask about the documents in this order after an instruction of the client's; `about` changes all texts."""
    messages = [
        {"role": "system", "content": about + INSTRUCTIONS[instruction]},
        {"role": "user", "content": f"When was it made? {about}"},
    ]
    documents = None if order is None else [{"text": LONG_TEXTS[place] + about} for place in order]
    answer = server.chat(documents, messages=messages, **body)
    assert answer.status_code == 200, answer.text
    server.settles()
    return dict(answer.json())


def ask_first(server: ServerProcess, *, about: str = "", **how: Any) -> dict[str, Any]:
    """Ask about the documents in the first order, and wait until those that were computed are stored."""
    before = stored(server, about)
    answer = ask(server, ORDERS[0], about=about, **how)
    computed = [
        chunk for chunk in details(answer)["stats"]["chunks"] if chunk["outcome"] == "computed"
    ]
    deadline = time.monotonic() + START_S
    while stored(server, about) < before + len(computed):
        assert time.monotonic() < deadline, details(answer)
        time.sleep(0.2)
    return answer


def stored(server: ServerProcess, about: str) -> int:
    """The number of chunk-caches of the documents about something, after any instruction."""
    chunk_ids = tuple(chunk_id_of(text + about) for text in LONG_TEXTS)
    with ChunkCacheStore.open(server.store / CACHE_FOLDER) as store:
        return len(store.rows(RowFilter(chunk_ids=chunk_ids), limit=1000))


def details(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["kv_transfer_params"]["cachecraft"])


def reused_share(answer: dict[str, Any]) -> float:
    """The share of the chunks' tokens that came from chunk-caches and were not recomputed."""
    chunks = details(answer)["stats"]["chunks"]
    computed = sum(chunk["computed"] + chunk["recomputed"] for chunk in chunks)
    return 1 - float(computed) / float(sum(chunk["tokens"] for chunk in chunks))


def cached(server: ServerProcess, order: list[int] | None, **how: Any) -> float:
    """Tokens of a request that were in vLLM's own prefix cache."""
    before = server.metric("vllm:prefix_cache_hits_total")
    ask(server, order, **how)
    return server.metric("vllm:prefix_cache_hits_total") - before


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_documents_in_any_order_are_reused_after_a_client_s_own_instruction(
    server: ServerProcess, instruction: str
) -> None:
    answers = [ask_first(server, instruction=instruction)]
    answers += [ask(server, order, instruction=instruction) for order in ORDERS[1:]]
    assert [details(answer)["refused"] for answer in answers] == [None] * 4
    assert all(reused_share(answer) >= 0.75 for answer in answers[1:])


def test_tokens_of_chunks_and_instruction_are_counted_as_cached(server: ServerProcess) -> None:
    """With settings that recompute few tokens, as the chunk before the question is recomputed whole by default."""
    about = "It concerns the usage. "
    ask_first(server, about=about)
    for order in ORDERS[1:]:
        settings = {"recompute_ratio": 0.2, "nearest_share": 0.0}
        answer = ask(server, order, about=about, cachecraft=settings)
        chunk_tokens = sum(chunk["tokens"] for chunk in details(answer)["stats"]["chunks"])
        wanted = len(about + INSTRUCTIONS["The workshop"]) + 0.75 * chunk_tokens
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= wanted


@pytest.mark.parametrize("order", ORDERS)
def test_answers_are_those_of_full_prefill_where_everything_is_recomputed(
    server: ServerProcess, order: list[int]
) -> None:
    wanted = tokens(ask(server, order, **FULL_PREFILL))
    assert tokens(ask(server, order, **EXACT)) == wanted
    ask(server, order)
    assert tokens(ask(server, order, **FULL_PREFILL)) == wanted


def test_the_prefix_cache_is_kept_up_to_the_first_chunk(server: ServerProcess) -> None:
    about = "It concerns the prefix. "
    whole_blocks = (len(about + INSTRUCTIONS["The workshop"]) // BLOCK) * BLOCK
    first, *others = ORDERS
    assert cached(server, first, about=about) < BLOCK
    for order in others:
        assert cached(server, order, about=about) >= whole_blocks
    assert cached(server, None, about=about) >= whole_blocks
    assert cached(server, [1, 0, 2], about=about, **FULL_PREFILL) >= whole_blocks


def test_no_request_reads_blocks_that_were_filled_by_reuse_for_another(
    server: ServerProcess,
) -> None:
    """Blocks from the first chunk on serve the same chunks, settings and owner only."""
    about = "It concerns the blocks. "
    order = [1, 0, 2]
    how: dict[str, Any] = {"about": about, "cachecraft": {"recompute_ratio": 0.1}}
    ask(server, [0, 1, 2], about=about)
    ask(server, order, **how)
    whole = cached(server, order, **how)
    for changed in ({"cachecraft": {"recompute_ratio": 0.2}}, FULL_PREFILL):
        assert cached(server, order, **(how | changed)) < whole - BLOCK, changed
    assert cached(server, [1, 2, 0], **how) < whole - BLOCK
    owners: list[dict[str, Any]] = [{"headers": {SESSION: "ann"}}, {"cache_salt": "a tenant's"}]
    for owner in owners:
        assert cached(server, order, **(how | owner)) == 0, owner


def test_a_private_instruction_without_a_session_is_left_to_vllm_and_says_so(
    server: ServerProcess,
) -> None:
    about = "The user is Ada. "
    private = {"cachecraft": {"private_system": True}}
    answers = [ask(server, list(order), about=about, **private) for order in permutations(range(3))]
    assert all("private_system" in details(answer)["note"] for answer in answers)
    chunks = [chunk for answer in answers for chunk in details(answer)["stats"]["chunks"]]
    assert {chunk["outcome"] for chunk in chunks} == {"computed", "exact"}, "vLLM's own blocks only"
    in_session = {**private, "headers": {SESSION: "ada"}}
    ask_first(server, about=about, **in_session)
    later = ask(server, ORDERS[1], about=about, **in_session)
    assert reused_share(later) >= 0.75
    assert details(later)["note"] is None


def test_chunk_caches_after_a_private_instruction_serve_its_session_only(
    server: ServerProcess,
) -> None:
    """Not even a request whose instruction is the same, or one that says nothing about it."""
    about = "The user is Eve. "
    private: dict[str, Any] = {"cachecraft": {"private_system": True}}
    hers = private | {"headers": {SESSION: "eve"}}
    ask_first(server, about=about, **hers)
    assert reused_share(ask(server, ORDERS[1], about=about, **hers)) >= 0.75
    bob = {"headers": {SESSION: "bob"}}
    for others in (private | bob, private, {}):
        for instruction in INSTRUCTIONS:
            answer = ask(
                server,
                ORDERS[2],
                about=about,
                instruction=instruction,
                cache_salt=f"{others}{instruction}",  # nothing of vLLM's own cache, either
                **(others | {"cachecraft": {**others.get("cachecraft", {}), "capture": False}}),
            )
            assert reused_share(answer) == 0, others
            assert details(answer)["note"], others
