"""The prompt as a sequence of segments: system | chunk … chunk | question.

The model's chat template is rendered once with marks in place of the chunks and the question, and cut at the marks.
Each segment is tokenised separately and the ids are concatenated, so a chunk's token ids never depend on its
neighbours. It is tokenised as if a line end preceded it and a word followed, as is the case in the prompt: many
tokenizers merge consecutive line ends, or a space with the next word. Text from documents and users is tokenised with
all control tokens split (`safe_tokenizer`); it cannot close or open a turn.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

from cachecraft_rag.checks import check_kind, listed, shown
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
from cachecraft_rag.prompt.unmarked import PromptPiece, Recognise, segments_of
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.documents import CHUNK_ID_KEY, Chunk
from cachecraft_rag.types.prompts import Prompt, Segment, token_array

logger = logging.getLogger("cachecraft_rag.prompt")

# Chunks without neighbours are captured after this passage. It holds no user's text, and a chunk that is captured after
# it loses less than one that is captured after the instruction only (docs/results/quality.md).
STAND_IN = (
    "Libraries lend more than books. Many of them keep tools, seeds and musical instruments on their shelves, and a "
    "reader who has a card may take them home for three weeks. Whoever brings something back late pays a small fee "
    "for each day, and whoever has lost it pays for a new one. Most branches open at ten in the morning and close at "
    "seven; on Saturdays they close at two. A quiet room upstairs can be reserved for up to four people, and the staff "
    "will help with forms, printers and old newspapers."
)
DEFAULT_SYSTEM = "You answer questions about the given context. Be brief and use only the context."
# Bytes of the chunks that a builder does not tokenise again, about 4,000 chunks of 512 tokens.
KNOWN_BYTES = 10_000_000
SEGMENT_BYTES = 500  # of a segment without its token ids
_LINE_END = "\n"  # text that tokenisation of a segment assumes before it
_WORD = "The"  # text that it assumes after the segment
_CONTEXT_MARK = "\u27e6cachecraft-context\u27e7"
_QUESTION_MARK = "\u27e6cachecraft-question\u27e7"
_SYSTEM_MARK = "\u27e6cachecraft-system\u27e7"

# "calls" holds calls of tools as JSON: [{"name": …, "arguments": {…}}]. "result" holds the result of one call; results
# follow in the order of their calls.
TurnRole = Literal["user", "assistant", "calls", "result"]
Turn = tuple[TurnRole, str]
_FOLLOWS: dict[str | None, set[str]] = {
    None: {"user"},
    "user": {"assistant", "calls"},
    "assistant": {"user", "calls"},
    "calls": {"result"},
    "result": {"result", "user", "assistant", "calls"},  # "user": somebody interrupts an agent
}


def checked_chunks(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the chunks as a new list; raise ConfigError unless all are `Chunk` objects."""
    items = listed("chunks", chunks)  # a generator gives its items only once
    if not all(isinstance(chunk, Chunk) and isinstance(chunk.text, str) for chunk in items):
        raise ConfigError("chunks must be Chunk objects: write Chunk(text)")
    return items


def check_history(history: object) -> None:
    """Raise ConfigError unless the history is a list or tuple of pairs of text; `build` checks the roles."""
    check_kind(
        "history", history, (list, tuple), advice='write [("user", "…"), ("assistant", "…")]'
    )
    for turn in cast(Sequence[object], history):
        if (
            not isinstance(turn, tuple | list)
            or len(turn) != 2
            or not all(isinstance(part, str) for part in turn)
        ):
            raise ConfigError(
                f'each turn of history must be a pair such as ("user", "…"), not {shown(turn)}'
            )


class _MarkedText(NamedTuple):
    """A text of a conversation, the mark that replaces it in the template, and whether it may hold passages."""

    mark: str
    text: str
    is_searched: bool


class _TemplatePart(NamedTuple):
    """A part of the rendered template.

    special      whether its special tokens are control tokens (the template's text)
    is_searched  whether it is searched for captured texts
    """

    text: str
    special: bool
    is_searched: bool = False


class _FittingChunks(NamedTuple):
    """Chunks that fit the context, best first, and those that do not; see `Prompt`."""

    kept: list[Segment]
    trimmed: tuple[str, ...]
    too_long: tuple[tuple[str, int], ...]


class _KnownSegments:
    """Segments of the chunks used last, by chunk id, so that they are not tokenised again. Thread-safe."""

    def __init__(self) -> None:
        self._segments: OrderedDict[str, Segment] = OrderedDict()  # used last at the end
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, chunk_id: str) -> Segment | None:
        """Return the chunk's segment, which becomes the one used last; None if it is not known."""
        with self._lock:
            segment = self._segments.get(chunk_id)
            if segment is not None:
                self._segments.move_to_end(chunk_id)
            return segment

    def put(self, segment: Segment) -> None:
        """Keep a segment, and forget those not used for longest beyond `KNOWN_BYTES`."""
        with self._lock:
            if segment.segment_id in self._segments:
                return
            self._segments[segment.segment_id] = segment
            self._bytes += SEGMENT_BYTES + segment.token_ids.nbytes
            while self._bytes > KNOWN_BYTES:
                _, forgotten = self._segments.popitem(last=False)
                self._bytes -= SEGMENT_BYTES + forgotten.token_ids.nbytes


class PromptBuilder:
    """Turns a question and its chunks into a `Prompt` for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer; without a chat template a plain layout is used.
        context_length: most tokens of prompt and answer together.
        system: the instruction, in the system segment; chunk-caches captured after another one are never exact.
        private_system: True if `system` or `tools` hold one user's text; captures after them are then private to the
            session, and without one no chunk is captured.
        best_last: put the best chunk (chunks are given best first) last, directly before the question, where small
            models use it best: of 18 questions about the sample handbook 15 answers were right, 12 with the best chunk
            first.
        tools: tools that the model may call, see `tools`. The template writes them before the chunks, so they are part
            of the instruction.
        bare: write no words around the texts ("Context:", "Question:"), and no instruction if `system` is "": the
            layout of any other server, for applications that wrote the whole prompt.
        search_system: with `bare`, search the instruction for captured texts, for applications that put the context
            there: it is no part of the system segment then.

    Raises ConfigError also if a private instruction or its tools hold the model's control tokens, or the chat template
    fails at a conversation, or drops, repeats or reorders its text.
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
        bare: bool = False,
        search_system: bool = False,
    ) -> None:
        if _CONTEXT_MARK in system or _QUESTION_MARK in system:
            raise ConfigError(
                "the system prompt contains a mark that this package uses itself; change its wording"
            )

        self._tokenizer = tokenizer
        self._context_length = context_length
        self._best_last = best_last
        self._system_text = system
        self._bare = bare
        self._search_system = bare and search_system and bool(system)
        self.tools = checked_tools(tools)
        self._has_warned = False
        self._known = _KnownSegments()

        # It copies the tokenizer: transformers stores in it whether special tokens are split, so two threads that share
        # a tokenizer would change each other's setting.
        self._plain = PlainTokenizer(tokenizer, self._template_text())
        tools_text = json.dumps(self.tools, ensure_ascii=False).encode("utf-8", "replace").decode()
        if private_system and any(
            self._ids(text, special=True) != self._ids(text, special=False)
            for text in (system, tools_text)
        ):
            raise ConfigError(
                "a private instruction, or one of its tools, holds special tokens of the model, or others that control "
                "it; leave them out"
            )

        if self.tools and not self.calls.native:
            self._system_text += "\n\n" + self.calls.instruction(self.tools)

        self._head: str | None = None
        self._head, _ = self._cut([])
        ids = self._encode(self._head, special=True, after=_WORD)
        name = digest("system", " ".join(map(str, ids)))
        self.system = Segment("system", name, token_array(ids), private=private_system)

    @cached_property
    def calls(self) -> CallFormat:
        """Form in which the model writes calls of tools, read from its chat template once; see `format_of`."""
        if not getattr(self._tokenizer, "chat_template", None):
            return CallFormat()
        return format_of(partial(_rendered, self._tokenizer), self._tokenizer)

    @cached_property
    def stand_in(self) -> Segment:
        """The segment of the passage `STAND_IN`, of kind "chunk", tokenised once."""
        return self.chunk_segment(Chunk(STAND_IN))

    def chunk_segment(self, chunk: Chunk) -> Segment:
        """Return the chunk's segment, of kind "chunk" and shared: the tokens of its text and an empty line.

        Names of control tokens become ordinary characters, and half a surrogate pair becomes "?".
        """
        known = self._known.get(chunk.chunk_id)
        if known is not None:
            return known
        text = chunk.text + "\n\n"
        ids = self._encode(text, special=False, before=_LINE_END, after=_WORD)
        segment = Segment("chunk", chunk.chunk_id, token_array(ids))
        self._known.put(segment)
        return segment

    def text_ids(self, text: str) -> list[int]:
        """Return a text's ids, tokenised alone and without control tokens; in a prompt those at its ends may differ."""
        return list(self._encode(text, special=False))

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
        """Return the prompt for a question: instruction, the chunks that fit, and one segment of history and question.

        The history follows the chunks, so that it precedes none of them, and captures may be shared unless the
        instruction is private. With `recognise`, found segments (see `segments_of`), if there are any, and the text
        between them follow the instruction.

        If the context is too small, the lowest-ranked chunks are dropped and named in `Prompt.trimmed`. A chunk that
        would not fit even alone is dropped at any rank. Duplicates are kept once, at the rank of the first.

        Args:
            question: the user's question. It may be empty if the history ends with a tool's result.
            chunks: the chunks, best first; may be empty.
            history: earlier turns, pairs of role and text that `check_history` accepts.
            reserve: number of tokens kept free for the answer.
            recognise: finds captured texts in a prompt without chunks (`prompt.unmarked`); None = no search.
            private: whether the segments found in unmarked text belong to one session.
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
            segments = segments_of(pieces, self.kinds, recognise, private=private, repeated=True)
            if segments is not None:
                segments[-1] = replace(segments[-1], closing=tail.closing)
                return Prompt((self.system, *segments), room=room)

        fitting = self._fitting(chunks, room)
        ordered = reversed(fitting.kept) if self._best_last else fitting.kept
        return Prompt(
            (self.system, *ordered, tail),
            trimmed=fitting.trimmed,
            too_long=fitting.too_long,
            room=room,
            stale_ids=self._stale_ids(chunks),
        )

    def build_text(
        self, text: str, *, reserve: int, recognise: Recognise | None, private: bool
    ) -> Prompt:
        """Return the prompt of a text as it is, without the chat template; names of control tokens control the model.

        Arguments as in `build`. The first token takes the instruction's place if anything is found; otherwise the whole
        text is one segment of kind "question".
        """
        ids: tuple[int, ...] = tuple(self._tokenizer(text)["input_ids"])
        room = self._context_length - reserve - len(ids)
        if not ids:
            raise ConfigError("the prompt is empty; write something")
        if room < 0:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the answer {reserve}; the model's context is "
                f"{self._context_length}. Shorten the prompt, or lower max_new_tokens."
            )
        pieces = [PromptPiece(ids[1:], is_searched=True)]
        segments = None
        if recognise is not None:
            segments = segments_of(pieces, self.kinds, recognise, private=private, repeated=True)
        if segments is None:
            return Prompt((_question_segment([PromptPiece(ids, is_searched=True)]),), room=room)
        head = Segment("system", digest("system", str(ids[0])), token_array(ids[:1]), private=True)
        return Prompt((head, *segments), room=room)

    def _stale_ids(self, chunks: Sequence[Chunk]) -> tuple[tuple[str, str], ...]:
        """Return (id, stale id) of the chunks that brought another text's id; the first time, log a warning."""
        stale_ids = tuple((chunk.chunk_id, chunk.stale_id) for chunk in chunks if chunk.stale_id)
        if stale_ids and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A passage was edited after it was retrieved and kept the id %s of the text it had before. Its text "
                "was hashed again, so the right chunk-cache is used. If a step edits passages on purpose, delete %r "
                "from their metadata there. This is logged once; `stale_id` in the statistics names each of them.",
                stale_ids[0][1],
                CHUNK_ID_KEY,
            )
        return stale_ids

    def _fitting(self, chunks: Sequence[Chunk], room: int) -> _FittingChunks:
        """Choose the chunks that fit into this many tokens."""
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
        return _FittingChunks(kept, tuple(trimmed), tuple(too_long))

    @cached_property
    def kinds(self) -> TokenKinds:
        """Features of each token of the vocabulary that decide where unmarked text is cut, computed once."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        tokens: list[str | None] = [None] * (max(vocabulary.values()) + 1)
        for token, number in vocabulary.items():
            tokens[number] = token
        return TokenKinds.of(tokens)

    def _pieces(self, question: str, history: Sequence[Turn]) -> list[PromptPiece]:
        """Return the prompt after the chunks in pieces; the user's messages and results of tools may be searched."""
        asked: list[Turn] = [("user", question)] if question.strip() else []
        turns = [*history, *asked]
        if turns and turns[0][0] == "assistant":
            turns.insert(0, ("user", ""))  # templates need a user's turn first
        _check_order(turns)
        first_text = turns[0][1] if self._bare else f"Question: {turns[0][1]}"
        head, parts = self._cut([("user", first_text), *turns[1:]])
        pieces: list[PromptPiece] = []
        after_line_end = not self._bare or head.endswith(_LINE_END)
        for part in parts:
            before = _LINE_END if after_line_end and not part.special else ""
            ids = self._encode(part.text, special=part.special, before=before)
            pieces.append(PromptPiece(ids, part.is_searched))
            after_line_end = part.text.endswith(_LINE_END) or (after_line_end and not part.text)
        return pieces

    def _cut(self, turns: Sequence[Turn]) -> tuple[str, list[_TemplatePart]]:
        """Render the template with marks; returns the text before the chunks and the parts after them."""
        messages, texts = self._marked(turns or [("user", "")])
        if self._search_system:
            texts.insert(0, _MarkedText(_SYSTEM_MARK, self._system_text, is_searched=True))
        else:
            before = "" if self._bare else "Context:\n"
            messages[0]["content"] = f"{before}{_CONTEXT_MARK}{messages[0]['content']}"

        cuts = (rendering.partition(_CONTEXT_MARK) for rendering in self._renderings(messages))
        best = next(cuts)
        if self._head not in (None, best[0]):
            best = next((cut for cut in cuts if cut[0] == self._head), best)
        head, _, rest = best

        parts: list[_TemplatePart] = []
        is_complete = bool(head)
        for marked in texts:
            before, separator, rest = rest.partition(marked.mark)
            is_complete = is_complete and bool(separator)
            parts.append(_TemplatePart(before, special=True))
            parts.append(_TemplatePart(marked.text, special=False, is_searched=marked.is_searched))
        parts.append(_TemplatePart(rest, special=True))

        marks_left = any(
            mark in part.text
            for part in parts
            if part.special
            for mark in (_CONTEXT_MARK, _QUESTION_MARK)
        )
        if not is_complete or marks_left:
            raise ConfigError(
                "the model's chat template drops, repeats or reorders the user's text; it cannot be cut into segments"
            )
        return head, parts

    def _marked(self, turns: Sequence[Turn]) -> tuple[list[dict[str, object]], list[_MarkedText]]:
        """Return the messages with marks in place of texts, and the texts."""
        messages: list[dict[str, object]] = []
        texts: list[_MarkedText] = []
        # calls without a result yet: the tool's name and the call's number
        unanswered: list[tuple[str, int]] = []

        def mark(text: str, *, is_searched: bool = False) -> str:
            sign = f"{_QUESTION_MARK}{len(texts)}\u27e7"
            texts.append(_MarkedText(sign, text, is_searched))
            return sign

        is_native = any(role == "calls" for role, _ in turns) and self.calls.native
        for role, text in turns if is_native else self._without_calls(turns):
            if role == "result":
                name, number = unanswered.pop(0)
                messages.append(result_message(name, mark(text, is_searched=True), number))
            elif role == "calls":
                call_messages = []
                for call in calls_in(text):
                    number = len(texts)
                    unanswered.append((call["name"], number))
                    arguments_text = json.dumps(call["arguments"], ensure_ascii=False)
                    arguments = {mark(arguments_text): ""}
                    # Templates write the arguments as an object, so the mark is that object's JSON.
                    texts[-1] = texts[-1]._replace(mark=json.dumps(arguments, ensure_ascii=False))
                    call_messages.append(call_message(call["name"], arguments, number))
                if messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1]["tool_calls"] = call_messages
            else:
                messages.append({"role": role, "content": mark(text, is_searched=role == "user")})
        return messages, texts

    def _without_calls(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns with calls and results as plain text; neighbours of one role are joined."""
        plain: list[Turn] = []
        for role, text in turns:
            if role == "calls":
                role = "assistant"
                calls = [
                    self.calls.text(call["name"], json.dumps(call["arguments"]))
                    for call in calls_in(text)
                ]
                text = "\n".join(calls)
            elif role == "result":
                role = "user"
                text = f"<tool_response>\n{text}\n</tool_response>"

            if plain and plain[-1][0] == role:
                _, text_before = plain.pop()
                text = f"{text_before}\n{text}"
            plain.append((role, text))
        return plain

    def _renderings(self, messages: list[dict[str, object]]) -> Iterator[str]:
        """Yield the prompt's text with the instruction as a system turn, then with it before the first user turn.

        The second is the only one if the template has no system role (Gemma-2 raises, others ignore it). It is also
        needed if a template puts the instruction before the *last* user turn (Mistral), after the chunks.
        """
        system = _CONTEXT_MARK + _SYSTEM_MARK if self._search_system else self._system_text
        if not getattr(self._tokenizer, "chat_template", None):
            start = self._tokenizer.bos_token or ""
            names = {"user": "", "assistant": "Answer: "}
            lines = [system]
            for message in messages:
                lines.append(names[str(message["role"])] + str(message["content"]))
            yield start + "\n".join(lines) + "\nAnswer:"
            return

        if self._bare and not system:
            yield self._refusing(messages)
            return

        try:
            rendered = self._apply([{"role": "system", "content": system}, *messages])
        # a template may raise anything; what it says of the second form is handed on
        except Exception as error:  # noqa: BLE001
            logger.debug("The chat template takes no system message: %s", error)
            rendered = None
        if rendered is not None and system.strip() in rendered:
            yield rendered

        messages[0]["content"] = f"{system}\n\n{messages[0]['content']}"
        yield self._refusing(messages)

    def _refusing(self, messages: list[dict[str, object]]) -> str:
        """Return the rendered messages. Raises ConfigError with the template's reason if it refuses them."""
        try:
            return self._apply(messages)
        except Exception as error:  # a template may raise anything; its reason is handed on
            roles = [str(message["role"]) for message in messages]
            advice = ""
            if ("tool", "user") in pairwise(roles):
                advice = (
                    "; the template may not allow a user turn directly after a tool result: "
                    "add an assistant turn between them"
                )
            raise ConfigError(
                f"the model's chat template refuses this conversation: {error}{advice}"
            ) from error

    def _template_text(self) -> str:
        """Return the chat template, followed by its renderings of a conversation of marks only."""
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            return ""

        texts = [str(template)]
        for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
            messages: list[dict[str, object]] = [
                {"role": role, "content": _QUESTION_MARK} for role in roles
            ]
            # no system role, or a template that fails at every conversation: `_cut` reports it
            with contextlib.suppress(Exception):
                texts.append(self._apply(messages))
        return "\n".join(texts)

    def _apply(self, messages: list[dict[str, object]]) -> str:
        uses_tools = self.tools and self.calls.native
        return _rendered(self._tokenizer, messages, tools=self.tools if uses_tools else None)

    def _encode(
        self, text: str, *, special: bool, before: str = "", after: str = ""
    ) -> tuple[int, ...]:
        """Return the ids of `text` as they are between `before` and `after`.

        If the tokenizer merges the text with them, the ids of the text alone are returned.
        """
        # Half a surrogate pair (a damaged file, a terminal) is no character, and tokenizers refuse it.
        text = text.encode("utf-8", "replace").decode()
        whole = self._ids(before + text + after, special=special)
        head = self._ids(before, special=special) if before else []
        tail: list[int] = []
        if after:
            line_end = self._ids(_LINE_END, special=special)
            tail = self._ids(_LINE_END + after, special=special)[len(line_end) :]

        start = len(head)
        stop = len(whole) - len(tail)
        is_merged = whole[:start] != head or whole[stop:] != tail or stop < start
        if is_merged:
            return tuple(self._ids(text, special=special))
        return tuple(whole[start:stop])

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if not special:
            return self._plain.ids(text)
        ids: list[int] = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=False
        )["input_ids"]
        return ids


def _check_order(turns: Sequence[Turn]) -> None:
    """Raise ConfigError unless each turn may follow the one before, and each call of a tool has one result."""
    awaited = 0
    before: str | None = None
    for role, text in turns:
        if role not in _FOLLOWS[before]:
            raise ConfigError(
                "history must alternate user and assistant turns, begin with user and end with assistant or a tool's "
                "result; a result follows its call"
            )
        if role == "result":
            awaited -= 1
            if awaited < 0:
                raise ConfigError("history has more results than calls of tools")
        elif awaited:
            break
        if role == "calls":
            awaited = len(calls_in(text))
        before = role
    if awaited:
        raise ConfigError(
            "history has a call of a tool without a result; each call has one, directly after the calls"
        )


def _rendered(
    tokenizer: Any,
    messages: list[dict[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None,
) -> str:
    options = {"tools": tools} if tools is not None else {}
    rendered: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    return rendered


def _question_segment(pieces: Sequence[PromptPiece]) -> Segment:
    ids = tuple(token for piece in pieces for token in piece.token_ids)
    name = digest("question", " ".join(map(str, ids)))
    closing = len(pieces[-1].token_ids)
    return Segment("question", name, token_array(ids), private=True, closing=closing)
