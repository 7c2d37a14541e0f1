"""Times of steps while chunk-caches load, against the same steps alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cake_steps import RecordingSpeed, alone_s
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


def test_the_command_compares(
    tiny_decoder: Callable[..., Decoder],
    benchmark_json: Callable[..., Any],
    tmp_path: Path,
    as_loud_as_before: None,
) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path)
    decoder.tokenizer.save_pretrained(tmp_path)
    found = benchmark_json("cake-steps", "--model", tmp_path, "--tokens", "512", "--requests", "2")
    # how many pieces are computed depends on the machine
    assert found["tokens"] == 512
    assert found["requests"] <= 2
    assert (found["ratio"] is None) == (found["requests"] == 0)
