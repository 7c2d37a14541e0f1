"""Ranks meet again after a step that failed on one of them, and after a meeting that one of them missed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cachecraft_rag.vllm.worker.ranks import (
    AnotherRankFailedError,
    RanksApartError,
    TensorParallel,
)


class Signal:
    """A signal from one rank to the other."""

    def __init__(self, file: str, name: str) -> None:
        self._store = torch.distributed.FileStore(file, 2)
        self._name = name

    def wait(self) -> None:
        self._store.wait([self._name])

    def set(self) -> None:
        self._store.set(self._name, "")


Scene = Callable[[TensorParallel, Signal], None]


def one_fails_between_acts(ranks: TensorParallel, _signal: Signal) -> None:
    """The first rank notices it at its next meeting, whichever that is."""
    if ranks.rank == 0:
        ranks.act(0)
        for meeting in (lambda: ranks.agree(frozenset()), lambda: ranks.settle({}), ranks.end_step):
            with pytest.raises(AnotherRankFailedError):
                meeting()
    ranks.meet_again()


def one_fails_after_the_last_act(ranks: TensorParallel, _signal: Signal) -> None:
    """The first rank has nothing to exchange any more, and notices it at the end of the step."""
    if ranks.rank == 0:
        with pytest.raises(AnotherRankFailedError):
            ranks.end_step()
    ranks.meet_again()


def one_misses_a_meeting(ranks: TensorParallel, has_lost: Signal) -> None:
    """It arrives once the first rank has waited too long; both have a new group then."""
    if ranks.rank == 1:
        has_lost.wait()
    with pytest.raises(RanksApartError):
        ranks.agree(frozenset())
    if ranks.rank == 0:
        has_lost.set()
    ranks.meet_again()


def rank(number: int, rendezvous: str, scene: Scene) -> None:
    """Play a scene on one rank of two; afterwards the ranks exchange data as ever."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2
    )

    def make_meetings() -> Any:
        return torch.distributed.new_group(
            [0, 1],
            # only a meeting that is to be missed may end by the clock
            timeout=timedelta(seconds=5 if scene is one_misses_a_meeting else 120),
            backend="gloo",
            use_local_synchronization=True,
        )

    group = SimpleNamespace(rank_in_group=number, world_size=2)
    ranks = TensorParallel(group, make_meetings)
    try:
        for name in ("first", "second"):
            scene(ranks, Signal(f"{rendezvous}-signals", name))
            ranks.act(0)
            assert ranks.agree(frozenset({number})) == {0, 1}
            assert ranks.settle({}) == {}
            ranks.end_step()
        torch.distributed.destroy_process_group()  # as vLLM does; otherwise a thread may outlive the lost group
    except BaseException:
        traceback.print_exc()
        raise


@pytest.mark.parametrize(
    "scene", [one_fails_between_acts, one_fails_after_the_last_act, one_misses_a_meeting]
)
def test_ranks_exchange_data_again(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # for the ranks' processes
    # which would run the app that Streamlit's tests leave there
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    torch.multiprocessing.spawn(rank, (str(tmp_path / "rendezvous"), scene), nprocs=2)
