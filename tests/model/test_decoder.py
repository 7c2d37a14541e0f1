"""The decoder adapter: what it takes, what it refuses and why, and what its fingerprint tells apart."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.fingerprint import checkpoint_fingerprint
from cachecraft_rag.model.layer_survey import SurveyError, identity_like
from cachecraft_rag.model.self_check import TOLERANCE, load_checked, self_check
from cachecraft_rag.model.sizes import layout_named
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.served_model import VLLMModel

MakeDecoder = Callable[..., Decoder]

SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Bloom", {"n_head": 2, "n_layer": 2}, "ALiBi"),
    ("Mpt", {"d_model": 32, "n_heads": 2, "n_layers": 2}, "ALiBi"),
    ("Falcon", {"alibi": True}, "ALiBi"),
    ("Falcon", {"alibi": False}, "not laid out like Llama's"),
    ("GPT2", {"n_embd": 32, "n_head": 2, "n_layer": 2}, "learned or absolute positions"),
    ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "learned or absolute positions"),
    ("Mamba", {"state_size": 4}, "one running state"),
    ("Rwkv", {"attention_hidden_size": 32}, "one running state"),
    ("Qwen3Next", HYBRID | {"num_experts": 2, "num_experts_per_tok": 1}, "one running state"),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "one running state"),
    (
        "GPTJ",
        {"n_embd": 32, "n_head": 2, "n_layer": 2, "rotary_dim": 8},
        "not laid out like Llama's",
    ),
    # its config has no `intermediate_size`
    ("GPTNeoXJapanese", {}, "do not call the attention function"),
]
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("Gemma", {"head_dim": 16}),
    ("Granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.3, "logits_scaling": 8.0}),
    ("Mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    ("Olmo2", {}),
    ("Starcoder2", {"sliding_window": 24}),
    (
        "Ministral3",  # stretches queries after its original length, by position
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
]


def small_model(family: str, **settings: Any) -> Any:
    """A tiny random model of any family; settings its config does not know are left out."""
    config_class = getattr(transformers, f"{family}Config")
    known = {*config_class().to_dict(), *config_class.attribute_map}
    config = config_class(**{k: v for k, v in (SMALL | settings).items() if k in known})
    head = {"Rwkv": "RwkvForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(
        family, f"{family}ForCausalLM"
    )
    return getattr(transformers, head)(config)


@pytest.mark.parametrize(
    ("family", "settings", "reason"), REFUSED, ids=[f"{row[0]} {row[2]}" for row in REFUSED]
)
def test_models_without_keys_that_move_are_refused_by_name_and_reason(
    family: str, settings: dict[str, Any], reason: str, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = small_model(family, **settings)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        Decoder(model, byte_tokenizer, name="acme/base-1b")
    assert str(caught.value).startswith(
        f"acme/base-1b ({model.config.model_type}) cannot be served"
    )
    assert "Use a decoder-only model" in str(caught.value)


def test_an_encoder_decoder_is_refused_from_its_folder(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = transformers.T5Config(
        vocab_size=260, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        Decoder(model, byte_tokenizer, name="t5")
    model.save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"\(t5\).*encoder-decoder"):
        Decoder.load(str(tmp_path))


def test_a_dtype_that_no_layout_knows_is_refused(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UnsupportedModelError, match="float64"):
        Decoder(small_model("Llama").double(), byte_tokenizer, name="double")


def test_an_adapter_that_is_not_merged_is_refused(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    model = small_model("Llama")
    # what transformers sets when it loads one; peft itself is not needed here
    model._hf_peft_config_loaded = True
    with pytest.raises(UnsupportedModelError, match="merge the adapter"):
        Decoder(model, byte_tokenizer, name="adapted")


@pytest.mark.parametrize(("family", "settings"), EXACT, ids=[row[0] for row in EXACT])
def test_models_of_the_same_build_are_exact(
    family: str, settings: dict[str, Any], tiny_decoder: MakeDecoder
) -> None:
    decoder = tiny_decoder(family, **settings)
    assert self_check(decoder) <= 2e-6
    ids = torch.randint(3, 256, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    full = prefill(decoder, PrefillJob(ids, Rows.of([0, 60, 100], new=range(100)), captures=[0]))
    reused = [ResidentKV(0, full.recorder.captures[0].kv)]
    partial = prefill(
        decoder, PrefillJob(ids, Rows.of([0, 60, 100], new=range(60, 100)), resident=reused)
    )
    own = decoder.own_logits(ids)[0]
    for output in (full, partial):
        assert (decoder.next_logits(output.hidden) - own).abs().max() <= 1e-3


def test_own_logits_of_the_last_positions(tiny_decoder: MakeDecoder) -> None:
    decoder = tiny_decoder("Llama")
    ids = list(range(30))
    kept = decoder.own_logits(ids, keep=4)
    assert kept.shape == (4, 260)
    assert torch.allclose(kept[-1], decoder.own_logits(ids)[0], atol=1e-5)
    hidden = prefill(decoder, PrefillJob(ids, Rows.of([0, 10, 30], new=range(30)))).hidden
    assert torch.allclose(decoder.logits(hidden[:, -4:]), kept, atol=1e-4)


def test_a_direct_call_of_the_model_says_where_it_belongs(tiny_decoder: MakeDecoder) -> None:
    decoder = tiny_decoder("Llama")
    with pytest.raises(UnsupportedModelError, match=r"Decoder\.stock"):
        decoder.model(input_ids=torch.tensor([[1, 2]]))


def test_longrope_is_served_where_one_set_of_frequencies_holds(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        **factors,
    }
    model = small_model("Phi3", rope_parameters=rope, original_max_position_embeddings=64)
    decoder = Decoder(model, byte_tokenizer, name="phi-3")
    assert model.config.max_position_embeddings == 128
    assert decoder.context_length == 64
    assert Decoder(small_model("Llama"), byte_tokenizer, name="llama").context_length == 128


def test_layout_and_end_tokens(tiny_decoder: MakeDecoder) -> None:
    decoder = tiny_decoder("Phi3", dtype="bfloat16")
    assert decoder.layout.shape(5) == (4, 2, 5, 2, 16)
    assert decoder.layout.dtype == "bfloat16"
    assert 256 in decoder.end_tokens


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny Llama on disk."""
    torch.manual_seed(0)
    small_model("Llama").save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "unable to mmap 256 bytes: Cannot allocate memory (12)",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 256 bytes",
    ],
)
def test_lack_of_memory_is_not_called_a_missing_model(
    text: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(RuntimeError, match="memory") as raised:
        Decoder.load(str(saved))
    assert not isinstance(raised.value, ModelNotFoundError)


def test_loading_names_what_is_missing_or_misspelt(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nothing-here"):
        Decoder.load(str(tmp_path / "nothing-here"))
    with pytest.raises(ConfigError, match="'fp16'; choose one of auto, float32"):
        Decoder.load(str(saved), dtype="fp16")
    for device in ("gpu", "cuda:99"):
        with pytest.raises(
            ConfigError, match=f"cannot use the device '{device}' .*; choose cpu, cuda"
        ):
            Decoder.load(str(saved), device=device)


@pytest.mark.parametrize("form", [torch.ones(1, 4, 8).unbind(-1), {"cos": 1}, "cos"])
def test_a_rotary_embedding_of_an_unknown_form_is_a_reason(form: object) -> None:
    with pytest.raises(SurveyError, match="neither cos and sin nor one tensor"):
        identity_like(form, torch.float32)


DAMAGED = {
    "weights of nothing": ("model.safetensors", b"{}"),
    "weights cut short": ("model.safetensors", None),
    "a tokenizer of another form": ("tokenizer.json", b"[]"),
    "a config of another form": ("config.json", b"[1, 2]"),
    "a layer count in words": ("config.json", b'{"model_type": "llama", "num_hidden_layers": "x"}'),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_of_a_model_are_one_error(damage: str, saved: Path) -> None:
    name, content = DAMAGED[damage]
    (saved / name).write_bytes(content or (saved / name).read_bytes()[:5000])
    for load in (Decoder.load, VLLMModel.load):
        with pytest.raises(ModelNotFoundError, match="cannot load the model"):
            load(str(saved))


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_auto_is_the_checkpoints_own_dtype(
    own: str, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    small_model("Llama").to(getattr(torch, own)).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    decoder = Decoder.load(str(tmp_path), device="cpu")
    assert (decoder.dtype, decoder.layout.dtype) == (getattr(torch, own), own)
    assert Decoder.load(str(tmp_path), dtype="float16", device="cpu").layout.dtype == "float16"


@pytest.mark.parametrize("own", ["float32", "bfloat16", "float16"])
def test_auto_is_bfloat16_instead_of_float32_where_the_cpu_computes_it(
    own: str,
    tmp_path: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cachecraft_rag.model.decoder.computes_bfloat16", lambda: True)
    small_model("Llama").to(getattr(torch, own)).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    chosen = "bfloat16" if own == "float32" else own
    assert (
        load_checked(str(tmp_path), device="cpu").layout.dtype
        == layout_named(str(tmp_path)).dtype
        == chosen
    )
    assert Decoder.load(str(tmp_path), dtype="float32", device="cpu").layout.dtype == "float32"


def test_auto_is_float32_where_the_self_check_refuses_bfloat16(
    tmp_path: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("cachecraft_rag.model.decoder.computes_bfloat16", lambda: True)
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, -1.0)
    small_model("Llama").save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    with caplog.at_level("WARNING", logger="cachecraft_rag"):
        assert load_checked(str(tmp_path), device="cpu").layout.dtype == "float32"
    assert "Loaded in float32 instead" in caplog.text
    with pytest.raises(UnsupportedModelError):
        load_checked(str(tmp_path), dtype="bfloat16", device="cpu")


def test_what_another_dtype_stored_is_kept_for_it(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model("Llama", max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")

    def outcome() -> str:
        model, chunk = str(tmp_path / "model"), Chunk("The kettle is descaled every 8 weeks.")
        sampling = SamplingParams(max_new_tokens=2)
        with Engine.from_pretrained(
            model, store=tmp_path / "store", device="cpu", new_variants="off"
        ) as engine:
            answer = engine.stream("When?", [chunk], sampling=sampling)
            for _ in answer:
                pass
            return answer.stats.chunks[0].outcome

    assert [outcome(), outcome()] == ["computed", "exact"]
    # as after an update
    monkeypatch.setattr("cachecraft_rag.model.decoder.computes_bfloat16", lambda: True)
    assert [outcome(), outcome()] == ["computed", "exact"]
    monkeypatch.undo()
    monkeypatch.setattr("cachecraft_rag.model.decoder.computes_bfloat16", lambda: False)
    assert outcome() == "exact", "what was stored before is still there"


# -- fingerprint ------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_the_same_in_another_process_and_folder(
    saved: Path, tmp_path: Path, tiny_decoder: MakeDecoder
) -> None:
    code = (
        "import sys; from cachecraft_rag.model.decoder import Decoder; "
        "print(Decoder.load(sys.argv[1], dtype='float32').fingerprint)"
    )
    elsewhere = saved.rename(tmp_path.parent / f"{tmp_path.name}-moved")
    env = os.environ | {"PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", code, str(elsewhere)],
        check=True,
        capture_output=True,
        text=True,
        env=env,
    )
    decoder = Decoder.load(str(elsewhere), dtype="float32")
    assert there.stdout.strip() == decoder.fingerprint
    assert decoder.fingerprint == checkpoint_fingerprint(elsewhere, dtype="float32")


def test_the_fingerprint_of_a_model_given_as_an_object_is_that_of_its_tensors(saved: Path) -> None:
    decoder = Decoder.load(str(saved), dtype="float32")
    first = Decoder(decoder.model, decoder.tokenizer, name="one name").fingerprint
    with decoder.stock():
        pass
    assert Decoder(decoder.model, decoder.tokenizer, name="another name").fingerprint == first


def one_weight(model: Any, _: Any) -> Any:
    """The smallest change of weights there is."""
    with torch.no_grad():
        weight = model.model.layers[1].mlp.up_proj.weight
        weight[3, 3] = torch.nextafter(weight[3, 3], torch.tensor(9.0))


def merged_adapter(model: Any, _: Any) -> None:
    """Change a weight as merging a LoRA does."""
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight += (
            0.01 * torch.ones(32, 2) @ torch.ones(2, 32)
        )


def other_rope(model: Any, _: Any) -> None:
    """Another base of the rotary frequencies."""
    model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 5e5}


def other_norm(model: Any, _: Any) -> None:
    """A number of the config that no weight shows."""
    model.config.rms_norm_eps = 1e-3


def other_dtype(model: Any, _: Any) -> None:
    """The same numbers, rounded."""
    model.to(torch.bfloat16)


def other_tokenizer(_: Any, tokenizer: Any) -> None:
    """One token more."""
    tokenizer.add_tokens(["descale"])


@pytest.mark.parametrize(
    "change",
    [one_weight, merged_adapter, other_rope, other_norm, other_dtype, other_tokenizer],
    ids=lambda f: f.__name__,
)
def test_the_fingerprint_tells_apart(
    change: Callable[[Any, Any], None], byte_tokenizer: Any
) -> None:
    torch.manual_seed(0)
    model = small_model("Llama")
    changed, tokenizer = copy.deepcopy(model), copy.deepcopy(byte_tokenizer)
    change(changed, tokenizer)
    before = Decoder(model, byte_tokenizer, name="a").fingerprint
    assert Decoder(copy.deepcopy(model), byte_tokenizer, name="b").fingerprint == before
    assert Decoder(changed, tokenizer, name="a").fingerprint != before


def test_the_fingerprint_does_not_change_when_the_tokenizer_is_used(byte_tokenizer: Any) -> None:
    model, tokenizer = small_model("Llama"), copy.deepcopy(byte_tokenizer)
    before = Decoder(model, tokenizer, name="a").fingerprint
    tokenizer.pad_token = "<|end|>"
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=2)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["padding"] is not None
    assert Decoder(model, tokenizer, name="a").fingerprint == before


def test_loading_from_a_folder_draws_no_bars_and_leaves_them_as_they_were(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging as bars

    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path)
    decoder.tokenizer.save_pretrained(tmp_path)
    was_enabled = bars.is_progress_bar_enabled()
    bars.enable_progress_bar()
    try:
        capfd.readouterr()
        Decoder.load(str(tmp_path))
        assert "Loading weights" not in capfd.readouterr().err
        assert bars.is_progress_bar_enabled()
    finally:
        if not was_enabled:
            bars.disable_progress_bar()
