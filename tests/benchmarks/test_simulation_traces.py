"""`python -m benchmarks simulate`: the traces that it reads, and what it prints."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation.trace import Trace, read_trace
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.observability.request_log import JsonFormatter, request_fields
from cachecraft_rag.observability.stats import ChunkStats, RequestStats

# -- traces -----------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_by_names_lengths_and_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"time": 2.0, "chunks": ["b", "a", "b"], "tokens": [20, 10, 20]},
        {"time": 1.0, "chunks": ["a", 7], "session": 3},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    assert read_trace(path, chunk_tokens=50) == Trace(((1, 2), (0, 1)), (20, 10, 50))


def test_the_request_log_is_a_trace(tmp_path: Path) -> None:
    chunks = (
        ChunkStats("b", "computed", tokens=30),
        ChunkStats("a", "exact", tokens=20),
        ChunkStats("c", "trimmed"),
    )
    logger = logging.getLogger("cachecraft_rag.requests")
    times = dict.fromkeys(("ttft_s", "plan_s", "load_s", "prefill_s", "total_s"), 0.1)
    tokens = ("prompt", "reused", "recomputed", "computed", "generated")
    counts = {f"tokens_{kind}": 10 for kind in tokens}
    stats = RequestStats(
        **times, **counts, recompute_share=0.5, focus_layer=None, finish="end", chunks=chunks
    )
    fields = request_fields(stats)
    messages: list[dict[str, object]] = [{"event": "eviction", "reason": "budget"}, fields]
    path = tmp_path / "log.jsonl"
    lines = []
    for extra in messages:
        record = logger.makeRecord(
            logger.name, logging.INFO, "", 0, "done", (), None, extra={"cachecraft": extra}
        )
        lines.append(JsonFormatter().format(record))
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read_trace(path) == Trace(((0, 1),), (30, 20))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        pytest.param("[" * 100_000, id="deep"),
        "[]",
        "{}",
        '{"chunks": "a"}',
        '{"chunks": [1.5]}',
        '{"chunks": [true]}',
        '{"chunks": []}',
        '{"chunks": [1], "tokens": [1, 2]}',
        '{"chunks": [1], "tokens": [0]}',
        '{"chunks": [1], "time": "now"}',
    ],
)
def test_malformed_traces_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        read_trace(path)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_json_and_a_table(
    tmp_path: Path, benchmark_json: Callable[..., Any], benchmark_output: Callable[..., str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(json.dumps({"chunks": [n % 7, n % 5 + 7]}) for n in range(60)), encoding="utf-8"
    )
    given = (
        "simulate",
        path,
        "--budgets",
        "0.5,1",
        "--max-variants",
        "3",
        "--new-variants",
        "always",
    )
    fields = benchmark_json(*given, "--processes", "1")
    assert fields["requests"] == 60
    assert fields["policies"]["oracle"]["0.5"]["of_oracle"] == 1.0
    assert {"saving", "f_r", "oracle", "lru", "s3-fifo"} == set(fields["policies"])
    shown = benchmark_output(*given, "--processes", "1")
    assert "f_r" in shown
    assert "For 85 % of the best saving" in shown
