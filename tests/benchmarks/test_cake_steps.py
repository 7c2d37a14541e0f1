"""Times of steps while chunk-caches load, against the same steps alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cake_steps import (
    ComparedRequest,
    RecordingSpeed,
    StepTimes,
    alone_s,
    step_times,
)
from cachecraft_rag.model.decoder import Decoder


def test_the_pieces_of_requests_are_kept_and_other_passes_are_not() -> None:
    speed = RecordingSpeed(100.0)
    whole, piece = np.arange(300), np.arange(200, 300)
    speed.measured(speed.rows(whole), 3.0, kind="whole")
    speed.measured(speed.rows(piece), 1.0, kind="piece")
    speed.measured(speed.rows(whole), 2.0, kind="last")
    ((positions, seconds),) = speed.pieces
    assert positions.tolist() == piece.tolist()
    assert seconds == 1.0
    assert speed.known


def test_each_piece_is_computed_alone(tiny_decoder: Callable[..., Decoder]) -> None:
    found = alone_s(tiny_decoder("Llama"), list(range(40)), [np.arange(24), np.arange(24, 40)])
    assert len(found) == 2
    assert min(found) > 0


def test_steps_are_averaged_within_requests_first() -> None:
    compared = [
        ComparedRequest(beside=[2.0, 3.0], alone=[1.0, 3.0], loaded=0.5),
        ComparedRequest(beside=[4.0], alone=[2.0], loaded=0.25),
    ]
    found = step_times(compared, tokens=512, bandwidth=2.0, rate=3e6)
    assert (found.tokens, found.bandwidth_ratio, found.computed_mb_per_s) == (512, 2.0, 3.0)
    assert (found.requests, found.steps, found.loaded) == (2, 3, 0.375)
    assert found.ratio is not None
    # 1.5 and 2, not the mean of the three steps
    assert found.ratio.mean == pytest.approx(1.75)
    assert (found.ratio.low, found.ratio.high) == (1.5, 2.0)


def test_without_a_piece_there_is_nothing_to_compare() -> None:
    found = step_times([], tokens=512, bandwidth=2.0, rate=3e6)
    assert (found.requests, found.steps, found.ratio, found.loaded) == (0, 0, None, None)


def test_the_command_reports_what_it_was_asked_for(
    tiny_decoder: Callable[..., Decoder],
    benchmark_json: Callable[..., Any],
    tmp_path: Path,
    as_loud_as_before: None,
) -> None:
    """How many pieces are computed depends on the machine."""
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path)
    decoder.tokenizer.save_pretrained(tmp_path)
    asked = ("--tokens", "512", "--requests", "1", "--bandwidth", "0.5")
    found = benchmark_json("cake-steps", "--model", tmp_path, *asked)
    assert found.keys() == {field.name for field in fields(StepTimes)}
    assert (found["tokens"], found["bandwidth_ratio"]) == (512, 0.5)
    assert found["computed_mb_per_s"] > 0
