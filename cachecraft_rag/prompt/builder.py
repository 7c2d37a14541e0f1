"""The prompt as a sequence of segments: system | chunk … chunk | question.

The model's chat template is rendered once with marks in place of the chunks and the question, and cut at the marks.
Each segment is tokenised on its own and the ids are concatenated, so a chunk's token ids never depend on its
neighbours. It is tokenised as if a line end preceded it and a word followed, as is the case in the prompt: many
tokenizers merge consecutive line ends, or a space with the next word. Text from documents and users is tokenised with
all control tokens split (`safe_tokenizer`), so that it cannot close or open a turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal, cast

from cachecraft_rag.checks import check_kind, shown
from cachecraft_rag.errors import ConfigError, ContextLengthError
from cachecraft_rag.planning.found_text import TokenKinds
from cachecraft_rag.prompt.safe_tokenizer import PlainTokenizer
from cachecraft_rag.prompt.tools import (
    CallFormat,
    Tool,
    call_message,
    calls_in,
    checked_tools,
    format_of,
    result_message,
)
from cachecraft_rag.prompt.unmarked import Piece, Recognise, tail_of
from cachecraft_rag.types import Chunk, Prompt, Segment, chunk_id_of, digest

# Chunks without neighbours are captured behind this passage: nobody's words, and better than none (docs/fidelity.md).
STAND_IN = (
    "Libraries lend more than books. Many of them keep tools, seeds and musical instruments on their shelves, and a "
    "reader who has a card may take them home for three weeks. Whoever brings something back late pays a small fee "
    "for each day, and whoever has lost it pays for a new one. Most branches open at ten in the morning and close at "
    "seven; on Saturdays they close at two. A quiet room upstairs can be reserved for up to four people, and the staff "
    "will help with forms, printers and old newspapers."
)
DEFAULT_SYSTEM = "You answer questions about the given context. Be brief and use only the context."
_LINE_END, _WORD = "\n", "The"  # the assumed neighbours of a segment in tokenisation
_CONTEXT_MARK, _QUESTION_MARK = "\u27e6cachecraft-context\u27e7", "\u27e6cachecraft-question\u27e7"

# "calls": of tools, as JSON: [{"name": …, "arguments": {…}}]; "result": of each of them, in their order.
Turn = tuple[Literal["user", "assistant", "calls", "result"], str]
_FOLLOWS: dict[str | None, set[str]] = {
    None: {"user"},
    "user": {"assistant", "calls"},
    "assistant": {"user", "calls"},
    "calls": {"result"},
    "result": {"result", "assistant", "calls"},
}


def check_history(history: object) -> None:
    """Earlier turns, as pairs; raises ConfigError."""
    check_kind("history", history, (list, tuple), advice='write [("user", "…"), ("assistant", "…")]')
    for turn in cast(Sequence[object], history):
        if not isinstance(turn, tuple | list) or len(turn) != 2 or not all(isinstance(part, str) for part in turn):
            raise ConfigError(f'each turn of history must be a pair such as ("user", "…"), not {shown(turn)}')


class PromptBuilder:
    """Turns a question and its chunks into a `Prompt` for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer; without a chat template a plain layout is used.
        context_length: most tokens of prompt and answer together.
        system: the instruction. It is in the system segment, so chunk-caches captured behind another one do not match.
        private_system: True if `system` holds one user's text; captures behind it are then private to the session.
        best_last: put the best chunk (they come best first) nearest to the question, where small models use it best:
            of 18 questions about the sample handbook 15 answers were right, 12 with the best one first.
        tools: that the model may call, see `tools`. The template writes them before the chunks, so they are part of the
            instruction: chunk-caches captured behind other tools do not match.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        context_length: int,
        system: str = DEFAULT_SYSTEM,
        private_system: bool = False,
        best_last: bool = True,
        tools: Sequence[Tool] = (),
    ) -> None:
        if _CONTEXT_MARK in system or _QUESTION_MARK in system:
            raise ConfigError("the system prompt contains a mark that this package uses itself; change its wording")
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._best_last = best_last
        self._system_text = system
        self.tools = checked_tools(tools)
        # It copies the tokenizer: transformers stores in it whether special tokens are split, so two threads that share
        # one would change each other's setting.
        self._plain = PlainTokenizer(tokenizer, self._template_text())
        if private_system and self._ids(system, special=True) != self._ids(system, special=False):
            raise ConfigError(
                "a private instruction holds special tokens of the model, or others that control it; leave them out"
            )
        if self.tools and not self.calls.native:
            self._system_text += "\n\n" + self.calls.instruction(self.tools)
        self._head: str | None = None
        self._head, _ = self._cut([])
        ids = self._encode(self._head, special=True, after=_WORD)
        self.system = Segment("system", digest("system", " ".join(map(str, ids))), ids, private=private_system)

    @cached_property
    def calls(self) -> CallFormat:
        """How the model writes calls of tools."""
        template = getattr(self._tokenizer, "chat_template", None)
        return format_of(partial(_rendered, self._tokenizer), self._tokenizer) if template else CallFormat()

    @cached_property
    def stand_in(self) -> Segment:
        """`STAND_IN` as the model sees it."""
        return self.chunk_segment(Chunk(STAND_IN))

    def chunk_segment(self, chunk: Chunk) -> Segment:
        """The chunk as the model sees it: its text and an empty line.

        Raises ConfigError if its id is not that of its text.
        """
        if chunk.chunk_id != chunk_id_of(chunk.text):
            raise ConfigError(
                f"chunk {chunk.chunk_id}: this is not the id of its text, which is {chunk_id_of(chunk.text)}. Its text "
                "was changed after it was indexed: index its document again, or make the chunk with Chunk(text)."
            )
        return Segment(
            "chunk", chunk.chunk_id, self._encode(chunk.text + "\n\n", special=False, before=_LINE_END, after=_WORD)
        )

    def build(
        self,
        question: str,
        chunks: Sequence[Chunk],
        *,
        history: Sequence[Turn] = (),
        reserve: int = 0,
        recognise: Recognise | None = None,
        private: bool = False,
    ) -> Prompt:
        """Lay out the prompt; `reserve` tokens are kept free for the answer.

        The history follows the chunks: the first user turn holds the context and the first question. So no private text
        precedes a chunk, and every chunk-cache captured here may be shared.

        If the context is too small, the lowest-ranked chunks are dropped and named in `Prompt.trimmed`. A chunk that
        would not fit even alone is dropped at any rank, without affecting the others. Duplicates are kept once.

        Args:
            recognise: looks for captured texts in a prompt without chunks (`prompt.unmarked`); None: nothing is found.
            private: whether what is found is one session's.

        Raises:
            ContextLengthError: system, question and the reserve alone do not fit.
            ConfigError: the question is empty, and the history does not end with a tool's result.
        """
        if not question.strip() and not (history and history[-1][0] == "result"):
            raise ConfigError("the question is empty; ask something")
        pieces = self._pieces(question, history)
        tail = _question_segment(pieces)
        room = self._context_length - reserve - len(self.system.token_ids) - len(tail.token_ids)
        if room < 0:
            raise ContextLengthError(
                f"question and history need {len(tail.token_ids)} tokens, the instruction "
                f"{len(self.system.token_ids)}, the answer {reserve}; the model's context is {self._context_length}. "
                "Shorten the question or history, or lower max_new_tokens."
            )
        if recognise is not None and not chunks:
            found = tail_of(pieces, self.kinds, recognise, private=private)
            if found is not None:
                return Prompt((self.system, *found[:-1], replace(found[-1], closing=tail.closing)), room=room)
        kept, trimmed, too_long = self._fitting(chunks, room)
        laid_out = reversed(kept) if self._best_last else kept
        return Prompt((self.system, *laid_out, tail), trimmed, too_long, room)

    def _fitting(
        self, chunks: Sequence[Chunk], room: int
    ) -> tuple[list[Segment], tuple[str, ...], tuple[tuple[str, int], ...]]:
        """The segments kept, the ids dropped, and (id, tokens) of those longer than the whole room."""
        kept: list[Segment] = []
        trimmed: list[str] = []
        too_long: list[tuple[str, int]] = []
        left = room
        distinct = {chunk.chunk_id: chunk for chunk in chunks}
        for chunk_id, chunk in distinct.items():
            segment = self.chunk_segment(chunk)
            length = len(segment.token_ids)
            if length > room:
                too_long.append((chunk_id, length))
            elif length <= left:
                kept.append(segment)
                left -= length
                continue
            else:
                left = -1  # the prompt is full: lower ranks are dropped even if they would fit
            trimmed.append(chunk_id)
        return kept, tuple(trimmed), tuple(too_long)

    @cached_property
    def kinds(self) -> TokenKinds:
        """What each token says about where text may be cut."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        tokens: list[str | None] = [None] * (max(vocabulary.values()) + 1)
        for token, number in vocabulary.items():
            tokens[number] = token
        return TokenKinds.of(tokens)

    def _pieces(self, question: str, history: Sequence[Turn]) -> list[Piece]:
        """What follows the chunks, in pieces; the first and the last message may be searched."""
        asked: list[Turn] = [("user", question)] if question.strip() else []
        turns = [*history, *asked]
        roles: list[str | None] = [None, *(role for role, _ in turns)]
        if any(role not in _FOLLOWS[before] for before, role in pairwise(roles)):
            raise ConfigError("history must alternate user and assistant turns, begin with user and end with assistant")
        _, pieces = self._cut([("user", f"Question: {turns[0][1]}"), *turns[1:]])
        encoded: list[Piece] = []
        behind_line_end = True
        for place, (piece, special) in enumerate(pieces):
            before = _LINE_END if behind_line_end and not special else ""
            encoded.append((self._encode(piece, special=special, before=before), place in (1, len(pieces) - 2)))
            behind_line_end = piece.endswith(_LINE_END) or (behind_line_end and not piece)
        return encoded

    def _cut(self, turns: Sequence[Turn]) -> tuple[str, list[tuple[str, bool]]]:
        """Render the template with marks; returns the text before the chunks and the pieces after them.

        A piece is its text and whether its special tokens are control tokens (the template's own text).
        """
        messages, texts = self._marked(turns or [("user", "")])
        messages[0]["content"] = f"Context:\n{_CONTEXT_MARK}{messages[0]['content']}"
        renderings = self._renderings(messages)
        cuts = (rendered.partition(_CONTEXT_MARK) for rendered in renderings)
        best = next(cuts)
        if self._head not in (None, best[0]):
            best = next((cut for cut in cuts if cut[0] == self._head), best)
        head, _, rest = best
        pieces: list[tuple[str, bool]] = []
        whole = bool(head)
        for mark, text in texts:
            before, found, rest = rest.partition(mark)
            whole = whole and bool(found)
            pieces += [(before, True), (text, False)]
        pieces.append((rest, True))
        if not whole or any(_CONTEXT_MARK in piece or _QUESTION_MARK in piece for piece, own in pieces if own):
            raise ConfigError(
                "the model's chat template drops, repeats or reorders the user's text; it cannot be cut into segments"
            )
        return head, pieces

    def _marked(self, turns: Sequence[Turn]) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
        """The messages with marks in place of texts, and each mark with its text."""
        messages: list[dict[str, Any]] = []
        texts: list[tuple[str, str]] = []
        waiting: list[tuple[str, int]] = []

        def mark(text: str) -> str:
            texts.append((f"{_QUESTION_MARK}{len(texts)}\u27e7", text))
            return texts[-1][0]

        native = any(role == "calls" for role, _ in turns) and self.calls.native
        for role, text in turns if native else self._without_calls(turns):
            if role == "result" and not waiting:
                raise ConfigError("history has more results than calls of tools")
            if role == "result":
                messages.append(result_message(*waiting[0][:1], mark(text), waiting.pop(0)[1]))
            elif role != "calls":
                messages.append({"role": role, "content": mark(text)})
            else:
                made = []
                for call in calls_in(text):
                    waiting.append((call["name"], len(texts)))
                    arguments = {mark(json.dumps(call["arguments"], ensure_ascii=False)): ""}
                    texts[-1] = (json.dumps(arguments, ensure_ascii=False), texts[-1][1])
                    made.append(call_message(call["name"], arguments, waiting[-1][1]))
                if messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1]["tool_calls"] = made
        return messages, texts

    def _without_calls(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns with calls and results as plain text; neighbours of one role are joined."""
        found: list[Turn] = []
        for role, text in turns:
            if role == "calls":
                calls = (self.calls.text(one["name"], json.dumps(one["arguments"])) for one in calls_in(text))
                role, text = "assistant", "\n".join(calls)
            elif role == "result":
                role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            before = f"{found.pop()[1]}\n" if found and found[-1][0] == role else ""
            found.append((role, before + text))
        return found

    def _renderings(self, messages: list[dict[str, Any]]) -> Iterator[str]:
        """The prompt's text with the instruction as a system turn, then with it in front of the first user turn.

        The second is the only one if the template has no system role (Gemma-2 raises, others ignore it). It is also
        needed if a template puts the instruction in front of the *last* user turn (Mistral), after the chunks.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            start = self._tokenizer.bos_token or ""
            names = {"user": "", "assistant": "Answer: "}
            lines = [self._system_text, *(names[m["role"]] + m["content"] for m in messages)]
            yield start + "\n".join(lines) + "\nAnswer:"
            return
        from jinja2.exceptions import TemplateError

        try:
            rendered = self._apply([{"role": "system", "content": self._system_text}, *messages])
        except TemplateError:
            rendered = None
        if rendered is not None and self._system_text.strip() in rendered:
            yield rendered
        messages[0]["content"] = f"{self._system_text}\n\n{messages[0]['content']}"
        try:
            yield self._apply(messages)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template refuses a plain conversation: {error}") from error

    def _template_text(self) -> str:
        """The chat template, and its renderings of a conversation of marks only."""
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            return ""
        from jinja2.exceptions import TemplateError

        texts = [str(template)]
        for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
            try:
                texts.append(self._apply([{"role": role, "content": _QUESTION_MARK} for role in roles]))
            except TemplateError:  # no system role, or no conversation at all: `_cut` reports it
                continue
        return "\n".join(texts)

    def _apply(self, messages: list[dict[str, Any]]) -> str:
        return _rendered(self._tokenizer, messages, tools=self.tools if self.tools and self.calls.native else None)

    def _encode(self, text: str, *, special: bool, before: str = "", after: str = "") -> tuple[int, ...]:
        """The ids of `text` between `before` and `after`; its ids alone if the tokenizer merges it with them."""
        # Half a surrogate pair (a damaged file, a terminal) is no character, and tokenizers refuse it.
        text = text.encode("utf-8", "replace").decode()
        whole = self._ids(before + text + after, special=special)
        head = self._ids(before, special=special) if before else []
        tail = (
            self._ids(_LINE_END + after, special=special)[len(self._ids(_LINE_END, special=special)) :] if after else []
        )
        stop = len(whole) - len(tail)
        if whole[: len(head)] != head or whole[stop:] != tail or stop < len(head):
            return tuple(self._ids(text, special=special))
        return tuple(whole[len(head) : stop])

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if not special:
            return self._plain.ids(text)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
        return ids


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None) -> str:
    given: dict[str, Any] = {} if tools is None else {"tools": tools}
    rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given)
    return rendered


def _question_segment(pieces: Sequence[Piece]) -> Segment:
    ids = tuple(token for piece, _ in pieces for token in piece)
    name = digest("question", " ".join(map(str, ids)))
    return Segment("question", name, ids, private=True, closing=len(pieces[-1][0]))
