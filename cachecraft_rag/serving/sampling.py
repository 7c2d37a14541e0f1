"""From logits to text: how tokens are drawn, turned into text as they come, and stopped at stop strings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from cachecraft_rag.checks import FINITE, MOST, check_kind, check_number, check_text, check_whole, listed, shown
from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from cachecraft_rag.prompt.output_schema import Constraint

JSONSchema = str | Mapping[str, Any] | type  # as text, as a dict, or of a pydantic model


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings for drawing the answer's tokens.

    max_new_tokens  longest answer, in tokens
    temperature     randomness of the draw, 0 takes the most likely token each time
    top_p           sample from the likeliest tokens with this probability together (nucleus)
    seed            seed of the draw, makes sampled answers repeatable; None = a new one each time
    stop            texts that end the answer and are not part of it
    json_schema     JSON schema that the answer keeps to, also as a dict or a pydantic model; kept as JSON text. The
                    answer is whole unless it ends at `max_new_tokens`. Needs the extra "structured"
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
    """A JSON schema as text. Raises ConfigError.

    >>> _schema_text({"type": "integer"})
    '{"type": "integer"}'
    """
    of_model = getattr(schema, "model_json_schema", None)
    try:
        found = of_model() if of_model is not None else json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(found, Mapping):
            return json.dumps(dict(found), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema cannot be read as JSON: {error}") from error
    raise ConfigError(f"json_schema must be a JSON schema (a dict, its text, or a pydantic model), not {shown(schema)}")


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` by name, as a question may bring them; `max_tokens` is `max_new_tokens`."""

    max_tokens: int
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: str | Sequence[str]
    json_schema: JSONSchema | None


def sampling_from(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a question with those of `SamplingOptions` put together as `sampling`; the others are unchanged.

    They override the fields of a `sampling` that is there already. Raises ConfigError for values out of range.

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
            raise ConfigError("max_tokens and max_new_tokens mean the same: give one of them")
        given["max_new_tokens"] = given.pop("max_tokens")
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    base = rest.get("sampling")
    check_kind("sampling", base, SamplingParams, optional=True, advice="write SamplingParams(temperature=…)")
    rest["sampling"] = replace(base or SamplingParams(), **given)
    return rest


class Sampler:
    """Draws tokens as `SamplingParams` says; the same seed draws the same tokens from the same logits.

    Args:
        constraint: of this answer, if it keeps to a grammar.
    """

    def __init__(self, params: SamplingParams, constraint: Constraint | None = None) -> None:
        import torch

        self._params, self._constraint = params, constraint
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def draw(self, logits: Tensor) -> int:
        """One token id from `[vocabulary]` logits."""
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
            before = ordered.cumsum(0) - ordered  # a token stays when those before it have not reached top_p
            shares = torch.zeros_like(shares).scatter(0, ids, ordered * (before < self._params.top_p))
        return int(torch.multinomial(shares, 1, generator=self._generator))


class TextStream:
    """Turns token ids into text piece by piece.

    A piece is given out once no later token can change it: bytes of an unfinished character and a possible beginning
    of a stop string are held back. `text` is everything given out so far.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._anchor = 0  # where the last piece that had any text begins
        self._settled = 0  # the ids before it are text for good
        self._pending = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one more token; returns the text that is now certain (possibly empty)."""
        self._ids.append(token)
        fresh = self._fresh()
        if fresh.endswith("\ufffd"):  # in the middle of a character
            return ""
        self._settle(fresh)
        return self._release(final=False)

    def finish(self) -> str:
        """The rest that was held back."""
        self._settle(self._fresh())
        return self._release(final=True)

    def _fresh(self) -> str:
        """The text of the ids that are not settled.

        The piece before them is decoded along, because tokenizers drop a space at the beginning. Whole pieces, not a
        number of tokens: a decoder that starts in the middle of a character garbles the next one too.
        """
        known = self._decode(self._ids[self._anchor : self._settled])
        return self._decode(self._ids[self._anchor :])[len(known) :]

    def _settle(self, fresh: str) -> None:
        if fresh:
            self._anchor = self._settled
        self._settled = len(self._ids)
        self._pending += fresh

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, *, final: bool) -> str:
        if self.stopped:
            return ""
        cuts = [place for word in self._stop if (place := self._pending.find(word)) >= 0]
        if cuts:
            self.stopped = True
            piece, self._pending = self._pending[: min(cuts)], ""
        else:
            held = 0 if final else max((_overlap(self._pending, word) for word in self._stop), default=0)
            cut = len(self._pending) - held
            piece, self._pending = self._pending[:cut], self._pending[cut:]
        self.text += piece
        return piece


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that begins `word`.

    >>> _overlap("the en", "end"), _overlap("the end", "xyz")
    (2, 0)
    """
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-n:])), 0)
