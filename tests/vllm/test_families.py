"""The model families that vLLM serves: each passes the self-check, and answers as the Hugging Face engine does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm")

from benchmarks.vllm_families import (
    FAMILIES,
    MULTIMODAL,
    NATIVE_ROTATION,
    architecture_of,
    no_images,
    save_checkpoint,
    scan,
)
from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.engine import VLLMEngine
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.options import VLLMOptions
from cachecraft_rag.vllm.self_check import Predicted, check_prompt, self_check
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.worker import layers as worker_layers
from cachecraft_rag.vllm.worker import models
from tests.vllm.conftest import TEXTS, Server
from tests.vllm.test_equality import BASE, KETTLE, Expected, assert_equal, greedy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

WINDOW = 128  # longer than the prompt of the self-check
ELSEWHERE = {"Llama", "Mistral", "Qwen2", "Qwen3"}  # in tests/vllm/test_equality.py
# vLLM computes otherwise than transformers: an activation in other steps, windows that are one token longer, and
# DeepSeek V3, of which the reason is not known
OTHER_NUMBERS = {"Apertus", "Cohere 2", "DeepSeek V3"}
LATENT = {"DeepSeek V2", "GLM-4 MoE Lite"}
CASES = {
    "exact, after its own prefix": ([2, 1, 0], BASE),
    "moved, at ratio 1": ([0, 2, 1], replace(BASE, recompute_ratio=1.0)),
    "moved, as by default": ([0, 2, 1], BASE),
    "nothing reused": ([0, 2, 1], replace(BASE, reuse=False)),
}


def expected_of(folder: Path, store: Path) -> tuple[dict[str, Expected], int]:
    """Prime three chunks with the Hugging Face engine, and let it answer the cases; with the number of layers."""
    chunks = [Chunk(text) for text in TEXTS[:3]]
    with (
        ChunkCacheStore.open(store) as caches,
        Engine(Decoder.load(str(folder), dtype="float32"), caches, config=BASE) as engine,
    ):
        Primer(engine).prime(chunks)
        cases = {
            name: greedy(engine, KETTLE, [chunks[i] for i in order], config)
            for name, (order, config) in CASES.items()
        }
        return cases, engine.decoder.layout.layers


def assert_passes_the_self_check(
    server: Server, *, dtype: str = "float32", cache_dtype: str = "", window: int = 0
) -> None:
    """Run the check that a server runs when it starts, or with a window the second one."""
    prompt = check_prompt(250, block_size=32, context_length=1024, window=window)
    assert prompt is not None

    def predict(asked: Ask | list[int]) -> Predicted:
        # as in a server, half as many of the plain request: the last ones change places by rounding
        (found,) = server.ask([asked], tokens=1, logprobs=8 if isinstance(asked, list) else 16)
        segments = found.report.get("segments", ())
        taken = sum(
            len(segment.token_ids) - outcome["recomputed"] - outcome["not_loaded"]
            for segment, outcome in zip(
                () if isinstance(asked, list) else asked.prompt.segments, segments, strict=False
            )
            if outcome["variant_id"] is not None
        )
        return Predicted(found.likeliest, taken, found.report.get("refused", ""))

    assert self_check(
        "the model", prompt, predict, kept=lambda: True, dtype=dtype, cache_dtype=cache_dtype
    )


def assert_served(server: Server, cases: dict[str, Expected], layers: int) -> None:
    """Each case gives the tokens and the rows of the Hugging Face engine; ratio 1 gives vLLM's own prefill."""
    for name, expected in cases.items():
        (found,) = server.ask([Ask(expected.prompt, expected.config, captures=(), details=True)])
        assert_equal(found, expected, layers)
        (plain,) = server.ask([expected.prompt.token_ids])
        if name != "moved, as by default":
            assert found.tokens == plain.tokens, name
            assert found.logprobs == pytest.approx(plain.logprobs, abs=1e-3), name


def with_window(folder: Path, window: int) -> Path:
    """Change the windows of a checkpoint."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": window}))
    return folder


@pytest.fixture
def registered() -> Callable[[str], None]:
    """Registers our class of an architecture itself; by its name vLLM would start a process to look at it."""
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # once per process; it would register the name again

    def register(architecture: str) -> None:
        ModelRegistry.register_model(architecture, getattr(models, architecture))

    return register


@pytest.fixture
def without_images() -> Iterator[None]:
    """Multimodal models start without image processors."""
    with no_images():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Gemma 3", "OLMo 2", "Qwen3 MoE", "gpt-oss"])
def test_two_ranks_serve_families(
    family: str,
    byte_tokenizer: PreTrainedTokenizerFast,
    make_server: Callable[..., Server],
    registered: Callable[[str], None],
    tmp_path: Path,
) -> None:
    """Two rotary tables and windows; norms over the heads of all ranks in layers of transformers; experts; sinks.

    Runs before families are served by one rank in this process: vLLM then changes their classes of transformers, so
    that only vLLM can make them.
    """
    registered(architecture_of(family))
    folder = save_checkpoint(family, tmp_path / "model", byte_tokenizer)
    cases, layers = expected_of(folder, tmp_path / "caches")
    server = make_server(folder, tmp_path / "caches", max_model_len=1024, tensor_parallel_size=2)
    assert_passes_the_self_check(server)
    assert_served(server, cases, layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - ELSEWHERE - OTHER_NUMBERS))
def test_families_are_served(
    family: str,
    byte_tokenizer: PreTrainedTokenizerFast,
    make_server: Callable[..., Server],
    registered: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those with latent attention are served because vLLM keeps keys per head."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    registered(architecture_of(family))
    folder = save_checkpoint(family, tmp_path / "model", byte_tokenizer)
    cases, layers = expected_of(folder, tmp_path / "caches")
    assert cases["moved, at ratio 1"].outcomes != cases["nothing reused"].outcomes
    native = {"compilation_config": NATIVE_ROTATION} if family in LATENT else {}
    server = make_server(folder, tmp_path / "caches", max_model_len=1024, **native)
    assert_passes_the_self_check(server)
    assert_served(server, cases, layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Gemma 3, multimodal", "Mistral Small 3, multimodal"])
def test_texts_of_multimodal_models_are_served_as_in_process(
    family: str,
    byte_tokenizer: PreTrainedTokenizerFast,
    without_images: None,
    make_server: Callable[..., Server],
    registered: Callable[[str], None],
    tmp_path: Path,
) -> None:
    registered(architecture_of(family))
    folder = save_checkpoint(family, tmp_path / "model", byte_tokenizer)
    cases, layers = expected_of(folder, tmp_path / "caches")
    server = make_server(folder, tmp_path / "caches", max_model_len=1024)
    assert_passes_the_self_check(server)
    assert_served(server, cases, layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(name for name in MULTIMODAL if name.startswith("Qwen")))
def test_texts_of_models_with_several_positions_per_token_are_served(family: str) -> None:
    """Of a text, all positions of a token are equal: mRoPE rotates as a rotary embedding with one."""
    result = scan(family)
    assert result.outcome == "accepted", result.reason


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(OTHER_NUMBERS))
def test_families_that_vllm_computes_otherwise_answer_as_vllm_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    result = scan(family)
    assert result.outcome == "accepted", result.reason


@pytest.mark.parametrize("family", ["Cohere 2", "DeepSeek V3"])
def test_a_model_with_other_numbers_has_a_fingerprint_of_its_own(
    family: str,
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    folder = save_checkpoint(family, tmp_path / "model", byte_tokenizer)
    here = Decoder.load(str(folder), dtype="float32")
    served = VLLMModel.load(str(folder), dtype="float32", options=VLLMOptions.from_values({}))
    assert served.fingerprint != here.fingerprint


@pytest.mark.slow
def test_the_engine_sets_up_what_windows_need(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its self-checks pass; without the argument, vLLM would keep two kinds of KV caches."""
    folder = with_window(save_checkpoint("Gemma 2", tmp_path / "model", byte_tokenizer), WINDOW)
    server = {"max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 4, "block_size": 32}
    with (
        caplog.at_level("INFO", "cachecraft_rag.vllm"),
        VLLMEngine.from_pretrained(
            str(folder), store=tmp_path / "store", server=server, reuse=BASE
        ),
    ):
        assert "vLLM keeps all tokens of these layers too" in caplog.text
        assert "Self-check on 99 tokens" in caplog.text
        assert "Self-check on 264 tokens" in caplog.text


@pytest.mark.slow
def test_a_check_across_windows_finds_passes_that_ignore_them(
    byte_tokenizer: PreTrainedTokenizerFast,
    make_server: Callable[..., Server],
    registered: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which the prompt of a model without windows is too short for."""
    registered(architecture_of("Gemma 2"))
    folder = with_window(save_checkpoint("Gemma 2", tmp_path / "model", byte_tokenizer), WINDOW)
    server = make_server(folder, tmp_path / "caches", max_model_len=1024)
    assert_passes_the_self_check(server, window=WINDOW)

    def without_window(
        scale: float, _window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> AttentionSettings:
        return AttentionSettings(scale, None, softcap, sinks)

    monkeypatch.setattr(worker_layers, "AttentionSettings", without_window)
    server = make_server(folder, tmp_path / "others", max_model_len=1024)
    assert_passes_the_self_check(server)
    with pytest.raises(UnsupportedModelError, match="computed by our passes differ"):
        assert_passes_the_self_check(server, window=WINDOW)
