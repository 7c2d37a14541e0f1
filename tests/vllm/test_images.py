"""A multimodal model with its image processor: a request with an image is vLLM's, texts are served beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from PIL import Image
from transformers import PreTrainedTokenizerFast

from benchmarks.vllm_families import missing_torchvision, save_checkpoint
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.vllm.messages import FIELD, Ask
from cachecraft_rag.vllm.worker import models
from tests.vllm.conftest import Server
from tests.vllm.test_families import assert_passes_the_self_check

FAMILY = "Gemma 3, multimodal"
TOKENS = {  # of `MULTIMODAL`, from 260 on
    "boi_token": "<start_of_image>",
    "image_token": "<image>",
    "eoi_token": "<end_of_image>",
}


@pytest.fixture
def folder(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A tiny Gemma 3 with an image processor."""
    for name, module in missing_torchvision().items():
        monkeypatch.setitem(sys.modules, name, module)
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    name = "Gemma3ForConditionalGeneration"
    ModelRegistry.register_model(name, getattr(models, name))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=deepcopy(byte_tokenizer.backend_tokenizer),
        eos_token=byte_tokenizer.eos_token,
        extra_special_tokens=TOKENS,
    )
    assert tokenizer.convert_tokens_to_ids(list(TOKENS.values())) == [260, 261, 262]
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])  # vLLM looks them up by name
    folder = save_checkpoint(FAMILY, tmp_path / "model", tokenizer)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    return folder


def generate(server: Server, prompt: dict[str, Any], ask: Ask | None = None) -> Any:
    from vllm import SamplingParams

    extra = None if ask is None else {"kv_transfer_params": {FIELD: ask.message(server.key)}}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=extra)
    (output,) = server.llm.generate([prompt], [params], use_tqdm=False)
    return output


@pytest.mark.slow
def test_a_request_with_an_image_is_left_to_vllm_and_texts_are_served(
    folder: Path, make_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = make_server(folder, tmp_path / "caches", max_model_len=1024)
    prompt = {
        "prompt": "Here is a picture: <start_of_image> Which colour does it have?",
        "multi_modal_data": {"image": Image.new("RGB", (16, 16), "red")},
    }
    plain = generate(server, prompt)
    ids = tuple(plain.prompt_token_ids)
    assert ids.count(261) == 4
    segments = (Segment("system", "begin", ids[:8]), Segment("question", "question", ids[8:]))
    ask = Ask(Prompt(segments), ReuseConfig(), captures=())

    left = generate(server, prompt, ask)
    assert left.kv_transfer_params[FIELD]["refused"] == "it holds images, sound or videos"
    assert left.outputs[0].token_ids == plain.outputs[0].token_ids
    assert_passes_the_self_check(server)
