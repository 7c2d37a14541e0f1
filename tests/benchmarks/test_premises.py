"""The premises of the papers: what is measured, on a tiny model, and what follows from it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.premises import (
    articles_of,
    clustered,
    compute,
    correlation,
    deviation,
    fixed_articles,
    hidden_deviation,
    look_at,
    piece_times,
    summary,
    uses,
)
from benchmarks.simulation.trace import Trace
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import PromptBuilder
from cachecraft_rag.store import ChunkCacheStore


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder("Llama")


def test_the_statistics_are_those_of_a_capture(
    decoder: Decoder, town_dataset: Dataset, store: ChunkCacheStore
) -> None:
    question = town_dataset.questions[0]
    builder = PromptBuilder(
        decoder.tokenizer, context_length=decoder.context_length, best_last=False
    )
    placements, watched = compute(decoder, builder.build(question.text, question.passages))
    with Engine(decoder, store, best_last=False) as engine:
        list(engine.stream(question.text, question.passages, config=ReuseConfig(reuse=False)))
        engine.settle()
        rows = {row.variant.key.chunk_id: row.variant for row in engine.store.rows()}
    assert [one.chunk_id for one in placements] == [chunk.chunk_id for chunk in question.passages]
    for one in placements:
        assert one.cci == pytest.approx(rows[one.chunk_id].cci, abs=1e-5)
        # the instruction is left out here
        assert one.inter == pytest.approx(rows[one.chunk_id].inter[1:], rel=1e-3)
    assert watched.asked.shape == (4, 3)
    assert watched.near[:, 1].sum() > 0 < watched.far[:, 1].sum()
    assert deviation(placements[1], placements[1]) == 0.0
    assert hidden_deviation(placements[1], placements[1]) == 0.0


def test_pairs_are_compared_and_counted(decoder: Decoder, town_dataset: Dataset) -> None:
    grouped = articles_of(town_dataset, prompts=2)
    assert len(grouped) == 2
    found = [
        look_at(
            decoder,
            asked,
            [c for d in town_dataset.documents if d[0].chunk_id != one for c in d],
            random.Random(1),
        )
        for one, asked in grouped.items()
    ]
    report = summary(json.loads(json.dumps(found)))
    pairs = [pair for one in found for pair in one["pairs"]]
    assert all(
        pair["deviation"] > 0 and 0.5 <= pair["cci"] <= 1 and 0 <= pair["not_overlapping"] <= 1
        for pair in pairs
    )
    for name in ("hidden states", "hidden states, partial", "keys and values, partial"):
        assert report["fig12"]["CCI"][name]["pairs"] == sum(pair["before"] > 0 for pair in pairs)
    assert sum(report["fig5"].values()) == pytest.approx(1.0)
    shares = [one["mean"] for one in report["fig14"].values()]
    assert shares == sorted(shares)
    assert shares[-1] <= 1.0
    grown = report["fig7"].pop("difference, mean of articles")
    assert grown["low"] <= grown["mean"] <= grown["high"]
    assert all(change["low"] > 0 for change in report["fig7"].values())


def test_the_interval_of_a_correlation_is_drawn_over_groups() -> None:
    draw = np.random.default_rng(0)
    groups = [
        [{"x": x, "deviation": 2 * x + shift} for x in draw.random(9)] for shift in draw.random(6)
    ]
    found = correlation(groups, "x")
    assert found["pairs"] == 54
    assert found["low"] < found["rho"] < found["high"]
    assert found["low"] > 0.2
    assert correlation([[]], "x") == {"pairs": 0}


def test_a_correlation_through_length_vanishes_at_equal_length() -> None:
    draw = np.random.default_rng(0)
    groups = []
    for _ in range(8):
        lengths = draw.integers(50, 200, size=30).tolist()
        groups.append(
            [
                {"x": n + draw.normal(0, 9), "deviation": draw.normal(0, 9) - n, "tokens": n}
                for n in lengths
            ]
        )
    assert correlation(groups, "x")["rho"] < -0.9
    assert abs(correlation(groups, "x", given=["tokens"])["rho"]) < 0.2


def test_an_interval_over_groups_is_wider_where_the_values_of_a_group_are_alike() -> None:
    draw = np.random.default_rng(0)
    alike = [[mean] * 20 for mean in draw.random(8).tolist()]
    mixed = draw.permutation(np.concatenate(alike)).reshape(8, 20).tolist()
    wide, narrow = clustered(alike), clustered(mixed)
    assert wide["mean"] == pytest.approx(narrow["mean"])
    assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"])


def test_articles_are_cut_into_chunks_of_equal_length(
    decoder: Decoder, town_dataset: Dataset
) -> None:
    grouped = fixed_articles(decoder.tokenizer, town_dataset, tokens=8, prompts=3, seed=0)
    builder = PromptBuilder(decoder.tokenizer, context_length=decoder.context_length)
    assert len(grouped) == 2
    for asked in grouped.values():
        assert len(asked) == 3
        chunks = [chunk for question in asked for chunk in question.passages]
        assert len({len(builder.chunk_segment(chunk).token_ids) for chunk in chunks}) == 1
        assert len({tuple(c.chunk_id for c in question.passages) for question in asked}) > 1
    assert fixed_articles(decoder.tokenizer, town_dataset, tokens=500, prompts=3, seed=0) == {}


def test_uses_of_a_trace() -> None:
    found = uses(Trace(((0, 1, 2), (0, 1, 3), (3, 2, 0), (1, 3)), (10, 20, 30, 40)))
    assert found["tokens of chunks seen before"] == pytest.approx(
        (10 + 20 + 80 + 60) / (60 + 70 + 80 + 60)
    )
    # The first two chunks of the second request.
    assert found["tokens behind the same prefix"] == pytest.approx(30 / 270)
    assert found["requests whose first k chunks began one before"]["2"] == pytest.approx(1 / 4)
    assert found["past requests that hold all chunks"] == {"1": 0.5, "2": 0.5}


def test_pieces_need_text_and_room(decoder: Decoder) -> None:
    found = piece_times(decoder, range(32), pieces=2, tokens=16)
    assert len(found["seconds"]) == 2
    with pytest.raises(ConfigError, match="longer text"):
        piece_times(decoder, range(31), pieces=2, tokens=16)


@pytest.mark.usefixtures("as_loud_as_before")
def test_a_stopped_run_resumes_and_other_settings_are_refused(
    decoder: Decoder,
    tmp_path: Path,
    squad_article: Callable[..., Any],
    benchmark_json: Callable[..., Any],
) -> None:
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    towns = {"Arden": 1701, "Brook": 1802, "Corry": 1903}
    data = tmp_path / "squad.json"
    data.write_text(
        json.dumps(
            {"version": "1.1", "data": [squad_article(one, towns) for one in ("mill", "inn")]}
        )
    )
    asked = (
        "premises",
        "--model",
        tmp_path / "model",
        "--data",
        data,
        "--articles",
        "2",
        "--prompts",
        "2",
    )
    asked = (*asked, "--pieces", "2", "--piece-tokens", "8", "--out", tmp_path / "out")
    first = benchmark_json(*asked)
    lines = (tmp_path / "out" / "premises.jsonl").read_text("utf-8").splitlines()
    (tmp_path / "out" / "premises.jsonl").write_text("\n".join(lines[:2]) + "\n", "utf-8")
    again = benchmark_json(*asked)
    assert {**again, "cake fig3": None} == {**first, "cake fig3": None}  # of which the times differ
    with pytest.raises(ConfigError, match="other settings"):
        benchmark_json(*asked, "--seed", "1")
