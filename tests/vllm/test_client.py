"""What the client says of servers that are not there, are others, or end halfway; needs no vLLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cachecraft_rag.errors import ConfigError, ContextLengthError, ServerError, UnsupportedCallError
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.types import Chunk, KVLayout
from cachecraft_rag.vllm.client import HTTPEngine
from cachecraft_rag.vllm.served import PROTOCOL

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
            told = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

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
    return {"/v1/cachecraft": (200, facts | changed), "/v1/cachecraft/tokenizer": (200, {"files": files})}


def event(**given: Any) -> str:
    return f"data: {json.dumps({'id': 'c-1', **given})}\n\n"


def tokens(*ids: int) -> str:
    return event(choices=[{"index": 0, "delta": {}, "token_ids": list(ids)}])


def test_no_server_and_others_than_ours(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ours = answers_of(byte_tokenizer, tmp_path / "t")
    with pytest.raises(ServerError, match=r"does not answer .*cachecraft serve MODEL"):
        CacheCraft.connect("http://127.0.0.1:9", store=tmp_path)
    with pytest.raises(ConfigError, match="write for example http"):
        HTTPEngine.connect("127.0.0.1:8000", store=tmp_path)
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"/v1/models": (200, {})}, "an ordinary vLLM", {}),
        ({"/v1/cachecraft": (200, "<html>")}, "an ordinary vLLM", {}),
        ({"/v1/cachecraft": (200, [])}, "an ordinary vLLM", {}),
        ({"/v1/cachecraft": (401, {"error": "no"})}, "asks for a key", {}),
        ({"/v1/cachecraft": (500, {"error": {"message": "it broke"}})}, "answered 500: it broke", {}),
        ({"/v1/cachecraft": (200, {"protocol": 99, "version": "9"})}, "install the same version", {}),
        (ours, "serves tiny, not large", {"model": "large"}),
        (ours | {"/v1/cachecraft/tokenizer": (200, {"files": {}})}, "tokenizer that the server sent", {}),
    ]
    for answers, message, options in cases:
        with serving(answers) as url, pytest.raises(ServerError, match=message):
            HTTPEngine.connect(url, store=tmp_path, **options)
    assert not (tmp_path / "outside").exists()


def test_an_answer_its_statistics_and_its_ends(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    bodies: list[Any] = []
    streams = {
        "fine": tokens() + tokens(40, 41) + ": keep-alive\n\n" + tokens(42, 256) + "data: [DONE]\n\n",
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
    report = {"segments": segments, "row_layers": 40, "focus_layer": None, "planned_s": 0.0, "waited_s": 0.0}
    answers = answers_of(byte_tokenizer, tmp_path / "t") | {
        "/v1/chat/completions": chat,
        "/v1/cachecraft/requests/c-1": (200, {"report": report | {"remote": None}}),
    }
    with serving(answers) as url, HTTPEngine.connect(url, store=tmp_path, model="tiny", system="Mine.") as engine:
        assert engine.decoder.layout == LAYOUT
        assert engine.config.alpha == 0.5
        stream = engine.stream("fine", [Chunk("vinegar")], session="ada")
        text = "".join(stream)
        stats = stream.stats
        assert (stats.finish, stats.tokens_generated, text) == ("end", 3, byte_tokenizer.decode([40, 41, 42]))
        (chunk,) = stats.chunks
        assert (chunk.outcome, chunk.recomputed, chunk.tier) == ("reused", 2, "disk")
        assert stats.tokens_reused == len(engine.prompts.system.token_ids) + chunk.tokens - 2
        assert bodies[0]["documents"] == [{"text": "vinegar"}]
        assert bodies[0]["messages"][0] == {"role": "system", "content": "Mine."}
        assert "cachecraft" not in bodies[0]
        with pytest.raises(ServerError, match="ended the answer halfway"):
            list(engine.stream("broken", []))
        with pytest.raises(ServerError, match="the engine died"):
            list(engine.stream("error", []))
        with pytest.raises(ContextLengthError):
            engine.stream("x" * 600, [])
        with pytest.raises(UnsupportedCallError, match="prime"):
            engine.capture(engine.prompts.build("x", []), [0], primed=True)
    refusing = {**answers, "/v1/chat/completions": (400, {"error": {"message": "n: leave it out"}})}
    with serving(refusing) as url, HTTPEngine.connect(url, store=tmp_path) as engine:
        stream = engine.stream("x", [])
        with pytest.raises(ConfigError, match="leave it out"):
            list(stream)
