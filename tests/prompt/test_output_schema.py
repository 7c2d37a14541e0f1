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
from cachecraft_rag.prompt import output_schema
from cachecraft_rag.prompt.finite_schema import has_finite_instance
from cachecraft_rag.prompt.output_schema import Constraints
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from tests.engines import Asking, until
from tests.serving.test_step_loop import FULL, decoded, held

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 150},
    },
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
        questions = [
            (f"Who is number {number}?", kept if number % 2 else free) for number in range(6)
        ]
        alone = [
            "".join(engine.stream(question, chunks, sampling=sampling, config=FULL))
            for question, sampling in questions
        ]
        with held(engine):
            together = [
                Asking(engine, chunks, question, sampling=one, config=FULL)
                for question, one in questions
            ]
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


class _Unwritable(BaseModel):
    """A function has no JSON schema."""

    run: Callable[[int], int]


@pytest.mark.parametrize("schema", [5, "no JSON", "[1]", {"a": {1, 2}}, object, _Unwritable])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigError, match="json_schema"):
        SamplingParams(json_schema=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": [["string"]]},
        {"type": "object", "required": [["a"]]},
        {"properties": {"a": {"$ref": "#/no"}}},
        {"not": {"type": "string"}},
    ],
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
    assert (
        constraint.mask(logits).isfinite().nonzero().flatten().tolist()
        == byte_tokenizer("1")["input_ids"]
    )
    constraint.take(byte_tokenizer("1")["input_ids"][0])
    assert constraint.mask(logits).isfinite().nonzero().flatten().tolist() == [256, 258]


NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/node"}},
}
ENDLESS: dict[str, Any] = {
    "a node that requires the next": {
        "$ref": "#/$defs/node",
        "$defs": {"node": NODE | {"required": ["next"]}},
    },
    "itself": {"$ref": "#"},
    "a list with at least one such list": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "two that require each other": {
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1},
        },
        "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    },
    "nothing but properties like it": {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"$ref": "#"},
    },
}
FINITE: dict[str, Any] = {
    "a node that may have a next": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "a list of such lists": {"type": "array", "items": {"$ref": "#"}},
    "a next that may be null": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "a reference that is defined after its use": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "required": ["a"],
        "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"enum": [1]}},
    },
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_a_schema_without_a_finite_instance_is_refused(byte_tokenizer: Any, schema: Any) -> None:
    assert not has_finite_instance(schema)
    with pytest.raises(ConfigError, match="of finite length") as refused:
        Constraints(byte_tokenizer, 300, {256, 258}).json(json.dumps(schema))
    assert str(refused.value).count("json_schema") == 1


@pytest.mark.parametrize("schema", FINITE.values(), ids=FINITE)
def test_recursion_that_can_end_is_allowed(byte_tokenizer: Any, schema: Any) -> None:
    assert has_finite_instance(schema)
    assert Constraints(byte_tokenizer, 300, {256, 258}).json(json.dumps(schema))


def test_an_answer_that_can_neither_go_on_nor_end_is_an_error(
    byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar gives up on a schema that the check has let through."""
    monkeypatch.setattr(output_schema, "has_finite_instance", lambda _schema: True)
    schema = json.dumps({"type": "array", "items": {"$ref": "#"}, "minItems": 1})
    constraint = Constraints(byte_tokenizer, 300, {256, 258}).json(schema)
    (bracket,) = byte_tokenizer("[")["input_ids"]

    def write() -> None:
        for _ in range(3):
            constraint.mask(torch.zeros(300))
            constraint.take(bracket)

    with pytest.raises(ConfigError, match="cannot be finished"):
        write()


def written(byte_tokenizer: Any, schema: Any, wanted: str) -> str:
    """The answer of a model that would write this text, and goes on with nines."""
    constraint = Constraints(byte_tokenizer, 300, {256, 258}).json(json.dumps(schema))
    ids: list[int] = []
    for token in [*byte_tokenizer(wanted)["input_ids"], *byte_tokenizer("9" * 60)["input_ids"]]:
        logits = torch.zeros(300)
        logits[token] = 1.0
        ids.append(int(constraint.mask(logits).argmax()))
        constraint.take(ids[-1])
        if ids[-1] in (256, 258):
            break
    text: str = byte_tokenizer.decode([token for token in ids if token < 256])
    return text


@pytest.mark.parametrize("start", ["2.9", "-3", "0.", "1e", "1.5E-"])
def test_numbers_end_after_some_digits(byte_tokenizer: Any, start: str) -> None:
    text = written(byte_tokenizer, {"type": "number"}, start)
    assert text.startswith(start)
    assert len(text) <= 40
    assert abs(float(json.loads(text))) < 1e120


def test_digits_in_texts_and_required_digits_are_not_counted(byte_tokenizer: Any) -> None:
    digits = "1" * 40
    assert written(byte_tokenizer, {"const": digits}, f'"{digits}"') == f'"{digits}"'
    least = {"type": "integer", "minimum": 10**17, "maximum": 10**18}
    assert 10**17 <= json.loads(written(byte_tokenizer, least, "9")) <= 10**18


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "multipleOf": 10**30}, "multipleOf is .*below 2\\*\\*63"),
        ({"enum": [1, -(2**70)]}, "below 2"),
        ({"const": "\ud800"}, "valid Unicode"),
        ('{"const": "\\ud800"}', "valid Unicode"),
        ({"properties": {"\udfff": {}}}, "valid Unicode"),
        ({"minimum": float("nan")}, "json_schema"),
    ],
)
def test_values_that_json_schemas_cannot_hold_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(json_schema=schema)


def test_a_schema_that_is_too_deep_is_a_clear_error(byte_tokenizer: Any) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ConfigError, match="json_schema"):
        SamplingParams(json_schema=schema)
    deep = '{"items": ' * 800 + "true" + "}" * 800
    with pytest.raises(ConfigError, match="json_schema"):
        Constraints(byte_tokenizer, 300, {256, 258}).json(deep)
