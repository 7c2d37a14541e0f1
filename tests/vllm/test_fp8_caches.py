"""KV caches in FP8: prompts are computed in the model's dtype, and rounded when vLLM's blocks are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from benchmarks.vllm_families import random_prompt
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.options import FP8_CACHES
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
