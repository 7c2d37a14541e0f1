"""The fingerprint of a model: equal wherever the same checkpoint is used in the same dtype, whatever runs it.

It is made of the checkpoint's files and not of the loaded model: an engine that fuses or packs weights, or another
version of transformers, has other tensors in memory and yet computes the same keys and values. Weights are digested
tensor by tensor, so that a checkpoint that was sharded again is the same checkpoint. Reading all weights takes a
moment per gigabyte; digests are kept in the user's cache folder by path, size and time of change.

A fingerprint begins with the version of this rule (`IDENTITY_VERSION`), so that an older one is recognised.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from cachecraft_rag.model.demo_model import cache_folder
from cachecraft_rag.store.small_file import replace_file
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.versions import IDENTITY_VERSION, LAYOUT_VERSION

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Keys of a config that differ between saves and change no number; the dtype in use is digested separately.
_VOLATILE = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
)
# of a tokenizer: changes with every call and shapes no token
_CALL_STATE = frozenset({"padding", "truncation"})
_TOKENIZER_FILES = (  # of a tokenizer without tokenizer.json
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "tekken.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_PIECE = 8 << 20
_LONGEST_HEADER = 100 << 20  # what the safetensors library accepts
# a file changed later than this ago may change again without its time showing it
_SETTLED_NS = 2_000_000_000


def checkpoint_fingerprint(folder: Path, *, dtype: str) -> str | None:
    """Return the fingerprint of the checkpoint in `folder` used in `dtype` ("float32", "bfloat16", "float16").

    It is text such as "2-5f0c…", equal for equal weights, config, tokenizer and dtype, wherever the files are. Digests
    of weight files that have not changed for two seconds are kept in the user's cache folder. None without a
    config.json or weights of a known kind; ValueError for a file that is truncated, or not valid JSON or safetensors,
    and OSError for one that cannot be read.
    """
    files = _weight_files(folder)
    if not files or not (folder / "config.json").is_file():
        return None
    tensors: dict[str, str] = {}
    for file in files:
        tensors |= _digests(file)
    return _fingerprint(
        "checkpoint",
        weights=tensors,
        config=checkpoint_config(folder),
        tokenizer=_tokenizer(folder),
        dtype=dtype,
    )


def adapter_fingerprint(model: str, folder: Path) -> str | None:
    """Return the fingerprint of a model with the LoRA adapter in `folder`; `model` is the fingerprint without it.

    It is equal for equal weights and an equal adapter_config.json, which has the rank and the scale. Form, kept
    digests, ValueError and OSError are as in `checkpoint_fingerprint`. None without that file or weights.
    """
    config = folder / "adapter_config.json"
    files = sorted([*folder.glob("adapter_model*.safetensors"), *folder.glob("adapter_model*.bin")])
    if not files or not config.is_file():
        return None
    tensors: dict[str, str] = {}
    for file in files:
        tensors |= _digests(file)
    parts = [json.dumps(part, sort_keys=True) for part in (tensors, _json_object(config))]
    version, _, base = model.partition("-")
    return f"{version}-{digest('adapter', base, *parts)}"


def checkpoint_config(folder: Path) -> dict[str, object]:
    """Return `folder`'s config.json without names, versions and dtype; OSError without it, ValueError if damaged."""
    return _without(_json_object(folder / "config.json"), _VOLATILE)


def model_fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fingerprint of a Hugging Face model that is given as an object, from digests of its tensors.

    It never equals that of a checkpoint: a loaded model may hold other tensors than its files. No digest is kept.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        state = xxhash.xxh3_128()
        _update_by_tensor(state, tensor)
        tensors[name] = state.hexdigest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = (
        tokenizer.get_vocab()
        if backend is None
        else _without(json.loads(backend.to_str()), _CALL_STATE)
    )
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = _without(model.config.to_dict(), _VOLATILE)
    return _fingerprint("model", weights=tensors, config=config, tokenizer=words, dtype=dtype)


def _update_by_tensor(state: Any, tensor: torch.Tensor) -> None:
    """Feed dtype, shape and bytes of a tensor to a digest; of a quantised tensor, its class and its parts."""
    import torch

    state.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    if hasattr(tensor, "__tensor_flatten__"):
        parts, _context = tensor.__tensor_flatten__()
        for part in parts:
            state.update(f"{type(tensor).__name__}.{part}\n".encode())
            _update_by_tensor(state, getattr(tensor, part))
        return
    state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def snapshot_folder(
    source: str, *, revision: str | None = None, file: str = "config.json"
) -> Path | None:
    """Return the folder with a model's files: `source` if it is a folder, or the hub's cache if that has `file`.

    None if it has not; the network is never used. `file` is a name without a folder. `revision` None is the main
    branch. ValueError if `source` is neither a folder nor a hub's name.
    """
    if os.path.isdir(source):
        return Path(source)
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source, file, revision=revision)
    return Path(path).parent if isinstance(path, str) else None


def _fingerprint(
    kind: str, *, weights: Mapping[str, str], config: object, tokenizer: object, dtype: str
) -> str:
    parts = [json.dumps(part, sort_keys=True, default=str) for part in (weights, config, tokenizer)]
    return f"{IDENTITY_VERSION}-{digest(kind, str(IDENTITY_VERSION), str(LAYOUT_VERSION), *parts, dtype)}"


def _without(settings: Mapping[str, object], left_out: Iterable[str]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name not in left_out}


def _weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that hold its weights, chosen as transformers does.

    A repository may hold the same weights twice, as `consolidated.safetensors` for instance.
    """
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (whole := folder / f"{stem}.{suffix}").is_file():
            return [whole]
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            weight_map = _json_object(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index} is damaged: it has no weight_map")
            return sorted({folder / str(name) for name in weight_map.values()})
    for pattern in ("*.safetensors", "pytorch_model*.bin", "*.gguf"):
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def _tokenizer(folder: Path) -> Mapping[str, object]:
    if (whole := folder / "tokenizer.json").is_file():
        return _without(_json_object(whole), _CALL_STATE)
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    return {file.name: xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in files}


def _json_object(path: Path, text: bytes | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or in this part of it; ValueError if it holds none."""
    try:
        value = json.loads(path.read_bytes() if text is None else text)
    except RecursionError as error:
        raise ValueError(f"{path} is damaged: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value


def _digests(file: Path) -> dict[str, str]:
    """The digest of each tensor of a weight file, by name; from the user's cache where the file has not changed."""
    path = file.resolve()  # in the hub's cache files are links
    before = path.stat()
    stamp = {"path": str(path), "size": before.st_size, "mtime_ns": before.st_mtime_ns}
    kept = cache_folder() / "fingerprints" / f"{digest('weights', str(path))}.json"
    # none, or damaged: read again
    with contextlib.suppress(
        OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError
    ):
        entry = json.loads(kept.read_text(encoding="utf-8"))
        tensors: dict[str, str] = {
            str(name): str(value) for name, value in entry["tensors"].items()
        }
        if tensors and entry["stamp"] == stamp and entry["check"] == _check(stamp, tensors):
            return tensors
    # By the name in the checkpoint: in the hub's cache it is a link to a file with a meaningless name.
    tensors = (
        _read_safetensors(path) if file.suffix == ".safetensors" else {file.name: _whole(path)}
    )
    after = path.stat()
    unchanged = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if unchanged and time.time_ns() - after.st_mtime_ns > _SETTLED_NS:
        entry = {"stamp": stamp, "tensors": tensors, "check": _check(stamp, tensors)}
        # a cache that cannot be written costs the next start a moment
        with contextlib.suppress(OSError):
            replace_file(kept, json.dumps(entry).encode())
    return tensors


def _check(stamp: Mapping[str, object], tensors: Mapping[str, str]) -> str:
    return digest(json.dumps([stamp, tensors], sort_keys=True))


def _read_safetensors(path: Path) -> dict[str, str]:
    """Return digests of dtype, shape and bytes of each tensor; ValueError where the file is no safetensors file.

    Read and not mapped: a file that is truncated meanwhile would end the process.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path} is damaged: its header is too long")
        entries = _json_object(path, file.read(length))
        entries.pop("__metadata__", None)
        digests = {}
        for name, entry in entries.items():
            try:
                begin, end = map(int, entry["data_offsets"])
                state = xxhash.xxh3_128(f"{entry['dtype']} {entry['shape']}\n".encode())
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is damaged: where is the tensor {name}?") from error
            file.seek(8 + length + max(begin, 0))
            if _update(state, file, end - begin) != end - begin:
                raise ValueError(f"{path} is truncated: it ends in the tensor {name}")
            digests[name] = state.hexdigest()
    return digests


def _whole(path: Path) -> str:
    """The digest of a whole file, for formats whose tensors are not read one by one."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        _update(state, file, path.stat().st_size)
    return state.hexdigest()


def _update(state: xxhash.xxh3_128, file: BinaryIO, nbytes: int) -> int:
    """Feed the next `nbytes` of a file to a digest; returns how many there were."""
    done = 0
    while done < nbytes and (piece := file.read(min(_PIECE, nbytes - done))):
        state.update(piece)
        done += len(piece)
    return done
