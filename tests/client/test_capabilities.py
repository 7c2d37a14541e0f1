"""Calls that an engine over HTTP lacks: each is refused in one place, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cachecraft_rag.client.http import HTTPEngine, ServerCaches
from cachecraft_rag.engine.capabilities import Capability
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, UnsupportedCallError
from cachecraft_rag.store import RowFilter
from cachecraft_rag.vllm.engine import VLLMEngine
from tests.vllm.test_client import answers_of, serving

TOOL = {"type": "function", "function": {"name": "add"}}
CALLS: dict[Capability, tuple[Callable[[HTTPEngine], Any], str]] = {
    Capability.CAPTURE: (
        lambda engine: engine.capture(engine.prompts.build("x", []), [0], primed=True),
        "prime",
    ),
    Capability.LOOK_UP: (
        lambda engine: engine.look_up(engine.prompts.build("x", []).segments),
        "missing",
    ),
    Capability.SYNC: (lambda engine: engine.sync(["A text."]), "cachecraft store sync"),
    Capability.TOOLS: (lambda engine: engine.stream("How?", [], tools=[TOOL]), "in this process"),
}


def test_each_missing_capability_is_refused_with_its_reason(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert HTTPEngine.capabilities.missing.keys() == CALLS.keys()
    with (
        serving(answers_of(byte_tokenizer, tmp_path / "t")) as url,
        HTTPEngine.connect(url) as engine,
    ):
        for capability, (call, advice) in CALLS.items():
            with pytest.raises(UnsupportedCallError, match=advice) as caught:
                call(engine)
            assert str(caught.value) == engine.capabilities.missing[capability]


def test_only_chunks_that_are_named_are_evicted_in_a_server(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    with (
        serving(answers_of(byte_tokenizer, tmp_path / "t")) as url,
        HTTPEngine.connect(url) as engine,
    ):
        store = engine.store
        assert isinstance(store, ServerCaches)
        with pytest.raises(UnsupportedCallError, match="chunk_ids"):
            store.evict(RowFilter(chunk_ids=("a",)), down_to_bytes=0)


@pytest.mark.parametrize("name", ["model", "api_key", "admin_key"])
def test_an_empty_key_or_model_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be text with something in it"):
        HTTPEngine.connect("http://127.0.0.1:9", **{name: ""})  # type: ignore[arg-type]


def test_engines_with_a_store_lack_nothing() -> None:
    for kind in (Engine, VLLMEngine):
        assert all(kind.capabilities.has(capability) for capability in Capability)
