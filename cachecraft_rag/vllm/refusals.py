"""Models and options of vLLM with which chunk-caches cannot be reused, decided from the config before vLLM starts.

vLLM needs a minute to start, and ends with several tracebacks if its connector refuses a model. So all reasons that the
config shows are found here, at once. `worker.refusals` adds those that only a running vLLM knows.

To refuse more, yield a `Refusal` from the function of its kind that `_refusals` calls, with advice on what to do.
docs/reference/vllm.md lists all of them ("Refused"), and `tests/vllm/test_refusals.py` needs no vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.model.checkpoint import longrope_context, rope_parameters_of
from cachecraft_rag.vllm.options import FP8_CACHES, TOKEN_DRAFTING, VLLMOptions
from cachecraft_rag.vllm.plugin import ARCHITECTURES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("cachecraft_rag.vllm")

_STANDARD_KV = ("auto", "float16", "bfloat16", "float32", "half", "float")
_NORMED_AFTER_ROTATION = (
    "its queries and keys are normalised after their rotation, so its keys cannot be moved"
)
# Architectures that vLLM runs with layers whose keys cannot be moved, and the reason.
_REFUSED_LAYERS = {
    "GPTBigCodeForCausalLM": "learned positions are added to its tokens, so its keys cannot be moved",
    "HunYuanDenseV1ForCausalLM": _NORMED_AFTER_ROTATION,
    "HunYuanMoEV1ForCausalLM": _NORMED_AFTER_ROTATION,
}
# Words in the kinds of layers that keep one running state, in `layer_types`.
_RECURRENT = ("conv", "linear", "mamba", "recurrent")
# Model types without a single layer of attention.
_STATE_SPACE = ("mamba", "mamba2", "falcon_mamba")
# Costs of the needed arguments.
_COSTS = {
    "disable_hybrid_kv_cache_manager": "The model has sliding windows in some layers. vLLM keeps all tokens of these "
    "layers too, so they take as much of its KV cache as full attention.",
    "max_model_len": "The model has LongRoPE, so prompt and answer are limited to its original context.",
}
_LATENT = "its attention is latent (MLA), and vLLM keeps no keys per head"
_KEYS_PER_HEAD = (
    "Set VLLM_MLA_DISABLE=1 in the server's environment: vLLM then keeps keys per head, which take several times as "
    "much of its KV cache"
)
_ALWAYS_PER_HEAD = frozenset({"MiniCPM3ForCausalLM"})
# architecture of Mistral's multimodal checkpoints in their own format
_MISTRAL_FORMAT = "PixtralForConditionalGeneration"
_AS_PUBLISHED = "Add `-- --config-format hf --load-format hf --tokenizer-mode hf`"
_OTHER_MODEL = (
    "Choose another model, serve this one without reuse (`vllm serve`), or ask it without a server: docs/models.md "
    "lists the families that run in process"
)


@dataclass(frozen=True)
class Refusal:
    """Reason why chunk-caches cannot be reused, a clause, and advice, a sentence; both without full stop."""

    reason: str
    advice: str

    def error(self, model: str) -> UnsupportedModelError:
        """Return an UnsupportedModelError with the model's name, the reason and the advice, for the caller to raise."""
        return UnsupportedModelError(
            f"{model} cannot be served from chunk-caches: {self.reason}. {self.advice}."
        )


_WITH_SINKS = frozenset({"GptOssForCausalLM"})
SINKS_IN_SEVERAL_THREADS = Refusal(
    "with attention sinks and sliding windows, vLLM's attention on a CPU computes wrong answers in more than one "
    "thread, and it is not limited to one",
    "Set OMP_NUM_THREADS=1 and VLLM_CPU_OMP_THREADS_BIND=nobind in the server's environment",
)
_IN_MISTRALS_FORMAT = Refusal(
    "vLLM reads it in Mistral's own format, which names other layers", _AS_PUBLISHED
)


def format_refusal(config: PretrainedConfig, options: VLLMOptions, folder: Path) -> Refusal | None:
    """Return the refusal of a multimodal checkpoint whose `folder` vLLM would read in Mistral's own format, or None."""
    is_multimodal = config.get_text_config() is not config
    has_both = (folder / "params.json").exists() and any(folder.glob("consolidated*.safetensors"))
    is_read_so = options.config_format == "mistral" or (
        options.config_format == "auto" and has_both
    )
    return _IN_MISTRALS_FORMAT if is_multimodal and is_read_so else None


def refusal(config: PretrainedConfig, options: VLLMOptions) -> Refusal | None:
    """Return the first reason why a model with this config cannot be served from chunk-caches; None if it may be.

    None is no promise: `worker.refusals` and the self-check know more. Raises KeyError for a config with LongRoPE that
    lacks the original length.
    """
    return next(_refusals(config, options), None)


def needed_arguments(text: PretrainedConfig) -> dict[str, object]:
    """Return the arguments of vLLM that a model with this text config needs for reuse, by name; {} for most models.

    A model with windows in some layers needs `disable_hybrid_kv_cache_manager` True. Without it vLLM drops tokens
    outside the windows, and keeps these layers in separate blocks; chunk-caches are written into one set for all. A
    model with LongRoPE needs a `max_model_len` of its original context, in tokens, unless its context is no longer than
    that. vLLM takes the frequencies for long contexts if its own context is longer.
    """
    arguments: dict[str, object] = {}
    if has_windows_in_some_layers(text):
        arguments["disable_hybrid_kv_cache_manager"] = True
    original = longrope_context(text)
    if original is not None and text.max_position_embeddings > original:
        arguments["max_model_len"] = original
    return arguments


def missing_arguments(
    model: str, needed: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, object]:
    """Return the needed arguments that have no value in `given`, with their values, and log what each costs `model`.

    A value in `given` that differs from the needed one is not noticed; None there counts as no value.
    """
    missing = {name: value for name, value in needed.items() if given.get(name) is None}
    for name, value in missing.items():
        logger.info("%s: %s=%s is set. %s", model, name, value, _COSTS[name])
    return missing


def _refusals(config: PretrainedConfig, options: VLLMOptions) -> Iterator[Refusal]:
    yield from _of_model(config, options)
    yield from _of_positions(config, options)
    yield from _of_windows(config.get_text_config(), options)
    yield from _of_sinks(config, options)
    yield from _of_kv_caches(config, options)
    yield from _of_options(options)


def _of_model(config: PretrainedConfig, options: VLLMOptions) -> Iterator[Refusal]:
    text = config.get_text_config()
    if text.model_type in _STATE_SPACE:
        # no advice to ask it without a server: no engine can reuse it
        yield Refusal(
            "it is a state-space model, which has no KV cache",
            "Choose another model, or serve this one without reuse (`vllm serve`)",
        )
    names = list(getattr(config, "architectures", None) or [])
    if getattr(text, "kv_lora_rank", None) and not _keeps_keys(names, options):
        is_known = any(name in ARCHITECTURES for name in names)
        yield Refusal(_LATENT, _KEYS_PER_HEAD if is_known else _OTHER_MODEL)
    if getattr(config, "is_encoder_decoder", False):
        yield Refusal("it is an encoder-decoder", _OTHER_MODEL)
    kinds = set(getattr(text, "layer_types", None) or ())
    if any(word in kind for kind in kinds for word in _RECURRENT):
        yield Refusal(
            "some of its layers keep one running state instead of keys for every token",
            _OTHER_MODEL,
        )
    for name in names:
        if name in _REFUSED_LAYERS:
            yield Refusal(_REFUSED_LAYERS[name], _OTHER_MODEL)
    if _MISTRAL_FORMAT in names:
        yield _IN_MISTRALS_FORMAT
    if not any(name in ARCHITECTURES for name in names):
        known = ", ".join(sorted(ARCHITECTURES))
        yield Refusal(
            f"its architecture is {', '.join(names) or 'unknown'}; known are {known}", _OTHER_MODEL
        )


def _keeps_keys(names: Iterable[str], options: VLLMOptions) -> bool:
    """Return True if vLLM keeps keys per head for latent attention, as it always does for MiniCPM3."""
    if not options.keeps_latents:
        return any(name in ARCHITECTURES for name in names)
    return _ALWAYS_PER_HEAD.issuperset(names)


def _of_positions(config: PretrainedConfig, options: VLLMOptions) -> Iterator[Refusal]:
    text = config.get_text_config()
    original = longrope_context(text)
    if original is not None and options.max_model_len > original:
        yield Refusal(
            f"LongRoPE has other frequencies for contexts longer than {original} tokens",
            f"Use --max-model-len {original} or less",
        )
    # of a text, a multimodal model's positions are equal in all parts, and it rotates as with one
    has_parts = text is config and any(
        rope.get("rope_type") == "mrope" or "mrope_section" in rope
        for rope in rope_parameters_of(text)
    )
    if has_parts or getattr(text, "dual_chunk_attention_config", None):
        yield Refusal("its rotary embedding has positions of several parts", _OTHER_MODEL)


def has_windows_in_some_layers(text: PretrainedConfig) -> bool:
    """Return True if some layers have a sliding window and all others full attention, and vLLM runs them so.

    For a config with `max_window_layers` (Qwen 2) it does not. Returns False without `layer_types`.
    """
    kinds = set(getattr(text, "layer_types", None) or ())
    # vLLM ends with an error if Qwen 2 has a window in the layers after this number only
    is_qwen = hasattr(text, "max_window_layers")
    return kinds == {"full_attention", "sliding_attention"} and not is_qwen


def window_of(text: PretrainedConfig) -> int:
    """Return the tokens of a served model's sliding windows; 0 unless some layers have them, and others none."""
    return int(text.sliding_window or 0) if has_windows_in_some_layers(text) else 0


def _of_windows(text: PretrainedConfig, options: VLLMOptions) -> Iterator[Refusal]:
    window = getattr(text, "sliding_window", None)
    uses_window = bool(window) and getattr(text, "use_sliding_window", True)
    if has_windows_in_some_layers(text):
        return
    if uses_window and not options.disable_sliding_window:
        yield Refusal(
            f"its attention is limited to windows of {window} tokens",
            "Add `-- --disable-sliding-window`, which limits prompt and answer to one window",
        )


def _of_sinks(config: PretrainedConfig, options: VLLMOptions) -> Iterator[Refusal]:
    has_sinks = not _WITH_SINKS.isdisjoint(getattr(config, "architectures", None) or ())
    has_windows = has_windows_in_some_layers(config.get_text_config())
    if has_sinks and has_windows and options.cpu_threads > 1:
        yield SINKS_IN_SEVERAL_THREADS


def _of_kv_caches(config: PretrainedConfig, options: VLLMOptions) -> Iterator[Refusal]:
    dtype = options.kv_cache_dtype
    if dtype not in (*_STANDARD_KV, *FP8_CACHES):
        yield Refusal(
            f"the KV cache is quantised in a form that cannot be filled ({dtype})",
            "Use `-- --kv-cache-dtype fp8`, or leave it out",
        )
    scheme = getattr(config, "quantization_config", None) or {}
    if isinstance(scheme, dict) and dtype == "auto":
        quantised = scheme.get("kv_cache_scheme") or scheme.get("kv_cache_quant_algo")
        if quantised:
            yield Refusal(
                "its checkpoint asks for a quantised KV cache, and the option does not say which",
                "Add `-- --kv-cache-dtype fp8`, or bfloat16",
            )


def _of_options(options: VLLMOptions) -> Iterator[Refusal]:
    if options.drafting and options.drafting not in TOKEN_DRAFTING:
        yield Refusal(
            f"its drafts ({options.drafting}) are not made from tokens alone: reused tokens have neither the KV cache "
            "of a drafting model nor hidden states",
            'Draft from tokens, `-- --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'`, or '
            "leave it out",
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
