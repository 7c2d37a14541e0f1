"""Which model a vLLM server runs, as the store knows it: with the Hugging Face engine's fingerprint and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cachecraft_rag.engine.decoder import context_length_of, layout_of
from cachecraft_rag.engine.fingerprint import checkpoint_fingerprint, snapshot_folder
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.types import KVLayout


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """fingerprint, layout (all heads) and context length, see `engine.decoder.Decoder`."""

    fingerprint: str
    layout: KVLayout
    context_length: int

    @classmethod
    def of(cls, model_config: Any) -> ModelIdentity:
        """From vLLM's `ModelConfig`. Raises UnsupportedModelError where the checkpoint's files cannot be found."""
        dtype = str(model_config.dtype).removeprefix("torch.")
        folder = snapshot_folder(model_config.model, revision=getattr(model_config.hf_config, "_commit_hash", None))
        fingerprint = None if folder is None else checkpoint_fingerprint(folder, dtype=dtype)
        if fingerprint is None:
            raise UnsupportedModelError(
                f"the files of {model_config.model} cannot be found, so its chunk-caches would have no identity; serve "
                "it from a folder, or from the hub's own cache"
            )
        config = model_config.hf_text_config
        return cls(fingerprint, layout_of(config, dtype), context_length_of(config))
