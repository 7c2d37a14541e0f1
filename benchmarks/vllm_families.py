"""Scan of the model families that vLLM runs: which are served from chunk-caches, and why others are refused.

Runs in an environment with vLLM's CPU build. Each family is a tiny random checkpoint in float32. It is accepted if it
passes the self-check of a server's start, and if tokens and log-probabilities of an answer are those of vLLM's own
prefill: with chunks reused after their own prefix, and with moved chunks recomputed at ratio 1. The CSV is the source
of a part of docs/models.md.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest.mock import patch

import torch
import transformers
import typer
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.families import (
    FamilyResult,
    grouped_by_reason,
    read_csv,
    reason_of,
    replace_between,
    write_csv,
)
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.vllm.messages import FIELD, Ask
from cachecraft_rag.vllm.options import VLLMOptions
from cachecraft_rag.vllm.plugin import ARCHITECTURES
from cachecraft_rag.vllm.refusals import refusal
from cachecraft_rag.vllm.self_check import Predicted, check_prompt, self_check
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.settings import ConnectorSettings

ANSWER_TOKENS = 8
LARGEST_ERROR = 1e-3  # of a log probability, in float32
_CONTEXT = 1024
_KEY = "the scan's key"
ENVIRONMENT = {
    "VLLM_PLUGINS": "cachecraft",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_MLA_DISABLE": "1",
}

# the kernel of vLLM's CPU build rotates DeepSeek's queries `[rows, heads, head_dim]` wrongly
NATIVE_ROTATION = {"custom_ops": ["all", "-rotary_embedding"]}
WINDOW = 32  # shorter than a chunk of the tests
LAYERS = 4
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
}
_TIED = {"tie_word_embeddings": True}
_WINDOWS = {"sliding_window": WINDOW, "layer_types": _ALTERNATING}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
# Latent attention, whose keys vLLM keeps per head with VLLM_MLA_DISABLE.
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
_DEEPSEEK = {
    **_LATENT,
    **_EXPERTS,
    "head_dim": 8,  # of the part that is rotated
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# By name: the prefix of the classes in transformers, and the settings of the config besides `_SHAPE`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Apertus": ("Apertus", {}),
    "Arcee": ("Arcee", {}),
    "CWM": ("Cwm", {**_WINDOWS, "bos_token_id": 0}),
    "Cohere": ("Cohere", {**_TIED, "logit_scale": 1.0}),
    "Cohere 2": ("Cohere2", {**_WINDOWS, **_TIED, "logit_scale": 1.0}),
    "DeepSeek V2": ("DeepseekV2", _DEEPSEEK),
    "DeepSeek V3": ("DeepseekV3", {**_DEEPSEEK, "topk_method": "noaux_tc"}),
    "ERNIE 4.5": ("Ernie4_5", {}),
    "EXAONE 4": ("Exaone4", {**_WINDOWS, "sliding_window_pattern": 2}),
    "FlexOlmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "GLM": ("Glm", {"partial_rotary_factor": 0.5}),
    "GLM-4": ("Glm4", {"partial_rotary_factor": 0.5}),
    "GLM-4 MoE": (
        "Glm4Moe",
        {
            **_EXPERTS,
            "head_dim": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "GLM-4 MoE Lite": ("Glm4MoeLite", _DEEPSEEK),
    "GPT-NeoX": ("GPTNeoX", {}),
    "Gemma": ("Gemma", _TIED),
    "Gemma 2": (
        "Gemma2",
        {**_WINDOWS, **_TIED, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0},
    ),
    "Gemma 3": ("Gemma3", {**_WINDOWS, **_TIED, "query_pre_attn_scalar": 32}),
    "Granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "Granite MoE": (
        "GraniteMoe",
        {"embedding_multiplier": 3.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Jais 2": ("Jais2", {}),
    "Llama": ("Llama", {}),
    "Llama with YaRN": ("Llama", {"rope_parameters": _YARN}),
    "Llama with llama3 scaling": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "Mellum": ("Mellum", {**_WINDOWS, **_EXPERTS, "num_experts": 4}),
    "Ministral 3": ("Ministral3", {"sliding_window": None}),
    "MiniCPM 3": ("MiniCPM3", {**_LATENT, "head_dim": 32}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "Nemotron": ("Nemotron", {"partial_rotary_factor": 0.5}),
    "OLMo": ("Olmo", {}),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 3": (
        "Olmo3",
        {
            **_WINDOWS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": _YARN,
            },
        },
    ),
    "OLMoE": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Phi": ("Phi", {}),
    "Phi-3": ("Phi3", {"sliding_window": None}),
    "Phi-3 with LongRoPE": (
        "Phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 1024,
                "short_factor": [1.0 + 0.1 * pair for pair in range(16)],
                "long_factor": [4.0] * 16,
            },
        },
    ),
    "Qwen2": ("Qwen2", {}),
    "Qwen2 MoE": (
        "Qwen2Moe",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
    ),
    "Qwen3": ("Qwen3", {}),
    "Qwen3 MoE": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4}),
    "Seed-OSS": ("SeedOss", {}),
    "SmolLM3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "StableLM": ("StableLm", {"partial_rotary_factor": 0.25}),
    "Starcoder 2": ("Starcoder2", {}),
    "VaultGemma": (
        "VaultGemma",
        {**_WINDOWS, **_TIED, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **_WINDOWS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
}
# the parts of torchvision that code for images imports
_TORCHVISION = (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
)
_CONFIGS = {"Gemma3": "Gemma3Text"}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_QWEN_VISION = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TOKENS = {
    "image_token_id": 261,
    "video_token_id": 262,
    "vision_start_token_id": 263,
    "vision_end_token_id": 264,
}
_QWEN3_VISION = {
    **_QWEN_VISION,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
# Multimodal models by name: the prefix of the classes, the settings of the text part's config besides `_SHAPE`, and
# those of the whole.
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma 3, multimodal": (
        "Gemma3",
        {**_WINDOWS, "query_pre_attn_scalar": 32},
        {
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "boi_token_index": 260,
            "image_token_index": 261,
            "eoi_token_index": 262,
        },
    ),
    "Mistral Small 3, multimodal": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {
            "vision_config": {"model_type": "pixtral", **_VISION},
            "image_token_index": 261,
            "spatial_merge_size": 2,
        },
    ),
    "Qwen2-VL": (
        "Qwen2VL",
        {"rope_parameters": _MROPE},
        {
            **_QWEN_TOKENS,
            "vision_config": {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 128},
        },
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VL",
        {"rope_parameters": _MROPE},
        {
            **_QWEN_TOKENS,
            "vision_config": {
                **_QWEN_VISION,
                "hidden_size": 32,
                "intermediate_size": 64,
                "out_hidden_size": 128,
                "fullatt_block_indexes": [1],
                "window_size": 16,
            },
        },
    ),
    "Qwen3-VL": (
        "Qwen3VL",
        {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        {**_QWEN_TOKENS, "vision_config": _QWEN3_VISION},
    ),
    "Qwen3-VL MoE": (
        "Qwen3VLMoe",
        {
            **_EXPERTS,
            "num_experts": 4,
            "norm_topk_prob": True,
            "rope_parameters": {**_MROPE, "mrope_interleaved": True},
        },
        {**_QWEN_TOKENS, "vision_config": _QWEN3_VISION},
    ),
}


def missing_torchvision() -> dict[str, ModuleType]:
    """Return empty modules by name in place of torchvision, {} if it is installed.

    vLLM's code for images imports it, and its wheel on PyPI does not fit vLLM's CPU build.
    """
    modules: dict[str, ModuleType] = {}
    if find_spec("torchvision") is not None:
        return modules
    for name in ("torchvision", *(f"torchvision.{part}" for part in _TORCHVISION)):
        module = modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


@contextlib.contextmanager
def no_images() -> Iterator[None]:
    """Return a context in which vLLM starts multimodal models without asking their image processors for sizes."""
    with (
        patch.dict(sys.modules, missing_torchvision()),
        patch("vllm.multimodal.encoder_budget.get_mm_max_toks_per_item", lambda *_a, **_k: {}),
    ):
        yield


def config_of(name: str) -> Any:
    """Return the config of a family's tiny model."""
    if name in MULTIMODAL:
        return _multimodal_config(*MULTIMODAL[name])
    prefix, settings = FAMILIES[name]
    config_class = getattr(transformers, f"{_CONFIGS.get(prefix, prefix)}Config")
    return config_class(**(_shape_of(config_class) | settings))


def _multimodal_config(prefix: str, text: dict[str, Any], settings: dict[str, Any]) -> Any:
    config_class = getattr(transformers, f"{prefix}Config")
    text_class = type(config_class().get_text_config())
    shape = _shape_of(text_class) | _TIED
    return config_class(text_config=shape | text, **(_TIED | settings))


def _shape_of(config_class: Any) -> dict[str, Any]:
    """Return the settings of `_SHAPE` that a config has."""
    known = {*config_class().to_dict(), *config_class.attribute_map}
    return {setting: value for setting, value in _SHAPE.items() if setting in known}


def architecture_of(name: str) -> str:
    """Return the architecture of a family, as its checkpoints name it."""
    if name in MULTIMODAL:
        return f"{MULTIMODAL[name][0]}ForConditionalGeneration"
    prefix, _ = FAMILIES[name]
    return f"{prefix}ForCausalLM"


def byte_tokenizer() -> Any:
    """Return a tokenizer that needs no file: a token for each byte, and one that ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def save_checkpoint(name: str, folder: Path, tokenizer: Any) -> Path:
    """Save a tiny random model of a family, in float32."""
    torch.manual_seed(0)
    model = getattr(transformers, architecture_of(name))(config_of(name)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # the usual initialisation is so small that all tokens look alike
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape))  # norms and sinks differ
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name in ("Gemma 3, multimodal", "Qwen3-VL MoE"):
        _write_weights_as_published(folder / "model.safetensors")
    return folder


def _write_weights_as_published(file: Path) -> None:
    """Name and lay out weights as in published checkpoints, which vLLM reads, and not as transformers saves them."""
    written: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        is_experts = name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        published = name.replace("vision_tower.", "vision_tower.vision_model.")
        written[published] = tensor.transpose(1, 2).contiguous() if is_experts else tensor
    save_file(written, file, metadata={"format": "pt"})


class _Server:
    """vLLM in this process, with the connector."""

    def __init__(self, folder: Path, store: Path) -> None:
        from vllm import LLM

        served = VLLMModel.load(str(folder), dtype="float32", options=VLLMOptions.from_values({}))
        settings = ConnectorSettings(str(store), served.identity, EngineConfig(), _KEY)
        given: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": _CONTEXT,
            "enforce_eager": True,
            "max_num_seqs": 4,
            "block_size": 32,
            "enable_prefix_caching": False,
            "kv_transfer_config": settings.transfer_config(),
            "disable_log_stats": True,
            "compilation_config": NATIVE_ROTATION,
        }
        self._llm: Any = LLM(model=str(folder), **(given | served.arguments))

    def answer(self, asked: Ask | list[int], tokens: int = ANSWER_TOKENS) -> tuple[list[int], Any]:
        """Return the tokens of a greedy answer, and the prediction of the first one."""
        from vllm import SamplingParams

        extra: dict[str, Any] = {}
        if isinstance(asked, list):
            prompt: dict[str, Any] = {"prompt_token_ids": asked}
        else:
            salt = asked.cache_salt(EngineConfig().namespace)
            prompt = {"prompt_token_ids": asked.prompt.token_ids, "cache_salt": salt}
            extra = {"kv_transfer_params": {FIELD: asked.message(_KEY)}}
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=16,
            detokenize=False,
            extra_args=extra,
        )
        (output,) = self._llm.generate([prompt], [params], use_tqdm=False)
        report = (output.kv_transfer_params or {}).get(FIELD, {})
        best = output.outputs[0]
        logprobs = {token: entry.logprob for token, entry in best.logprobs[0].items()}
        segments = () if isinstance(asked, list) else asked.prompt.segments
        taken = sum(
            len(segment.token_ids) - outcome["recomputed"] - outcome["not_loaded"]
            for segment, outcome in zip(segments, report.get("segments", ()), strict=False)
            if outcome["variant_id"] is not None
        )
        return list(best.token_ids), Predicted(logprobs, taken, report.get("refused", ""))

    def predict(self, asked: Ask | list[int]) -> Predicted:
        """Return the prediction of the first token of an answer; of a plain prompt, the likeliest half."""
        _tokens, predicted = self.answer(asked, tokens=1)
        if isinstance(asked, list):
            likeliest = sorted(predicted.logprobs.items(), key=lambda item: -item[1])
            return Predicted(dict(likeliest[:8]))
        return predicted

    def close(self) -> None:
        """End it, so that the next one can start in this process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()


def random_prompt(*chunks: int) -> Prompt:
    """Return a prompt of random tokens with these chunks, each longer than a window and a block."""
    segments: list[Segment] = []
    for kind, number in (("system", 100), *(("chunk", chunk) for chunk in chunks)):
        ids = tuple(random.Random(number).choices(range(250), k=48))
        segments.append(Segment(kind, digest("scan", str(number)), ids))  # type: ignore[arg-type]
    question = tuple(random.Random(200).choices(range(250), k=12))
    return Prompt((*segments, Segment("question", "the question", question, private=True)))


def largest_error(server: Any) -> float:
    """Return the largest difference of a log probability between answers from chunk-caches and vLLM's own.

    Raises UnsupportedModelError if the tokens of an answer differ.
    """
    config = ReuseConfig(capture=False, method=ReuseMethod(probe_min_rows=0, loading="whole"))
    primed = random_prompt(1, 2, 3)
    server.answer(Ask(primed, replace(config, reuse=False, capture=True), when_stored=True))
    largest = 0.0
    for prompt, ratio, taken in ((primed, None, 4 * 48), (random_prompt(3, 1, 2), 1.0, 48)):
        ask = Ask(prompt, replace(config, recompute_ratio=ratio), captures=())
        tokens, predicted = server.answer(ask)
        own_tokens, own = server.answer(prompt.token_ids)
        if predicted.refused or predicted.taken != taken:
            why = predicted.refused or f"{predicted.taken} of {taken} tokens were reused"
            raise UnsupportedModelError(f"chunk-caches: {why}")
        if tokens != own_tokens:
            raise UnsupportedModelError(
                f"chunk-caches: its answer is {tokens}, but vLLM's own is {own_tokens}"
            )
        likeliest = sorted(own.logprobs, key=own.logprobs.__getitem__)[-8:]
        errors = (abs(predicted.logprobs[token] - own.logprobs[token]) for token in likeliest)
        largest = max(largest, *errors)
    return largest


@no_images()
def scan(family: str) -> FamilyResult:
    """Serve a family, compare it with vLLM's own prefill, and return the result."""
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    from cachecraft_rag.vllm.worker import models

    load_general_plugins()
    architecture = architecture_of(family)
    # the class itself: by its name, vLLM would start a process to look at it
    ModelRegistry.register_model(architecture, getattr(models, architecture))
    with tempfile.TemporaryDirectory() as name:
        folder = save_checkpoint(family, Path(name) / "model", byte_tokenizer())
        try:
            server = _Server(folder, Path(name) / "caches")
        except UnsupportedModelError as error:
            return FamilyResult(family, "refused", reason_of(error))
        try:
            prompt = check_prompt(250, block_size=32, context_length=_CONTEXT)
            assert prompt is not None, "the context is long enough"
            self_check(family, prompt, server.predict, kept=lambda: True, dtype="float32")
            error = largest_error(server)
            layers = _describe()
        except UnsupportedModelError as refused:
            return FamilyResult(family, "refused", reason_of(refused))
        finally:
            server.close()
    if error > LARGEST_ERROR:
        return FamilyResult(family, "refused", f"a log probability differs by {error:.1e}")
    return FamilyResult(family, "accepted", error=f"{error:.0e}", layers=layers)


def _describe() -> str:
    """Return how the layers of the running model rotate and attend, in a few words."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    stack = get_kv_transfer_group()._workers._stack
    rotations: list[str] = []
    for table in stack._tables:
        form = table.form
        part = (
            ""
            if form.rotary_dim == form.head_dim
            else f", {form.rotary_dim} of {form.head_dim} dimensions"
        )
        pairs = "adjoining pairs" if form.interleaved else "half-split pairs"
        rotation = "none" if form.rotary_dim == 0 else pairs + part
        if rotation not in rotations:
            rotations.append(rotation)
    words = ["rotation: " + " and ".join(rotations)]
    if len(stack._tables) > len(rotations):
        words.append(f"{len(stack._tables)} rotary tables")
    if any(layer.settings.window for layer in stack._layers):
        words.append("sliding window in some layers")
    if any(layer.settings.sinks is not None for layer in stack._layers):
        words.append("sinks")
    if any(layer.settings.softcap for layer in stack._layers):
        words.append("soft cap")
    return "; ".join(words)


def refused_by_config() -> list[FamilyResult]:
    """Return the outcome of each architecture of vLLM's language models that is not among `FAMILIES`.

    Refused, with the reason that its config gives; "not tried" if the only reason is that this package lacks its class.
    """
    from vllm.model_executor.models import registry

    tried = {architecture_of(family) for family in (*FAMILIES, *MULTIMODAL)}
    names = {*registry._TEXT_GENERATION_MODELS, *registry._TRANSFORMERS_SUPPORTED_MODELS}
    model_types = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    results: list[FamilyResult] = []
    for name in sorted(names - tried):
        if not name.endswith("ForCausalLM"):
            continue
        if name in ARCHITECTURES:
            continue
        # Without a class for its config, a model may still be refused by its name.
        config = PretrainedConfig(architectures=[name])
        kind = model_types.get(name)
        if kind in CONFIG_MAPPING:
            with contextlib.suppress(Exception):  # configs raise anything
                config = CONFIG_MAPPING[kind](architectures=[name])
        refused = refusal(config, VLLMOptions())
        if refused is None or refused.reason.startswith("its architecture is"):
            results.append(FamilyResult(name, "not tried"))
        else:
            results.append(FamilyResult(name, "refused", refused.reason))
    return results


def page_section(results: Sequence[FamilyResult]) -> str:
    """Return the part of docs/models.md that lists the families over vLLM, as Markdown."""
    accepted = [result for result in results if result.outcome == "accepted"]
    lines = [f"### Served over vLLM ({len(accepted)})", "", "| family | layers |", "| --- | --- |"]
    lines += [f"| {result.family} | {result.layers} |" for result in accepted]
    refused = [result for result in results if result.outcome == "refused"]
    lines += ["", f"### Refused over vLLM ({len(refused)})", "", *grouped_by_reason(refused)]
    skipped = [result for result in results if result.outcome == "not tried"]
    lines += ["", f"### Not tried over vLLM ({len(skipped)})", ""]
    lines.append(
        f"{', '.join(result.family for result in skipped)}: refused, because their layers were never compared."
    )
    return "\n".join(lines) + "\n"


_BEGIN = "<!-- families over vLLM: written by `python -m benchmarks vllm-families` -->\n"
_END = "<!-- end of families over vLLM -->"


def rewrite_page(page: Path, results: Sequence[FamilyResult]) -> None:
    """Replace the lists in a page by those of these results."""
    ordered = sorted(results, key=lambda result: result.family)
    replace_between(page, _BEGIN, _END, page_section(ordered))


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Families; all if none is named.")
    ] = None,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", help="Write the results to this file, beside others.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Rewrite the lists in this Markdown page from the CSV.")
    ] = None,
) -> None:
    """Scan the model families that vLLM runs. Needs vLLM's CPU build."""
    os.environ.update(ENVIRONMENT)
    transformers.logging.set_verbosity_error()
    known: dict[str, FamilyResult] = {}
    names_of_all = (*FAMILIES, *MULTIMODAL)
    if csv_path is not None and csv_path.exists():
        results = read_csv(csv_path)
        known = {result.family: result for result in results if result.family in names_of_all}
    for family in names or names_of_all:
        result = known[family] = scan(family)
        print(
            f"{family:28} {result.outcome:10} {result.error:6} {result.reason or result.layers}",
            flush=True,
        )
    known |= {result.family: result for result in refused_by_config()}
    if csv_path is not None:
        write_csv(known.values(), csv_path)
    if page is not None:
        rewrite_page(page, list(known.values()))
