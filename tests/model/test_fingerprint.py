"""Fingerprints of checkpoints: made of their files, equal for equal numbers, different for any difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cachecraft_rag.model import fingerprint
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.fingerprint import (
    adapter_fingerprint,
    checkpoint_fingerprint,
    snapshot_folder,
)
from cachecraft_rag.types.versions import IDENTITY_VERSION, LAYOUT_VERSION

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHECRAFT_CACHE", str(tmp_path / "user-cache"))
    return tmp_path / "user-cache"


@pytest.fixture
def folder(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A checkpoint that was saved an hour ago."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    place = tmp_path / "checkpoint"
    LlamaForCausalLM(config).save_pretrained(place)
    byte_tokenizer.save_pretrained(place)
    settle(place)
    return place


def settle(place: Path) -> None:
    for path in place.iterdir():
        os.utime(path, (time.time() - 3600, time.time() - 3600))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the weight files that were read."""
    names: list[str] = []
    for name in ("_read_safetensors", "_whole"):
        real: Callable[[Path], Any] = getattr(fingerprint, name)
        monkeypatch.setattr(
            fingerprint, name, lambda path, real=real: (names.append(path.name), real(path))[1]
        )
    return names


def of(folder: Path, dtype: str = "float32") -> str:
    found = checkpoint_fingerprint(folder, dtype=dtype)
    assert found is not None
    return found


def test_the_version_is_frozen() -> None:
    """A change of one of these changes every identity: raise both, and say so in the changelog."""
    assert (IDENTITY_VERSION, LAYOUT_VERSION) == (2, 3)


def test_it_begins_with_its_version(folder: Path) -> None:
    assert of(folder).startswith(f"{IDENTITY_VERSION}-")


def test_it_is_frozen(tmp_path: Path) -> None:
    """A checkpoint written by hand has the fingerprint it had when this rule was made."""
    header = json.dumps(
        {"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    ).encode()
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(8)))
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "rope_theta": 1e4, "transformers_version": "5"}'
    )
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "padding": null}')
    assert of(tmp_path) == "2-9320b1b8e7611c595f8cfe573339d605"


def test_it_is_the_same_in_every_process_and_the_decoders(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cachecraft_rag.model.fingerprint import checkpoint_fingerprint; "
        "print(checkpoint_fingerprint(Path(sys.argv[1]), dtype='float32'))"
    )
    env = os.environ | {"PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        check=True,
        capture_output=True,
        text=True,
        env=env,
    )
    assert (
        there.stdout.strip()
        == of(folder)
        == Decoder.load(str(folder), dtype="float32", device="cpu").fingerprint
    )


def test_weights_in_other_shards_are_the_same_weights(folder: Path) -> None:
    before = of(folder)
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors, reverse=True)
    places = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / WEIGHTS).unlink()
    # the same once more, as some repositories have it
    save_file(tensors, folder / "consolidated.safetensors")
    assert of(folder) == before


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weight(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)


def change_shape(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(2, 16)
    save_file(tensors, folder / WEIGHTS)


def change_config(folder: Path) -> None:
    change_json(folder / "config.json", rms_norm_eps=1e-3)


def change_rope(folder: Path) -> None:
    change_json(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5})


def change_tokenizer(folder: Path) -> None:
    change_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"})


CHANGES = [change_weight, change_shape, change_config, change_rope, change_tokenizer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_any_other_number_is_another_model(change: Callable[[Path], None], folder: Path) -> None:
    before = of(folder)
    change(folder)
    assert of(folder) != before


def test_the_dtype_in_use_is_part_of_it(folder: Path) -> None:
    assert len({of(folder, dtype) for dtype in ("float32", "bfloat16", "float16")}) == 3


def test_what_shapes_no_number_is_no_part_of_it(folder: Path) -> None:
    before = of(folder)
    change_json(
        folder / "config.json",
        transformers_version="99",
        _name_or_path="x",
        architectures=["Y"],
        torch_dtype="float16",
    )
    change_json(folder / "tokenizer.json", padding={"strategy": "BatchLongest"}, truncation=None)
    assert of(folder) == before


def test_weights_are_read_once(folder: Path, read: list[str]) -> None:
    first = of(folder)
    assert read == [WEIGHTS]
    assert of(folder) == first
    assert of(folder, "bfloat16") != first
    assert read == [WEIGHTS]


def test_a_file_that_has_just_changed_is_read_again(folder: Path, read: list[str]) -> None:
    (folder / WEIGHTS).touch()
    of(folder)
    of(folder)
    assert read == [WEIGHTS] * 2


def test_the_same_size_and_another_time_is_another_file(folder: Path, read: list[str]) -> None:
    before = of(folder)
    change_weight(folder)
    os.utime(folder / WEIGHTS, (time.time() - 60, time.time() - 60))
    assert of(folder) != before
    assert read == [WEIGHTS] * 2


@pytest.mark.parametrize(
    "damage",
    [b"", b"{}", b"[1]", b'{"stamp": 1, "tensors": 2}', None, b"[" * 100_000],
    ids=lambda damage: repr(damage)[:30],
)
def test_a_damaged_cache_is_made_again(
    damage: bytes | None, folder: Path, own_cache: Path, read: list[str]
) -> None:
    before = of(folder)
    (kept,) = own_cache.rglob("*.json")
    entry = json.loads(kept.read_text())
    entry["tensors"]["model.norm.weight"] = "0" * 32
    kept.write_bytes(json.dumps(entry).encode() if damage is None else damage)
    assert of(folder) == before
    assert read == [WEIGHTS] * 2
    assert of(folder) == before
    assert read == [WEIGHTS] * 2


def test_a_cache_that_cannot_be_written_costs_only_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("CACHECRAFT_CACHE", str(tmp_path / "a-file"))
    assert of(folder) == of(folder)
    assert read == [WEIGHTS] * 2


def test_pytorch_and_gguf_files_and_older_tokenizers_count_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_fingerprint(tmp_path, dtype="float32") is None
    seen = set()
    for name in ("weights.gguf", "pytorch_model.bin", "vocab.json", "merges.txt"):
        for data in (b"a", b"b"):
            (tmp_path / name).write_bytes(data)
            seen.add(of(tmp_path))
    assert len(seen) == 8


def test_a_truncated_file_is_an_error(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-10])
    with pytest.raises(ValueError, match="truncated"):
        of(folder)


@pytest.mark.parametrize(
    "header", [b"[]", b'{"a": {}}', b'{"a": 5}', b'{"a": {"data_offsets": [0]}}'], ids=repr
)
def test_a_file_without_a_safetensors_header_is_an_error(folder: Path, header: bytes) -> None:
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=f"{WEIGHTS} is damaged"):
        of(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", f"{WEIGHTS}.index.json"])
def test_a_json_file_of_another_form_is_an_error(folder: Path, name: str) -> None:
    if name.startswith(WEIGHTS):
        (folder / WEIGHTS).unlink()
    for text in ("[]", "[" * 100_000):
        (folder / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            of(folder)


def test_the_folder_of_a_hub_model_is_found_by_any_file_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--acme--embedder"
    folder = kept / "snapshots" / "0a1b"
    folder.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0a1b")
    (folder / "modules.json").write_text("[]")  # its transformer's config.json is in a folder below
    assert snapshot_folder("acme/embedder") is None
    assert snapshot_folder("acme/embedder", file="modules.json") == folder


def save_adapter(place: Path, *, value: float = 1.0, alpha: int = 8) -> Path:
    place.mkdir(exist_ok=True)
    weights = {"q_proj.lora_A.weight": torch.full((2, 4), value)}
    save_file(weights, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": alpha}))
    return place


def test_an_adapter_s_weights_and_its_scale_are_part_of_it_and_its_place_is_not(
    tmp_path: Path,
) -> None:
    first = adapter_fingerprint("2-model", save_adapter(tmp_path / "first"))
    assert first is not None
    assert first.startswith("2-")
    assert adapter_fingerprint("2-model", save_adapter(tmp_path / "same")) == first
    others = [
        adapter_fingerprint("2-other", tmp_path / "first"),
        adapter_fingerprint("2-model", save_adapter(tmp_path / "value", value=2.0)),
        adapter_fingerprint("2-model", save_adapter(tmp_path / "alpha", alpha=16)),
    ]
    assert len({"2-model", first, *others}) == 5
    assert adapter_fingerprint("2-model", tmp_path / "missing") is None


def test_an_adapter_config_of_another_form_is_an_error(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter")
    for text in ("[]", "[" * 100_000):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"adapter_config\.json is damaged"):
            adapter_fingerprint("2-model", folder)
