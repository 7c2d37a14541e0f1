"""Refreshing: each decode step also recomputes the stale tokens that the answer attends to most.

An error in a stale token matters only as far as the answer attends to it, which is known while the answer is decoded.
A step reads all weights for one row, so a few additional rows cost little. Their keys and values overwrite the stale
ones, and later tokens attend to them.
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

# Fraction of the layers before those whose attention is observed: earlier layers choose worse tokens
# (docs/decisions/probe.md).
DEEPER = 0.4

# Factor by which earlier attention fades with each step.
_DECAY = 0.7

# A step observes each third of the deeper layers: observing all of them takes 7 % of a step.
_OBSERVE_EVERY = 3


class AttentionReceived:
    """Attention that each position receives from some rows in the deeper layers; an `Observer`.

    Args:
        watched: positions of the rows whose attention is observed.
        layers: number of layers of the model.
        every: observe each n-th of the deeper layers.
    """

    def __init__(self, watched: range, layers: int, *, every: int = 1) -> None:
        self.watched = watched
        self._layers = range(int(DEEPER * layers), layers, every)
        self._received: Tensor | None = None

    def observe(
        self, layer: int, q: Tensor, k: Tensor, visible: Visibility, settings: AttentionSettings
    ) -> None:
        """Add the attention of one of the deeper layers to the sum; does nothing for other layers.

        Deeper layers are those from two fifths of the layers on, with `every` only each n-th of them. `q` is
        `[watched rows, heads, head_dim]` and `k` `[keys, kv_heads, head_dim]`, both rotated; see `Observer.observe`.
        Raises ValueError for a wrong number of sinks, ValueError or torch's RuntimeError for other shapes that do not
        fit, and MemoryError or torch's RuntimeError without memory.
        """
        if layer not in self._layers:
            return
        keys = k[: self.watched.stop]  # later keys are not computed yet
        # Bounds of a single segment, made on the device: copying them there would wait for it.
        bounds = torch.arange(0, len(keys) + 1, len(keys), device=q.device)
        _mass, received = attention_mass(
            q,
            keys,
            visible,
            bounds,
            scale=settings.scale,
            softcap=settings.softcap,
            sinks=settings.sinks,
        )
        self._received = received if self._received is None else self._received + received

    def seen(self) -> Tensor:
        """Return the attention to each position up to the last watched position, float32 `[positions]`.

        It is the sum over the observed layers and rows, averaged over heads; a row's own position is left out. The
        tensor is on the model's device and belongs to this object. Raises AssertionError if no layer was observed.
        """
        assert self._received is not None, "the range of layers is never empty"
        return self._received

    def received(self, positions: int) -> NDArray[np.float32]:
        """Return the attention to each of the first `positions` positions, float32 `[positions]`.

        Shorter if fewer positions were seen; otherwise the beginning of `seen`. On a CPU the array shares its memory.
        Raises AssertionError if no layer was observed.
        """
        attention: NDArray[np.float32] = self.seen()[:positions].cpu().numpy()
        return attention


class Refresh:
    """Stale tokens of one prompt, recomputed with the decode steps of its answer.

    Args:
        token_ids: token ids of the prompt.
        stale: bool `[positions]`, the tokens that are neither exact nor computed.
        received: float32 `[positions]`, attention from the prompt's last row.
        rows: largest number of tokens refreshed with a step.
        layers: number of layers of the model.

    Attributes:
        refreshed: number of tokens refreshed so far.
    """

    def __init__(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        stale: NDArray[np.bool_],
        received: NDArray[np.float32],
        *,
        rows: int,
        layers: int,
    ) -> None:
        self.token_ids = np.asarray(token_ids, dtype=np.int64)
        self._stale = stale.copy()
        self._score = received.astype(np.float32)
        self._rows = rows
        self._layers = layers
        self._position = -1
        self._chosen = np.empty(0, np.int64)
        self._observer: AttentionReceived | None = None
        self.refreshed = 0

    def begin(self, position: int) -> tuple[NDArray[np.int64], AttentionReceived]:
        """Return the positions to recompute with the step at `position`, and the observer of that step.

        First the earlier attention fades, and that of the step before is added to it: its observer must have observed a
        pass. Then the stale tokens with the most attention are chosen, at most `rows`. The positions are int64
        `[chosen]`, ascending; empty once no stale token is left. They count in `refreshed` and are not chosen for a
        later step. If a step failed and begins again, it gets the same positions and a new observer. Raises
        AssertionError if a step at another position was begun before and not computed.
        """
        if position != self._position:
            self._add_last_step()
            self._position = position
            self._choose()
        self._observer = AttentionReceived(
            range(position, position + 1), self._layers, every=_OBSERVE_EVERY
        )
        return self._chosen, self._observer

    def _add_last_step(self) -> None:
        """Add the attention of the step before, which has been computed by now."""
        if self._observer is not None:
            self._score = _DECAY * self._score + self._observer.received(len(self._score))

    def _choose(self) -> None:
        """Choose the stale tokens with the highest scores."""
        ranking = np.argsort(np.where(self._stale, -self._score, np.inf), kind="stable")
        best = ranking[: self._rows]
        self._chosen = np.sort(best[self._stale[best]])
        self._stale[self._chosen] = False
        self.refreshed += len(self._chosen)
