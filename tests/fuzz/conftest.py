"""What the fuzz tests share: seeded mutations of valid samples, and what each item costs in time and memory.

A normal run takes a few items of each kind. `make fuzz` (TESTS_FUZZ=full) takes all, and there alone an item has a
limit of time and the process one of memory: normal tests measure neither, because the machine may be busy.

TESTS_FUZZ       unset: a few items; `full`: as many as the test names; a number: that many
TESTS_FUZZ_SEED  another number gives other items; 0
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ITEM_SECONDS = 2.0  # of the processor, so that a busy machine does not count as a hang
# of the clock, behind which a stack is printed and the run ends: it waits for ever
ITEM_WAIT_SECONDS = 300.0
GROWTH_BYTES = 100 * 10**6
WARM_UP = 200  # items until all libraries are loaded and their caches filled

Mutate = Callable[[random.Random, Sequence[bytes]], bytes]


@dataclass
class Fuzz:
    """One test's run over mutated items.

    folder  where an item that failed is written, for a look at it
    """

    name: str
    folder: Path
    full: bool
    asked: int | None
    seed: int
    slowest: tuple[float, int] = (0.0, -1)
    outcomes: Counter[str] = field(default_factory=Counter)

    def run(
        self,
        samples: Sequence[bytes],
        consume: Callable[[bytes], str],
        *,
        few: int,
        all_of_them: int,
        tokens: Sequence[bytes] = (),
        mutate: Mutate | None = None,
    ) -> None:
        """Mutate samples and have each consumed.

        consume       takes an item and says in a word what became of it; what it raises fails the test
        few           items in a normal run
        all_of_them   items in a full one
        tokens        pieces of the format, to be put in by the default mutation
        mutate        another mutation, for samples that must be made right again (checksums)
        """
        count = self.asked or (all_of_them if self.full else few)
        change = mutate or (lambda rng, given: mutated(rng, given, tokens))
        before = 0
        for number in range(count):
            item = change(random.Random(f"{self.name} {self.seed} {number}"), samples)
            if number == min(WARM_UP, count - 1):
                before = _resident_bytes()
            seconds = self._consume(number, item, consume)
            if seconds > self.slowest[0]:
                self.slowest = (seconds, number)
            # once more: it may have been the garbage collector's turn
            if self.full and seconds > ITEM_SECONDS:
                again = self._consume(number, item, consume)
                assert again <= ITEM_SECONDS, (
                    f"item {number} takes {again:.1f} s: {self._kept(item)}"
                )
        growth = max(_peak_bytes(), _resident_bytes()) - before
        told = ", ".join(f"{number} {word}" for word, number in self.outcomes.most_common())
        print(
            f"\n{self.name}: {count} items ({told}); slowest {self.slowest[0]:.2f} s (item {self.slowest[1]}); "
            f"grown by {growth / 1e6:.0f} MB at most"
        )
        assert not self.full or growth <= GROWTH_BYTES

    def _consume(self, number: int, item: bytes, consume: Callable[[bytes], str]) -> float:
        if self.full:
            faulthandler.dump_traceback_later(ITEM_WAIT_SECONDS, exit=True)
        started = time.process_time()
        try:
            self.outcomes[consume(item)] += 1
        except Exception as error:
            error.add_note(f"{self.name}: item {number} of seed {self.seed}: {self._kept(item)}")
            raise
        finally:
            if self.full:
                faulthandler.cancel_dump_traceback_later()
        return time.process_time() - started

    def _kept(self, item: bytes) -> Path:
        path = self.folder / "item"
        path.write_bytes(item)
        return path


@pytest.fixture
def fuzz(request: pytest.FixtureRequest, tmp_path: Path) -> Fuzz:
    """The harness for one test."""
    wanted = os.environ.get("TESTS_FUZZ", "")
    asked = int(wanted) if wanted.isdigit() else None
    seed = int(os.environ.get("TESTS_FUZZ_SEED", "0"))
    return Fuzz(request.node.name, tmp_path, wanted == "full", asked, seed)


def mutated(rng: random.Random, samples: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """One of the samples after one to eight random changes."""
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 2, 2, 3, 5, 8))):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice((1, 2, 4, 16, 64, 256)))
        match rng.randrange(9):
            case 0:
                data[start:stop] = b""
            case 1:
                data[start:start] = data[start:stop] * rng.choice((1, 2, 8, 32))
            case 2:
                data[start:stop] = rng.randbytes(stop - start)
            case 3 if start < len(data):
                data[start] ^= 1 << rng.randrange(8)
            case 4:
                del data[start:]
            case 5:
                other = rng.choice(samples)
                at = rng.randrange(len(other) + 1)
                data[start:stop] = other[at : at + rng.choice((8, 64, 512))]
            case 6 if tokens:
                # Seldom so many that only a parser of linear time gets through.
                data[start:start] = rng.choice(tokens) * rng.choice(
                    (1, 1, 1, 1, 2, 5, 30, 300, 3000)
                )
            case 7 if tokens:
                data[start:stop] = rng.choice(tokens)
            case 8:
                digits = str(
                    rng.choice((0, -1, 255, 2**31, 2**63, 10**20, rng.randrange(10**6)))
                ).encode()
                data[start:stop] = digits
    return bytes(data)


def _resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes() -> int:
    """The most memory this process has ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
