"""The client with servers that are not there, are others, or end halfway; needs no vLLM."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cachecraft_rag.client.http import HTTPEngine
from cachecraft_rag.errors import ConfigError, ContextLengthError, ServerError, UnsupportedCallError
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.index.removal import evict_removed
from cachecraft_rag.server.wire import MOST_DOCUMENTS, MOST_PRIMED, PROTOCOL
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import RowFilter
from cachecraft_rag.store.durable import Evicted
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.kv_layout import KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32")
Answer = tuple[int, Any]


@contextmanager
def serving(answers: dict[str, Answer | Callable[[Any], Answer]]) -> Iterator[str]:
    """A server with these answers by path: status, and a JSON value or a text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            found = answers.get(self.path, (404, {"detail": "Not Found"}))
            status, value = found(body) if callable(found) else found
            sent = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_unused: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answers_of(tokenizer: PreTrainedTokenizerFast, folder: Path, **changed: Any) -> dict[str, Any]:
    tokenizer.save_pretrained(folder)
    files = {path.name: path.read_text() for path in folder.iterdir()}
    facts: dict[str, Any] = {
        "protocol": PROTOCOL,
        "version": "0",
        "model": "tiny",
        "fingerprint": "f",
        "layout": asdict(LAYOUT),
        "context_length": 512,
        "end_tokens": [256],
        "namespace": "default",
        "system": "Be brief.",
        "session_header": "X-Session",
        "reuse": {"alpha": 0.5},
    }
    files["../outside"] = "x"
    return {
        "/v1/cachecraft": (200, facts | changed),
        "/v1/cachecraft/tokenizer": (200, {"files": files}),
    }


def event(**given: Any) -> str:
    return f"data: {json.dumps({'id': 'c-1', **given})}\n\n"


def tokens(*ids: int) -> str:
    return event(choices=[{"index": 0, "delta": {}, "token_ids": list(ids)}])


def test_no_server_and_others_than_ours(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    ours = answers_of(byte_tokenizer, tmp_path / "t")
    with pytest.raises(ServerError, match=r"does not answer .*cachecraft serve MODEL"):
        CacheCraft.connect("http://127.0.0.1:9", store=tmp_path)
    with pytest.raises(ConfigError, match=r"timeout: no such option\. Did you mean timeout_s"):
        CacheCraft.connect("http://127.0.0.1:9", store=tmp_path, timeout=3)
    with pytest.raises(ConfigError, match="write for example http"):
        HTTPEngine.connect("127.0.0.1:8000")
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"/v1/models": (200, {})}, "an ordinary vLLM", {}),
        ({"/v1/cachecraft": (200, "<html>")}, "an ordinary vLLM", {}),
        ({"/v1/cachecraft": (200, [])}, "an ordinary vLLM", {}),
        ({"/v1/cachecraft": (401, {"error": "no"})}, "asks for a key", {}),
        (
            {"/v1/cachecraft": (500, {"error": {"message": "it broke"}})},
            "answered 500: it broke",
            {},
        ),
        (
            {"/v1/cachecraft": (200, {"protocol": 99, "version": "9"})},
            "install the same version",
            {},
        ),
        (ours, "serves tiny, not large", {"model": "large"}),
        (
            ours | {"/v1/cachecraft/tokenizer": (200, {"files": {}})},
            "tokenizer that the server sent",
            {},
        ),
    ]
    for answers, message, options in cases:
        with serving(answers) as url, pytest.raises(ServerError, match=message):
            HTTPEngine.connect(url, **options)
    assert not (tmp_path / "outside").exists()


def test_an_answer_its_statistics_and_its_ends(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    bodies: list[Any] = []
    streams = {
        "fine": tokens()
        + tokens(40, 41)
        + ": keep-alive\n\n"
        + tokens(42, 256)
        + "data: [DONE]\n\n",
        "broken": tokens(40),
        "error": tokens(40) + event(error={"message": "the engine died"}),
    }

    def chat(body: Any) -> Answer:
        bodies.append(body)
        return 200, streams[body["messages"][-1]["content"]]

    segments = [
        {"outcome": "exact", "reason": "", "variant_id": "s"},
        {"outcome": "reused", "reason": "", "variant_id": "v", "recomputed": 2, "tier": "disk"},
        {"outcome": "computed", "reason": "question"},
    ]
    report = {
        "segments": segments,
        "row_layers": 40,
        "focus_layer": None,
        "planned_s": 0.0,
        "waited_s": 0.0,
    }
    answers = answers_of(byte_tokenizer, tmp_path / "t") | {
        "/v1/chat/completions": chat,
        "/v1/cachecraft/requests/c-1": (200, {"report": report | {"remote": None}}),
    }
    with serving(answers) as url, HTTPEngine.connect(url, model="tiny", system="Mine.") as engine:
        assert engine.decoder.layout == LAYOUT
        assert engine.config.alpha == 0.5
        stream = engine.stream("fine", [Chunk("vinegar")], session="ada")
        text = "".join(stream)
        stats = stream.stats
        assert (stats.finish, stats.tokens_generated, text) == (
            "end",
            3,
            byte_tokenizer.decode([40, 41, 42]),
        )
        (chunk,) = stats.chunks
        assert (chunk.outcome, chunk.recomputed, chunk.tier) == ("reused", 2, "disk")
        assert stats.tokens_reused == len(engine.prompts.system.token_ids) + chunk.tokens - 2
        assert bodies[0]["documents"] == [{"text": "vinegar", "id": Chunk("vinegar").chunk_id}]
        assert bodies[0]["messages"][0] == {"role": "system", "content": "Mine."}
        assert "cachecraft" not in bodies[0]
        stopped = engine.stream(
            "fine", [Chunk("vinegar")], sampling=SamplingParams(stop=(byte_tokenizer.decode([41]),))
        )
        assert ("".join(stopped), stopped.stats.finish) == (byte_tokenizer.decode([40]), "stop")
        assert stopped.stats.tokens_reused == stats.tokens_reused
        closed = engine.stream("fine", [Chunk("vinegar")])
        next(closed)
        closed.close()
        deadline = time.monotonic() + 60
        while not closed.stats.tokens_reused:  # its reader does not wait for the server
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert (closed.stats.finish, closed.stats.tokens_reused) == ("closed", stats.tokens_reused)
        edited = Chunk("vinegar, changed", known_id=Chunk("vinegar").chunk_id)
        answered = engine.stream("fine", [edited])
        list(answered)
        assert bodies[-1]["documents"] == [{"text": edited.text, "id": Chunk(edited.text).chunk_id}]
        assert [chunk.stale_id for chunk in answered.stats.chunks] == [Chunk("vinegar").chunk_id]
        with pytest.raises(ServerError, match="ended the answer halfway"):
            list(engine.stream("broken", []))
        with pytest.raises(ServerError, match="the engine died"):
            list(engine.stream("error", []))
        with pytest.raises(ContextLengthError):
            engine.stream("x" * 600, [])
        with pytest.raises(UnsupportedCallError, match="prime"):
            engine.capture(engine.prompts.build("x", []), [0], primed=True)
    evicted: list[Any] = []
    evicting = {
        **answers,
        "/v1/cachecraft/evict": lambda body: (
            200,
            evicted.append(body) or {"variants": 2, "nbytes": 9},
        ),
    }
    readmitted: list[Any] = []
    evicting["/v1/cachecraft/readmit"] = lambda body: (
        200,
        readmitted.append(body) or {"removed": ["c"]},
    )
    with serving(evicting) as url, HTTPEngine.connect(url) as engine:
        assert engine.store.evict(RowFilter(chunk_ids=())) == Evicted(0, 0)
        assert engine.store.remove_chunks(()) == Evicted(0, 0)
        assert engine.store.evict(RowFilter(chunk_ids=("a", "b"))) == Evicted(2, 9)
        with pytest.raises(UnsupportedCallError, match="by chunk ids"):
            engine.store.evict()
        assert engine.store.remove_chunks(("a",)) == Evicted(2, 9)
        assert engine.store.readmit_chunks(("a",)) == {"c"}
    assert evicted == [{"chunk_ids": ["a", "b"]}, {"chunk_ids": ["a"], "removed": True}]
    assert readmitted == [{"chunk_ids": ["a"]}]
    refusing = {**answers, "/v1/chat/completions": (400, {"error": {"message": "n: leave it out"}})}
    with serving(refusing) as url, HTTPEngine.connect(url) as engine:
        stream = engine.stream("x", [])
        with pytest.raises(ConfigError, match="leave it out"):
            list(stream)


@pytest.mark.parametrize(
    ("record", "code", "says"),
    [
        (
            {"report": None, "refused": "its question is a \x1b[31msingle token"},
            Reason.LEFT_TO_SERVER,
            "the server computed the request without chunk-caches: its question is a single token",
        ),
        ({"report": None, "refused": None}, Reason.NOT_REPORTED, Reason.NOT_REPORTED.sentence),
    ],
)
def test_a_request_that_the_server_computed_itself_says_why(
    tmp_path: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
    record: dict[str, Any],
    code: Reason,
    says: str,
) -> None:
    answers = answers_of(byte_tokenizer, tmp_path / "t") | {
        "/v1/chat/completions": (200, tokens(40, 256) + "data: [DONE]\n\n"),
        "/v1/cachecraft/requests/c-1": (200, record),
    }
    with serving(answers) as url, HTTPEngine.connect(url) as engine:
        answer = engine.stream("How?", [Chunk("vinegar")])
        list(answer)
        (chunk,) = answer.stats.chunks
    assert (chunk.outcome, chunk.reason_code, chunk.reason) == ("computed", code, says)
    assert chunk.computed == chunk.tokens > 0
    assert answer.stats.exact == (code is not Reason.NOT_REPORTED)


def test_a_large_document_is_primed_in_several_requests(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    sizes: list[int] = []

    def prime(body: Any) -> Answer:
        texts = [one["text"] for one in body["documents"]]
        assert len(texts) <= MOST_DOCUMENTS
        assert sum(map(len, texts)) <= MOST_PRIMED
        if body.get("estimate"):
            return 200, {"missing": {text[:5]: len(text) for text in texts}}
        sizes.append(len(texts))
        return 200, {"captured": len(texts)}

    answers = answers_of(byte_tokenizer, tmp_path / "t") | {"/v1/cachecraft/prime": prime}
    with serving(answers) as url, HTTPEngine.connect(url) as engine:
        primer = engine.primer()
        for length, count, expected in (
            (5, MOST_DOCUMENTS + 1, [1000, 1]),
            (MOST_PRIMED // 2, 3, [2, 1]),
            (5, 0, []),
        ):
            chunks = [Chunk(f"{i:05}".ljust(length)) for i in range(count)]
            captured: list[int] = []
            assert primer.prime(chunks, captured=captured.append) == count
            assert (sizes, captured) == (expected, expected)
            assert len(primer.missing(chunks)) == count
            sizes.clear()


def test_a_schema_is_kept_to_by_the_server_and_tools_are_refused(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    bodies: list[Any] = []

    def chat(body: Any) -> Answer:
        bodies.append(body)
        return 200, tokens(40, 256) + "data: [DONE]\n\n"

    answers = answers_of(byte_tokenizer, tmp_path / "t") | {"/v1/chat/completions": chat}
    tool = {"type": "function", "function": {"name": "add"}}
    with serving(answers) as url, HTTPEngine.connect(url) as engine:
        list(engine.stream("How?", [], sampling=SamplingParams(json_schema={"type": "integer"})))
        list(engine.stream("How?", []))
        with pytest.raises(UnsupportedCallError, match="sends no tools"):
            engine.stream("How?", [], tools=[tool])
        with pytest.raises(UnsupportedCallError, match="sends no tools"):
            engine.stream("", [], history=[("user", "How?"), ("calls", "[]"), ("result", "b")])
    assert bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "integer"}
    assert "response_format" not in bodies[1]


def test_a_server_learns_what_was_removed_and_what_was_added_again(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    answers = answers_of(byte_tokenizer, tmp_path / "tokenizer")
    removed: set[str] = set()
    asked: list[str] = []

    def evict(body: Any) -> tuple[int, Any]:
        asked.append("evict")
        assert body["removed"] is True
        removed.update(body["chunk_ids"])
        return 200, {"variants": 1, "nbytes": 9}

    def readmit(body: Any) -> tuple[int, Any]:
        asked.append("readmit")
        removed.difference_update(body["chunk_ids"])
        return 200, {"removed": sorted(removed)}

    routes = {"/v1/cachecraft/evict": evict, "/v1/cachecraft/readmit": readmit}
    kettle = Chunk("vinegar")
    with (
        serving({**answers, **routes}) as url,
        HTTPEngine.connect(url) as engine,
        FaissStore.open(tmp_path / "index", dim=2, embedder_fingerprint="two@1") as index,
    ):
        index.upsert("kettle", [kettle], [[1.0, 0.0]])
        evict_removed(index, engine.store)
        assert asked == []  # nothing was ever removed, so no admin key is needed
        index.delete_document("kettle")
        evict_removed(index, engine.store)
        assert removed == {kettle.chunk_id}
        index.upsert("kettle", [kettle], [[1.0, 0.0]])
        evict_removed(index, engine.store)
        assert removed == set()


def test_a_server_that_cannot_readmit_is_no_error_of_an_addition(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = answers_of(byte_tokenizer, tmp_path / "tokenizer")
    evicting = {**answers, "/v1/cachecraft/evict": (200, {"variants": 1, "nbytes": 9})}
    with (
        serving(evicting) as url,
        HTTPEngine.connect(url) as engine,
        FaissStore.open(tmp_path / "index", dim=2, embedder_fingerprint="two@1") as index,
    ):
        index.upsert("kettle", [Chunk("vinegar")], [[1.0, 0.0]])
        index.delete_document("kettle")
        assert evict_removed(index, engine.store) == (1, 9)
    assert "chunks that were removed and added again are not reused" in caplog.text
