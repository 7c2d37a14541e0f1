"""Audits: answers are compared with full prefill in idle time, token by token, and nothing but numbers is kept."""

from __future__ import annotations

import math
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.evaluation.metrics import divergence
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.audits import auditor as auditor_module
from cachecraft_rag.serving.audits import results as results_module
from cachecraft_rag.serving.audits.audit import Audit, ReuseFacts
from cachecraft_rag.serving.audits.audit_log import AUDIT_FILE, AuditLog, audits_in
from cachecraft_rag.serving.audits.predictions import (
    KEPT,
    LikeliestTokens,
    Predictions,
    compare,
    compare_likeliest,
)
from cachecraft_rag.serving.config import Audits, NewVariants
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.types.documents import Chunk
from tests.engines import until
from tests.serving.test_new_variants import Layers, answering

CHUNKS = [
    Chunk("Empty the kettle before you descale it with vinegar."),
    Chunk("The toaster has a crumb tray; pull it out to the left."),
    Chunk("Set the fridge to four degrees."),
]
MOVED = CHUNKS[::-1]
QUESTION = "How do I descale the kettle?"
SAMPLING = SamplingParams(max_new_tokens=24)
# Nothing is recomputed, so that answers differ from full prefill's.
CONFIG = ReuseConfig(
    recompute_ratio=0.0,
    nearest_share=0.0,
    capture=True,
    method=ReuseMethod(drift=0.0, loading="layerwise"),
)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def decoder(decoder_of_letters: Callable[..., Decoder]) -> Decoder:
    return decoder_of_letters(3.0)


@pytest.fixture
def make_engine(decoder: Decoder, store: ChunkCacheStore) -> Iterator[MakeEngine]:
    with ExitStack() as opened:
        given = {
            "decoder": decoder,
            "store": store,
            "config": CONFIG,
            "new_variants": "off",
            "audit": "idle",
        }
        yield lambda **settings: opened.enter_context(Engine(**(given | settings)))


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def layers(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Layers:
    return Layers(decoder, monkeypatch)


def ask(engine: Engine, chunks: list[Chunk], *, settle: bool = True, **how: Any) -> Generation:
    """A whole answer; with `settle`, its audit is done."""
    answer = engine.stream(how.pop("question", QUESTION), chunks, **({"sampling": SAMPLING} | how))
    for _ in answer:
        pass
    if settle:
        assert engine.settle(60)
    return answer


def audit_of(engine: Engine, answer: Generation) -> Audit:
    audit = engine.audit_of(answer.stats.request_id)
    assert audit is not None
    return audit


def metric(engine: Engine, name: str, **labels: str) -> float:
    value = engine.request_counts.registry.get_sample_value(f"cachecraft_{name}", labels)
    assert value is not None, name
    return value


def divergence_of_likeliest(full: torch.Tensor, reuse: torch.Tensor) -> float:
    """KL(full ‖ reuse) of the distributions over reuse's likeliest tokens and all others together."""
    ids = reuse.topk(KEPT).indices

    def merged(logits: torch.Tensor) -> torch.Tensor:
        kept = logits.double().softmax(-1).gather(-1, ids)
        return torch.cat((kept, 1 - kept.sum(-1, keepdim=True)), dim=-1).log()

    return divergence(merged(full), merged(reuse))[0]


# -- the result -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [QUESTION, "Where is the tray?", "How cold?", "What is it?"])
def test_an_audit_equals_an_offline_comparison_token_for_token(
    engine: Engine, question: str
) -> None:
    ask(engine, CHUNKS)
    answer = ask(engine, MOVED, question=question, config=replace(CONFIG, capture=False))
    audit = audit_of(engine, answer)
    tokens = answer._progress.tokens

    def scored(config: ReuseConfig) -> torch.Tensor:
        config = replace(config, capture=False)
        target = engine.score_answer(
            question, MOVED, target=tokens, max_new_tokens=len(tokens), config=config
        )
        return target.logits

    full = scored(ReuseConfig.full_prefill())
    reuse = scored(CONFIG)
    expected = (full.argmax(-1) != torch.tensor(tokens)).nonzero().flatten().tolist()
    assert list(audit.differences) == expected
    assert audit.tokens == len(tokens)
    assert audit.agreeing == len(tokens) - len(expected)
    kl, agreement = divergence(full, reuse)
    assert audit.agreement == pytest.approx(agreement)
    assert 0.0 < audit.kl <= kl + 1e-6
    assert audit.kl == pytest.approx(divergence_of_likeliest(full, reuse), rel=1e-3)
    assert audit.origin == "asked"
    assert audit.outcomes == {"exact": 1, "reused": 2} or audit.outcomes == {"reused": 3}


def test_answers_to_one_prompt_share_its_full_prefill(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    ask(engine, CHUNKS)
    configs = [
        replace(CONFIG, capture=False, recompute_ratio=ratio) for ratio in (0.0, 0.2, 0.6, 0.0)
    ]
    separate = [audit_of(engine, ask(engine, MOVED, config=config)) for config in configs]

    is_held = True
    monkeypatch.setattr(engine.auditor, "captures_pending", lambda: is_held)
    answers = [ask(engine, MOVED, config=config, settle=False) for config in configs]
    other = ask(engine, MOVED, question="How cold?", config=configs[0], settle=False)
    longer = SamplingParams(max_new_tokens=40)  # does not fit into the buffer of the others
    last = ask(engine, MOVED, config=configs[0], sampling=longer, settle=False)
    is_held = False
    engine.loop.wake()
    assert engine.settle(60)

    shared = [audit_of(engine, answer) for answer in answers]
    for together, alone in zip(shared, separate, strict=True):
        assert together.differences == alone.differences
        assert together.kl == alone.kl
    assert any(audit.differences for audit in shared)
    assert shared[0].computed_tokens == separate[0].computed_tokens
    for audit in shared[1:]:
        assert audit.computed_tokens == audit.tokens - 1
    assert audit_of(engine, other).computed_tokens > separate[0].tokens
    assert audit_of(engine, last).computed_tokens > separate[0].tokens
    # Nothing is kept for an answer that may come.
    assert engine.auditor._shared is None


def test_answers_of_one_token_count_as_compared(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    ask(engine, CHUNKS)
    is_held = True
    monkeypatch.setattr(engine.auditor, "captures_pending", lambda: is_held)
    config = replace(CONFIG, capture=False)
    one = SamplingParams(max_new_tokens=1)
    answers = [ask(engine, MOVED, config=config, sampling=one, settle=False) for _ in range(3)]
    is_held = False
    engine.loop.wake()
    assert engine.settle(60)
    audits = [audit_of(engine, answer) for answer in answers]
    assert [audit.computed_tokens == 0 for audit in audits] == [False, True, True]
    assert not any(audit.exact for audit in audits)
    assert all(audit.kl > 0 for audit in audits)


def test_some_answers_differ_and_their_audits_say_where(engine: Engine) -> None:
    """The comparison above is not one of equal answers only."""
    ask(engine, CHUNKS)
    config = replace(CONFIG, capture=False)
    audits = [
        audit_of(engine, ask(engine, MOVED, question=f"Question {n}?", config=config))
        for n in range(8)
    ]
    assert any(audit.differences for audit in audits)
    for audit in audits:
        assert audit.is_same == (not audit.differences)
        assert audit.first_difference == (audit.differences[0] if audit.differences else None)


def test_exact_answers_count_without_being_computed_again(engine: Engine) -> None:
    first = audit_of(engine, ask(engine, CHUNKS))
    again = audit_of(engine, ask(engine, CHUNKS))
    for audit in (first, again):
        assert audit.is_same
        assert (audit.kl, audit.computed_tokens) == (0.0, 0)
    assert first.origin == "none"
    assert metric(engine, "audited_answers_total", result="exact") == 2


def test_what_is_recomputed_in_full_agrees_everywhere(engine: Engine) -> None:
    ask(engine, CHUNKS)
    config = replace(CONFIG, recompute_ratio=1.0, capture=False)
    audit = audit_of(engine, ask(engine, MOVED, config=config))
    assert audit.is_same
    assert audit.kl < 1e-6


def test_sampled_answers_compare_the_likeliest_tokens(engine: Engine) -> None:
    """A sampled token need not be the likeliest one, and does not count as a difference for that."""
    ask(engine, CHUNKS)
    sampling = SamplingParams(max_new_tokens=24, temperature=1.5, seed=3)
    config = replace(CONFIG, recompute_ratio=1.0, capture=False)
    answer = ask(engine, MOVED, sampling=sampling, config=config)
    assert audit_of(engine, answer).is_same
    greedy = ask(engine, MOVED, config=config)
    assert greedy._progress.tokens != answer._progress.tokens


def test_stored_prefixes_make_an_audit_cheaper(make_engine: MakeEngine) -> None:
    """New variants are captured first; the audit then computes the question and the answer only."""
    # only chunks that were recomputed are captured again
    recomputing = ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise"))
    engine = make_engine(new_variants=NewVariants(share=1e9), config=recomputing)
    ask(engine, CHUNKS)
    answer = ask(engine, MOVED)
    assert answer.stats.tokens_reused > 0
    stored = audit_of(engine, answer).computed_tokens
    engine.close()

    without = make_engine(
        store=engine.store, new_variants="off", namespace="other", config=recomputing
    )
    ask(without, CHUNKS)
    computed = audit_of(without, ask(without, MOVED)).computed_tokens
    assert stored < computed


# -- what is audited --------------------------------------------------------------------------------------------------


def test_off_notes_nothing_and_makes_no_file(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Predictions, "note", lambda *_: pytest.fail("a prediction was noted"))
    engine = make_engine(audit="off")
    ask(engine, CHUNKS)
    answer = ask(engine, MOVED)
    assert engine.audit_of(answer.stats.request_id) is None
    assert not (engine.store.root / AUDIT_FILE).exists()
    assert not [family for family in engine.request_counts.collect() if "audit" in family.name]


def test_audited_answers_have_the_same_tokens(make_engine: MakeEngine) -> None:
    audited = make_engine(namespace="audited")
    plain = make_engine(namespace="plain", audit="off")
    for chunks in (CHUNKS, MOVED, CHUNKS[1:]):
        tokens = [ask(engine, chunks)._progress.tokens for engine in (audited, plain)]
        assert tokens[0] == tokens[1]


def test_a_share_of_the_answers_is_audited(make_engine: MakeEngine) -> None:
    engine = make_engine(audit=0.5)
    answers = [ask(engine, CHUNKS, sampling=SamplingParams(max_new_tokens=1)) for _ in range(40)]
    audited = [answer for answer in answers if engine.audit_of(answer.stats.request_id)]
    assert {int(answer.stats.request_id[:8], 16) < 2**31 for answer in audited} == {True}
    assert 0 < len(audited) < len(answers)


def test_full_prefill_is_not_audited(engine: Engine) -> None:
    ask(engine, CHUNKS)
    full = ask(engine, MOVED, config=ReuseConfig.full_prefill())
    assert engine.audit_of(full.stats.request_id) is None


def test_of_a_closed_answer_the_part_that_was_read_is_audited(engine: Engine) -> None:
    ask(engine, CHUNKS)
    closed = engine.stream(
        QUESTION,
        MOVED,
        sampling=SamplingParams(max_new_tokens=200),
        config=replace(CONFIG, capture=False),
    )
    text = next(closed) + next(closed)
    closed.close()
    assert engine.settle(60)
    audit = audit_of(engine, closed)
    assert audit.tokens == closed.stats.tokens_generated == len(text)  # a token for each letter

    unread = engine.stream(
        QUESTION, MOVED, sampling=SAMPLING, config=replace(CONFIG, capture=False)
    )
    unread.close()
    assert engine.settle(60)
    assert engine.audit_of(unread.stats.request_id) is None


@pytest.mark.parametrize(
    ("audit", "share"),
    [("off", 0.0), ("idle", 1.0), ("0.25", 0.25), (0.5, 0.5), (Audits(0.1), 0.1)],
)
def test_words_and_shares(audit: object, share: float) -> None:
    assert EngineConfig(audit=audit).audit.share == share  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize("audit", ["sometimes", "", 1.5, -0.1, None, [], "nan"])
def test_other_values_are_refused(audit: object) -> None:
    with pytest.raises(ConfigError, match=r"audit (must be|is)"):
        EngineConfig(audit=audit)  # type: ignore[arg-type]


# -- not in the way ---------------------------------------------------------------------------------------------------


def test_no_answer_waits_for_more_than_one_layer(engine: Engine, layers: Layers) -> None:
    ask(engine, CHUNKS)
    layers.hold()
    audited = ask(engine, MOVED, settle=False, config=replace(CONFIG, capture=False))
    assert layers.reached.wait(60)  # in the first layer of the audit
    arrived = len(layers.run)
    asking = threading.Thread(target=ask, args=(engine, CHUNKS[:2]), kwargs={"settle": False})
    asking.start()
    until(lambda: not engine.loop._inbox.empty())
    layers.release()
    asking.join(60)
    first = layers.run.index("answer", arrived)
    assert first - arrived <= 1
    # Later the answer may wait for its reader, and a layer of the audit may run meanwhile.
    prefilled = layers.run[first : first + engine.decoder.layout.layers]
    assert set(prefilled) == {"answer"}
    assert engine.settle(60)
    assert audit_of(engine, audited).tokens == SAMPLING.max_new_tokens


def test_the_oldest_of_too_many_waiting_answers_is_dropped(make_engine: MakeEngine) -> None:
    engine = make_engine(audit=Audits(1.0, waiting=2))
    ask(engine, CHUNKS)
    config = replace(CONFIG, capture=False)
    with answering(engine):
        answers = [
            ask(engine, MOVED, settle=False, config=config, question=f"Number {n}?")
            for n in range(5)
        ]
        # The first has begun and waits for the loop to be idle; of the others two may wait.
        until(lambda: metric(engine, "audits_dropped_total", reason="too_many_waiting") == 2)
    assert engine.settle(60)
    audited = [engine.audit_of(answer.stats.request_id) is not None for answer in answers]
    assert audited == [True, False, False, True, True]


def test_removed_chunks_are_not_computed_again(engine: Engine) -> None:
    ask(engine, CHUNKS)
    config = replace(CONFIG, capture=False)
    with answering(engine):
        first = ask(engine, MOVED, settle=False, config=config)
        second = ask(engine, MOVED, settle=False, config=config)
        third = ask(engine, CHUNKS[1::-1], settle=False, config=config)
        engine.store.evict(RowFilter(chunk_ids=(CHUNKS[2].chunk_id,)))
    assert engine.settle(60)
    assert engine.audit_of(first.stats.request_id) is None
    assert engine.audit_of(second.stats.request_id) is None
    assert engine.audit_of(third.stats.request_id) is not None
    assert metric(engine, "audits_dropped_total", reason="removed") == 2


def test_an_answer_that_loses_a_chunk_before_its_end_is_not_audited(engine: Engine) -> None:
    ask(engine, CHUNKS)
    answer = engine.stream(QUESTION, MOVED, sampling=SAMPLING)
    next(answer)
    engine.store.evict(RowFilter(chunk_ids=(CHUNKS[2].chunk_id,)))
    for _ in answer:
        pass
    assert engine.settle(60)
    assert engine.audit_of(answer.stats.request_id) is None
    assert metric(engine, "audits_dropped_total", reason="removed") == 1


def test_closing_gives_up_what_waits(make_engine: MakeEngine, layers: Layers) -> None:
    engine = make_engine()
    ask(engine, CHUNKS)
    layers.hold()
    config = replace(CONFIG, capture=False)
    with answering(engine):
        answers = [ask(engine, MOVED, settle=False, config=config) for _ in range(2)]
    assert layers.reached.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: not engine.loop._inbox.empty())
    layers.release()
    closing.join(60)
    assert not closing.is_alive()
    assert [engine.audit_of(answer.stats.request_id) for answer in answers] == [None, None]
    assert metric(engine, "audits_dropped_total", reason="closed") == 2


def test_audits_that_wait_when_an_engine_ends_without_close_are_dropped(engine: Engine) -> None:
    ask(engine, CHUNKS)
    with answering(engine):
        for _ in range(3):
            ask(engine, MOVED, settle=False, config=replace(CONFIG, capture=False))
        engine.loop.end()
    until(lambda: not engine.loop.alive)
    assert metric(engine, "audits_dropped_total", reason="closed") == 2
    assert metric(engine, "audits_dropped_total", reason="gave_way") == 0


def test_a_failed_audit_is_counted_and_the_next_one_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, CHUNKS)
    config = replace(CONFIG, capture=False)
    with monkeypatch.context() as patch:
        patch.setattr(auditor_module, "compare", _raises)
        failed = ask(engine, MOVED, config=config)
    assert engine.audit_of(failed.stats.request_id) is None
    assert metric(engine, "audits_dropped_total", reason="failed") == 1
    assert audit_of(engine, ask(engine, MOVED, config=config)).tokens == SAMPLING.max_new_tokens


def _raises(*_: object, **__: object) -> None:
    raise MemoryError("no room for the logits")


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_results_survive_the_engine_and_are_bounded(make_engine: MakeEngine) -> None:
    engine = make_engine(audit=Audits(1.0, kept=3))
    answers = [ask(engine, CHUNKS) for _ in range(4)]
    answers.append(ask(engine, MOVED, config=replace(CONFIG, capture=False)))
    in_memory = [audit_of(engine, answer) for answer in answers]
    engine.close()
    assert audits_in(engine.store.root) == in_memory[:1:-1]  # the latest first
    assert audits_in(engine.store.root, namespace="another") == []


def test_no_text_is_kept_unless_asked_for(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ask(engine, CHUNKS)
    answer = ask(
        engine, MOVED, question="a very private question", config=replace(CONFIG, capture=False)
    )
    audit = audit_of(engine, answer)
    engine.close()

    assert audit.text is None
    stored = b"".join(path.read_bytes() for path in engine.store.root.glob(f"{AUDIT_FILE}*"))
    assert audit.request_id.encode() in stored
    texts = ["private question", answer.text[:8], *(chunk.text[:12] for chunk in CHUNKS)]
    assert [text for text in texts if text.encode() in stored] == []
    with closing(sqlite3.connect(engine.store.root / AUDIT_FILE)) as connection:
        for row in connection.execute("SELECT * FROM audits"):
            names = [str(value) for value in row if isinstance(value, str)]
            assert not any(str(list(answer._progress.tokens[:3]))[1:-1] in name for name in names)


def test_text_that_was_asked_for_says_what_full_prefill_answers(make_engine: MakeEngine) -> None:
    engine = make_engine(audit=Audits(1.0, keep_text=True))
    ask(engine, CHUNKS)
    config = replace(CONFIG, capture=False)
    for number in range(8):
        question = f"Question {number}?"
        answer = ask(engine, MOVED, question=question, config=config)
        audit = audit_of(engine, answer)
        assert audit.text is not None
        assert question in audit.text.question
        assert audit.text.same + audit.text.reuse == answer.text
        full = engine.score_answer(
            question, MOVED, max_new_tokens=24, config=ReuseConfig.full_prefill()
        )
        if audit.is_same:
            assert answer.text == full.text
        else:
            assert audit.text.same + audit.text.full == full.text
    assert {audit.text is not None for audit in audits_in(engine.store.root)} == {True}


def test_text_of_a_session_is_not_written(make_engine: MakeEngine) -> None:
    engine = make_engine(audit="idle", audit_text=True)
    ask(engine, CHUNKS)
    answer = ask(engine, MOVED, session="ada", config=replace(CONFIG, capture=False))
    assert audit_of(engine, answer).text is not None  # for the session's own application
    assert audits_in(engine.store.root)[0].text is None


def test_no_audit_says_that_another_tenant_asked_the_same(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    tenants = [engine.for_tenant(name) for name in ("acme", "bolt")]
    config = replace(CONFIG, capture=False)
    for tenant in tenants:
        ask(tenant, CHUNKS)
    is_held = True
    monkeypatch.setattr(engine.auditor, "captures_pending", lambda: is_held)
    answers = [ask(tenant, MOVED, config=config, settle=False) for tenant in tenants]
    is_held = False
    engine.loop.wake()
    assert engine.settle(60)
    audits = [audit_of(*pair) for pair in zip(tenants, answers, strict=True)]
    assert audits[0].computed_tokens == audits[1].computed_tokens > audits[0].tokens


def test_results_and_kept_texts_are_those_of_their_tenant(make_engine: MakeEngine) -> None:
    engine = make_engine(audit=Audits(1.0, keep_text=True))
    audits = {}
    for name in ("acme", "bolt"):
        tenant = engine.for_tenant(name)
        ask(tenant, CHUNKS)
        answer = ask(tenant, MOVED, config=replace(CONFIG, capture=False))
        audits[name] = audit_of(tenant, answer)
        assert engine.audit_of(answer.stats.request_id) is None
    folder = engine.store.root
    assert {name: audits_in(folder, namespace=name)[0] for name in audits} == audits
    assert audits_in(folder, namespace=engine.namespace) == []
    engine.for_tenant("acme").remove(CHUNKS[:1])
    texts = {name: [audit.text for audit in audits_in(folder, namespace=name)] for name in audits}
    assert not any(texts["acme"]), "an answer may quote the removed document"
    assert all(texts["bolt"])


def test_a_file_that_cannot_be_used_costs_results_and_no_answer(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    (engine.store.root / AUDIT_FILE).write_text("not a database")
    answer = ask(engine, CHUNKS)
    assert answer.stats.finish == "length"
    assert audit_of(engine, answer).is_same
    assert "to start again; no chunk-cache is lost" in caplog.text


def test_a_locked_file_is_not_to_be_deleted(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, kept=10, busy_timeout_s=0.1)
    with closing(sqlite3.connect(tmp_path / AUDIT_FILE)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked by another process") as raised:
            log.add("default", "model", GOOD)
    log.close()
    assert "delete" not in str(raised.value)


def test_results_go_to_a_new_file_once_the_old_one_is_deleted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    folder = engine.store.root
    ask(engine, CHUNKS)
    for path in folder.glob(f"{AUDIT_FILE}*"):
        path.unlink()
    answer = ask(engine, CHUNKS)
    assert [audit.request_id for audit in audits_in(folder)] == [answer.stats.request_id]


def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / AUDIT_FILE
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="of another program"):
        audits_in(tmp_path)
    assert path.read_bytes() == before


def test_a_file_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    AuditLog(tmp_path, kept=10).close()
    with closing(sqlite3.connect(tmp_path / AUDIT_FILE)) as connection, connection:
        connection.execute("ALTER TABLE audits DROP COLUMN exact")
        for name, computed in (("compared", 10), ("exact", 0)):
            connection.execute(
                "INSERT INTO audits VALUES (NULL, 'default', 'model', ?, 1.0, 3, '[]', 0, 0.0, ?, 'question', 0.1, "
                "'primed', '{}', NULL, 0, NULL)",
                (name, computed),
            )
        connection.execute("PRAGMA user_version = 1")
    found = {audit.request_id: audit.exact for audit in audits_in(tmp_path)}
    assert found == {"compared": False, "exact": True}


GOOD = Audit("a" * 32, 1.0, 3, (1,), 1, 0.5, 10, "question", 0.1, "primed", {"reused": 2})


@pytest.mark.parametrize(
    "change",
    [
        "differences = '[Infinity]'",
        "differences = '[1'",
        "differences = '[1, 1]'",
        "differences = '[-5, 99]'",
        "tokens = 0",
        "tokens = 1e300",
        "near_ties = 1000000",
        "near_ties = -1",
        "kl = 1e999",
        "kl = -1.0",
        "created = 1e999",
        "created = 1e18",
        "recomputed = 'much'",
        "ratio = 2.0",
        "outcomes = '[]'",
        "outcomes = '{\"reused\": -1}'",
        'text = \'{"question": null, "same": "", "reuse": "", "full": ""}\'',
        "text = '\"a\"'",
        f"differences = '{'[' * 100_000}'",
        "selector = CAST(x'ff' AS TEXT), tokens = 0",
    ],
)
def test_damaged_rows_are_left_out(tmp_path: Path, change: str) -> None:
    log = AuditLog(tmp_path, kept=10)
    for name in ("x", "y"):
        log.add("default", "model", replace(GOOD, request_id=name))
    log.close()
    with closing(sqlite3.connect(tmp_path / AUDIT_FILE)) as connection, connection:
        connection.execute(f"UPDATE audits SET {change} WHERE request_id = 'x'")
    assert audits_in(tmp_path) == [replace(GOOD, request_id="y")]


def test_a_folder_without_audits_has_none(tmp_path: Path) -> None:
    assert audits_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


# -- the comparison ---------------------------------------------------------------------------------------------------


def test_the_divergence_is_a_lower_bound_and_near_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    reuse_logits = 3 * torch.randn(20, 500, generator=generator)
    full_logits = reuse_logits + 0.3 * torch.randn(20, 500, generator=generator)
    predictions = Predictions()
    for row in reuse_logits:
        predictions.note(row)
    places = compare(predictions, full_logits, begin=0)
    whole, agreement = divergence(full_logits, reuse_logits)
    kl = sum(place.kl for place in places) / 20
    assert 0.8 * whole < kl <= whole
    assert sum(not place.differs for place in places) / 20 == agreement
    assert [place.likeliest for place in places] == full_logits.argmax(-1).tolist()
    shares = full_logits.softmax(-1)
    for number, place in enumerate(places):
        margin = shares[number].max() - shares[number, reuse_logits[number].argmax()]
        assert place.margin == pytest.approx(float(margin), abs=1e-6)
    assert places[5:] == compare(predictions, full_logits[5:], begin=5)


def test_predictions_that_are_no_numbers_are_not_compared() -> None:
    predictions = Predictions()
    predictions.note(torch.full((50,), math.nan))
    places = compare(predictions, torch.zeros(1, 50), begin=0)
    facts = ReuseFacts("question", 0.1, "primed", {"reused": 1}, None, early=False, exact=False)
    with pytest.raises(RuntimeError, match="not numbers"):
        results_module.audit_of("a", facts, places, tokens=1, computed=1)


def test_a_token_that_reuse_rules_out_costs_a_finite_divergence() -> None:
    logits = torch.zeros(50)
    logits[7] = -math.inf
    predictions = Predictions()
    predictions.note(logits[:20])
    (place,) = compare(predictions, torch.zeros(1, 20), begin=0)
    assert 1.0 < place.kl < 100.0
    certain = LikeliestTokens(5, {5: 0.0, 6: -math.inf})
    other = LikeliestTokens(6, {5: math.log(0.5), 6: math.log(0.5)})
    assert compare_likeliest(certain, other).kl == pytest.approx(50, rel=0.05)


def test_of_equal_logits_the_token_that_greedy_sampling_takes_is_noted() -> None:
    logits = torch.zeros(300)
    logits[[7, 90, 250]] = 1.0
    predictions = Predictions()
    predictions.note(logits)
    assert int(predictions.likeliest[0]) == int(logits.argmax())


def test_near_ties_are_counted(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "NEAR_TIE", 2.0)  # every difference is one
    engine = make_engine()
    ask(engine, CHUNKS)
    config = replace(CONFIG, capture=False)
    audits = [
        audit_of(engine, ask(engine, MOVED, question=f"Question {n}?", config=config))
        for n in range(6)
    ]
    assert sum(audit.near_ties for audit in audits) > 0
    for audit in audits:
        assert audit.near_ties == len(audit.differences)
        assert audit.agreeing_net == audit.tokens


def test_answers_with_a_grammar_are_not_audited(engine: Engine) -> None:
    """The predictions that are compared know nothing of it."""
    ask(engine, CHUNKS)
    sampling = SamplingParams(
        max_new_tokens=24, json_schema={"type": "integer", "maximum": 99, "minimum": 10}
    )
    answer = ask(engine, MOVED, sampling=sampling, config=replace(CONFIG, capture=False))
    assert answer.text
    assert engine.audit_of(answer.stats.request_id) is None


def test_text_ends_before_a_stop_string(make_engine: MakeEngine) -> None:
    engine = make_engine(audit=Audits(1.0, keep_text=True))
    ask(engine, CHUNKS)
    config = replace(CONFIG, capture=False)
    whole = ask(engine, MOVED, config=config).text
    sampling = SamplingParams(max_new_tokens=24, stop=(whole[8:10],))
    answer = ask(engine, MOVED, config=config, sampling=sampling)
    text = audit_of(engine, answer).text
    assert text is not None
    assert answer.text == text.same + text.reuse
    assert answer.text == whole[: len(answer.text)] != whole


def test_a_deleted_folder_is_not_made_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    root = engine.store.root
    shutil.rmtree(root)
    ask(engine, CHUNKS)
    assert not root.exists()


def test_a_token_that_full_prefill_rules_out_costs_no_divergence_of_the_others() -> None:
    full = LikeliestTokens(5, {5: 0.0, 6: -math.inf})
    reuse = LikeliestTokens(5, {5: math.log(0.5), 6: math.log(0.25)})
    assert compare_likeliest(reuse, full).kl == pytest.approx(math.log(2))
