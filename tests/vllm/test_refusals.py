"""Reasons to refuse a server; the names of vLLM's settings are pinned by the contract test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cachecraft_rag.vllm.worker.refusals import start_up_refusal


class FullAttentionSpec:
    """Named as vLLM's."""


class SlidingWindowSpec:
    """Named as vLLM's."""


def config(**changed: Any) -> Any:
    """A server that is served; `changed` by `part__name`."""
    parts: dict[str, dict[str, Any]] = {
        "model": {"use_mla": False, "is_encoder_decoder": False, "architectures": ["LlamaForCausalLM"]},
        "hf": {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default"}},
        "parallel": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 2,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_expert_parallel": False,
        },
        "top": {"lora_config": None, "speculative_config": None, "cache_dtype": "auto"},
    }
    for place, value in changed.items():
        part, name = place.split("__")
        parts[part][name] = value
    model, hf, top = parts["model"], SimpleNamespace(**parts["hf"]), parts["top"]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=model["use_mla"],
            is_encoder_decoder=model["is_encoder_decoder"],
            hf_config=SimpleNamespace(architectures=model["architectures"]),
            hf_text_config=hf,
        ),
        parallel_config=SimpleNamespace(**parts["parallel"]),
        lora_config=top["lora_config"],
        speculative_config=top["speculative_config"],
        cache_config=SimpleNamespace(cache_dtype=top["cache_dtype"]),
    )


def caches(*specs: type) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec()) for spec in specs])


ONE = caches(FullAttentionSpec)


def test_a_plain_server_is_served() -> None:
    assert start_up_refusal(config(), ONE) is None
    yarn = config(hf__rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert start_up_refusal(yarn, ONE) is None
    assert start_up_refusal(config(hf__rope_parameters=None, hf__num_key_value_heads=None), ONE) is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model__use_mla": True}, "MLA"),
        ({"model__is_encoder_decoder": True}, "encoder-decoder"),
        ({"model__architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM; known are LlamaForCausalLM"),
        ({"model__architectures": None}, "unknown"),
        ({"hf__rope_parameters": {"rope_type": "longrope"}}, "LongRoPE"),
        ({"hf__rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "several parts"),
        ({"hf__num_key_value_heads": 3}, "3 key/value heads cannot be divided among 2 ranks"),
        ({"hf__num_key_value_heads": 1}, "1 key/value heads cannot"),
        ({"parallel__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}, "expert parallelism"),
        ({"top__lora_config": object()}, "LoRA"),
        ({"top__speculative_config": object()}, "draft model"),
        ({"top__cache_dtype": "fp8"}, "quantised .fp8."),
    ],
)
def test_refused_at_start_up(changed: dict[str, Any], says: str) -> None:
    import re

    reason = start_up_refusal(config(**changed), ONE)
    assert reason is not None
    assert re.search(says, reason), reason


def test_refused_for_its_kv_caches() -> None:
    for groups, says in (((FullAttentionSpec, SlidingWindowSpec), "2 kinds"), ((SlidingWindowSpec,), "full attention")):
        reason = start_up_refusal(config(), caches(*groups))
        assert reason is not None
        assert says in reason
