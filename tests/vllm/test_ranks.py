"""Two tensor-parallel ranks do what one does: the same rows and the same answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.variants import LoadedVariant, Variant
from cachecraft_rag.vllm.messages import Ask
from tests.vllm.conftest import TEXTS, Server
from tests.vllm.test_equality import (
    BASE,
    Expected,
    PrimedCases,
    asks_of,
    assert_all_equal,
    assert_equal,
    greedy,
)


@pytest.mark.slow
def test_two_ranks_answer_as_one_and_fail_as_one(
    model_folder: Callable[[str], Path],
    primed_cases: PrimedCases,
    make_server: Callable[..., Server],
    tmp_path: Path,
) -> None:
    folder, root = model_folder("Llama"), tmp_path / "caches"
    cases, layers = primed_cases("Llama", root)
    # every load is from disk
    server = make_server(folder, root, caches={"host_bytes": 0}, tensor_parallel_size=2)
    assert_all_equal(server, cases, layers)
    layer_by_layer = {
        name: replace(one, config=one.config.with_method(loading="layerwise"))
        for name, one in cases.items()
    }
    assert_all_equal(server, layer_by_layer, layers)
    assert_captures_are_whole(server, folder, root, tmp_path / "alone", layers)
    assert_no_rank_waits_for_one_that_failed(server, cases, layers)


def assert_captures_are_whole(
    server: Server, folder: Path, root: Path, other_root: Path, layers: int
) -> None:
    """Their captures are those of one rank with all heads."""
    with (
        ChunkCacheStore.open(root) as store,
        Engine(Decoder.load(str(folder)), store, config=BASE) as engine,
    ):
        fresh = [Chunk("A new " + text) for text in TEXTS[:2]]
        prompt = engine.prompts.build("What is new?", fresh)
        (cold,) = server.ask(
            [Ask(prompt, BASE, captures=(0, 1, 2), when_stored=True, details=True)]
        )
        assert [one["outcome"] for one in cold.report["segments"]] == [
            "exact",
            "computed",
            "computed",
            "computed",
        ]
        found = engine.look_up(prompt.segments[:-1]).variants
        assert [len(some) for some in found.values()] == [1, 1, 1]
        with (
            ChunkCacheStore.open(other_root) as alone,
            Engine(engine.decoder, alone, config=BASE) as other,
        ):
            other.capture(prompt, (0, 1, 2), primed=False)
            expected = other.look_up(prompt.segments[:-1]).variants
            for segment in prompt.segments[1:-1]:
                assert_same_capture(
                    store, found[segment.segment_id][0], alone, expected[segment.segment_id][0]
                )
        moved = greedy(engine, "What is new?", [fresh[1], fresh[0]], BASE)
        ask = Ask(moved.prompt, BASE, captures=(), details=True)
        assert_equal(server.ask([ask])[0], moved, layers)
        assert moved.outcomes == ["exact", "reused", "reused", "computed"]


def assert_same_capture(
    store: ChunkCacheStore, one: Variant, alone: ChunkCacheStore, other: Variant
) -> None:
    loaded, expected = store.load(one), alone.load(other)
    assert isinstance(loaded, LoadedVariant)
    assert isinstance(expected, LoadedVariant)
    torch.testing.assert_close(loaded.kv, expected.kv, rtol=0, atol=1e-4)
    assert one.inter == pytest.approx(other.inter, abs=1e-3)
    assert (one.intra, one.cci) == pytest.approx((other.intra, other.cci), abs=1e-3)
    scores, wanted = (
        found.token_scores([row.variant_id])[row.variant_id]
        for found, row in ((store, one), (alone, other))
    )
    assert (scores.inter is None) == (wanted.inter is None)
    if wanted.inter is not None:
        assert scores.inter == pytest.approx(wanted.inter, abs=1e-3)


# Where rank 1 raises, and which request gets there: in planning, in loading, in a layer's attention, between layers, in
# a probe, at its end, and in a capture.
BROKEN = {
    "cachecraft_rag.vllm.worker.filling::resolve": "five chunks, as by default",
    "cachecraft_rag.store.loading.loader:Loader:begin": "all exact",
    "cachecraft_rag.store.loading.pending:PendingLoads:place": "moved, three chunks",
    "cachecraft_rag.compute.row_pass::attention": "nothing reused",
    "cachecraft_rag.compute.overlapped:OverlappedPrefill:_wait_for_layer": "drift without probe",
    "cachecraft_rag.compute.stale_tokens.probe:QuestionProbe:observe": "five chunks, as by default",
    "cachecraft_rag.compute.stale_tokens.probe:QuestionProbe:seen": "probe without drift",
    "cachecraft_rag.vllm.worker.stack:WorkerStack:write_blocks": "nothing recomputed",
    "cachecraft_rag.compute.captures.capture:CaptureRecorder:with_all_heads": "a capture",
}
# Between the requests: the step fails as a whole on one rank.
BETWEEN = "cachecraft_rag.vllm.worker.working:Workers:_step"


def breaks_on_rank_one(place: str) -> Callable[[Any], None]:
    """For `collective_rpc`: on rank 1 `place` raises from now on; an empty one mends what was broken before.

    It travels by value and brings its imports along, because the workers cannot import this module.
    """

    def change(worker: Any) -> None:
        import importlib

        import torch

        for kept in getattr(worker, "broken_by_a_test", []):
            setattr(*kept)
        worker.broken_by_a_test = []
        if place and torch.distributed.get_rank() == 1:
            module, owner, name = place.split(":")
            found = importlib.import_module(module)
            found = getattr(found, owner) if owner else found

            def broken(*_args: Any, **_how: Any) -> Any:
                raise RuntimeError("of this test")

            worker.broken_by_a_test = [(found, name, getattr(found, name))]
            setattr(found, name, broken)

    return change


def assert_no_rank_waits_for_one_that_failed(
    server: Server, cases: dict[str, Expected], layers: int
) -> None:
    """vLLM computes a request that failed on one rank, and the report says why; the next one is filled as ever."""
    asks = dict(zip(cases, asks_of(cases), strict=True))
    name, whole = "five chunks, as by default", cases["nothing reused"]
    asks["a capture"] = replace(asks["nothing reused"], captures=(4,), when_stored=True)
    plain = {case: server.ask([ask.prompt.token_ids])[0].tokens for case, ask in asks.items()}
    assert plain["nothing reused"] == whole.tokens
    for place, case in (BROKEN | {BETWEEN: "all exact"}).items():
        server.llm.collective_rpc(breaks_on_rank_one(place))
        found, other = server.ask([asks[case], asks[name].prompt.token_ids])
        expected = "a step has failed" if place == BETWEEN else "of this test"
        assert expected in found.report["refused"], (place, found.report)
        assert (found.tokens, other.tokens) == (plain[case], plain[name]), place
        server.llm.collective_rpc(breaks_on_rank_one(""))
        assert_equal(server.ask([asks[name]])[0], cases[name], layers)
