"""Places of messages in a rendered prompt: which of its tokens hold their text.

The text that vLLM has rendered is searched for the text of each message, and the tokenizer's offsets turn characters
into tokens. Nothing is rendered again, and control tokens that a client writes into a message are ordinary text here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.server.wire import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEAST_CHARACTERS = 200  # shorter messages are not searched: they hold no passage
# types of the parts of a message that are text, in chat completions and in responses
_TEXT_PARTS = ("text", "input_text")
_ROLES = ("user", "tool", "function")
_SYSTEM_ROLES = ("system", "developer")


class PromptText(NamedTuple):
    """A prompt as text and as tokens.

    offsets  `[tokens, 2]`: first character of each token, and the one after its last; equal for a token without text
    """

    text: str
    offsets: NDArray[np.int64]

    def tokens(self, characters: range) -> range:
        """Return the range of tokens that hold any of these characters; an empty range if no token does.

        >>> offsets = np.array([[0, 0], [0, 2], [2, 5], [5, 6]])
        >>> PromptText("<>Why?", offsets).tokens(range(3, 6))
        range(2, 4)
        """
        first, last = self.offsets.T
        places = np.flatnonzero((first < characters.stop) & (last > characters.start))
        return range(int(places[0]), int(places[-1]) + 1) if len(places) else range(0)


class TokenOffsets:
    """Finds the text of tokens. Thread-safe.

    Args:
        tokenizer: a transformers tokenizer, of which a copy is made. Without a fast backend, only texts with offsets
            of vLLM's are found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Any = None
        if backend is not None:
            self._backend = type(backend).from_str(backend.to_str())
            self._backend.no_truncation()
            self._backend.no_padding()

    def prompt_text(self, prompt: Mapping[str, Any]) -> PromptText | None:
        """Return the text of vLLM's prompt, or None if these tokens are not those of its text.

        The offsets are vLLM's if it has computed them. Otherwise the text is tokenised again: vLLM's own text, or
        without one, as for gpt-oss, the decoded tokens.

        Args:
            prompt: "prompt_token_ids" and, if vLLM has rendered it as text, "prompt"; "prompt_token_offsets" if they
                were requested.
        """
        ids: Sequence[int] = prompt["prompt_token_ids"]
        text: str | None = prompt.get("prompt")
        offsets = prompt.get("prompt_token_offsets")
        if text is None or offsets is None or len(offsets) != len(ids):
            if self._backend is None:
                return None
            if text is None:
                text = self._backend.decode(ids, skip_special_tokens=False)
            offsets = self._offsets(text, ids)
        if offsets is None:
            return None
        return PromptText(text, np.array(offsets, np.int64).reshape(len(ids), 2))

    def _offsets(self, text: str, ids: Sequence[int]) -> list[tuple[int, int]] | None:
        for add_special_tokens in (False, True):  # a template may or may not write them itself
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            if encoding.ids == list(ids):
                offsets: list[tuple[int, int]] = encoding.offsets
                return offsets
        return None


@dataclass(frozen=True)
class Searched:
    """Parts of a prompt's token ids that are searched.

    texts               ranges of the messages to search, in the order of the messages
    roles               role of each of them, for the metrics: "user", "tool", "system", or "prompt" of a completion
    ends_with_question  True if the last of them ends with the user's question, which is always computed
    remark              why some messages are not searched, for the client; "" if all are
    """

    texts: tuple[range, ...] = ()
    roles: tuple[str, ...] = ()
    ends_with_question: bool = True
    remark: str = ""


def locate_messages(
    prompt: PromptText | None, messages: Sequence[Message], *, search_system: bool
) -> Searched:
    """Locate each of `searched_messages` in a rendered prompt.

    The chat template may strip a message or write it as a JSON string. A message whose text it changes or leaves out
    is not searched, and `remark` names it.

    Args:
        prompt: the rendered prompt; None if its tokens are not those of its text: nothing is searched then.
        messages: messages of the request.
        search_system: True to search system messages too.
    """
    wanted = searched_messages(messages, search_system=search_system)
    if prompt is None and wanted:
        return Searched(
            remark="no message is searched: the tokenizer does not say which text its tokens hold"
        )
    if prompt is None:
        return Searched()
    places = _places(prompt.text, messages)
    located = [index for index in wanted if index in places]
    missing = [str(index) for index in wanted if index not in places]
    last = len(messages) - 1
    return Searched(
        tuple(prompt.tokens(places[index]) for index in located),
        tuple(role_of(messages[index]) for index in located),
        ends_with_question=last in located and messages[last].get("role") == "user",
        remark=(
            f"not searched: messages {', '.join(missing)} (from 0), because the chat template changes their text or "
            "leaves them out"
            if missing
            else ""
        ),
    )


def searched_messages(messages: Sequence[Message], *, search_system: bool) -> list[int]:
    """Return the indices of the messages to search, ascending: of users, tools, and with `search_system` the system.

    Messages of fewer than 200 characters hold no passage and are left out, except for the last message of the request,
    and so are those that hold no text or more than text, such as images.
    """
    roles = (*_ROLES, *(_SYSTEM_ROLES if search_system else ()))
    return [index for index, _ in _long_messages(messages) if messages[index].get("role") in roles]


def role_of(message: Message) -> str:
    """Return a message's role for the metrics: "function" becomes "tool", "developer" "system", others stay."""
    role = str(message.get("role"))
    return {"function": "tool", "developer": "system"}.get(role, role)


def _long_messages(messages: Sequence[Message]) -> Iterator[tuple[int, list[str]]]:
    """Yield index and texts of the messages that may hold a passage, and of the last one, if they are text only."""
    for index, message in enumerate(messages):
        texts = _texts_of(message.get("content"))
        is_last = index == len(messages) - 1
        if texts and (is_last or sum(map(len, texts)) >= _LEAST_CHARACTERS):
            yield index, texts


def _texts_of(content: object) -> list[str]:
    """Return the texts of a message's parts without white space around them; [] if it holds more than text."""
    parts = [content] if isinstance(content, str) else []
    if not parts and isinstance(content, Iterable):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
                return []
            parts.append(str(part.get("text") or ""))
    return [text for text in map(str.strip, parts) if text]


def _places(text: str, messages: Sequence[Message]) -> dict[int, range]:
    """Return index → characters of the messages in a prompt; those that are not found are left out.

    The last message is located first, each other one before those after it. So the question is the last text of its
    words, and the answers of the model, which may repeat a message, take their own places.
    """
    mirrored = text[::-1]  # str.rfind takes quadratic time for some texts, str.find does not
    places: dict[int, range] = {}
    end = len(text)
    for index, texts in reversed(list(_long_messages(messages))):
        place = _last_place(mirrored, texts, end)
        if place is None:  # some templates write the system message into the last turn
            place = _last_place(mirrored, texts, len(text))
            if place is None or any(_overlap(place, taken) for taken in places.values()):
                continue
        end = min(end, place.start)
        places[index] = place
    return places


def _last_place(mirrored: str, texts: Sequence[str], end: int) -> range | None:
    """Return the characters from the first to the last of these texts, at their last place that ends before `end`.

    Args:
        mirrored: the text to search, from its last character to the first.
        texts: texts that follow each other, perhaps with others between them.
        end: number of characters of the text that are searched.
    """
    size = len(mirrored)
    start = end
    stop = end
    for number, text in enumerate(reversed(texts)):
        spellings = dict.fromkeys((text, json.dumps(text, ensure_ascii=False)[1:-1]))
        found = (
            (size - place, len(spelling))
            for spelling in spellings
            if (place := mirrored.find(spelling[::-1], size - start)) >= 0
        )
        begin, length = next(found, (-1, 0))
        if begin < 0:
            return None
        if not number:
            stop = begin
        start = begin - length
    return range(start, stop)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
