"""The browser app: its pictures, its pages driven by Streamlit's own test runner, and once in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from cachecraft_rag import Answer, RequestStats
from cachecraft_rag.engine.stats import ChunkStats, Source
from cachecraft_rag.errors import IndexStoreError

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from streamlit.testing.v1 import AppTest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
APP = EXAMPLES / "streamlit_app.py"
KETTLE = (
    "# Kettle Wren K2\n\n## Size\n\nThe Wren K2 holds 1.7 litres and boils them in 4 minutes. {filler}\n\n"
    "## Limescale\n\nDescale the Wren K2 every 8 weeks with 20 grams of citric acid. {filler}\n\n"
    "## Warranty\n\nThe kettle has a warranty of 3 years. Limescale is not covered. {filler}\n"
).format(filler="Keep the base dry, wipe the kettle with a soft cloth and let it cool before you put it away. " * 5)
QUESTIONS = ("How much water does the Wren K2 hold?", "How often should I descale the Wren K2?")


@pytest.fixture(scope="module", autouse=True)
def beside_the_app() -> Iterator[None]:
    """The app's folder on the import path, where `streamlit run` puts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield


# -- pictures ---------------------------------------------------------------------------------------------------------


def chunk(number: int, outcome: Any, tokens: int, **facts: Any) -> ChunkStats:
    if outcome == "computed":
        facts = {"computed": tokens, **facts}
    return ChunkStats(f"chunk{number}", outcome, tokens=tokens, **facts)


def answered(*chunks: ChunkStats, system: int = 30, question: int = 20, system_reused: bool = True) -> Answer:
    """An answer with these chunks, whose sources are ranked by their numbers."""
    laid_out = [one for one in chunks if one.outcome != "trimmed"]
    recomputed = sum(one.recomputed for one in laid_out)
    computed = question + sum(one.computed for one in laid_out)
    computed += 0 if system_reused else system
    prompt = system + question + sum(one.tokens for one in laid_out)
    stats = RequestStats(
        ttft_s=0.25,
        plan_s=0.01,
        load_s=0.02,
        prefill_s=0.22,
        total_s=1.0,
        tokens_prompt=prompt,
        tokens_reused=prompt - computed - recomputed,
        tokens_recomputed=recomputed,
        tokens_computed=computed,
        tokens_generated=9,
        recompute_share=0.3,
        focus_layer=None,
        finish="end",
        chunks=chunks,
    )
    sources = tuple(
        Source(one.chunk_id, f"text of {one.chunk_id}", 0.5, {"heading": f"Part {one.chunk_id}", "source": "a.md"})
        for one in sorted(chunks, key=lambda one: one.chunk_id)
    )
    return Answer("It is so.", sources, stats)


MIXED = answered(
    chunk(3, "computed", 100, reason="no chunk-cache stored"),
    chunk(2, "reused", 200, recomputed=40, cfo=0.2, beta_prime=0.81, variant_id="ab" * 16, tier="disk"),
    chunk(1, "exact", 150, cfo=0.0, beta_prime=1.0, variant_id="cd" * 16, tier="host"),
    chunk(4, "trimmed", 0, reason="the prompt was full"),
)


MARKED = (
    "[a](http://far.away) **b** <img src=x> `c` $d$ :red[e] ![f](g) # h_i_ "
    "http://far.away www.far.away\nj\x1b &amp; a@b.cd"
)


def test_names_and_messages_are_shown_as_text() -> None:
    from markdown_it import MarkdownIt
    from streamlit_picture import plain

    (block,) = [token for token in MarkdownIt("gfm-like", {"linkify": False}).parse(plain(MARKED)) if token.children]
    assert block.children is not None
    assert {child.type for child in block.children} <= {"text", "text_special"}
    assert "".join(child.content for child in block.children) == MARKED.replace("\n", " ").replace("\x1b", "")
    for mark in ("http:", "a@b", ":red[", "www."):  # what Streamlit's own extensions would find
        assert mark not in plain(MARKED)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("a\0b.md", "a_b.md"),
        ("../../x\n\x1b[2J.md", "x__[2J.md"),
        ("c:\\docs\\y.md", "y.md"),
        (".hidden", "hidden"),
        ("", "unnamed"),
        ("\udc80.md", "_.md"),
    ],
)
def test_an_upload_may_have_any_name(given: str, stored: str, tmp_path: Path) -> None:
    from streamlit_sidebar import file_name

    assert file_name(given) == stored
    (tmp_path / file_name(given)).write_bytes(b"x")


def test_the_bar_has_a_part_for_each_segment_as_wide_as_its_tokens() -> None:
    from streamlit_picture import parts

    row = parts(MIXED, 30)
    assert [(part.label, part.runs) for part in row] == [
        ("S", (("kept", 30),)),
        ("3", (("computed", 100),)),
        ("2", (("disk", 160), ("recomputed", 40))),
        ("1", (("host", 150),)),
        ("Q", (("computed", 20),)),
    ]
    assert sum(part.tokens for part in row) == MIXED.stats.tokens_prompt
    facts = [dict(part.facts) for part in row]
    assert facts[1]["why"] == "no chunk-cache stored"
    assert facts[2] == {
        "what": "reused, partly recomputed",
        "tokens": "200",
        "recomputed": "40 tokens",
        "loaded from": "disk",
        "variant": "abababababab",
        "CFO": "0.20",
        "β′": "0.81",
    }


@pytest.mark.parametrize("tier", ["device", "host", "disk", "remote"])
def test_each_tier_has_a_colour_of_its_own_in_both_themes(tier: str) -> None:
    from streamlit_picture import KINDS, parts

    row = parts(answered(chunk(1, "exact", 10, tier=tier, variant_id="ab" * 16)), 30)
    assert row[1].runs == ((tier, 10),)
    style = (EXAMPLES / "streamlit_style.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--cc-(\w+): (light-dark\([^)]+\))", style))
    assert len({colours[kind] for kind in KINDS}) == len(KINDS)
    assert all(re.search(rf"\.cc-{kind} \{{\s*background", style) for kind in KINDS)


def test_a_system_segment_without_a_chunk_cache_is_computed() -> None:
    from streamlit_picture import parts

    assert parts(answered(chunk(1, "computed", 10), system_reused=False), 30)[0].runs == (("computed", 30),)
    assert parts(answered(chunk(1, "computed", 10), system_reused=True), 30)[0].runs == (("kept", 30),)


def test_a_chunk_may_be_computed_in_front_and_loaded_behind() -> None:
    from streamlit_picture import parts

    both = chunk(1, "reused", 100, computed=64, recomputed=6, tier="disk", variant_id="ab" * 16)
    row = parts(answered(both), 30)
    assert row[1].runs == (("computed", 64), ("disk", 30), ("recomputed", 6))
    assert dict(row[1].facts)["computed"] == "64 tokens, faster than loading"
    assert row[0].runs == (("kept", 30),)


class Elements(HTMLParser):
    """Names and attributes of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_widths_legend_and_what_was_left_out_are_in_the_bar() -> None:
    from streamlit_picture import prompt_bar

    bar = prompt_bar(MIXED, 30)
    elements = Elements()
    elements.feed(bar)
    widths = [attrs["style"] for _, attrs in elements.found if attrs.get("class") == "cc-part"]
    assert widths == [f"flex:{tokens} 1 0" for tokens in (30, 100, 200, 150, 20)]
    assert "computed <em>120</em>" in bar
    assert "reused from disk <em>160</em>" in bar
    assert "remote" not in bar
    assert "1 chunks left out" in bar


def test_a_document_cannot_put_elements_into_the_page() -> None:
    from streamlit_picture import prompt_bar, sources

    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    metadata = {"heading": evil, "source": evil}
    hostile = replace(MIXED, sources=tuple(replace(one, text=evil, metadata=metadata) for one in MIXED.sources))
    elements = Elements()
    elements.feed(prompt_bar(hostile, 30) + sources(hostile))
    assert not {"script", "img"} & {tag for tag, _ in elements.found}
    assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)


def test_answers_are_shown_without_formulas_and_pictures() -> None:
    from streamlit_picture import markdown_safe

    assert markdown_safe("$5 to $9 ![x](http://far.away/y)") == "\\$5 to \\$9 !\\[x](http://far.away/y)"


def test_the_chart_has_both_times_where_both_are_known() -> None:
    from streamlit_picture import Turn, ttft_chart

    turns = [Turn("One?", MIXED, {}, full_ttft_s=1.0), Turn("Two?", MIXED, {})]
    drawn = ttft_chart(turns).to_dict()
    (data,) = drawn["datasets"].values()
    rows = [(row["question"], row["how"], row["seconds"], row["speedup"]) for row in data]
    assert rows == [
        (1, "without reuse", 1.0, ""),
        (1, "with reuse", 0.25, "4.0×"),
        (2, "with reuse", 0.25, ""),
    ]


# -- the app, driven by Streamlit's test runner -----------------------------------------------------------------------

Open = Callable[[], "AppTest"]


@pytest.fixture
def open_app(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the page anew, as another visitor would; all share one engine over one store, empty at first."""
    import streamlit as st
    from streamlit.testing.v1 import AppTest

    monkeypatch.setenv("CACHECRAFT_STORE", str(tmp_path / "app"))
    monkeypatch.delenv("CACHECRAFT_MODEL", raising=False)
    yield lambda: AppTest.from_file(str(APP), default_timeout=300).run()
    st.cache_resource.clear()  # closes the engine


def upload(app: AppTest, *files: tuple[str, bytes]) -> None:
    app.file_uploader[0].set_value([(name, data, "application/octet-stream") for name, data in files]).run()


def ask(app: AppTest, question: str) -> None:
    app.chat_input(key="question").set_value(question).run()
    assert not app.exception


def pictures(app: AppTest) -> list[str]:
    return [element.value for element in app.html if 'class="cc-prompt"' in element.value]


def last_stats(app: AppTest) -> RequestStats:
    return app.session_state.turns[-1].answer.stats


@pytest.mark.slow
def test_from_an_empty_page_to_reused_tokens(open_app: Open) -> None:
    app = open_app()
    assert not app.exception
    assert any("cc-steps" in element.value for element in app.html)

    ask(app, QUESTIONS[0])
    assert [note.value for note in app.info] == [
        "There is nothing to ask about yet. Add a document on the left, or the sample handbook."
    ]
    assert app.button(key="sample").label == "Add the sample handbook"  # which the note speaks of
    assert not app.session_state.turns

    upload(app, ("../../kettle.md", KETTLE.encode()), ("broken.pdf", b"%PDF-1.4 nothing"), ("notes.zip", b"PK\x03\x04"))
    assert not app.exception
    assert [note.value for note in app.success] == ["Ready: kettle.md"]
    told = " ".join(note.value for note in app.warning)
    assert "**broken.pdf** was not added: is damaged or locked" in told
    assert "**notes.zip** was not added: not a kind of file that can be indexed; convert it to one of .txt" in told
    uploads = Path(os.environ["CACHECRAFT_STORE"]) / "uploads"
    assert [path.name for path in uploads.iterdir()] == ["kettle.md"]

    ask(app, QUESTIONS[0])
    first = last_stats(app)
    assert first.tokens_reused == 0
    assert "1.7 litres" in " ".join(note.value for note in app.markdown)
    assert app.session_state.turns[0].full_ttft_s > 0
    ask(app, QUESTIONS[1])
    second = last_stats(app)
    assert second.tokens_reused > second.tokens_prompt / 2
    assert len(pictures(app)) == 2
    assert "cc-host" in pictures(app)[0]  # the newest stands first
    assert "cc-host" not in pictures(app)[1]
    assert [found.count('class="cc-source"') for found in pictures(app)] == [
        len(turn.answer.sources) for turn in app.session_state.turns
    ][::-1]
    assert 'class="cc-all" open' in pictures(app)[0]
    assert app.metric[0].label == "First token"
    assert any("Hit rate" in element.value for element in app.html)

    app.button(key="contents").click().run()
    assert not app.exception
    stored = app.dataframe[0].value
    assert "Instruction" in set(stored["chunk"])
    assert "Limescale" in " ".join(stored["chunk"])
    app.button(key="restart-2").click().run()
    assert not app.session_state.turns
    assert not pictures(app)


@pytest.mark.slow
def test_an_upload_that_cannot_be_read_spoils_no_later_one(open_app: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from cachecraft_rag import CacheCraft

    app = open_app()
    uploads = Path(os.environ["CACHECRAFT_STORE"]) / "uploads"
    upload(app, ("deep.html", b"<div>" * 100_000 + b"</b>" * 100_000), ("odd.html", b'<meta charset="punycode"><p>Hi'))
    assert any("deep.html" in warning.value and "nested" in warning.value for warning in app.warning)
    assert [path.name for path in uploads.iterdir()] == ["odd.html"]

    def fail(*_: object, **__: object) -> None:
        raise IndexStoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(CacheCraft, "add_documents", fail)
        upload(app, ("kettle.md", KETTLE.encode()))
        assert any("the disk is full" in error.value for error in app.error)
    assert [path.name for path in uploads.iterdir()] == ["odd.html"]
    app = open_app()
    upload(app, ("kettle.md", KETTLE.encode()))
    assert any("kettle.md" in success.value for success in app.success)


def test_switches_do_what_they_say(open_app: Open) -> None:
    app = open_app()
    upload(app, ("kettle.md", KETTLE.encode()))
    app.toggle(key="compare").set_value(False)
    app.slider(key="length").set_value(16)
    ask(app, QUESTIONS[0])
    assert app.session_state.turns[0].full_ttft_s is None
    app.button(key="full-1").click().run()
    assert app.session_state.turns[0].full_ttft_s > 0
    assert last_stats(app).tokens_generated <= 16

    app.toggle(key="reuse").set_value(False)
    ask(app, QUESTIONS[1])
    assert last_stats(app).tokens_computed == last_stats(app).tokens_prompt

    app.toggle(key="reuse").set_value(True).run()
    app.segmented_control(key="recompute").set_value("Fixed share").run()
    app.slider(key="ratio").set_value(40)
    app.slider(key="top_k").set_value(2)
    app.toggle(key="remember").set_value(True)
    app.selectbox(key="focus").set_value("gap")
    ask(app, "What does the warranty of the kettle not cover?")
    stats = last_stats(app)
    assert len(app.session_state.turns[-1].answer.sources) == 2
    moved = [one for one in stats.chunks if one.outcome == "reused"]
    assert moved
    fixed, tokens = sum(one.recomputed for one in moved), sum(one.tokens for one in moved)
    assert fixed == pytest.approx(0.4 * tokens, abs=len(moved))  # one budget for all of them
    arguments = app.session_state.turns[-1].arguments
    assert [role for role, _ in arguments["history"]] == ["user", "assistant"] * 2


@pytest.mark.slow
def test_visitors_share_chunk_caches_but_no_conversation(open_app: Open) -> None:
    one, other = open_app(), open_app()
    upload(one, ("kettle.md", KETTLE.encode()))
    for app in (one, other):
        app.toggle(key="compare").set_value(False)
    ask(one, QUESTIONS[0])
    other.run()
    ask(other, QUESTIONS[1])
    assert last_stats(other).tokens_reused > 0
    assert [turn.question for turn in one.session_state.turns] == [QUESTIONS[0]]
    assert [turn.question for turn in other.session_state.turns] == [QUESTIONS[1]]
    assert one.session_state.session != other.session_state.session
    assert other.session_state.turns[0].arguments["session"] == other.session_state.session


@pytest.mark.slow
def test_what_cannot_be_answered_is_said_in_a_sentence(open_app: Open) -> None:
    app = open_app()
    upload(app, ("kettle.md", KETTLE.encode()))
    ask(app, "why " * 9000)
    (note,) = app.warning
    assert note.value.startswith("This question could not be answered: question and history need")
    assert "Shorten the question" in note.value
    assert not app.session_state.turns
    ask(app, "   ")
    assert not app.warning

    ask(app, QUESTIONS[0])  # and then it goes on as if nothing had been
    assert len(app.session_state.turns) == 1
    name = next(name for name in app.multiselect(key="picked").options if name.endswith("kettle.md"))
    app.multiselect(key=f"remove-{app.session_state.uploaded}").set_value([name]).run()
    app.button(key="remove").click().run()
    assert not app.exception
    ask(app, QUESTIONS[0])
    assert [note.value for note in app.info]


@pytest.mark.slow
def test_a_model_that_is_not_there_is_an_error_message(open_app: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHECRAFT_MODEL", "/nowhere/at-all")
    app = open_app()
    assert not app.exception
    (note,) = app.error
    assert note.value.startswith("This did not work: ")


def test_a_page_s_address_brings_its_conversation_back_and_a_made_up_one_brings_none(open_app: Open) -> None:
    from streamlit.testing.v1 import AppTest

    app = open_app()
    upload(app, ("kettle.md", KETTLE.encode()))
    app.toggle(key="compare").set_value(False)
    ask(app, QUESTIONS[0])
    key = app.query_params["c"]
    again = AppTest.from_file(str(APP), default_timeout=300)
    again.query_params["c"] = key
    again.run()
    assert [turn.question for turn in again.session_state.turns] == [QUESTIONS[0]]
    assert len(pictures(again)) == 1
    again.toggle(key="compare").set_value(False)
    ask(again, QUESTIONS[1])
    app.run()
    assert len(app.session_state.turns) == 2

    stranger = AppTest.from_file(str(APP), default_timeout=300)
    stranger.query_params["c"] = "0" * 32
    stranger.run()
    assert not stranger.session_state.turns
    assert stranger.query_params["c"] not in (["0" * 32], "0" * 32, key)


def test_conversations_belong_to_their_owner_and_the_longest_unused_goes_first() -> None:
    from streamlit_conversations import Conversations

    kept = Conversations(most=2)
    ada = kept.new("ada")
    assert kept.find(ada, "bob") is None
    assert kept.find(ada, "ada") == []
    first = kept.new()
    assert kept.find(ada, "ada") == []  # used again: now `first` is the longest unused
    kept.new()
    assert kept.find(first) is None
    assert kept.find(ada, "ada") == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1. 29 days", None),
        ("1. 29 days\n2. 30 days", "1. 29 days"),
        ("It holds 1.7 litres. And then", "It holds 1.7 litres."),
        ("You have 30. And", "You have 30."),
        ("Ask Dr. Moll at approx. 9 a.m. or later! Then", "Ask Dr. Moll at approx. 9 a.m. or later!"),
        ("- Rinse it.\n- Dry it.", "- Rinse it."),
        ("Do this:\n\n1. Rinse it. 2. Dry it.", "Do this:\n\n1. Rinse it."),
        ("It is called \u201cWren.\u201d It is", "It is called \u201cWren.\u201d"),
        ("It is one.", None),  # more may follow without a space: 1.7
    ],
)
def test_the_first_sentence_is_whole(text: str, sentence: str | None) -> None:
    from streamlit_conversations import first_sentence

    assert first_sentence(text) == sentence


def test_the_handbook_can_be_added_and_removed_with_its_chunk_caches(open_app: Open) -> None:
    app = open_app()
    app.button(key="sample").click().run()
    assert not app.exception
    upload(app, ("kettle.md", KETTLE.encode()))
    app.toggle(key="compare").set_value(False)
    ask(app, "How long does the battery of the Heron V5 last?")
    assert any(
        source.metadata["source"].startswith("handbook/") for source in app.session_state.turns[0].answer.sources
    )
    choices = app.multiselect(key=f"remove-{app.session_state.uploaded}")
    assert choices.options == ["the sample handbook", "uploads/kettle.md"]
    choices.set_value(["the sample handbook"]).run()
    app.button(key="remove").click().run()
    assert not app.exception
    assert [note.value for note in app.success] == ["Removed: 21 documents"]
    assert app.multiselect(key="picked").options == ["uploads/kettle.md"]
    while app.button(key="contents").disabled:  # until what the answer computed is stored
        app.run()
    app.button(key="contents").click().run()
    assert set(app.dataframe[0].value["chunk"]) <= {"Instruction", "Size", "Limescale", "Warranty", "Kettle Wren K2"}
    assert app.button(key="sample").label == "Add the sample handbook"  # and it can come back


def test_documents_are_fixed_where_the_server_says_so(open_app: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    app = open_app()
    upload(app, ("kettle.md", KETTLE.encode()))
    monkeypatch.setenv("CACHECRAFT_READ_ONLY", "1")
    app.run()
    assert not app.exception
    assert not app.file_uploader
    assert not [button for button in app.button if button.key in ("remove", "sample")]
    assert app.multiselect(key="picked").options


@pytest.mark.slow
def test_metrics_are_served_where_the_server_says_so(open_app: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("CACHECRAFT_METRICS_PORT", "a number")
    assert "it must be the number of a port" in open_app().error[0].value
    monkeypatch.setenv("CACHECRAFT_METRICS_PORT", str(port))
    assert not open_app().error
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert 'cachecraft_requests_total{outcome="length"} 1.0' in answer.read().decode()  # that which warms up


def test_with_a_log_in_configured_nobody_gets_further_without_it(open_app: Open) -> None:
    from streamlit.testing.v1 import AppTest

    app = AppTest.from_file(str(APP), default_timeout=300)
    app.secrets["auth"] = {"client_id": "x"}
    app.user = {"is_logged_in": False}
    app.run()
    assert not app.exception
    assert [button.label for button in app.button] == ["Log in"]
    assert not app.chat_input
    app.user = {"is_logged_in": True, "sub": "ada"}
    app.run()
    assert not app.exception
    assert app.chat_input


def test_the_app_s_own_settings_keep_it_on_this_machine_and_silent() -> None:
    settings = tomllib.loads((EXAMPLES / ".streamlit" / "config.toml").read_text(encoding="utf-8"))
    assert settings["server"]["address"] == "127.0.0.1"
    assert settings["browser"]["gatherUsageStats"] is False


# -- a real browser ---------------------------------------------------------------------------------------------------

CHROME_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


# In every Python process of the server: a line for each attempt to reach another machine.
WATCH = """
import os, sys
def hook(event, args):
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in (None, "", "localhost", "127.0.0.1", "::1"):
        with open(os.environ["OUTSIDE_LOG"], "a") as log:
            log.write(f"{event} {host}\\n")
sys.addaudithook(hook)
"""


@pytest.fixture
def page(demo_model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of the app, served by a headless `streamlit run` from an empty folder, with no other setting.

    At the end the server has listened on this machine alone and has tried to reach no other one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--server.headless=true", f"--server.port={port}"]
    log, outside = tmp_path / "server.log", tmp_path / "outside.log"
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(WATCH)
    with log.open("wb") as written:
        server = subprocess.Popen(
            [sys.executable, "-m", "streamlit", "run", str(APP), *flags],
            cwd=tmp_path,
            env={
                **os.environ,
                "CACHECRAFT_STORE": str(tmp_path / "store"),
                "CACHECRAFT_MODEL": "demo",
                "PYTHONPATH": str(tmp_path / "watch"),
                "OUTSIDE_LOG": str(outside),
            },
            stdout=written,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(lambda: is_healthy(port) or server.poll() is not None)
            assert server.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}"
            assert listening_on(port) in ({"127.0.0.1"}, None)
        finally:
            server.terminate()
            server.wait(timeout=200)
    assert "Traceback" not in log.read_text()
    assert "External URL" not in log.read_text()
    assert not outside.exists(), outside.read_text()


def listening_on(port: int) -> set[str] | None:
    """The addresses with a listener at this port, as `ss -ltn` shows them; None without Linux's table."""
    found = set()
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        if not os.path.exists(table):
            return None
        for line in Path(table).read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if int(number, 16) == port and line.split()[3] == "0A":  # LISTEN
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


def test_the_table_of_listening_sockets_is_read_rightly() -> None:
    for address, family in (("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET)):
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen()
            assert listening_on(listener.getsockname()[1]) in ({address}, None)


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def chrome(tmp_path: Path) -> Iterator[Chrome]:
    """A headless Chromium that records its console."""
    from selenium import webdriver

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        message = "needs Chromium and its driver: apt-get install chromium chromium-driver"
        if os.environ.get("TESTS_REQUIRE_SERVERS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*CHROME_FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


def wait_for(holds: Callable[[], Any], timeout_s: float = 400.0) -> Any:
    """What `holds` returns once it is true; Streamlit replaces and moves elements while it looks."""
    from selenium.common import exceptions

    passing = (
        exceptions.ElementClickInterceptedException,
        exceptions.ElementNotInteractableException,
        exceptions.NoSuchElementException,
        exceptions.StaleElementReferenceException,
    )
    until = time.monotonic() + timeout_s
    while True:
        try:
            if found := holds():
                return found
        except passing:
            pass
        assert time.monotonic() < until, "the page did not come to that in time"
        time.sleep(0.1)


@pytest.mark.slow
def test_upload_and_ask_twice_in_a_browser(chrome: Chrome, page: str, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def all_of(selector: str) -> list[Any]:
        return chrome.find_elements(By.CSS_SELECTOR, selector)

    def ask_here(question: str, count: int) -> None:
        field = wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, '[data-testid="stChatInputTextArea"]'))
        field.send_keys(question, Keys.ENTER)
        # The chip with the time without reuse comes last, when the page has settled.
        wait_for(lambda: len([line for line in all_of(".cc-line") if "without reuse" in line.text]) == count)

    chrome.get(page)
    document = tmp_path / "kettle.md"
    document.write_text(KETTLE, encoding="utf-8")
    wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, 'input[type="file"]')).send_keys(str(document))
    wait_for(lambda: "Ready: kettle.md" in chrome.find_element(By.TAG_NAME, "body").text)

    ask_here(QUESTIONS[0], 1)
    ask_here(QUESTIONS[1], 2)
    bars = wait_for(lambda: len(found := all_of(".cc-prompt .cc-bar")) == 2 and found)
    bars.reverse()  # the newest stands first
    assert [len(bar.find_elements(By.CSS_SELECTOR, ".cc-host")) > 0 for bar in bars] == [False, True]
    segments = bars[1].find_elements(By.CSS_SELECTOR, ".cc-part")
    widths = [segment.size["width"] for segment in segments]
    assert min(widths) > 0
    assert sum(widths) == pytest.approx(bars[1].size["width"], rel=0.05)
    ActionChains(chrome).move_to_element(segments[1]).perform()
    tip = segments[1].find_element(By.CSS_SELECTOR, ".cc-tip")
    wait_for(tip.is_displayed)
    assert {"variant", "CFO", "β′", "host memory"} <= set(re.split(r"\n", tip.text))

    assert all(re.search(r"[\d.]+ m?s to first token", line.text) for line in all_of(".cc-line"))
    assert len(all_of('[data-testid="stVegaLiteChart"] svg [aria-roledescription="bar"]')) == 4  # two for each question

    for selector in ('[data-testid="stExpander"] summary', ".st-key-brief label"):
        wait_for(lambda selector=selector: chrome.find_element(By.CSS_SELECTOR, selector).click() or True)
    field = wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, '[data-testid="stChatInputTextArea"]'))
    field.send_keys("Tell me everything about the Wren K2", Keys.ENTER)
    wait_for(lambda: "▌" in chrome.find_element(By.TAG_NAME, "body").text)
    field.send_keys("How long is its warranty?", Keys.ENTER)  # before that answer has ended
    wait_for(lambda: len(all_of(".cc-line")) == 4)
    assert "stopped" in all_of(".cc-line")[1].text

    errors = [entry for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]
    assert not errors
    assert hosts_asked(chrome) == {"127.0.0.1"}


@pytest.mark.slow
def test_the_list_of_what_to_remove_closes_in_a_browser(chrome: Chrome, page: str, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def one(selector: str) -> Any:
        return wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, selector))

    chrome.get(page)
    (tmp_path / "kettle.md").write_text(KETTLE, encoding="utf-8")
    one('input[type="file"]').send_keys(str(tmp_path / "kettle.md"))
    wait_for(lambda: "Ready: kettle.md" in one("body").text)
    wait_for(lambda: one('[data-testid="stPopover"] button').click() or True)
    field = one('[data-testid="stPopoverBody"] input')
    field.send_keys("kettle", Keys.ENTER)
    wait_for(lambda: one(".st-key-remove button").is_enabled())
    chrome.execute_script("arguments[0].click()", one(".st-key-remove button"))  # the list of choices lies over it
    wait_for(lambda: "Removed: 1 document" in one("body").text)
    assert wait_for(lambda: not chrome.find_elements(By.CSS_SELECTOR, '[data-testid="stPopoverBody"]'))


def hosts_asked(chrome: Chrome) -> set[str]:
    """The hosts that the page has made requests to."""
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    urls = [message["params"].get("request", {}).get("url", "") for message in messages]
    urls += [
        message["params"].get("url", "") for message in messages if message["method"] == "Network.webSocketCreated"
    ]
    return {str(urlsplit(url).hostname) for url in urls if url.startswith(("http", "ws"))}


SIZES = {"desktop": (1440, 900), "laptop": (1280, 720), "phone": (390, 844)}
# Where the newest question and the answer below it are, in pixels from the top of the window; `covered` is what lies
# above the question at its place.
WHERE = """
const asked = document.querySelector('.cc-asked');
const all = [...document.querySelectorAll('.cc-asked, [data-testid="stMarkdown"]')];
const said = all[all.indexOf(asked) + 1].getBoundingClientRect(), box = asked.getBoundingClientRect();
const hit = document.elementFromPoint(box.left + 4, (box.top + box.bottom) / 2);
return {question: asked.innerText, top: box.top, left: box.left, right: box.right, answer: said.top,
        bottom: said.bottom, height: innerHeight, width: innerWidth, covered: !asked.contains(hit)};
"""
# Whether the upper and the lower end of an element can be seen.
UNCOVERED = """
const box = arguments[0].getBoundingClientRect();
return [[box.left + 2, box.top + 2], [box.left + 2, box.bottom - 2]].every(
  ([x, y]) => arguments[0].contains(document.elementFromPoint(x, y)));
"""


@pytest.mark.slow
def test_the_newest_question_and_answer_are_in_view_on_every_screen(chrome: Chrome, page: str, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def all_of(selector: str) -> list[Any]:
        return chrome.find_elements(By.CSS_SELECTOR, selector)

    def settled(count: int) -> None:
        wait_for(lambda: len([line for line in all_of(".cc-line") if "without reuse" in line.text]) == count)

    def in_view(question: str, name: str) -> None:
        wait_for(lambda: all_of(".cc-asked") and question in all_of(".cc-asked")[0].text)
        found = chrome.execute_script(WHERE)
        chrome.save_screenshot(str(tmp_path / f"{name}.png"))
        assert question in found["question"]
        assert found["top"] >= 0, (name, found)
        assert found["top"] < found["answer"] < found["bottom"] <= found["height"], (name, found)
        assert found["left"] >= 0
        assert found["right"] <= found["width"], (name, found)
        assert not found["covered"], (name, found)

    address = ""
    for place, (name, (width, height)) in enumerate(SIZES.items()):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        chrome.get(page)
        title = wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, ".cc-title h1"))
        wait_for(lambda: all_of('[data-testid="stChatInputTextArea"]'))
        assert chrome.execute_script(UNCOVERED, title), name
        assert title.rect["y"] + title.rect["height"] < height / 2
        chrome.save_screenshot(str(tmp_path / f"{name}-landing.png"))
        if place == 0:
            wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, ".st-key-sample button").click() or True)
            wait_for(lambda: all_of(".st-key-try-0 button"))
            field = wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, '[data-testid="stChatInputTextArea"]'))
            question = "How long does the battery of the Heron V5 last?"
            field.send_keys(question, Keys.ENTER)
        else:
            chrome.get(address)  # a reload keeps the conversation
            wait_for(lambda place=place: len(all_of(".cc-line")) == place)
            in_view(question, f"{name}-reloaded")
            # The suggestions stand below the answer: whoever clicks one has scrolled down.
            offered = wait_for(lambda place=place: all_of(f".st-key-try-{place} button"))[0]
            question = offered.text
            chrome.execute_script("document.querySelector('[data-testid=\"stMain\"]').scrollTo(0, 10000)")
            chrome.execute_script("arguments[0].click()", offered)
        settled(place + 1)
        in_view(question, name)
        address = chrome.current_url
        assert len(all_of(".cc-all")) == place + 1  # every answer has its sources
        labels = all_of('[data-testid="stMetricLabel"] p')
        assert len(labels) == 3
        assert all(label.get_property("scrollWidth") <= label.get_property("clientWidth") for label in labels)

    chrome.get(page)  # without the key in its address: a new conversation
    wait_for(lambda: all_of(".cc-steps") and not all_of(".cc-asked"))
    assert hosts_asked(chrome) == {"127.0.0.1"}
