"""What a front end knows of a model that vLLM runs in other processes, or on another machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cachecraft_rag.engine.chunk_bound import ModelTokens
from cachecraft_rag.engine.decoder import context_length_of, end_tokens_of, layout_of
from cachecraft_rag.engine.demo_model import demo_model_folder
from cachecraft_rag.engine.fingerprint import checkpoint_fingerprint, snapshot_folder
from cachecraft_rag.errors import ModelNotFoundError, UnsupportedModelError
from cachecraft_rag.types import KVLayout

PROTOCOL = 1  # of what `client.HTTPEngine` and the endpoint say to each other
TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class ServedModel:
    """What is known here of a model that runs in vLLM's processes; see `engine.base.ModelFacts`.

    folder      where its files are; None where they are on another machine
    end_tokens  ids that end an answer
    """

    name: str
    folder: Path | None
    tokenizer: Any
    fingerprint: str
    layout: KVLayout
    context_length: int
    end_tokens: frozenset[int]

    @classmethod
    def load(cls, name: str, *, dtype: str = "auto") -> ServedModel:
        """Read config and tokenizer, and the digests of the weights.

        Raises ModelNotFoundError where there is nothing of that name, UnsupportedModelError without weight files.
        """
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        source = str(demo_model_folder()) if name == "demo" else name
        try:
            config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
            folder = snapshot_folder(source, revision=getattr(config, "_commit_hash", None))
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(f"cannot load the model {name!r}: {error}") from error
        used = dtype if dtype != "auto" else str(config.dtype or "float32").removeprefix("torch.")
        fingerprint = None if folder is None else checkpoint_fingerprint(folder, dtype=used)
        if folder is None or fingerprint is None:
            raise UnsupportedModelError(
                f"{name} has no weight files on this machine. Load it once with the hub's client, or name a folder."
            )
        try:
            generation: Any = GenerationConfig.from_pretrained(folder)
        except OSError:  # it has none
            generation = None
        return cls(
            name,
            folder,
            tokenizer,
            fingerprint,
            layout_of(config, used),
            context_length_of(config),
            end_tokens_of(generation, config, tokenizer),
        )

    @cached_property
    def chunk_bound(self) -> ModelTokens:
        """What bounds the chunks of a document for this model."""
        return ModelTokens.of(self.tokenizer, context_length=self.context_length)
