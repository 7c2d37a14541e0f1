"""KV caches in FP8: prompts are computed in the model's dtype, and rounded when vLLM's blocks are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from benchmarks.vllm_families import random_prompt
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.options import FP8_CACHES
from cachecraft_rag.vllm.worker.models import model_of
from cachecraft_rag.vllm.worker.ranks import ranks_of_worker
from cachecraft_rag.vllm.worker.stack import WorkerStack
from cachecraft_rag.vllm.worker.whole_model import check_whole_model
from tests.vllm.conftest import Served, Server
from tests.vllm.test_equality import BASE
from tests.vllm.test_families import assert_passes_the_self_check

ALL_RECOMPUTED = replace(BASE, recompute_ratio=1.0)
CAPTURE = replace(BASE, reuse=False, capture=True)
PRIMED = random_prompt(1, 2, 3, 4)
PROMPTS = [random_prompt(*order) for order in ((3, 1, 2), (2, 4), (4, 3, 2, 1), (1, 4, 2))]
ALL_TOKENS = 500
OPTIONS = {"max_model_len": 1024, "max_logprobs": ALL_TOKENS}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(),
        reason="vLLM's CPU build has FP8 caches on CPUs with AVX-512 only",
    ),
]


@dataclass
class Unquantised:
    """A store that a server without FP8 has filled, and that server's own answers."""

    store: Path
    answers: list[Served]


@pytest.fixture(scope="module")
def unquantised(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Unquantised:
    store = tmp_path_factory.mktemp("unquantised") / "caches"
    server = Server(model_folder("Llama"), store, **OPTIONS)
    server.ask([Ask(PRIMED, CAPTURE, when_stored=True)], tokens=1)
    answers = [server.ask([prompt.token_ids], logprobs=ALL_TOKENS)[0] for prompt in PROMPTS]
    server.close()
    return Unquantised(store, answers)


def error(found: Served, wanted: Served) -> float:
    """Return the mean difference of the log-probabilities of the eight likeliest first tokens."""
    likeliest = sorted(wanted.likeliest.items(), key=lambda item: -item[1])[:8]
    return sum(abs(found.likeliest[token] - logprob) for token, logprob in likeliest) / 8


def test_passes_take_queries_that_vllm_has_rounded_to_fp8(
    model_folder: Callable[[str], Path],
    make_server: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As some of its CUDA backends ask for; those of the CPU build do not."""
    options = OPTIONS | {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    server = make_server(model_folder("Llama"), tmp_path / "caches", **options)
    model = model_of(server.llm.llm_engine.vllm_config)
    assert model is not None
    stack = WorkerStack(model, ranks_of_worker())
    rounded: list[torch.dtype] = []

    def quantised(query: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, None]:
        rounded.append(query.dtype)
        return (query / scale).to(torch.float8_e4m3fn), None

    for layer in model.model.layers:
        attention: Any = layer.self_attn.attn  # type: ignore[attr-defined]
        attention._q_scale.fill_(0.5)
        monkeypatch.setattr(attention.impl, "supports_quant_query_input", True)
        monkeypatch.setattr(attention, "query_quant", quantised)
    assert check_whole_model(stack, stack.vllm_forward()) == ""
    assert rounded


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2"])
def test_filled_prompts_are_as_close_to_the_unquantised_model_as_vllms_own(
    cache_dtype: str,
    model_folder: Callable[[str], Path],
    make_server: Callable[..., Server],
    unquantised: Unquantised,
) -> None:
    server = make_server(
        model_folder("Llama"), unquantised.store, kv_cache_dtype=cache_dtype, **OPTIONS
    )
    (other,) = server.ask([Ask(PRIMED, ALL_RECOMPUTED, captures=(1,))], tokens=1)
    assert {segment["outcome"] for segment in other.report["segments"]} == {"computed"}

    server.ask([Ask(PRIMED, CAPTURE, when_stored=True)], tokens=1)
    filled_errors = []
    own_errors = []
    for prompt, wanted in zip(PROMPTS, unquantised.answers, strict=True):
        ask = Ask(prompt, ALL_RECOMPUTED, captures=())
        (found,) = server.ask([ask], logprobs=ALL_TOKENS)
        (own,) = server.ask([prompt.token_ids], logprobs=ALL_TOKENS)
        assert "reused" in {segment["outcome"] for segment in found.report["segments"]}
        filled_errors.append(error(found, wanted))
        own_errors.append(error(own, wanted))
        print(cache_dtype, filled_errors[-1], own_errors[-1], error(found, own))
    assert sum(filled_errors) <= sum(own_errors)
    assert_passes_the_self_check(server, cache_dtype=FP8_CACHES[cache_dtype])
