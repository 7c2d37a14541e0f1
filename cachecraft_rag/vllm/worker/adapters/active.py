"""LoRA adapters of vLLM's layers: our passes use those of their own requests.

Before vLLM calls the connector, it has set the adapter of each row of vLLM's step. Our rows belong to other requests.
A pass uses an adapter that vLLM has loaded already: loading another one might take the place of one that the running
step needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from cachecraft_rag.vllm.messages import Adapter
from cachecraft_rag.vllm.worker.interfaces import LoRAManager, LoRAMapping, VLLMModule


class Adapters:
    """The adapters of a worker's model. At first no adapter is active. If LoRA is off, `use` does nothing.

    Attributes:
        most_rows: most rows of a pass with an adapter.
    """

    def __init__(self, model: VLLMModule) -> None:
        self._manager: LoRAManager | None = getattr(model, "lora_manager", None)
        self.most_rows = int(model.vllm_config.scheduler_config.max_num_batched_tokens)
        # id -> weights in vLLM, and the fingerprint with which they were used first
        self._used: dict[int, tuple[weakref.ReferenceType[object], str]] = {}
        # for as many rows as vLLM's buffers have, because embeddings look their row up
        self._none = None if self._manager is None else _mapping(0, self.most_rows)
        if self._manager is not None and self._none is not None:
            self._manager.set_adapter_mapping(self._none)

    @contextmanager
    def inactive(self) -> Iterator[None]:
        """Return a context that begins without an adapter; afterwards those of vLLM's own step are active again."""
        before = None if self._manager is None else self._manager._last_mapping
        self.use(None, 0)
        try:
            yield
        finally:
            if self._manager is not None and before is not None:
                self._manager.set_adapter_mapping(before)

    def use(self, adapter: Adapter | None, rows: int) -> None:
        """Make an adapter active for the next pass, of so many rows, or none, for any number of rows.

        Raises RuntimeError if it cannot be used any more, see `refusal`.
        """
        manager = self._manager
        if manager is None or self._none is None:
            return
        if adapter is None:
            active = manager._last_mapping
            if active is None or any(active.index_mapping):
                manager.set_adapter_mapping(self._none)
            return
        reason = self.refusal(adapter, rows)
        if reason:
            raise RuntimeError(reason)
        manager.set_adapter_mapping(_mapping(adapter.number, rows))

    def refusal(self, adapter: Adapter, rows: int) -> str:
        """Return why a pass of so many rows cannot use an adapter, alike on all ranks; "" if it can.

        It has to be loaded. The first check after that notes its fingerprint, which has to be the same in later ones.
        """
        manager = self._manager
        loaded = None
        if manager is not None and adapter.number in manager.lora_index_to_id:
            loaded = manager.get_adapter(adapter.number)
        if loaded is None:
            return "its LoRA adapter is not loaded yet, or others have its place (--max-loras)"
        if rows > self.most_rows:
            return (
                f"one of its chunks has {rows} tokens, and a pass with a LoRA adapter takes {self.most_rows}: divide "
                "documents into shorter chunks, or raise --max-num-batched-tokens"
            )
        used = self._used.get(adapter.number)
        if used is None or used[0]() is not loaded:
            self._used[adapter.number] = weakref.ref(loaded), adapter.fingerprint
        elif used[1] != adapter.fingerprint:
            return "the files of its LoRA adapter have changed since it was loaded; load them under another name"
        return ""


def _mapping(number: int, rows: int) -> LoRAMapping:
    """Return vLLM's mapping that gives so many rows the same adapter; 0: no adapter. Imports vLLM's layers."""
    from vllm.lora.layers import LoRAMapping as VLLMMapping

    mapping: LoRAMapping = VLLMMapping((number,) * rows, (number,), is_prefill=True)
    return mapping
