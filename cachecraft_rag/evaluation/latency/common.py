"""The question and chunks of all benchmarks, and a way to drop files from the page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.demo_model import handbook_folder
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types import Chunk

QUESTION = "Which of these parts wear out, and how often should each be replaced?"


def chunks_of(decoder: Decoder, *, count: int, tokens: int) -> Sequence[Chunk]:
    """`count` chunks of `tokens` tokens each, cut from the sample handbook. Raises ConfigError if it is too short."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(handbook_folder().glob("*.md")))
    ids = decoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < count * tokens:
        raise ConfigError(f"the sample text has {len(ids)} tokens; choose fewer or shorter chunks")
    step = len(ids) // count
    return [Chunk(decoder.tokenizer.decode(ids[i * step : i * step + tokens - 1])) for i in range(count)]


def drop_page_cache(folder: Path) -> None:
    """Drop all files in a folder from the page cache; does nothing on systems that cannot (macOS, Windows)."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
