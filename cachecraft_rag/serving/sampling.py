"""Settings of an answer's sampling, and drawing tokens from logits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

from cachecraft_rag.checks import (
    FINITE,
    MOST,
    check_kind,
    check_number,
    check_text,
    check_whole,
    listed,
    refuses_other_names,
    shown,
)
from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from cachecraft_rag.prompt.output_schema import Constraint

JSONSchema = str | Mapping[str, object] | type  # as text, as a dict, or as a pydantic model


@refuses_other_names(
    what="sampling setting", hints=MappingProxyType({"max_tokens": "max_new_tokens"})
)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings for drawing the answer's tokens.

    max_new_tokens  longest answer, in tokens
    temperature     randomness of the draw; 0 takes the most likely token each time
    top_p           sample from the likeliest tokens with this probability together (nucleus)
    seed            seed of the draw, which makes sampled answers repeatable; None = a new seed each time
    stop            texts that end the answer and are not part of it
    json_schema     JSON schema that the answer keeps to, also as a dict or a pydantic model; kept as JSON text. The
                    answer is whole unless it ends at `max_new_tokens`. Needs the extra "structured"

    Whether answers can be kept to the schema is checked with the question.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: JSONSchema | None = None

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        object.__setattr__(self, "stop", tuple(listed("stop", self.stop)))
        check_whole("max_new_tokens", self.max_new_tokens, least=1)
        check_number("temperature", self.temperature, most=FINITE)
        check_number("top_p", self.top_p, above=True, most=1)
        check_whole("seed", self.seed, least=-MOST - 1, optional=True)
        for text in self.stop:
            check_text("each text of stop", text, empty=False)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))


def _schema_text(schema: object) -> str:
    """Return a JSON schema as text.

    >>> _schema_text({"type": "integer"})
    '{"type": "integer"}'
    """
    pydantic_schema = getattr(schema, "model_json_schema", None)
    parsed: object = schema
    text = ""
    try:
        if pydantic_schema is not None:
            parsed = pydantic_schema()
        elif isinstance(schema, str):
            parsed = json.loads(schema)
        if isinstance(parsed, Mapping):
            text = json.dumps(dict(parsed), ensure_ascii=False, allow_nan=False)
    # pydantic's errors about a model without a JSON schema are RuntimeErrors
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"json_schema cannot be read as JSON: {error}") from error
    if not isinstance(parsed, Mapping):
        raise ConfigError(
            f"json_schema must be a JSON schema (a dict, its text, or a pydantic model), not {shown(schema)}"
        )
    check_text("the text of json_schema", text)
    _check_numbers(parsed)
    return text


def _check_numbers(schema: object) -> None:
    """Raise ConfigError for a whole number that readers of JSON schemas cannot hold."""
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if isinstance(value, int) and abs(value) > MOST:
                raise ConfigError(
                    f"json_schema: {name} is {shown(value)}; whole numbers must be below 2**63"
                )
            _check_numbers(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            _check_numbers({"a value": value} if isinstance(value, int) else value)


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams` that may be given with a question by name; `max_tokens` means `max_new_tokens`."""

    max_tokens: int
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: str | Sequence[str]
    json_schema: JSONSchema | None


def check_sampling(sampling: object) -> None:
    """Raise ConfigError unless this is None or `SamplingParams`."""
    check_kind(
        "sampling",
        sampling,
        SamplingParams,
        optional=True,
        advice="write SamplingParams(temperature=…)",
    )


def sampling_from(options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the options in which those of `SamplingOptions` are replaced by one `sampling`.

    They override the fields of a given `sampling`; other options stay. None counts as given, which only `seed` and
    `json_schema` may be. Raises ConfigError for both `max_tokens` and `max_new_tokens`.

    >>> sampling_from({"max_tokens": 5, "stop": "END", "session": "ada"})["sampling"].stop
    ('END',)
    >>> sampling_from({"session": "ada"})
    {'session': 'ada'}
    """
    rest = dict(options)
    given = {name: rest.pop(name) for name in SamplingOptions.__annotations__ if name in rest}
    if not given:
        return rest

    if "max_tokens" in given:
        if "max_new_tokens" in given:
            raise ConfigError("max_tokens and max_new_tokens mean the same: give only one of them")
        given["max_new_tokens"] = given.pop("max_tokens")
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)

    base = rest.get("sampling")
    check_sampling(base)
    rest["sampling"] = replace(base or SamplingParams(), **given)
    return rest


class Sampler:
    """Draws tokens according to `SamplingParams`; the same seed draws the same tokens from the same logits.

    `constraint` is the grammar of this answer, if it keeps to one.
    """

    def __init__(self, params: SamplingParams, constraint: Constraint | None = None) -> None:
        import torch

        self._params = params
        self._constraint = constraint
        self._generator = torch.Generator()
        if params.seed is not None:
            self._generator.manual_seed(params.seed)
        elif params.temperature > 0.0:  # reads /dev/urandom, which takes a free file descriptor
            self._generator.seed()

    def draw(self, logits: Tensor) -> int:
        """Return the next token's id, drawn from its logits `[vocabulary]`; with temperature 0 the likeliest.

        ConfigError if the answer's grammar lets it neither go on nor end.
        """
        if self._constraint is None:
            return self._drawn(logits)
        token = self._drawn(self._constraint.mask(logits))
        self._constraint.take(token)
        return token

    def _drawn(self, logits: Tensor) -> int:
        import torch

        if self._params.temperature == 0.0:
            return int(logits.argmax())

        logits = logits.double().cpu()  # float32 has no room for the smallest temperatures
        shares = torch.softmax((logits - logits.max()) / self._params.temperature, dim=-1)
        if self._params.top_p < 1.0:
            ordered, ids = shares.sort(descending=True)
            share_before = ordered.cumsum(0) - ordered
            # the likelier tokens have not reached top_p
            is_in_nucleus = share_before < self._params.top_p
            shares = torch.zeros_like(shares).scatter(0, ids, ordered * is_in_nucleus)
        return int(torch.multinomial(shares, 1, generator=self._generator))
