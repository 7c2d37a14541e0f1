"""Attention from the question to each chunk by layer, until the focused chunks are known (Cache-Craft eq. 15)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings, Ranks
from cachecraft_rag.kernels.attention_mass import segment_mass
from cachecraft_rag.kernels.visibility import Visibility
from cachecraft_rag.planning.early_termination import FocusMonitor


class FocusObserver:
    """Attention from the question's rows to each chunk; an `Observer`.

    Args:
        monitor: adds the attention up and decides when the focused chunks are known.
        bounds: `[segments + 1]`, segment bounds of the prompt; the first segment is the system's, the last the
            question's.
        question: positions of the question's own text.
        ranks: the tensor-parallel ranks that run the model.
    """

    def __init__(
        self,
        monitor: FocusMonitor,
        bounds: Sequence[int],
        question: range,
        *,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self.monitor = monitor
        self._ranks = ranks
        self.watched = question
        self._chunks = torch.tensor(bounds[1:-1], device=device)
        self._mass: Tensor | None = None  # [chunks], in the layer observed last

    def observe(
        self, layer: int, q: Tensor, k: Tensor, visible: Visibility, settings: AttentionSettings
    ) -> None:
        """Keep the question's attention in one layer for `decide`, in place of an earlier layer's."""
        if self.monitor.focused is None and len(q):
            mass = segment_mass(
                q,
                k,
                visible,
                self._chunks,
                scale=settings.scale,
                softcap=settings.softcap,
                sinks=settings.sinks,
            )
            self._mass = mass.sum(0)

    def decide(self, layer: int) -> bool:
        """Add the last observed attention; True, once, if it settles the focus. Every rank calls this after a layer."""
        if self.monitor.focused is not None or self._mass is None:
            return False
        return self.monitor.observe(layer, self._ranks.mean(self._mass).tolist())
