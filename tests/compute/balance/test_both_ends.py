"""Time of both ends on a simulated machine: the decisions are the engine's own, costs and clock are made up."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cachecraft_rag.compute import overlapped
from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.overlapped import Forward, OverlappedPrefill, Wait
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.store.loading import pending, rate
from cachecraft_rag.store.loading.pending import Extent, PendingLoads
from cachecraft_rag.store.loading.rate import Meter

LAYERS, CHUNKS, QUESTION = 30, 4, 31
KEYS_PER_ROW = 3072.0  # of the demo model
PIECE = 64 << 10  # bytes; readers have their turns in such pieces, as with a throttle


@dataclass
class Machine:
    """A computer with the demo model: a pass takes `fixed_s` and `row_s` for each row, a token loads at `rate`.

    rate  in multiples of the rate at which a full prefill computes keys and values
    """

    tokens: int
    rate: float
    fixed_s: float
    row_s: float
    token_bytes: int
    now: float = 0.0
    events: list[tuple[float, int, Any]] = field(default_factory=list)
    due: float = 0.0

    @property
    def prompt(self) -> int:
        return self.tokens + QUESTION

    def pass_s(self, positions: NDArray[np.int64]) -> float:
        return self.fixed_s + (len(positions) + positions.sum() / KEYS_PER_ROW) * self.row_s

    @property
    def full_s(self) -> float:
        return self.pass_s(np.arange(self.prompt))

    @property
    def question_s(self) -> float:
        return self.pass_s(np.arange(self.tokens, self.prompt))

    @property
    def bytes_per_s(self) -> float:
        return self.rate * self.token_bytes * self.prompt / self.full_s

    @property
    def load_s(self) -> float:
        return self.tokens * self.token_bytes / self.bytes_per_s

    @property
    def best_split_s(self) -> float:
        """Both ends at their full speed from the first moment on, and then the question."""
        front_s = self.full_s - self.question_s
        return front_s * self.load_s / (front_s + self.load_s) + self.question_s

    def speed(self) -> ComputeSpeed:
        """As known from earlier requests."""
        speed = ComputeSpeed(KEYS_PER_ROW)
        speed.stepped(self.fixed_s / 2)
        for positions in (np.arange(self.prompt), np.arange(self.tokens, self.prompt)):
            whole = len(positions) == self.prompt
            speed.measured(
                speed.rows(positions), self.pass_s(positions), kind="whole" if whole else "last"
            )
        return speed

    def took(self, decoder: Decoder, *, known: bool) -> float:
        """Seconds of a prefill; `known`: how fast this disk is."""
        chunk = self.tokens // CHUNKS
        bounds = [0, *range(chunk, self.tokens + 1, chunk), self.prompt]
        kv = torch.zeros(decoder.layout.shape(chunk))
        extents = []
        for start in bounds[:CHUNKS]:
            stored = SimpleNamespace(
                own=lambda layer, first, last: kv[layer, :, first:last],
                token_bytes=self.token_bytes,
                sequential=False,
                close=lambda: None,
            )
            pieces = range(0, chunk, 64)
            extents += [
                Extent(cast(StoredVariant, stored), start, first, first + 64) for first in pieces
            ]
        loads = PendingLoads(LAYERS, extents, Meter(self.bytes_per_s if known else None))
        job = PrefillJob([1] * self.prompt, Rows.of(bounds, new=range(self.tokens, self.prompt)))
        for _ in range(2):
            self.read(loads)
        steps = OverlappedPrefill(decoder, job, loads, self.speed()).steps()
        came: bool | None = None
        while True:
            try:
                step = steps.send(cast(bool, came))
            except StopIteration:
                return self.now
            came = self.waited(step) if isinstance(step, Wait) else self.computed(step)

    def read(self, loads: PendingLoads) -> None:
        """A reader begins its next read."""
        if (job := loads._next()) is None:
            return
        nbytes = (
            job.extents[0].stored.token_bytes
            * (job.extents[-1].last - job.extents[0].first)
            / LAYERS
        )

        def ended() -> None:
            loads.meter.end(nbytes, came=True)
            loads._note(job, None, job.own)
            self.read(loads)

        loads.meter.begin(nbytes)
        self.piece(nbytes, ended)

    def piece(self, left: float, ended: Callable[[], None]) -> None:
        if left <= 0.0:
            ended()
            return
        self.due = max(self.due, self.now) + min(left, PIECE) / self.bytes_per_s
        heapq.heappush(
            self.events, (self.due, len(self.events), lambda: self.piece(left - PIECE, ended))
        )

    def until(self, moment: float, ready: Callable[[], bool] = lambda: False) -> bool:
        while not (came := ready()) and self.events and self.events[0][0] <= moment:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
        self.now = self.now if came else moment
        return came

    def waited(self, step: Wait) -> bool:
        return self.until(
            self.now + (1e9 if step.timeout_s is None else step.timeout_s), step.ready
        )

    def computed(self, step: Forward) -> None:
        self.until(self.now + self.pass_s(step.row_pass.positions) / LAYERS)
        step.row_pass.layer += 1


@pytest.mark.parametrize("known", [True, False], ids=["known", "new disk"])
@pytest.mark.parametrize("tokens", [512, 1024, 2048, 4096])
@pytest.mark.parametrize(
    ("fixed_s", "row_s", "token_bytes"), [(0.035, 0.62e-3, 23040), (0.065, 1.18e-3, 46080)]
)
def test_both_ends_are_never_slower_than_the_better_one_and_mostly_near_the_best_split(
    tiny_decoder: Callable[..., Decoder],
    monkeypatch: pytest.MonkeyPatch,
    fixed_s: float,
    row_s: float,
    token_bytes: int,
    tokens: int,
    known: bool,
) -> None:
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    decoder = tiny_decoder("Llama", num_hidden_layers=LAYERS, max_position_embeddings=8192, **small)
    slowdowns = []
    for times in (0.05, 0.125, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0, 16.0):
        machine = Machine(tokens, times, fixed_s, row_s, token_bytes)
        for module in (overlapped, pending, rate):
            monkeypatch.setattr(
                module, "time", SimpleNamespace(perf_counter=lambda one=machine: one.now)
            )
        took = machine.took(decoder, known=known)
        assert took <= 1.03 * min(machine.full_s, machine.load_s + machine.question_s), times
        slowdowns.append(took / machine.best_split_s)
    assert max(slowdowns) <= 1.25
    assert sum(slowdowns) / len(slowdowns) <= (0.97 if known else 1.03)
