"""Refreshing: each decode step also recomputes the stale tokens that the answer attends to most.

What is wrong in a stale token matters only as far as the answer looks at it, and that is known while the answer is
decoded. A step reads all weights for one row, so a few rows more cost little. Their keys and values are written over
the stale ones; later tokens see them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.kernels.attention_mass import attention_mass
from cachecraft_rag.kernels.visibility import Visibility

DEEPER = 0.4  # of the layers come before those whose attention is looked at: earlier ones choose worse (docs/log.md)
_DECAY = 0.7  # of what was attended to, with each step
_EVERY = 3  # a step looks at each third of the deeper layers: looking at all of them takes 7 % of a step


class AttentionReceived:
    """Attention that each position receives from some rows in the deeper layers; an `Observer`.

    Args:
        watched: the positions whose rows are observed.
        layers: of the model.
        every: look at each n-th of the deeper layers.
    """

    def __init__(self, watched: range, layers: int, *, every: int = 1) -> None:
        self.watched = watched
        self._layers = range(int(DEEPER * layers), layers, every)
        self._received: Tensor | None = None

    def observe(self, layer: int, q: Tensor, k: Tensor, visible: Visibility, settings: AttentionSettings) -> None:
        """See `row_pass.Observer`."""
        if layer not in self._layers:
            return
        seen = k[: self.watched.stop]  # behind them lies what is not computed yet
        everything = torch.arange(0, len(seen) + 1, len(seen), device=q.device)  # made there: a copy would wait for it
        _, received = attention_mass(q, seen, visible, everything, scale=settings.scale, softcap=settings.softcap)
        self._received = received if self._received is None else self._received + received

    def seen(self) -> Tensor:
        """Attention to each position up to the last watched one, float32 `[positions]`."""
        assert self._received is not None, "the range of layers is never empty"
        return self._received

    def received(self, positions: int) -> NDArray[np.float32]:
        """Attention to each of the first `positions`, float32 `[positions]`."""
        found: NDArray[np.float32] = self.seen()[:positions].cpu().numpy()
        return found


class Refresh:
    """Stale tokens of one prompt, recomputed with the decode steps of its answer.

    Args:
        token_ids: of the prompt.
        stale: bool `[positions]`, the tokens that are neither exact nor computed.
        received: float32 `[positions]`, attention from the prompt's last row.
        rows: tokens refreshed with a step, at most.
        layers: of the model.

    Attributes:
        refreshed: how many have been.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        stale: NDArray[np.bool_],
        received: NDArray[np.float32],
        *,
        rows: int,
        layers: int,
    ) -> None:
        self.token_ids = np.asarray(token_ids, dtype=np.int64)
        self._stale, self._score = stale.copy(), received.astype(np.float32)
        self._rows, self._layers = rows, layers
        self._position = -1
        self._chosen = np.empty(0, np.int64)
        self._seen: AttentionReceived | None = None
        self.refreshed = 0

    def begin(self, position: int) -> tuple[NDArray[np.int64], AttentionReceived]:
        """The positions to recompute with the step at `position`, ascending, and the observer of that step.

        A step that failed is begun again, and gets the same positions.
        """
        if position != self._position:
            if self._seen is not None:  # the step before has been computed
                self._score = _DECAY * self._score + self._seen.received(len(self._score))
            self._position = position
            best = np.argsort(np.where(self._stale, -self._score, np.inf), kind="stable")[: self._rows]
            self._chosen = np.sort(best[self._stale[best]])
            self._stale[self._chosen] = False
            self.refreshed += len(self._chosen)
        self._seen = AttentionReceived(range(position, position + 1), self._layers, every=_EVERY)
        return self._chosen, self._seen
