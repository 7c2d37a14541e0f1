"""`python -m benchmarks ttft` as a reader of the repository types it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.errors import CacheCraftError


def test_ttft_ends_in_one_json_line(demo_model: Path, benchmark_json: Callable[..., Any]) -> None:
    short = ("--pairs", "1", "--chunks", "2", "--chunk-tokens", "64", "--dtype", "float32")
    report = benchmark_json("ttft", *short, "--profile")
    assert {"ratio_host", "ratio_disk", "ratio_all_recomputed", "token_ratio"} <= set(report)
    assert 0.15 < report["token_ratio"] < 0.5
    assert all(report[name] > 0 for name in ("ratio_host", "ratio_disk", "ratio_all_recomputed"))
    assert report["lengths"] == [
        {name: value for name, value in report.items() if name != "lengths"}
    ]
    reused, full = report["parts"], report["parts_all_recomputed"]
    assert reused.keys() == full.keys()
    ran = {part for part, seconds in reused.items() if seconds > 0}
    assert {"planning", "placing", "drift", "attention", "layers", "logits", "other"} <= ran
    assert full["drift"] == full["probe"] == 0


def test_ttft_of_several_lengths(demo_model: Path, benchmark_json: Callable[..., Any]) -> None:
    short = ("--pairs", "1", "--tokens", "150,300", "--chunk-tokens", "80", "--dtype", "float32")
    report = benchmark_json("ttft", *short)
    assert [
        (one["chunks"], abs(one["prompt_tokens"] - tokens) < 20)
        for one, tokens in zip(report["lengths"], (150, 300), strict=True)
    ] == [(2, True), (4, True)]
    assert report.keys() == {"lengths"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "./no-such-model"), "cannot load the model"),
        (
            ("--chunks", "25", "--dtype", "float32"),
            "do not fit the model's context of 8192; choose fewer",
        ),
    ],
)
def test_wrong_arguments_are_refused_with_advice(
    arguments: tuple[str, ...], says: str, demo_model: Path, benchmark_output: Callable[..., str]
) -> None:
    with pytest.raises(CacheCraftError, match=says):
        benchmark_output("ttft", *arguments)
