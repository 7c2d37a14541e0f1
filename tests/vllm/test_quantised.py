"""Quantised weights over vLLM's CPU build: served, checked, and never from the store of another quantisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("vllm")

from benchmarks.vllm_families import random_prompt, save_checkpoint
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.self_check import TOLERANCE
from cachecraft_rag.vllm.served_model import VLLMModel
from tests.vllm.conftest import Served, Server
from tests.vllm.quantised import KINDS, save_quantised
from tests.vllm.test_equality import BASE
from tests.vllm.test_families import assert_passes_the_self_check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BY_VLLM = "fp8_per_channel"  # vLLM quantises a plain checkpoint itself, to FP8
DTYPE = "bfloat16"  # vLLM's kernels for 4-bit weights do not compute in float32


def require_kernel(kind: str) -> None:
    """Skip the test where vLLM's CPU build has no kernel for these weights."""
    import vllm._custom_ops  # noqa: F401  # loads the kernels for this CPU

    if "int4" in kind and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM's CPU build has kernels for 4-bit weights on CPUs with AVX-512 only")


def assert_same_prediction(found: Served, plain: Served) -> None:
    """The likeliest first tokens have vLLM's own log-probabilities, but for rounding."""
    for token, logprob in list(plain.likeliest.items())[:8]:
        assert found.likeliest[token] == pytest.approx(logprob, abs=TOLERANCE[DTYPE])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, BY_VLLM])
def test_quantised_weights_are_served_from_a_store_of_their_own(
    kind: str,
    byte_tokenizer: PreTrainedTokenizerFast,
    make_server: Callable[..., Server],
    tmp_path: Path,
) -> None:
    require_kernel(kind)
    plain = save_checkpoint("Llama with llama3 scaling", tmp_path / "plain", byte_tokenizer)
    is_by_vllm = kind == BY_VLLM
    folder = plain if is_by_vllm else save_quantised(plain, kind, tmp_path / "quantised")
    quantisation = {"quantization": BY_VLLM} if is_by_vllm else {}
    options = {"max_model_len": 1024, "dtype": DTYPE}
    store = tmp_path / "caches"
    server = make_server(folder, store, **options, **quantisation)
    assert_passes_the_self_check(server, dtype=DTYPE)

    primed, asked = random_prompt(1, 2, 3), random_prompt(3, 1, 2)
    capture = Ask(primed, replace(BASE, reuse=False, capture=True), when_stored=True)
    server.ask([capture], tokens=1)
    exact = Ask(primed, BASE, captures=())
    moved = Ask(asked, replace(BASE, recompute_ratio=1.0), captures=())
    for ask, outcomes in ((exact, {"exact"}), (moved, {"exact", "reused"})):
        (found,) = server.ask([ask], logprobs=16)
        assert {segment["outcome"] for segment in found.report["segments"][:-1]} == outcomes
        (own,) = server.ask([ask.prompt.token_ids], logprobs=16)
        assert_same_prediction(found, own)

    other = make_server(plain, store, **options)
    (found,) = other.ask([replace(exact, captures=(1,))], tokens=1)
    assert {segment["outcome"] for segment in found.report["segments"]} == {"computed"}


@pytest.mark.slow
def test_fp8_weights_give_the_text_of_vllm_itself(
    byte_tokenizer: PreTrainedTokenizerFast, make_server: Callable[..., Server], tmp_path: Path
) -> None:
    plain = save_checkpoint("Llama with llama3 scaling", tmp_path / "plain", byte_tokenizer)
    folder = save_quantised(plain, "compressed-tensors FP8", tmp_path / "quantised")
    # in bfloat16, random weights have several next tokens within rounding
    server = make_server(folder, tmp_path / "caches", max_model_len=1024, dtype="float32")
    primed = random_prompt(1, 2, 3)
    capture = Ask(primed, replace(BASE, reuse=False, capture=True), when_stored=True)
    server.ask([capture], tokens=1)
    moved = replace(BASE, recompute_ratio=1.0)
    for ask in (Ask(primed, BASE, captures=()), Ask(random_prompt(3, 1, 2), moved, captures=())):
        (found,) = server.ask([ask])
        (own,) = server.ask([ask.prompt.token_ids])
        assert found.tokens == own.tokens


def test_each_quantisation_has_a_fingerprint_of_its_own(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    plain = save_checkpoint("Llama with YaRN", tmp_path / "plain", byte_tokenizer)
    folders = [save_quantised(plain, kind, tmp_path / kind) for kind in KINDS]
    models = [VLLMModel.load(str(folder), dtype=DTYPE) for folder in (plain, *folders)]
    assert len({model.fingerprint for model in models}) == 1 + len(KINDS)
    assert len({model.layout for model in models}) == 1
