"""The host tier: chunk-caches in main memory, within a budget of bytes."""

from __future__ import annotations

import heapq
import itertools
import threading
from dataclasses import dataclass

import torch

from cachecraft_rag.types import LoadedVariant, Unavailable, Variant


@dataclass(slots=True)
class _Held:
    """One tensor. `stamp` is the number of its latest entry in the heap; entries with older stamps are void."""

    created: float
    kv: torch.Tensor
    nbytes: int
    frequency: float
    stamp: int = -1


class HostTier:
    """Tensors in memory, within a budget. When a new one does not fit, those with the lowest reuse frequency leave.

    Among equals the one whose frequency was not raised for the longest time goes. Leaving costs nothing but a later
    read from disk. The tensor that has just come is spared: it is about to be used.
    """

    def __init__(self, budget_bytes: int) -> None:
        """An empty tier that holds at most `budget_bytes` of tensors; 0 switches it off."""
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._used_bytes = 0
        # A heap with void entries instead of a sorted structure: raising a frequency is a push, demotion pops until it
        # finds a valid entry. A scan for the minimum was rejected: it would hold the GIL for a millisecond per 10,000
        # tensors.
        self._heap: list[tuple[float, int, str]] = []
        self._stamps = itertools.count()

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors held now."""
        return self._used_bytes

    def __len__(self) -> int:
        """How many chunk-caches are held now."""
        return len(self._held)

    def __contains__(self, variant: Variant) -> bool:
        """Whether `read` would give the tensor now."""
        held = self._held.get(variant.variant_id)
        return held is not None and held.created == variant.created

    def add(self, variant: Variant, kv: torch.Tensor) -> bool:
        """Hold `kv` `[layers, 2, tokens, kv_heads, head_dim]`, not a copy; False when it alone is over the budget.

        An older tensor of the same variant is replaced. The caller must not write to `kv` any more.
        """
        held = _Held(variant.created, kv, kv.numel() * kv.element_size(), variant.reuse_frequency)
        if held.nbytes > self.budget_bytes:
            return False
        leaving: list[_Held] = []  # freed after the lock is released: returning 50 MB to the system takes a while
        with self._lock:
            if (old := self._held.pop(variant.variant_id, None)) is not None:
                self._used_bytes -= old.nbytes
                held.frequency = max(held.frequency, old.frequency)
                leaving.append(old)
            while self._used_bytes + held.nbytes > self.budget_bytes:
                leaving.append(self._pop_lowest())
            self._held[variant.variant_id] = held
            self._used_bytes += held.nbytes
            self._push(variant.variant_id, held)
        return True

    def read(self, variant: Variant) -> LoadedVariant | Unavailable:
        """The tensor itself, not a copy; see `Tier.read`."""
        with self._lock:
            held = self._held.get(variant.variant_id)
        if held is None or held.created != variant.created:
            return Unavailable(variant.variant_id, "not in host memory")
        return LoadedVariant(variant.variant_id, held.kv, "host")

    def remove(self, variant_id: str, created: float) -> None:
        """See `Tier.remove`."""
        with self._lock:
            held = self._held.get(variant_id)
            if held is not None and held.created == created:
                del self._held[variant_id]
                self._used_bytes -= held.nbytes

    def raise_frequency(self, variant_id: str, gain: float) -> None:
        """f_r += gain, so that the tensor stays longer; nothing happens when it is not held."""
        with self._lock:
            if (held := self._held.get(variant_id)) is not None:
                held.frequency += gain
                self._push(variant_id, held)

    def _push(self, variant_id: str, held: _Held) -> None:
        held.stamp = next(self._stamps)
        heapq.heappush(self._heap, (held.frequency, held.stamp, variant_id))
        if len(self._heap) > 2 * len(self._held) + 64:  # mostly void entries: start afresh, amortised O(1)
            self._heap = [(held.frequency, held.stamp, name) for name, held in self._held.items()]
            heapq.heapify(self._heap)

    def _pop_lowest(self) -> _Held:
        while True:
            _, stamp, variant_id = heapq.heappop(self._heap)
            held = self._held.get(variant_id)
            if held is not None and held.stamp == stamp:
                del self._held[variant_id]
                self._used_bytes -= held.nbytes
                return held
