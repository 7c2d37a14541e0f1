"""Models, settings and requests that are not served from chunk-caches, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from cachecraft_rag.vllm.plugin import ARCHITECTURES

_STANDARD_KV = ("auto", "float16", "bfloat16", "float32", "half", "float")


def start_up_refusal(config: Any, kv_cache_config: Any) -> str | None:
    """Reason why a server with this `VllmConfig` and KV caches cannot reuse chunk-caches, or None."""
    reasons = (_of_model(config.model_config), _of_settings(config, kv_cache_config), _of_parallel(config))
    return next(chain.from_iterable(reasons), None)


def _of_model(model: Any) -> Iterator[str]:
    if getattr(model, "use_mla", False):
        yield "its attention is latent (MLA) and has no keys of its own"
    if getattr(model, "is_encoder_decoder", False):
        yield "it is an encoder-decoder"
    names = list(getattr(model.hf_config, "architectures", None) or [])
    if not any(name in ARCHITECTURES for name in names):
        yield f"its architecture is {', '.join(names) or 'unknown'}; known are {', '.join(sorted(ARCHITECTURES))}"
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if kind == "longrope":
        yield "LongRoPE changes all keys when a prompt passes the original length"
    if kind == "mrope" or "mrope_section" in rope or getattr(model.hf_text_config, "dual_chunk_attention_config", None):
        yield "its rotary embedding has positions of several parts"


def _of_settings(config: Any, kv_cache_config: Any) -> Iterator[str]:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        yield f"its layers keep {len(groups)} kinds of KV caches: windows, state-space layers or several models"
    if (kind := type(groups[0].kv_cache_spec).__name__) != "FullAttentionSpec":
        yield f"its KV cache is a {kind}; only full attention is known"
    if config.lora_config is not None:
        yield "LoRA adapters change keys and values from request to request"
    if config.speculative_config is not None:
        yield "with speculative decoding, a draft model's own KV cache would stay empty"
    if (dtype := config.cache_config.cache_dtype) not in _STANDARD_KV:
        yield f"the KV cache is quantised ({dtype})"


def _of_parallel(config: Any) -> Iterator[str]:
    parallel, hf = config.parallel_config, config.model_config.hf_text_config
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism: a rank has only some of the layers"
    if any(getattr(parallel, f"{one}_context_parallel_size", 1) > 1 for one in ("decode", "prefill")):
        yield "context parallelism: a rank has only some of the positions"
    if parallel.data_parallel_size > 1 and getattr(parallel, "enable_expert_parallel", False):
        yield "data parallelism with expert parallelism: ranks wait for each other in every forward"
    kv_heads = getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads
    if kv_heads % parallel.tensor_parallel_size:
        yield f"{kv_heads} key/value heads cannot be divided among {parallel.tensor_parallel_size} ranks"


def request_refusal(request: Any, *, salt: str | None) -> str | None:
    """Reason why this request of vLLM's is computed like any other, or None.

    Args:
        salt: the `cache_salt` that it must have while prefix caching is on; None while it is off.
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
