"""Tensor-parallel ranks of vLLM: what they agree on goes through its own process group."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import Alone, Ranks

T = TypeVar("T")


class TensorParallel:
    """Several ranks, each with its share of the heads; see `compute.stack.Ranks`. Every call is a collective."""

    def __init__(self, group: Any) -> None:
        self._group = group  # vLLM's GroupCoordinator
        self.rank, self.size = int(group.rank_in_group), int(group.world_size)

    def own_heads(self, kv: Tensor) -> Tensor:
        """See `Ranks.own_heads`."""
        own = kv.shape[-2] // self.size
        return kv[..., self.rank * own : (self.rank + 1) * own, :]

    def gather_heads(self, own: Tensor) -> Tensor:
        """Every rank's `[…, own heads, head_dim]`, joined on the first one; on the others without heads."""
        # Not the group's own `gather`: nothing in vLLM's CPU build uses it, and two ranks hung in it.
        joined: Tensor = self._group.all_gather(own.contiguous(), dim=-2)
        return joined if self.rank == 0 else own[..., :0, :]

    def mean(self, seen: Tensor) -> Tensor:
        """See `Ranks.mean`."""
        total: Tensor = self._group.all_reduce(seen.clone())
        return total / self.size

    def agree(self, lost: frozenset[T]) -> frozenset[T]:
        """See `Ranks.agree`."""
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, lost, group=self._group.cpu_group)
        return frozenset[T]().union(*found)

    def lead(self, decision: T) -> T:
        """See `Ranks.lead`."""
        decided: T = self._group.broadcast_object(decision, src=0)
        return decided


def ranks_of_worker() -> Ranks:
    """The ranks of this worker's tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Alone() if group.world_size == 1 else TensorParallel(group)
