"""`cachecraft bench scale`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cachecraft_rag.cli.app import app
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.latency.scale import run
from cachecraft_rag.retrievers import vector_index
from cachecraft_rag.types import Progress


def test_each_size_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "COARSE_FROM", 1000)
    told: list[Progress] = []
    cells = list(run([3000, 300], queries=8, k=5, progress=told.append))
    assert [cell.chunks for cell in cells] == [300, 3000]
    assert [step.done for step in told] == [300, 3000]
    assert cells[0].recall == 1.0
    assert cells[1].recall >= 0.98
    for cell in cells:
        assert min(cell.retrieve_ms, cell.exact_ms, cell.lookup_ms, cell.plan_ms, cell.first_search_s) > 0.0


def test_fewer_chunks_than_a_question_has() -> None:
    with pytest.raises(ConfigError, match="at least the 10 chunks"):
        list(run([100, 5]))


def test_the_command() -> None:
    given = ["bench", "scale", "--sizes", "50,200", "--queries", "3", "--top-k", "4"]
    done = CliRunner().invoke(app, [*given, "--json"], catch_exceptions=False)
    sizes = json.loads(done.stdout)["sizes"]
    assert [one["chunks"] for one in sizes] == [50, 200]
    assert {"plan_ms", "lookup_ms", "retrieve_ms", "recall"} <= sizes[0].keys()
    shown = CliRunner().invoke(app, given, catch_exceptions=False, env={"COLUMNS": "200"})
    assert "200" in shown.stdout
