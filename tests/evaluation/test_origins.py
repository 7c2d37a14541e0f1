"""Origin conditions: what each chunk is captured behind, once, and the stream of questions that captures as in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.evaluation.origins import CONDITIONS, Origins, condition_named
from cachecraft_rag.prompt.builder import STAND_IN
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.types import Chunk


def unrelated(dataset: Dataset, chunk: Chunk, seed: int = 0) -> Sequence[Chunk]:
    assert CONDITIONS["unrelated"].behind is not None
    return CONDITIONS["unrelated"].behind(dataset, chunk, seed)


def captured_behind(engine: Engine, dataset: Dataset, chunk: Chunk) -> list[list[Chunk]]:
    """Chunks between the instruction and this chunk, for each of its captures."""
    known = {one.chunk_id: one for document in (*dataset.documents, [Chunk(STAND_IN)]) for one in document}
    rows = engine.store.rows(RowFilter(chunk_ids=(chunk.chunk_id,)))
    return [[known[name] for name in row.variant.key.origin_prefix[1:]] for row in rows]


def test_unrelated_ones_come_from_other_documents_by_the_seed(town_dataset: Dataset) -> None:
    mill, bridge = town_dataset.documents
    found = {seed: [unrelated(town_dataset, chunk, seed) for chunk in mill] for seed in range(5)}
    assert found[0] == [unrelated(town_dataset, chunk) for chunk in mill]
    assert found[0] != found[1]
    drawn = [few for of_seed in found.values() for few in of_seed]
    assert {len(few) for few in drawn} == {1, 2}
    assert all(chunk in bridge for few in drawn for chunk in few)


def test_one_document_has_nothing_unrelated(town_dataset: Dataset) -> None:
    alone = replace(town_dataset, documents=town_dataset.documents[:1], questions=town_dataset.questions[:1])
    with pytest.raises(ConfigError, match="choose another origin"):
        unrelated(alone, alone.documents[0][0])


def test_an_unknown_condition_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choose one of unrelated, neighbours, alone, stream"):
        condition_named("somehow")


@pytest.mark.parametrize("name", [name for name, one in CONDITIONS.items() if one.behind is not None])
def test_each_chunk_is_captured_once_behind_what_the_condition_says(
    evaluation_engine: Engine, town_dataset: Dataset, name: str
) -> None:
    engine, condition = evaluation_engine, CONDITIONS[name]
    origins = Origins(condition, engine, town_dataset, 3, 4)
    for question in town_dataset.questions:
        origins.before(question)
        origins.after(question)
    assert condition.behind is not None
    asked = {chunk.chunk_id: chunk for question in town_dataset.questions for chunk in question.passages}
    for chunk in asked.values():
        assert captured_behind(engine, town_dataset, chunk) == [list(condition.behind(town_dataset, chunk, 3))]
    assert len(list(engine.store.rows())) == len(asked) + 1


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
        assert captured_behind(engine, town_dataset, chunk) == [list(first.passages[:place])]
    before = len(list(engine.store.rows()))
    origins.after(first)  # all exact now
    assert len(list(engine.store.rows())) == before
