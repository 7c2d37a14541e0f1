"""Fingerprints of the model with the LoRA adapters that requests use, from the adapters' files."""

from __future__ import annotations

from pathlib import Path

from cachecraft_rag.model.fingerprint import adapter_fingerprint, snapshot_folder
from cachecraft_rag.vllm.messages import Adapter
from cachecraft_rag.vllm.worker.interfaces import LoRARequest


class AdapterFiles:
    """The adapters of one server.

    Args:
        model: fingerprint of the model without an adapter.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def of(self, request: LoRARequest) -> Adapter:
        """Return a request's adapter. An adapter's files are read the first time, which takes a moment per gigabyte.

        Raises OSError and ValueError if its files are missing or damaged.
        """
        path = Path(request.lora_path).expanduser()
        folder: Path | None = path
        if not path.is_dir() and not path.is_absolute():  # a name on the hub, which vLLM has loaded
            folder = snapshot_folder(request.lora_path, file="adapter_config.json")
        fingerprint = None if folder is None else adapter_fingerprint(self._model, folder)
        if fingerprint is None:
            raise ValueError(f"{path} holds no adapter_config.json and adapter_model.safetensors")
        return Adapter(request.lora_int_id, fingerprint)
