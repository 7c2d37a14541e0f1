"""The text part of a multimodal checkpoint as a causal LM, if that is a family in itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_OVER_VLLM = "ask it over vLLM (cachecraft serve --backend vllm), which serves more of these"


def is_multimodal(config: PretrainedConfig) -> bool:
    """Return True if a decoder-only checkpoint has parts besides the one for text, such as a vision tower."""
    return config.get_text_config() is not config


def text_part_refusal(config: PretrainedConfig) -> str:
    """Return why the text part of a multimodal checkpoint cannot be loaded alone; "" if it can."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = config.get_text_config().model_type
    if getattr(config, "quantization_config", None):
        return f"it is multimodal and quantised, and its text part cannot be loaded alone; {_OVER_VLLM}"
    if (
        kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    ):
        return f"it is multimodal, and transformers has no causal LM for its text part ({kind}); {_OVER_VLLM}"
    return ""


def load_text_part(source: str, config: PretrainedConfig, dtype: torch.dtype | str) -> Any:
    """Return the text part of a multimodal checkpoint as a causal LM; the other parts are loaded and freed.

    `source` is a folder or a name on the hub, `config` that of the whole; a `dtype` of "auto" is the checkpoint's own.
    Nothing is checked: ask `text_part_refusal` first.
    Rejected: to load only its weights, by a mapping of their names. Names differ between versions of transformers, and
    a weight that is missed is replaced by noise.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    whole = AutoModelForImageTextToText.from_pretrained(
        source, dtype=dtype, trust_remote_code=False
    )
    causal_lm: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = causal_lm.from_config(config.get_text_config())
    model.model = whole.model.language_model
    model.config = model.model.config  # the one that its layers read
    model.lm_head = whole.lm_head
    model.generation_config = whole.generation_config
    return model.eval()
