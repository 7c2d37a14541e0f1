"""Segments found by content in text that nobody marked: content-defined chunking over token ids, as in rsync.

The text is cut where its own content says so, so that the same passage gives the same segments wherever it stands. Firm
ends are blank lines, lines without a word (`-----`), tags, short lines in brackets (`[CONTEXT 1]:`), the ends of lines
that are long enough for a segment, and in JSON the quotation marks. Longer passages are cut again where a rolling hash
of the last tokens says so, at a line end if there is one. What separates segments belongs to none: a passage that ends
with a blank line here and with a tag there is still the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

LEAST, MOST = 64, 512  # tokens of a segment
_WHOLE = 256  # a passage of at most so many tokens is not cut
_LONG_LINE = 96  # tokens of a line that is a passage by itself
_WINDOW = 16  # tokens that a hash looks at
_ONE_IN, _LINE_ENDS_ONE_IN = 64, 4  # positions, and line ends, at which the hash cuts
_LONGEST_TAG = 32
_SPREAD, _STEP = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_SPACES = str.maketrans({"\u0120": " ", "\u2581": " ", "\u010a": "\n", "\u010d": "\r", "\u0109": "\t"})


@dataclass(frozen=True, eq=False)
class TokenKinds:
    """What each token of a vocabulary says about where text may be cut.

    newlines       uint8 `[vocabulary]`: line ends that it closes with
    words          bool `[vocabulary]`: whether it holds a letter or digit
    opens, closes  bool `[vocabulary]`: whether it holds `<`, and `>`
    opens_line     bool `[vocabulary]`: whether its text begins with `[` or `{`
    closes_line    bool `[vocabulary]`: whether its text ends with `]` or `]:`
    quotes         bool `[vocabulary]`: whether it holds a quotation mark that is not escaped
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
        """From the tokens as a vocabulary writes them, by id; SentencePiece and byte-level marks are understood."""
        texts = ["\n" if token == "<0x0A>" else (token or "").translate(_SPACES) for token in tokens]
        return cls(
            np.array([text[len(text.rstrip()) :].count("\n") for text in texts], dtype=np.uint8),
            np.array([any(map(str.isalnum, text)) for text in texts], dtype=np.bool_),
            np.array(["<" in text for text in texts], dtype=np.bool_),
            np.array([">" in text for text in texts], dtype=np.bool_),
            np.array([text.lstrip().startswith(("[", "{")) for text in texts], dtype=np.bool_),
            np.array([text.rstrip().endswith(("]", "]:")) for text in texts], dtype=np.bool_),
            np.array(['"' in text.replace('\\"', "") for text in texts], dtype=np.bool_),
        )


def window_hashes(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`[tokens]`: a hash of each token and the 15 before it (of fewer at the beginning)."""
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


def find_segments(token_ids: Sequence[int], kinds: TokenKinds) -> list[range]:
    """The segments of a text, in order; what lies between them belongs to none. Each has `LEAST` to `MOST` tokens.

    >>> kinds = TokenKinds.of(["word", "\\n\\n"])
    >>> find_segments([0] * 5 + [1] + [0] * 80 + [1] + [0] * 70, kinds)
    [range(6, 86), range(87, 157)]

    A passage is the same between tags, line ends and other passages:

    >>> kinds = TokenKinds.of(["word", "\\n", "<p>"])
    >>> find_segments([2, 1] + [0] * 70 + [1, 2], kinds)
    [range(2, 72)]
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if len(ids) < LEAST:
        return []
    hashes = window_hashes(ids)
    line_ends = _line_ends(ids, kinds)
    found: list[range] = []
    short: list[range] = []
    for passage in _passages(ids, kinds, line_ends):
        if len(passage) < LEAST:
            short.append(passage)
            continue
        found += _joined(short, hashes)
        short = []
        found += _cut(passage, hashes, line_ends)
    return [*found, *_joined(short, hashes)]


def _line_ends(ids: NDArray[np.int64], kinds: TokenKinds) -> list[tuple[int, int, int]]:
    """(First token, end, number of line ends) of each run of tokens that end a line."""
    newlines = kinds.newlines[ids]
    ends = np.flatnonzero(newlines)
    if not len(ends):
        return []
    edges = np.flatnonzero(np.diff(ends) > 1) + 1
    runs = np.split(ends, edges)
    return [(int(run[0]), int(run[-1]) + 1, int(newlines[run].sum(dtype=np.int64))) for run in runs]


def _passages(ids: NDArray[np.int64], kinds: TokenKinds, line_ends: list[tuple[int, int, int]]) -> Iterator[range]:
    """What stands between firm ends, in order; never empty."""
    words = np.concatenate(([0], np.cumsum(kinds.words[ids])))
    firm = list(_tags(ids, kinds))
    if kinds.opens_line[ids[0]]:  # JSON, whose strings are passages
        firm += [(int(quote), int(quote) + 1) for quote in np.flatnonzero(kinds.quotes[ids])]
    last = start = 0  # the line end before, and where it stops
    for begin, end, count in [*line_ends, (len(ids), len(ids), 0)]:
        is_heading = _is_bracketed(ids[start:begin], kinds)
        if words[begin] == words[start] or is_heading:  # a line without a word, or `[CONTEXT 1]:`
            firm.append((last, end))
        elif count > 1:
            firm.append((begin, end))
        if begin - start >= _LONG_LINE:  # a whole passage or paragraph: applications join them by single line ends
            firm += [(last, start), (begin, end)]
        last, start = begin, end
    is_line_end = kinds.newlines[ids] > 0
    begin = 0
    for start, end in [*sorted(firm), (len(ids), len(ids))]:
        passage = _without_line_ends(range(begin, start), is_line_end)
        if passage:
            yield passage
        begin = max(begin, end)


def _without_line_ends(passage: range, is_line_end: NDArray[np.bool_]) -> range:
    """Return a passage without the line ends around it, which depend on the tag or line beside it."""
    start = passage.start
    stop = passage.stop
    while start < stop and is_line_end[start]:
        start += 1
    while start < stop and is_line_end[stop - 1]:
        stop -= 1
    return range(start, stop)


def _is_bracketed(line: NDArray[np.int64], kinds: TokenKinds) -> bool:
    """Return whether a line is a short heading in brackets."""
    if not 0 < len(line) <= _LONGEST_TAG:
        return False
    return bool(kinds.opens_line[line[0]] and kinds.closes_line[line[-1]])


def _tags(ids: NDArray[np.int64], kinds: TokenKinds) -> Iterator[tuple[int, int]]:
    """What stands from `<` to `>` in one line."""
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
    """Neighbouring short passages joined to segments, as the hashes at their ends say; what is left over is dropped."""
    begin: int | None = None
    for passage in passages:
        if begin is None or passage.stop - begin > MOST:
            begin = passage.start
        if passage.stop - begin >= LEAST and (hashes[passage.stop - 1] & np.uint64(1) or passage.stop - begin >= 128):
            yield range(begin, passage.stop)
            begin = None


def _cut(passage: range, hashes: NDArray[np.uint64], line_ends: list[tuple[int, int, int]]) -> Iterator[range]:
    """A passage of at least `LEAST` tokens in segments."""
    if len(passage) <= _WHOLE:
        yield passage
        return
    inside = [(begin, end) for begin, end, _ in line_ends if passage.start < begin and end < passage.stop]
    lines = {begin: end for begin, end in inside if not hashes[begin - 1] & np.uint64(_LINE_ENDS_ONE_IN - 1)}
    own = np.flatnonzero(hashes[passage.start : passage.stop] & np.uint64(_ONE_IN - 1) == 0) + passage.start + 1
    cuts = sorted(lines.items() | {(int(cut), int(cut)) for cut in own.tolist()})
    start, place = passage.start, 0
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


def marks(token_ids: Sequence[int], *, width: int = 16) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Places and hashes of some windows: of any `width` neighbouring ones, the one with the least hash (winnowing).

    So two texts with `width + 15` equal tokens in a row have a mark in common (Schleimer et al., SIGMOD 2003).
    A mark's place is that of its last token. Shorter texts have none.
    """
    hashes = window_hashes(np.asarray(token_ids, dtype=np.int64))[_WINDOW - 1 :]
    if len(hashes) < width:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
    rows = np.lib.stride_tricks.sliding_window_view(hashes, width)
    places = np.unique(rows.argmin(axis=1) + np.arange(len(rows)))
    return places + _WINDOW - 1, hashes[places]


def text_mark(token_ids: Sequence[int]) -> tuple[int, int] | None:
    """The mark by which a captured text is recognised, and its place; None for a text too short to have one."""
    places, hashes = marks(token_ids)
    if not len(places):
        return None
    least = int(hashes.argmin())
    return int(hashes[least]), int(places[least])
