"""Text from documents, models, users and other machines is printed as text, whatever it holds."""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.logging import RichHandler
from rich.table import Table
from typer.testing import CliRunner

from cachecraft_rag.cli import app as command
from cachecraft_rag.cli import ask, chat, console, options, store
from cachecraft_rag.cli.console import PlainConsole, as_json, visible
from cachecraft_rag.cli.options import where_of
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.observability.stats import ChunkStats, RequestStats, Source
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.variants import VariantKey

EVIL = "[/] [bold]x[/nothing] :smile: \x1b[2J\x1b]0;title\x07 \x9b1m \x00\r \udc80"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Output of both consoles, as on a terminal without colours."""
    shown = io.StringIO()
    for module in (console, options, ask, chat, store, command):
        for name in ("out", "err"):
            if hasattr(module, name):
                plain = PlainConsole(file=shown, width=400, color_system=None, force_terminal=False)
                monkeypatch.setattr(module, name, plain)
    return shown


def harmless(shown: str) -> bool:
    return STEERS.search(shown) is None and "[/]" in shown and ":smile:" in shown


class Stream:
    """An answer over evil sources, as `print_stream` and `print_sources` take it."""

    text = EVIL
    sources = (Source("id", "text", 0.5, {"source": EVIL, "heading": EVIL}),)
    stats = RequestStats(
        *([0.0] * 5), *([0] * 5), 0.0, None, "end", (ChunkStats("id", "computed", EVIL),)
    )

    def __iter__(self) -> Iterator[str]:
        return iter([*EVIL, EVIL])


def test_ask_and_sources_are_text(screen: io.StringIO) -> None:
    stream: Any = Stream()
    ask.print_stream(stream, brief=False)
    assert harmless(screen.getvalue())
    screen.seek(screen.truncate(0))
    ask.print_sources(stream)
    assert harmless(screen.getvalue())
    assert screen.getvalue().count("[/]") == 3


def test_chat_shows_sources_as_text(screen: io.StringIO) -> None:
    rag: Any = None
    sampling: Any = None
    talk = chat.Conversation(rag, brief=False, top_k=1, sampling=sampling)
    last: Any = Stream()
    talk._last = last
    talk.take("/sources")
    assert harmless(screen.getvalue())


def test_store_ls_shows_namespaces_as_text(screen: io.StringIO, tmp_path: Path) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32")
    namespace = EVIL.replace("\udc80", "")
    key = VariantKey(namespace, "model", "chunk", ("system",))
    scores = TokenScores(np.zeros(2, np.float32))
    with ChunkCacheStore.open(tmp_path / "caches") as made:
        made.put(
            Capture(key, layout, "t", torch.ones(layout.shape(2)), scores, (0.1,), 0.3, 0.6, 1.0)
        ).result()
    assert CliRunner().invoke(command.app, ["store", "ls", "-s", str(tmp_path)]).exit_code == 0
    assert harmless(screen.getvalue())


def test_errors_spinners_and_log_messages_are_text(screen: io.StringIO) -> None:
    console.print_error(CacheCraftError(EVIL), EVIL)
    assert harmless(screen.getvalue())
    screen.seek(screen.truncate(0))
    with options.waiting(EVIL), options.progress_bar(EVIL) as show:
        show(Progress(1, 2, EVIL))
    assert STEERS.search(screen.getvalue()) is None
    handler = RichHandler(console=options.err, show_path=False)
    handler.emit(logging.LogRecord("x", logging.WARNING, "x", 1, "%s", (EVIL,), None))
    assert harmless(screen.getvalue())


def test_json_is_harmless_and_still_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    options.print_json({EVIL: [EVIL, "Käse"]})
    shown = capsys.readouterr().out
    assert STEERS.search(shown.rstrip("\n")) is None
    assert "Käse" in shown
    assert json.loads(shown) == {EVIL: [EVIL, "Käse"]}


def test_json_has_no_numbers_that_strict_readers_refuse() -> None:
    values = {"NaN": math.nan, "Käse": [1.5, math.inf, "Infinity"]}
    assert as_json(values) == '{"NaN": null, "Käse": [1.5, null, "Infinity"]}'


@given(st.text(st.characters(codec=None)))
def test_no_text_steers_the_terminal(text: str) -> None:
    assert STEERS.search(visible(text)) is None
    visible(text).encode()
    assert json.loads(as_json(text)) == text
    shown = io.StringIO()
    table = Table(text)
    table.add_row(text)
    console = PlainConsole(file=shown, width=200, color_system=None)
    console.print(text, table)
    assert STEERS.search(shown.getvalue()) is None


def test_a_folder_s_name_is_text_in_the_command_itself(
    tmp_path: Path, cachecraft: Callable[..., Any]
) -> None:
    (tmp_path / "caches").mkdir()
    for arguments in (
        ["ask", EVIL[:-1], "--store", "x[/]\x1b[1m"],
        ["store", "ls", "--store", "x[/]\x1b[1m"],
    ):
        done = cachecraft(*[part.replace("\0", "") for part in arguments], cwd=tmp_path, code=2)
        assert STEERS.search(done.stderr) is None
        assert "[/]" in done.stderr


def test_a_name_of_a_file_in_where_is_taken_as_it_is_but_for_stars() -> None:
    allowed = where_of(["source=docs/kettle [2024]?.md"])
    assert allowed is not None
    assert allowed({"source": "docs/kettle [2024]?.md"})
    assert not allowed({"source": "docs/kettle 2s.md"})
    both = where_of(["source=docs/*.md", "source=a+b"])
    assert both is not None
    assert both({"source": "docs/x\ny.md"})
    assert both({"source": "a+b"})
    assert not both({"source": "aab"})
