"""Facts of a model that its config and its tokenizer hold, without weights. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cachecraft_rag.errors import CacheCraftError, ModelNotFoundError, says_no_memory
from cachecraft_rag.model.chunk_bound import MODEL_TOKENS, ModelTokens
from cachecraft_rag.model.demo_model import demo_model_folder
from cachecraft_rag.model.hub_check import require_hub
from cachecraft_rag.types.kv_layout import DTypeName, KVLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def chunk_bound_of(name: str) -> ModelTokens:
    """Return `Decoder.chunk_bound` of a model that is not loaded: only its config and its tokenizer are read.

    `name` as in `config_of`. For a config without `max_position_embeddings` the limit is the highest one, 1,024 tokens.
    """
    from transformers import AutoTokenizer

    with loading(name) as source:
        config = config_of(name)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    # configs of models that cannot be served may lack it
    has_length = hasattr(config.get_text_config(), "max_position_embeddings")
    return ModelTokens.of(
        tokenizer, context_length=context_length_of(config) if has_length else 4 * MODEL_TOKENS
    )


def config_of(name: str) -> PretrainedConfig:
    """Return the config of a model: of a folder, of a name on the hub, or of "demo".

    Weights are not loaded, but the first use of "demo" converts or downloads that model (`demo_model_folder`). A config
    that this disk lacks is downloaded, after a quick check that the hub has the model. Raises ModelNotFoundError,
    whatever the cause: no such name or folder, a hub that cannot be reached, a damaged config.
    """
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig

    with loading(name) as source:
        if not os.path.isdir(source) and not isinstance(
            try_to_load_from_cache(source, "config.json"), str
        ):
            require_hub([source])
        config: PretrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
        return config


@contextlib.contextmanager
def loading(name: str) -> Iterator[str]:
    """Give the block a model's folder, or its name on the hub, and turn what a loader raises into our errors.

    Whatever exception the block raises becomes ModelNotFoundError, except for errors of this package and lack of memory
    (MemoryError, torch's RuntimeError), which pass. So does a name that begins with "/", "." or "~" and is no folder.
    Other names are given to the block without a request to the hub. The first use of "demo" converts or downloads the
    demo model, see `demo_model_folder`.
    """
    try:
        if name.startswith(("/", ".", "~")) and not os.path.isdir(name):
            raise FileNotFoundError("there is no such folder")
        yield str(demo_model_folder()) if name == "demo" else name
    except CacheCraftError:
        raise
    # From damaged files the libraries of Hugging Face raise whatever their code meets.
    except Exception as error:
        if says_no_memory(error):
            raise
        reason = str(error) if isinstance(error, (OSError, ValueError)) else _named(error)
        if "trust_remote_code" in reason:
            reason = "it needs Python code from its own folder, and such code is not run."
        raise ModelNotFoundError(
            f"cannot load the model {name!r}: {reason}\n"
            'Name a Hugging Face model, a folder that holds one, or "demo" for the embedded model.'
        ) from error


def _named(error: Exception) -> str:
    """Return an error's text after the name of its class, for errors whose text alone says little: `'model_type'`."""
    return f"{type(error).__name__}: {error}"


def layout_of(config: PretrainedConfig, dtype: str) -> KVLayout:
    """Return the layout of a model's chunk-caches, from its Hugging Face config; of its text part if it has others.

    Layers may have different heads (Gemma 4): the largest are the layout's, and others are filled with zeros. `dtype`
    is not checked. Raises AttributeError if the config does not describe layers and heads.
    """
    config = config.get_text_config()
    kv_heads: list[int] = []
    head_dims: list[int] = []
    for layer_config in getattr(config, "per_layer_config", None) or [config]:
        heads = config.num_attention_heads
        latent_dim = _latent_head_dim(config)
        kv_heads.append(
            heads if latent_dim else getattr(layer_config, "num_key_value_heads", None) or heads
        )
        head_dims.append(
            latent_dim or getattr(layer_config, "head_dim", None) or config.hidden_size // heads
        )
    return KVLayout(
        layers=config.num_hidden_layers,
        kv_heads=max(kv_heads),
        head_dim=max(head_dims),
        dtype=cast(DTypeName, dtype),
    )


def _latent_head_dim(config: PretrainedConfig) -> int | None:
    """Return the dimensions of a head of multi-head latent attention (DeepSeek); None for other models."""
    if not getattr(config, "kv_lora_rank", None):
        return None
    return max(int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim), int(config.v_head_dim))


def take_processor_template(tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> None:
    """Give a tokenizer without a chat template that of its multimodal checkpoint's processor, if it has one.

    Older checkpoints, such as Mistral Small 3.1, have it in `chat_template.json`, which no tokenizer reads. Raises
    ValueError if that file has none. Without a folder nothing changes.
    """
    file = None if folder is None else folder / "chat_template.json"
    if file is not None and not tokenizer.chat_template and file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "chat_template" not in content:
            raise ValueError(f"{file} has no chat_template: repair it, or remove it")
        tokenizer.chat_template = content["chat_template"]


def own_dtype(config: PretrainedConfig) -> object:
    """Return the dtype of a checkpoint or of its text part, torch's or a name; None if its config names neither."""
    text = config.get_text_config()
    return getattr(config, "dtype", None) or getattr(text, "dtype", None)


def context_length_of(config: PretrainedConfig) -> int:
    """Return `max_position_embeddings` (AttributeError without it), or `longrope_context` if that is less."""
    # Longer prompts take LongRoPE's other frequencies, which change all keys. Rejected: a fingerprint for each side of
    # that length, which would capture every chunk twice.
    config = config.get_text_config()
    longest = int(config.max_position_embeddings)
    original = longrope_context(config)
    return longest if original is None else min(longest, original)


def longrope_context(config: PretrainedConfig) -> int | None:
    """Return the original context of a text config with LongRoPE, in tokens, the shortest of its layers; else None."""
    originals = [
        int(rope["original_max_position_embeddings"])  # type: ignore[call-overload]
        for rope in rope_parameters_of(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(originals, default=None)


def rope_parameters_of(config: PretrainedConfig) -> list[Mapping[str, object]]:
    """Return a text config's parameters of the rotary embedding: one mapping, maybe empty, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [parameters for parameters in rope.values() if isinstance(parameters, dict)] or [rope]


def end_tokens_of(*holders: object) -> frozenset[int]:
    """Return the ids that end an answer: of all holders' `eos_token_id`, an id, a list of ids, None or absent."""
    end_tokens: set[int] = set()
    for holder in holders:
        ids = getattr(holder, "eos_token_id", None)
        end_tokens.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(end_tokens)
