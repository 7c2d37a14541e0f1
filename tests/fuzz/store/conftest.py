"""A tiny engine to be lied to, and what watches it: the processor's time per item, and memory."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cachecraft_rag.engine.engine import Engine, ScoredAnswer
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.types.documents import Chunk

_WANTED = os.environ.get("TESTS_FUZZ", "")
FULL = _WANTED == "full"  # there alone an item has a limit of time, and the process one of memory
COUNT = 10_000 if FULL else int(_WANTED or "60")
CHUNKS = [
    Chunk("Empty the kettle before you descale it. "),
    Chunk("The crumb tray is on the left. "),
]
QUESTION = "How?"
MOST_CPU_S, MOST_GROWTH = 2.0, 100 << 20


class Watch:
    """Measures each item; the processor's time, because the machine may be busy with something else."""

    def __init__(self) -> None:
        self.slowest = (0.0, "")
        self.growth = 0
        self.items = 0
        self._base = 0

    @contextmanager
    def item(self, what: object) -> Iterator[None]:
        started = time.process_time()
        yield
        took = time.process_time() - started
        self.items += 1
        if self.items == 20:  # what libraries allocate once is there
            self._base = resident()
        grown = resident() - self._base if self._base else 0
        self.slowest, self.growth = max(self.slowest, (took, str(what))), max(self.growth, grown)
        assert not FULL or took < MOST_CPU_S, what
        assert not FULL or grown < MOST_GROWTH, what

    def __str__(self) -> str:
        slowest, what = self.slowest
        return f"{self.items} items, slowest {slowest:.2f} s {what}, memory +{self.growth / 1e6:.0f} MB"


def resident() -> int:
    """Bytes of memory this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Judge:
    """Asks, and compares what claims to be exact with full prefill."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.right = self._ask(ReuseConfig(reuse=False, capture=False))
        self.outcomes: dict[str, int] = {}

    def _ask(self, config: ReuseConfig, *, turned: bool = False) -> ScoredAnswer:
        chunks = CHUNKS[::-1] if turned else CHUNKS
        return self.engine.score_answer(QUESTION, chunks, max_new_tokens=2, config=config)

    def ask(self, what: object, *, compare: bool) -> ScoredAnswer:
        """An answer after the chunks as they were captured; `compare`: nothing in it may be a lie."""
        answer = self._ask(ReuseConfig(capture=False, method=ReuseMethod(loading="layerwise")))
        outcomes = [chunk.outcome for chunk in answer.stats.chunks]
        for outcome in outcomes:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if compare and set(outcomes) <= {"exact", "computed"}:
            found = (what, answer.stats.chunks)
            assert answer.tokens == self.right.tokens, found
            assert torch.allclose(answer.logits, self.right.logits, atol=1e-3), found
        return answer

    def turned(self) -> None:
        """The chunks the other way round: moved and partly recomputed, so token scores are used."""
        self._ask(
            ReuseConfig(capture=False, method=ReuseMethod(loading="layerwise", alpha=0.5)),
            turned=True,
        )


@dataclass(frozen=True)
class Fuzz:
    """Helpers of the fuzz tests, as a fixture: pytest's importlib mode lets no test import a module beside it."""

    count: int = COUNT
    chunks: tuple[Chunk, ...] = tuple(CHUNKS)
    question: str = QUESTION

    def watch(self) -> Watch:
        return Watch()

    def judge(self, engine: Engine) -> Judge:
        return Judge(engine)


@pytest.fixture
def fuzz(fuzz_decoder: Decoder) -> Iterator[Fuzz]:
    gc.collect()
    gc.freeze()  # looking through all that libraries hold takes a second, in the middle of any item
    yield Fuzz()
    gc.unfreeze()


@pytest.fixture
def fuzz_decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder(
        "Llama", num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2
    )
