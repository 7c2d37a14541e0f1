"""Tiers in memory, each within a budget of bytes: the host's and, where the model runs on one, the device's."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachecraft_rag.store.eviction import LowestScored, Policy, Saving, Use, VariantFacts, ticked, ticked_by_return
from cachecraft_rag.types import LoadedVariant, TierName, Variant

if TYPE_CHECKING:
    import torch

_LEAST_REMEMBERED = 1000


@dataclass(slots=True)
class _Held:
    """One tensor; `order` grows with each score it gets."""

    variant: Variant
    kv: torch.Tensor
    nbytes: int
    used: Use
    score: float = 0.0
    order: float = 0.0


class MemoryTier:
    """Tensors in memory, within a budget. When a new one does not fit, those with the lowest eviction score leave.

    Among equals the one whose score was not raised for the longest time goes. Leaving costs nothing but a later
    read from farther away. The tensor that has just come is spared: it is about to be used.

    Ctrl-C may end a change between any two lines. The dictionary of tensors is the truth: the heap is a hint, and the
    sum of bytes is void during a change, so the next caller adds it up again.

    Args:
        budget_bytes: of all tensors together; 0 switches the tier off.
        name: what `LoadedVariant.tier` says of its tensors.
        on_leave: gets what had to leave for others (Cache-Craft §3.5: demotion to the next tier).
        policy: makes the eviction scores.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        name: TierName = "host",
        on_leave: Callable[[Variant, torch.Tensor], object] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.name = name
        self._on_leave = on_leave
        self.policy = policy or Saving()
        self._clock = 0.0
        self._departed: OrderedDict[str, Use] = OrderedDict()  # uses of what had to leave, by variant id
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._lowest = LowestScored(self._held)
        self._bytes: int | None = 0  # None during a change
        self._orders = itertools.count()
        self.evicted = 0  # how many had to leave for others so far

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors held now."""
        with self._lock:
            return self._sum()

    def _sum(self) -> int:
        if self._bytes is None:
            self._bytes = sum(held.nbytes for held in self._held.values())
        return self._bytes

    def __len__(self) -> int:
        """Number of chunk-caches held now."""
        return len(self._held)

    def __contains__(self, variant: Variant) -> bool:
        """Return True if `read` would give the tensor now."""
        held = self._held.get(variant.variant_id)
        return held is not None and held.variant.created == variant.created

    def admits(self, nbytes: int) -> bool:
        """Return True if a tensor of that size fits the budget alone."""
        return nbytes <= self.budget_bytes

    def add(self, variant: Variant, kv: torch.Tensor) -> bool:
        """Hold `kv` `[layers, 2, tokens, kv_heads, head_dim]`, not a copy; False when it alone is over the budget.

        An older tensor of the same variant is replaced. The caller must not write to `kv` any more.
        """
        held = _Held(variant, kv, kv.nbytes, _uses(variant))
        if not self.admits(held.nbytes):
            return False
        leaving: list[_Held] = []  # dealt with after the lock is released: returning 50 MB to the system takes a while
        with self._lock:
            nbytes = self._sum() + held.nbytes
            self._bytes = None
            if (old := self._held.pop(variant.variant_id, None)) is not None:
                nbytes -= old.nbytes
                held.used = max(held.used, old.used, key=lambda used: used.frequency)
            elif (known := self._departed.pop(variant.variant_id, None)) is not None:
                held.used += known
                if (lowest := self._lowest.name()) is not None:
                    self._clock = ticked_by_return(self._clock, self._held[lowest].score)
            while nbytes > self.budget_bytes and (lowest := self._lowest.name()) is not None:
                leaving.append(self._leave(lowest))
                nbytes -= leaving[-1].nbytes
            self._held[variant.variant_id] = held
            self._score(variant.variant_id, held)
            self._bytes = nbytes
        if self._on_leave is not None:
            for gone in leaving:
                self._on_leave(gone.variant, gone.kv)
        return True

    def read(self, variant: Variant) -> LoadedVariant | None:
        """Return the tensor itself, not a copy; None if it is not held."""
        with self._lock:
            held = self._held.get(variant.variant_id)
        if held is None or held.variant.created != variant.created:
            return None
        return LoadedVariant(variant.variant_id, held.kv, self.name)

    def remove(self, variant_id: str, created: float) -> None:
        """Remove the tensor of exactly this capture, if it is held."""
        with self._lock:
            held = self._held.get(variant_id)
            if held is not None and held.variant.created == created:
                nbytes = self._sum() - held.nbytes
                self._bytes = None
                del self._held[variant_id]
                self._bytes = nbytes

    def record_use(self, variant_id: str, use: Use) -> None:
        """Add a use, so that the tensor stays longer; nothing happens when it is not held."""
        with self._lock:
            if (held := self._held.get(variant_id)) is not None:
                held.used += use
                self._score(variant_id, held)

    def _score(self, variant_id: str, held: _Held) -> None:
        variant = held.variant
        facts = (variant.key.chunk_id, variant_id, variant.tokens, held.nbytes, variant.exact_share)
        held.score = self.policy.score(VariantFacts(*facts, held.used), self._clock)
        held.order = next(self._orders)
        self._lowest.push(variant_id)

    def _leave(self, variant_id: str) -> _Held:
        held = self._held.pop(variant_id)
        self.evicted += 1
        self._clock = ticked(self._clock, held.score, used=held.used.saved > 0.0)
        self._departed[variant_id] = held.used + Use(0.0, 1.0)
        while len(self._departed) > max(_LEAST_REMEMBERED, len(self._held)):
            self._departed.popitem(last=False)
        return held


def _uses(variant: Variant) -> Use:
    """Uses of a variant from the catalog, whose rows hold f_r but not the saving."""
    return Use(variant.reuse_frequency, min(variant.reuse_frequency, 1.0))


class Memory:
    """The host's tier and the device's above it.

    A tensor used on the host is copied to the device for the next time (`promote`); the lowest-scored goes back.

    Attributes:
        host, device: the tiers; the device's has a budget of 0 if there is no device.
        pinned: tensors read for this device should be in page-locked memory.
    """

    def __init__(self, host_bytes: int, *, device: str | None = None, device_bytes: int = 0) -> None:
        """`device` as torch calls it, where the model runs on one."""
        self._place = device
        self.pinned = device is not None and device.startswith("cuda")
        self.host = MemoryTier(host_bytes)
        budget = device_bytes if device is not None else 0
        self.device = MemoryTier(budget, name="device", on_leave=lambda variant, kv: self.host.add(variant, kv.cpu()))

    def follow(self, policy: Policy) -> None:
        """Make the eviction scores by this policy from now on."""
        self.host.policy = self.device.policy = policy

    def read(self, variant: Variant) -> LoadedVariant | None:
        """The tensor from the nearer tier that has it, or None."""
        return self.device.read(variant) or self.host.read(variant)

    def promote(self, held: LoadedVariant, variant: Variant) -> None:
        """Copy a tensor of the host to the device."""
        if self.device.budget_bytes and held.tier == "host" and variant not in self.device:
            self.device.add(variant, held.kv.to(self._place))

    def remove(self, variant_id: str, created: float) -> None:
        """See `MemoryTier.remove`."""
        self.host.remove(variant_id, created)
        self.device.remove(variant_id, created)

    def record_use(self, variant_id: str, use: Use) -> None:
        """See `MemoryTier.record_use`."""
        self.host.record_use(variant_id, use)
        self.device.record_use(variant_id, use)
