"""Models and options of vLLM with which chunk-caches cannot be reused, decided from the config before vLLM starts.

vLLM needs a minute to start, and ends with several tracebacks if its connector refuses a model. So all reasons that the
config shows are found here, at once. `worker.refusals` adds those that only a running vLLM knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.vllm.options import VLLMOptions
from cachecraft_rag.vllm.plugin import ARCHITECTURES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_STANDARD_KV = ("auto", "float16", "bfloat16", "float32", "half", "float")
# Model types without a single layer of attention.
_STATE_SPACE = ("mamba", "mamba2", "falcon_mamba")
_OTHER_MODEL = (
    "Choose another model, serve this one without reuse (`vllm serve`), or ask it without a server: docs/models.md "
    "lists the families that run in process"
)


@dataclass(frozen=True)
class Refusal:
    """Reason why chunk-caches cannot be reused, and advice."""

    reason: str
    advice: str

    def error(self, model: str) -> UnsupportedModelError:
        """Return an error with reason and advice."""
        return UnsupportedModelError(
            f"{model} cannot be served from chunk-caches: {self.reason}. {self.advice}."
        )


def refusal(config: PretrainedConfig, options: VLLMOptions) -> Refusal | None:
    """Return why a model with this Hugging Face config cannot be served from chunk-caches, or None if it may be.

    Args:
        config: config of the whole model, which contains that of its text part.
    """
    return next(_refusals(config, options), None)


def _refusals(config: PretrainedConfig, options: VLLMOptions) -> Iterator[Refusal]:
    yield from _of_model(config)
    yield from _of_positions(config.get_text_config())
    yield from _of_windows(config.get_text_config(), options)
    yield from _of_kv_caches(config, options)
    yield from _of_options(options)


def _of_model(config: PretrainedConfig) -> Iterator[Refusal]:
    text = config.get_text_config()
    if text.model_type in _STATE_SPACE:
        # no advice to ask it without a server: no engine can reuse it
        yield Refusal(
            "it is a state-space model, which has no KV cache",
            "Choose another model, or serve this one without reuse (`vllm serve`)",
        )
    if getattr(text, "kv_lora_rank", None):
        yield Refusal("its attention is latent (MLA) and does not keep keys per head", _OTHER_MODEL)
    if getattr(config, "is_encoder_decoder", False):
        yield Refusal("it is an encoder-decoder", _OTHER_MODEL)
    names = list(getattr(config, "architectures", None) or [])
    if not any(name in ARCHITECTURES for name in names):
        known = ", ".join(sorted(ARCHITECTURES))
        yield Refusal(
            f"its architecture is {', '.join(names) or 'unknown'}; known are {known}", _OTHER_MODEL
        )


def _of_positions(text: PretrainedConfig) -> Iterator[Refusal]:
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if kind == "longrope":
        yield Refusal(
            "LongRoPE changes all keys when a prompt passes the original length", _OTHER_MODEL
        )
    has_parts = kind == "mrope" or "mrope_section" in rope
    if has_parts or getattr(text, "dual_chunk_attention_config", None):
        yield Refusal("its rotary embedding has positions of several parts", _OTHER_MODEL)


def _of_windows(text: PretrainedConfig, options: VLLMOptions) -> Iterator[Refusal]:
    window = getattr(text, "sliding_window", None)
    uses_window = bool(window) and getattr(text, "use_sliding_window", True)
    if uses_window and not options.disable_sliding_window:
        yield Refusal(
            f"its attention is limited to windows of {window} tokens",
            "Add `-- --disable-sliding-window`, which limits prompt and answer to one window",
        )


def _of_kv_caches(config: PretrainedConfig, options: VLLMOptions) -> Iterator[Refusal]:
    dtype = options.kv_cache_dtype
    if dtype not in _STANDARD_KV:
        yield Refusal(f"the KV cache is quantised ({dtype})", "Leave out --kv-cache-dtype")
    scheme = getattr(config, "quantization_config", None) or {}
    if isinstance(scheme, dict) and dtype == "auto":
        quantised = scheme.get("kv_cache_scheme") or scheme.get("kv_cache_quant_algo")
        if quantised:
            yield Refusal(
                "its checkpoint asks for a quantised KV cache", "Add `-- --kv-cache-dtype bfloat16`"
            )


def _of_options(options: VLLMOptions) -> Iterator[Refusal]:
    if options.enable_lora:
        yield Refusal(
            "LoRA adapters change keys and values from request to request",
            "Leave out --enable-lora; an adapter that is merged into the weights can be served",
        )
    if options.speculates:
        yield Refusal(
            "with speculative decoding, a draft model's own KV cache would stay empty",
            "Leave out --speculative-config",
        )
    if options.prefetches_weights:
        yield Refusal(
            "offloaded weights that are fetched layer by layer follow the order of whole forwards, and our passes stop "
            "between layers, so every request could be answered with another layer's weights",
            "Leave out --offload-group-size; --cpu-offload-gb works",
        )
    if options.model_impl not in ("auto", "vllm"):
        yield Refusal(
            f"the implementation {options.model_impl!r} has other layers", "Leave out --model-impl"
        )
    if options.pipeline_parallel_size > 1:
        yield Refusal(
            "pipeline parallelism: a rank has only some of the layers",
            "Use --tensor-parallel-size instead",
        )
    if options.decode_context_parallel_size > 1 or options.prefill_context_parallel_size > 1:
        yield Refusal(
            "context parallelism: a rank has only some of the positions",
            "Use --tensor-parallel-size instead",
        )
    if options.data_parallel_size > 1 and options.enable_expert_parallel:
        yield Refusal(
            "data parallelism with expert parallelism: ranks wait for each other in every forward",
            "Leave out one of --data-parallel-size and --enable-expert-parallel",
        )
