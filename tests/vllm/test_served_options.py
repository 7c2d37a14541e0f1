"""A server over HTTP with LoRA, drafts from tokens and a KV cache in FP8 at once: reuse is checked at its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm.adapters import save_adapter
from tests.vllm.http_server import ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(),
        reason="vLLM's CPU build has FP8 caches on CPUs with AVX-512 only",
    ),
]

ADAPTER = "in-verse"
DOCUMENTS = [
    {"text": " ".join(f"{thing} number {place} was made in {1800 + place}." for place in range(9))}
    for thing in ("The kettle", "The toaster", "The mill")
]


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("options")
    adapter = save_adapter(model_folder("Llama"), folder / "adapter", seed=1)
    drafts = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
    made = ServerProcess(
        model_folder("Llama"),
        folder / "store",
        folder / "log",
        "--",
        *("--enable-lora", "--lora-modules", f"{ADAPTER}={adapter}"),
        *("--speculative-config", drafts),
        *("--kv-cache-dtype", "fp8"),
    )
    yield made
    made.stop()


def outcomes(server: ServerProcess, documents: list[dict[str, str]], **body: Any) -> list[str]:
    answer = server.chat(documents, max_tokens=32, **body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["kv_transfer_params"]["cachecraft"]
    assert found["refused"] is None
    server.settles()
    return [chunk["outcome"] for chunk in found["stats"]["chunks"]]


def test_the_base_model_and_an_adapter_each_reuse_their_own_documents(
    server: ServerProcess,
) -> None:
    for names in ({}, {"model": ADAPTER}):
        assert outcomes(server, DOCUMENTS, **names) == ["computed"] * 3
        assert set(outcomes(server, DOCUMENTS[::-1], **names)) <= {"exact", "reused"}
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
