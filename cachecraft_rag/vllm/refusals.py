"""What is not served from chunk-caches, by name and reason: at start-up, or one request at a time."""

from __future__ import annotations

from typing import Any

from cachecraft_rag.vllm.plugin import ARCHITECTURES

_STANDARD_KV = ("auto", "float16", "bfloat16", "float32", "half", "float")


def start_up_refusal(config: Any, kv_cache_config: Any) -> str | None:
    """Why a server with this `VllmConfig` and KV caches cannot reuse chunk-caches, or None."""
    model, parallel, hf = config.model_config, config.parallel_config, config.model_config.hf_text_config
    found = [
        (_architecture(model), "model"),
        (_kv_groups(kv_cache_config), "KV caches"),
        (_rope(hf), "rotary embedding"),
        (_parallel(parallel, hf), "parallel"),
        (config.lora_config is not None and "LoRA adapters change keys and values from request to request", "lora"),
        (
            config.speculative_config is not None and "a draft model's own KV cache would stay empty",
            "speculative decoding",
        ),
        (
            config.cache_config.cache_dtype not in _STANDARD_KV
            and f"the KV cache is quantised ({config.cache_config.cache_dtype})",
            "kv-cache-dtype",
        ),
    ]
    return next((f"{reason} ({name})" for reason, name in found if reason), None)


def _architecture(model: Any) -> str:
    if getattr(model, "use_mla", False):
        return "its attention is latent (MLA) and has no keys of its own"
    if getattr(model, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    names = list(getattr(model.hf_config, "architectures", None) or [])
    if not any(name in ARCHITECTURES for name in names):
        return f"its architecture is {', '.join(names) or 'unknown'}; known are {', '.join(sorted(ARCHITECTURES))}"
    return ""


def _kv_groups(kv_cache_config: Any) -> str:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"its layers keep {len(groups)} kinds of KV caches: windows, state-space layers or several models"
    kind = type(groups[0].kv_cache_spec).__name__
    return "" if kind == "FullAttentionSpec" else f"its KV cache is a {kind}; only full attention is known"


def _rope(hf: Any) -> str:
    rope = getattr(hf, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if kind == "longrope":
        return "LongRoPE changes all keys when a prompt passes the original length"
    if kind == "mrope" or "mrope_section" in rope or getattr(hf, "dual_chunk_attention_config", None):
        return "positions have several parts"
    return ""


def _parallel(parallel: Any, hf: Any) -> str:
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism: a rank has only some of the layers"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return "context parallelism: a rank has only some of the positions"
    if parallel.data_parallel_size > 1 and getattr(parallel, "enable_expert_parallel", False):
        return "data parallelism with expert parallelism: ranks wait for each other in every forward"
    kv_heads = getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads
    if kv_heads % parallel.tensor_parallel_size:
        return f"{kv_heads} key/value heads cannot be divided among {parallel.tensor_parallel_size} ranks"
    return ""


def request_refusal(request: Any, *, salt: str | None) -> str | None:
    """Why this request of vLLM's is computed as any other, or None.

    Args:
        salt: what its `cache_salt` must be while prefix caching is on; None while it is off.
    """
    sampling = request.sampling_params
    if sampling is None:
        return "it generates no text"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "its prompt has embeddings instead of tokens"
    if request.mm_features:
        return "its prompt holds images or sound"
    if request.lora_request is not None:
        return "it uses a LoRA adapter"
    if sampling.prompt_logprobs is not None or request.skip_reading_prefix_cache:
        return "it asks for log probabilities of the prompt, so vLLM computes all of it"
    if salt is not None and request.cache_salt != salt:
        return "its cache_salt is not that of its segments, so others could be served blocks that were filled for it"
    return None
