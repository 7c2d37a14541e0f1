"""Priming: a document's chunks are captured after their neighbours, once, in passes of a limited length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, ContextLengthError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.priming import Primer, prime_documents
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.types.documents import Chunk

MakeDecoder = Callable[..., Decoder]
DOCUMENT = [Chunk(f"Section {n}. " + "The kettle boils. " * 3) for n in range(6)]
LENGTH = len(DOCUMENT[0].text) + 2  # bytes are tokens here; an empty line follows


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkCacheStore]:
    with ChunkCacheStore.open(tmp_path / "caches", variants_per_chunk=20) as opened:
        yield opened


@pytest.fixture
def make_engine(
    tiny_decoder: MakeDecoder, store: ChunkCacheStore
) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as opened:
        given = {
            "decoder": tiny_decoder("Llama"),
            "store": store,
            "config": ReuseConfig(method=ReuseMethod(alpha=0.3)),
        }
        yield lambda **settings: opened.enter_context(Engine(**(given | settings)))


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


def primer(engine: Engine, *, chunks_per_pass: int = 100) -> Primer:
    return Primer(engine, window=len(engine.prompts.system.token_ids) + chunks_per_pass * LENGTH)


def prefixes(engine: Engine, chunk: Chunk) -> list[tuple[int, ...]]:
    """The capture prefixes of a chunk's variants, as places in the document."""
    places = {one.chunk_id: place for place, one in enumerate(DOCUMENT)}
    rows = engine.store.rows(RowFilter(chunk_ids=(chunk.chunk_id,)))
    assert {row.variant.key.origin_prefix[0] for row in rows} <= {engine.prompts.system.segment_id}
    return sorted(tuple(places[name] for name in row.variant.key.origin_prefix[1:]) for row in rows)


def test_each_chunk_is_captured_after_the_chunks_before_it(engine: Engine) -> None:
    assert primer(engine).prime(DOCUMENT) == 8  # and the system segment
    assert [prefixes(engine, chunk) for chunk in DOCUMENT[1:]] == [
        [tuple(range(place))] for place in range(1, 6)
    ]
    assert {row.variant.exact_share for row in engine.store.rows()} == {1.0}
    assert {row.variant.primed for row in engine.store.rows()} == {True}


def test_texts_in_place_of_chunks_are_refused(engine: Engine) -> None:
    texts: list[Any] = [DOCUMENT[0].text]
    for call in (primer(engine).prime, primer(engine).missing, partial(engine.stream, "Why?")):
        with pytest.raises(ConfigError, match="write Chunk"):
            call(texts)
    with pytest.raises(ConfigError, match="each of segments must be"):
        engine.look_up(texts)


def test_the_first_chunk_is_captured_after_the_next_ones_too(engine: Engine) -> None:
    primer(engine).prime(DOCUMENT)
    assert prefixes(engine, DOCUMENT[0]) == [(), (1, 2)]


def test_a_second_run_bears_nothing_and_an_interrupted_one_goes_on(engine: Engine) -> None:
    assert primer(engine).prime(DOCUMENT[:4]) == 6
    assert primer(engine).prime(DOCUMENT) == 2
    assert primer(engine).prime(DOCUMENT) == 0
    engine.store.evict(RowFilter(chunk_ids=(DOCUMENT[2].chunk_id,)))
    assert primer(engine).prime(DOCUMENT) == 1
    assert prefixes(engine, DOCUMENT[2]) == [(0, 1)]


def test_a_long_document_is_cut_into_windows_that_overlap_by_a_quarter(engine: Engine) -> None:
    assert primer(engine, chunks_per_pass=4).prime(DOCUMENT) == 8
    assert [prefixes(engine, chunk) for chunk in DOCUMENT] == [
        [(), (1, 2)],
        [(0,)],
        [(0, 1)],
        [(0, 1, 2)],
        [(3,)],
        [(3, 4)],
    ]


def test_a_pass_of_one_chunk_bears_each_alone(engine: Engine) -> None:
    assert primer(engine, chunks_per_pass=1).prime(DOCUMENT) == 7
    assert [prefixes(engine, chunk) for chunk in DOCUMENT] == [[()]] * 6


def test_a_primer_without_neighbours_or_room_is_refused_what_it_could_not_use(
    engine: Engine,
) -> None:
    with pytest.raises(ConfigError, match="leave related out"):
        Primer(engine, alone=True, related=lambda _: [])
    with pytest.raises(ConfigError, match="window is 0"):
        Primer(engine, window=0)


def test_chunks_may_be_captured_without_their_document(engine: Engine) -> None:
    alone = Primer(engine, alone=True)
    # with the instruction and the passage that stands in for neighbours
    assert len(alone.missing(DOCUMENT)) == 8
    assert alone.prime(DOCUMENT) == 8
    behind = [row.variant.key.origin_prefix for row in engine.store.rows(RowFilter())]
    system, stand_in = engine.prompts.system.segment_id, engine.prompts.stand_in.segment_id
    assert sorted(behind) == sorted([(), (system,), *[(system, stand_in)] * 6])
    # not after neighbours
    assert not any(row.variant.primed for row in engine.store.rows(RowFilter()))
    assert alone.prime(DOCUMENT) == 0


def test_a_chunk_longer_than_a_pass_is_refused(engine: Engine) -> None:
    with pytest.raises(ContextLengthError, match="split documents into smaller chunks"):
        primer(engine, chunks_per_pass=1).prime([Chunk("x" * LENGTH)])


def test_an_instruction_that_fills_a_pass_is_named(engine: Engine) -> None:
    one = primer(engine, chunks_per_pass=0)
    for ask in (lambda: one.fits(DOCUMENT[0]), lambda: one.prime(DOCUMENT)):
        with pytest.raises(ContextLengthError, match=r"the instruction of .* shorten it"):
            ask()
    assert one.prime([]) == 0
    assert one.missing([]) == {}


def test_a_pass_leaves_room_for_the_question_and_the_answer_of_a_request_to_vllm(
    engine: Engine,
) -> None:
    most = engine.decoder.context_length - len(engine.prompts.system.token_ids) - 3
    empty = LENGTH - len(DOCUMENT[0].text)
    widest = Primer(engine, window=engine.decoder.context_length)
    assert widest.fits(Chunk("x" * (most - empty)))
    assert not widest.fits(Chunk("x" * (most - empty + 1)))


def test_whether_a_chunk_fits_a_pass_can_be_asked(engine: Engine) -> None:
    one = primer(engine, chunks_per_pass=1)
    assert one.fits(DOCUMENT[0])
    assert not one.fits(Chunk("x" * LENGTH))


def test_nothing_and_repeats(engine: Engine) -> None:
    assert primer(engine).prime([]) == 0
    assert primer(engine).prime([DOCUMENT[0], DOCUMENT[1], DOCUMENT[0]]) == 4


def test_documents_with_the_same_id_are_all_primed(engine: Engine) -> None:
    texts = [("manual.md", DOCUMENT[:2]), ("manual.md", DOCUMENT[2:4])]
    prime_documents(primer(engine), texts, skipped=pytest.fail)
    assert all(prefixes(engine, chunk) for chunk in DOCUMENT[:4])


def test_primed_chunks_serve_the_first_question_exactly(engine: Engine) -> None:
    primer(engine).prime(DOCUMENT)
    best_first = list(reversed(DOCUMENT[:3]))  # laid out with the best one last
    how = SamplingParams(max_new_tokens=8)
    answer = engine.stream("Why?", best_first, sampling=how)
    text = "".join(answer)
    assert {chunk.outcome for chunk in answer.stats.chunks} == {"exact"}
    full = engine.stream(
        "Why?", best_first, sampling=how, config=ReuseConfig(reuse=False, capture=False)
    )
    assert "".join(full) == text


def test_what_the_store_does_not_take_is_not_counted(
    tiny_decoder: MakeDecoder, tmp_path: Path
) -> None:
    with ChunkCacheStore.open(tmp_path / "full", disk_bytes=100) as store:
        engine = Engine(tiny_decoder("Llama"), store)
        assert primer(engine).prime(DOCUMENT) == 0
        engine.close()


def test_one_chunk_is_captured_after_others_that_are_not(engine: Engine) -> None:
    # and the system segment
    assert primer(engine).capture(DOCUMENT[4], [DOCUMENT[1], DOCUMENT[0], DOCUMENT[1]]) == 2
    assert prefixes(engine, DOCUMENT[4]) == [(1, 0)]
    assert prefixes(engine, DOCUMENT[0]) == prefixes(engine, DOCUMENT[1]) == []
    assert primer(engine).capture(DOCUMENT[4], [DOCUMENT[1], DOCUMENT[0]]) == 0
    assert primer(engine).capture(DOCUMENT[4]) == 1
    assert prefixes(engine, DOCUMENT[4]) == [(), (1, 0)]


def test_a_born_chunk_is_what_a_primed_one_is(engine: Engine) -> None:
    primer(engine).prime(DOCUMENT[:3])
    primed = {row.variant.variant_id: row.variant for row in engine.store.rows()}
    engine.store.evict(RowFilter(chunk_ids=(DOCUMENT[2].chunk_id,)))
    assert primer(engine).capture(DOCUMENT[2], DOCUMENT[:2]) == 1
    [row] = engine.store.rows(RowFilter(chunk_ids=(DOCUMENT[2].chunk_id,)))
    before = primed[row.variant.variant_id]
    assert row.variant.inter == pytest.approx(before.inter, rel=1e-4)
    assert row.variant.cci == pytest.approx(before.cci, rel=1e-4)


def test_what_does_not_fit_a_pass_is_left_out_from_the_far_end(engine: Engine) -> None:
    primer(engine, chunks_per_pass=3).capture(DOCUMENT[4], [DOCUMENT[4], *DOCUMENT[:4]])
    assert prefixes(engine, DOCUMENT[4]) == [(2, 3)]
    with pytest.raises(ContextLengthError, match="split documents into smaller chunks"):
        primer(engine, chunks_per_pass=1).capture(Chunk("x" * LENGTH))


def test_a_private_instruction_cannot_be_primed(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(system="The user is Ada.", private_system=True)
    with pytest.raises(ConfigError, match="private"):
        primer(engine).prime(DOCUMENT)
    with pytest.raises(ConfigError, match="private"):
        primer(engine).capture(DOCUMENT[0])


def similar_to(*others: Chunk) -> Callable[[Chunk], list[Chunk]]:
    return lambda _chunk: list(others)


def test_a_document_of_one_chunk_is_captured_after_similar_chunks(engine: Engine) -> None:
    page, most_similar, next_similar, third = DOCUMENT[:4]
    similar = Primer(engine, related=similar_to(most_similar, next_similar, third))
    assert len(similar.missing([page])) == 2  # and the instruction
    assert similar.prime([page]) == 2
    assert prefixes(engine, page) == [(2, 1)]  # two, and the most similar chunk is next to it
    assert prefixes(engine, most_similar) == []  # computed as context only


def test_new_similar_chunks_do_not_capture_a_document_again(engine: Engine) -> None:
    page, first, second = DOCUMENT[:3]
    Primer(engine, related=similar_to(first)).prime([page])
    later = Primer(engine, related=similar_to(second))
    assert later.missing([page]) == {}
    assert later.prime([page]) == 0


def test_without_similar_chunks_a_document_of_one_chunk_is_captured_after_the_fixed_passage(
    engine: Engine,
) -> None:
    Primer(engine, related=similar_to()).prime(DOCUMENT[:1])
    (row,) = engine.store.rows(RowFilter(chunk_ids=(DOCUMENT[0].chunk_id,)))
    assert row.variant.key.origin_prefix == (
        engine.prompts.system.segment_id,
        engine.prompts.stand_in.segment_id,
    )
