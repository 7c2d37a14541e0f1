"""The methods of the papers: each does what defines it, through the same engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.baselines import BaselineStore, first_values
from benchmarks.evaluate import Similar, chosen
from benchmarks.methods import ABLATIONS, methods_for
from cachecraft_rag.engine.engine import Engine, ScoredAnswer
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion
from cachecraft_rag.evaluation.measuring import Method
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.documents import Chunk

PER_CHUNK = ["random", "craft", "h2o", "leading", "value_deviation"]

pytestmark = pytest.mark.usefixtures("as_loud_as_before")


@pytest.fixture
def engine(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Iterator[Engine]:
    with (
        BaselineStore.open(tmp_path / "caches", variants_per_chunk=1000) as store,
        Engine(tiny_decoder("Llama"), store, best_last=False) as opened,
    ):
        yield opened


@pytest.fixture
def methods(town_dataset: Dataset) -> dict[str, Method]:
    return methods_for(town_dataset)


@pytest.fixture
def chunks(engine: Engine, town_dataset: Dataset) -> list[Chunk]:
    """Three chunks of one prompt that captured all of them, in another order than there."""
    chosen = list(town_dataset.documents[0][:3])
    engine.score_answer("What?", chosen, max_new_tokens=2, config=ReuseConfig(reuse=False))
    engine.write_back.wait_for([chunk.chunk_id for chunk in chosen])
    return [chosen[2], chosen[0], chosen[1]]


Ask = Callable[..., ScoredAnswer]


@pytest.fixture
def by(engine: Engine, methods: dict[str, Method]) -> Ask:
    """Answers over some chunks with a method."""

    def ask(chunks: Sequence[Chunk], name: str, ratio: float = 0.0) -> ScoredAnswer:
        method = methods[name]
        config = method.config(ratio)
        assert not config.capture
        question = EvaluationQuestion("q", "What?", tuple(chunks), ())
        if method.prepare is None:
            return engine.score_answer("What?", chunks, max_new_tokens=2, config=config)
        with method.prepare(engine, question, ratio) as passages:
            return engine.score_answer("What?", passages, max_new_tokens=2, config=config)

    return ask


def outcomes(found: ScoredAnswer) -> list[str]:
    return [chunk.outcome for chunk in found.stats.chunks]


def test_full_recompute_reuses_nothing(by: Ask, chunks: list[Chunk]) -> None:
    assert outcomes(by(chunks, "full_recompute")) == ["computed"] * 3


def test_full_cache_recomputes_nothing(by: Ask, chunks: list[Chunk]) -> None:
    found = by(chunks, "full_cache")
    assert outcomes(found) == ["reused"] * 3
    assert found.stats.tokens_recomputed == 0


def test_prefix_cache_takes_what_stands_where_it_stood(by: Ask, chunks: list[Chunk]) -> None:
    assert outcomes(by(chunks, "prefix_cache")) == ["computed"] * 3
    as_captured = [chunks[1], chunks[2], chunks[0]]
    assert outcomes(by(as_captured, "prefix_cache")) == ["exact"] * 3
    assert outcomes(by([chunks[1], chunks[0]], "prefix_cache")) == ["exact", "computed"]


def test_set_cache_takes_it_in_any_order(by: Ask, chunks: list[Chunk]) -> None:
    found = by(chunks, "set_cache")
    assert outcomes(found) == ["reused"] * 3
    assert found.stats.tokens_recomputed == 0
    longer = [*chunks, Chunk("Nobody has seen this before.")]
    assert outcomes(by(longer, "set_cache")) == ["reused"] * 3 + ["computed"]


@pytest.mark.parametrize("name", PER_CHUNK)
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_each_chunk_keeps_to_its_budget(
    by: Ask, chunks: list[Chunk], name: str, ratio: float
) -> None:
    for chunk in by(chunks, name, ratio).stats.chunks:
        assert chunk.recomputed == math.ceil(ratio * chunk.tokens)


@pytest.mark.parametrize("name", ["scattered"])
def test_one_budget_for_the_whole_prompt(by: Ask, chunks: list[Chunk], name: str) -> None:
    found = by(chunks, name, 0.3).stats
    assert found.tokens_recomputed == sum(math.ceil(0.3 * chunk.tokens) for chunk in found.chunks)


def test_selectors_choose_different_tokens(by: Ask, chunks: list[Chunk]) -> None:
    logits = [by(chunks, name, 0.2).logits[0] for name in PER_CHUNK]
    different = [logits[0]]
    for one in logits[1:]:
        if all((one - other).abs().max() > 1e-4 for other in different):
            different.append(one)
    assert len(different) >= 4  # two may agree on so little text


def test_alpha_decides_where_no_ratio_does(by: Ask, chunks: list[Chunk]) -> None:
    spent = [by(chunks, f"alpha_{alpha}").stats.tokens_recomputed for alpha in (0.25, 0.5, 1)]
    assert 0 < spent[0] < spent[1] < spent[2]
    assert "computed" in outcomes(by(chunks, "alpha_3"))  # CFO is 1


def test_without_positions_keys_are_as_they_would_be_after_the_instruction(
    engine: Engine, chunks: list[Chunk], methods: dict[str, Method], by: Ask
) -> None:
    prompt = engine.prompts.build("What?", chunks, reserve=1)
    last, start, length = chunks[2].chunk_id, prompt.bounds[3], prompt.bounds[4] - prompt.bounds[3]
    (variant,) = engine.store.find(engine.namespace, engine.decoder.fingerprint, [last]).variants[
        last
    ]
    raw = engine.store.load(variant).kv[2, 0]
    prepare = methods["no_position"].prepare
    assert prepare is not None
    with prepare(engine, EvaluationQuestion("q", "What?", tuple(chunks), ()), 0.0):
        (turned,) = engine.store.open_variants([variant])
    here = engine.decoder.rope(torch.arange(start, start + length))
    behind_instruction = engine.decoder.rope(
        torch.arange(prompt.bounds[1], prompt.bounds[1] + length)
    )
    torch.testing.assert_close(
        rotate(turned.kv[2, 0], *here), rotate(raw, *behind_instruction), atol=1e-5, rtol=1e-4
    )
    without, with_positions = by(chunks, "no_position_no_causality"), by(chunks, "no_causality")
    assert not torch.allclose(without.logits, with_positions.logits, atol=1e-4)


def test_without_overlap_nothing_of_the_old_context_counts(by: Ask, chunks: list[Chunk]) -> None:
    with_overlap, without = by(chunks, "alpha_0.5").stats, by(chunks, "alpha_0.5_no_beta").stats
    assert without.tokens_recomputed > with_overlap.tokens_recomputed


def test_with_the_question_alone_what_a_chunk_attended_to_at_capture_counts_for_nothing(
    engine: Engine,
    methods: dict[str, Method],
    by: Ask,
    chunks: list[Chunk],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, beside = by(chunks, "question_alone", 0.2).logits, by(chunks, "scattered", 0.2).logits
    assert not torch.allclose(alone, beside, atol=1e-4)
    stored = ChunkCacheStore.token_scores

    def shifted(self: ChunkCacheStore, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        found = stored(self, variant_ids)
        return {
            name: TokenScores(None if one.inter is None else np.roll(one.inter, 7))
            for name, one in found.items()
        }

    monkeypatch.setattr(ChunkCacheStore, "token_scores", shifted)
    assert torch.equal(by(chunks, "question_alone", 0.2).logits, alone)
    assert not torch.equal(by(chunks, "scattered", 0.2).logits, beside)


def test_a_store_answers_as_ever_once_a_request_is_over(by: Ask, chunks: list[Chunk]) -> None:
    before = by(chunks, "full_cache").logits
    for name in ("h2o", "value_deviation", "question_alone", "no_position"):
        by(chunks, name, 0.2)
    assert torch.equal(by(chunks, "full_cache").logits, before)


def test_values_of_the_second_layer_are_those_of_a_whole_prefill(
    engine: Engine, chunks: list[Chunk]
) -> None:
    prompt = engine.prompts.build("What?", [chunks[1]], reserve=1)
    values = first_values(engine, prompt.token_ids)
    (variant,) = engine.store.find(
        engine.namespace, engine.decoder.fingerprint, [chunks[1].chunk_id]
    ).variants.popitem()[1]
    stored = engine.store.load(variant).kv[1, 1]  # captured first, right after the instruction
    torch.testing.assert_close(
        values[prompt.bounds[1] : prompt.bounds[2]], stored, atol=1e-5, rtol=1e-4
    )


def test_names_are_known_and_groups_stand_for_theirs(methods: dict[str, Method]) -> None:
    assert [one.name for one in chosen("craft,default,craft", methods)] == ["craft", "default"]
    assert [one.name for one in chosen("ablations", methods)] == list(ABLATIONS)
    assert "mapreduce" not in {one.name for one in chosen(None, methods)}
    assert "mapreduce" in {one.name for one in chosen("all", methods)}
    with pytest.raises(ConfigError, match=r"best: no such method; there are .*full_recompute"):
        chosen("best", methods)
    with pytest.raises(ConfigError, match="add --lingua2-model"):
        chosen("lingua2", methods)


def letters(texts: Sequence[str]) -> NDArray[np.float32]:
    """Unit vectors of how often each letter stands in a text: a crude embedding that needs no model."""
    counts = np.array(
        [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts], dtype=np.float32
    )
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def test_similar_chunks_are_the_most_similar_and_the_best_is_last(town_dataset: Dataset) -> None:
    mill, bridge = town_dataset.documents
    everything = [*mill, *bridge]
    vectors = letters([chunk.text for chunk in everything])
    few = Similar(letters)(town_dataset, mill[1], 0)
    assert len(few) == 2
    assert mill[1] not in few
    likeness = {
        chunk.text: float(vector @ vectors[1])
        for chunk, vector in zip(everything, vectors, strict=True)
    }
    rest = [chunk for chunk in everything if chunk not in [*few, mill[1]]]
    assert (
        likeness[few[1].text]
        >= likeness[few[0].text]
        >= max(likeness[chunk.text] for chunk in rest)
    )


def test_the_embedded_model_is_the_default(town_dataset: Dataset) -> None:
    few = Similar()(town_dataset, town_dataset.documents[0][0], 0)
    assert town_dataset.documents[1][0] in few  # the bridge of the same town


def test_the_command_compares_the_papers_methods(
    tiny_decoder: Callable[..., Decoder],
    squad_article: Callable[..., dict[str, Any]],
    benchmark_json: Callable[..., Any],
    tmp_path: Path,
) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    articles = [
        squad_article(name, {"Arden": 1701, "Brook": 1802, "Corry": 1903})
        for name in ("mill", "bridge")
    ]
    (tmp_path / "squad.json").write_text(
        json.dumps({"version": "1.1", "data": articles}), encoding="utf-8"
    )
    given = (
        "eval",
        "--data",
        tmp_path / "squad.json",
        "--model",
        tmp_path / "model",
        "--answer-tokens",
        "4",
    )
    given = (*given, "--limit", "2", "--ratios", "0.15", "--out", tmp_path / "out")
    report = benchmark_json(*given)
    found = report["methods"]
    assert {f"{name}@0.15" for name in PER_CHUNK} | {"set_cache", "full_cache"} <= found.keys()
    assert abs(found["full_recompute"]["kl"]) <= 1e-6
    assert found["craft@0.15"]["kl_of_craft"] == pytest.approx(1.0)
    assert found["craft@0.15"]["kl_minus_craft"] == pytest.approx(0.0)
    assert found["full_cache"]["kl_of_craft"] is None
    assert found["full_cache"]["kl_of_full_cache"] == pytest.approx(1.0)
    assert {"quality.png", "ttft.png", "report.md"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert "(quality.png)" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert benchmark_json(*given) == report  # all of it is in the records
