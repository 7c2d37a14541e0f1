"""A remote that is not there: said once, in the log and in the answer's numbers; no folder is made in its place."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import VariantKey

CHUNKS = [Chunk("Empty the kettle before you descale it."), Chunk("The toaster has a crumb tray.")]
LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=4, dtype="float32")
NOWHERE = "redis://:secret@127.0.0.1:1/0"


def capture(chunk: str = "chunk") -> Capture:
    key = VariantKey("ns", "model", chunk, ("system",))
    scores = TokenScores(np.zeros(3, np.float32))
    return Capture(
        key, LAYOUT, "tokens", torch.ones(LAYOUT.shape(3)), scores, (0.1,), 0.3, 0.6, 1.0
    )


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def ask(tiny_decoder: Any, tmp_path: Path) -> Any:
    """Asks one question over a fresh local store and returns the answer's numbers."""

    def once(remote: str | None, name: str) -> Any:
        with (
            ChunkCacheStore.open(tmp_path / name, remote=remote) as store,
            Engine(tiny_decoder("Llama"), store) as engine,
        ):
            answer = engine.stream("Which tray?", CHUNKS, sampling=SamplingParams(max_new_tokens=2))
            for _ in answer:
                pass
            return answer.stats

    return once


def test_a_dead_redis_is_said_in_a_single_question(
    ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cachecraft_rag"):
        stats = ask(NOWHERE, "one")
    assert stats.remote in ("failed", "too slow")
    assert stats.as_dict()["remote"] == stats.remote
    (warning,) = warnings_of(caplog)
    assert "redis://***@127.0.0.1:1/0" in warning
    assert "secret" not in warning


def test_without_a_remote_or_with_one_that_answers_nothing_is_said(
    ask: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "shared").mkdir()
    with caplog.at_level(logging.WARNING, "cachecraft_rag"):
        assert ask(None, "none").remote is None
        assert ask(f"file://{tmp_path}/shared", "first").remote == "answered"
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("name", ["not mounted", "a file"])
def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match="mkdir -p"):
        ChunkCacheStore.open(
            tmp_path / "store", remote=f"file://{tmp_path}/{name.replace(' ', '%20')}"
        )
    assert not (tmp_path / "not mounted").exists()


def test_a_folder_that_vanishes_is_not_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with (
        caplog.at_level(logging.WARNING, "cachecraft_rag"),
        ChunkCacheStore.open(tmp_path / "store", remote=f"file://{shared}") as store,
    ):
        store.put(capture()).result()
        assert store.flush(10)
        shutil.rmtree(shared)
        store.put(capture("another")).result()
        store.flush(10)
        found = store.find("ns", "model", ["a third"])
        assert found.variants == {"a third": []}
        assert found.remote == "failed"
    assert not shared.exists()
    assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
