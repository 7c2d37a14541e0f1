"""Constrained decoding: answers that keep to a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.prompt.output_schema import Constraints
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types import Chunk
from tests.engines import Asking, until
from tests.serving.test_step_loop import FULL, decoded, held

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_keep_to_a_schema_also_while_others_are_decoded(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, temperature: float
) -> None:
    """Random models write random bytes; every other answer keeps to the schema, and the rest is as it is alone."""
    chunks = [Chunk("The kettle stands in the kitchen. " * 3)]
    free = SamplingParams(max_new_tokens=60, temperature=temperature, seed=3)
    kept = SamplingParams(max_new_tokens=120, temperature=temperature, seed=3, json_schema=PERSON)
    with ChunkCacheStore.open(tmp_path) as store, Engine(tiny_decoder("Llama"), store) as engine:
        questions = [(f"Who is number {number}?", kept if number % 2 else free) for number in range(6)]
        alone = [
            "".join(engine.stream(question, chunks, sampling=sampling, config=FULL)) for question, sampling in questions
        ]
        with held(engine):
            together = [Asking(engine, chunks, question, sampling=one, config=FULL) for question, one in questions]
            until(lambda: engine.loop._inbox.qsize() >= len(together))
        ended = [one.ended() for one in together]
        rows, forwards, _ = decoded(engine)
    assert rows > forwards, "some were decoded together"
    assert [answer.text for answer in ended] == alone
    for answer, (_, sampling) in zip(ended, questions, strict=True):
        if sampling is kept:
            found = json.loads(answer.text)
            assert set(found) == {"name", "age"}
            assert len(found["name"]) <= 8
            assert found["age"] <= 150
            assert answer.stats.finish == "end"


class _Person(BaseModel):
    name: str
    tags: list[str] = []


@pytest.mark.parametrize(
    "schema", [PERSON, json.dumps(PERSON), _Person], ids=["a dict", "its text", "a pydantic model"]
)
def test_a_schema_is_kept_as_text(schema: Any) -> None:
    params = SamplingParams(json_schema=schema)
    assert "name" in json.loads(str(params.json_schema))["properties"]
    assert hash(params)


@pytest.mark.parametrize("schema", [5, "no JSON", "[1]", {"a": {1, 2}}, object])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigError, match="json_schema"):
        SamplingParams(json_schema=schema)


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"properties": {"a": {"$ref": "#/no"}}}, {"not": {"type": "string"}}]
)
def test_a_schema_that_cannot_be_kept_to_is_refused_at_once(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, schema: Any
) -> None:
    with (
        ChunkCacheStore.open(tmp_path) as store,
        Engine(tiny_decoder("Llama"), store) as engine,
        pytest.raises(ConfigError, match="cannot be kept to this schema"),
    ):
        engine.stream("Who?", [], sampling=SamplingParams(json_schema=schema))


def test_nothing_but_the_end_follows_the_json(byte_tokenizer: Any) -> None:
    constraint = Constraints(byte_tokenizer, 300, {256, 258}).json('{"const": 1}')
    logits = torch.zeros(300)
    assert constraint.mask(logits).isfinite().nonzero().flatten().tolist() == byte_tokenizer("1")["input_ids"]
    constraint.take(byte_tokenizer("1")["input_ids"][0])
    assert constraint.mask(logits).isfinite().nonzero().flatten().tolist() == [256, 258]
