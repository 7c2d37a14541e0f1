"""Reuse in unmarked text: a prompt without documents, which any application wrote as one piece.

The user's messages and the results of tools, earlier ones too, are searched for what was captured before, word for
word: documents first, then passages cut by their content (`planning.found_text`). Such *found* segments take their
chunk-caches like chunks. The text between and after them is computed and private, and so are short prompts and the end
of the last message.

A passage that is found a second time is captured in idle time, after the instruction and a fixed passage: no user's
text shapes what others are served. In a session it is captured for that session only. A whole prompt that is sent a
second time is captured after its own prefix, which makes it exact from then on. Only prompts with that very prefix see
these captures: they belong to a session that is named by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.found_text import TokenKinds, find_segments, marks
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.store.catalog.found_texts import MarkedText
from cachecraft_rag.types.digests import digest, digest_of_tokens, passage_id
from cachecraft_rag.types.prompts import Prompt, Segment, TokenIds, token_array

# Takes token ids; returns the places of captured texts in them, each with its chunk id.
Recognise = Callable[[TokenIds], list[tuple[range, str]]]

MIN_TEXT_TOKENS = 256  # shorter texts are not searched
# last tokens of the last message, which hold what is asked: they are always computed
_ASKED_TOKENS = 32
_MAX_REPEATS = 32  # places with one mark; text that repeats itself more often is not looked up


class PromptPiece(NamedTuple):
    """A part of the prompt after the instruction, and whether it is searched for captured text."""

    token_ids: tuple[int, ...]
    is_searched: bool


def segments_of(
    pieces: Sequence[PromptPiece],
    kinds: TokenKinds,
    recognise: Recognise,
    *,
    private: bool,
    repeated: bool = False,
) -> list[Segment] | None:
    """Divide the prompt after its instruction into segments, or return None if no segment is found in it.

    Found segments, of kind "chunk", are captured texts and passages cut by their content, whether captured or not; the
    text between and after them is of kind "question" and private. Nothing is found in the last 32 tokens of the last
    message, or if fewer than 256 tokens are searched.

    Args:
        pieces: the pieces of the prompt in order. The last one that is searched ends the last message.
        kinds: features of the tokens of the vocabulary, which decide where passages are cut.
        recognise: finds captured texts in token ids, for example `recognise_captured`.
        private: whether the found segments belong to one session.
        repeated: whether a text that occurs several times is a segment each time, or the first time only.
    """
    ids = token_array([token for piece in pieces for token in piece.token_ids])
    regions = _searched_regions(pieces)
    if sum(len(region) for region in regions) < MIN_TEXT_TOKENS:
        return None

    places: list[tuple[range, str]] = []
    names: set[str] = set()
    for region in regions:
        is_last = region is regions[-1]
        limit = region.stop - (_ASKED_TOKENS if is_last else 0)
        text = ids[region.start : region.stop]
        for part, name in _find(text, kinds, recognise):
            place = range(region.start + part.start, region.start + part.stop)
            is_repeated = name in names
            if place.stop <= limit and (repeated or not is_repeated):
                names.add(name)
                places.append((place, name))
    if not places:
        return None

    segments: list[Segment] = []
    start = 0
    for place, name in sorted(places, key=lambda item: item[0].start):
        if place.start > start:
            segments.append(_text_between(ids, start, place.start))
        token_ids = ids[place.start : place.stop]
        segments.append(Segment("chunk", name, token_ids, private=private, found=True))
        start = place.stop
    segments.append(_text_between(ids, start, len(ids)))
    return segments


def _searched_regions(pieces: Sequence[PromptPiece]) -> list[range]:
    regions = []
    start = 0
    for piece in pieces:
        stop = start + len(piece.token_ids)
        if piece.is_searched:
            regions.append(range(start, stop))
        start = stop
    return regions


def _text_between(ids: TokenIds, start: int, stop: int) -> Segment:
    tokens = ids[start:stop]
    name = digest("between", str(start), " ".join(map(str, tokens.tolist())))
    return Segment("question", name, tokens, private=True)


def _find(ids: TokenIds, kinds: TokenKinds, recognise: Recognise) -> Iterator[tuple[range, str]]:
    """Yield segments that do not overlap: captured texts, longest first, then passages cut by content."""
    captured = sorted(recognise(ids), key=lambda item: (-len(item[0]), item[0].start))
    passages = [
        (part, passage_id(digest_of_tokens(ids[part.start : part.stop])))
        for part in find_segments(ids, kinds)
    ]

    is_taken = bytearray(len(ids))
    for part, name in (*captured, *passages):
        if not any(is_taken[part.start : part.stop]):
            is_taken[part.start : part.stop] = b"\1" * len(part)
            yield part, name


def recognise_captured(
    token_ids: TokenIds, look_up: Callable[[dict[int, list[int]]], Iterable[MarkedText]]
) -> list[tuple[range, str]]:
    """Return (range of positions, chunk id) of each captured text in these tokens, word for word, in no fixed order.

    Ranges may overlap or repeat. A text that occurs more than 32 times may not be found.

    Args:
        token_ids: the tokens to search.
        look_up: takes mark → its places, and returns the captured texts that have one of the marks.
    """
    places, hashes = marks(token_ids)
    repeats = Counter(hashes.tolist())
    places_by_mark: dict[int, list[int]] = {}
    for place, mark in zip(places.tolist(), hashes.tolist(), strict=True):
        if repeats[mark] <= _MAX_REPEATS:
            places_by_mark.setdefault(mark, []).append(place)

    recognised = []
    for text in look_up(places_by_mark):
        if not isinstance(text.place, int) or not isinstance(text.tokens, int):  # a damaged row
            continue
        for place in places_by_mark.get(text.mark, ()):
            start = place - text.place
            part = range(start, start + text.tokens)
            is_inside = 0 <= part.start < part.stop <= len(token_ids)
            if (
                is_inside
                and digest_of_tokens(token_ids[part.start : part.stop]) == text.tokens_digest
            ):
                recognised.append((part, text.chunk_id))
    return recognised


def session_of(prompt: Prompt, session: str | None) -> str | None:
    """Return the session of a request: `session`, or without one a session named by the prompt's prefix.

    The prefix ends with the last found segment. None without `session` and without found segments.
    """
    if session is not None or not any(segment.found for segment in prompt.segments):
        return session
    last = max(index for index, segment in enumerate(prompt.segments) if segment.found)
    return "prefix " + _digest_of(prompt.segments[: last + 1])


def _digest_of(segments: Sequence[Segment]) -> str:
    return digest(*(segment.segment_id for segment in segments))


def candidates_of(
    prompt: Prompt,
    plan: Plan,
    session: str | None,
    scope: Sequence[str],
    *,
    stand_in: Segment,
    shared: Segment | None = None,
    each_prefix: bool = False,
) -> dict[str, Candidate]:
    """Return name → candidate to capture; the caller captures those whose names it has seen before.

    There is one for each found segment without a chunk-cache, after the instruction and `stand_in`. There is one for
    the whole prompt up to its last found segment, if a found segment that has no segment twice before it is not exact.

    Args:
        prompt: the prompt of the request.
        plan: its plan.
        session: session of the request, see `session_of`.
        scope: namespace and fingerprint; parts of the names, besides the session.
        stand_in: passages are captured after this fixed passage.
        shared: instruction for captures that all users may reuse, if the prompt's own instruction is private.
        each_prefix: in a session, add one for the prefix up to each found segment that is not exact, because no whole
            prompt of a conversation is sent twice.
    """
    system, *_ = prompt.segments
    segments = tuple(replace(segment, found=False) for segment in prompt.segments)
    found_plans = {
        index: planned for index, planned in enumerate(plan) if prompt.segments[index].found
    }
    new = [index for index, planned in found_plans.items() if planned.variant is None]
    new_passages = frozenset(
        index
        for index in new
        if segments[index].segment_id == passage_id(segments[index].tokens_digest)
    )

    candidates: dict[str, Candidate] = {}
    for index in new:
        segment = segments[index]
        use_shared = shared is not None and system.private and not segment.private
        instruction = shared if shared is not None and use_shared else system
        owner = session if segment.private or instruction.private else None
        name = digest("text", *scope, owner or "", segment.segment_id)
        candidates[name] = Candidate(
            segments=(instruction, stand_in, segment),
            fixed={1: len(stand_in.token_ids), 2: len(segment.token_ids)},
            session=owner,
            never_stored=frozenset((1, 2) if index in new_passages else (1,)),
            namespace=scope[0],
        )

    inexact = {
        index: len(segments[index].token_ids)
        for index, planned in found_plans.items()
        if planned.outcome != "exact" and not _has_repeats(segments[:index])
    }
    in_session = any(segments[index].private for index in found_plans)
    ends = sorted(inexact) if each_prefix and in_session else []
    if inexact:
        ends.append(max(found_plans))  # end of the whole prompt
    for end in ends:
        fixed = {index: tokens for index, tokens in inexact.items() if index <= end}
        name = digest("prefix", *scope, session or "", _digest_of(segments[: end + 1]))
        count = max(fixed) + 1
        never_stored = frozenset(index for index in new_passages if index < count)
        candidates[name] = Candidate(
            segments[:count], fixed, session, never_stored=never_stored, namespace=scope[0]
        )
    return candidates


def largest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates, without repeats and beginnings of another one of their session, most segments first."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda item: -len(item.segments)):
        owner, ids = candidate.identity
        if not any(
            other.identity[0] == owner and other.identity[1][: len(ids)] == ids for other in kept
        ):
            kept.append(candidate)
    return kept


def _has_repeats(segments: Sequence[Segment]) -> bool:
    """Return whether a segment occurs twice; the store takes such an origin prefix for a damaged one."""
    return len({segment.segment_id for segment in segments}) < len(segments)
