"""Check from vLLM's sources that a version still has every name that this package uses of it.

The imports are read from this package's own sources, so none can be forgotten. Attributes, signatures and statements
are listed in `USES`. A wheel is read as it is (`pip download vllm==0.33.0 --no-deps`): nothing is installed or
imported, so a CUDA wheel can be checked on any machine in seconds.
"""

from __future__ import annotations

import ast
import csv
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated

import typer

import cachecraft_rag
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.vllm.plugin import ARCHITECTURES

TABLE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "vllm_contract.csv"
_PACKAGE = Path(cachecraft_rag.__file__).parent
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
_CHAT = "vllm.entrypoints.openai.chat_completion"


@dataclass(frozen=True)
class Use:
    """Our use of one thing in vLLM.

    Attributes:
        module: vLLM's module.
        name: a name in the module, such as `Request` or `AsyncLLM.generate`; "" for the module itself.
        attributes: names that a class must have, inherited ones included.
        parameters: names that a function's first parameters must have, in this order.
        keywords: names that a function must take, at any place.
        text: statements that the module's source must hold, where a name alone does not show the behaviour.
    """

    module: str
    name: str = ""
    attributes: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    text: tuple[str, ...] = ()


def _models() -> Iterator[Use]:
    """Uses of the model classes that ours extend. How their layers are called is found by a survey at start-up."""
    for place in dict.fromkeys(ARCHITECTURES.values()):
        family, _, name = place.partition(":")
        module = f"vllm.model_executor.models.{family}"
        yield Use(module, f"{name}.__init__", keywords=("vllm_config", "prefix"))
        yield Use(module, f"{name}.embed_input_ids", parameters=("self", "input_ids"))
        yield Use(
            module,
            f"{name}.forward",
            parameters=("self", "input_ids", "positions", "intermediate_tensors"),
        )
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        module = f"vllm.model_executor.models.{family}"
        layer = f"{family.capitalize()}DecoderLayer"
        yield Use(
            module,
            f"{layer}.forward",
            parameters=("self", "positions", "hidden_states", "residual"),
        )
        if family != "mistral":  # its attention is Llama's
            calls = ("q, k = self.rotary_emb(positions, q, k)", "attn_output = self.attn(q, k, v)")
            yield Use(module, text=calls)


def _attention_backends() -> Iterator[Use]:
    """Uses of the attention backends whose blocks are written."""
    parameters = ("self", "layer", "key", "value", "kv_cache", "slot_mapping")
    for module, name in (
        ("cpu_attn", "CPUAttentionBackendImpl"),
        ("flash_attn", "FlashAttentionImpl"),
        ("flashinfer", "FlashInferImpl"),
        ("triton_attn", "TritonAttentionImpl"),
    ):
        where = f"vllm.v1.attention.backends.{module}"
        yield Use(where, f"{name}.do_kv_cache_update", parameters=parameters)
        yield Use(where, name, attributes=("scale", "logits_soft_cap", "alibi_slopes"))


USES: tuple[Use, ...] = (
    *_models(),
    *_attention_backends(),
    Use(
        "vllm.model_executor.layers.attention.attention",
        "Attention",
        attributes=(
            "num_heads",
            "num_kv_heads",
            "head_size",
            "layer_name",
            "sliding_window",
            "impl",
            "kv_cache",
            "kv_sharing_target_layer_name",
        ),
        text=(
            "static_forward_context[prefix] = self",
            # A pass is the forward of each attention; without slots, vLLM's blocks are not written.
            "self.impl.forward(",
            "output=output,",
            "query, _ = self.query_quant(query, self._q_scale)",
            "layer_slot_mapping = slot_mapping.get(layer_name)",
            "if layer_slot_mapping is not None:",
        ),
    ),
    # Without metadata, vLLM does not tell the connector of each layer.
    Use(
        "vllm.model_executor.layers.attention.kv_transfer_utils",
        text=("if attn_metadata is None or not connector.has_connector_metadata():",),
    ),
    Use("vllm.model_executor.layers.rotary_embedding", text=("_ROPE_DICT",)),
    Use(
        "vllm.model_executor.layers.rotary_embedding.base",
        text=('register_buffer("cos_sin_cache", cache', "self.is_neox_style = "),
    ),
    Use(
        "vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope",
        "Phi3LongRoPEScaledRotaryEmbedding",
        attributes=("use_long_rope",),
        text=('register_buffer(\n            "long_short_cos_sin_cache", long_short_cache',),
    ),
    Use(
        "vllm.forward_context",
        "set_forward_context",
        parameters=("attn_metadata", "vllm_config"),
        keywords=("slot_mapping",),
    ),
    # Multimodal models: the text part, and what images add to the layers of a running step.
    Use("vllm.model_executor.models.interfaces", "SupportsMultiModal.get_language_model"),
    Use(
        "vllm.model_executor.models.qwen3_vl",
        text=(
            "self.deepstack_input_embeds = [",
            "self.deepstack_input_embeds_num_tokens = 0",
            "self.deepstack_input_embeds[idx]",
        ),
    ),
    # Models that vLLM runs with the layers of transformers.
    Use(
        "vllm.model_executor.models.transformers",
        text=(
            "self_attn = getattr(module, VLLM_ATTN_ATTR)",
            "attn_output = self_attn.forward(query, key, value)",
        ),
    ),
    Use(
        "vllm.model_executor.models.transformers.base",
        text=(
            'VLLM_ATTN_ATTR = "attn"',
            "self.model: PreTrainedModel = ",
            "return self.model.get_input_embeddings()(input_ids)",
        ),
    ),
    Use("vllm.engine.arg_utils", "EngineArgs", attributes=("disable_hybrid_kv_cache_manager",)),
    # The connector: what vLLM calls, and with which parameters.
    Use(f"{_CONNECTOR}.factory", "KVConnectorFactory", attributes=("_registry",)),
    Use(
        f"{_CONNECTOR}.factory",
        "KVConnectorFactory.register_connector",
        parameters=("cls", "name", "module_path", "class_name"),
    ),
    Use(
        f"{_CONNECTOR}.v1.base",
        "KVConnectorBase_V1.__init__",
        parameters=("self", "vllm_config", "role", "kv_cache_config"),
    ),
    *(
        Use(
            f"{_CONNECTOR}.v1.base",
            f"KVConnectorBase_V1.{method}",
            parameters=("self", *parameters),
        )
        for method, parameters in {
            "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
            "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
            "build_connector_meta": ("scheduler_output",),
            "update_connector_output": ("connector_output",),
            "request_finished": ("request", "block_ids"),
            "start_load_kv": ("forward_context",),
            "wait_for_layer_load": ("layer_name",),
            "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
            "wait_for_save": (),
            "get_finished": ("finished_req_ids",),
            "get_block_ids_with_load_errors": (),
            "build_connector_worker_meta": (),
            "get_kv_connector_stats": (),
            "requires_kv_delivery": (),
            "shutdown": (),
            "_get_connector_metadata": (),
        }.items()
    ),
    Use(
        f"{_CONNECTOR}.v1.base",
        "SupportsHMA.request_finished_all_groups",
        parameters=("self", "request", "block_ids"),
    ),
    Use(
        f"{_CONNECTOR}.v1.base",
        "KVConnectorBase_V1.build_kv_connector_stats",
        parameters=("cls", "data"),
    ),
    Use(
        f"{_CONNECTOR}.v1.base",
        "KVConnectorBase_V1.on_new_request",
        parameters=("self", "request"),
    ),
    Use(f"{_CONNECTOR}.v1.base", "KVConnectorRole", attributes=("SCHEDULER", "WORKER")),
    Use(
        f"{_CONNECTOR}.v1.base", "KVConnectorWorkerMetadata.aggregate", parameters=("self", "other")
    ),
    Use(
        f"{_CONNECTOR}.v1.metrics",
        "KVConnectorStats",
        attributes=("data", "to_dict", "reset", "aggregate", "reduce", "is_empty"),
    ),
    Use(
        f"{_CONNECTOR}.v1.metrics",
        "KVConnectorPromMetrics.observe",
        parameters=("self", "transfer_stats_data", "engine_idx"),
    ),
    # Other connectors, after ours.
    Use(
        f"{_CONNECTOR}.v1.multi_connector",
        "MultiConnector",
        text=(
            "temp_config.kv_transfer_config = KVTransferConfig(",
            "if to_return[0] == 0 and toks > 0:",
            "c.update_state_after_alloc(request, blocks, 0)",
            "connector_id = c.__class__.__name__",
        ),
    ),
    # What the scheduler hands over.
    Use("vllm.v1.core.kv_cache_manager", "KVCacheBlocks.get_block_ids", parameters=("self",)),
    Use(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        attributes=("finished_req_ids", "num_scheduled_tokens", "total_num_scheduled_tokens"),
    ),
    Use(
        "vllm.v1.core.sched.scheduler",
        text=(
            "WAITING_FOR_REMOTE_KVS",
            "if ext_tokens is None:",
            "self.connector.on_new_request(request)",
            "num_external_cached_tokens=num_external_computed_tokens",
        ),
    ),
    Use(
        "vllm.v1.outputs",
        "KVConnectorOutput",
        attributes=("kv_connector_worker_meta", "finished_recving"),
    ),
    Use(
        "vllm.v1.request",
        "Request",
        attributes=(
            "request_id",
            "kv_transfer_params",
            "num_prompt_tokens",
            "prompt_token_ids",
            "prompt_embeds",
            "mm_features",
            "lora_request",
            "cache_salt",
            "skip_reading_prefix_cache",
            "sampling_params",
            "prefill_stats",
            "block_hashes",
            "update_block_hashes",
        ),
    ),
    # the hashes of blocks, which are divided at the first chunk
    Use(
        "vllm.v1.core.kv_cache_utils",
        text=(
            "start_token_idx = len(request.block_hashes) * hash_block_size",
            "request.block_hashes[-1] if request.block_hashes else None",
            "if (start_token_idx == 0 and request.cache_salt)",
        ),
    ),
    Use("vllm.v1.kv_cache_interface", "KVCacheConfig", attributes=("kv_cache_groups",)),
    Use("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", attributes=("kv_cache_spec",)),
    Use("vllm.v1.kv_cache_interface", "FullAttentionSpec", attributes=("block_size",)),
    # Configuration.
    Use(
        "vllm.config",
        "KVTransferConfig",
        attributes=(
            "kv_connector",
            "kv_role",
            "kv_connector_extra_config",
            "kv_load_failure_policy",
        ),
    ),
    Use(
        "vllm.config",
        "VllmConfig",
        attributes=(
            "model_config",
            "parallel_config",
            "cache_config",
            "scheduler_config",
            "speculative_config",
            "compilation_config",
            "kv_transfer_config",
            "load_config",
            "offload_config",
        ),
    ),
    Use(
        "vllm.config",
        "ModelConfig",
        attributes=(
            "model",
            "served_model_name",
            "tokenizer",
            "dtype",
            "hf_config",
            "hf_text_config",
            "max_model_len",
            "quantization",
            "hf_overrides",
            "use_mla",
            "is_encoder_decoder",
            "disable_sliding_window",
            "logprobs_mode",
            "max_logprobs",
            "model_impl",
            "config_format",
            "supports_multimodal_inputs",
            "enable_prompt_embeds",
            "mrope_num_dims",
        ),
    ),
    Use("vllm.config.load", "LoadConfig", attributes=("load_format", "model_loader_extra_config")),
    Use(
        "vllm.config",
        "ParallelConfig",
        attributes=(
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "data_parallel_size",
            "enable_expert_parallel",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
    ),
    Use("vllm.config", "SpeculativeConfig", attributes=("method",)),
    # LoRA: the adapters of a step are set before the connector is called, and again for each step.
    Use(
        "vllm.lora.model_manager",
        "LoRAModelManager.set_adapter_mapping",
        parameters=("self", "mapping"),
    ),
    Use(
        "vllm.lora.model_manager",
        "LoRAModelManager.get_adapter",
        parameters=("self", "adapter_id"),
    ),
    Use(
        "vllm.lora.model_manager",
        text=(
            "self.model.lora_manager = self",
            "self._last_mapping: LoRAMapping | None = None",
            "self.lora_index_to_id: list[int | None] = ",
        ),
    ),
    Use("vllm.lora.request", "LoRARequest", attributes=("lora_int_id", "lora_path")),
    Use(
        "vllm.lora.layers.utils",
        "LoRAMapping",
        attributes=("index_mapping", "prompt_mapping", "is_prefill"),
    ),
    Use(
        "vllm.config",
        "CacheConfig",
        attributes=("cache_dtype", "enable_prefix_caching", "block_size", "num_gpu_blocks"),
    ),
    Use("vllm.config", "SchedulerConfig", attributes=("max_num_batched_tokens",)),
    Use("vllm.config", "CompilationConfig", attributes=("static_forward_context",)),
    Use("vllm.config.offload", "OffloadConfig", attributes=("offload_backend", "prefetch")),
    Use("vllm.config.offload", "PrefetchOffloadConfig", attributes=("offload_group_size",)),
    # Memory: what is allocated with the model is not given to the KV cache, and the connector is made after both.
    Use(
        "vllm.platforms.interface",
        "Platform",
        attributes=("is_cuda_alike", "get_device_total_memory"),
    ),
    Use(
        "vllm.v1.worker.gpu_worker",
        text=(
            "- profile_result.non_kv_cache_memory",
            "ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)",
        ),
    ),
    Use("vllm.utils.mem_utils", text=("result.total_consumed + result.transient_peak_headroom",)),
    # The front end.
    Use(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.generate",
        parameters=("self", "prompt", "sampling_params", "request_id"),
    ),
    Use(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.from_engine_args",
        keywords=("engine_args", "stat_loggers"),
    ),
    Use(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        attributes=("vllm_config", "model_config", "logger_manager", "shutdown"),
    ),
    Use("vllm.v1.metrics.loggers", "StatLoggerManager", attributes=("stat_loggers",)),
    Use(
        "vllm.v1.metrics.loggers", "StatLoggerBase", attributes=("record", "log_engine_initialized")
    ),
    Use(
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        attributes=(
            "num_waiting_reqs",
            "num_skipped_waiting_reqs",
            "connector_prefix_cache_stats",
            "kv_connector_stats",
        ),
    ),
    Use(
        "vllm.v1.metrics.stats",
        "PrefixCacheStats",
        attributes=("requests", "queries", "hits", "hits_by_source"),
    ),
    Use(
        "vllm.v1.metrics.stats",
        "PrefillStats.set",
        parameters=(
            "self",
            "num_prompt_tokens",
            "num_local_cached_tokens",
            "num_external_cached_tokens",
        ),
    ),
    Use("vllm.v1.metrics.stats", "PrefillStats", attributes=("num_local_cached_tokens",)),
    Use(
        "vllm.engine.arg_utils",
        "AsyncEngineArgs",
        attributes=(
            "model",
            "dtype",
            "max_model_len",
            "enable_prefix_caching",
            "kv_transfer_config",
            "disable_log_stats",
            "max_num_queued_reqs",
            "tensor_parallel_size",
            "kv_cache_dtype",
            "speculative_config",
            "spec_method",
            "spec_model",
            "quantization",
            "quantization_config",
            "hf_overrides",
            "hf_config_path",
            "load_format",
            "model_weights",
            "model_class_overrides",
            "model_loader_extra_config",
            "config_format",
            "model_impl",
            "disable_sliding_window",
            "offload_backend",
            "offload_group_size",
            "prefill_context_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "enable_expert_parallel",
        ),
    ),
    Use(
        "vllm",
        "SamplingParams",
        attributes=(
            "max_tokens",
            "temperature",
            "top_p",
            "seed",
            "logprobs",
            "prompt_logprobs",
            "skip_reading_prefix_cache",
            "detokenize",
            "stop_token_ids",
            "output_kind",
            "structured_outputs",
            "extra_args",
            "n",
        ),
    ),
    # An audit sets it to False: otherwise the scheduler would ignore the tokens that the connector fills.
    Use("vllm.sampling_params", text=("if self.skip_reading_prefix_cache is None:",)),
    # Predictions of an audit's prompt begin where vLLM computes, and stand at their places in the prompt.
    Use(
        "vllm.v1.worker.gpu_model_runner",
        text=("start_idx = request.num_computed_tokens", "chunk_slice = slice(start_idx, "),
    ),
    Use("vllm.sampling_params", "RequestOutputKind", attributes=("DELTA",)),
    Use("vllm.sampling_params", "StructuredOutputsParams", attributes=("json",)),
    Use(
        "vllm",
        "RequestOutput",
        attributes=(
            "outputs",
            "finished",
            "kv_transfer_params",
            "num_cached_tokens",
            "metrics",
            "prompt_logprobs",
        ),
    ),
    Use(
        "vllm",
        "CompletionOutput",
        attributes=("token_ids", "logprobs", "finish_reason", "stop_reason"),
    ),
    # The API server.
    Use("vllm.entrypoints.openai.api_server", "run_server", parameters=("args",)),
    Use(
        "vllm.plugins",
        "load_endpoint_plugins",
        text=("vllm.general_plugins", "vllm.endpoint_plugins"),
    ),
    Use(
        "vllm.plugins.endpoint_plugins.interface",
        "EndpointPlugin",
        attributes=("name", "required_tasks"),
    ),
    Use(
        "vllm.plugins.endpoint_plugins.interface",
        "EndpointPlugin.attach_router",
        parameters=("self", "app"),
    ),
    Use(
        "vllm.plugins.endpoint_plugins.interface",
        "EndpointPlugin.init_state",
        parameters=("self", "engine_client", "state", "args"),
    ),
    *(
        Use(
            f"vllm.entrypoints.openai.{part}.api_router",
            name,
            parameters=("request", "raw_request"),
        )
        for part, name in (
            ("chat_completion", "create_chat_completion"),
            ("completion", "create_completion"),
            ("responses", "create_responses"),
        )
    ),
    Use(f"{_CHAT}.api_router", "ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL"),
    Use(
        f"{_CHAT}.protocol",
        "ChatCompletionRequest",
        attributes=(
            "documents",
            "kv_transfer_params",
            "cache_salt",
            "n",
            "echo",
            "tools",
            "tool_choice",
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "prompt_logprobs",
            "use_beam_search",
            "truncate_prompt_tokens",
            "chat_template",
            "chat_template_kwargs",
            "continue_final_message",
            "add_generation_prompt",
            "return_token_offsets",
            "return_prompt_text",
        ),
    ),
    Use(
        f"{_CHAT}.serving",
        "OpenAIServingChat",
        attributes=(
            "engine_client",
            "enable_prompt_tokens_details",
            "exclude_tools_when_tool_choice_none",
        ),
        text=("self.engine_client.generate(", "num_cached_tokens"),
    ),
    Use(
        f"{_CHAT}.serving",
        "OpenAIServingChat.create_chat_completion",
        parameters=("self", "request", "raw_request"),
    ),
    Use(
        "vllm.entrypoints.openai.completion.serving",
        "OpenAIServingCompletion.create_completion",
        parameters=("self", "request", "raw_request"),
    ),
    Use(
        "vllm.entrypoints.openai.responses.protocol",
        "ResponsesRequest",
        attributes=("instructions", "input", "cache_salt"),
    ),
    Use(
        "vllm.entrypoints.openai.responses.serving",
        "OpenAIServingResponses",
        attributes=("engine_client", "enable_prompt_tokens_details"),
        text=("self.engine_client.generate(", 'sub_request_id = f"{request_id}_{sub_request}"'),
    ),
    Use(
        "vllm.entrypoints.openai.responses.serving",
        "OpenAIServingResponses.create_responses",
        parameters=("self", "request", "raw_request"),
    ),
    Use(
        "vllm.renderers.base",
        text=(
            'engine_input["prompt"] = prompt_text',
            'engine_input["prompt_token_offsets"] = offsets',
        ),
    ),
    Use(
        "vllm.renderers.online_renderer",
        "OnlineRenderer.render_chat",
        parameters=("self", "request"),
        text=('ids = kv.pop("prompt_token_ids", None)', "reuse_ids, cache_salt=request.cache_salt"),
    ),
    Use("vllm.renderers.chat_utils", "load_chat_template", parameters=("chat_template",)),
    Use(
        "vllm.distributed.parallel_state",
        "GroupCoordinator",
        attributes=("rank_in_group", "world_size", "ranks"),
    ),
    Use(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.all_reduce",
        parameters=("self", "input_"),
    ),
    Use(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.all_gather",
        parameters=("self", "input_", "dim"),
    ),
    Use(
        "vllm.envs",
        text=('"VLLM_LOG_STATS_INTERVAL"', '"VLLM_PLUGINS"', '"VLLM_WORKER_MULTIPROC_METHOD"'),
    ),
)


class Sources:
    """Python sources of one version of vLLM: a wheel, or a folder that holds the package."""

    def __init__(self, path: Path) -> None:
        """Open them. Raises ConfigError if the path holds no vLLM."""
        self._path = path
        if path.is_dir():
            self._wheel = None
        elif zipfile.is_zipfile(path):
            self._wheel = zipfile.ZipFile(path)
        else:
            raise ConfigError(
                f"{path} is neither a wheel nor a folder; get one: pip download vllm==0.33.0 --no-deps"
            )
        if not self.has("vllm"):
            raise ConfigError(f"{path} holds no package vllm")

    @cached_property
    def version(self) -> str:
        """vLLM's own version."""
        declared = re.search(
            r"^__version__ = version = '([^']+)'",
            self._read("vllm/_version.py") or "",
            re.MULTILINE,
        )
        if declared is None:
            raise ConfigError(f"{self._path} does not say its version in vllm/_version.py")
        return declared[1]

    def has(self, module: str) -> bool:
        """Return whether there is such a module."""
        return self.text(module) is not None

    @lru_cache(None)  # noqa: B019  # as long-lived as the check
    def text(self, module: str) -> str | None:
        """Source of a module; None if it is missing."""
        folder = module.replace(".", "/")
        source = self._read(f"{folder}.py")
        return self._read(f"{folder}/__init__.py") if source is None else source

    @lru_cache(None)  # noqa: B019
    def tree(self, module: str) -> ast.Module:
        """Syntax tree of a module that exists."""
        return ast.parse(self.text(module) or "")

    def is_package(self, module: str) -> bool:
        """Return whether a module is a folder."""
        return self._read(f"{module.replace('.', '/')}/__init__.py") is not None

    def _read(self, name: str) -> str | None:
        try:
            if self._wheel is not None:
                return self._wheel.read(name).decode()
            return (self._path / name).read_text(encoding="utf-8")
        except (KeyError, OSError):
            return None


@dataclass(frozen=True)
class Definition:
    """Place where a name is defined: the module, and the statement (None: it is a module itself)."""

    module: str
    node: ast.AST | None


def define(sources: Sources, module: str, name: str) -> Definition | None:
    """Find the definition of a name of a module, through imports; None if the module lacks the name."""
    if not sources.has(module):
        return None
    for statement in _statements(sources.tree(module).body):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if statement.name == name:
                return Definition(module, statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return Definition(module, statement)
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return _imported(sources, module, statement, alias.name)
    # vllm/__init__.py
    lazy = re.search(rf'"{re.escape(name)}": "([\w.]+):(\w+)"', sources.text(module) or "")
    if lazy is not None:
        return define(sources, f"{module}{lazy[1]}", lazy[2])
    return Definition(f"{module}.{name}", None) if sources.has(f"{module}.{name}") else None


def _imported(
    sources: Sources, module: str, statement: ast.ImportFrom, name: str
) -> Definition | None:
    origin = statement.module or ""
    if statement.level:
        parts = module.split(".") if sources.is_package(module) else module.split(".")[:-1]
        parts = parts[: len(parts) - statement.level + 1]
        origin = ".".join([*parts, *filter(None, [origin])])
    if not origin.startswith("vllm"):
        return Definition(origin, statement)
    return define(sources, origin, name)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at the top level, those below `if`, `try` and `with` included."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            parts = [
                statement.body,
                getattr(statement, "orelse", []),
                getattr(statement, "finalbody", []),
            ]
            parts += [handler.body for handler in getattr(statement, "handlers", [])]
            for part in parts:
                yield from _statements(part)
        else:
            yield statement


def members(sources: Sources, definition: Definition) -> dict[str, ast.AST]:
    """Methods and attributes of a class, its bases' included; attributes may be set in any method."""
    node = definition.node
    if not isinstance(node, ast.ClassDef):
        return {}
    names: dict[str, ast.AST] = {}
    for base in node.bases:
        if isinstance(base, ast.Subscript):
            base = base.value
        if (
            isinstance(base, ast.Name)
            and (parent := define(sources, definition.module, base.id)) is not None
        ):
            names |= members(sources, parent)
    for inner in ast.walk(node):
        if not isinstance(inner, ast.Attribute) or not isinstance(inner.ctx, ast.Store):
            continue
        if isinstance(inner.value, ast.Name) and inner.value.id == "self":
            names[inner.attr] = inner
    for statement in _statements(node.body):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            names |= {
                target.id: statement for target in statement.targets if isinstance(target, ast.Name)
            }
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names[statement.target.id] = statement
    return names


def problems(sources: Sources, use: Use) -> Iterator[tuple[str, str]]:
    """Check one use; yields each part of it with what is wrong ("" if nothing is)."""
    text = sources.text(use.module)
    if text is None:
        yield use.name, "the module is missing"
        return
    for statement in use.text:
        yield f"text: {statement}", "" if statement in text else "the source no longer says this"
    if not use.name:
        return
    first, _, method = use.name.partition(".")
    definition = define(sources, use.module, first)
    if definition is None:
        yield use.name, "the name is missing"
        return
    own = members(sources, definition)
    node = own.get(method) if method else definition.node
    yield use.name, "the name is missing" if method and node is None else ""
    for name in use.attributes:
        yield f"{use.name}.{name}", "" if name in own else "the attribute is missing"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        taken = node.args
        places = [argument.arg for argument in [*taken.posonlyargs, *taken.args]]
        given = {*places, *(argument.arg for argument in taken.kwonlyargs)}
        if use.parameters:
            expected = ", ".join(use.parameters)
            fits = places[: len(use.parameters)] == list(use.parameters)
            yield f"{use.name}({expected})", "" if fits else f"it takes ({', '.join(places)})"
        for name in use.keywords:
            yield (
                f"{use.name}({name}=)",
                "" if name in given else f"it takes ({', '.join(sorted(given))})",
            )
    elif use.parameters or use.keywords:
        yield f"{use.name}()", "it is not a function"


@dataclass(frozen=True)
class Import:
    """An import from vLLM in this package; `name` is "" for `import module`."""

    module: str
    name: str


def our_imports(package: Path = _PACKAGE) -> list[list[Import]]:
    """Imports from vLLM in this package's sources; each list is one set of alternatives, of which one must exist.

    `try: from a import b; except ImportError: from c import b` gives two alternatives for `b`.
    """
    groups: dict[tuple[str, str], list[Import]] = {}
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        guarded = {
            id(inner): node
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            for module, name in _from_vllm(node):
                attempt = guarded.get(id(node))
                where = f"{path}:{attempt.lineno}" if attempt is not None else module
                key = (where, name)
                if Import(module, name) not in groups.setdefault(key, []):
                    groups[key].append(Import(module, name))
    return list(groups.values())


def _from_vllm(node: ast.AST) -> Iterator[tuple[str, str]]:
    if (
        isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] == "vllm"
        and not node.level
    ):
        yield from ((str(node.module), alias.name) for alias in node.names)
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")


def import_problem(sources: Sources, alternatives: Sequence[Import]) -> str:
    """Return why none of these can be imported, or "" if one can."""
    for choice in alternatives:
        if sources.has(choice.module) and (
            not choice.name or define(sources, choice.module, choice.name)
        ):
            return ""
    return "it cannot be imported"


Row = tuple[str, str, str]  # module, name, problem


def check(sources: Sources) -> list[Row]:
    """Check every import and every use against one version."""
    rows: list[Row] = []
    for alternatives in our_imports():
        modules = " or ".join(dict.fromkeys(choice.module for choice in alternatives))
        rows.append(
            (
                modules,
                f"import {alternatives[0].name}".strip(),
                import_problem(sources, alternatives),
            )
        )
    for use in USES:
        rows += [(use.module, name, problem) for name, problem in problems(sources, use)]
    return list(dict.fromkeys(rows))


def write_table(checked: dict[str, list[Row]], path: Path = TABLE) -> None:
    """Write what was checked, one column for each version."""
    results: dict[tuple[str, str], dict[str, str]] = {}
    for version, rows in checked.items():
        for module, name, problem in rows:
            results.setdefault((module, name), {})[version] = problem or "ok"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["module", "name", *checked])
        for (module, name), found in sorted(results.items()):
            writer.writerow([module, name, *(found.get(version, "") for version in checked)])


def main(
    wheels: Annotated[
        list[Path], typer.Argument(help="Wheels of vLLM, or folders that hold the package vllm.")
    ],
    table: Annotated[
        bool,
        typer.Option(help="Write docs/reference/vllm_contract.csv; name a wheel of every version."),
    ] = False,
) -> None:
    """Check that versions of vLLM have every name that this package uses of it; exit code 1 if one lacks some."""
    checked = {}
    for path in wheels:
        sources = Sources(path)
        rows = checked[sources.version] = check(sources)
        wrong = [row for row in rows if row[2]]
        print(f"vLLM {sources.version}: {len(rows)} names checked, {len(wrong)} missing or changed")
        for module, name, problem in wrong:
            print(f"  {module}: {name}: {problem}")
    if table:
        write_table(checked)
    if any(problem for rows in checked.values() for _, _, problem in rows):
        raise SystemExit(1)
