"""Sizes from a config alone are the sizes of real chunk-caches, and the table in the docs is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachecraft_rag.engine.sizes import cache_bytes, layout_of
from cachecraft_rag.errors import ConfigError, ModelNotFoundError
from cachecraft_rag.types import KVLayout

if TYPE_CHECKING:
    from cachecraft_rag.engine.decoder import Decoder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sizes.md"


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_the_config_tells_what_the_loaded_model_has(
    family: str, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = tiny_decoder(family)
    decoder.model.save_pretrained(tmp_path)
    assert layout_of(str(tmp_path)) == decoder.layout
    assert layout_of(str(tmp_path), dtype="bfloat16").dtype == "bfloat16"
    assert cache_bytes(decoder.layout, 100) == decoder.layout.nbytes(100)


def test_a_wrong_name_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        layout_of(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="float32"):
        layout_of(str(tmp_path), dtype="float31")
    with pytest.raises(ConfigError, match="codec"):
        cache_bytes(KVLayout(1, 1, 1, "float32"), 1, "zip")


def test_every_row_of_the_table_follows_from_its_shape() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| (\d+) × (\d+) × (\d+) \| (?:(fp32) )?([\d,.]+) \| ([\d,.]+) \| ([\d,.]+) \|",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) >= 12
    for name, layers, heads, dim, fp32, *shown in rows:
        layout = KVLayout(int(layers), int(heads), int(dim), "float32" if fp32 else "bfloat16")
        expected = [f"{cache_bytes(layout, 1000, codec) / 1e6:.1f}" for codec in ("raw", "int8", "entropy")]
        assert shown == expected, name
