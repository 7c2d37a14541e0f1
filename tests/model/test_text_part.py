"""The text part of a multimodal checkpoint, loaded in process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from benchmarks.vllm_families import config_of, save_checkpoint
from cachecraft_rag.errors import ModelNotFoundError, UnsupportedModelError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import self_check
from cachecraft_rag.model.sizes import layout_named
from cachecraft_rag.vllm.served_model import VLLMModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.mark.parametrize("family", ["Gemma 3, multimodal", "Mistral Small 3, multimodal"])
def test_the_text_part_answers_as_the_whole_model(
    family: str, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = str(save_checkpoint(family, tmp_path, byte_tokenizer))
    decoder = Decoder.load(folder, dtype="float32", device="cpu")
    assert layout_named(folder, dtype="float32") == decoder.layout

    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(60)[None]
    with torch.inference_mode(), decoder.stock():
        expected = whole(input_ids=ids).logits
        assert torch.allclose(decoder.model(input_ids=ids).logits, expected, atol=1e-5)
    self_check(decoder)


def test_the_chat_template_of_a_processor_is_used(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    template = byte_tokenizer.chat_template
    folder = save_checkpoint("Mistral Small 3, multimodal", tmp_path, byte_tokenizer)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert Decoder.load(str(folder)).tokenizer.chat_template == template
    assert VLLMModel.load(str(folder)).tokenizer.chat_template == template

    for damaged in ("[]", "{}", "{"):
        (folder / "chat_template.json").write_text(damaged)
        with pytest.raises(ModelNotFoundError):
            VLLMModel.load(str(folder))


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("Qwen2.5-VL", "no causal LM for its text part (qwen2_5_vl_text)"),
        ("Qwen3-VL", "no causal LM for its text part (qwen3_vl_text)"),
    ],
)
def test_a_multimodal_model_without_a_causal_lm_is_refused_before_its_weights_are_read(
    family: str, says: str, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config_of(family).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as refused:
        Decoder.load(str(tmp_path))
    assert says in str(refused.value)
    assert "ask it over vLLM" in str(refused.value)


def test_a_quantised_multimodal_model_is_refused(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = config_of("Gemma 3, multimodal")
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    config.save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="multimodal and quantised"):
        Decoder.load(str(tmp_path))
