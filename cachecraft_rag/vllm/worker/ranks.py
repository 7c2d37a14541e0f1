"""Tensor-parallel ranks of vLLM: they meet before every exchange, and none waits for a rank that has failed.

A step is divided into rounds, and a round into numbered acts, the same on every rank. Each exchange in an act begins
with a meeting, at which every rank tells the number of its act. A rank whose act has raised continues with the next
act. The ranks that are still in the earlier act notice this at the meeting and give that act up, too. Every round ends
with a meeting of all ranks, and so does every step with fillings. This costs one small reduction per round, and no
exception leaves other ranks waiting.

If a step fails as a whole on one rank, the others notice it at their next meeting, give the step up, and all meet again
before the next one (`TensorParallel.meet_again`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import Alone
from cachecraft_rag.types.kv_layout import HeadShare

T = TypeVar("T")

_MEETING_S = 120.0  # time limit of a meeting; vLLM gives its workers 300 s for a step
_END = 1 << 30  # act number of a round's last meeting
_END_OF_STEP = _END + 1
_STEP_FAILED = _END + 2


class AnotherRankFailedError(Exception):
    """Another rank gave up the current act of this rank."""


class RanksApartError(Exception):
    """A rank missed a meeting: no data can be exchanged any more."""


class OneRank(Alone):
    """A single rank with all heads: it has nothing to agree on."""

    rank = 0
    size = 1
    share: HeadShare | None = None  # memory holds all heads

    def act(self, number: int) -> None:
        """Do nothing: there is no other rank to meet."""

    def settle(self, failed: Mapping[str, str]) -> Mapping[str, str]:
        """Return `failed` itself, request → reason."""
        return failed

    def end_step(self) -> None:
        """Do nothing: there is no other rank to meet."""

    def meet_again(self) -> None:
        """Do nothing: there is no other rank to meet."""


class TensorParallel:
    """Several ranks, each with its share of the heads; see `compute.stack.Ranks`.

    Every method except `own_heads` and `act` is a collective. Each raises AnotherRankFailedError if another rank has
    given up the same act or step, and RanksApartError if a rank missed the meeting.

    Args:
        group: vLLM's GroupCoordinator.
        make_meetings: returns a new process group of the same ranks on CPUs, with a time limit; used for nothing else.
            All ranks call it together.
    """

    def __init__(self, group: Any, make_meetings: Callable[[], Any]) -> None:
        self._group = group
        self._make_meetings = make_meetings
        self._meetings = make_meetings()
        self._is_lost = False  # True after a missed meeting: the group cannot be used any more
        self.rank = int(group.rank_in_group)
        self.size = int(group.world_size)
        self.share = HeadShare(self.rank, self.size)
        self._act = 0

    def act(self, number: int) -> None:
        """Begin an act of this rank; numbers ascend in a round. Does not wait for other ranks, and raises nothing."""
        self._act = number

    def settle(self, failed: Mapping[str, str]) -> Mapping[str, str]:
        """End a round; return the failures of all ranks: request → the first reason that a rank gives for it.

        `failed` are those of this rank. A reason is "" if the request failed because of another rank.
        """
        self._act = _END
        if not self._meet(len(failed)):
            return {}
        everywhere: dict[str, str] = {}
        for reasons in self._gathered(dict(failed)):
            everywhere |= {name: everywhere.get(name) or reason for name, reason in reasons.items()}
        return everywhere

    def end_step(self) -> None:
        """End a step in which all ranks had something to do; AnotherRankFailedError if it failed on another rank."""
        self._act = _END_OF_STEP
        self._meet()

    def meet_again(self) -> None:
        """Meet after a step that failed as a whole on this rank or another one, after a lost meeting in a new group.

        RanksApartError if a rank does not arrive in time: then no collective may be called any more.
        """
        if not self._is_lost:
            self._act = _STEP_FAILED
            with suppress(RanksApartError):
                self._meet()
                return
        try:
            # The lost group is not destroyed: torch would give the new one its name, and with it its old addresses.
            self._meetings = self._make_meetings()
        except RuntimeError as error:
            raise RanksApartError(f"the ranks did not find each other again: {error}") from error
        self._is_lost = False
        self._act = _STEP_FAILED
        self._meet()

    def own_heads(self, kv: Tensor) -> Tensor:
        """Return this rank's heads of `kv` `[…, tokens, all kv_heads, head_dim]` as a view, in the ranks' order."""
        return kv[..., self.share.of(kv.shape[-2]), :]

    def gather_heads(self, own: Tensor) -> Tensor:
        """Return `[…, heads of all ranks, head_dim]` on the first rank, and `[…, 0, head_dim]` on the others.

        The heads are in the order of the ranks. `own` is `[…, own heads, head_dim]`.
        """
        own = own.contiguous()
        self._meet()
        # Not the group's own `gather`: nothing in vLLM's CPU build uses it, and two ranks hung in it.
        joined: Tensor = self._group.all_gather(own, dim=-2)
        return joined if self.rank == 0 else own[..., :0, :]

    def mean(self, seen: Tensor) -> Tensor:
        """Return a statistic of this rank's heads, of any shape, averaged over the ranks; equal on all of them."""
        seen = seen.clone()
        self._meet()
        total: Tensor = self._group.all_reduce(seen)
        return total / self.size

    def agree(self, lost: frozenset[T]) -> frozenset[T]:
        """Return the union of what all ranks have lost, such as ids of chunk-caches that could not be read."""
        return frozenset[T]().union(*self._gathered(lost)) if self._meet(len(lost)) else lost

    def least(self, own: int) -> int:
        """Return the smallest number of all ranks: one meeting, which brings it along."""
        return -self._meet(-own)

    def lead(self, decision: T) -> T:
        """Return the first rank's decision on every rank: what depends on clocks would differ from rank to rank."""
        self._meet()
        return self._gathered(decision)[0]

    def _meet(self, own: int = 0) -> int:
        """Wait for the others at the same place of the same act; returns the greatest `own` of all ranks."""
        while True:
            place = torch.tensor([self._act, -self._act, own])
            try:
                torch.distributed.all_reduce(
                    place, torch.distributed.ReduceOp.MAX, group=self._meetings
                )
            # how torch.distributed says that one is gone, or too late
            except RuntimeError as error:
                self._is_lost = True
                raise RanksApartError(f"the ranks lost each other: {error}") from error
            furthest = int(place[0])
            last = -int(place[1])
            if furthest == last:
                return int(place[2])
            if self._act < furthest:
                raise AnotherRankFailedError("it failed on another rank, whose log says why")

    def _gathered(self, own: T) -> list[T]:
        gathered: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(gathered, own, group=self._meetings)
        except RuntimeError as error:  # as in `_meet`
            self._is_lost = True
            raise RanksApartError(f"the ranks lost each other: {error}") from error
        return gathered


def ranks_of_worker() -> OneRank | TensorParallel:
    """Return the ranks of this worker's tensor-parallel group: `OneRank` if it is the only one.

    Every rank has to call this, inside a vLLM worker: they make a process group together.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return OneRank()

    def make_meetings() -> Any:
        return torch.distributed.new_group(
            group.ranks,
            timeout=timedelta(seconds=_MEETING_S),
            backend="gloo",
            use_local_synchronization=True,
        )

    return TensorParallel(group, make_meetings)
