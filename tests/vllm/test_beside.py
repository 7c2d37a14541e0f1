"""Other KV connectors of the same server, inside vLLM's MultiConnector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment, token_array
from cachecraft_rag.vllm.beside import check_beside, connectors_in
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.metrics import ServerStatistics
from tests.vllm.conftest import Server

EXACT = ReuseConfig(recompute_ratio=1.0)


def prompt_of(order: list[int]) -> Prompt:
    """An instruction, chunks of 64 tokens in this order, and a question."""

    def segment(kind: Any, name: str, start: int, stop: int) -> Segment:
        ids = token_array(range(start, stop))
        return Segment(kind, digest(name), ids, private=kind == "question")

    system = segment("system", "system", 3, 43)
    chunks = [segment("chunk", f"chunk {i}", 50 + 70 * i, 114 + 70 * i) for i in order]
    question = segment("question", "question", 5, 17)
    return Prompt((system, *chunks, question))


def test_texts_are_equal_beside_a_connector_that_saves_all_blocks(
    make_server: Callable[..., Server], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    model = model_folder("Llama")
    prompts = [prompt_of(order) for order in ([0, 1, 2], [2, 0, 1])]
    alone = make_server(model, tmp_path / "alone")
    expected = [served.tokens for served in alone.ask([list(p.token_ids) for p in prompts])]
    server = make_server(model, tmp_path / "store", beside=[example])
    # captured, reused exactly, moved and recomputed; then the other connector's
    for prompt, tokens in zip((prompts[0], *prompts), (expected[0], *expected), strict=True):
        (served,) = server.ask([Ask(prompt, EXACT, when_stored=True)])
        assert served.tokens == tokens
        assert "segments" in served.report, served.report
    (plain,) = server.ask([list(prompts[0].token_ids)])
    assert plain.tokens == expected[0]
    assert list((tmp_path / "example").iterdir())


def test_a_connector_that_may_serve_approximate_blocks_to_others_is_refused() -> None:
    example = [{"kv_connector": "ExampleConnector"}]
    offloading = [{"kv_connector": "OffloadingConnector"}]
    check_beside(offloading, ReuseConfig(), "all")
    check_beside(example, EXACT, "none")
    for reuse, client_settings in ((ReuseConfig(), "none"), (EXACT, "safe")):
        with pytest.raises(ConfigError, match="--recompute-ratio 1 and --client-settings none"):
            check_beside(example, reuse, client_settings)  # type: ignore[arg-type]


def test_connectors_are_those_of_the_operators_config() -> None:
    from vllm.config import KVTransferConfig

    child = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    more = {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    assert connectors_in(None) == []
    assert connectors_in(KVTransferConfig(**child, **more)) == [child | more]
    both = {"connectors": [child, {"kv_connector": "NixlConnector", "kv_role": "kv_both"}]}
    given = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=both
    )
    assert connectors_in(given) == both["connectors"]


def test_our_counts_are_read_beside_those_of_another_connector() -> None:
    reports: dict[str, Any] = {}
    statistics = ServerStatistics(on_report=reports.__setitem__)
    ours = {"scheduler": {"loads": {}}, "reports": {"asked": {"row_layers": 3}}}
    others = {"OffloadingConnector": {"bytes": 5}}
    step: Any = SimpleNamespace(
        num_waiting_reqs=0,
        num_skipped_waiting_reqs=0,
        connector_prefix_cache_stats=None,
        kv_connector_stats={"CacheCraftConnector": ours} | others,
    )
    statistics.record(step, None)
    assert reports == {"asked": {"row_layers": 3}}
    assert statistics.latest == {(0, "scheduler"): {"loads": {}}}
    assert step.kv_connector_stats == {"CacheCraftConnector": ours} | others
    step.kv_connector_stats = dict(others)
    statistics.record(step, None)
    assert step.kv_connector_stats == others
