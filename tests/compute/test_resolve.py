"""From a look-up to a job, and from what came of it to the plan as it went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.captures.capture import CaptureRecorder
from cachecraft_rag.compute.driver import prefill, run
from cachecraft_rag.compute.job import EarlyTermination, PrefillJob, PrefillResult
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.resolve import executed_plan, resolve, rows_of
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import Alone
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.planner import Plan, SegmentPlan, make_plan
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.store.files.disk import DiskTier
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.store.row_checks import LookupResult
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.store_reasons import Unavailable
from cachecraft_rag.types.variants import Variant, VariantKey

MakeDecoder = Callable[..., Decoder]
TOKENS = {"system": 8, "a": 100, "b": 90, "c": 20, "question": 12}
BOUNDS = [0, 8, 108, 198, 218, 230]
CONFIG = ReuseConfig(method=ReuseMethod(selector="cache_craft"))
SYSTEM, BEHIND_A = ("system",), ("system", "a")


def segment(name: str, *, private: bool = False, closing: int = 0) -> Segment:
    kind: Any = name if name in ("system", "question") else "chunk"
    seed = sorted(TOKENS).index(name)
    ids = torch.randint(
        0, 256, (TOKENS[name],), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return Segment(kind, name, tuple(ids), private=private, closing=closing)


def prompt_of(*private: str, closing: int = 0) -> Prompt:
    return Prompt(
        tuple(
            segment(name, private=name in private, closing=closing if name == "question" else 0)
            for name in TOKENS
        )
    )


PROMPT = prompt_of()


@contextmanager
def loading(
    loader: Loader, stored: Sequence[tuple[StoredVariant, int]], unused: Set[int] = frozenset()
) -> Iterator[PendingLoads]:
    loads = loader.begin(stored, unused)
    try:
        yield loads
    finally:
        loader.end(loads)


class Shelf:
    """A store in a folder that can be closed and opened again, after which nothing of it is in memory."""

    def __init__(self, folder: Path, layout: KVLayout, fingerprint: str) -> None:
        self.folder, self.layout, self.fingerprint = folder, layout, fingerprint
        self.store = ChunkCacheStore.open(folder)

    def put(
        self,
        name: str,
        prefix: Sequence[str],
        *,
        exact: bool = True,
        kv: torch.Tensor | None = None,
    ) -> Variant:
        tokens = TOKENS[name]
        kv = torch.randn(self.layout.shape(tokens)) if kv is None else kv
        scores = np.linspace(0.1, 0.9, tokens, dtype=np.float32)
        chunks = max(len(prefix) - 1, 0)
        variant = self.store.put(
            Capture(
                VariantKey("default", self.fingerprint, name, tuple(prefix)),
                self.layout,
                segment(name).tokens_digest,
                kv,
                TokenScores(scores if chunks else None),
                (1.0,) * len(prefix),
                5.0,
                0.6,
                1.0 if exact else 0.5,
            )
        ).result()
        assert isinstance(variant, Variant)
        return variant

    def reopen(self) -> None:
        self.store.close()
        self.store = ChunkCacheStore.open(self.folder)

    def path(self, variant: Variant) -> Path:
        return DiskTier(self.folder / "variants").path(variant.variant_id, variant.created)

    def found(self, prompt: Prompt = PROMPT) -> LookupResult:
        names = [one.segment_id for one in prompt.segments[:-1]]
        return self.store.find("default", self.fingerprint, names)

    def resolve(
        self,
        prompt: Prompt = PROMPT,
        config: ReuseConfig = CONFIG,
        *,
        ranks: Alone | None = None,
        answer: int = 5,
    ) -> PrefillJob:
        found = self.found(prompt)
        return resolve(
            prompt, found, config, store=self.store, ranks=ranks or Alone(), answer_tokens=answer
        )


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path / "caches", KVLayout(2, 1, 4, "float32"), "model")
    yield made
    made.store.close()


def marks(rows: Rows, reason: RowReason) -> list[int]:
    return np.flatnonzero(rows.reason == reason).tolist()


def outcomes(plan: Plan) -> list[str]:
    return [planned.outcome for planned in plan]


# -- from what is stored to a job -------------------------------------------------------------------------------------


def test_with_an_empty_store_everything_is_computed_and_captured(shelf: Shelf) -> None:
    resolved = shelf.resolve()
    assert outcomes(resolved.plan) == ["computed"] * 5
    assert marks(resolved.rows, RowReason.NEW) == list(range(230))
    assert resolved.rows.bounds == tuple(BOUNDS)
    assert list(resolved.token_ids) == PROMPT.token_ids
    assert list(resolved.captures) == [0, 1, 2, 3]
    assert (resolved.resident, resolved.to_load, resolved.tiers) == ([], [], {})
    assert resolved.capacity == 235
    assert resolved.probe is None
    assert resolved.early_termination is None


def test_what_is_in_memory_is_resident_and_the_rest_is_to_be_loaded(shelf: Shelf) -> None:
    system, a = shelf.put("system", ()), shelf.put("a", SYSTEM)
    shelf.reopen()
    b = shelf.put("b", SYSTEM)  # moved after a
    with closing(shelf.resolve()) as resolved:
        assert outcomes(resolved.plan) == ["exact", "exact", "reused", "computed", "computed"]
        assert [(stored.variant.variant_id, start) for stored, start in resolved.to_load] == [
            (system.variant_id, 0),
            (a.variant_id, 8),
        ]
        assert [(one.start, one.kv.shape[2]) for one in resolved.resident] == [(108, 90)]
        assert resolved.tiers == {
            system.variant_id: "disk",
            a.variant_id: "disk",
            b.variant_id: "host",
        }
        # what is to be loaded may have to be computed after all; what is in memory need not be captured again
        assert list(resolved.captures) == [0, 1, 3]
        assert list(resolved.reused) == [2]
        rows, chosen = resolved.rows, resolved.plan[2].recompute
        assert len(chosen)
        assert marks(rows, RowReason.RECOMPUTED) == [108 + offset for offset in chosen]
        assert marks(rows, RowReason.NEW) == list(range(198, 230))
        assert (resolved.drift, resolved.loading) == (
            CONFIG.method.drift,
            CONFIG.method.loading,
        )


def test_rows_are_those_of_the_plan() -> None:
    plan = (
        SegmentPlan("exact"),
        SegmentPlan("reused", recompute=np.array([1, 2])),
        SegmentPlan("computed"),
    )
    # without variants: a variant is what keeps a segment from being computed
    rows = rows_of(plan, [0, 2, 6, 8])
    assert marks(rows, RowReason.NEW) == list(range(8))
    variant: Any = object()
    plan = tuple(replace(one, variant=variant) for one in plan[:2]) + plan[2:]
    rows = rows_of(plan, [0, 2, 6, 8])
    assert (marks(rows, RowReason.RECOMPUTED), marks(rows, RowReason.NEW)) == ([3, 4], [6, 7])


def test_without_reuse_nothing_is_opened_and_without_capture_nothing_kept(shelf: Shelf) -> None:
    shelf.put("system", ())
    shelf.reopen()
    resolved = shelf.resolve(config=replace(CONFIG, reuse=False))
    assert (resolved.to_load, resolved.tiers) == ([], {})
    assert list(resolved.captures) == [0, 1, 2, 3]
    with closing(shelf.resolve(config=replace(CONFIG, capture=False))) as resolved:
        assert len(resolved.to_load) == 1
        assert list(resolved.captures) == []


def plans_of(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many plans are made to resolve the prompt."""
    plans: list[Plan] = []

    def counted(*given: Any, **named: Any) -> Plan:
        plans.append(make_plan(*given, **named))
        return plans[-1]

    monkeypatch.setattr("cachecraft_rag.compute.resolve.make_plan", counted)
    with closing(shelf.resolve()):
        return len(plans)


def test_a_prompt_is_planned_once_if_all_that_it_reuses_can_be_opened(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put("a", SYSTEM)
    shelf.put("b", SYSTEM)
    shelf.reopen()
    assert plans_of(shelf, monkeypatch) == 1


# -- what cannot be opened --------------------------------------------------------------------------------------------


def test_a_prompt_is_planned_again_for_what_could_not_be_opened(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = shelf.put("a", SYSTEM)
    shelf.put("b", SYSTEM)
    shelf.reopen()
    shelf.path(lost).unlink()
    assert plans_of(shelf, monkeypatch) == 2


def test_a_lost_variant_gives_way_to_the_next_best(shelf: Shelf) -> None:
    best, second = shelf.put("a", SYSTEM), shelf.put("a", ("system", "b", "c"))
    shelf.reopen()
    with closing(shelf.resolve()) as resolved:
        assert resolved.plan[1].variant == best
    shelf.path(best).unlink()
    with closing(shelf.resolve()) as resolved:
        planned = resolved.plan[1]
        assert (planned.outcome, planned.variant) == ("reused", second)
        assert len(planned.recompute)
        assert [stored.variant for stored, _ in resolved.to_load] == [second]


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_when_all_variants_are_lost_the_plan_says_why(shelf: Shelf, harm: str) -> None:
    variants = [shelf.put("a", SYSTEM), shelf.put("a", ("system", "b")), shelf.put("b", BEHIND_A)]
    shelf.reopen()
    found = shelf.found()
    for variant in variants[:2]:
        if harm == "missing":
            shelf.path(variant).unlink()
        else:
            content = bytearray(shelf.path(variant).read_bytes())
            content[100] ^= 1
            shelf.path(variant).write_bytes(content)
    resolved = resolve(PROMPT, found, CONFIG, store=shelf.store, ranks=Alone(), answer_tokens=5)
    with closing(resolved):
        planned = resolved.plan[1]
        assert (planned.outcome, planned.variant, planned.reason) == (
            "computed",
            None,
            Reason.NOT_LOADED,
        )
        assert planned.detail
        assert harm == "missing" or "header damaged" in planned.detail
        assert set(range(8, 108)) <= set(marks(resolved.rows, RowReason.NEW))
        # exact after what is computed
        assert [stored.variant for stored, _ in resolved.to_load] == [variants[2]]
    shelf.store.flush()
    assert not shelf.found().variants["a"]  # what proved lost has left the catalog


class Recording(Alone):
    """Agrees with other ranks, which have lost some variants."""

    def __init__(self, *lost_elsewhere: str) -> None:
        self.elsewhere, self.reported = frozenset(lost_elsewhere), list[frozenset[str]]()

    def agree(self, lost: frozenset[str]) -> frozenset[str]:
        self.reported.append(lost)
        return lost | self.elsewhere


def opened_by(store: ChunkCacheStore, monkeypatch: pytest.MonkeyPatch) -> list[StoredVariant]:
    """Variants opened from the store from now on."""
    opened: list[StoredVariant] = []
    own = store.open_variants

    def recording(variants: Sequence[Variant]) -> list[Any]:
        found = own(variants)
        opened.extend(one for one in found if isinstance(one, StoredVariant))
        return found

    monkeypatch.setattr(store, "open_variants", recording)
    return opened


def is_closed(stored: StoredVariant) -> bool:
    try:
        stored.read(0, 0, stored.extents[0][1])
    except OSError:
        return True
    return False


def test_what_another_rank_has_lost_is_lost_here_too(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, second = shelf.put("a", SYSTEM), shelf.put("a", ("system", "b", "c"))
    only = shelf.put("b", BEHIND_A)
    shelf.reopen()
    opened, ranks = opened_by(shelf.store, monkeypatch), Recording(best.variant_id, only.variant_id)
    with closing(shelf.resolve(ranks=ranks)) as resolved:
        assert resolved.plan[1].variant == second
        assert resolved.plan[2].variant is None
        assert resolved.plan[2].detail == "another rank could not open it"
        assert {one.variant.variant_id: is_closed(one) for one in opened} == {
            best.variant_id: True,
            only.variant_id: True,
            second.variant_id: False,
        }
        assert resolved.tiers.keys() == {second.variant_id}
    assert is_closed(opened[-1])
    # asked once for each time that something was opened: all ranks make the same calls
    assert ranks.reported == [frozenset(), frozenset({best.variant_id, only.variant_id})]


def test_ranks_are_told_what_is_lost_here(shelf: Shelf) -> None:
    lost = shelf.put("a", SYSTEM)
    shelf.reopen()
    shelf.path(lost).unlink()
    ranks = Recording()
    shelf.resolve(ranks=ranks)
    assert ranks.reported == [frozenset({lost.variant_id})]


def test_ranks_agree_on_nothing_where_nothing_is_opened(shelf: Shelf) -> None:
    ranks = Recording("anything")
    shelf.resolve(ranks=ranks)
    assert ranks.reported == []


def test_what_was_opened_is_closed_if_resolving_fails(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.put("a", SYSTEM)
    shelf.put("b", SYSTEM)
    shelf.reopen()
    opened = opened_by(shelf.store, monkeypatch)

    class Apart(Alone):
        def agree(self, lost: frozenset[str]) -> frozenset[str]:
            raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError):
        shelf.resolve(ranks=Apart())
    assert [is_closed(one) for one in opened] == [True, True]


# -- what is recomputed in full ---------------------------------------------------------------------------------------


# as prompts of an engine are
PRIVATE = prompt_of("question")


def moved(shelf: Shelf) -> dict[str, Variant]:
    """The system and three chunks, each of the latter captured after others than in the prompt, and none in memory."""
    variants = {"system": shelf.put("system", ())}
    for name in ("a", "b", "c"):
        variants[name] = shelf.put(name, ("system", "d"))
    shelf.reopen()
    return variants


def loaded_names(resolved: PrefillJob) -> list[str]:
    return [stored.variant.key.chunk_id for stored, _ in resolved.to_load]


@pytest.mark.parametrize("selector", ["question", "cache_craft"])
def test_nothing_of_the_last_chunk_is_loaded_if_it_is_recomputed_in_full(
    shelf: Shelf, selector: str
) -> None:
    variants = moved(shelf)
    config = ReuseConfig(nearest_share=0.35, method=ReuseMethod(selector=selector))
    with closing(shelf.resolve(PRIVATE, config)) as resolved:
        last = resolved.plan[3]
        assert (last.in_full, last.recompute.tolist()) == (True, [*range(20)])
        assert loaded_names(resolved) == ["system", "a", "b"]
        assert resolved.unread == {3}
        assert resolved.tiers.keys() == {variants[name].variant_id for name in ("system", "a", "b")}
        # most of its context is approximate, so it is not captured with the request
        assert list(resolved.captures) == [0, 1, 2]
        assert set(range(198, 218)) <= set(marks(resolved.rows, RowReason.RECOMPUTED))
        assert (resolved.probe is not None) == (selector == "question")


def test_nothing_that_is_recomputed_in_full_is_resident(shelf: Shelf) -> None:
    shelf.put("a", ("system", "d"))
    shelf.put("c", ("system", "d"))
    resolved = shelf.resolve(PRIVATE, ReuseConfig(nearest_share=0.35))
    assert [one.start for one in resolved.resident] == [8]
    assert resolved.unread == {3}


@pytest.mark.parametrize("ratio", [1.0, 0.999])
def test_without_a_stale_token_only_exact_chunks_are_loaded_and_nothing_probes(
    shelf: Shelf, ratio: float
) -> None:
    moved(shelf)
    config = ReuseConfig(recompute_ratio=ratio)
    with closing(shelf.resolve(PRIVATE, config)) as resolved:
        assert loaded_names(resolved) == ["system"]
        assert resolved.unread == {1, 2, 3}
        assert resolved.probe is None


def test_a_chunk_that_a_probe_may_spare_is_loaded(shelf: Shelf) -> None:
    variants = moved(shelf)
    scores = {
        variants[name].variant_id: TokenScores(
            np.where(np.arange(TOKENS[name]) < TOKENS[name] // 3, 1.0, 0.0).astype(np.float32)
        )
        for name in ("a", "b")
    }
    scores[variants["c"].variant_id] = TokenScores(np.ones(TOKENS["c"], np.float32))
    config = ReuseConfig(
        recompute_ratio=0.6, nearest_share=0.0, method=ReuseMethod(budget_scope="prompt")
    )
    resolved = resolve(
        PRIVATE,
        shelf.found(),
        config,
        store=shelf.store,
        ranks=Alone(),
        answer_tokens=5,
        scores=scores,
    )
    with closing(resolved):
        assert resolved.plan[3].recomputed_share == 1.0
        assert resolved.probe is not None
        assert loaded_names(resolved) == ["system", "a", "b", "c"]
        assert (resolved.unread, resolved.not_needed) == (frozenset(), frozenset())


def test_a_chunk_that_early_termination_may_stop_is_loaded(shelf: Shelf) -> None:
    moved(shelf)
    config = ReuseConfig(nearest_share=0.35, method=ReuseMethod(early_termination="published"))
    with closing(shelf.resolve(PRIVATE, config)) as resolved:
        assert resolved.plan[3].in_full
        assert loaded_names(resolved) == ["system", "a", "b", "c"]
        assert (resolved.unread, resolved.not_needed) == (frozenset(), frozenset())


@pytest.mark.parametrize("drift", [0.0, 0.4])
def test_stored_values_of_recomputed_tokens_serve_drift_correction_alone(
    shelf: Shelf, drift: float
) -> None:
    moved(shelf)
    config = ReuseConfig(
        recompute_ratio=0.7, nearest_share=0.0, method=ReuseMethod(selector="leading", drift=drift)
    )
    with (
        closing(shelf.resolve(PRIVATE, config)) as resolved,
        loading(Loader(shelf.store, 2), resolved.to_load, resolved.not_needed) as loads,
    ):
        assert loads.wait(loads.is_complete, 60)
        spared = [
            (extent.start + extent.first, extent.start + extent.last)
            for extent in loads.extents
            if not extent.layers
        ]
        # 70 tokens of a and 63 of b: only a has a piece of 64 tokens that is recomputed as a whole
        assert spared == ([] if drift else [(8, 72)])
        assert loads.failed() == []


@pytest.mark.parametrize("selector", ["question", "cache_craft"])
def test_before_a_chunk_that_is_captured_for_everybody_nothing_changes_what_is_recomputed(
    shelf: Shelf, selector: str
) -> None:
    """There neither a probe nor early termination has a say."""
    moved(shelf)
    shelf.store.evict(RowFilter(chunk_ids=("c",)))
    config = ReuseConfig(
        recompute_ratio=1.0, method=ReuseMethod(selector=selector, early_termination="published")
    )
    with closing(shelf.resolve(PRIVATE, config)) as resolved:
        assert resolved.shared_until == 218
        assert resolved.unread == {1, 2}
        assert loaded_names(resolved) == ["system"]


# -- what must not depend on the question -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "private", "capture", "edge"),
    [
        ([], [], True, 218),  # all of them will be served to others
        ([], ["question"], True, 218),
        (["c"], [], True, 198),  # after the last one that is computed, nothing is
        (["system", "a", "b", "c"], [], True, 0),
        (["a", "c"], [], True, 198),
        ([], ["b"], True, 108),  # what is private, and all after it, stays with its session
        ([], ["system"], True, 0),
        (["system", "a"], ["b"], True, 0),
        ([], [], False, 0),
    ],
)
def test_shared_until_is_after_the_last_chunk_that_is_captured_for_everybody(
    shelf: Shelf, stored: Sequence[str], private: Sequence[str], capture: bool, edge: int
) -> None:
    for name in stored:
        shelf.put(name, () if name == "system" else SYSTEM)
    resolved = shelf.resolve(prompt_of("question", *private), replace(CONFIG, capture=capture))
    assert resolved.shared_until == edge


# -- early termination and probes -------------------------------------------------------------------------------------


def test_early_termination_is_for_what_is_recomputed(shelf: Shelf) -> None:
    config = CONFIG.with_method(early_termination="published", early_termination_window=2)
    shelf.put("a", SYSTEM)
    assert shelf.resolve(config=config).early_termination is None
    shelf.put("b", SYSTEM)  # moved after a
    found = shelf.resolve(config=config)
    first, last = found.rows.bounds[-2:]
    assert found.early_termination == EarlyTermination(2, range(first, last))
    assert shelf.resolve().early_termination is None


@pytest.mark.parametrize(
    ("least", "private", "probes"), [(0, True, True), (10_000, True, False), (0, False, False)]
)
def test_a_probe_goes_ahead_of_large_passes_where_it_may_choose(
    shelf: Shelf, least: int, private: bool, probes: bool
) -> None:
    shelf.put("a", SYSTEM)
    shelf.put("b", SYSTEM)
    config = CONFIG.with_method(selector="question", probe_min_rows=least)
    # c is computed: if it is for everybody, the question must not choose before it
    prompt = prompt_of("question", *(["c"] if private else []), closing=4)
    job = shelf.resolve(prompt, config)
    assert (job.shared_until <= 8) == private  # the system segment is new as well
    assert (job.probe is not None) == probes
    if job.probe is not None:
        assert job.probe.question == range(218, 226)


@pytest.mark.parametrize(("least", "probes"), [(0, True), (53, True), (54, False)])
def test_a_pass_of_few_rows_has_a_probe_by_default(shelf: Shelf, least: int, probes: bool) -> None:
    shelf.put("a", SYSTEM)  # exact, so it needs no fixing
    shelf.put("b", ("system", "d"))
    shelf.put("c", SYSTEM)
    config = ReuseConfig(recompute_ratio=0.3, nearest_share=0.0, capture=False)
    assert config.method.probe_min_rows == 0
    job = shelf.resolve(config=config.with_method(probe_min_rows=least))
    # the system segment, the question, and what is recomputed of b and c
    assert len(job.rows.open()) == 53
    assert (job.probe is not None) == probes


def test_a_probe_chooses_anew_around_what_is_computed(shelf: Shelf) -> None:
    shelf.put("a", SYSTEM)
    shelf.put("b", SYSTEM)
    config = ReuseConfig(
        capture=False,
        recompute_ratio=0.1,
        method=ReuseMethod(selector="question", probe_min_rows=0),
    )
    resolved = shelf.resolve(config=config)
    probe = resolved.probe
    assert probe is not None
    first = [108 + offset for offset in resolved.plan[2].recompute]
    assert len(first) == 9
    seen = np.zeros(90, np.float32)
    seen[40:60] = np.linspace(20.0, 10.0, 20)
    rows = resolved.rows.mark([148, 149], RowReason.COMPUTED_INSTEAD).finish([first[0], 148])
    plan = probe.choose({2: seen}, rows, {})
    chosen = plan[2].recompute
    assert first[0] - 108 in chosen  # it is computed already
    assert not {40, 41} & set(chosen)  # they did not come, so there is nothing to fix
    assert len(chosen) == 9
    assert set(range(42, 48)) <= set(chosen)
    unseen = probe.choose({}, rows, {})  # one that the question must not shape keeps its choice
    kept = set(resolved.plan[2].recompute) - {40, 41}
    assert set(unseen[2].recompute) == kept


# -- as it went -------------------------------------------------------------------------------------------------------


def result_of(job: PrefillJob, rows: Rows, *, plan: Plan | None = None) -> PrefillResult:
    """A prefill that ended with these rows; all it was asked for is captured."""
    layout = KVLayout(2, 1, 4, "float32")
    recorder = CaptureRecorder(
        layout, torch.empty(0), [(i, BOUNDS[i], BOUNDS[i + 1]) for i in job.captures]
    )
    found = recorder.locate(np.arange(BOUNDS[-1]))
    for capture, _ in found:
        capture.layers.update({0, 1})
    buffer: Any = None
    return PrefillResult(torch.empty(0), buffer, recorder, rows, frozenset(), plan, None, 0, 0.0)


def captured_segments(result: PrefillResult) -> list[int]:
    return [capture.segment for capture in result.recorder.captures]


@pytest.fixture
def resolved(shelf: Shelf) -> Iterator[tuple[PrefillJob, PendingLoads]]:
    """`a` is exact, `b` moved, and both are still to be loaded."""
    shelf.put("a", SYSTEM)
    shelf.put("b", SYSTEM)
    shelf.reopen()
    with closing(shelf.resolve()) as found, loading(Loader(shelf.store, 2), found.to_load) as loads:
        assert loads.wait(lambda: not loads.incomplete(), 60)
        yield found, loads


def test_loads_that_are_ended_twice_are_counted_once(shelf: Shelf) -> None:
    shelf.put("a", SYSTEM)
    shelf.reopen()
    loader, job = Loader(shelf.store, 2), shelf.resolve()
    loads = loader.begin(job.to_load)
    assert loads.wait(lambda: not loads.incomplete(), 60)
    loader.end(loads)
    loader.end(loads)
    assert shelf.store.stats().loads == {"disk": 1}


def test_what_came_is_as_it_was_planned(resolved: tuple[PrefillJob, PendingLoads]) -> None:
    planned, loads = resolved
    result = result_of(planned, planned.rows)
    assert executed_plan(planned, loads, result) == planned.plan
    # of the exact one, the same is stored already; of the moved one, something else would be
    assert captured_segments(result) == [0, 2, 3]


def test_what_was_computed_because_that_was_faster_says_so(
    resolved: tuple[PrefillJob, PendingLoads],
) -> None:
    planned, loads = resolved
    result = result_of(
        planned,
        planned.rows.mark([*range(8, 108), *range(108, 120)], RowReason.COMPUTED_INSTEAD),
    )
    plan = executed_plan(planned, loads, result)
    a, b = plan[1:3]
    assert (a.outcome, a.reason, a.variant, a.recompute.tolist()) == (
        "computed",
        Reason.COMPUTED_FASTER,
        None,
        [],
    )
    assert (b.outcome, b.reason, b.not_loaded) == ("reused", Reason.COMPUTED_FASTER, 12)
    assert b.variant == planned.plan[2].variant
    assert b.recompute.tolist() == [offset for offset in planned.plan[2].recompute if offset >= 12]
    assert captured_segments(result) == [0, 2, 3]  # a was computed, but the very same is stored


def test_a_plan_that_a_probe_made_is_the_one_that_went(
    resolved: tuple[PrefillJob, PendingLoads],
) -> None:
    planned, loads = resolved
    segments = list(planned.plan)
    segments[2] = replace(segments[2], recompute=np.array([1, 50]))
    result = result_of(
        planned,
        planned.rows.mark([109], RowReason.COMPUTED_INSTEAD),
        plan=tuple(segments),
    )
    plan = executed_plan(planned, loads, result)
    assert plan[2].recompute.tolist() == [50]
    assert plan[2].not_loaded == 1


def test_what_was_lost_on_the_way_is_captured_again(shelf: Shelf) -> None:
    a, _ = shelf.put("a", SYSTEM), shelf.put("b", SYSTEM)
    shelf.reopen()
    content = bytearray(shelf.path(a).read_bytes())
    content[-5] ^= 1
    shelf.path(a).write_bytes(content)
    with (
        closing(shelf.resolve()) as planned,
        loading(Loader(shelf.store, 2), planned.to_load) as loads,
    ):
        assert loads.wait(lambda: not loads.incomplete(), 60)
        failed = loads.failed()
        assert failed
        result = result_of(planned, planned.rows.mark(failed, RowReason.COMPUTED_INSTEAD))
        plan = executed_plan(planned, loads, result)
    lost = plan[1]
    assert lost.reason == Reason.NOT_LOADED
    assert "checksum" in lost.detail
    assert (lost.not_loaded or len(failed)) == len(failed)
    assert captured_segments(result) == [0, 1, 2, 3]
    shelf.store.flush()
    assert isinstance(shelf.store.load(a), Unavailable)


@pytest.mark.gate
@pytest.mark.parametrize("harm", ["nothing", "one byte", "the end", "the file"])
def test_resolved_loaded_and_run_the_logits_are_those_of_full_prefill(
    tiny_decoder: MakeDecoder, tmp_path: Path, harm: str
) -> None:
    decoder, ids = tiny_decoder("Llama"), PROMPT.token_ids
    shelf = Shelf(tmp_path / "caches", decoder.layout, decoder.fingerprint)
    full = prefill(decoder, PrefillJob(ids, Rows.of(BOUNDS, new=range(230)), captures=range(4)))
    names = [one.segment_id for one in PROMPT.segments]
    variants = [
        shelf.put(names[capture.segment], names[: capture.segment], kv=capture.kv.contiguous())
        for capture in full.recorder.captures
    ]
    shelf.reopen()
    found, path = shelf.found(), shelf.path(variants[1])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "one byte":
        path.write_bytes(content)
    elif harm == "the end":
        path.write_bytes(path.read_bytes()[:-100])
    elif harm == "the file":
        path.unlink()
    resolved = resolve(
        PROMPT, found, CONFIG, store=shelf.store, ranks=decoder.ranks, answer_tokens=1
    )
    with (
        closing(resolved),
        loading(Loader(shelf.store, decoder.layout.layers), resolved.to_load) as loads,
    ):
        assert loads.wait(lambda: not loads.incomplete(), 60)
        steps = OverlappedPrefill(
            decoder, resolved, loads, ComputeSpeed(decoder.keys_per_row)
        ).steps()
        result = run(decoder, steps)
    plan = executed_plan(resolved, loads, result)
    assert (decoder.next_logits(result.hidden) - decoder.own_logits(ids)[0]).abs().max() <= 1e-3
    assert [planned.reason == Reason.NOT_LOADED for planned in plan] == [
        False,
        harm != "nothing",
        *[False] * 3,
    ]
    # whole in one pass, or not at all
    assert harm == "nothing" or captured_segments(result) in ([1], [])
    shelf.store.close()
