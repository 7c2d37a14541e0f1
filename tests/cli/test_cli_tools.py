"""Options of `index`, `ask` and `chat`, and the commands `documents` and `sizes`: in this process, on a tiny model."""

from __future__ import annotations

import json
import shutil
import socket
import urllib.request
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cachecraft_rag.cli import ask, options
from cachecraft_rag.cli.app import COMMANDS, app
from cachecraft_rag.errors import CacheCraftError, ConfigError, DocumentError, IndexStoreError

QUESTION = "How many days?"
PAGES = {
    "returns.md": "You have 30 days to return an appliance.",
    "warranty.md": "The warranty lasts 3 years.",
}

pytestmark = pytest.mark.usefixtures("as_loud_as_before")


def run(*arguments: str | Path, typed: str = "") -> str:
    """A command's output on stdout."""
    done = CliRunner().invoke(
        app, [str(one) for one in arguments], input=typed, catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.stdout


def result(*arguments: str | Path) -> Any:
    """The object that a command prints with --json."""
    return json.loads(run(*arguments, "--json").strip().splitlines()[-1])


def test_priming_says_what_it_will_take_before_it_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = StringIO()
    for module in (ask, options):
        monkeypatch.setattr(module, "err", Console(file=printed, width=400))
    small = ("-m", home / "model", "-s", home / "small", "--codec", "int8", "--disk-bytes", "1 MB")
    report = result("index", home / "docs", "--prime", *small)
    estimate = report["estimate"]
    assert estimate["disk_budget"] == 1_000_000
    assert (
        f"to compute: {estimate['captures']} chunk-caches, {estimate['tokens']:,} tokens"
        in printed.getvalue()
    )
    assert "(int8)" in printed.getvalue()
    assert "more than fits" not in printed.getvalue()
    (home / "docs" / "long.md").write_text(" ".join(f"Rule {n} of many." for n in range(330)))
    try:
        report = result("index", home / "docs", "--prime", *small)
    finally:
        (home / "docs" / "long.md").unlink()
    assert report["estimate"]["nbytes"] > 1_000_000
    assert "That is more than fits" in printed.getvalue()
    assert result("store", "stats", "-s", home / "small")["disk_bytes"] <= 1_000_000


@pytest.mark.parametrize("wrong", ["--port 0", "--port 70000", "-tp 0"])
def test_a_server_refuses_numbers_that_mean_nothing(wrong: str) -> None:
    with pytest.raises(ConfigError, match="it must be a whole number, at least 1"):
        CliRunner().invoke(app, ["serve", "demo", *wrong.split()], catch_exceptions=False)


def test_a_folder_that_is_not_there_is_named_as_such(home: Path) -> None:
    with pytest.raises(CacheCraftError, match=r"'\./nowhere': there is no such folder"):
        run("sizes", "./nowhere")


def test_help_describes_each_commands_own_questions() -> None:
    wide = {"COLUMNS": "400", "TERM": "dumb"}
    calibrate, evaluate = (
        CliRunner().invoke(app, [name, "--help"], env=wide).output for name in ("calibrate", "eval")
    )
    assert "with --check, of both halves together" in calibrate
    assert "halves" not in evaluate
    for text in ("warm-up", "order of methods"):
        assert text in evaluate
        assert text not in calibrate
    for text in (calibrate, evaluate):
        assert "Longest answer" in text
        assert "PATH" in text


@pytest.mark.parametrize("name", ["", *COMMANDS, "store check", "documents ls"])
def test_no_help_names_types_of_flags_or_options_of_shells(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"]).output
    assert "--help" in shown
    assert "<bool>" not in shown
    assert "--install-completion" not in shown


@pytest.mark.parametrize("name", ["", "eval"])
def test_no_help_of_benchmarks_names_types_of_flags(name: str) -> None:
    from benchmarks.__main__ import app as benchmarks

    shown = CliRunner().invoke(benchmarks, [*name.split(), "--help"]).output
    assert "--help" in shown
    assert "<bool>" not in shown


def test_a_folder_that_cannot_be_made_is_an_error_of_the_doctor() -> None:
    with pytest.raises(ConfigError, match=r"cannot be written .*name another folder with --store"):
        run("doctor", "--store", "/proc/no-folder")


def test_sizes_come_from_the_config_alone(home: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(home / "model" / "config.json", tmp_path / "model")  # no weights, no tokenizer
    (row,) = result("sizes", tmp_path / "model")
    assert (row["tokens"], row["dtype"]) == (1000, "float32")
    assert row["nbytes"]["raw"] == 2 * row["layers"] * row["kv_heads"] * row["head_dim"] * 4 * 1000
    (counted,) = result("sizes", home / "model", "--documents", home / "docs")
    # a token for each byte
    assert counted["tokens"] == sum(len(text.encode()) for text in PAGES.values())
    assert "int8" in run("sizes", home / "model", "--tokens", "5000")


def test_options_of_a_question(home: Path) -> None:
    """A filter, a stop text, an instruction of one's own, budgets."""
    command = ("ask", QUESTION, "-m", home / "model", "-s", home / "store", "--max-tokens", "8")
    filtered = result(*command, "--where", "source=docs/warr*", "--host-bytes", "0")
    assert {source["metadata"]["source"] for source in filtered["sources"]} == {"docs/warranty.md"}
    whole = result(*command)
    assert {source["metadata"]["source"] for source in whole["sources"]} == {
        "docs/returns.md",
        "docs/warranty.md",
    }
    sampled = ("--temperature", "3", "--seed", "5", "--top-p", "0.9")
    text = result(*command, *sampled)["text"]
    stopped = result(*command, *sampled, "--stop", text[3:5])
    assert stopped["stats"]["finish"] == "stop"
    assert stopped["text"] == text[: text.index(text[3:5])]
    other = result(*command, "--system", "Answer in French.")
    assert other["stats"]["tokens_prompt"] != whole["stats"]["tokens_prompt"]
    with pytest.raises(ConfigError, match="write NAME=VALUE"):
        run(*command, "--where", "source")
    with pytest.raises(ConfigError, match="codec unknown"):
        run(*command, "--codec", "zip")


def test_chat_takes_the_same_options(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr(options, "out", Console(file=shown, width=200))
    chosen = (
        "--recompute-ratio",
        "0.5",
        "--where",
        "source=docs/returns.md",
        "--stop",
        "zzz",
        "--max-tokens",
        "4",
    )
    run(
        "chat", "-m", home / "model", "-s", home / "store", *chosen, typed=f"{QUESTION}\n/sources\n"
    )
    assert "docs/returns.md" in shown.getvalue()
    assert "docs/warranty.md" not in shown.getvalue()


def test_documents_are_listed_and_removed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # not a copy of `home`'s store: the questions of other tests add variants to that one
    monkeypatch.chdir(home)
    copy = tmp_path / "fewer"
    result("index", "docs", "--prime", "-s", copy)
    listed = result("documents", "ls", "-s", copy)
    assert [document["doc_id"] for document in listed] == ["docs/returns.md", "docs/warranty.md"]
    before = result("store", "stats", "-s", copy)["variants"]
    with pytest.raises(DocumentError, match=r"did you mean docs/warranty\.md"):
        run("documents", "remove", "docs/warrant.md", "-s", copy)
    removed = result("documents", "remove", "docs/warranty.md", "-s", copy)
    assert removed["documents"] == ["docs/warranty.md"]
    # its own, and that of the page that was captured after it
    assert removed["chunk_caches"] == 2
    assert before - result("store", "stats", "-s", copy)["variants"] == 2
    run("documents", "remove", "docs/", "-s", copy)
    assert result("documents", "ls", "-s", copy) == []
    with pytest.raises(IndexStoreError, match="cachecraft index DIR"):
        run("documents", "ls", "-s", home / "typo")
    assert not (home / "typo").exists()


def test_chat_serves_metrics_and_logs_a_line_of_json_for_each_request(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scraped = []

    def typed(_: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            scraped.append(answer.read().decode())
        return QUESTION if len(scraped) == 1 else "/quit"

    monkeypatch.setattr("builtins.input", typed)
    options = (
        "-m",
        home / "model",
        "-s",
        home / "store",
        "--max-new-tokens",
        "4",
        "--metrics-port",
        port,
    )
    done = CliRunner().invoke(
        app, ["--log-json", "chat", *map(str, options)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert [
        "cachecraft_ttft_seconds_count 0.0" in scraped[0],
        "cachecraft_ttft_seconds_count 1.0" in scraped[1],
    ] == [
        True,
        True,
    ]
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    (request,) = [line for line in lines if line.get("event") == "request"]
    assert request["finish"] == "length"
    assert {chunk["outcome"] for chunk in request["chunks"]} <= {"exact", "reused", "computed"}
    assert QUESTION not in done.stderr
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
