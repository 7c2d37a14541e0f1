"""Fitting a correction on documents: the halves, the pairs, the gain, and that exact answers stay exact with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cachecraft_rag.compute.correction import Correction
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.correction import (
    Documents,
    FitSettings,
    Gain,
    fit_correction,
    gain_in_answers,
    pairs,
    prompt_of,
    two_halves,
    unseen_questions,
)
from cachecraft_rag.evaluation.dataset import Dataset, Question
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types import Chunk, Progress

SETTINGS = FitSettings(prompts=24, passages=4)


def written(document: int, place: int) -> Chunk:
    draw = random.Random(f"{document}/{place}")
    words = ["river", "stone", "bridge", "mill", "year", "town", "built", "of", "the", "stands", "old", "water"]
    return Chunk(" ".join(draw.choices(words, k=12)) + f" {document}{place}.")


DOCUMENTS: Documents = [[written(document, place) for place in range(5)] for document in range(8)]


@pytest.fixture(scope="module")
def engine(tiny_decoder: Callable[..., Decoder], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("correction")
    with (
        ChunkCacheStore.open(folder / "caches", variants_per_chunk=1000) as store,
        Engine(tiny_decoder("Llama"), store, best_last=False) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def steps() -> list[Progress]:
    """Progress that `fitted` has reported."""
    return []


@pytest.fixture(scope="module")
def fitted(engine: Engine, steps: list[Progress]) -> tuple[Correction, Gain]:
    return fit_correction(engine, DOCUMENTS, SETTINGS, progress=steps.append)


def ids_of(documents: Documents) -> set[str]:
    return {chunk.chunk_id for document in documents for chunk in document}


def test_halves_share_no_document() -> None:
    uneven = [DOCUMENTS[0][:1], *DOCUMENTS[1:], []]
    first, second = two_halves(uneven, seed=3)
    assert not ids_of(first) & ids_of(second)
    assert ids_of(first) | ids_of(second) == ids_of(uneven)
    assert abs(sum(map(len, first)) - sum(map(len, second))) <= 4
    assert two_halves(uneven, seed=3) == (first, second)


def test_a_single_document_is_cut_in_the_middle() -> None:
    first, second = two_halves(DOCUMENTS[:1], seed=0)
    assert [*first[0], *second[0]] == list(DOCUMENTS[0])
    with pytest.raises(ConfigError, match="four chunks or more"):
        two_halves([DOCUMENTS[0][:3]], seed=0)


def test_prompts_are_of_one_document_and_of_any() -> None:
    draw = random.Random(0)
    for number in range(10):
        chunks = prompt_of(DOCUMENTS, 4, number, draw)
        assert len({chunk.chunk_id for chunk in chunks}) == 4
        if number % 2 == 0:
            assert any(ids_of([chunks]) <= ids_of([document]) for document in DOCUMENTS)


def test_a_chunk_is_computed_alone_and_behind_others(engine: Engine) -> None:
    chunks = DOCUMENTS[0][:3]
    found = list(pairs(engine, chunks))
    assert [one.chunk for one in found] == list(chunks[1:])
    system = len(engine.prompts.system.token_ids)
    first = len(engine.prompts.chunk_segment(chunks[0]).token_ids)
    for one in found:
        assert torch.allclose(one.alone[0], one.behind[0], atol=1e-5)  # the first layer sees no other token
        assert not torch.allclose(one.alone[1:], one.behind[1:], atol=1e-3)
    assert found[0].unseen.tolist() == pytest.approx(
        [first / (system + first + i) for i in range(len(found[0].unseen))]
    )


def test_it_lowers_the_error_on_documents_it_did_not_see(fitted: tuple[Correction, Gain]) -> None:
    _, gain = fitted
    assert gain.keys > 0.05
    assert gain.values > 0.05
    assert gain.tokens > 500


def test_progress_counts_every_prompt(fitted: tuple[Correction, Gain], steps: list[Progress]) -> None:
    assert fitted
    assert sorted({one.done for one in steps}) == list(range(31))  # 24 to fit on, 6 to measure, and the end
    assert {one.total for one in steps} == {30}
    assert any(one.what.startswith("expected to take 0:0") for one in steps[:2])


def test_a_stopped_fit_resumes_and_finds_the_same(
    engine: Engine, fitted: tuple[Correction, Gain], tmp_path: Path
) -> None:
    def stop(step: Progress) -> None:
        if step.done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_correction(engine, DOCUMENTS, SETTINGS, folder=tmp_path, progress=stop)
    found: list[Progress] = []
    correction, gain = fit_correction(engine, DOCUMENTS, SETTINGS, folder=tmp_path, progress=found.append)
    assert found[0].done == 20
    assert correction.checksum == fitted[0].checksum
    assert gain == fitted[1]
    other = replace(SETTINGS, seed=1)
    found.clear()
    fit_correction(engine, DOCUMENTS, other, folder=tmp_path, progress=found.append)
    assert found[0].done == 0  # sums with other settings do not count
    (tmp_path / "moments.safetensors").write_bytes(b"damaged")
    found.clear()
    fit_correction(engine, DOCUMENTS, other, folder=tmp_path, progress=found.append)
    assert found[0].done == 0


@pytest.mark.gate
@pytest.mark.parametrize("config", [ReuseConfig(recompute_ratio=1.0), ReuseConfig()], ids=["all recomputed", "exact"])
def test_exact_answers_stay_exact_bit_for_bit(
    engine: Engine, fitted: tuple[Correction, Gain], config: ReuseConfig
) -> None:
    """All tokens recomputed behind others; or reuse right behind the instruction, where nothing is recomputed."""
    chunks = DOCUMENTS[1][:3] if config.recompute_ratio else DOCUMENTS[1][:1]
    for chunk in chunks:  # captures each alone
        engine.score_answer("What?", [chunk], max_new_tokens=2)
    config = replace(config, capture=False)
    found = []
    for correction in (None, fitted[0]):
        engine.correction = correction
        found.append(engine.score_answer("What stands?", chunks, max_new_tokens=4, config=config))
    engine.correction = None
    assert found[1].stats.chunks[0].outcome == "exact"
    assert torch.equal(found[0].logits, found[1].logits)
    assert found[0].text == found[1].text


def test_a_correction_that_is_off_changes_nothing(engine: Engine, fitted: tuple[Correction, Gain]) -> None:
    chunks = DOCUMENTS[2][:3]
    for chunk in chunks:
        engine.score_answer("What?", [chunk], max_new_tokens=2)
    plain = ReuseConfig(capture=False, recompute_ratio=0.1)

    def logits(config: ReuseConfig, correction: Correction | None) -> torch.Tensor:
        engine.correction = correction
        try:
            return engine.score_answer("What stands?", chunks, target=[1, 2], max_new_tokens=2, config=config).logits
        finally:
            engine.correction = None

    without = logits(plain, None)
    assert torch.equal(logits(replace(plain, correction="off"), fitted[0]), without)
    assert not torch.equal(logits(plain, fitted[0]), without)


def test_the_gain_in_answers_is_of_questions_about_the_other_half(
    engine: Engine, fitted: tuple[Correction, Gain], tmp_path: Path
) -> None:
    questions = tuple(
        Question(f"q{number}", f"What of {number}?", tuple(document[:3]), ())
        for number, document in enumerate(DOCUMENTS)
    )
    dataset = Dataset("written", tuple(tuple(document) for document in DOCUMENTS), questions)
    asked = unseen_questions(dataset, seed=SETTINGS.seed)
    assert 2 <= len(asked) <= 6
    seen, _ = two_halves(dataset.documents, seed=SETTINGS.seed)
    assert not ids_of([one.passages for one in asked]) & ids_of(seen)
    found = gain_in_answers(engine, fitted[0], dataset, asked, answer_tokens=4, folder=tmp_path)
    assert gain_in_answers(engine, fitted[0], dataset, asked, answer_tokens=4, folder=tmp_path) == found
    engine.correction = None
    assert found.questions == len(asked)
    assert found.difference.mean == pytest.approx(found.learned - found.off)
    assert found.off > 0
    assert found.learned > 0


@pytest.mark.slow
def test_it_helps_the_demo_model_on_pages_it_did_not_see(demo_model: Path, tmp_path: Path, handbook: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted(handbook.glob("*.md"))]
    documents = [[Chunk(text[at : at + 600]) for at in range(0, len(text), 600)] for text in pages]
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(Decoder.load(str(demo_model), dtype="float32"), store) as engine,
    ):
        _, gain = fit_correction(engine, documents, FitSettings(prompts=8, passages=4))
    assert gain.keys > 0.2
    assert gain.values > 0.03
