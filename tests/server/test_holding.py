"""Which chunks a server holds, asked by routers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from cachecraft_rag.client.http import HTTPEngine
from cachecraft_rag.types.documents import Chunk
from tests.server.conftest import DOCUMENTS, TEXTS, Served

Serve = Callable[..., Served]
HOLDS = "/v1/cachecraft/holds"
CHUNKS = [Chunk(text) for text in TEXTS]


class Router:
    """Sends a session where most tokens of its first documents are held, and its later questions there, too."""

    def __init__(self, servers: list[Served]) -> None:
        self._servers = servers
        self._places: dict[str, Served] = {}

    def choose(self, session: str, documents: list[dict[str, str]]) -> Served:
        if session not in self._places:
            body = {"documents": documents}
            self._places[session] = max(
                self._servers,
                key=lambda server: server.post(HOLDS, body).json()["tokens"],
            )
        return self._places[session]


def test_a_router_sends_a_session_where_its_chunks_are(serve: Serve) -> None:
    servers = [serve(folder=name) for name in ("first", "second")]
    servers[0].chat(documents=DOCUMENTS[:1])
    servers[1].chat(documents=DOCUMENTS[1:])
    for served in servers:
        served.engine.settle()
    router = Router(servers)
    assert router.choose("ann", DOCUMENTS[:1]) is servers[0]
    assert router.choose("bob", DOCUMENTS[:0:-1]) is servers[1]
    assert router.choose("ann", DOCUMENTS[1:]) is servers[0]
    usage = router.choose("bob", DOCUMENTS).chat(documents=DOCUMENTS[:0:-1]).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_server_names_tokens_and_place_of_each_chunk_by_id_or_text(server: Served) -> None:
    server.chat(documents=DOCUMENTS[:1])
    server.engine.settle()
    asked = [CHUNKS[1].chunk_id, CHUNKS[0].chunk_id]
    reply = server.post(HOLDS, {"chunk_ids": asked}).json()
    assert [chunk["chunk_id"] for chunk in reply["chunks"]] == asked
    assert reply["chunks"][0] == {"chunk_id": asked[0], "tokens": 0, "in_memory": False}
    assert reply["chunks"][1]["tokens"] == reply["tokens"] > 0
    assert reply["chunks"][1]["in_memory"]
    by_text = server.post(HOLDS, {"documents": [DOCUMENTS[1], DOCUMENTS[0]]}).json()
    assert by_text == reply
    with HTTPEngine.connect(server.url) as engine:
        assert engine.held(CHUNKS) == server.engine.held(TEXTS)
        assert [chunk.tokens > 0 for chunk in engine.held(CHUNKS)] == [True, False, False]


def test_after_a_restart_a_chunk_is_held_on_the_disk_and_a_removed_one_is_not(
    serve: Serve,
) -> None:
    first = serve(folder="store")
    first.chat(documents=DOCUMENTS)
    first.engine.settle()
    again = serve(folder="store")
    assert [(chunk.tokens > 0, chunk.in_memory) for chunk in again.engine.held(TEXTS)] == [
        (True, False)
    ] * 3
    first.engine.remove(TEXTS[:1])
    assert again.engine.held(TEXTS[:1])[0].tokens == 0


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        ({}, "write .*chunk_ids"),
        ({"chunk_ids": [], "documents": []}, "write .*chunk_ids"),
        ({"chunk_ids": [5]}, "each of chunk_ids"),
        ({"chunk_ids": ["a"] * 1001}, "at most 1000"),
        ({"documents": DOCUMENTS * 400}, "at most 1000"),
        ({"chunks": []}, "chunks"),
    ],
)
def test_what_is_no_list_of_chunks_is_refused_with_advice(
    server: Served, body: dict[str, object], advice: str
) -> None:
    reply = server.post(HOLDS, body)
    assert reply.status_code == 400
    assert re.search(advice, reply.json()["error"]["message"])
