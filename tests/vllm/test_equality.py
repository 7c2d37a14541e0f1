"""The same plan gives the same rows and the same answer, whether Hugging Face's layers run or vLLM's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.stack import LayerPass, WholePass
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.kernels.memory import Recycler
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.chunks_in_progress import ExpectedCaptures
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.serving.request import RequestProgress
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.prompts import Prompt
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.worker import connector, working
from cachecraft_rag.vllm.worker.fill_memory import FillMemory
from cachecraft_rag.vllm.worker.whole_model import VLLMForward
from tests.vllm.conftest import TEXTS, Server

KETTLE, GUARANTEE = "How is the kettle descaled?", "What does the guarantee cover?"
BASE = ReuseConfig(capture=False, method=ReuseMethod(probe_min_rows=0, alpha=0.5, loading="whole"))
EARLY: dict[str, Any] = {"recompute_ratio": 0.5, "method": {"early_termination": "published"}}
# best last: these stand in the prompt from last to first
CASES: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "all exact": (KETTLE, [2, 1, 0], {}),
    "moved, three chunks": (KETTLE, [0, 1, 2], {}),
    "five chunks, as by default": (GUARANTEE, [4, 0, 3, 1, 5], {}),
    "eq. 14 without drift": (
        GUARANTEE,
        [4, 0, 3, 1, 5],
        {"method": {"selector": "cache_craft", "drift": 0.0}},
    ),
    "probe without drift": (GUARANTEE, [4, 0, 3, 1, 5], {"method": {"drift": 0.0}}),
    "drift without probe": (GUARANTEE, [4, 0, 3, 1, 5], {"method": {"selector": "cache_craft"}}),
    "nothing reused": (GUARANTEE, [4, 0, 3, 1, 5], {"reuse": False}),
    "nothing recomputed": (GUARANTEE, [4, 0, 3, 1, 5], {"recompute_ratio": 0.0}),
    "focus by the probe": (
        GUARANTEE,
        [4, 6, 3, 1, 5],
        {"recompute_ratio": 0.5, "nearest_share": 0.0, "method": {"early_termination": "probe"}},
    ),
    "early termination": (
        GUARANTEE,
        [4, 0, 3, 1, 5],
        EARLY | {"method": {"early_termination": "published", "early_termination_window": 1}},
    ),
    "early termination, three layers": (GUARANTEE, [4, 0, 3, 1, 5], EARLY),
    "another variant": (KETTLE, [1, 0, 5], {}),
}
TOKENS = 16
# On an H100 log-probabilities in fp32 were up to 0.0016 apart, also of a prompt without reuse.
LOGPROBS_APART = 2e-3 if torch.cuda.is_available() else 1e-3


@dataclass
class Expected:
    prompt: Prompt
    config: ReuseConfig
    outcomes: list[str]
    variants: list[str | None]
    recomputed: list[list[int]]
    row_layers: int
    focus_layer: int | None
    focus: list[tuple[float | None, bool | None, int]]
    tokens: list[int]
    logprobs: list[float]


PrimedCases = Callable[[str, Path], tuple[dict[str, Expected], int]]  # a fixture of conftest.py


def greedy(engine: Engine, question: str, chunks: list[Chunk], config: ReuseConfig) -> Expected:
    """The plan, rows and answer of the Hugging Face engine."""
    sampling = SamplingParams(max_new_tokens=TOKENS)
    request = engine._request(
        question, chunks, history=(), session=None, sampling=sampling, config=config, tools=()
    )
    progress = RequestProgress()
    logits, buffer = engine.loop.run(
        lambda run: engine._answering.prefill(run, request, progress, ExpectedCaptures())
    )
    position = request.prompt.bounds[-1]
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(TOKENS):
        tokens.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits.float(), -1)[tokens[-1]]))
        logits = engine.decoder.next_logits(extend(engine.decoder, buffer, tokens[-1:], position))
        position += 1
    segments = progress.plan
    return Expected(
        request.prompt,
        config,
        [one.outcome for one in segments],
        [None if one.variant is None else one.variant.variant_id for one in segments],
        [list(one.recompute) for one in segments],
        progress.row_layers,
        progress.focus_layer,
        [(one.focus, one.in_focus, one.spared) for one in segments],
        tokens,
        logprobs,
    )


def expected_cases(folder: Path, store: Path) -> tuple[dict[str, Expected], int]:
    """Prime two documents with the Hugging Face engine, and let it answer all cases; with the number of layers."""
    # a single letter, that no question attends to as much as to a sentence
    chunks = [Chunk(text) for text in (*TEXTS, "N")]
    with (
        ChunkCacheStore.open(store) as caches,
        Engine(Decoder.load(str(folder)), caches, config=BASE) as engine,
    ):
        Primer(engine).prime(chunks[:3])
        Primer(engine).prime(chunks[3:])
        engine.capture(
            engine.prompts.build(KETTLE, [chunks[1], chunks[0], chunks[5]]), (2, 3), primed=False
        )
        cases = {
            name: greedy(engine, question, [chunks[i] for i in order], BASE.changed_by(config))
            for name, (question, order, config) in CASES.items()
        }
        return cases, engine.decoder.layout.layers


def assert_equal(found: Any, one: Expected, layers: int) -> None:
    assert [segment["outcome"] for segment in found.report["segments"]] == one.outcomes, (
        found.report["segments"]
    )
    assert [segment["variant_id"] for segment in found.report["segments"]] == one.variants
    assert found.report["recomputed"] == one.recomputed
    assert found.report["focus_layer"] == one.focus_layer
    for segment, (focus, in_focus, spared) in zip(found.report["segments"], one.focus, strict=True):
        assert segment["focus"] == (None if focus is None else pytest.approx(focus, rel=1e-3))
        assert (segment["in_focus"], segment["spared"]) == (in_focus, spared)
    assert "layer_by_layer" not in found.report  # vLLM's own forward runs most passes
    # vLLM computes the last token itself
    assert found.report["row_layers"] == one.row_layers - layers
    assert found.tokens == one.tokens
    assert found.logprobs == pytest.approx(one.logprobs, abs=LOGPROBS_APART)


@pytest.fixture
def whole_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and layers of each call of vLLM's own forward for a pass, in this process, however slow the machine is."""
    monkeypatch.setattr(working, "LONGEST_CALL_S", math.inf)
    run, run_raw = VLLMForward.run, VLLMForward.run_raw
    runs: list[tuple[int, int]] = []

    def counted(
        forward: VLLMForward, ids: Tensor, positions: Tensor, whole_pass: WholePass, layers: int
    ) -> None:
        runs.append((len(ids), layers))
        run(forward, ids, positions, whole_pass, layers)

    def counted_raw(forward: VLLMForward, ids: Tensor, layer_pass: LayerPass, layers: int) -> None:
        runs.append((len(ids), layers))
        run_raw(forward, ids, layer_pass, layers)

    monkeypatch.setattr(VLLMForward, "run", counted)
    monkeypatch.setattr(VLLMForward, "run_raw", counted_raw)
    return runs


def assert_passes_ran_at_once(
    server: Server, cases: dict[str, Expected], layers: int, runs: list[tuple[int, int]]
) -> None:
    """Two calls with a probe and one without; none where rows are dropped on the way."""
    for name, depths in {
        "five chunks, as by default": [layers // 2, layers],
        "drift without probe": [layers],
        "nothing reused": [layers],
        "early termination": [layers // 2],
    }.items():
        runs.clear()
        (ask,) = asks_of({name: cases[name]})
        assert_equal(server.ask([ask])[0], cases[name], layers)
        assert [depth for _, depth in runs] == depths, name


def assert_captures_are_exact(server: Server, cases: dict[str, Expected]) -> Ask:
    """Answers after new chunks, and after the same ones once they are stored, are vLLM's own; returns the request."""
    prompt = cases["nothing reused"].prompt
    new = Prompt(
        tuple(
            replace(one, segment_id=f"new {one.segment_id}", token_ids=one.token_ids[::-1].copy())
            if one.kind == "chunk"
            else one
            for one in prompt.segments
        )
    )
    (plain,) = server.ask([new.token_ids])
    ask = Ask(new, replace(BASE, capture=True), when_stored=True)
    for outcome in ("computed", "exact"):
        (found,) = server.ask([ask])
        outcomes = [one["outcome"] for one in found.report["segments"]]
        assert set(outcomes[1:-1]) == {outcome}
        assert "layer_by_layer" not in found.report
        assert found.tokens == plain.tokens
        assert found.logprobs == pytest.approx(plain.logprobs, abs=LOGPROBS_APART)
    return ask


def asks_of(cases: dict[str, Expected]) -> list[Ask]:
    """Captures none by name, or one that has nothing to reuse would be left to vLLM."""
    return [Ask(one.prompt, one.config, captures=(), details=True) for one in cases.values()]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "demo"])
def test_rows_and_answers_are_those_of_the_hugging_face_engine(
    family: str,
    model_folder: Callable[[str], Path],
    primed_cases: PrimedCases,
    make_server: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole_runs: list[tuple[int, int]],
) -> None:
    """In buffers that hold NaN wherever nothing is written."""
    fresh = Recycler.empty
    monkeypatch.setattr(Recycler, "empty", lambda *asked: fresh(*asked).fill_(math.nan))
    folder = model_folder(family)
    cases, layers = primed_cases(family, tmp_path / "caches")
    assert any(spared for _, _, spared in cases["focus by the probe"].focus)
    assert any(in_focus for _, in_focus, _ in cases["focus by the probe"].focus)
    assert cases["early termination"].focus_layer is not None
    assert cases["early termination, three layers"].focus_layer is not None or family not in (
        "Llama",
        "demo",
    )
    served = {
        (segment.segment_id, variant)
        for one in cases.values()
        for segment, variant in zip(one.prompt.segments, one.variants, strict=True)
        if variant is not None
    }
    assert len(served) > len({name for name, _ in served})  # there was a choice
    assert {outcome for one in cases.values() for outcome in one.outcomes} == {
        "exact",
        "reused",
        "computed",
    }
    assert any(any(one.recomputed) for one in cases.values())
    server = make_server(folder, tmp_path / "caches")
    assert_all_equal(server, cases, layers)
    assert_passes_ran_at_once(server, cases, layers, whole_runs)
    ask = assert_captures_are_exact(server, cases)
    whole_runs.clear()
    server.ask([replace(ask, config=replace(ask.config, reuse=False))])
    assert [depth for _, depth in whole_runs] == [layers], "new chunks cost one call"
    (plain,) = server.ask([cases["nothing reused"].prompt.token_ids])
    assert (plain.tokens, plain.report) == (cases["nothing reused"].tokens, {})


def assert_all_equal(server: Server, cases: dict[str, Expected], layers: int) -> None:
    """One after the other, and at once."""
    for ask, one in zip(asks_of(cases), cases.values(), strict=True):
        assert_equal(server.ask([ask])[0], one, layers)
    for found, one in zip(server.ask(asks_of(cases)), cases.values(), strict=True):
        assert found.tokens == one.tokens


@pytest.mark.slow
def test_prompts_with_more_rows_than_a_pass_takes_are_answered_as_in_one_pass(
    model_folder: Callable[[str], Path],
    primed_cases: PrimedCases,
    make_server: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole_runs: list[tuple[int, int]],
) -> None:
    """As on a GPU, whose memory for fillings limits the rows of a pass."""
    cases, layers = primed_cases("Llama", tmp_path / "caches")
    rows = len(cases["nothing reused"].prompt.token_ids) * 2 // 3
    memory = FillMemory(1, 1, 1, total=1 << 30, pass_rows=rows)
    monkeypatch.setattr(connector, "fill_memory", lambda *_: memory)
    server = make_server(model_folder("Llama"), tmp_path / "caches")
    assert_all_equal(server, cases, layers)
    assert_captures_are_exact(server, cases)
    whole_runs.clear()
    asks = dict(zip(cases, asks_of(cases), strict=True))
    assert_equal(server.ask([asks["nothing reused"]])[0], cases["nothing reused"], layers)
    assert len(whole_runs) == 2, whole_runs
    assert max(count for count, _ in whole_runs) <= rows


@pytest.mark.slow
def test_both_ends_of_a_slow_disk_give_full_prefills_tokens(
    model_folder: Callable[[str], Path], make_server: Callable[..., Server], tmp_path: Path
) -> None:
    """What is stored is exact here; the disk reads multiples of the KV bytes that the worker computes in a second."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    folder, config = model_folder("Llama"), BASE.with_method(loading="cake")
    chunks = [Chunk(text * 4) for text in TEXTS[:5]]
    decoder = Decoder.load(str(folder))
    with (
        ChunkCacheStore.open(tmp_path / "caches") as caches,
        Engine(decoder, caches, config=BASE) as engine,
    ):
        Primer(engine).prime(chunks)
        full = greedy(engine, KETTLE, chunks[::-1], replace(BASE, reuse=False))
        assert set(greedy(engine, KETTLE, chunks[::-1], BASE).outcomes[:-1]) == {"exact"}
    server = make_server(folder, tmp_path / "caches", caches={"host_bytes": 0})
    seconds = []
    for _ in range(3):  # the first one is slower
        began = time.perf_counter()
        server.ask([Ask(full.prompt, full.config, captures=())], tokens=1)
        seconds.append(time.perf_counter() - began)
    throttle = get_kv_transfer_group()._store.throttle
    for multiple in (0.5, 1.0, 4.0):
        throttle.bytes_per_s = (
            multiple * decoder.layout.nbytes(full.prompt.bounds[-2]) / min(seconds)
        )
        (found,) = server.ask([Ask(full.prompt, config, captures=())])
        segments = found.report["segments"][:-1]
        assert {one["outcome"] for one in segments} <= {"exact", "computed"}
        computed = [one for one in segments if one["not_loaded"] or one["outcome"] == "computed"]
        assert computed or multiple > 0.5
        assert found.tokens == full.tokens
        assert found.logprobs == pytest.approx(full.logprobs, abs=LOGPROBS_APART)


def counts_compiled() -> Callable[[Any], int]:
    """Counts the forwards that a process has compiled, or found in vLLM's cache of compiled ones."""

    # made in here it travels by value, for no worker can import this module
    def count(_worker: Any) -> int:
        from vllm.compilation.counter import compilation_counter as counter

        return int(counter.num_aot_compiles + counter.num_aot_artifacts_loaded)

    return count


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_compiled(
    family: str,
    model_folder: Callable[[str], Path],
    primed_cases: PrimedCases,
    make_server: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole_runs: list[tuple[int, int]],
) -> None:
    """vLLM compiles its forward, and its layers, which are those of our passes. Llama and Mistral: see below."""
    # In this process: three starts of Python with vLLM take longer than the compiler.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch._dynamo.reset()
    count = counts_compiled()
    before = count(None)
    cases, layers = primed_cases(family, tmp_path / "caches")
    server = make_server(model_folder(family), tmp_path / "caches", enforce_eager=False)
    assert_all_equal(server, cases, layers)
    assert_passes_ran_at_once(server, cases, layers, whole_runs)
    ask = assert_captures_are_exact(server, cases)
    whole_runs.clear()
    server.ask([replace(ask, config=replace(ask.config, reuse=False))])
    assert [depth for _, depth in whole_runs] == [layers], "new chunks cost one call"
    assert count(None) > before


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_in_processes_of_its_own(
    ranks: int,
    model_folder: Callable[[str], Path],
    primed_cases: PrimedCases,
    make_server: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Llama's layers, which are Mistral's and the demo model's too."""
    from vllm import envs

    envs.disable_envs_cache()  # kept since the last server in this process
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a function is sent to it

    cases, layers = primed_cases("Llama", tmp_path / "caches")
    server = make_server(
        model_folder("Llama"), tmp_path / "caches", enforce_eager=False, tensor_parallel_size=ranks
    )
    assert_all_equal(server, cases, layers)
    compiled = server.llm.collective_rpc(counts_compiled())
    assert len(compiled) == ranks
    assert min(compiled) > 0
    assert_captures_are_exact(server, cases)
