"""Segments found by content in unmarked text: content-defined chunking over token ids, as in rsync.

Cuts depend on the content only, so the same passage gives the same segments in every prompt. Fixed cuts are blank
lines, lines without a word (`-----`), tags, short lines in brackets (`[CONTEXT 1]:`), the ends of lines that are long
enough for a segment, and quotation marks in JSON. Longer passages are cut again at positions chosen by a rolling hash
of the last tokens, at a line end if there is one. The separators around a segment do not belong to it: a passage that
ends with a blank line in one prompt and with a tag in another gives the same segments. Neighbouring passages that are
too short for a segment are joined into a segment, together with the separators between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.types.prompts import TokenIds

# Fewest and most tokens of a segment. With 64 a quarter of the tokens of pages with short paragraphs was not found.
LEAST = 48
MOST = 512
_WHOLE = 256  # passages of at most this many tokens are not cut
_WINDOW = 16  # tokens per rolling hash
# On average the hash cuts at one in so many positions, and at one in so many line ends.
_ONE_IN = 64
_LINE_ENDS_ONE_IN = 4
_LONGEST_TAG = 32  # tokens
# Multipliers of the rolling hash.
_SPREAD = 0x9E3779B97F4A7C15
_STEP = 0xD6E8FEB86659FD93
_SPACES = str.maketrans(
    {"\u0120": " ", "\u2581": " ", "\u010a": "\n", "\u010d": "\r", "\u0109": "\t"}
)


def _ending_newlines(text: str) -> int:
    return min(255, text[len(text.rstrip()) :].count("\n"))


@dataclass(frozen=True, eq=False)
class TokenKinds:
    """Features of each token of a vocabulary that determine where text is cut; the last entry is for all other ids.

    newlines       uint8 `[vocabulary + 1]`: number of line ends at the token's end, at most 255
    words          bool `[vocabulary + 1]`: True if the token holds a letter or digit
    opens, closes  bool `[vocabulary + 1]`: True if the token holds `<`, or `>`
    opens_line     bool `[vocabulary + 1]`: True if the token begins with `[` or `{`
    closes_line    bool `[vocabulary + 1]`: True if the token ends with `]` or `]:`
    quotes         bool `[vocabulary + 1]`: True if the token holds a quotation mark that is not escaped
    """

    newlines: NDArray[np.uint8]
    words: NDArray[np.bool_]
    opens: NDArray[np.bool_]
    closes: NDArray[np.bool_]
    opens_line: NDArray[np.bool_]
    closes_line: NDArray[np.bool_]
    quotes: NDArray[np.bool_]

    @classmethod
    def of(cls, tokens: Iterable[str | None]) -> Self:
        """Return the features of a vocabulary's tokens, in the order of their ids, as a tokenizer spells them (`Ġthe`).

        None stands for an id without a token. One more entry, of an empty text, is for ids beyond the vocabulary.

        >>> TokenKinds.of(["a\\u010a\\u010a", "\\u010a" * 300, None]).newlines.tolist()
        [2, 255, 0, 0]
        """
        texts = [
            "\n" if token == "<0x0A>" else (token or "").translate(_SPACES)
            for token in (*tokens, None)
        ]
        return cls(
            np.array([_ending_newlines(text) for text in texts], dtype=np.uint8),
            np.array([any(map(str.isalnum, text)) for text in texts], dtype=np.bool_),
            np.array(["<" in text for text in texts], dtype=np.bool_),
            np.array([">" in text for text in texts], dtype=np.bool_),
            np.array([text.lstrip().startswith(("[", "{")) for text in texts], dtype=np.bool_),
            np.array([text.rstrip().endswith(("]", "]:")) for text in texts], dtype=np.bool_),
            np.array(['"' in text.replace('\\"', "") for text in texts], dtype=np.bool_),
        )


def window_hashes(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash, below 2**48, of each token and the up to 15 tokens before it: uint64 `[tokens]`."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_SPREAD)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(_STEP)
    total = mixed.copy()
    factor = np.full(1, _SPREAD, dtype=np.uint64)
    for back in range(1, min(_WINDOW, len(ids))):
        total[back:] += mixed[:-back] * factor
        factor = factor * np.uint64(_SPREAD)
    total ^= total >> np.uint64(29)
    return total * np.uint64(_STEP) >> np.uint64(16)


def find_segments(token_ids: Sequence[int] | TokenIds, kinds: TokenKinds) -> list[range]:
    """Return the segments of a text as ranges of positions, in order, each of 48 to 512 tokens (`LEAST`, `MOST`).

    Tokens between them are separators or too few for a segment.

    >>> kinds = TokenKinds.of(["word", "\\n\\n"])
    >>> find_segments([0] * 5 + [1] + [0] * 80 + [1] + [0] * 70, kinds)
    [range(6, 86), range(87, 157)]

    A passage gives the same segments between tags, between line ends and between other passages:

    >>> kinds = TokenKinds.of(["word", "\\n", "<p>"])
    >>> find_segments([2, 1] + [0] * 70 + [1, 2], kinds)
    [range(2, 72)]
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if len(ids) < LEAST:
        return []
    hashes = window_hashes(ids)
    ids = np.minimum(ids, len(kinds.words) - 1)
    line_ends = _line_ends(ids, kinds)
    segments: list[range] = []
    short: list[range] = []
    for passage in _passages(ids, kinds, line_ends):
        if len(passage) < LEAST:
            short.append(passage)
            continue
        segments += _joined(short, hashes)
        short = []
        segments += _cut(passage, hashes, line_ends)
    return [*segments, *_joined(short, hashes)]


def _line_ends(ids: NDArray[np.int64], kinds: TokenKinds) -> list[tuple[int, int, int]]:
    """Return (first token, end, number of line ends) of each run of tokens that end a line."""
    newlines = kinds.newlines[ids]
    ends = np.flatnonzero(newlines)
    if not len(ends):
        return []
    edges = np.flatnonzero(np.diff(ends) > 1) + 1
    runs = np.split(ends, edges)
    return [(int(run[0]), int(run[-1]) + 1, int(newlines[run].sum(dtype=np.int64))) for run in runs]


def _passages(
    ids: NDArray[np.int64], kinds: TokenKinds, line_ends: list[tuple[int, int, int]]
) -> Iterator[range]:
    """Yield the passages between fixed cuts, in order and without empty ones."""
    words = np.concatenate(([0], np.cumsum(kinds.words[ids])))
    cuts = list(_tags(ids, kinds))
    if kinds.opens_line[ids[0]]:  # JSON, whose strings are passages
        cuts += [(int(quote), int(quote) + 1) for quote in np.flatnonzero(kinds.quotes[ids])]
    # Begin and end of the previous line end.
    last = 0
    start = 0
    for begin, end, count in [*line_ends, (len(ids), len(ids), 0)]:
        is_heading = _is_bracketed(ids[start:begin], kinds)
        if words[begin] == words[start] or is_heading:  # a line without a word, or `[CONTEXT 1]:`
            cuts.append((last, end))
        elif count > 1:
            cuts.append((begin, end))
        # a whole passage or paragraph: applications join these by single line ends
        if begin - start >= LEAST:
            cuts += [(last, start), (begin, end)]
        last = begin
        start = end
    is_line_end = kinds.newlines[ids] > 0
    begin = 0
    for start, end in [*sorted(cuts), (len(ids), len(ids))]:
        passage = _without_line_ends(range(begin, start), is_line_end)
        if passage:
            yield passage
        begin = max(begin, end)


def _without_line_ends(passage: range, is_line_end: NDArray[np.bool_]) -> range:
    """Return a passage without the line ends around it, which depend on the neighbouring tag or line."""
    start = passage.start
    stop = passage.stop
    while start < stop and is_line_end[start]:
        start += 1
    while start < stop and is_line_end[stop - 1]:
        stop -= 1
    return range(start, stop)


def _is_bracketed(line: NDArray[np.int64], kinds: TokenKinds) -> bool:
    """Return True if a line is a short heading in brackets."""
    if not 0 < len(line) <= _LONGEST_TAG:
        return False
    return bool(kinds.opens_line[line[0]] and kinds.closes_line[line[-1]])


def _tags(ids: NDArray[np.int64], kinds: TokenKinds) -> Iterator[tuple[int, int]]:
    """Yield the ranges from `<` to `>` within a line."""
    closes = np.flatnonzero(kinds.closes[ids])
    if not len(closes):
        return
    newlines = np.concatenate(([0], np.cumsum(kinds.newlines[ids] > 0)))
    last = 0
    for begin in np.flatnonzero(kinds.opens[ids]).tolist():
        place = int(np.searchsorted(closes, begin))
        if begin < last or place == len(closes):
            continue
        end = int(closes[place]) + 1
        if end - begin <= _LONGEST_TAG and newlines[end - 1] == newlines[begin]:
            last = end
            yield begin, end


def _joined(passages: Sequence[range], hashes: NDArray[np.uint64]) -> Iterator[range]:
    """Join neighbouring short passages to segments, which end where the hash says. A remainder is dropped."""
    begin: int | None = None
    for passage in passages:
        if begin is None or passage.stop - begin > MOST:
            begin = passage.start
        if passage.stop - begin >= LEAST and (
            hashes[passage.stop - 1] & np.uint64(1) or passage.stop - begin >= 128
        ):
            yield range(begin, passage.stop)
            begin = None


def _cut(
    passage: range, hashes: NDArray[np.uint64], line_ends: list[tuple[int, int, int]]
) -> Iterator[range]:
    """Cut a passage of at least `LEAST` tokens into segments."""
    if len(passage) <= _WHOLE:
        yield passage
        return
    inside = [
        (begin, end) for begin, end, _ in line_ends if passage.start < begin and end < passage.stop
    ]
    lines = {
        begin: end
        for begin, end in inside
        if not hashes[begin - 1] & np.uint64(_LINE_ENDS_ONE_IN - 1)
    }
    is_cut = hashes[passage.start : passage.stop] & np.uint64(_ONE_IN - 1) == 0
    hash_cuts = np.flatnonzero(is_cut) + passage.start + 1
    cuts = sorted(lines.items() | {(int(cut), int(cut)) for cut in hash_cuts.tolist()})
    start = passage.start
    place = 0
    while passage.stop - start > _WHOLE:
        while place < len(cuts) and cuts[place][0] < start + LEAST:
            place += 1
        stop, end = cuts[place] if place < len(cuts) else (passage.stop, passage.stop)
        if stop > min(start + MOST, passage.stop - LEAST):
            if passage.stop - start <= MOST:
                break
            last = min(start + MOST, passage.stop - LEAST)
            stop = end = start + LEAST + 1 + int(hashes[start + LEAST : last].argmin())
        yield range(start, stop)
        start = end
    if passage.stop - start >= LEAST:
        yield range(start, passage.stop)


def marks(
    token_ids: Sequence[int] | TokenIds, *, width: int = 16
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the marks of a text: positions, int64 `[marks]`, ascending, and hashes, uint64 `[marks]`.

    Of each `width` neighbouring windows of 16 tokens, the one with the lowest hash is a mark, at its last token. This
    is winnowing (Schleimer et al., SIGMOD 2003): texts with `width + 15` equal tokens in a row share a mark, and
    shorter texts have none.
    """
    hashes = window_hashes(np.asarray(token_ids, dtype=np.int64))[_WINDOW - 1 :]
    if len(hashes) < width:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
    rows = np.lib.stride_tricks.sliding_window_view(hashes, width)
    places = np.unique(rows.argmin(axis=1) + np.arange(len(rows)))
    return places + _WINDOW - 1, hashes[places]


def text_mark(token_ids: Sequence[int] | TokenIds) -> tuple[int, int] | None:
    """Return (hash, position) of the one of `marks` with the lowest hash; None for fewer than 31 tokens."""
    places, hashes = marks(token_ids)
    if not len(places):
        return None
    least = int(hashes.argmin())
    return int(hashes[least]), int(places[least])
