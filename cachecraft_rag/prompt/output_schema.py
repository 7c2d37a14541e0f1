"""Constrained decoding: draw only tokens that can lead to JSON of a schema. llguidance keeps the grammar."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# White space is fixed, because small models would fill the answer with it.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KEPT_GRAMMARS = 64  # schemas whose compiled grammar is kept
_OPEN_BY_OTHERS = frozenset(("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"))


class Constraint:
    """The grammar of one answer, advanced to the tokens drawn so far.

    Args:
        matcher: llguidance's matcher, for this answer alone.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, logits: Tensor) -> Tensor:
        """Return `[vocabulary]` logits with -inf for tokens that the grammar does not allow next.

        Once the JSON is complete, only the tokens that end the text are allowed.
        """
        import torch

        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        count = min(len(logits), 8 * len(packed))
        allowed = torch.from_numpy(np.unpackbits(packed, count=count, bitorder="little"))
        places = allowed.nonzero()[:, 0].to(logits.device)
        masked = torch.full_like(logits, -torch.inf)
        masked[places] = logits[places]
        return masked

    def take(self, token: int) -> None:
        """Advance the grammar by a token that was drawn."""
        self._matcher.consume_token(token)


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
        """Return a new constraint to JSON of a schema. Raises ConfigError if no answer can be kept to the schema."""
        grammar = self._grammar(schema)
        import llguidance

        return Constraint(llguidance.LLMatcher(self._vocabulary, grammar, log_level=0))

    def _compiled(self, schema: str) -> str:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                'a json_schema needs llguidance, which is not installed: pip install "cachecraft-rag[structured]"'
            ) from error

        options: Any = _COMPACT
        closed = _closed(json.loads(schema))
        grammar: str = llguidance.LLMatcher.grammar_from_json_schema(closed, overrides=options)
        problem = llguidance.LLMatcher.validate_grammar(grammar, self._vocabulary)
        if problem:
            raise ConfigError(f"json_schema: an answer cannot be kept to this schema: {problem.strip()}")
        return grammar

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError("a json_schema needs a fast tokenizer, and the model has a slow one")
        width = max(self._width, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, n_vocab=width, eos_token=self._end_tokens)


def asking_for(schema: str) -> str:
    """Return the end of a question that asks for JSON of a schema.

    Constrained decoding alone would not tell the model what the fields mean.
    """
    return f"\n\nAnswer in JSON of this schema: {schema}"


def _closed(schema: Any) -> Any:
    """Forbid properties that the schema does not name; a small model would go on to invent some.

    >>> _closed({"properties": {"a": {}}})
    {'properties': {'a': {}}, 'additionalProperties': False}
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema

    closed: dict[str, Any] = {}
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
