"""The prompt as a row of segments: system | chunk … chunk | question.

The model's own chat template is rendered once with marks in the places of the chunks and the question and cut at the
marks. Each segment is tokenised on its own and the ids are concatenated, so a chunk's token ids never depend on its
neighbours. But it is tokenised *as if* a line ended before it and a word followed, because that is what stands there:
many tokenizers join a line's end with the next, or a space with the next word. Text from documents and users is
tokenised with all control tokens split (`plain_text`), so that it cannot close a turn or open one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from cachecraft_rag.engine.plain_text import PlainTokenizer
from cachecraft_rag.errors import ConfigError, ContextLengthError
from cachecraft_rag.types import Chunk, Prompt, Segment, chunk_id_of, digest

DEFAULT_SYSTEM = "You answer questions about the given context. Be brief and use only the context."
_LINE_END, _WORD = "\n", "The"  # what stands before and behind a segment, as far as its tokenisation goes
_CONTEXT_MARK, _QUESTION_MARK = "\u27e6cachecraft-context\u27e7", "\u27e6cachecraft-question\u27e7"

Turn = tuple[Literal["user", "assistant"], str]


class PromptBuilder:
    """Turns a question and its chunks into a `Prompt` for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer; its chat template is used where it has one, a plain layout otherwise.
        context_length: most tokens of prompt and answer together.
        system: the instruction; part of the system segment, so caches captured under another one are a miss for eq. 6.
        private_system: True where `system` holds one user's text: captures behind it are then kept to the session.
        best_last: chunks come ranked best first and are laid out with the best one nearest to the question, where
            small models make most of it (on 18 questions about the sample handbook 15 answers were right, 12 with the
            best one first).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        context_length: int,
        system: str = DEFAULT_SYSTEM,
        private_system: bool = False,
        best_last: bool = True,
    ) -> None:
        if _CONTEXT_MARK in system or _QUESTION_MARK in system:
            raise ConfigError("the system prompt holds one of this package's own marks; choose other words")
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._best_last = best_last
        self._system_text = system
        # A copy: transformers keeps in the tokenizer whether special tokens are meant, so that of two threads with one
        # tokenizer each would read the other's text the wrong way.
        self._plain = PlainTokenizer(tokenizer, self._template_text())
        if private_system and self._ids(system, special=True) != self._ids(system, special=False):
            raise ConfigError(
                "a private instruction holds special tokens of the model, or others that control it; leave them out"
            )
        self._head: str | None = None
        self._head, _ = self._cut([])
        ids = self._encode(self._head, special=True, after=_WORD)
        self.system = Segment("system", digest("system", " ".join(map(str, ids))), ids, private=private_system)

    def chunk_segment(self, chunk: Chunk) -> Segment:
        """The chunk as the model sees it: its text and an empty line.

        Raises ConfigError where its id is not that of its text.
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
        self, question: str, chunks: Sequence[Chunk], *, history: Sequence[Turn] = (), reserve: int = 0
    ) -> Prompt:
        """Lay out the prompt; `reserve` tokens are kept free for the answer.

        History goes *behind* the chunks: the first user turn carries the context and the first question, later turns
        follow. So no private text ever stands before a chunk, and every chunk-cache captured here may be shared.

        Where the context is too small, chunks are left out from the end (retrieval ranks the best first), each named in
        `Prompt.trimmed`. A chunk too long to fit even alone is passed over, wherever it ranks, and takes no other with
        it. A chunk that occurs twice is kept once.

        Raises:
            ContextLengthError: system, question and the reserve alone do not fit.
            ConfigError: the question is empty.
        """
        if not question.strip():
            raise ConfigError("the question is empty; ask something")
        tail = self._question_segment(question, history)
        room = self._context_length - reserve - len(self.system.token_ids) - len(tail.token_ids)
        if room < 0:
            raise ContextLengthError(
                f"question and history need {len(tail.token_ids)} tokens, the instruction "
                f"{len(self.system.token_ids)}, the answer {reserve}; the model's context is {self._context_length}. "
                "Shorten the question or history, or lower max_new_tokens."
            )
        kept, trimmed, too_long = self._fitting(chunks, room)
        laid_out = reversed(kept) if self._best_last else kept
        return Prompt((self.system, *laid_out, tail), trimmed, too_long, room)

    def _fitting(
        self, chunks: Sequence[Chunk], room: int
    ) -> tuple[list[Segment], tuple[str, ...], tuple[tuple[str, int], ...]]:
        """What is kept, what is left out, and which of that is too long for the whole room."""
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
                left = -1  # the prompt is full: what ranks lower is left out, even where it would fit
            trimmed.append(chunk_id)
        return kept, tuple(trimmed), tuple(too_long)

    def _question_segment(self, question: str, history: Sequence[Turn]) -> Segment:
        turns = [*history, ("user", question)]
        if any(role != ("user", "assistant")[place % 2] for place, (role, _) in enumerate(turns)):
            raise ConfigError("history must alternate user and assistant turns, begin with user and end with assistant")
        texts = [text for _, text in turns]
        _, pieces = self._cut([f"Question: {texts[0]}", *texts[1:]])
        ids: list[int] = []
        behind_line_end = True
        for piece, special in pieces:
            before = _LINE_END if behind_line_end and not special else ""
            closing = self._encode(piece, special=special, before=before)
            ids.extend(closing)
            behind_line_end = piece.endswith(_LINE_END) or (behind_line_end and not piece)
        name = digest("question", " ".join(map(str, ids)))
        return Segment("question", name, tuple(ids), private=True, closing=len(closing))

    def _cut(self, turns: Sequence[str]) -> tuple[str, list[tuple[str, bool]]]:
        """Render the template with marks; returns the text before the chunks and the pieces behind them.

        A piece is its text and whether special tokens in it are meant.
        """
        texts = list(turns) or [""]
        marks = [f"{_QUESTION_MARK}{place}\u27e7" for place in range(len(texts))]
        renderings = self._renderings([f"Context:\n{_CONTEXT_MARK}{marks[0]}", *marks[1:]])
        cuts = (rendered.partition(_CONTEXT_MARK) for rendered in renderings)
        best = next(cuts)
        if self._head not in (None, best[0]):
            best = next((cut for cut in cuts if cut[0] == self._head), best)
        head, _, rest = best
        pieces: list[tuple[str, bool]] = []
        whole = bool(head)
        for mark, text in zip(marks, texts, strict=True):
            before, found, rest = rest.partition(mark)
            whole = whole and bool(found)
            pieces += [(before, True), (text, False)]
        pieces.append((rest, True))
        if not whole or any(_CONTEXT_MARK in piece or _QUESTION_MARK in piece for piece, own in pieces if own):
            raise ConfigError(
                "the model's chat template drops, repeats or reorders the user's text; it cannot be cut into segments"
            )
        return head, pieces

    def _renderings(self, turns: Sequence[str]) -> Iterator[str]:
        """The prompt's text with the instruction as a system turn, then with it in front of the first user turn.

        The second is the only one where the template has no system role (Gemma-2 raises, others pass over it). It is
        also right where a template puts the instruction in front of the *last* user turn (Mistral), behind the chunks.
        """
        roles = ["user", "assistant"] * (len(turns) // 2 + 1)
        messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
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
        """The chat template, and what it makes of a conversation in which nothing is said."""
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            return ""
        from jinja2.exceptions import TemplateError

        texts = [str(template)]
        for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
            try:
                texts.append(self._apply([{"role": role, "content": _QUESTION_MARK} for role in roles]))
            except TemplateError:  # it knows no system turns, or refuses all: `_cut` says so
                continue
        return "\n".join(texts)

    def _apply(self, messages: list[dict[str, str]]) -> str:
        rendered: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return rendered

    def _encode(self, text: str, *, special: bool, before: str = "", after: str = "") -> tuple[int, ...]:
        """The ids that `text` has between `before` and `after`; its ids alone where the tokenizer joins them up."""
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
