"""Sizes from a config alone are the sizes of real chunk-caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachecraft_rag.errors import ConfigError, ModelNotFoundError
from cachecraft_rag.model.sizes import cache_bytes, layout_named
from cachecraft_rag.types.kv_layout import KVLayout

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_the_config_tells_what_the_loaded_model_has(
    family: str, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = tiny_decoder(family)
    decoder.model.save_pretrained(tmp_path)
    assert layout_named(str(tmp_path)) == decoder.layout
    assert layout_named(str(tmp_path), dtype="bfloat16").dtype == "bfloat16"
    assert cache_bytes(decoder.layout, 100) == decoder.layout.nbytes(100)


def test_a_wrong_name_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        layout_named(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="float32"):
        layout_named(str(tmp_path), dtype="float31")
    with pytest.raises(ConfigError, match="codec"):
        cache_bytes(KVLayout(1, 1, 1, "float32"), 1, "zip")


def test_a_model_that_is_not_there_is_reported_as_by_ask() -> None:
    with pytest.raises(ModelNotFoundError, match=r"cannot load the model 'gpt2'(?s:.*)or \"demo\""):
        layout_named("gpt2")
