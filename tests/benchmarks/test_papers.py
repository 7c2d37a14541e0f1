"""The papers' registry: complete, the same as docs/results/papers.md, and every command in it runs."""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import papers
from benchmarks.papers import Command, chosen, markdown, registry, run
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder

PAGE = (Path(__file__).parents[2] / "docs" / "results" / "papers.md").read_text("utf-8")
# As numbered in the papers: arXiv 2502.15734 and 2410.03065.
PUBLISHED = [
    *(f"cache-craft/fig{n}" for n in range(1, 30)),
    *(f"cache-craft/table{n}" for n in range(1, 4)),
    *(f"cache-craft/algorithm{n}" for n in (1, 2)),
    *(f"cake/fig{n}" for n in range(1, 9)),
    "cake/algorithm1",
]


def test_every_figure_and_table_has_an_entry() -> None:
    assert [one.id for one in registry()[1]] == PUBLISHED


def test_what_was_measured_says_on_how_much_when_and_where() -> None:
    for entry in registry()[1]:
        if entry.verdict == "structure":
            assert not entry.measured
            continue
        assert entry.shows, entry.id
        assert entry.reason.endswith("."), f"{entry.id}: no reason for the verdict"
        if entry.verdict != "not measurable":
            assert entry.measured, f"{entry.id}: no numbers"
            assert entry.commands, entry.id
        if entry.verdict != "not measurable" and not entry.name.startswith("Algorithm"):
            assert re.search(r"`[a-z0-9-]+`, \d+ November", entry.setup), (
                f"{entry.id}: no machine or day"
            )


def test_every_command_belongs_to_a_figure() -> None:
    commands, entries = registry()
    assert commands.keys() == {name for entry in entries for name in entry.commands}


def test_commands_do_not_follow_the_default_share_of_the_last_chunk(
    benchmark_output: Callable[..., str],
) -> None:
    named = []
    for command in registry()[0].values():
        program, name, *arguments = command.run.split()
        if program == "benchmarks" and "--nearest-share" in benchmark_output(name, "--help"):
            assert "--nearest-share" in arguments, command.name
            named.append(name)
    assert set(named) == {"batches", "loading", "serve", "stream", "ttft"}


def test_the_page_holds_the_registry() -> None:
    assert markdown() in PAGE


def test_the_page_names_functions_that_exist() -> None:
    table = PAGE.split("## In the code")[1]
    names = re.findall(r"`([a-z_]+(?:\.\w+)+)`", table)
    assert len(names) > 15
    for name in names:
        parts = name.split(".")
        for depth in range(len(parts), 0, -1):
            try:
                found: Any = importlib.import_module(".".join(["cachecraft_rag", *parts[:depth]]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[depth:]:
                found = getattr(found, attribute)
            break
        else:
            pytest.fail(name)


def test_what_fits_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        papers._PROGRAMS,
        "say",
        ("-c", "import sys; print(sys.argv[1:]); sys.exit(len(sys.argv) - 3)"),
    )
    commands = [
        Command("short", "say {out} one", 1),
        Command("failing", "say {out}", 2),
        Command("long", "say {out} two", 90),
        Command("of a file", "say {data} three", 1),
    ]
    first = run(commands, {}, tmp_path, seconds=3600)
    assert (tmp_path / "short.txt").read_text("utf-8").strip() == str(
        [str(tmp_path / "short"), "one"]
    )
    assert first["short"].startswith("printed")
    assert first["failing"].startswith("failed with exit code")
    assert "90 minutes" in first["long"]
    assert "not given" in first["of a file"]
    second = run(commands, {"data": "x"}, tmp_path)
    assert second["short"] == "done before"
    assert second["failing"].startswith("failed")
    assert (tmp_path / "long.txt").exists()
    assert (tmp_path / "of a file.txt").exists()


def test_figures_and_commands_are_chosen_by_name() -> None:
    assert [command.name for command in chosen(["cake/fig5", "cache-craft/fig29", "cake"])] == [
        "cake",
        "cake-codecs",
        "loading",
        "loading-own-core",
    ]
    assert len(chosen([])) == len(registry()[0])
    with pytest.raises(ConfigError, match="nothing can be run"):
        chosen(["cache-craft/fig4"])
    with pytest.raises(ConfigError, match="choose one of"):
        chosen(["cache-craft/fig99"])


def test_the_list_names_every_figure(benchmark_output: Callable[..., str], tmp_path: Path) -> None:
    assert all(one in benchmark_output("papers") for one in PUBLISHED)
    assert benchmark_output("papers", "--markdown") == markdown()
    left = json.loads(benchmark_output("papers", "tokens", "--out", tmp_path, "--json"))
    assert "not given" in left["tokens"]


@pytest.mark.slow
@pytest.mark.usefixtures("as_loud_as_before")
def test_every_command_runs_on_a_tiny_model(
    tiny_decoder: Callable[..., Decoder],
    benchmark_output: Callable[..., str],
    squad_article: Callable[..., Any],
    tmp_path: Path,
) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    towns = {"Arden": 1701, "Brook": 1802, "Corry": 1903}
    data, trace = tmp_path / "squad.json", tmp_path / "trace.jsonl"
    data.write_text(
        json.dumps(
            {"version": "1.1", "data": [squad_article(one, towns) for one in ("mill", "inn")]}
        )
    )
    trace.write_text('{"chunks": [0, 1]}\n{"chunks": [1, 0]}\n')
    asked = [
        {
            "question": "When was the mill built?",
            "passages": [
                f"{name} has {document} and a mill of {year}." for name, year in towns.items()
            ],
            "answers": ["1701"],
            "document": document,
        }
        for document in ("towns", "villages")
    ]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps(one) + "\n" for one in asked))
    places = {"data": data, "trace": trace, "multi_hop": own, "summaries": own}
    started = time.monotonic()
    ran = []
    for one in registry()[0].values():
        if one.smoke is None or one.needs:
            continue
        words = one.arguments(
            {name: str(path) for name, path in (places | {"out": tmp_path / one.name}).items()}
        )
        assert words is not None, one.name
        assert words[0] == "benchmarks"
        printed = benchmark_output(*words[1:], "--model", tmp_path / "model", *one.smoke.split())
        assert printed.strip(), one.name
        ran.append(one.name)
    assert len(ran) >= 10
    print(f"{len(ran)} commands in {time.monotonic() - started:.0f} s")
