"""What the question attends to, layer by layer, until the focused chunks are known (Cache-Craft eq. 15)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings, Ranks
from cachecraft_rag.kernels.attention_mass import attention_mass
from cachecraft_rag.kernels.visibility import Visibility
from cachecraft_rag.planning.early_termination import FocusMonitor


class FocusObserver:
    """Measures how much the question's rows attend to each chunk; an `Observer`.

    Args:
        monitor: adds it up, and says when the focused chunks are known.
        bounds: `[segments + 1]` of the prompt; the first segment is the system's, the last the question's.
        ranks: that run the model.
    """

    def __init__(self, monitor: FocusMonitor, bounds: Sequence[int], device: torch.device, ranks: Ranks) -> None:
        self._monitor, self._ranks = monitor, ranks
        self._positions = torch.arange(bounds[-2], bounds[-1], device=device)
        self._chunks = torch.tensor(bounds[1:-1], device=device)
        self._mass: Tensor | None = None  # [chunks], of the layer seen last
        self._visible: dict[int | None, Visibility] = {}

    def observe(self, layer: int, q: Tensor, k: Tensor, settings: AttentionSettings) -> None:
        """See `Observer.observe`; the question's rows are the last ones."""
        if self._monitor.focused is not None:
            return
        visible = self._visible.setdefault(settings.window, Visibility(self._positions, window=settings.window))
        own = q[-len(self._positions) :]
        mass, _ = attention_mass(own, k, visible, self._chunks, scale=settings.scale, softcap=settings.softcap)
        self._mass = mass.sum(0)

    def decide(self, layer: int) -> bool:
        """Add up what was seen of a layer that has run; returns whether the focused chunks are known just now.

        Apart from `observe`, because ranks see different heads and have to exchange what they saw.
        """
        if self._monitor.focused is not None or self._mass is None:
            return False
        return self._monitor.observe(layer, self._ranks.mean(self._mass).tolist())
