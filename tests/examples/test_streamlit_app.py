"""The browser app: its pictures, its pages driven by Streamlit's own test runner, and once in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from cachecraft_rag import Answer, CacheCraft, RequestStats
from cachecraft_rag.errors import IndexStoreError
from cachecraft_rag.observability.stats import ChunkStats, Source
from cachecraft_rag.serving.audits.audit import Audit, AuditText

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from streamlit.testing.v1 import AppTest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
APP = EXAMPLES / "streamlit_app.py"
KETTLE = (
    "# Kettle Wren K2\n\n## Size\n\nThe Wren K2 holds 1.7 litres and boils them in 4 minutes. {filler}\n\n"
    "## Limescale\n\nDescale the Wren K2 every 8 weeks with 20 grams of citric acid. {filler}\n"
).format(
    filler="Keep the base dry, wipe the kettle with a soft cloth and let it cool before you put it away. "
    * 5
)
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


def answered(
    *chunks: ChunkStats, system: int = 30, question: int = 20, system_reused: bool = True
) -> Answer:
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
        Source(
            one.chunk_id,
            f"text of {one.chunk_id}",
            0.5,
            {"heading": f"Part {one.chunk_id}", "source": "a.md"},
        )
        for one in sorted(chunks, key=lambda one: one.chunk_id)
    )
    return Answer("It is so.", sources, stats)


MIXED = answered(
    chunk(3, "computed", 100),
    chunk(2, "reused", 200, recomputed=40, tier="disk", variant_id="ab" * 16),
    chunk(5, "reused", 100, computed=64, recomputed=6, tier="remote", variant_id="ab" * 16),
    chunk(1, "exact", 150, tier="host", variant_id="cd" * 16),
    chunk(4, "trimmed", 0, reason="the prompt was full"),
)


MARKED = (
    "[a](http://far.away) **b** <img src=x> `c` $d$ :red[e] ![f](g) # h_i_ "
    "http://far.away www.far.away\nj\x1b &amp; a@b.cd"
)


def test_names_and_messages_are_shown_as_text() -> None:
    from markdown_it import MarkdownIt
    from streamlit_picture import plain

    (block,) = [
        token
        for token in MarkdownIt("gfm-like", {"linkify": False}).parse(plain(MARKED))
        if token.children
    ]
    assert block.children is not None
    assert {child.type for child in block.children} <= {"text", "text_special"}
    assert "".join(child.content for child in block.children) == MARKED.replace("\n", " ").replace(
        "\x1b", ""
    )
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
    from streamlit_documents import file_name

    assert file_name(given) == stored
    (tmp_path / file_name(given)).write_bytes(b"x")


class Elements(HTMLParser):
    """Names and attributes of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_bar_shows_how_each_token_was_obtained() -> None:
    from streamlit_picture import CAPTION, parts, prompt_bar

    row = parts(MIXED, 30)
    assert [(label, runs) for label, _, runs in row] == [
        ("I", (("kept", 30),)),
        ("3", (("computed", 100),)),
        ("2", (("disk", 160), ("recomputed", 40))),
        ("5", (("computed", 64), ("remote", 30), ("recomputed", 6))),
        ("1", (("host", 150),)),
        ("Q", (("computed", 20),)),
    ]
    assert "the instruction (I)" in CAPTION
    assert "the question (Q)" in CAPTION
    assert parts(answered(chunk(1, "computed", 10), system_reused=False), 30)[0][2] == (
        ("computed", 30),
    )
    bar = prompt_bar(MIXED, 30)
    elements = Elements()
    elements.feed(bar)
    widths = [attrs["style"] for _, attrs in elements.found if attrs.get("class") == "cc-part"]
    assert widths == [f"flex:{tokens} 1 0" for tokens in (30, 100, 200, 100, 150, 20)]
    for words in (
        "computed <em>184</em>",
        "reused from disk <em>160</em>",
        "1 passage did not fit",
        CAPTION,
    ):
        assert words in bar
    assert (
        "<strong>2 · Part chunk2</strong><br>160 tokens reused from disk, 40 tokens recomputed"
        in bar
    )
    assert not re.search("CFO|β|[0-9a-f]{12}|device", bar)


def test_each_kind_has_a_colour_of_its_own_in_both_themes() -> None:
    from streamlit_picture import KINDS

    style = (EXAMPLES / "streamlit_style.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--cc-(\w+): (light-dark\([^)]+\))", style))
    assert len({colours[kind] for kind in KINDS}) == len(KINDS)
    assert all(re.search(rf"\.cc-{kind} \{{\s*background", style) for kind in KINDS)


@pytest.mark.parametrize(
    ("answer", "full_ttft_s", "chips"),
    [
        (
            MIXED,
            1.0,
            [
                "250 ms to the first token",
                "62% of the prompt reused",
                "+1.00 s without reuse: 4.0× as long",
            ],
        ),
        (
            MIXED,
            0.2,
            ["250 ms to the first token", "62% of the prompt reused", "0.20 s without reuse"],
        ),
        (MIXED, None, ["250 ms to the first token", "62% of the prompt reused"]),
    ],
)
def test_only_a_gain_by_reuse_has_the_colour_of_one(
    answer: Answer, full_ttft_s: float | None, chips: list[str]
) -> None:
    from streamlit_conversations import Turn
    from streamlit_picture import headline

    line = headline(Turn("What?", {}, answer, full_ttft_s, whole=True))
    shown = re.findall(r'<span class="cc-chip (.*?)">(.*?)</span>', line)
    assert [("+" if good else "") + re.sub("<.*?>", "", text) for good, text in shown] == [
        chip.replace("250 ms", "0.25 s") for chip in chips
    ]


def test_a_first_answer_and_an_interrupted_one_say_so() -> None:
    from streamlit_conversations import Turn
    from streamlit_picture import headline

    first = answered(chunk(1, "computed", 100), system_reused=False)
    line = headline(Turn("What?", {}, first, 1.0))
    assert "nothing reused yet" in line
    assert "interrupted" in line
    assert "%" not in line
    assert "cc-good" not in line


def test_the_verdict_says_whether_the_answer_is_the_same_without_reuse() -> None:
    from streamlit_conversations import Turn
    from streamlit_picture import verdict

    turn = Turn("How long?", {}, MIXED, whole=True)
    same = Audit("a" * 32, 0.0, 9, (), 0, 0.0, 40, "question", 0.2, "primed", {"reused": 3})
    assert verdict(turn, None) == ""
    assert "The same answer without reuse" in verdict(turn, same)
    changed = replace(same, differences=(4, 6))
    assert "Without reuse, 7 of 9 tokens are the same." in verdict(turn, changed)
    text = AuditText(
        "How long?", same="It lasts ", reuse="3 years.", full="<b>30 days</b>. Ask us. Now"
    )
    page = verdict(turn, replace(changed, text=text))
    assert "the answer is: <q>It lasts &lt;b&gt;30 days&lt;/b&gt;.</q>" in page


def turn_of(answer: Answer, name: str, *, full_ttft_s: float | None = None) -> Any:
    from streamlit_conversations import Turn

    stats = replace(answer.stats, request_id=name)
    return Turn("How?", {}, replace(answer, stats=stats), full_ttft_s=full_ttft_s, whole=True)


def test_the_day_s_savings_are_of_what_was_timed_and_audited() -> None:
    from streamlit_savings import Savings, strip

    days = [date(2026, 11, 29)]
    savings = Savings(lambda: days[0])
    nothing = savings.totals(lambda _: None)
    assert strip(nothing) == ""
    savings.add(turn_of(MIXED, "one"))
    savings.add(turn_of(MIXED, "one", full_ttft_s=1.25))  # once it is timed
    savings.add(turn_of(MIXED, "two"))
    same = Audit("a" * 32, 0.0, 9, (), 0, 0.0, 40, "question", 0.2, "primed", {"reused": 3})
    audits = {"one": same}
    totals = savings.totals(audits.get)
    assert (totals.questions, totals.timed, totals.saved_s) == (2, 1, 1.0)
    assert totals.tokens_reused == 2 * MIXED.stats.tokens_reused
    assert (totals.same, totals.audited) == (1, 1)
    assert savings.totals(lambda _: None).audited == 1  # an engine forgets old audits
    shown = strip(totals)
    assert "<strong>2</strong><span>questions today" in shown
    assert "<strong>1.00 s</strong><span>saved in 1 timed" in shown
    assert "<strong>1</strong><span>of 1 audited answers equal full prefill" in shown
    days[0] = date(2026, 11, 30)
    assert savings.totals(audits.get).questions == 0


def test_a_plan_says_what_became_of_each_passage_and_why() -> None:
    from streamlit_savings import plan

    shown = plan(turn_of(MIXED, "one"), 3)
    rows = re.findall(r"<tr>(<td>.*?)</tr>", shown)
    assert [re.search(r"<b>(\d)</b>", row)[1] for row in rows] == ["3", "2", "5", "1", "4"]  # type: ignore[index]
    assert "<td>160</td><td>40</td><td>0</td><td>disk</td>" in rows[1]
    assert "the prompt was full" in rows[4]
    assert "first token after 0.25 s" in shown


def test_a_document_cannot_put_elements_into_the_page() -> None:
    from streamlit_picture import markdown_safe, prompt_bar, sources

    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    metadata = {"heading": evil, "source": evil}
    hostile = replace(
        MIXED, sources=tuple(replace(one, text=evil, metadata=metadata) for one in MIXED.sources)
    )
    elements = Elements()
    elements.feed(prompt_bar(hostile, 30) + sources(hostile))
    assert not {"script", "img"} & {tag for tag, _ in elements.found}
    assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)
    assert (
        markdown_safe("$5 to $9 ![x](http://far.away/y)")
        == "\\$5 to \\$9 !\\[x](http://far.away/y)"
    )
    assert "<em>similarity 0.50</em>" in sources(MIXED)


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
        (
            "Ask Dr. Moll at approx. 9 a.m. or later! Then",
            "Ask Dr. Moll at approx. 9 a.m. or later!",
        ),
        ("- Rinse it.\n- Dry it.", "- Rinse it."),
        ("Do this:\n\n1. Rinse it. 2. Dry it.", "Do this:\n\n1. Rinse it."),
        ("It is called \u201cWren.\u201d It is", "It is called \u201cWren.\u201d"),
        ("It is one.", None),  # more may follow without a space: 1.7
    ],
)
def test_the_first_sentence_is_whole(text: str, sentence: str | None) -> None:
    from cachecraft_rag.cli.first_sentence import first_sentence

    assert first_sentence(text) == sentence


def test_the_app_s_own_settings_keep_it_on_this_machine_and_silent() -> None:
    settings = tomllib.loads((EXAMPLES / ".streamlit" / "config.toml").read_text(encoding="utf-8"))
    assert settings["server"]["address"] == "127.0.0.1"
    assert settings["browser"]["gatherUsageStats"] is False


# -- the app, driven by Streamlit's test runner -----------------------------------------------------------------------

Open = Callable[..., "AppTest"]


@pytest.fixture(scope="module")
def store_folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the one server that all these tests visit."""
    import streamlit as st

    folder = tmp_path_factory.mktemp("app")
    yield folder
    st.cache_resource.clear()  # closes the engine


@pytest.fixture
def visit(store_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the page again, as another visitor would."""
    from streamlit.testing.v1 import AppTest

    monkeypatch.setenv("CACHECRAFT_STORE", str(store_folder))
    monkeypatch.delenv("CACHECRAFT_MODEL", raising=False)

    def opened(key: str = "", plan: str = "") -> AppTest:
        app = AppTest.from_file(str(APP), default_timeout=300)
        app.query_params["c"] = key
        if plan:
            app.query_params["plan"] = plan
        app.run()
        assert not app.exception
        return app

    return opened


def upload(app: AppTest, *files: tuple[str, bytes]) -> None:
    app.file_uploader[0].set_value(
        [(name, data, "application/octet-stream") for name, data in files]
    ).run()
    assert not app.exception


def ask(app: AppTest, question: str) -> None:
    app.chat_input(key="question").set_value(question).run()
    assert not app.exception


def remove(app: AppTest, *names: str) -> None:
    app.multiselect(key=f"remove-{app.session_state.changes}").set_value(list(names)).run()
    app.button(key="remove").click().run()
    assert not app.exception


def pictures(app: AppTest) -> list[str]:
    return [element.value for element in app.html if 'class="cc-prompt"' in element.value]


def verdicts_of(app: AppTest, *, count: int) -> list[str]:
    """The verdicts of audits on the page, once there are so many; the newest answer's first."""
    found = [re.search(r'<p class="cc-verdict">([^<]*)', picture) for picture in pictures(app)]
    verdicts = [match[1] for match in found if match is not None]
    return verdicts if len(verdicts) == count else []


def stats_of(app: AppTest, turn: int = -1) -> RequestStats:
    stats: RequestStats = app.session_state.turns[turn].answer.stats
    return stats


def test_from_an_empty_page_to_reused_tokens(
    visit: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CACHECRAFT_STORE", str(tmp_path))
    app = visit()
    ask(app, QUESTIONS[0])
    assert [note.value for note in app.info] == [
        "There is nothing to ask about yet: add a document, or the sample handbook."
    ]
    assert not app.session_state.turns
    upload(
        app,
        ("../../kettle.md", KETTLE.encode()),
        ("broken.pdf", b"%PDF-1.4 nothing"),
        ("notes.zip", b"PK\x03\x04"),
    )
    problems = " ".join(note.value for note in app.warning)
    assert "**broken.pdf** was not added: cannot be read" in problems
    assert "it may be damaged" in problems
    assert "Error" not in problems
    assert (
        "**notes.zip** was not added: not a kind of file that can be indexed; convert it to one of .txt"
        in problems
    )
    assert [path.name for path in (tmp_path / "uploads").glob("[!.]*")] == ["kettle.md"]
    (note,) = app.success
    assert note.value == "Added **kettle.md**: 2 passages. Ask about it above."
    (offered,) = app.button_group
    assert offered.options == [
        "What does kettle.md say about “Size”?",
        "What does kettle.md say about “Limescale”?",
    ]

    ask(app, QUESTIONS[0])
    assert not app.warning
    assert stats_of(app).tokens_reused == 0
    assert "1.7 litres" in " ".join(note.value for note in app.markdown)
    assert app.session_state.turns[0].full_ttft_s > 0
    app.toggle(key="compare").set_value(False)
    ask(app, QUESTIONS[1])
    assert stats_of(app).tokens_reused > stats_of(app).tokens_prompt / 2
    newest, first = pictures(app)
    assert "cc-host" in newest
    assert "cc-host" not in first
    assert newest.count('class="cc-source"') == 2
    assert 'class="cc-all" open' in newest

    (today,) = [element.value for element in app.html if 'class="cc-today"' in element.value]
    assert "<strong>2</strong><span>questions today" in today
    assert "saved in 1 timed" in today
    (link,) = [note.value for note in app.markdown if "&plan=2" in note.value]
    key = app.query_params["c"]
    assert link == f"[Plan of this answer](?c={key}&plan=2)"
    shown = visit(key, plan="2")
    assert not shown.chat_input
    (table,) = [element.value for element in shown.html if 'class="cc-plan"' in element.value]
    assert "<td>host</td>" in table
    shown.button(key="back").click().run()
    assert len(pictures(shown)) == 2

    again = visit(app.query_params["c"])  # a reload
    assert [turn.question for turn in again.session_state.turns] == [*QUESTIONS]
    verdicts = wait_for(lambda: verdicts_of(visit(app.query_params["c"]), count=2))
    assert verdicts[1].startswith("The same answer without reuse")  # nothing was reused
    assert verdicts[0].startswith(("The same answer without reuse", "Without reuse, "))
    assert len(pictures(again)) == 2
    app.button(key="restart").click().run()
    assert not app.session_state.turns
    assert not pictures(app)


def test_an_upload_that_cannot_be_read_spoils_no_later_one(
    visit: Open, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = visit()
    upload(app, ("kettle.md", KETTLE.encode()))
    before = {path.name for path in (store_folder / "uploads").iterdir()}
    upload(
        app,
        ("deep.html", b"<div>" * 100_000 + b"</b>" * 100_000),
        ("odd.html", b'<meta charset="punycode"><p>Hi'),
    )
    assert any(
        "deep.html" in warning.value and "nested" in warning.value for warning in app.warning
    )

    def fail(*_: object, **__: object) -> None:
        raise IndexStoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(CacheCraft, "add_documents", fail)
        upload(app, ("more.md", b"# More"))
        assert any("the disk is full" in warning.value for warning in app.warning)
    assert {path.name for path in (store_folder / "uploads").iterdir()} == before | {"odd.html"}


class Gate:
    """Holds the reading of documents at its first step until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached = threading.Event()
        self.is_open = threading.Event()
        add_documents = CacheCraft.add_documents

        def held(rag: CacheCraft, folder: Path, *, progress: Callable[[Any], None]) -> Any:
            def show(step: Any) -> None:
                self.is_reached.set()
                assert self.is_open.wait(30)
                progress(step)

            return add_documents(rag, folder, progress=show)

        monkeypatch.setattr(CacheCraft, "add_documents", held)


def test_a_question_that_comes_while_documents_are_read_waits_for_them(
    visit: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import streamlit as st

    monkeypatch.setenv("CACHECRAFT_STORE", str(tmp_path))
    app = visit()
    app.toggle(key="compare").set_value(False).run()
    gate = Gate(monkeypatch)
    captions: list[str] = []
    uploader = app.file_uploader[0]
    with monkeypatch.context() as patched:
        patched.setattr(st, "caption", captions.append)
        # the test runner stops a page at its time limit as a click in the browser does
        with pytest.raises(RuntimeError, match="timed out"):
            uploader.set_value([("kettle.md", KETTLE.encode(), "text/markdown")]).run(timeout=5)
        assert gate.is_reached.wait(30)
        with pytest.raises(RuntimeError, match="timed out"):
            app.chat_input(key="question").set_value(QUESTIONS[0]).run(timeout=5)
    assert [path.name for path in (tmp_path / "uploads").glob("[!.]*")] == ["kettle.md"]
    assert any(
        text.startswith("Next, once the upload is read: How much water") for text in captions
    )
    gate.is_open.set()
    app.run()
    assert not app.exception
    assert not app.warning
    assert [(turn.question, turn.whole) for turn in app.session_state.turns] == [
        (QUESTIONS[0], True)
    ]
    assert "1.7 litres" in app.session_state.turns[0].answer.text
    assert [path.name for path in (tmp_path / "uploads").glob("[!.]*")] == ["kettle.md"]
    assert not app.session_state.waiting


def test_a_failed_upload_leaves_the_page_and_its_suggestions(
    visit: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CACHECRAFT_STORE", str(tmp_path))
    app = visit()
    upload(app, ("kettle.md", KETTLE.encode()))
    offered = app.button_group[0].options
    upload(app, ("broken.pdf", b"%PDF-1.4 nothing"))
    assert app.button_group[0].options == offered

    def fail(*_: object, **__: object) -> None:
        raise IndexStoreError("the index cannot be written (OperationalError: disk I/O error)")

    with monkeypatch.context() as patched:
        patched.setattr(CacheCraft, "add_documents", fail)
        upload(app, ("more.md", b"# More"))
    (warning,) = app.warning
    assert warning.value.startswith("Nothing was added from the upload: the index cannot be")
    assert "disk I/O error" in warning.value
    assert app.button_group[0].options == offered
    assert not app.error

    with monkeypatch.context() as patched:
        patched.setattr(CacheCraft, "remove_documents", fail)
        remove(app, app.multiselect(key=f"remove-{app.session_state.changes}").options[0])
    (warning,) = app.warning
    assert warning.value.startswith("Removing did not work: the index cannot be written")
    assert app.button_group[0].options == offered


def test_an_older_upload_stays_until_the_new_one_is_indexed(
    visit: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CACHECRAFT_STORE", str(tmp_path))
    app = visit()
    upload(app, ("kettle.md", KETTLE.encode()), ("note.html", b"<p>Call at nine."))

    def fail(*_: object, **__: object) -> None:
        raise IndexStoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(CacheCraft, "add_documents", fail)
        upload(app, ("kettle.md", b"# Another"), ("kettle.md", b"# One more"), ("new.md", b"# New"))
    upload(app, ("note.html", b"<div>" * 100_000))
    kept = {path.name: path.read_bytes() for path in (tmp_path / "uploads").iterdir()}
    assert kept == {"kettle.md": KETTLE.encode(), "note.html": b"<p>Call at nine."}
    names = app.multiselect(key=f"remove-{app.session_state.changes}").options
    assert names == ["uploads/kettle.md", "uploads/note.html"]
    upload(app, ("kettle.md", b"# Another"))
    assert (tmp_path / "uploads" / "kettle.md").read_bytes() == b"# Another"
    assert {path.name for path in (tmp_path / "uploads").iterdir()} == {"kettle.md", "note.html"}


def test_messages_name_no_class_of_python() -> None:
    from streamlit_picture import in_words

    for message in (
        "/a/index.sqlite cannot be read (OperationalError: disk I/O error).",
        "/a/index.sqlite cannot be read (sqlite3.OperationalError: disk I/O error).",
    ):
        words = in_words(IndexStoreError(message))
        assert words == "/a/index.sqlite cannot be read (disk I/O error)."
    assert in_words(IndexStoreError("no answer from the hub (ConnectTimeoutError).")) == (
        "no answer from the hub."
    )


def test_switches_do_what_they_say(visit: Open) -> None:
    app = visit()
    upload(app, ("kettle.md", KETTLE.encode()))
    for name in ("compare", "reuse"):
        app.toggle(key=name).set_value(False)
    app.slider(key="length").set_value(16)
    ask(app, QUESTIONS[0])
    assert app.session_state.turns[0].full_ttft_s is None
    assert stats_of(app).tokens_generated <= 16
    assert stats_of(app).tokens_computed == stats_of(app).tokens_prompt

    app.toggle(key="reuse").set_value(True).run()
    ask(app, QUESTIONS[1])  # stores what the next one reuses
    app.select_slider(key="ratio").set_value(40)
    app.slider(key="top_k").set_value(2)
    for name in ("remember", "focus"):
        app.toggle(key=name).set_value(True)
    picked = next(
        name for name in app.multiselect(key="picked").options if name.endswith("kettle.md")
    )
    app.multiselect(key="picked").set_value([picked])
    ask(app, QUESTIONS[0])
    turn = app.session_state.turns[-1]
    assert [source.metadata["source"] for source in turn.answer.sources] == [picked] * 2
    assert [role for role, _ in turn.arguments["history"]] == ["user", "assistant"] * 2
    moved = [one for one in turn.answer.stats.chunks if one.outcome == "reused"]
    fixed, tokens = sum(one.recomputed for one in moved), sum(one.tokens for one in moved)
    assert moved
    assert fixed == pytest.approx(0.4 * tokens, abs=len(moved))  # one budget for all of them


def test_a_baseline_is_discarded_if_anything_else_ran() -> None:
    from streamlit_conversations import Activity

    activity = Activity()
    mark = activity.idle_mark()
    assert mark is not None
    assert activity.idle_since(mark)
    with activity.running():
        assert activity.idle_mark() is None  # an upload, or another visitor's answer
        assert not activity.idle_since(mark)
    assert not activity.idle_since(mark)  # it has ended, but it ran meanwhile
    assert activity.idle_mark() is not None


def test_a_busy_server_times_no_baseline(visit: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamlit_conversations import Activity

    app = visit()
    upload(app, ("kettle.md", KETTLE.encode()))
    with monkeypatch.context() as patched:
        patched.setattr(Activity, "idle_mark", lambda _: None)
        ask(app, QUESTIONS[0])
    (turn,) = app.session_state.turns
    assert turn.whole
    assert (turn.full_ttft_s, turn.compare) == (None, False)
    assert not any("</strong> without reuse" in element.value for element in app.html)


def test_the_page_says_which_model_answers(visit: Open) -> None:
    (welcome,) = [
        note.value
        for note in visit().caption
        if note.value.startswith("Ask questions about your documents")
    ]
    assert "SmolLM2-135M-Instruct" in welcome


def test_visitors_share_chunk_caches_but_no_conversation(visit: Open) -> None:
    one, other = visit(), visit("0" * 32)
    upload(one, ("kettle.md", KETTLE.encode()))
    for app in (one, other):
        app.toggle(key="compare").set_value(False).run()
    ask(one, QUESTIONS[0])
    ask(other, QUESTIONS[1])
    assert stats_of(other).tokens_reused > 0
    assert [turn.question for turn in one.session_state.turns] == [QUESTIONS[0]]
    assert [turn.question for turn in other.session_state.turns] == [QUESTIONS[1]]
    assert other.session_state.turns[0].arguments["session"] == other.session_state.session
    assert len({one.session_state.session, other.session_state.session, "0" * 32}) == 3


def test_what_was_interrupted_can_be_asked_again(visit: Open) -> None:
    from streamlit_conversations import Turn

    app = visit()
    upload(app, ("kettle.md", KETTLE.encode()))
    app.toggle(key="compare").set_value(False)
    # another question came before its first token
    app.session_state.turns.append(Turn(QUESTIONS[0], {}))
    app.run()
    assert not pictures(app)
    app.button(key="again-1").click().run()
    assert [turn.whole for turn in app.session_state.turns] == [False, True]
    assert "1.7 litres" in app.session_state.turns[1].answer.text


def test_a_question_that_comes_during_an_answer_waits_for_it(visit: Open) -> None:
    from streamlit_conversations import Turn

    app = visit()
    upload(app, ("kettle.md", KETTLE.encode()))
    app.toggle(key="compare").set_value(False)
    turn = Turn(QUESTIONS[0], {})
    app.session_state.turns.append(turn)
    app.session_state.answering = turn  # as Streamlit leaves it when it interrupts an answer
    ask(app, QUESTIONS[1])
    turns = app.session_state.turns
    assert [(turn.question, turn.whole) for turn in turns] == [
        (question, True) for question in QUESTIONS
    ]
    assert not app.session_state.waiting


def test_what_cannot_be_answered_is_said_in_a_sentence(
    visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = visit()
    upload(app, ("kettle.md", KETTLE.encode()))
    ask(app, "why " * 9000)
    (note,) = app.warning
    assert note.value.startswith("This question could not be answered: question and history need")
    assert not app.session_state.turns
    ask(app, "   ")
    assert not app.warning
    monkeypatch.setenv("CACHECRAFT_MODEL", "/nowhere/at-all")
    (error,) = visit().error
    assert error.value.startswith("This did not work: ")


def test_the_handbook_is_added_and_removed_as_one(visit: Open) -> None:
    app = visit()
    app.button(key="sample").click().run()
    assert len(app.multiselect(key="picked").options) >= 21
    remove(app, "the sample handbook")
    assert not [
        name for name in app.multiselect(key="picked").options if name.startswith("handbook/")
    ]
    assert app.button(key="sample").label == "Add the sample handbook"  # and it can come back


def test_documents_are_fixed_where_the_server_says_so(
    visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(visit(), ("kettle.md", KETTLE.encode()))
    monkeypatch.setenv("CACHECRAFT_READ_ONLY", "1")
    app = visit()
    assert not app.file_uploader
    assert not [button for button in app.button if button.key in ("remove", "sample")]
    assert app.multiselect(key="picked").options


def test_with_a_log_in_configured_no_visitor_gets_further_without_it(
    store_folder: Path, visit: Open
) -> None:
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
                words = [
                    bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)
                ]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


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
    """Return the result of `holds` once it is true; Streamlit replaces and moves elements while it looks."""
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
def test_the_main_story_in_a_browser(chrome: Chrome, page: str, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def all_of(selector: str) -> list[Any]:
        return chrome.find_elements(By.CSS_SELECTOR, selector)

    def one(selector: str) -> Any:
        return wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, selector))

    def type_here(*keys: str) -> None:
        one('[data-testid="stChatInputTextArea"]').send_keys(*keys)

    def ask_here(question: str) -> None:
        type_here(question, Keys.ENTER)

    def timed(count: int) -> None:
        wait_for(
            lambda: (
                len([chip for chip in all_of(".cc-chip") if "without reuse" in chip.text]) == count
            )
        )

    # a headless page may have no focus
    chrome.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    # A phone: the side bar is hidden there.
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chrome.get(page)
    (tmp_path / "kettle.md").write_text(KETTLE, encoding="utf-8")
    uploader = one('[data-testid="stFileUploaderDropzone"]')
    assert uploader.is_displayed()
    assert 0 <= uploader.rect["x"] < uploader.rect["x"] + uploader.rect["width"] <= 390
    one('input[type="file"]').send_keys(str(tmp_path / "kettle.md"))
    wait_for(lambda: "Documents: 1" in one("body").text)
    ask_here(QUESTIONS[0])
    timed(1)
    ask_here(QUESTIONS[1])
    timed(2)

    wait_for(lambda: "questions today" in one(".cc-today").text)
    plans = [link for link in all_of("a") if "&plan=" in str(link.get_attribute("href"))]
    assert all(
        urlsplit(link.get_attribute("href")).netloc == urlsplit(page).netloc for link in plans
    )
    assert {link.text for link in plans} == {"Plan of this answer"}

    def reuses() -> list[bool]:
        """For each picture of a prompt, the newest first: True if it shows tokens from memory."""
        return [
            len(bar.find_elements(By.CSS_SELECTOR, ".cc-host")) > 0 for bar in all_of(".cc-bar")
        ]

    # Streamlit shows a copy of what it replaces for a moment, so the first picture may be there twice.
    wait_for(lambda: reuses() == [True, False])
    newest = all_of(".cc-bar")[0]
    widths = [part.size["width"] for part in newest.find_elements(By.CSS_SELECTOR, ".cc-part")]
    assert min(widths) > 0
    assert sum(widths) == pytest.approx(newest.size["width"], rel=0.1)
    asked = one(".cc-asked")
    assert QUESTIONS[1] in asked.text
    assert 0 <= asked.rect["y"] < 844  # the newest question and its answer are in view
    wait_for(lambda: len(all_of(".cc-verdict")) == 2)  # without a reload
    assert "The same answer without reuse" in all_of(".cc-verdict")[1].text

    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", size | {"width": 1280, "mobile": False}
    )
    chrome.refresh()  # a reload keeps the conversation
    wait_for(lambda: len(all_of(".cc-bar")) == 2)

    def tip() -> Any:
        part = all_of(".cc-part")[1]
        # again, where Streamlit has drawn it again since
        chrome.execute_script("arguments[0].focus()", part)
        return part.find_element(By.CSS_SELECTOR, ".cc-tip").text

    wait_for(lambda: "tokens reused from memory" in tip())

    wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, ".st-key-brief label").click() or True)
    wait_for(lambda: not one(".st-key-brief input").is_selected())
    ask_here("Tell me everything about the Wren K2")
    type_here("How long is its warranty?")
    wait_for(lambda: "▌" in one("body").text)
    type_here(Keys.ENTER)  # before that answer has ended
    timed(3)  # of the newest question; the one before it was answered in full, and not timed
    wait_for(lambda: len(all_of(".cc-bar")) == 4)
    assert "interrupted" not in one("body").text

    assert not [entry for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]
    assert hosts_asked(chrome) == {"127.0.0.1"}


def hosts_asked(chrome: Chrome) -> set[str]:
    """The hosts that the page has made requests to."""
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    urls = [message["params"].get("request", {}).get("url", "") for message in messages]
    urls += [
        message["params"].get("url", "")
        for message in messages
        if message["method"] == "Network.webSocketCreated"
    ]
    return {str(urlsplit(url).hostname) for url in urls if url.startswith(("http", "ws"))}
