"""Requests, and what only a running vLLM knows, that are not served from chunk-caches, with the reason."""

from __future__ import annotations

from cachecraft_rag.vllm.options import VLLMConfig, VLLMOptions
from cachecraft_rag.vllm.refusals import Refusal, refusal
from cachecraft_rag.vllm.worker.interfaces import EngineRequest, KVCacheConfig

OTHER_MODEL = "Choose another model, or serve this one without reuse (`vllm serve`)"


def start_up_refusal(config: VLLMConfig, kv_cache_config: KVCacheConfig) -> Refusal | None:
    """Return why a server with this `VllmConfig` and KV caches cannot reuse chunk-caches; None without a known reason.

    After None, the survey of the layers and the self-check may still refuse the model.
    """
    model = config.model_config
    early = refusal(model.hf_config, VLLMOptions.from_config(config))
    if early is not None:
        return early
    if model.use_mla:
        return Refusal(
            "its attention is latent (MLA), and vLLM keeps no keys per head", OTHER_MODEL
        )
    return _of_kv_caches(kv_cache_config) or _of_ranks(config)


def _of_kv_caches(kv_cache_config: KVCacheConfig) -> Refusal | None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        reason = f"its layers keep {len(groups)} kinds of KV caches: windows, state-space layers or several models"
        advice = "If they are windows, add `-- --disable-hybrid-kv-cache-manager`; otherwise choose another model"
        return Refusal(reason, advice)
    kind = type(groups[0].kv_cache_spec).__name__
    if kind != "FullAttentionSpec":
        return Refusal(f"its KV cache is a {kind}; only full attention is known", OTHER_MODEL)
    return None


def _of_ranks(config: VLLMConfig) -> Refusal | None:
    text = config.model_config.hf_text_config
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    ranks = config.parallel_config.tensor_parallel_size
    if kv_heads % ranks:
        reason = f"{kv_heads} key/value heads cannot be divided among {ranks} ranks"
        return Refusal(reason, "Choose a --tensor-parallel-size that divides them")
    return None


def request_refusal(request: EngineRequest, *, is_audit: bool = False) -> str:
    """Return why vLLM computes this request without chunk-caches; "" if only its `Ask` can still be a reason.

    Refused are requests without text to generate, with embeddings, images, sound or videos, and for log-probabilities
    of the prompt; those of the answer alone are no reason. Requests of this package are checked as well, but an audit's
    own pass (`is_audit`) may ask for log-probabilities of its prompt, if it reads the prefix cache all the same.

    A new reason is a sentence here and under "Per request" in docs/reference/vllm.md. What it reads of vLLM's request
    is declared in `interfaces`, in `USES` of `benchmarks/vllm_contract.py`, and in the stand-ins of `request_of` in
    `tests/vllm/test_working.py` and of `benchmarks/request_costs.py`.
    """
    sampling = request.sampling_params
    if sampling is None:
        return "it generates no text"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "its prompt has embeddings instead of tokens"
    if request.mm_features:
        return "it holds images, sound or videos"
    wants_logprobs = sampling.prompt_logprobs is not None and not is_audit
    if wants_logprobs or request.skip_reading_prefix_cache:
        return "it asks for log-probabilities of the prompt, so vLLM computes all of it"
    return ""
