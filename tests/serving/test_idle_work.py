"""Work in idle time: what begins, what ends early, and what is counted, whichever engine computes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import prometheus_client
import pytest

from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.serving.audits.results import AuditResults
from cachecraft_rag.serving.config import Audits, NewVariants
from cachecraft_rag.serving.idle.work import IdleWork
from cachecraft_rag.serving.new_variants import Captured, Dropped, VariantWork
from cachecraft_rag.serving.request import Request, RequestProgress, SegmentReport
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.vllm.idle.audits import FullPrediction, IdleAudits, PredictedAnswer
from tests.engines import until


def candidate(name: str) -> Candidate:
    segments = (Segment("system", "s", (1, 2)), Segment("chunk", name, (3, 4, 5)))
    return Candidate(segments, {1: 5})


@dataclass
class OneByOne:
    """A runner whose pieces are ended by the test.

    begun         pieces in the order in which they began
    asked_to_end  pieces that were given up
    """

    expected_errors: tuple[type[Exception], ...] = (OSError,)
    begun: list[Candidate] = field(default_factory=list)
    asked_to_end: list[Candidate] = field(default_factory=list)

    def wake(self, work: IdleWork[Candidate, Captured]) -> None:
        if not work.under_way() and (piece := work.next()) is not None:
            self.begun.append(piece)

    def give_up(self, piece: Candidate) -> None:
        self.asked_to_end.append(piece)

    @property
    def names(self) -> list[str]:
        return [piece.segments[-1].segment_id for piece in self.begun]


@pytest.fixture
def runner() -> OneByOne:
    return OneByOne()


@pytest.fixture
def work(runner: OneByOne) -> VariantWork:
    return VariantWork(runner, NewVariants(share=1.0))


def test_a_removal_of_one_tenant_keeps_the_work_of_another(
    work: VariantWork, runner: OneByOne
) -> None:
    for tenant in ("acme", "bolt"):
        work.answered(100, replace(candidate("a"), namespace=tenant))
    work.forget(["a"], "bolt")
    assert (runner.asked_to_end, work.stats.dropped) == ([], {"removed": 1})
    assert (work.running(["a"], "acme"), work.running(["a"], "bolt")) == (True, False)
    work.forget(["a"])
    assert (runner.asked_to_end, work.stats.dropped) == (runner.begun, {"removed": 2})


def test_what_is_given_up_is_counted_at_once_and_only_once(
    work: VariantWork, runner: OneByOne
) -> None:
    for name in ("a", "b"):
        work.answered(100, candidate(name))
    work.forget(["a"])
    assert (work.stats.dropped, work.stats.waiting) == ({"removed": 1}, 1)
    assert work.removed(runner.begun[0]) == {"a"}
    work.forget(["a", "another"])
    work.close()
    assert work.stats.dropped == {"removed": 1, "closed": 1}
    work.finish(runner.begun[0], Captured(dropped=Dropped.REFUSED, refused=1))
    assert (runner.asked_to_end, runner.names) == (runner.begun, ["a"])
    assert (work.stats.dropped, work.busy) == ({"removed": 1, "closed": 1}, False)


def test_a_piece_that_failed_after_it_was_given_up_is_not_counted_as_failed(
    work: VariantWork, runner: OneByOne
) -> None:
    for name in ("a", "b"):
        work.answered(100, candidate(name))
    work.forget(["a"])
    work.finish(runner.begun[0], error=OSError("its file is gone"))
    assert (work.stats.dropped, runner.names) == ({"removed": 1}, ["a", "b"])


def test_a_prompt_that_is_asked_again_while_it_is_captured_begins_once(
    work: VariantWork, runner: OneByOne
) -> None:
    work.answered(100, candidate("a"))
    work.answered(100, candidate("a"))
    work.forget(["another"])
    assert work.removed(runner.begun[0]) == frozenset()
    work.finish(runner.begun[0], Captured(stored=1, tokens=5))
    assert (runner.names, work.stats.waiting, work.busy) == (["a"], 0, False)


def test_a_prompt_that_is_asked_again_after_its_removal_is_captured_again(
    work: VariantWork, runner: OneByOne
) -> None:
    work.answered(100, candidate("a"))
    work.forget(["a"])
    work.answered(100, candidate("a"))
    assert runner.names == ["a"]
    work.finish(runner.begun[0])
    assert (runner.names, work.stats.dropped) == (["a", "a"], {"removed": 1})
    assert work.removed(runner.begun[1]) == frozenset()


def test_settle_returns_at_once_after_close(work: VariantWork, runner: OneByOne) -> None:
    work.answered(100, candidate("a"))
    assert not work.settle(0)
    work.close()
    assert work.settle(0)
    assert work.running(["a"])


@pytest.mark.parametrize(("between", "begins"), [(Dropped.REMOVED, False), (None, True)])
def test_only_a_stored_capture_ends_a_row_of_refusals(
    work: VariantWork, runner: OneByOne, between: Dropped | None, begins: bool
) -> None:
    """After one refusal in a row a capture costs twice its tokens, see `NewVariants.share`."""
    work.answered(100, candidate("a"))
    work.finish(runner.begun[-1], Captured(refused=1, tokens=10, dropped=Dropped.REFUSED))
    work.answered(0, candidate("b"))
    work.finish(runner.begun[-1], Captured(stored=int(between is None), dropped=between))
    work.answered(0, candidate("c"))
    work.finish(runner.begun[-1], Captured(refused=1, tokens=50, dropped=Dropped.REFUSED))
    work.answered(0, candidate("d"))
    assert ("d" in runner.names) is begins


# -- audits in threads ------------------------------------------------------------------------------------------------


@dataclass
class HeldAudits:
    """Audits in a thread; each waits in `predict` for `go_on`, and then raises `error`."""

    audits: IdleAudits
    registry: prometheus_client.CollectorRegistry
    begun: threading.Event
    go_on: threading.Event
    errors: list[BaseException]

    def answered(self) -> None:
        prompt = Prompt((Segment("chunk", "a", (1, 2)), Segment("question", "q", (3,))))
        request = Request(prompt, ReuseConfig(), SamplingParams(), session=None, started=0.0)
        progress = RequestProgress()
        progress.reports = (
            SegmentReport("reused", Reason.FIXED, recomputed=1, variant_id="v", cfo=0.5),
        )
        self.audits.answered(request, progress, PredictedAnswer(), tokens=[4])

    @property
    def dropped(self) -> dict[str, float]:
        name = "cachecraft_audits_dropped_total"
        reasons = ("closed", "failed", "removed")
        counts = {
            reason: self.registry.get_sample_value(name, {"reason": reason}) for reason in reasons
        }
        return {reason: count for reason, count in counts.items() if count}


@pytest.fixture
def held(store: ChunkCacheStore) -> Iterator[HeldAudits]:
    begun = threading.Event()
    go_on = threading.Event()
    errors: list[BaseException] = []

    def predict(_request: Request, _tokens: Sequence[int]) -> FullPrediction:
        begun.set()
        assert go_on.wait(60)
        raise errors.pop()

    registry = prometheus_client.CollectorRegistry()
    results = AuditResults(
        Audits(1.0), store, namespace="default", fingerprint="model", registry=registry
    )
    audits = IdleAudits(results, predict, wait_for_variants=lambda _seconds: None, layers=1)
    yield HeldAudits(audits, registry, begun, go_on, errors)
    go_on.set()
    audits.close()


def test_audits_end_without_a_traceback_where_their_server_ends(
    held: HeldAudits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cachecraft_rag.audits")
    held.errors.append(asyncio.CancelledError())  # as the requests of an event loop that ends
    for _ in range(2):
        held.answered()
    assert held.begun.wait(60)
    held.go_on.set()
    assert held.audits.settle(60)
    assert held.dropped == {"closed": 2}
    (line,) = caplog.records
    assert (line.levelname, line.exc_info) == ("INFO", None)
    assert "the server is ending" in line.getMessage()


def test_an_audit_that_fails_after_close_is_counted_as_closed_and_not_logged(
    held: HeldAudits, caplog: pytest.LogCaptureFixture
) -> None:
    held.errors.append(RuntimeError("vLLM has ended"))
    held.answered()
    assert held.begun.wait(60)
    held.audits.close()
    (piece,) = held.audits.under_way()
    held.go_on.set()
    until(lambda: not held.audits.running([piece.segments[0].segment_id]))
    assert (held.dropped, caplog.records) == ({"closed": 1}, [])
