"""Origin conditions: how each chunk is captured, and the stream of questions that captures as in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.evaluation.origins import CONDITIONS, Origins, condition_named
from cachecraft_rag.prompt.builder import STAND_IN
from cachecraft_rag.serving.priming import prime_documents
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.types.documents import Chunk


def unrelated(dataset: Dataset, chunk: Chunk, seed: int = 0) -> Sequence[Chunk]:
    assert CONDITIONS["unrelated"].origin_prefix is not None
    return CONDITIONS["unrelated"].origin_prefix(dataset, chunk, seed)


def origin_prefixes(engine: Engine, dataset: Dataset, chunk: Chunk) -> list[list[Chunk]]:
    """Chunks between the instruction and this chunk, for each of its captures."""
    chunks = [chunk for document in dataset.documents for chunk in document]
    known = {chunk.chunk_id: chunk for chunk in (*chunks, Chunk(STAND_IN))}
    rows = engine.store.rows(RowFilter(chunk_ids=(chunk.chunk_id,)))
    return [[known[name] for name in row.variant.key.origin_prefix[1:]] for row in rows]


def test_unrelated_chunks_are_drawn_from_other_documents_by_the_seed(town_dataset: Dataset) -> None:
    mill, bridge = town_dataset.documents
    drawn = {seed: [unrelated(town_dataset, chunk, seed) for chunk in mill] for seed in range(5)}
    assert drawn[0] == [unrelated(town_dataset, chunk) for chunk in mill]
    assert drawn[0] != drawn[1]
    prefixes = [prefix for of_seed in drawn.values() for prefix in of_seed]
    assert {len(prefix) for prefix in prefixes} == {1, 2}
    assert all(chunk in bridge for prefix in prefixes for chunk in prefix)


def test_one_document_has_nothing_unrelated(town_dataset: Dataset) -> None:
    alone = replace(
        town_dataset, documents=town_dataset.documents[:1], questions=town_dataset.questions[:1]
    )
    with pytest.raises(ConfigError, match="choose another origin"):
        unrelated(alone, alone.documents[0][0])


def test_an_unknown_condition_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="choose one of documents, stream, neighbours, alone, unrelated"
    ):
        condition_named("somehow")


@pytest.mark.parametrize(
    "name", [name for name, condition in CONDITIONS.items() if condition.origin_prefix]
)
def test_each_chunk_is_captured_once_after_the_prefix_of_the_condition(
    evaluation_engine: Engine, town_dataset: Dataset, name: str
) -> None:
    engine, condition = evaluation_engine, CONDITIONS[name]
    origins = Origins(condition, engine, town_dataset, 3, 4)
    for question in town_dataset.questions:
        origins.before(question)
        origins.after(question)
    assert condition.origin_prefix is not None
    asked = {
        chunk.chunk_id: chunk for question in town_dataset.questions for chunk in question.passages
    }
    for chunk in asked.values():
        prefix = condition.origin_prefix(town_dataset, chunk, 3)
        assert origin_prefixes(engine, town_dataset, chunk) == [list(prefix)]
    assert len(list(engine.store.rows())) == len(asked) + 1


def test_documents_are_captured_as_prime_captures_them(
    evaluation_engine: Engine, town_dataset: Dataset, tmp_path: Path
) -> None:
    origins = Origins(CONDITIONS["documents"], evaluation_engine, town_dataset, 0, 4)
    for question in town_dataset.questions:
        origins.before(question)
        origins.after(question)
    captured = sorted(
        (row.variant.variant_id, row.variant.primed) for row in evaluation_engine.store.rows()
    )
    with (
        ChunkCacheStore.open(tmp_path / "primed") as store,
        Engine(evaluation_engine.decoder, store, new_variants="off") as engine,
    ):
        texts = [
            (str(number), list(document)) for number, document in enumerate(town_dataset.documents)
        ]
        prime_documents(engine.primer(), texts, skipped=pytest.fail)
        primed = sorted((row.variant.variant_id, row.variant.primed) for row in store.rows())
    assert captured == primed


def test_primed_chunks_that_no_question_asks_for_are_not_kept(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    few = replace(town_dataset, questions=town_dataset.questions[:1])
    origins = Origins(CONDITIONS["documents"], evaluation_engine, few, 0, 4)
    (question,) = few.questions
    origins.before(question)
    origins.before(question)
    kept = {row.variant.key.chunk_id for row in evaluation_engine.store.rows()}
    system = evaluation_engine.prompts.system.segment_id
    assert kept == {system, *(chunk.chunk_id for chunk in question.passages)}


def test_in_the_stream_a_chunk_is_captured_where_it_is_first_asked_for(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    engine = evaluation_engine
    origins = Origins(CONDITIONS["stream"], engine, town_dataset, 0, 4)
    first = town_dataset.questions[0]
    origins.before(first)
    assert not list(engine.store.rows())
    origins.after(first)
    for place, chunk in enumerate(first.passages):
        assert origin_prefixes(engine, town_dataset, chunk) == [list(first.passages[:place])]
    before = len(list(engine.store.rows()))
    origins.after(first)  # all exact now
    assert len(list(engine.store.rows())) == before
