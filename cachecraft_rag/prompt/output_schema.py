"""Constrained decoding: draw only tokens that can lead to JSON of a schema. llguidance keeps the grammar."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.checks import from_extra
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.prompt.finite_schema import has_finite_instance

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

# White space is fixed, because small models would fill the answer with it.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KEPT_GRAMMARS = 64  # schemas whose compiled grammar is kept
# Digits in a row of a number, then it must go on otherwise: small models would write 2.9000000… for ever.
_MAX_DIGITS = 16
_MAX_EXPONENT_DIGITS = 2
_DIGITS = frozenset(b"0123456789")
_OPEN_BY_OTHERS = frozenset(
    ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
)


class NumberLimit:
    """Counts the digits of the number that an answer is writing, over the JSON's bytes.

    >>> limit = NumberLimit()
    >>> limit.take(b'{"a1234567890123456": 2.9000000000000000')
    >>> limit.is_reached
    True
    """

    def __init__(self) -> None:
        self._in_string = False
        self._is_escaped = False
        self._in_exponent = False
        self._digits = 0

    @property
    def is_reached(self) -> bool:
        """True while a further digit would be too many: after 16 digits in a row, or 2 in an exponent."""
        return self._digits >= (_MAX_EXPONENT_DIGITS if self._in_exponent else _MAX_DIGITS)

    def take(self, text: bytes) -> None:
        """Count the next bytes of the answer. Any bytes are accepted, parts of a character too."""
        for byte in text:
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif byte == ord("\\"):
                    self._is_escaped = True
                elif byte == ord('"'):
                    self._in_string = False
            elif byte in _DIGITS:
                self._digits += 1
            else:
                self._in_string = byte == ord('"')
                is_exponent = byte in b"eE" and self._digits > 0
                is_sign = byte in b"+-" and self._in_exponent and self._digits == 0
                self._in_exponent = is_exponent or is_sign
                self._digits = 0


class Constraint:
    """The grammar of one answer, advanced to the tokens drawn so far.

    Args:
        matcher: llguidance's matcher, for this answer alone.
        vocabulary: llguidance's view of the tokenizer.
        digit_tokens: bool `[vocabulary]`: tokens that begin with a digit.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: LLTokenizer, digit_tokens: NDArray[np.bool_]
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._digit_tokens = digit_tokens
        self._numbers = NumberLimit()

    def mask(self, logits: Tensor) -> Tensor:
        """Return a copy of the logits, `[vocabulary]`, with -inf for tokens that the grammar does not allow next.

        After 16 digits of a number in a row (2 in an exponent), no digit is allowed unless the schema requires one.
        Raises ConfigError if the JSON can neither go on nor end.
        """
        import torch

        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._require_progress()
        count = min(len(logits), 8 * len(packed))
        allowed = np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)
        if self._numbers.is_reached:
            without_digits = allowed & ~self._digit_tokens[:count]
            if without_digits.any():  # the schema may require a longer number
                allowed = without_digits

        places = torch.from_numpy(allowed.nonzero()[0]).to(logits.device)
        masked = torch.full_like(logits, -torch.inf)
        masked[places] = logits[places]
        return masked

    def take(self, token: int) -> None:
        """Advance the grammar by a drawn token; raise ConfigError if it is not allowed, or the JSON cannot go on."""
        self._matcher.consume_token(token)
        self._numbers.take(self._vocabulary.decode_bytes([token]))
        self._require_progress()

    def _require_progress(self) -> None:
        matcher = self._matcher
        is_stuck = matcher.is_stopped() and not matcher.is_accepting()
        if is_stuck:
            raise ConfigError(
                "json_schema: the answer cannot be finished with this schema; look for parts that require themselves, "
                "or simplify it"
            )


class Constraints:
    """Makes constraints for one tokenizer. Thread-safe; the first one takes about half a second.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocabulary: width of the model's logits.
        end_tokens: ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._width = vocabulary
        self._end_tokens = sorted(end_tokens)
        self._grammar = lru_cache(_KEPT_GRAMMARS)(self._compiled)

    def json(self, schema: str) -> Constraint:
        """Return a new constraint, for one answer, to compact JSON of a schema, a text. The last 64 grammars are kept.

        An object with `properties` gets no others, unless it has `additionalProperties` or is combined with schemas.
        """
        grammar = self._grammar(schema)
        import llguidance

        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        return Constraint(matcher, self._vocabulary, self._digit_tokens)

    def _compiled(self, schema: str) -> str:
        with from_extra("structured", "A json_schema"):
            import llguidance

        options: Any = _COMPACT
        try:
            parsed = json.loads(schema)
            is_possible = has_finite_instance(parsed)
            grammar: str = ""
            if is_possible:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(
                    _closed(parsed), overrides=options
                )
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"json_schema: an answer cannot be kept to this schema: {error}"
            ) from error
        if not is_possible:
            raise ConfigError(
                "json_schema: no answer of finite length fits this schema. Either it allows no value at all, or a part "
                "of it requires itself: make that part optional"
            )
        problem = llguidance.LLMatcher.validate_grammar(grammar, self._vocabulary)
        if problem:
            raise ConfigError(
                f"json_schema: an answer cannot be kept to this schema: {problem.strip()}"
            )
        return grammar

    @cached_property
    def _digit_tokens(self) -> NDArray[np.bool_]:
        """Tokens that begin with a digit, bool `[vocabulary]`."""
        vocabulary = self._vocabulary
        texts = (vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size))
        return np.array([bool(text) and text[0] in _DIGITS for text in texts], dtype=np.bool_)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError("a json_schema needs a fast tokenizer, and the model has a slow one")
        width = max(self._width, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=width, eos_token=self._end_tokens)
        except ValueError as error:
            raise ConfigError(f"llguidance cannot read the model's tokenizer: {error}") from error


def asking_for(schema: str) -> str:
    """Return the end of a question that asks for JSON of a schema; the grammar alone would not explain the fields."""
    return f"\n\nAnswer in JSON of this schema: {schema}"


def _closed(schema: object) -> Any:
    """Forbid properties that the schema does not name; a small model would go on to invent some.

    >>> _closed({"properties": {"a": {}}})
    {'properties': {'a': {}}, 'additionalProperties': False}
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema

    closed: dict[str, object] = {}
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict):
            closed[name] = {key: _closed(part) for key, part in value.items()}
        elif name in ("const", "enum", "default", "examples"):
            closed[name] = value
        else:
            closed[name] = _closed(value)
    if "properties" in schema and _OPEN_BY_OTHERS.isdisjoint(schema):
        closed["additionalProperties"] = False
    return closed
