"""Retrieval, look-up and planning at several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.scale import run
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.retrievers.index import vector_index
from cachecraft_rag.types.progress import Progress


def test_each_size_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "COARSE_FROM", 1000)
    steps: list[Progress] = []
    cells = list(run([3000, 300], queries=8, k=5, progress=steps.append))
    assert [cell.chunks for cell in cells] == [300, 3000]
    assert [step.done for step in steps] == [300, 3000]
    assert cells[0].recall == 1.0
    assert cells[1].recall >= 0.98
    for cell in cells:
        assert (
            min(cell.retrieve_ms, cell.exact_ms, cell.lookup_ms, cell.plan_ms, cell.first_search_s)
            > 0.0
        )


def test_fewer_chunks_than_a_question_has() -> None:
    with pytest.raises(ConfigError, match="at least the 10 chunks"):
        list(run([100, 5]))


def test_the_command(
    benchmark_json: Callable[..., Any], benchmark_output: Callable[..., str]
) -> None:
    given = ("scale", "--sizes", "50,200", "--queries", "3", "--top-k", "4")
    sizes = benchmark_json(*given)["sizes"]
    assert [one["chunks"] for one in sizes] == [50, 200]
    assert {"plan_ms", "lookup_ms", "retrieve_ms", "recall"} <= sizes[0].keys()
    assert "200" in benchmark_output(*given)
