"""Tokenise untrusted text without control tokens.

A control token opens or closes a turn, a reasoning block or a tool call. Most are *special* tokens of the tokenizer,
but many models have some that are added and not special (`<｜User｜>` of DeepSeek-R1's distillations), and
transformers' `split_special_tokens` ignores those.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from typing import Any


class PlainTokenizer:
    """Turns text into token ids; names of control tokens in it become ordinary characters. Thread-safe.

    Control tokens are all special tokens and all other added tokens, except white space (Phi has tokens for runs of
    spaces) and plain words that do not occur in the chat template (an application's words). Rejected: only tokens in
    the template; templates build role tokens from parts that appear in no rendering.

    Args:
        tokenizer: a transformers tokenizer; a copy is made.
        template: the chat template's text, followed by renderings of it.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        control = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or _may_control(token.content, template)
        }
        # Control tokens may also be entries of the ordinary vocabulary. The unknown token represents real text.
        self._control = frozenset(control) - {tokenizer.unk_token_id}

        contents = [re.escape(content) for content in control.values() if content]
        contents.sort(key=len, reverse=True)
        self._pattern = re.compile("|".join(contents)) if contents else None

        self._slow: Any = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            self._slow = copy.deepcopy(tokenizer)
            return

        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:  # all are kept, because the ids depend on the order
            token["special"] = token["id"] in control
        state["padding"] = None
        state["truncation"] = None
        self._backend = type(backend).from_str(json.dumps(state))
        self._backend.encode_special_tokens = True

    def ids(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added before or after and without control tokens; [] for "".

        The text must be valid Unicode: for half a surrogate pair tokenizers raise an error, TypeError in most cases.
        """
        if self._slow is not None:
            return self._slow_ids(text)

        encoding = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._control.isdisjoint(ids):
            return ids

        spans = [
            span
            for token, span in zip(ids, encoding.offsets, strict=True)
            if token in self._control
        ]
        pieces = _cut(text, spans)
        is_uncut = max(len(piece) for piece in pieces) == len(text)
        if is_uncut:
            return [token for token in ids if token not in self._control]
        return [token for piece in pieces for token in self.ids(piece)]

    def _slow_ids(self, text: str) -> list[int]:
        """Return the ids from a slow tokenizer, which splits all added tokens but reports no offsets."""
        spans: list[tuple[int, int]] = []
        if self._pattern is not None:
            spans = [match.span() for match in self._pattern.finditer(text)]

        ids: list[int] = []
        for piece in _cut(text, spans):
            encoded = self._slow(piece, add_special_tokens=False, split_special_tokens=True)
            ids += encoded["input_ids"]
        return [token for token in ids if token not in self._control]


def _may_control(content: str, template: str) -> bool:
    """Return True if an added token that is not special may be a control token."""
    text = content.replace("\u2581", " ")  # SentencePiece's sign for a space
    if not text.strip():
        return False
    return content in template or not text.strip().isalnum()


def _cut(text: str, spans: Iterable[tuple[int, int]]) -> list[str]:
    """Cut the text in the middle of each span; a span of one character is removed."""
    pieces = []
    begin = 0
    for start, stop in spans:
        middle = (start + stop) // 2
        pieces.append(text[begin:middle])
        begin = middle if stop - start > 1 else stop
    pieces.append(text[begin:])
    return [piece for piece in pieces if piece] or [""]
