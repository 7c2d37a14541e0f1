"""What the tests of LlamaIndex's classes share: a small engine whose answers are letters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cachecraft_rag import Decoder, Engine
from cachecraft_rag.store import ChunkCacheStore


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    """A tiny Llama that writes letters, and others for another question: a random one does neither."""
    random = tiny_decoder("Llama")
    model, tokenizer = copy.deepcopy(random.model), random.tokenizer
    texts = [tokenizer.decode([token]) for token in range(260)]
    letters = [len(text) == 1 and text.isascii() and text.isprintable() for text in texts]
    with torch.no_grad():
        model.lm_head.weight[~torch.tensor(letters)] = 0.0
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(3)
    return Decoder(model, tokenizer, name="tiny Llama of letters")


@pytest.fixture
def engine(decoder: Decoder, tmp_path: Path) -> Iterator[Engine]:
    with ChunkCacheStore.open(tmp_path / "caches") as store, Engine(decoder, store) as made:
        yield made
