"""Segments found by content: the same text gives the same segments, wherever it stands."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.planning.found_text import (
    LEAST,
    MOST,
    TokenKinds,
    find_segments,
    marks,
    text_mark,
    window_hashes,
)

# Ids 0–99 are words, then: two kinds of line ends, a dash, a dot that ends a paragraph, the two halves of a tag.
KINDS = TokenKinds.of(
    [
        *(f"\u0120word{i}" for i in range(100)),
        "\u010a",
        "\u010a\u010a",
        "-",
        ".\u010a\u010a",
        "<",
        ">",
        "[",
        "]:",
        '"',
    ]
)
LINE, BLANK, DASH, DOT, OPEN, CLOSE, BRACKET, UNBRACKET, QUOTE = range(100, 109)


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100) for _ in range(count)]


def contents(ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[part.start : part.stop]) for part in find_segments(ids, KINDS)]


def test_the_marks_of_vocabularies_are_understood() -> None:
    kinds = TokenKinds.of(
        [
            "\u010a",
            "<0x0A>",
            ".\u010a\u010a",
            "\u2581word",
            "\u0120",
            "</",
            "/>\u010d\u010a",
            None,
            "\u4e2d",
        ]
    )
    # the last entry is for ids beyond the vocabulary
    assert kinds.newlines.tolist() == [1, 1, 2, 0, 0, 0, 1, 0, 0, 0]
    assert kinds.words.nonzero()[0].tolist() == [3, 8]
    assert kinds.opens.nonzero()[0].tolist() == [5]
    assert kinds.closes.nonzero()[0].tolist() == [6]


def test_long_lines_are_passages() -> None:
    rng = random.Random(0)
    passages = [words(rng, length) for length in (100, 130, 256)]
    assert contents([*passages[0], LINE, *passages[1], LINE, 7, 8, LINE, *passages[2]]) == [
        *map(tuple, passages)
    ]


def test_strings_in_json_are_passages() -> None:
    rng = random.Random(0)
    passages = [words(rng, 120) for _ in range(3)]
    json = [BRACKET]
    for score, passage in enumerate(passages):
        json += [QUOTE, 5, QUOTE, score, QUOTE, *passage, QUOTE, 9]
    assert contents(json) == [tuple(passage) for passage in passages]
    assert contents(json[1:]) != contents(json)  # elsewhere quotation marks belong to the text


@given(st.lists(st.integers(0, 105), max_size=1500), st.integers(0, 2**32))
def test_segments_are_in_order_and_of_the_lengths_that_are_allowed(
    some: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    ids = some + words(rng, rng.randrange(1500)) + some
    found = find_segments(ids, KINDS)
    assert all(LEAST <= len(part) <= MOST for part in found)
    assert all(before.stop <= after.start for before, after in pairwise(found))
    assert not found or (found[0].start >= 0 and found[-1].stop <= len(ids))


@pytest.mark.parametrize(
    "separator",
    [
        [BLANK],
        [DOT],
        [LINE, LINE],
        [LINE, DASH, DASH, LINE],
        [OPEN, 7, CLOSE],
        [LINE, BRACKET, 7, 8, UNBRACKET, LINE],
    ],
)
@pytest.mark.parametrize("length", [64, 100, 256, 300, 900])
def test_a_passage_between_firm_ends_gives_the_same_segments_among_any_others(
    separator: list[int], length: int
) -> None:
    rng = random.Random(length)
    passage = words(rng, length)
    alone = contents(passage)
    assert alone
    for _ in range(20):
        others = [words(rng, rng.randrange(1, 700)) for _ in range(2)]
        among = contents([*others[0], *separator, *passage, *separator, *others[1]])
        place = among.index(alone[0])
        assert among[place : place + len(alone)] == alone


def test_text_without_line_ends_falls_into_step_again() -> None:
    rng = random.Random(1)
    text = words(rng, 20_000)
    whole = set(contents(text))
    for skipped in (1, 7, 65, 130, 999):
        shifted = contents(words(rng, 50) + text[skipped:])
        assert next(place for place, one in enumerate(shifted) if one in whole) <= 12
        assert sum(len(one) for one in shifted if one in whole) > 0.9 * (len(text) - skipped)
    assert 90 < np.mean([len(one) for one in whole]) < 200


def test_short_paragraphs_and_lines_fall_into_step_again() -> None:
    rng = random.Random(2)
    for end in (BLANK, LINE):
        text = [token for _ in range(400) for token in [*words(rng, rng.randrange(5, 40)), end]]
        whole = set(contents(text))
        for skipped in (3, 30, 300):
            shifted = contents(text[skipped:])
            assert sum(len(one) for one in shifted if one in whole) > 0.75 * len(text)


def test_what_says_nothing_gives_no_segments_or_equal_ones() -> None:
    assert contents([DASH] * 5000) == []
    assert contents([BLANK] * 5000) == []
    assert len(set(contents([5] * 5000))) <= 2
    assert find_segments([], KINDS) == []


@given(st.integers(0, 2**32), st.integers(31, 400))
def test_a_text_is_found_by_its_mark_wherever_it_stands(seed: int, length: int) -> None:
    rng = random.Random(seed)
    text = words(rng, length)
    mark = text_mark(text)
    assert mark is not None
    before = words(rng, rng.randrange(300))
    places, hashes = marks([*before, *text, *words(rng, rng.randrange(300))])
    assert (len(before) + mark[1]) in places[hashes == mark[0]]


def test_short_texts_have_no_mark_and_marks_are_few() -> None:
    assert text_mark(words(random.Random(3), 30)) is None
    places, _ = marks(words(random.Random(3), 10_000))
    assert len(places) < 1500
    assert int(window_hashes(np.arange(5000)).max()) < 2**48  # SQLite keeps 63 bits


def test_ids_beyond_the_tokenizers_vocabulary_count_as_empty_text() -> None:
    """Models have room for more tokens than their tokenizers, and vLLM accepts such ids in a prompt."""
    kinds = TokenKinds.of(["word", "\n\n"])
    text = [0] * 70 + [1] + [0] * 40 + [300_000] + [0] * 40
    assert find_segments(text, kinds) == [range(70), range(71, 152)]
    assert find_segments([300_000] * 100, kinds) == []
