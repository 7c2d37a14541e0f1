"""Reuse in prompts that nobody marked: any application's text, as one piece.

The user's text is searched for what was captured before, word for word: documents first, then passages cut by their
content (`planning.found_text`). Such *found* segments take their chunk-caches like chunks. Whatever stands between and
behind them is computed and private, and so are short prompts and the end of the last message.

A found passage that comes a second time is captured in idle time, behind the instruction and a fixed passage, so that
nobody's text shapes what others are served; in a session, for that session only. A whole prompt that comes a second
time is captured behind its own prefix, which makes it exact from then on. These captures are seen behind that very
prefix only: they belong to a session that is named by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.found_text import TokenKinds, find_segments, marks
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.store.found_texts import MarkedText
from cachecraft_rag.types import Prompt, Segment, digest, digest_of_tokens

Recognise = Callable[[Sequence[int]], list[tuple[range, str]]]  # tokens → where which chunk stands in them
Piece = tuple[tuple[int, ...], bool]  # token ids, and whether they are searched

_LEAST_TEXT = 256  # tokens; in shorter texts nothing is looked for
_END = 32  # last tokens of the last message: whatever is asked there is always computed
_MOST_REPEATS = 32  # places with one mark; a text that repeats itself as often is not looked for


def tail_of(pieces: Sequence[Piece], kinds: TokenKinds, recognise: Recognise, *, private: bool) -> list[Segment] | None:
    """What follows the instruction as segments; None where nothing may be reused.

    Args:
        pieces: in order; the last one that is searched ends the last message.
        private: whether the found segments are one session's.
    """
    ids = [token for piece, _ in pieces for token in piece]
    regions, start = [], 0
    for piece, searched in pieces:
        if searched:
            regions.append(range(start, start + len(piece)))
        start += len(piece)
    if sum(map(len, regions)) < _LEAST_TEXT:
        return None
    found: dict[str, range] = {}  # a prompt holds no segment twice
    for region in regions:
        limit = region.stop - (_END if region is regions[-1] else 0)
        for part, name in _found(ids[region.start : region.stop], kinds, recognise):
            if region.start + part.stop <= limit:
                found.setdefault(name, range(region.start + part.start, region.start + part.stop))
    if not found:
        return None
    segments, start = [], 0
    for name, part in sorted(found.items(), key=lambda one: one[1].start):
        if part.start > start:
            segments.append(_between(ids, start, part.start))
        segments.append(Segment("chunk", name, tuple(ids[part.start : part.stop]), private=private, found=True))
        start = part.stop
    return [*segments, _between(ids, start, len(ids))]


def _between(ids: Sequence[int], start: int, stop: int) -> Segment:
    tokens = ids[start:stop]
    name = digest("between", str(start), " ".join(map(str, tokens)))
    return Segment("question", name, tuple(tokens), private=True)


def _found(ids: Sequence[int], kinds: TokenKinds, recognise: Recognise) -> Iterator[tuple[range, str]]:
    taken = bytearray(len(ids))
    known = sorted(recognise(ids), key=lambda one: (-len(one[0]), one[0].start))
    cut = ((part, _name(digest_of_tokens(ids[part.start : part.stop]))) for part in find_segments(ids, kinds))
    for part, name in (*known, *cut):
        if not any(taken[part.start : part.stop]):
            taken[part.start : part.stop] = b"\1" * len(part)
            yield part, name


def _name(tokens_digest: str) -> str:
    """The segment id of a passage; a document's text has its chunk id."""
    return digest("text", tokens_digest)


def recognised(
    token_ids: Sequence[int], look_up: Callable[[dict[int, list[int]]], Iterable[MarkedText]]
) -> list[tuple[range, str]]:
    """Where captured texts stand in these tokens, word for word, and their chunk ids.

    Args:
        look_up: gives the captured texts that have one of these marks.
    """
    places, hashes = marks(token_ids)
    repeats = Counter(hashes.tolist())
    by_mark: dict[int, list[int]] = {}
    for place, mark in zip(places.tolist(), hashes.tolist(), strict=True):
        if repeats[mark] <= _MOST_REPEATS:
            by_mark.setdefault(mark, []).append(place)
    found = []
    for text in look_up(by_mark):
        if not isinstance(text.place, int) or not isinstance(text.tokens, int):  # a damaged row
            continue
        for place in by_mark.get(text.mark, ()):
            part = range(place - text.place, place - text.place + text.tokens)
            inside = 0 <= part.start < part.stop <= len(token_ids)
            if inside and digest_of_tokens(token_ids[part.start : part.stop]) == text.tokens_digest:
                found.append((part, text.chunk_id))
    return found


def session_of(prompt: Prompt, session: str | None) -> str | None:
    """The session of a request: the given one, or for a prompt with found segments one named by all up to the last."""
    if session is not None or not any(segment.found for segment in prompt.segments):
        return session
    return "prefix " + _prefix(prompt)


def _prefix(prompt: Prompt) -> str:
    last = max(index for index, segment in enumerate(prompt.segments) if segment.found)
    return digest(*(segment.segment_id for segment in prompt.segments[: last + 1]))


def candidates_of(
    prompt: Prompt,
    plan: Plan,
    session: str | None,
    scope: Sequence[str],
    *,
    stand_in: Segment,
    shared: Segment | None = None,
) -> dict[str, Candidate]:
    """What to capture if it was seen before, each by the name under which that is remembered.

    Args:
        session: of the request, see `session_of`.
        scope: what keeps one's texts from another's, besides the session.
        stand_in: the passage that passages are captured behind.
        shared: the instruction that passages are captured behind for everybody where the prompt's own is private.
    """
    system, *_ = prompt.segments
    found, segments = {}, tuple(replace(segment, found=False) for segment in prompt.segments)
    texts = {i: planned for i, planned in enumerate(plan.segments) if prompt.segments[i].found}
    new = [i for i, planned in texts.items() if planned.variant is None]
    first = frozenset(i for i in new if segments[i].segment_id == _name(segments[i].tokens_digest))
    for i in new:
        ours = shared if shared is not None and system.private and not segments[i].private else system
        owner = session if segments[i].private or ours.private else None
        name = digest("text", *scope, owner or "", segments[i].segment_id)
        chunks = {1: len(stand_in.token_ids), 2: len(segments[i].token_ids)}
        found[name] = Candidate(
            (ours, stand_in, segments[i]), chunks, owner, first=frozenset((1, 2) if i in first else (1,))
        )
    fixed = {i: len(segments[i].token_ids) for i, planned in texts.items() if planned.outcome != "exact"}
    if fixed:
        name = digest("prefix", *scope, session or "", _prefix(prompt))
        found[name] = Candidate(segments[: max(fixed) + 1], fixed, session, first=first)
    return found
