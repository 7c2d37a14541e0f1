"""Fixtures of the tests of LlamaIndex's classes: a small engine whose answers are letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachecraft_rag import Decoder, Engine
from cachecraft_rag.store import ChunkCacheStore


@pytest.fixture(scope="module")
def decoder(decoder_of_letters: Callable[..., Decoder]) -> Decoder:
    return decoder_of_letters(gain=3.0)


@pytest.fixture
def engine(decoder: Decoder, tmp_path: Path) -> Iterator[Engine]:
    """It captures nothing between answers: what is reused decides, by a little, what is said."""
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(decoder, store, new_variants="off") as made,
    ):
        yield made
