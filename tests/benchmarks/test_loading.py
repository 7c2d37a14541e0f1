"""The benchmarks of loading and memory on a tiny model: what they report, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 4

pytestmark = pytest.mark.usefixtures("as_loud_as_before")


@pytest.fixture(scope="module")
def model(tiny_decoder: Callable[..., Decoder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    decoder = tiny_decoder("Llama", num_hidden_layers=LAYERS)
    decoder.model.save_pretrained(folder)
    decoder.tokenizer.save_pretrained(folder)
    return folder


def test_cake_reports_each_cell_and_draws_a_figure(
    model: Path, benchmark_json: Callable[..., Any], tmp_path: Path
) -> None:
    grid = (
        "--tokens",
        "512",
        "--bandwidths",
        "0.5,2",
        "--shares",
        "1",
        "--codecs",
        "raw",
        "--dtype",
        "float32",
    )
    cells = benchmark_json("cake", "--model", model, *grid, "--plot", tmp_path / "cake.png")[
        "cells"
    ]
    assert [(cell["tokens"], cell["bandwidth_ratio"]) for cell in cells] == [(512, 0.5), (512, 2.0)]
    for cell in cells:
        assert cell["exact"]
        assert 0.0 < cell["computed"] <= 1.0  # the question at least
        better = min(cell["compute_only_s"], cell["load_only_s"])
        assert cell["of_better"]["mean"] == pytest.approx(cell["cake_s"] / better)
        assert cell["of_better"]["low"] == pytest.approx(cell["of_better"]["high"])  # of one pair
        assert cell["cpu_ratio"]["mean"] > 0
        assert cell["share_had"] > 0
        assert (cell["dtype"], cell["threads"] > 0, bool(cell["cpu"])) == ("float32", True, True)
    assert (tmp_path / "cake.png").read_bytes().startswith(b"\x89PNG")


def test_loading_reports_the_share_of_loading_that_is_hidden(
    model: Path, benchmark_json: Callable[..., Any]
) -> None:
    small = (
        "--chunks",
        "3",
        "--chunk-tokens",
        "200",
        "--pairs",
        "2",
        "--mb-per-s",
        "10",
        "--dtype",
        "float32",
    )
    report = benchmark_json("loading", "--model", model, *small)
    assert report["whole_s"] > report["load_s"] > 0
    assert report["host_s"] > 0 < report["queue_s"]
    assert set(report["queued"]) == {"whole", "layerwise", "cake"}
    assert report["disk_fraction_of_raw"] == pytest.approx(report["disk_mb_s"] / report["raw_mb_s"])
    hideable = min(report["load_s"], (report["whole_s"] - report["load_s"]) * (LAYERS - 1) / LAYERS)
    assert report["layerwise_hidden"] * hideable == pytest.approx(
        report["whole_s"] - report["layerwise_s"]
    )


def test_batches_are_timed_in_full_and_with_reuse(
    model: Path, benchmark_json: Callable[..., Any]
) -> None:
    found = benchmark_json(
        "batches", "--model", model, "--tokens", "200", "--sizes", "1,3", "--pairs", "2"
    )
    assert [(one["tokens"], one["size"]) for one in found] == [(200, 1), (200, 3)]
    assert all(
        len(one[side]) == 2 and min(one[side]) > 0
        for one in found
        for side in ("full_s", "reuse_s")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cake", "--bandwidths", "fast"), "not a list of numbers"),
        (("cake", "--tokens", "nan"), "not a list of numbers"),
        (("cake", "--tokens", "100"), "at least 256 tokens"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: tuple[str, ...], message: str, benchmark_json: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        benchmark_json(*arguments)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak")
def test_memory_is_measured_in_processes_of_their_own(model: Path) -> None:
    command = ["memory", "--model", str(model), "--tokens", "200", "--loading", "cake", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["merged_kv_bytes"] > 0
    assert report["prompt_tokens"] > 150
    assert report["weights_bytes"] > 0


def test_an_error_is_a_message_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "cake", "--model", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "error:" in done.stderr, "Traceback" in done.stderr) == (
        2,
        True,
        False,
    )
