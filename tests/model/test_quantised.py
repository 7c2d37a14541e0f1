"""Quantised weights: served if the self-check passes, and never from the store of another quantisation.

Models are quantised by torchao where it is installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TorchAoConfig,
)

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.fingerprint import checkpoint_fingerprint
from cachecraft_rag.model.fused_layers import product
from cachecraft_rag.model.self_check import load_checked
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import Chunk

KINDS = ["Int8WeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig", "Float8WeightOnlyConfig"]


@pytest.fixture
def plain(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Path:
    """Folder of a tiny Llama in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=256,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    byte_tokenizer.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def quantised(plain: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Callable[[str], Path]:
    """Returns the folder of the same model, quantised by a kind of torchao's."""
    quantization = pytest.importorskip("torchao.quantization")

    def make(kind: str) -> Path:
        folder = plain.with_name(kind)
        config = TorchAoConfig(getattr(quantization, kind)())
        model = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=config, dtype=torch.bfloat16
        )
        model.save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_passes_the_self_check(
    kind: str, quantised: Callable[[str], Path]
) -> None:
    decoder = load_checked(str(quantised(kind)), device="cpu")
    assert type(decoder.model.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    assert decoder.layout.dtype == "bfloat16"


def test_the_fingerprint_of_a_quantised_model_given_as_an_object(
    quantised: Callable[[str], Path],
) -> None:
    decoder = Decoder.load(str(quantised(KINDS[0])), device="cpu")
    first = Decoder(decoder.model, decoder.tokenizer, name="first").fingerprint
    assert Decoder(decoder.model, decoder.tokenizer, name="second").fingerprint == first
    with torch.no_grad():
        decoder.model.model.layers[0].self_attn.q_proj.weight.scale.mul_(2)
    assert Decoder(decoder.model, decoder.tokenizer, name="third").fingerprint != first


def test_a_store_is_never_shared_between_quantisations(
    plain: Path, quantised: Callable[[str], Path], tmp_path: Path
) -> None:
    def outcome(model: Path) -> str:
        chunk = Chunk("The kettle is descaled every 8 weeks.")
        store = tmp_path / "store"
        with Engine.from_pretrained(
            str(model), store=store, device="cpu", new_variants="off"
        ) as engine:
            answer = engine.stream("When?", [chunk], sampling=SamplingParams(max_new_tokens=2))
            for _ in answer:
                pass
            return answer.stats.chunks[0].outcome

    folders = [plain, quantised(KINDS[0]), quantised(KINDS[2])]
    assert [outcome(folder) for folder in folders] == ["computed"] * 3
    assert [outcome(folder) for folder in folders] == ["exact"] * 3


def change_config(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The same integers, read in another way."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bits"] = 4
    (folder / "config.json").write_text(json.dumps(config))


def change_scale(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The same integers with other scales."""
    name = next(name for name in tensors if name.endswith("_scale"))
    tensors[name] = tensors[name] * 2


def change_bits(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Other integers."""
    name = next(name for name in tensors if name.endswith("weight"))
    tensors[name] = tensors[name] ^ 1


@pytest.mark.parametrize(
    "change", [change_config, change_scale, change_bits], ids=lambda change: change.__name__
)
def test_the_fingerprint_tells_quantisations_apart(
    plain: Path, change: Callable[[Path, Any], None]
) -> None:
    def fingerprint(folder: Path) -> str | None:
        return checkpoint_fingerprint(folder, dtype="bfloat16")

    integers = plain.with_name("integers")
    shutil.copytree(plain, integers)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        scale = weight.float().abs().amax(-1, keepdim=True) / 127
        tensors[name] = (weight.float() / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, integers / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "int8", "bits": 8}
    (integers / "config.json").write_text(json.dumps(config))
    before = fingerprint(integers)
    assert before != fingerprint(plain)

    changed = plain.with_name("changed")
    shutil.copytree(integers, changed)
    change(changed, tensors)
    save_file(tensors, changed / "model.safetensors")
    assert fingerprint(changed) not in (before, fingerprint(plain))


def test_a_weight_that_is_no_plain_tensor_is_left_to_its_module() -> None:
    class Doubled(torch.nn.Parameter):
        """A weight that stands for twice its stored numbers, as quantised ones stand for others."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **(kwargs or {}))
                return 2 * out if func is torch.nn.functional.linear else out

    linear = torch.nn.Linear(64, 64, bias=False)
    linear.weight = Doubled(linear.weight.detach())
    x = torch.randn(1, 2, 64)
    expected = 2 * x @ torch.Tensor(linear.weight.detach()).T
    with torch.inference_mode():
        assert torch.allclose(product(linear, x), expected.as_subclass(torch.Tensor), atol=1e-5)
