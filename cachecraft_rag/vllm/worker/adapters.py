"""LoRA adapters of vLLM's layers: none of them is active in our passes.

Before vLLM calls the connector, it has set the adapter of each row of its own step. Our rows belong to other requests,
and those use no adapter, see `refusals.request_refusal`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.lora.layers import LoRAMapping

from cachecraft_rag.vllm.worker.interfaces import CausalLM, LoRAManager


class Adapters:
    """The adapters of a worker's model; it has none if LoRA is off. At first no adapter is active."""

    def __init__(self, model: CausalLM) -> None:
        self._manager: LoRAManager | None = getattr(model, "lora_manager", None)
        if self._manager is None:
            return
        # for as many rows as vLLM's buffers have, because embeddings look their row up
        rows = model.vllm_config.scheduler_config.max_num_batched_tokens
        self._none = LoRAMapping((0,) * rows, (0,), is_prefill=True)
        self._manager.set_adapter_mapping(self._none)

    @contextmanager
    def inactive(self) -> Iterator[None]:
        """Return a context in which layers add no adapter; afterwards those of vLLM's own step are active again."""
        manager = self._manager
        before = None if manager is None else manager._last_mapping
        if manager is None or (before is not None and not any(before.index_mapping)):
            yield
            return
        manager.set_adapter_mapping(self._none)
        try:
            yield
        finally:
            if before is not None:
                manager.set_adapter_mapping(before)
