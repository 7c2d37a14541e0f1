"""Tiers in memory, each with a budget in bytes: main memory and, if the model runs on a device, the device's memory."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachecraft_rag.store.eviction import (
    LowestScored,
    Policy,
    Saving,
    Use,
    VariantFacts,
    ticked,
    ticked_by_return,
)
from cachecraft_rag.types.kv_layout import HeadShare
from cachecraft_rag.types.variants import LoadedVariant, TierName, Variant

if TYPE_CHECKING:
    import torch

_LEAST_REMEMBERED = 1000


@dataclass(slots=True)
class _Held:
    """A tensor; `order` increases with each new score."""

    variant: Variant
    kv: torch.Tensor
    nbytes: int
    used: Use
    score: float = 0.0
    order: float = 0.0


class MemoryTier:
    """Tensors in memory, within a budget. If a new one does not fit, those with the lowest eviction score leave.

    Among equal scores, the one that was added or used longest ago leaves. A tensor that has left can be read again from
    a slower tier. A new tensor never leaves at once, because it is about to be used.

    Ctrl-C may interrupt a change between any two lines. The dictionary of tensors is always valid: the heap is only a
    hint, and the sum of bytes is unset during a change, so the next caller computes it again.

    Args:
        budget_bytes: most bytes of all tensors; 0 switches the tier off.
        name: value of `LoadedVariant.tier` for its tensors.
        on_leave: called by `add` with tensors that had to leave for others (Cache-Craft §3.5: demotion to the next
            tier), in its thread and without a lock.
        policy: computes the eviction scores.
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
        # variant id → uses of a tensor that had to leave
        self._departed: OrderedDict[str, Use] = OrderedDict()
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._lowest = LowestScored(self._held)
        self._bytes: int | None = 0  # None during a change
        self._orders = itertools.count()
        self.evicted = 0  # number of tensors that had to leave for others

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors that are held now."""
        with self._lock:
            return self._sum()

    def _sum(self) -> int:
        if self._bytes is None:
            self._bytes = sum(held.nbytes for held in self._held.values())
        return self._bytes

    def __len__(self) -> int:
        """Return the current number of chunk-caches."""
        return len(self._held)

    def __contains__(self, variant: Variant) -> bool:
        """Return True if `read` would return a tensor."""
        held = self._held.get(variant.variant_id)
        return held is not None and held.variant.created == variant.created

    def admits(self, nbytes: int) -> bool:
        """Return True if a tensor of `nbytes` bytes fits the whole budget, were it the only one."""
        return nbytes <= self.budget_bytes

    def add(self, variant: Variant, kv: torch.Tensor) -> bool:
        """Hold `kv` `[layers, 2, tokens, kv_heads, head_dim]`, not a copy; return False if the budget is smaller.

        Others leave if there is no room; these are counted in `evicted` and passed to `on_leave`. An earlier tensor of
        the variant is replaced, uncounted, unless False is returned. The caller must not write to `kv` again.
        """
        held = _Held(variant, kv, kv.nbytes, _uses(variant))
        if not self.admits(held.nbytes):
            return False
        # freed after the lock is released: returning 50 MB to the system takes a while
        leaving: list[_Held] = []
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
        """Return the tensor of this very capture (id and time), not a copy; None if it is not held. Records no use."""
        with self._lock:
            held = self._held.get(variant.variant_id)
        if held is None or held.variant.created != variant.created:
            return None
        return LoadedVariant(variant.variant_id, held.kv, self.name)

    def remove(self, variant_id: str, created: float) -> None:
        """Remove the tensor of this very capture, if held; neither counted in `evicted` nor passed to `on_leave`."""
        with self._lock:
            held = self._held.get(variant_id)
            if held is not None and held.variant.created == created:
                nbytes = self._sum() - held.nbytes
                self._bytes = None
                del self._held[variant_id]
                self._bytes = nbytes

    def record_use(self, variant_id: str, use: Use) -> None:
        """Add a use and compute the tensor's score again, so it stays longer; does nothing if it is not held."""
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
    """Return the uses of a variant from the catalog, whose rows hold f_r but not the saving."""
    return Use(variant.reuse_frequency, min(variant.reuse_frequency, 1.0))


class Memory:
    """The host tier and the device tier above it.

    A tensor that was used from the host is copied to the device for the next use (`promote`); the one with the lowest
    score goes back to the host.

    Attributes:
        host, device: the tiers; without a device, the latter has a budget of 0.
        pinned: True if tensors read for this device should be in page-locked memory.
        share: heads that the tensors have; None: all.
    """

    def __init__(
        self,
        host_bytes: int,
        *,
        device: str | None = None,
        device_bytes: int = 0,
        share: HeadShare | None = None,
    ) -> None:
        """`device`: torch's name of the model's device; None if it runs on the CPU."""
        self.share = share
        self._place = device
        self.pinned = device is not None and device.startswith("cuda")
        self.host = MemoryTier(host_bytes)
        budget = device_bytes if device is not None else 0
        self.device = MemoryTier(budget, name="device", on_leave=self._demote)

    def follow(self, policy: Policy) -> None:
        """Use this policy for eviction scores from now on. The score of a held tensor changes at its next use."""
        self.host.policy = self.device.policy = policy

    def read(self, variant: Variant) -> LoadedVariant | None:
        """Return the tensor of this capture (id and time), not a copy, from device or host, or None. Records no use."""
        return self.device.read(variant) or self.host.read(variant)

    def __contains__(self, variant: Variant) -> bool:
        """Return True if `read` would return a tensor."""
        return variant in self.device or variant in self.host

    def hold(self, variant: Variant, kv: torch.Tensor) -> None:
        """Hold a tensor with all heads in main memory if it fits there: itself, or a copy of the heads of `share`."""
        if self.share is not None:
            from cachecraft_rag.kernels.memory import empty  # it imports torch

            own = kv[..., self.share.of(kv.shape[-2]), :]
            pinned = self.pinned and self.host.admits(own.nbytes)
            kv = empty(tuple(own.shape), own.dtype, pinned=pinned).copy_(own)
        self.host.add(variant, kv)

    def _demote(self, variant: Variant, kv: torch.Tensor) -> None:
        from cachecraft_rag.kernels.memory import to_host  # it imports torch

        self.host.add(variant, to_host(kv, pinned=self.host.admits(kv.nbytes)))

    def promote(self, held: LoadedVariant, variant: Variant) -> None:
        """Copy a tensor of the host tier to the device tier, if any, unless it is there; the host keeps its own."""
        if self.device.budget_bytes and held.tier == "host" and variant not in self.device:
            self.device.add(variant, held.kv.to(self._place))

    def remove(self, variant_id: str, created: float) -> None:
        """Remove the tensor of this very capture from both tiers; does nothing if neither holds it."""
        self.host.remove(variant_id, created)
        self.device.remove(variant_id, created)

    def record_use(self, variant_id: str, use: Use) -> None:
        """Add a use in each tier that holds the tensor, so it stays longer; does nothing if neither does."""
        self.host.record_use(variant_id, use)
        self.device.record_use(variant_id, use)
