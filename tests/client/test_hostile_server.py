"""The client with servers that send nonsense: each reply is refused with a ServerError, in time and in bounds."""

from __future__ import annotations

import gzip
import json
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cachecraft_rag.client import chat_template, template_process
from cachecraft_rag.client import link as link_module
from cachecraft_rag.client.chat_template import ServedTokenizer
from cachecraft_rag.client.http import HTTPEngine
from cachecraft_rag.errors import CacheCraftError, ServerError
from cachecraft_rag.store import RowFilter
from cachecraft_rag.types.documents import Chunk
from tests.vllm.test_client import answers_of, event, serving, tokens

DONE = "data: [DONE]\n\n"
LAYOUT = {"layers": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
CHAT = "/v1/chat/completions"


def ask(engine: HTTPEngine) -> None:
    list(engine.stream("How?", [Chunk("vinegar")]))


def evict(engine: HTTPEngine) -> None:
    engine.store.evict(RowFilter(chunk_ids=("a",)))


def readmit(engine: HTTPEngine) -> None:
    engine.store.readmit_chunks(("a",))


def prime(engine: HTTPEngine) -> None:
    engine.primer().prime([Chunk("vinegar")])


def estimate(engine: HTTPEngine) -> None:
    engine.primer().missing([Chunk("vinegar")])


def disk(engine: HTTPEngine) -> None:
    engine.disk_space()


def held(engine: HTTPEngine) -> None:
    engine.held([Chunk("vinegar")])


FACTS: dict[str, Any] = {
    "a number for the model": {"model": 5},
    "no layout": {"layout": None},
    "no layers": {"layout": LAYOUT | {"layers": 0}},
    "layers as text": {"layout": LAYOUT | {"layers": "2"}},
    "an unknown part of the layout only": {"layout": {"x": 1}},
    "a negative context": {"context_length": -1},
    "a context that is true": {"context_length": True},
    "end tokens as a number": {"end_tokens": 7},
    "end tokens as texts": {"end_tokens": ["a"]},
    "no namespace": {"namespace": None},
    "an instruction that is a list": {"system": []},
    "a header that is two": {"session_header": "X\r\nEvil: 1"},
    "a header that is a number": {"session_header": 1},
    "unknown settings": {"reuse": {"no such": 1}},
    "settings out of range": {"reuse": {"method": {"alpha": -5}}},
    "settings as a list": {"reuse": [1]},
    "a fingerprint of half a character": {"fingerprint": "\ud800"},
}
TOKENIZERS: dict[str, Any] = {
    "a list": [],
    "files as a list": {"files": [1]},
    "a file that is a number": {"files": {"tokenizer.json": 5}},
    "a damaged file": {"files": {"tokenizer.json": "{", "tokenizer_config.json": "{}"}},
    "a file of the wrong kind": {"files": {"tokenizer.json": "[]", "tokenizer_config.json": "[]"}},
}
REPLIES: dict[str, tuple[Callable[[HTTPEngine], None], str, Any]] = {
    "an event that is no JSON": (ask, CHAT, "data: {\n\n" + DONE),
    "an event that is a list": (ask, CHAT, "data: []\n\n" + DONE),
    "an event of half a character": (ask, CHAT, 'data: {"id": "\\ud800"}\n\n' + DONE),
    "an event without end": (ask, CHAT, "data: " + "[" * 100_000),
    "choices as a number": (ask, CHAT, event(choices=5) + DONE),
    "a choice that is a text": (ask, CHAT, event(choices=["a"]) + DONE),
    "tokens as a text": (ask, CHAT, event(choices=[{"token_ids": "abc"}]) + DONE),
    "a negative token": (ask, CHAT, tokens(-1) + DONE),
    "a token too large for any tokenizer": (ask, CHAT, tokens(2**70) + DONE),
    "a token that is a fraction": (ask, CHAT, event(choices=[{"token_ids": [1.5]}]) + DONE),
    "a name that is a number": (ask, CHAT, f"data: {json.dumps({'id': 5})}\n\n" + DONE),
    "an error that is a text": (ask, CHAT, event(error="it broke") + DONE),
    "an error that is a number": (ask, CHAT, event(error=5) + DONE),
    "nothing at all": (ask, CHAT, ""),
    "captures as a text": (prime, "/v1/cachecraft/prime", {"captured": "many"}),
    "no captures": (prime, "/v1/cachecraft/prime", {}),
    "missing as a list": (estimate, "/v1/cachecraft/prime", {"missing": [1]}),
    "missing with a text": (estimate, "/v1/cachecraft/prime", {"missing": {"a": "b"}}),
    "no disk": (disk, "/v1/cachecraft/prime", {}),
    "a disk with texts": (disk, "/v1/cachecraft/prime", {"disk": {"used": "x"}}),
    "an eviction of nothing known": (evict, "/v1/cachecraft/evict", {"x": 1}),
    "an eviction that is a list": (evict, "/v1/cachecraft/evict", []),
    "no removed chunks": (readmit, "/v1/cachecraft/readmit", {"x": 1}),
    "removed chunks that are numbers": (readmit, "/v1/cachecraft/readmit", {"removed": [1]}),
    "no chunks": (held, "/v1/cachecraft/holds", {}),
    "fewer chunks than were asked for": (held, "/v1/cachecraft/holds", {"chunks": []}),
    "another chunk": (
        held,
        "/v1/cachecraft/holds",
        {"chunks": [{"chunk_id": "a", "tokens": 1, "in_memory": True}]},
    ),
    "no JSON": (evict, "/v1/cachecraft/evict", "{"),
    "a number that is none": (evict, "/v1/cachecraft/evict", '{"variants": NaN, "nbytes": 1}'),
    "a number of ten thousand digits": (
        evict,
        "/v1/cachecraft/evict",
        '{"variants": ' + "9" * 10_000 + "}",
    ),
    "nested lists": (evict, "/v1/cachecraft/evict", "[" * 200_000),
}
REPORTS: dict[str, Any] = {
    "a list": [],
    "segments as a number": {"report": {"segments": 5}},
    "a segment without an outcome": {"report": {"segments": [{}]}},
    "an unknown reason": {
        "report": {"segments": [{"outcome": "reused", "reason": "no such reason"}]}
    },
    "an unknown field": {"report": {"segments": [{"outcome": "reused", "reason": "", "x": 1}]}},
    "tokens as a text": {
        "report": {"segments": [{"outcome": "reused", "reason": "", "recomputed": "x"}]}
    },
    "a time as a text": {"report": {"planned_s": "now"}},
    "rows as a list": {"report": {"row_layers": []}},
    "a refusal that is a number": {"refused": 5},
    "a refusal of half a character": {"refused": "\ud800"},
}


@pytest.fixture(scope="module")
def answers(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return answers_of(byte_tokenizer, tmp_path_factory.mktemp("hostile") / "t")


@pytest.mark.parametrize("changed", FACTS.values(), ids=FACTS)
def test_malformed_facts_are_refused(answers: dict[str, Any], changed: dict[str, Any]) -> None:
    status, facts = answers["/v1/cachecraft"]
    sent = answers | {"/v1/cachecraft": (status, facts | changed)}
    with (
        serving(sent) as url,
        pytest.raises(ServerError, match="facts about itself that this version cannot read"),
    ):
        HTTPEngine.connect(url)


def test_facts_with_a_part_missing_are_refused(answers: dict[str, Any]) -> None:
    status, facts = answers["/v1/cachecraft"]
    for name in facts.keys() - {"protocol", "version"}:
        rest = {key: value for key, value in facts.items() if key != name}
        with (
            serving(answers | {"/v1/cachecraft": (status, rest)}) as url,
            pytest.raises(ServerError, match=name),
        ):
            HTTPEngine.connect(url)


@pytest.mark.parametrize("reply", TOKENIZERS.values(), ids=TOKENIZERS)
def test_malformed_tokenizers_are_refused(answers: dict[str, Any], reply: Any) -> None:
    sent = answers | {"/v1/cachecraft/tokenizer": (200, reply)}
    with serving(sent) as url, pytest.raises(ServerError, match="tokenizer"):
        HTTPEngine.connect(url)


@pytest.mark.parametrize(("call", "path", "reply"), REPLIES.values(), ids=REPLIES)
def test_malformed_replies_are_refused(
    answers: dict[str, Any], call: Callable[[HTTPEngine], None], path: str, reply: Any
) -> None:
    with (
        serving(answers | {path: (200, reply)}) as url,
        HTTPEngine.connect(url) as engine,
        pytest.raises(ServerError, match=re.escape(url)),
    ):
        call(engine)


@pytest.mark.parametrize("call", [ask, evict, prime, estimate, disk, held])
def test_a_closed_client_says_so(
    answers: dict[str, Any], call: Callable[[HTTPEngine], None]
) -> None:
    with serving(answers) as url:
        engine = HTTPEngine.connect(url)
        engine.close()
        engine.close()
        with pytest.raises(ServerError, match="was closed; connect again"):
            call(engine)


@pytest.mark.parametrize("reply", REPORTS.values(), ids=REPORTS)
def test_malformed_statistics_leave_the_answer_whole(answers: dict[str, Any], reply: Any) -> None:
    sent = answers | {
        CHAT: (200, tokens(40, 256) + DONE),
        "/v1/cachecraft/requests/c-1": (200, reply),
    }
    with serving(sent) as url, HTTPEngine.connect(url) as engine:
        answer = engine.stream("How?", [Chunk("vinegar")])
        assert "".join(answer)
        assert answer.stats.finish == "end"
        assert answer.stats.tokens_reused == 0


def test_codes_for_the_terminal_are_taken_out_of_messages(answers: dict[str, Any]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b31m\r" + "x" * 10_000
    for status in (200, 500):
        reply: Any = (
            event(error={"message": evil}) if status == 200 else {"error": {"message": evil}}
        )
        with (
            serving(answers | {CHAT: (status, reply)}) as url,
            HTTPEngine.connect(url) as engine,
            pytest.raises(ServerError) as caught,
        ):
            ask(engine)
        assert str(caught.value).isprintable()
        assert "red" in str(caught.value)
        assert len(str(caught.value)) < 600


def test_code_that_a_tokenizer_names_is_neither_run_nor_offered(
    answers: dict[str, Any], tmp_path: Path
) -> None:
    status, reply = answers["/v1/cachecraft/tokenizer"]
    files = dict(reply["files"])
    config = json.loads(files["tokenizer_config.json"])
    config["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    config["tokenizer_class"] = "Tokenizer"
    files["tokenizer_config.json"] = json.dumps(config)
    files["evil.py"] = f"open({str(tmp_path / 'ran')!r}, 'w')"
    sent = answers | {"/v1/cachecraft/tokenizer": (status, {"files": files})}
    with serving(sent) as url, suppress(ServerError):
        HTTPEngine.connect(url).close()
    assert not (tmp_path / "ran").exists()


ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
HUGE = (
    "{% set ns = namespace(x='xxxxxxxx') %}"
    "{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)


@pytest.mark.parametrize("template", [ENDLESS, HUGE], ids=["without end", "without bounds"])
def test_a_chat_template_that_takes_too_much_is_ended_and_not_tried_again(
    answers: dict[str, Any], template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, reply = answers["/v1/cachecraft/tokenizer"]
    renderings: list[object] = []
    run = subprocess.run

    def counted(*values: Any, **options: Any) -> Any:
        renderings.append(options)
        return run(*values, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    files = reply["files"] | {"chat_template.jinja": template}
    sent = answers | {"/v1/cachecraft/tokenizer": (status, {"files": files})}
    with serving(sent) as url, pytest.raises(ServerError, match="chat template"):
        HTTPEngine.connect(url)
    assert len(renderings) == 1


def test_a_chat_template_that_runs_out_of_memory_says_so() -> None:
    rendering = {"template": "{{ 'a' * 3000000000 }}", "variables": {}}
    with pytest.raises(ServerError, match="too much time or memory"):
        chat_template._render(json.dumps(rendering))


def test_templates_are_rendered_where_the_system_has_lower_limits() -> None:
    def lower_limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
        resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))

    done = subprocess.run(
        [sys.executable, "-P", template_process.__file__],
        input=json.dumps({"template": "{{ word }}", "variables": {"word": "yes"}}),
        capture_output=True,
        text=True,
        preexec_fn=lower_limits,
    )
    assert json.loads(done.stdout) == {"text": "yes"}, done.stderr


TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}"
    "{% endgeneration %}{% continue %}{% endif %}\n  {%- if loop.first %}first{% endif %} {{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m | tojson }}{% endfor %}"
    "{{ ns.n }}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages[0].content }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "add <é>"}}]])
def test_templates_are_rendered_as_transformers_does(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, template: str, tools: Any
) -> None:
    byte_tokenizer.save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.chat_template = template
    messages = [
        {"role": "user", "content": " <b>ä</b> "},
        {"role": "assistant", "content": " yes "},
        {"role": "user", "content": "And?"},
    ]
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, tools=tools
    )
    rendered = ServedTokenizer(tokenizer).apply_chat_template(
        messages, add_generation_prompt=True, tools=tools
    )
    assert rendered == expected


# -- time and size ----------------------------------------------------------------------------------------------------


@contextmanager
def raw_server(send: Callable[[BaseHTTPRequestHandler, threading.Event], None]) -> Iterator[str]:
    """A server whose replies to questions are written by `send`, which should end once its event is set."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # the client has gone
                send(self, ended)

        def log_message(self, *_unused: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def drip_headers(handler: BaseHTTPRequestHandler, ended: threading.Event) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not ended.wait(0.02):
        handler.wfile.write(b"x")
        handler.wfile.flush()


def drip_body(handler: BaseHTTPRequestHandler, ended: threading.Event) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not ended.wait(0.02):
        handler.wfile.write(b" ")
        handler.wfile.flush()


@pytest.mark.parametrize("send", [drip_headers, drip_body])
def test_a_reply_that_drips_is_ended(send: Callable[..., None]) -> None:
    with raw_server(send) as url, pytest.raises(ServerError, match="did not end in"):
        HTTPEngine.connect(url, total_timeout_s=0.3)


def test_a_reply_of_any_length_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(handler: BaseHTTPRequestHandler, ended: threading.Event) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not ended.is_set():
            handler.wfile.write(b" " * 65536)

    monkeypatch.setattr(link_module, "_MAX_REPLY", 4 << 20)
    with raw_server(send) as url, pytest.raises(ServerError, match="more than"):
        HTTPEngine.connect(url)


def test_a_compressed_reply_is_refused_unread() -> None:
    def send(handler: BaseHTTPRequestHandler, _: threading.Event) -> None:
        body = gzip.compress(b" " * (64 << 20))
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with raw_server(send) as url, pytest.raises(ServerError, match="compressed"):
        HTTPEngine.connect(url)


def test_a_status_that_is_none_and_a_reply_that_is_not_http() -> None:
    for sent in (b"HTTP/1.1 999 ?\r\n\r\n", b"SSH-2.0-x\r\n", b"\x00\xff" * 50, b""):

        def send(handler: BaseHTTPRequestHandler, _: threading.Event, sent: bytes = sent) -> None:
            handler.wfile.write(sent)

        with raw_server(send) as url, pytest.raises(CacheCraftError) as caught:
            HTTPEngine.connect(url)
        assert isinstance(caught.value, ServerError)
