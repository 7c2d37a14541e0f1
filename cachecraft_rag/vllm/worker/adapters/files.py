"""Fingerprints of the model with the LoRA adapters that requests use, from the adapters' files."""

from __future__ import annotations

from pathlib import Path

from cachecraft_rag.model.fingerprint import adapter_fingerprint, snapshot_folder
from cachecraft_rag.vllm.messages import Adapter
from cachecraft_rag.vllm.worker.interfaces import LoRARequest

# (name, bytes, time of the last change in ns) of each file of an adapter
_Stamps = tuple[tuple[str, int, int], ...]


class AdapterFiles:
    """The adapters of one server.

    Args:
        model: fingerprint of the model without an adapter.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._known: dict[Path, tuple[_Stamps, str]] = {}  # by folder

    def of(self, request: LoRARequest) -> Adapter:
        """Return a request's adapter. An adapter's files are read the first time, and again when they have changed.

        Raises OSError and ValueError if its files are missing or damaged.
        """
        folder = _folder(request.lora_path)
        stamps = _stamps(folder)
        known = self._known.get(folder)
        if known is None or known[0] != stamps:
            fingerprint = adapter_fingerprint(self._model, folder)
            if fingerprint is None:
                raise ValueError(
                    f"{folder} holds no adapter_config.json and adapter_model.safetensors"
                )
            known = self._known[folder] = stamps, fingerprint
        return Adapter(request.lora_int_id, known[1])


def _folder(path: str) -> Path:
    """Return the folder that vLLM has loaded an adapter from; `path` may be its name on the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir() or folder.is_absolute():
        return folder
    return snapshot_folder(path, file="adapter_config.json") or folder


def _stamps(folder: Path) -> _Stamps:
    stats = [(file.name, file.stat()) for file in sorted(folder.glob("adapter_*"))]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
