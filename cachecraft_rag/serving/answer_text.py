"""The text of an answer, from its tokens: decoded as they arrive, and ended at stop strings."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

from cachecraft_rag.observability.stats import Finish
from cachecraft_rag.serving.request import Request, RequestProgress
from cachecraft_rag.serving.sampling import SamplingParams


class AnswerText:
    """Turns an answer's tokens into text piece by piece, and says where the answer ends.

    A piece is given out once no later token can change it: bytes of an unfinished character and a possible beginning
    of a stop string are held back.

    Args:
        sampling: its stop strings and its longest answer.
        tokenizer: a transformers tokenizer.
        end_tokens: ids that end an answer and are not part of it.

    Attributes:
        generated: number of tokens so far, without an end token.
        finish: how the answer ended; None while it goes on.
    """

    def __init__(
        self, sampling: SamplingParams, tokenizer: Any, end_tokens: Container[int]
    ) -> None:
        self._stop = sampling.stop
        self._max_tokens = sampling.max_new_tokens
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._ids: list[int] = []
        self._anchor = 0  # index of the first token of the last piece that had any text
        self._settled = 0  # number of tokens whose text is final
        self._pending = ""  # final text that may begin a stop string
        self.generated = 0
        self.finish: Finish | None = None

    def take(self, token: int) -> str:
        """Take a further token id, while `finish` is None; return the text that is now certain, or "" if none is.

        Sets `finish` if the answer ends with this token: "stop" at a stop string, which is not returned, "end" at one
        of the end tokens, "length" at the longest answer.
        """
        if token in self._end_tokens:
            self.finish = self.finish or "end"
            return self.rest()

        self.generated += 1
        text = self._push(token)
        if self.generated == self._max_tokens and self.finish is None:
            self.finish = "length"
            text += self.rest()
        return text

    def rest(self) -> str:
        """End the answer ("length" if it goes on); return text held back, but no stop string or part of a character."""
        self._settle(_without_unfinished(self._unsettled_text()))
        text = self._release(is_final=True)
        self.finish = self.finish or "length"
        return text

    def _push(self, token: int) -> str:
        self._ids.append(token)
        text = self._unsettled_text()
        is_mid_character = text.endswith("\ufffd")
        if is_mid_character:
            return ""
        self._settle(text)
        return self._release(is_final=False)

    def _unsettled_text(self) -> str:
        """Return the text of the unsettled tokens: decoded after a whole piece, or the first character is garbled."""
        settled = self._decode(self._ids[self._anchor : self._settled])
        return self._decode(self._ids[self._anchor :])[len(settled) :]

    def _settle(self, text: str) -> None:
        if text:
            self._anchor = self._settled
        self._settled = len(self._ids)
        self._pending += text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _release(self, *, is_final: bool) -> str:
        """Give out pending text up to a stop string, or up to what may become one."""
        if self.finish == "stop":
            return ""
        places = [self._pending.find(word) for word in self._stop]
        cuts = [place for place in places if place >= 0]
        if cuts:
            self.finish = "stop"
            cut = min(cuts)
            rest = ""
        else:
            held = 0
            if not is_final:
                held = max((_overlap(self._pending, word) for word in self._stop), default=0)
            cut = len(self._pending) - held
            rest = self._pending[cut:]
        text = self._pending[:cut]
        self._pending = rest
        return text


def _without_unfinished(text: str) -> str:
    """Return a text without the character that it ends in the middle of: at most three bytes, one U+FFFD or one each.

    >>> _without_unfinished("ok \ufffd"), _without_unfinished("a\ufffdb")
    ('ok ', 'a\ufffdb')
    """
    return re.sub("\ufffd{1,3}$", "", text)


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest end of `text` that begins `word`.

    >>> _overlap("the en", "end"), _overlap("the end", "xyz")
    (2, 0)
    """
    longest = min(len(text), len(word) - 1)
    for length in range(longest, 0, -1):
        if word.startswith(text[-length:]):
            return length
    return 0


def answer_text(
    request: Request,
    progress: RequestProgress,
    tokens: Iterable[int],
    tokenizer: Any,
    end_tokens: Container[int],
) -> Iterator[str]:
    """Yield the answer's text piece by piece until it ends; `progress` records its tokens and how it ended.

    No piece is empty. If `tokens` end first, the answer ends too, as `AnswerText.rest` says. The next token is drawn
    only if the answer goes on after those before it, and nothing is drawn or recorded before the first piece is asked
    for.
    """
    answer = AnswerText(request.sampling, tokenizer, end_tokens)
    for token in tokens:
        progress.first_token_s = progress.first_token_s or request.clock()
        progress.tokens.append(token)
        text = answer.take(token)
        progress.generated = answer.generated
        progress.finish = answer.finish
        if text:
            yield text
        if answer.finish is not None:
            return

    rest = answer.rest()
    progress.finish = answer.finish
    if rest:
        yield rest
