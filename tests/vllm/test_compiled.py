"""FP8 caches, adapters, drafts and other connectors in a server that compiles its forward, as vLLM does by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from benchmarks.vllm_families import random_prompt
from cachecraft_rag.vllm.messages import Ask
from tests.vllm.adapters import RANK, save_adapter
from tests.vllm.conftest import Served, Server
from tests.vllm.test_drafts import DRAFTS
from tests.vllm.test_equality import BASE, LOGPROBS_APART, counts_compiled
from tests.vllm.test_families import assert_passes_the_self_check

pytestmark = pytest.mark.slow

CAPTURE = replace(BASE, reuse=False, capture=True)
ALL_RECOMPUTED = replace(BASE, recompute_ratio=1.0)
MOVED = random_prompt(3, 1, 2)

MakeCompiled = Callable[..., Server]


@pytest.fixture
def make_compiled(
    make_server: Callable[..., Server],
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> MakeCompiled:
    """Makes servers over a Llama that compile it; `Server` asks for the other options."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch._dynamo.reset()
    count = counts_compiled()

    def make(*, compiles: bool = True, **options: Any) -> Server:
        before = count(None)
        server = make_server(
            model_folder("Llama"),
            tmp_path / "caches",
            enforce_eager=False,
            max_model_len=1024,
            **options,
        )
        assert (count(None) > before) == compiles
        return server

    return make


def assert_moved_chunks_give_vllms_own_answer(server: Server, adapter: Any = None) -> None:
    """Capture three chunks, and reuse them in another order."""
    server.ask(
        [Ask(random_prompt(1, 2, 3), CAPTURE, when_stored=True)], tokens=1, adapters=[adapter]
    )
    ask = Ask(MOVED, ALL_RECOMPUTED, captures=())
    found, own = (server.ask([asked], adapters=[adapter])[0] for asked in (ask, MOVED.token_ids))
    assert "reused" in outcomes(found)
    assert found.tokens == own.tokens
    assert found.logprobs == pytest.approx(own.logprobs, abs=LOGPROBS_APART)


def outcomes(served: Served) -> list[str]:
    return [segment["outcome"] for segment in served.report["segments"]]


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(),
    reason="vLLM's CPU build has FP8 caches on CPUs with AVX-512 only",
)
def test_caches_in_fp8_are_filled(make_compiled: MakeCompiled) -> None:
    server = make_compiled(kv_cache_dtype="fp8")
    assert_passes_the_self_check(server, cache_dtype="fp8_e4m3")
    server.ask([Ask(random_prompt(1, 2, 3), CAPTURE, when_stored=True)], tokens=1)
    (found,) = server.ask([Ask(MOVED, ALL_RECOMPUTED, captures=())])
    assert "reused" in outcomes(found)


def test_adapters_have_their_own_chunk_caches(
    make_compiled: MakeCompiled, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM's CPU build compiles nothing with adapters, whatever it is asked for; a GPU would."""
    folder = save_adapter(model_folder("Llama"), tmp_path / "adapter", seed=1)
    adapter = LoRARequest("adapter", 1, str(folder))
    server = make_compiled(
        compiles=torch.cuda.is_available(),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=max(8, RANK),
    )
    server.ask([random_prompt(5).token_ids], adapters=[adapter])  # vLLM loads it
    assert_moved_chunks_give_vllms_own_answer(server)
    (other,) = server.ask([Ask(MOVED, ALL_RECOMPUTED, captures=())], adapters=[adapter])
    assert set(outcomes(other)) == {"computed"}
    assert_moved_chunks_give_vllms_own_answer(server, adapter)


def test_drafts_and_another_connector_keep_the_answers(
    make_compiled: MakeCompiled, tmp_path: Path
) -> None:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    server = make_compiled(speculative_config=DRAFTS, beside=[example])
    assert_passes_the_self_check(server)
    assert_moved_chunks_give_vllms_own_answer(server)
    assert list((tmp_path / "example").iterdir())
