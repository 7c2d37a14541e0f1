"""Audits over vLLM: real answers compared with an offline full prefill of the same tokens, in process and over HTTP."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM

from cachecraft_rag.client.http import HTTPEngine
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.audits.audit import Audit
from cachecraft_rag.serving.audits.audit_log import AUDIT_FILE, audits_in
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store.config import CACHE_FOLDER
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.engine import VLLMEngine
from cachecraft_rag.vllm.idle.audits import MOST_TOKENS, PredictedAnswer, check_server, likeliest_of
from tests.engines import until
from tests.vllm.conftest import TEXTS
from tests.vllm.http_server import ServerProcess

SERVER: dict[str, Any] = {"max_model_len": 2048, "enforce_eager": True, "max_num_seqs": 4}
SAMPLING = SamplingParams(max_new_tokens=24)
CHUNKS = [Chunk(f"{number}. {text * 3}") for number, text in enumerate(TEXTS[:4])]
MOVED = [CHUNKS[place] for place in (2, 0, 3, 1)]
# other orders, so that vLLM's own prefix cache has none of them from an earlier question
ORDERS = (MOVED, MOVED[::-1], [*MOVED[2:], *MOVED[:2]], [MOVED[1], MOVED[0], *MOVED[2:]])
# nothing is corrected, so that answers do differ
CONFIG = ReuseConfig(
    recompute_ratio=0.0,
    nearest_share=0.0,
    capture=False,
    method=ReuseMethod(drift=0.0, loading="whole"),
)
# the same for each engine
AUDITED: dict[str, Any] = {
    "dtype": "float32",
    "audit": "idle",
    "new_variants": "off",
    "reuse": CONFIG,
}
QUESTIONS = ("How is the kettle descaled?", "Where is the tray?", "How cold is it?", "Who rings?")


@pytest.fixture(scope="module")
def engine(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMEngine]:
    store = tmp_path_factory.mktemp("audited")
    with VLLMEngine.from_pretrained(
        str(model_folder("demo")), store=store, server=SERVER, **AUDITED
    ) as engine:
        engine.primer().prime(CHUNKS)
        yield engine


def asked(
    engine: VLLMEngine | Engine | HTTPEngine, question: str, chunks: list[Chunk], **options: Any
) -> tuple[list[int], RequestStats]:
    """The tokens of a whole answer, and its statistics."""
    answer = engine.stream(question, chunks, **({"sampling": SAMPLING} | options))
    for _ in answer:
        pass
    return answer._progress.tokens, answer.stats


def audit_of(engine: VLLMEngine | Engine, stats: RequestStats) -> Audit:
    assert engine.settle(300)
    audit = engine.audit_of(stats.request_id)
    assert audit is not None
    return audit


def offline_differences(
    folder: Path, engine: VLLMEngine, question: str, chunks: list[Chunk], tokens: list[int]
) -> list[int]:
    """The places of an answer at which transformers' own forward pass finds another token the likeliest."""
    prompt = engine.prompts.build(question, chunks, reserve=SAMPLING.max_new_tokens)
    ids = [*prompt.token_ids, *tokens]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    likeliest = logits[prompt.bounds[-1] - 1 : -1].argmax(-1).tolist()
    return [place for place, token in enumerate(tokens) if likeliest[place] != token]


@pytest.mark.slow
def test_audits_equal_an_offline_comparison_token_for_token(
    engine: VLLMEngine, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder("demo")
    audits = []
    for question, chunks in zip(QUESTIONS, ORDERS, strict=True):
        tokens, stats = asked(engine, question, chunks)
        audit = audit_of(engine, stats)
        expected = offline_differences(folder, engine, question, chunks, tokens)
        assert list(audit.differences) == expected
        assert audit.tokens == len(tokens)
        assert audit.computed_tokens >= len(tokens)
        assert audit.origin == "primed"
        assert audit.recomputed == 0.0
        assert (audit.kl > 1e-4) or not expected
        audits.append(audit)
    assert any(audit.differences for audit in audits)
    assert audits_in(engine.store.root)[: len(audits)] == audits[::-1]


@pytest.mark.slow
def test_audits_equal_those_of_the_engine_in_this_process(
    engine: VLLMEngine, model_folder: Callable[[str], Path]
) -> None:
    # settings of their own keep them apart from the prefix cache's blocks of other tests
    config = CONFIG.with_method(early_termination_window=7)
    cases = list(zip(QUESTIONS, ORDERS, strict=True))
    of_server = [
        audit_of(engine, asked(engine, question, chunks, config=config)[1])
        for question, chunks in cases
    ]
    root = engine.store.root.parent
    with Engine.from_pretrained(str(model_folder("demo")), store=root, **AUDITED) as here:
        for (question, chunks), audit in zip(cases, of_server, strict=True):
            own = audit_of(here, asked(here, question, chunks)[1])
            assert own.differences == audit.differences
            assert own.outcomes == audit.outcomes
            # fewer probabilities are known of a server, and a coarser comparison never diverges more
            assert 0.2 * own.kl - 1e-3 <= audit.kl <= own.kl + 1e-4


@pytest.mark.slow
def test_with_everything_recomputed_every_token_agrees(engine: VLLMEngine) -> None:
    config = replace(CONFIG, recompute_ratio=1.0)
    for question in QUESTIONS:
        audit = audit_of(engine, asked(engine, question, MOVED, config=config)[1])
        assert audit.is_same
        assert audit.kl < 1e-4


@pytest.mark.slow
def test_an_answer_of_one_token_and_a_long_answer(engine: VLLMEngine) -> None:
    _, stats = asked(engine, QUESTIONS[0], MOVED, sampling=SamplingParams(max_new_tokens=1))
    assert audit_of(engine, stats).tokens == 1
    longest = SamplingParams(max_new_tokens=MOST_TOKENS + 40)
    tokens, stats = asked(engine, QUESTIONS[0], MOVED, sampling=longest)
    audit = audit_of(engine, stats)
    assert audit.tokens == min(len(tokens), MOST_TOKENS)


@pytest.mark.slow
def test_exact_answers_are_counted_and_not_computed_again(engine: VLLMEngine) -> None:
    unknown = [Chunk(f"Never seen before: {TEXTS[4] * 2}")]
    audit = audit_of(engine, asked(engine, QUESTIONS[0], unknown)[1])
    assert audit.exact
    assert audit.computed_tokens == 0


@pytest.mark.slow
def test_what_is_not_audited(engine: VLLMEngine) -> None:
    def result(**options: Any) -> Audit | None:
        _, stats = asked(engine, QUESTIONS[1], MOVED, **options)
        assert engine.settle(300)
        return engine.audit_of(stats.request_id)

    assert result(config=replace(CONFIG, reuse=False)) is None
    schema = SamplingParams(max_new_tokens=24, json_schema={"type": "boolean"})
    assert result(sampling=schema) is None
    assert result() is not None


@pytest.mark.slow
def test_a_closed_answer_is_audited_as_far_as_it_was_read(engine: VLLMEngine) -> None:
    question = "Tell me everything about the kettle, the toaster and the fridge."
    stream = engine.stream(question, MOVED, sampling=SamplingParams(max_new_tokens=200))
    for _ in range(5):
        next(stream)
    stream.close()
    audit = audit_of(engine, stream.stats)
    assert 5 <= audit.tokens == stream.stats.tokens_generated < 200


@pytest.mark.slow
def test_audits_beside_answers_leave_these_as_they_are(engine: VLLMEngine) -> None:
    alone = [asked(engine, question, MOVED)[0] for question in QUESTIONS]
    assert engine.settle(300)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):  # the audits of one round wait during the next
            together = list(threads.map(lambda question: asked(engine, question, MOVED), QUESTIONS))
            assert [tokens for tokens, _ in together] == alone
    for _, stats in together:
        assert audit_of(engine, stats).tokens > 0


@pytest.mark.slow
def test_no_text_is_kept(engine: VLLMEngine) -> None:
    canary = "The xylophone of Ouagadougou weighs 4711 grams."
    audit_of(engine, asked(engine, f"What about this? {canary}", [*MOVED, Chunk(canary)])[1])
    connection = sqlite3.connect(engine.store.root / AUDIT_FILE)
    rows = connection.execute("SELECT * FROM audits").fetchall()
    connection.close()
    assert rows
    kept = repr(rows) + (engine.store.root / AUDIT_FILE).read_bytes().decode("latin-1")
    for word in ("xylophone", "Ouagadougou", "weighs", "kettle", "crumb"):
        assert word not in kept


@pytest.mark.slow
def test_removing_a_chunk_drops_the_audits_that_wait(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = Chunk(f"Soon gone: {TEXTS[5] * 3}")
    engine.primer().prime([CHUNKS[0], chunk])
    audits = engine._backend.audits
    go_on = threading.Event()
    monkeypatch.setattr(audits, "_wait_for_variants", lambda _seconds: go_on.wait(300))
    try:
        _, running = asked(engine, QUESTIONS[0], [CHUNKS[0], chunk])
        _, waiting = asked(engine, QUESTIONS[1], [CHUNKS[0], chunk])
        audits.forget([chunk.chunk_id])
    finally:
        go_on.set()
    assert engine.settle(300)
    assert engine.audit_of(running.request_id) is None
    assert engine.audit_of(waiting.request_id) is None
    dropped = engine.request_counts.registry.get_sample_value(
        "cachecraft_audits_dropped_total", {"reason": "removed"}
    )
    assert dropped == 2


def test_of_equally_likely_tokens_the_first_is_the_likeliest() -> None:
    logprobs = {7: SimpleNamespace(logprob=-1.0), 3: SimpleNamespace(logprob=-1.0)}
    assert likeliest_of(logprobs).likeliest == 3


def test_predictions_end_at_the_longest_audited_answer() -> None:
    answer = PredictedAnswer()
    logprobs = {1: SimpleNamespace(logprob=-0.1)}
    for _ in range(MOST_TOKENS):
        answer.note([1, 1], [logprobs, logprobs])
    assert len(answer.tokens) == len(answer.places) == MOST_TOKENS


@pytest.mark.parametrize(
    ("mode", "most", "message"),
    [
        ("processed_logprobs", 20, "--logprobs-mode is processed_logprobs"),
        ("raw_logprobs", 5, "--max-logprobs is 5"),
    ],
)
def test_a_server_that_hides_probabilities_is_refused(mode: str, most: int, message: str) -> None:
    model = SimpleNamespace(logprobs_mode=mode, max_logprobs=most)
    with pytest.raises(ConfigError, match=message):
        check_server(SimpleNamespace(model_config=model))
    check_server(
        SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="raw_logprobs", max_logprobs=-1))
    )


@pytest.mark.slow
def test_a_quality_target_raises_the_ratio(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    usual = replace(CONFIG, recompute_ratio=None)
    options = AUDITED | {"reuse": usual, "quality_target": 0.9999}
    with VLLMEngine.from_pretrained(
        str(model_folder("demo")), store=tmp_path, server=SERVER, **options
    ) as engine:
        engine.primer().prime(CHUNKS)
        ratios = []
        for number in range(24):
            question = f"{QUESTIONS[number % 4]} ({number})"
            _, stats = asked(engine, question, ORDERS[number // 4 % 4])
            ratios.append(audit_of(engine, stats).ratio)
            assert stats.quality.startswith("r = ")
    assert ratios[0] == 0.15
    assert ratios[-1] > 0.15


@pytest.mark.slow
def test_over_http_each_answer_has_its_audit(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    options = ["--audit", "idle", "--dtype", "float32", "--max-model-len", "2048"]
    options += ["--reuse-plain-prompts", "--", "--enable-log-requests"]
    server = ServerProcess(model_folder("Llama"), tmp_path / "store", tmp_path / "log", *options)
    try:
        engine = HTTPEngine.connect(server.url)
        engine.primer().prime(CHUNKS)
        _, stats = asked(engine, QUESTIONS[0], MOVED, config=replace(CONFIG, capture=True))
        assert engine.audit_of("unknown") is None
        audit = None
        for _ in range(3000):
            if (audit := engine.audit_of(stats.request_id)) is not None:
                break
            threading.Event().wait(0.1)
        assert audit is not None
        assert audit.tokens == stats.tokens_generated + (stats.finish == "end")
        assert audit.outcomes
        # another thread of the server writes it
        until(lambda: bool(audits_in(tmp_path / "store" / CACHE_FOLDER)))
        assert audits_in(tmp_path / "store" / CACHE_FOLDER)[0] == audit

        reply = server.chat([{"text": chunk.text} for chunk in MOVED], logprobs=True).json()
        assert reply["choices"][0]["logprobs"]["content"]  # its own request for them is served
        plain = server.chat([{"text": chunk.text} for chunk in MOVED]).json()
        assert plain["choices"][0]["logprobs"] is None
        counts = server.counts()
        assert (
            counts["cachecraft_audited_answers_total", ("changed",)]
            + counts["cachecraft_audited_answers_total", ("same",)]
            >= 1
        )
        engine.close()
    finally:
        server.kill()
