"""Reuse in unmarked prompts: what is found, what is captured and when, its owner, and that it is right.

TESTS_PROMPTS  number of odd prompts; 49 by default, 10,000 take the better part of an hour
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.planner import make_plan
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.prompt.unmarked import candidates_of
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog import found_texts
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.types.digests import digest, digest_of_tokens
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.prompts import Prompt, Segment

SHORT = SamplingParams(max_new_tokens=2)
CONFIG = ReuseConfig(
    recompute_ratio=0.15, nearest_share=0.0, method=ReuseMethod(loading="layerwise")
)
WORDS = [
    "kettle",
    "vinegar",
    "toaster",
    "crumb",
    "tray",
    "fridge",
    "oven",
    "door",
    "lever",
    "filter",
    "hood",
    "month",
    "hose",
    "lid",
    "valve",
    "steam",
]
PROMPTS = int(os.environ.get("TESTS_PROMPTS", "49"))
MakeEngine = Callable[..., Engine]


def passage(seed: int, words: int = 24) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize() + f" number {seed}."


PASSAGES = [passage(seed) for seed in range(6)]


def prompt_of(*passages: str, question: str = "Which of them is about the kettle?") -> str:
    """Much as LlamaIndex writes it, with shorter lines: here a token is a letter, and a long line is a passage."""
    context = "\n\n".join(passages)
    return (
        f"Context information is below.\n---------------------\n{context}\n---------------------\n"
        f"Answer the query from the context.\nQuery: {question}\nAnswer: "
    )


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder("Llama", max_position_embeddings=4096)


@pytest.fixture
def make_engine(decoder: Decoder, store: ChunkCacheStore) -> Iterator[MakeEngine]:
    with ExitStack() as opened:
        given = {
            "decoder": decoder,
            "store": store,
            "config": CONFIG,
            "new_variants": NewVariants(share=1e9),
        }
        yield lambda **settings: opened.enter_context(Engine(**(given | settings)))


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


def ask(engine: Engine, prompt: str, *, settle: bool = True, **how: object) -> Generation:
    answer = engine.stream_text(prompt, **({"sampling": SHORT} | how))  # type: ignore[arg-type]
    for _ in answer:
        pass
    if settle:
        assert engine.settle(60)
    return answer


def reused(answer: Generation) -> float:
    """Share of the passages' tokens that came from chunk-caches."""
    found = [one for one in answer.stats.chunks if one.outcome in ("exact", "reused")]
    return sum(one.tokens for one in found) / sum(map(len, PASSAGES[:3]))


def logits_of(engine: Engine, prompt: str, **config: object) -> torch.Tensor:
    target = [ord(letter) % 200 for letter in "answer"]
    chosen = ReuseConfig(capture=False, method=ReuseMethod(loading="layerwise")).changed_by(config)
    return engine.score_answer(prompt, (), target=target, max_new_tokens=8, config=chosen).logits


def test_the_third_time_passages_are_reused_in_another_order_beside_others(engine: Engine) -> None:
    first = ask(engine, prompt_of(PASSAGES[0], PASSAGES[1], PASSAGES[2]))
    second = ask(engine, prompt_of(PASSAGES[3], PASSAGES[2], PASSAGES[0], PASSAGES[1]))
    assert (reused(first), reused(second)) == (0.0, 0.0)
    third = ask(engine, prompt_of(PASSAGES[1], PASSAGES[4], PASSAGES[0], PASSAGES[2]))
    assert reused(third) > 0.9
    assert third.stats.tokens_reused > 0.75 * sum(map(len, PASSAGES[:3]))
    assert 0 < third.stats.tokens_recomputed <= 0.2 * sum(map(len, PASSAGES[:3]))
    assert not third.stats.exact
    assert sum(one.outcome == "computed" for one in third.stats.chunks) == 1  # the new passage


def test_a_prompt_that_comes_again_is_exact(engine: Engine) -> None:
    prompt = prompt_of(*PASSAGES[:3])
    full = logits_of(engine, prompt, plain_prompts="off")
    for time in range(3):
        answer = ask(engine, prompt)
        assert answer.stats.exact
        assert reused(answer) == (0.0 if time < 2 else pytest.approx(1.0, abs=0.05))
    assert engine.score_answer(prompt, (), max_new_tokens=2).stats.tokens_recomputed == 0
    torch.testing.assert_close(logits_of(engine, prompt), full, atol=1e-3, rtol=0)
    other = prompt_of(*PASSAGES[:3], question="And what of the toaster, the oven and the hood?")
    answer = ask(engine, other)  # another question after the same passages
    assert answer.stats.exact
    assert reused(answer) > 0.9


def test_recomputing_everything_is_the_model_itself_and_nothing_is_not(engine: Engine) -> None:
    for order in ((0, 1, 2), (2, 0, 1)):
        ask(engine, prompt_of(*(PASSAGES[place] for place in order)))
    prompt = prompt_of(PASSAGES[1], PASSAGES[2], PASSAGES[0])
    full = logits_of(engine, prompt, plain_prompts="off")
    torch.testing.assert_close(
        logits_of(engine, prompt, recompute_ratio=1.0), full, atol=1e-3, rtol=0
    )
    stale = (logits_of(engine, prompt, recompute_ratio=0.0) - full).abs().max()
    half = (logits_of(engine, prompt, recompute_ratio=0.5) - full).abs().max()
    assert 1e-3 < half < stale


def test_chunks_captured_as_documents_are_recognised_at_once(engine: Engine) -> None:
    chunks = [Chunk(text) for text in PASSAGES[:3]]
    list(engine.stream("Which is it?", chunks, sampling=SHORT))
    assert engine.settle(60)
    answer = ask(engine, prompt_of(PASSAGES[2], PASSAGES[5], PASSAGES[0], PASSAGES[4]))
    outcomes = {one.chunk_id: one.outcome for one in answer.stats.chunks}
    assert [outcomes[chunk.chunk_id] for chunk in (chunks[2], chunks[0])] == ["reused", "reused"]
    engine.store.evict(RowFilter(chunk_ids=(chunks[0].chunk_id,)))
    outcomes = {
        one.chunk_id: one.outcome for one in ask(engine, prompt_of(*PASSAGES[:4])).stats.chunks
    }
    assert chunks[0].chunk_id not in outcomes
    assert outcomes[chunks[2].chunk_id] == "reused"


def test_short_prompts_the_last_words_and_answers_are_computed(engine: Engine) -> None:
    for _ in range(3):
        short = ask(engine, PASSAGES[0][:200])
        assert short.stats.chunks == ()
    # A passage in place of a question.
    last = prompt_of(*PASSAGES[:2]).rsplit("\n-----", 1)[0] + "\n-----\n" + PASSAGES[2]
    assert len(ask(engine, last).stats.chunks) == 2
    history = [
        ("user", "Hello."),
        ("assistant", "\n\n".join(PASSAGES)),
        ("user", "\n\n".join(PASSAGES)),
        ("assistant", "Hm."),
    ]
    assert ask(engine, "What did you say?", history=history[:2]).stats.chunks == ()
    assert len(ask(engine, "What did I say?", history=history).stats.chunks) == len(PASSAGES)
    assert len(ask(engine, prompt_of(*PASSAGES[:3]), history=history[:2]).stats.chunks) == 3


def test_a_passage_that_a_prompt_holds_twice_is_reused_twice(engine: Engine) -> None:
    for order in ((0, 1, 2), (2, 0, 1)):
        ask(engine, prompt_of(*(PASSAGES[place] for place in order)))
    prompt = prompt_of(PASSAGES[1], PASSAGES[0], PASSAGES[1], PASSAGES[2], PASSAGES[0])
    answer = ask(engine, prompt, settle=False)
    assert [one.outcome for one in answer.stats.chunks] == ["reused"] * 5
    full = logits_of(engine, prompt, plain_prompts="off")
    torch.testing.assert_close(
        logits_of(engine, prompt, recompute_ratio=1.0), full, atol=1e-3, rtol=0
    )
    for _ in range(3):
        again = ask(engine, prompt)
    outcomes = [one.outcome for one in again.stats.chunks]
    assert outcomes[:3] == ["exact"] * 3  # a prefix with a text that it holds twice is not captured
    assert outcomes[3:] == ["reused"] * 2
    assert engine.store.check().findings == ()


TOOL = {"type": "function", "function": {"name": "search", "description": "Finds passages."}}
TWENTY = [passage(seed, words=14) for seed in range(100, 120)]


def turns_of(number: int, shown: list[str], canary: str = "") -> list[Turn]:
    """A question, the call of a tool, and what it found."""
    calls = json.dumps([{"name": "search", "arguments": {"query": f"number {number} {canary}"}}])
    return [
        ("user", f"Question {number}: which of them is about the kettle? {canary}"),
        ("calls", calls),
        ("result", "\n\n".join(shown)),
    ]


def converse(
    engine: Engine, seed: int, *, session: str | None = None, canary: str = ""
) -> list[tuple[int, int]]:
    """A conversation of six turns with results of a tool; returns, for each, the tokens of passages that appear for the
    third time or later, and those of them that chunk-caches served.
    """
    tokenizer = engine.decoder.tokenizer
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in TWENTY}
    names = {text: digest("text", digest_of_tokens(tokens)) for text, tokens in ids.items()}
    rng = random.Random(seed)
    history: list[Turn] = []
    times: Counter[str] = Counter()
    counts = []
    for number in range(6):
        shown = rng.sample(TWENTY, 8)
        history += turns_of(number, shown, canary)
        in_prompt = [
            text for turn in history if turn[0] == "result" for text in turn[1].split("\n\n")
        ]
        answer = ask(engine, "", history=history, tools=[TOOL], session=session)
        times.update(set(in_prompt))
        known = {names[text] for text in in_prompt if times[text] >= 3}
        old = sum(len(ids[text]) for text in in_prompt if times[text] >= 3)
        served = [
            one
            for one in answer.stats.chunks
            if one.chunk_id in known and one.outcome in ("exact", "reused")
        ]
        counts.append((old, sum(one.tokens for one in served)))
        history.append(("assistant", f"The answer to number {number}."))
    return counts


@pytest.fixture(scope="module")
def long_decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder("Llama", max_position_embeddings=16384)


def test_results_of_tools_are_reused_from_the_third_time_on(
    make_engine: MakeEngine, long_decoder: Decoder
) -> None:
    engine = make_engine(decoder=long_decoder)
    counts = converse(engine, seed=1)
    assert counts[0] == (0, 0)
    for old, kept in counts[2:]:
        assert old > 0
        assert kept >= 0.75 * old


def test_the_earlier_turns_of_a_session_become_exact(
    make_engine: MakeEngine, long_decoder: Decoder
) -> None:
    engine = make_engine(decoder=long_decoder)
    history: list[Turn] = []
    for number in range(4):
        history += turns_of(number, TWENTY[5 * number : 5 * number + 5])
        answer = ask(engine, "", history=history, tools=[TOOL], session="ada")
        history.append(("assistant", f"The answer to number {number}."))
    outcomes = [one.outcome for one in answer.stats.chunks]
    # of the first two turns; the end of a last message is not searched
    assert outcomes[:9] == ["exact"] * 9
    assert "exact" not in outcomes[10:]


def test_no_conversation_shows_what_another_one_holds(
    make_engine: MakeEngine, long_decoder: Decoder, store: ChunkCacheStore
) -> None:
    """Results of tools belong to their session; the words around them are never captured for others."""
    engine = make_engine(decoder=long_decoder)
    converse(engine, seed=1, session="ada", canary="Canary-4711 " * 12)
    rows = [one.variant for one in store.rows(RowFilter(), limit=1000)]
    assert {one.session for one in rows if len(one.key.origin_prefix) > 1} == {"ada"}
    shared = [one for one in rows if one.session is None]
    assert len(shared) == 2  # the instruction and the fixed passage
    answer = ask(engine, "", history=turns_of(0, TWENTY[:8]), tools=[TOOL], session="bob")
    assert [one.outcome for one in answer.stats.chunks] == ["computed"] * len(answer.stats.chunks)
    assert "Canary" not in str(answer.stats.as_dict())


def test_it_can_be_switched_off_and_computes_the_same_tokens(engine: Engine) -> None:
    prompt = prompt_of(*PASSAGES[:3])
    off = ReuseConfig(plain_prompts="off")
    on, without = ask(engine, prompt), ask(engine, prompt, config=off)
    assert without.stats.chunks == ()
    assert on.stats.tokens_prompt == without.stats.tokens_prompt
    rows = len(engine.store.rows(RowFilter()))
    for _ in range(2):
        ask(engine, prompt, config=ReuseConfig(capture=False))
    assert len(engine.store.rows(RowFilter())) == rows


def test_sessions_keep_what_is_found_to_themselves(engine: Engine) -> None:
    for order in ((0, 1, 2), (2, 0, 1)):
        ask(engine, prompt_of(*(PASSAGES[place] for place in order)), session="ada")
    moved = prompt_of(PASSAGES[1], PASSAGES[2], PASSAGES[0])
    assert reused(ask(engine, moved, session="bob")) == 0.0
    assert reused(ask(engine, moved)) == 0.0
    assert reused(ask(engine, moved, session="ada")) > 0.9


def test_what_is_captured_for_all_users_follows_text_of_no_user(engine: Engine) -> None:
    for order in ((0, 1, 2), (2, 0, 1), (2, 0, 1), (1, 2, 0)):
        ask(
            engine,
            prompt_of(
                *(PASSAGES[place] for place in order), question="My name is Canary-4711, who am I?"
            ),
        )
    system, stand_in = engine.prompts.system.segment_id, engine.prompts.stand_in.segment_id
    rows = [one.variant for one in engine.store.rows(RowFilter(), limit=1000)]
    shared = [one for one in rows if one.session is None]
    assert {one.key.origin_prefix for one in shared} == {(), (system,), (system, stand_in)}
    assert len(shared) == 5  # the instruction, what stands in for neighbours, and three passages
    assert all(one.session.startswith("prefix ") for one in rows if one.session is not None)


def test_no_request_shows_the_text_of_another(engine: Engine) -> None:
    """Canaries in private text: neither captured for others nor named in statistics."""
    canary = "The secret word of Ada is Canary-4711, and nobody else may ever read it, not even in part or by accident."
    for _ in range(3):
        ask(engine, prompt_of(*PASSAGES[:3], question=canary), session="ada")
        ask(engine, canary + "\n\n" + prompt_of(*PASSAGES[:3]), session="ada")
    before = make_answer(engine, PASSAGES[2], PASSAGES[0])
    for text in (
        str(before.stats.as_dict()),
        str(engine.store.counts()),
        str(list(engine.request_counts.collect())),
    ):
        assert "Canary" not in text
        assert "kettle" not in text.lower().replace("kettle?", "")
    assert reused(before) == 0.0


def make_answer(engine: Engine, *passages: str) -> Generation:
    return ask(engine, prompt_of(*passages, *PASSAGES[3:]), session="bob")


def test_what_was_seen_is_remembered_across_engines_and_bounded(
    make_engine: MakeEngine, store: ChunkCacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(make_engine(), prompt_of(*PASSAGES[:3]))
    ask(make_engine(), prompt_of(PASSAGES[1], PASSAGES[0], PASSAGES[2]))
    assert reused(ask(make_engine(), prompt_of(PASSAGES[2], PASSAGES[1], PASSAGES[0]))) > 0.9
    monkeypatch.setattr(found_texts, "MOST_SEEN", 100)
    for start in range(0, 1000, 10):
        assert store.seen_texts([f"text {start + i}" for i in range(10)]) == set()
    assert store.seen_texts(["text 995", "text 3"]) == {"text 995"}
    with store._durable.catalog._db.reading() as connection:
        assert connection.execute("SELECT count(*) FROM seen_texts").fetchone()[0] <= 101


def test_with_new_variants_off_nothing_is_captured(make_engine: MakeEngine) -> None:
    engine = make_engine(new_variants="off")
    for _ in range(3):
        assert reused(ask(engine, prompt_of(*PASSAGES[:3]))) == 0.0
    assert len(engine.store.rows(RowFilter())) == 1  # the instruction


def odd_prompts(count: int) -> Iterator[str]:
    rng = random.Random(7)
    pool = [passage(seed, rng.randrange(5, 80)) for seed in range(40)]
    for place in range(count):
        kind = place % 7
        length = rng.randrange(1, 2400)
        if kind == 0:
            yield "".join(
                chr(rng.choice((rng.randrange(32, 0x2FF), rng.randrange(0x4E00, 0x4F00), 0x1F600)))
                for _ in range(length // 3)
            )
        elif kind == 1:
            yield (
                rng.choice(
                    ["a", "\n", "ab\n", "- ", "<a>", "\u0000", "\ud83d", "0", "===\n", PASSAGES[0]]
                )
                * length
            )[:length] or "a"
        elif kind == 2:
            yield json.dumps(
                {rng.choice(WORDS): rng.choices(pool, k=3) for _ in range(4)},
                indent=rng.choice((None, 1)),
            )
        elif kind == 3:
            yield "\n".join(
                f"def {rng.choice(WORDS)}_{i}(a, b):\n    return a < b > {i}\n"
                for i in range(length // 40 + 1)
            )
        elif kind == 4:
            yield "\n\n".join(
                f"Q: {rng.choice(pool)}\nA: {rng.choice(WORDS)}" for _ in range(rng.randrange(1, 7))
            )
        elif kind == 5:
            yield " ".join(rng.choices(WORDS, k=length // 7 + 1))
        else:
            yield prompt_of(*rng.choices(pool, k=rng.randrange(1, 6)), question=rng.choice(pool))


def test_odd_prompts_raise_nothing_and_claim_nothing_wrong(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompts = [
        one
        for one in odd_prompts(PROMPTS)
        if one.strip() and len(one.encode("utf-8", "replace")) < 3900
    ]
    rng = random.Random(11)
    compared = 0
    for place, prompt in enumerate(prompts):
        again = place % 3 == 2
        text = rng.choice(prompts[: place + 1]) if again else prompt
        answer = ask(engine, text, settle=place % 5 == 0)
        stats = answer.stats
        assert (
            stats.tokens_reused + stats.tokens_recomputed + stats.tokens_computed
            == stats.tokens_prompt
        )
        if stats.tokens_reused and place % 4 == 0:
            assert engine.settle(60)
            scored = engine.score_answer(text, (), target=[65, 66], max_new_tokens=2)
            full = logits_of_two(engine, text)
            if scored.stats.exact:
                compared += 1
                torch.testing.assert_close(scored.logits, full, atol=1e-3, rtol=0)
    assert compared >= 3


def test_prompts_of_any_kind_keep_their_tokens_and_name_equal_segments_alike(
    engine: Engine,
) -> None:
    list(engine.stream("Which?", [Chunk(text) for text in PASSAGES], sampling=SHORT))
    assert engine.settle(60)
    engine.prompts._context_length = 200_000  # the model is not asked
    found = 0
    for place, prompt in enumerate(one for one in odd_prompts(6 * PROMPTS) if one.strip()):
        session = "ada" if place % 2 else None
        built = engine.prompts.build(
            prompt, (), recognise=engine.recogniser(session), private=session is not None
        )
        assert built.token_ids == engine.prompts.build(prompt, ()).token_ids
        assert len({(one.segment_id, one.tokens_digest) for one in built.segments}) == len(
            {one.segment_id for one in built.segments}
        )
        kinds = [one.kind for one in built.segments]
        assert (kinds[0], kinds[-1]) == ("system", "question")
        assert all(
            one.private
            for one in built.segments
            if one.kind == "question" or (session is not None and one.found)
        )
        found += any(one.found for one in built.segments)
    assert found > PROMPTS


def logits_of_two(engine: Engine, text: str) -> torch.Tensor:
    config = ReuseConfig(plain_prompts="off", capture=False)
    return engine.score_answer(text, (), target=[65, 66], max_new_tokens=2, config=config).logits


def test_one_line_of_a_hundred_thousand_characters_is_cut(engine: Engine) -> None:
    rng = random.Random(5)
    line = " ".join(rng.choices(WORDS, k=16_000))[:100_000]
    prompts = engine.prompts
    prompts._context_length = 200_000  # the model is not asked
    built = prompts.build(line, (), recognise=lambda ids: [])
    found = [one for one in built.segments if one.found]
    assert sum(len(one.token_ids) for one in found) > 0.95 * len(line)
    assert built.token_ids == prompts.build(line, ()).token_ids


def test_a_passage_that_occurs_twice_does_not_spoil_the_candidates_of_those_after_it() -> None:
    """No prefix with a repeated segment is captured, so the candidate ends before the passage after it."""
    system = Segment("system", "system", (1,) * 8)

    def passage(token: int) -> Segment:
        ids = (token,) * 50
        return Segment("chunk", digest("text", digest_of_tokens(ids)), ids, found=True)

    question = Segment("question", "asked", (9,) * 5, private=True)
    prompt = Prompt((system, passage(2), passage(2), passage(3), question))
    found = candidates_of(
        prompt,
        make_plan(prompt, {}, CONFIG),
        None,
        ("namespace", "fingerprint"),
        stand_in=Segment("chunk", "stand-in", (4,) * 60),
    )
    assert len(found) == 3  # the two passages, and the prompt up to the repeated one
    for candidate in found.values():
        segments = range(len(candidate.segments))
        assert candidate.never_stored <= set(segments)
        assert candidate.fixed.keys() <= set(segments)
