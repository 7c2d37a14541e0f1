"""Options of vLLM that decide whether, and with which identity, chunk-caches can be reused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types.digests import digest
from cachecraft_rag.vllm.versions import is_cpu_build

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Short forms on vLLM's command line.
_SHORT = {
    "q": "quantization",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "ep": "enable_expert_parallel",
    "sc": "speculative_config",
}
# Options that change what the model computes, besides the files of its checkpoint.
_SHAPING = (
    "quantization",
    "quantization_config",
    "hf_overrides",
    "hf_config_path",
    "load_format",
    "model_weights",
    "model_class_overrides",
    "model_loader_extra_config",
    "config_format",
)
# Methods of speculative decoding that draft from token ids alone.
TOKEN_DRAFTING = ("ngram", "ngram_gpu", "suffix")
_DRAFT_MODEL = "draft_model"
# Values of `kv_cache_dtype` with one scale for a layer's keys and one for its values → the form of their numbers.
FP8_CACHES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
# Values of `load_format` that read the checkpoint's own weights.
_SAME_WEIGHTS = ("auto", "hf", "safetensors", "pt", "fastsafetensors", "runai_streamer")
# Fields of `VLLMOptions` that are no option of vLLM's with the same value.
_DERIVED = (
    "shaping",
    "max_model_len",
    "drafting",
    "prefetches_weights",
    "keeps_latents",
    "cpu_threads",
)
_NOTHING: tuple[object, ...] = (None, "", "{}", "auto", "None", False, {})


class ModelConfig(Protocol):
    """The fields of `vllm.config.ModelConfig` that this package reads."""

    model: str
    tokenizer: str
    dtype: object
    max_model_len: int
    model_impl: str
    config_format: str
    disable_sliding_window: bool
    logprobs_mode: str
    max_logprobs: int
    served_model_name: object
    hf_config: PretrainedConfig
    hf_text_config: PretrainedConfig
    supports_multimodal_inputs: bool
    enable_prompt_embeds: bool
    use_mla: bool
    mrope_num_dims: int  # positions per token of a multimodal model; 0 if it has one


class ParallelConfig(Protocol):
    """The fields of `vllm.config.ParallelConfig` that this package reads."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    enable_expert_parallel: bool


class CacheConfig(Protocol):
    """The fields of `vllm.config.CacheConfig` that this package reads."""

    block_size: int
    num_gpu_blocks: int | None
    cache_dtype: str
    enable_prefix_caching: bool


class PrefetchConfig(Protocol):
    """The field of `vllm.config.PrefetchOffloadConfig` that this package reads."""

    offload_group_size: int


class OffloadConfig(Protocol):
    """The fields of `vllm.config.OffloadConfig` that this package reads."""

    offload_backend: str
    prefetch: PrefetchConfig


class SchedulerConfig(Protocol):
    """The field of `vllm.config.SchedulerConfig` that this package reads."""

    max_num_batched_tokens: int


class CompilationConfig(Protocol):
    """The field of `vllm.config.CompilationConfig` that this package reads."""

    static_forward_context: Mapping[str, object]


class TransferConfig(Protocol):
    """The fields of `vllm.config.KVTransferConfig` that this package reads."""

    kv_connector: str | None
    kv_load_failure_policy: str
    kv_connector_extra_config: Mapping[str, Any]


class LoadConfig(Protocol):
    """The fields of `vllm.config.LoadConfig` that this package reads."""

    load_format: object
    model_loader_extra_config: object


class SpeculativeConfig(Protocol):
    """The field of `vllm.config.SpeculativeConfig` that this package reads."""

    method: str | None


class VLLMConfig(Protocol):
    """The fields of `vllm.config.VllmConfig` that this package reads."""

    model_config: ModelConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    offload_config: OffloadConfig
    scheduler_config: SchedulerConfig
    compilation_config: CompilationConfig
    load_config: LoadConfig
    speculative_config: SpeculativeConfig | None
    kv_transfer_config: TransferConfig | None


@dataclass(frozen=True)
class VLLMOptions:
    """Options of a vLLM server that matter for reuse; other fields have vLLM's own names.

    Attributes:
        drafting: method of speculative decoding; "" if it is off.
        prefetches_weights: True if weights are offloaded and fetched layer by layer during a forward pass.
        keeps_latents: True if vLLM keeps the latents of multi-head latent attention in place of keys per head. Before
            vLLM runs, this and `cpu_threads` are read from the environment.
        max_model_len: the longest context, in tokens; 0 if none is given, or not as a plain number.
        cpu_threads: most threads of one rank on a CPU; 0 on a GPU, and where vLLM runs already.
        shaping: (option, value) of each option that changes the model's results.
    """

    kv_cache_dtype: str = "auto"
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    disable_sliding_window: bool = False
    model_impl: str = "auto"
    config_format: str = "auto"
    drafting: str = ""
    prefetches_weights: bool = False
    keeps_latents: bool = True
    max_model_len: int = 0
    cpu_threads: int = 0
    shaping: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Self:
        """Read the options from vLLM's command line without importing vLLM, which takes many seconds.

        Unknown options are ignored, and so are forms such as `--no-enable-expert-parallel`. The last value of a
        repeated option counts; parts such as `--hf-overrides.a 1` are joined. Raises ConfigError for a value that is
        not a whole number where vLLM takes one, but a `max_model_len` such as "8k" is read as 0.

        >>> VLLMOptions.from_arguments(["--kv_cache_dtype=fp8", "-pp", "2"]).kv_cache_dtype
        'fp8'
        """
        values: dict[str, str | bool] = {}
        for place, argument in enumerate(arguments):
            if not argument.startswith("-"):
                continue
            name, has_value, value = argument.partition("=")
            name, _, part = name.lstrip("-").partition(".")
            name = name.replace("-", "_")
            name = _SHORT.get(name, name)
            following = arguments[place + 1 : place + 2]
            if not has_value and following and not following[0].startswith("-"):
                value = following[0]
            # `--hf-overrides.rope_theta 1e6` sets one part of a JSON object.
            values[name] = (
                f"{values.get(name, '')} {part}={value}".strip() if part else value or True
            )
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> Self:
        """Read the options from a mapping with names of vLLM's `EngineArgs`; unknown ones and None are ignored.

        Raises ConfigError for a value that is not a whole number where vLLM takes one (`max_model_len` becomes 0), and
        for a function in place of an option that changes the model's results: functions cannot be compared.
        """
        known = {
            field.name: type(field.default) for field in fields(cls) if field.name not in _DERIVED
        }
        chosen = {
            name: _as(known[name], name, values[name])
            for name in known
            if values.get(name) is not None
        }
        chosen["drafting"] = _drafting(values)
        chosen["prefetches_weights"] = _prefetches(
            str(values.get("offload_backend") or "auto"),
            _as(int, "offload_group_size", values.get("offload_group_size")),
        )
        chosen["keeps_latents"] = os.environ.get("VLLM_MLA_DISABLE", "0") in ("", "0")
        chosen["cpu_threads"] = most_cpu_threads(os.environ) if is_cpu_build() else 0
        longest = str(values.get("max_model_len"))
        chosen["max_model_len"] = int(longest) if longest.isdecimal() else 0
        shaping = [
            (name, _text(name, values[name]))
            for name in _SHAPING
            if values.get(name) not in _NOTHING
        ]
        if cache_dtype := FP8_CACHES.get(chosen.get("kv_cache_dtype", "")):
            shaping.append(("kv_cache_dtype", cache_dtype))
        chosen["shaping"] = tuple(
            pair for pair in shaping if pair[0] != "load_format" or pair[1] not in _SAME_WEIGHTS
        )
        return cls(**chosen)

    @classmethod
    def from_config(cls, config: VLLMConfig) -> Self:
        """Read the options from the `VllmConfig` of a running vLLM.

        `shaping` stays (), because the front end has put those options into the fingerprint.
        """
        parallel = config.parallel_config
        offload = config.offload_config
        return cls(
            kv_cache_dtype=str(config.cache_config.cache_dtype),
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            decode_context_parallel_size=parallel.decode_context_parallel_size,
            prefill_context_parallel_size=parallel.prefill_context_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            enable_expert_parallel=bool(parallel.enable_expert_parallel),
            disable_sliding_window=bool(config.model_config.disable_sliding_window),
            model_impl=str(config.model_config.model_impl),
            config_format=str(config.model_config.config_format),
            drafting=_method_of(config.speculative_config),
            keeps_latents=config.model_config.use_mla,
            max_model_len=int(config.model_config.max_model_len),
            prefetches_weights=_prefetches(
                offload.offload_backend, offload.prefetch.offload_group_size
            ),
        )

    @classmethod
    def of_running(cls, config: VLLMConfig) -> Self:
        """Read the options from the `VllmConfig` of a vLLM that `vllm serve` has started, those in `shaping` too.

        Raises ConfigError for a function among the latter.
        """
        sources = (config.model_config, config.load_config)
        values = {
            name: getattr(source, name)
            for name in _SHAPING
            for source in sources
            if hasattr(source, name)
        }
        values["kv_cache_dtype"] = config.cache_config.cache_dtype
        return replace(cls.from_config(config), shaping=cls.from_values(values).shaping)

    def fingerprint(self, checkpoint: str, *, own_quantization: str | None = None) -> str:
        """Return the fingerprint of a checkpoint served with these options.

        A pair of `shaping` that repeats `own_quantization` does not count. Without other pairs it is `checkpoint`
        itself. Otherwise it is the part of `checkpoint` before its first hyphen, a hyphen, and a digest of 32 hex
        digits of the remaining text and these pairs, whose order does not matter.

        Args:
            checkpoint: fingerprint of the checkpoint's files.
            own_quantization: quantisation method of the checkpoint itself; None without one.
        """
        shaping = [pair for pair in self.shaping if pair != ("quantization", own_quantization)]
        if not shaping:
            return checkpoint
        version, _, files = checkpoint.partition("-")
        return f"{version}-{digest('served', files, *(part for pair in sorted(shaping) for part in pair))}"


def most_cpu_threads(environment: Mapping[str, str], *, cpus: int | None = None) -> int:
    """Return the most threads that vLLM's CPU build may take for one rank.

    `cpus` is the number of CPUs of this process, counted if it is None. Unless VLLM_CPU_OMP_THREADS_BIND names CPUs or
    leaves it to OMP_NUM_THREADS, vLLM takes most of them.

    >>> most_cpu_threads({"OMP_NUM_THREADS": "1"}, cpus=8)
    8
    >>> most_cpu_threads({"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, cpus=8)
    1
    >>> most_cpu_threads({"VLLM_CPU_OMP_THREADS_BIND": "0-2,5|6"}, cpus=8)
    4
    """
    bound = environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    threads = environment.get("OMP_NUM_THREADS", "")
    if bound == "nobind" and threads.isdecimal():
        return int(threads)
    if bound not in ("nobind", "auto"):
        try:
            return max(sum(map(_cpus_in, rank.split(","))) for rank in bound.split("|"))
        except ValueError:  # vLLM refuses it itself
            pass
    if cpus is not None:
        return cpus
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _cpus_in(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1


def _method_of(config: SpeculativeConfig | None) -> str:
    return "" if config is None else config.method or _DRAFT_MODEL


def _drafting(values: Mapping[str, object]) -> str:
    """Return the method of speculative decoding, "" if it is off. A model without a method means `_DRAFT_MODEL`."""
    config = values.get("speculative_config")
    given = {} if config in _NOTHING else _parts(config)
    method = values.get("spec_method") or given.get("method")
    model = values.get("spec_model") or given.get("model")
    if not (given or method or model):
        return ""
    # vLLM takes the model "[ngram]" for the method
    word = str(method or model).strip("[]")
    return word if method or word in TOKEN_DRAFTING else _DRAFT_MODEL


def _parts(value: object) -> Mapping[str, object]:
    """Return the parts of an object that is given as such, as JSON, or as "name=value" words of a command line."""
    if isinstance(value, Mapping):
        return value
    try:
        parts = json.loads(str(value))
    except ValueError:
        pairs = (word.partition("=") for word in str(value).split())
        return {name: part for name, _, part in pairs}
    return parts if isinstance(parts, Mapping) else {}


def _prefetches(backend: str, group_size: int) -> bool:
    return backend == "prefetch" or (backend == "auto" and group_size > 0)


def _as(kind: type, name: str, value: Any) -> Any:
    """Convert a value that may come from a command line. Raises ConfigError."""
    if kind is int:
        try:
            return int(value or 0)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be a whole number, and is {value!r}"
            ) from error
    if kind is bool:
        return value is True or str(value).lower() in ("true", "1")
    return str(getattr(value, "value", value))


def _text(name: str, value: object) -> str:
    """Return a value as text; equal JSON gives equal text."""
    if callable(value):
        raise ConfigError(
            f"{name}: a function cannot be compared with another server's; write plain values"
        )
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    return json.dumps(value, sort_keys=True, default=str) if not isinstance(value, str) else value
