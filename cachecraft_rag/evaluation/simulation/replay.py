"""One replay: every request of a trace is looked up, planned, counted and captured, as the engine does it.

Catalog, planner, eviction and memory tier are the package's own; only tensors, tokens and attention are made up.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from cachecraft_rag.evaluation.simulation.policies import MAKERS, Simulated
from cachecraft_rag.evaluation.simulation.trace import Trace
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import Plan, exact_shares, make_plan
from cachecraft_rag.planning.scoring import context_impact
from cachecraft_rag.store.catalog import Catalog
from cachecraft_rag.store.catalog_records import FileRef, Limits
from cachecraft_rag.store.config import DEFAULT_LIMITS
from cachecraft_rag.store.eviction import Use, policy_named
from cachecraft_rag.store.memory import MemoryTier
from cachecraft_rag.types import Prompt, Segment, TokenScores, Variant, VariantKey, digest

NewVariants = Literal["computed", "always"]
_WRITER, _NAMESPACE, _MODEL = "simulation", "simulation", "2-" + "0" * 32
_SYSTEM = Segment("system", digest("instruction"), (0,) * 32)
_QUESTION = Segment("question", digest("question"), (0,) * 16)
_MOST_PLANS = 50_000
_TOLD_EVERY = 1000  # requests


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated.

    policy              a name of `policies.MAKERS`
    disk_bytes, host_bytes, max_variants, variants_per_chunk   as in `StoreConfig`
    bytes_per_token     of a chunk-cache
    new_variants        "computed": what is computed afresh is captured. "always": so is, exactly, what was reused and
                        would have to be fixed, as an idle engine does it
    config              how chunk-caches are reused
    """

    policy: str
    disk_bytes: int
    host_bytes: int = 0
    max_variants: int = DEFAULT_LIMITS["max_variants"]
    variants_per_chunk: int = DEFAULT_LIMITS["variants_per_chunk"]
    bytes_per_token: int = 46_080
    new_variants: NewVariants = "computed"
    config: ReuseConfig = field(default_factory=ReuseConfig)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it; tokens are those of chunks, without instructions and questions.

    computed, recomputed   tokens of chunks computed afresh; tokens fixed in chunks that were reused
    exact, reused          tokens behind their origin prefix; tokens that were moved, those that were fixed included
    saved                  share of all tokens that was neither computed nor fixed
    outcomes               chunks asked for, by plan: "exact", "reused", or the reason why computed
    loads                  chunk-caches used, by tier
    disk_bytes, host_bytes at the end
    evicted                variants that had to leave the disk
    variants_per_chunk     at the end, how many chunks have how many variants
    """

    requests: int
    computed: int
    recomputed: int
    exact: int
    reused: int
    saved: float
    outcomes: dict[str, int]
    loads: dict[str, int]
    disk_bytes: int
    host_bytes: int
    evicted: int
    variants_per_chunk: dict[int, int]


def replay(trace: Trace, setting: Setting, *, progress: Callable[[int], object] | None = None) -> Outcome:
    """Replay the whole trace against an empty store. `progress` is told how many requests are done, now and then."""
    with tempfile.TemporaryDirectory(prefix="cachecraft-simulation-") as folder:
        run = _Replay(trace, setting, Path(folder))
        try:
            with run.catalog.one_transaction(), _no_collections():
                for number, request in enumerate(trace.requests, 1):
                    run.serve(number - 1, request)
                    if progress is not None and (number % _TOLD_EVERY == 0 or number == len(trace.requests)):
                        progress(number)
            return run.outcome()
        finally:
            run.catalog.close()


@contextmanager
def _no_collections() -> Iterator[None]:
    """No search for reference cycles: a replay makes none, and each search looks at all that it holds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a request comes to as long as nothing of its chunks comes or goes.

    outcomes  by chunk
    tokens    computed, recomputed, exact, reused
    variants  that are used, in prompt order, and how
    captures  place in the request, and exact share
    """

    outcomes: tuple[str, ...]
    tokens: tuple[int, int, int, int]
    variants: tuple[tuple[Variant, Use], ...]
    captures: tuple[tuple[int, float], ...]


class _Facts(NamedTuple):
    """What is the same for all captures of a chunk behind the same others, see `Variant`."""

    key: VariantKey
    variant_id: str
    inter: tuple[float, ...]
    intra: float
    cci: float


class _Replay:
    def __init__(self, trace: Trace, setting: Setting, folder: Path) -> None:
        self._trace, self._setting = trace, setting
        self._policy = MAKERS[setting.policy](trace, setting.disk_bytes)
        self._own = self._policy if isinstance(self._policy, Simulated) else None
        self.catalog = Catalog(folder / "catalog.sqlite", policy=self._policy, scratch=True)
        # Memory lies above every policy in the same way, so that the disk alone is compared.
        self._host = MemoryTier(setting.host_bytes, policy=policy_named("saving"))
        self._limits = Limits(setting.disk_bytes, setting.max_variants, setting.variants_per_chunk)
        # The catalog has one writer here, so what it said holds until a row of the chunk comes or goes.
        self._variants: dict[int, list[Variant]] = {}
        self._plans: dict[tuple[int, ...], _Planned] = {}
        self._asked_by: dict[int, set[tuple[int, ...]]] = {}
        self._chunk_of: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._segments: dict[int, Segment] = {}
        self._zeros: dict[int, tuple[int, ...]] = {}
        self._made: dict[tuple[tuple[int, ...], int], _Facts] = {}
        self._uses: dict[str, Use] = {}  # not in the catalog yet
        self._tensors: dict[int, torch.Tensor] = {}  # by size: nobody looks inside
        self._disk_bytes = 0
        self._clock = 0.0
        self._evicted = 0
        self._tokens = (0, 0, 0, 0)
        self._outcomes: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()

    def serve(self, number: int, request: tuple[int, ...]) -> None:
        """One request, from the look-up to its captures."""
        if self._own is not None:
            self._own.asked(number)
        planned = self._plans.get(request)  # that of before holds where nothing has come or gone: it is a pure function
        if planned is None:
            planned = self._remember(request, self._planned(request, self._plan(request)))
        computed, recomputed, exact, reused = self._tokens
        more = planned.tokens
        self._tokens = (computed + more[0], recomputed + more[1], exact + more[2], reused + more[3])
        self._outcomes.update(planned.outcomes)
        for variant, _ in planned.variants:
            self._load(variant)
        for variant, use in planned.variants:
            self._host.record_use(variant.variant_id, use)
            known = self._uses.get(variant.variant_id)
            self._uses[variant.variant_id] = use if known is None else known + use
        if planned.captures or self._own is not None:
            self._write_uses()
        for place, exact_share in planned.captures:
            self._capture(request[:place], request[place], exact_share=exact_share)

    def _write_uses(self) -> None:
        """As the store's writer does: in batches, before what came after them. Rivals are told of each use."""
        if self._uses:
            self.catalog.record_uses(self._uses)
            self._uses = {}

    def outcome(self) -> Outcome:
        """What came of it so far."""
        asked, totals = self._trace.asked_tokens, self.catalog.totals()
        per_chunk = Counter(Counter(self._chunk_of.values()).values())
        return Outcome(
            requests=len(self._trace.requests),
            computed=self._tokens[0],
            recomputed=self._tokens[1],
            exact=self._tokens[2],
            reused=self._tokens[3],
            saved=1.0 - (self._tokens[0] + self._tokens[1]) / max(asked, 1),
            outcomes=dict(self._outcomes),
            loads=dict(self._loads),
            disk_bytes=totals.file_bytes,
            host_bytes=self._host.used_bytes,
            evicted=self._evicted,
            variants_per_chunk=dict(sorted(per_chunk.items())),
        )

    # -- the request's way --------------------------------------------------------------------------------------------

    def _plan(self, request: tuple[int, ...]) -> Plan:
        unknown = [chunk for chunk in request if chunk not in self._variants]
        if unknown:
            names = {self._segment(chunk).segment_id: chunk for chunk in unknown}
            for name, variants in self._look_up(list(names)).items():
                self._variants[names[name]] = variants
        segments = [self._segment(chunk) for chunk in request]
        stored = {s.segment_id: self._variants[chunk] for s, chunk in zip(segments, request, strict=True)}
        return make_plan(Prompt((_SYSTEM, *segments, _QUESTION)), stored, self._setting.config)

    def _planned(self, request: tuple[int, ...], plan: Plan) -> _Planned:
        outcomes, variants, captures = [], [], []
        tokens = {"computed": 0, "recomputed": 0, "exact": 0, "reused": 0}
        shares: list[float] = []
        for place, (planned, chunk) in enumerate(zip(plan.segments[1:-1], request, strict=True)):
            length, variant, cfo = self._trace.tokens[chunk], planned.variant, planned.cfo or 0.0
            outcomes.append(planned.reason if variant is None else planned.outcome)
            tokens["computed" if variant is None else planned.outcome] += length
            if variant is not None:
                variants.append((variant, Use.of(cfo, length)))
                tokens["recomputed"] += math.ceil(cfo * length) if planned.to_fix else 0
            idle = self._setting.new_variants == "always" and planned.to_fix and cfo > 0.0
            if variant is None or idle:
                shares = shares or exact_shares(plan, [len(_SYSTEM.token_ids), *map(self._length, request), 16])
                captures.append((place, 1.0 if idle else shares[place + 1]))
        counts = (tokens["computed"], tokens["recomputed"], tokens["exact"], tokens["reused"])
        return _Planned(tuple(outcomes), counts, tuple(variants), tuple(captures))

    def _remember(self, request: tuple[int, ...], planned: _Planned) -> _Planned:
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self._asked_by.clear()
        self._plans[request] = planned
        for chunk in request:
            self._asked_by.setdefault(chunk, set()).add(request)
        return planned

    def _load(self, variant: Variant) -> None:
        if variant in self._host:
            self._loads["host"] += 1
        else:
            self._loads["disk"] += 1
            self._keep(variant)

    def _keep(self, variant: Variant) -> None:
        if self._host.budget_bytes:
            kv = self._tensors.get(variant.nbytes)
            if kv is None:
                kv = self._tensors[variant.nbytes] = torch.empty(variant.nbytes, dtype=torch.uint8, device="meta")
            self._host.add(variant, kv)

    def _capture(self, before: tuple[int, ...], chunk: int, *, exact_share: float) -> None:
        variant = self._variant(before, chunk, exact_share)
        nbytes, excess = variant.nbytes, self._disk_bytes + variant.nbytes - self._limits.disk_bytes
        if nbytes > self._limits.disk_bytes or variant.variant_id in self._chunk_of:
            return
        if self._own is not None:
            if not self._own.admits(chunk, excess):
                return
            if victims := self._own.victims(excess):
                self._gone(self.catalog.remove(self._files(victims), writer=_WRITER))
            self._own.came(variant.variant_id, chunk, nbytes)
        while gone := self.catalog.reserve(variant, file_bytes=nbytes, writer=_WRITER, limits=self._limits):
            self._gone(gone)
        self._sizes[variant.variant_id], self._chunk_of[variant.variant_id] = nbytes, chunk
        self._disk_bytes += nbytes
        self._keep(variant)
        over = self.catalog.commit(variant, TokenScores(), file_bytes=nbytes, writer=_WRITER, limits=self._limits)
        self._gone(over or [])
        self._forget(chunk)

    def _files(self, variant_ids: list[str]) -> list[FileRef]:
        found = {v.variant_id: v for name in variant_ids for v in self._of(self._chunk_of[name])}
        return [FileRef(name, found[name].created, self._sizes[name]) for name in variant_ids]

    def _of(self, chunk: int) -> list[Variant]:
        if chunk not in self._variants:
            name = self._segment(chunk).segment_id
            self._variants[chunk] = self._look_up([name])[name]
        return self._variants[chunk]

    def _look_up(self, names: list[str]) -> dict[str, list[Variant]]:
        found, damaged = self.catalog.find(_NAMESPACE, _MODEL, names)
        assert not damaged, damaged[0].reason
        return found

    def _gone(self, files: list[FileRef]) -> None:
        if not files:
            return
        self.catalog.settle(files)
        for file in files:
            self._disk_bytes -= self._sizes.pop(file.variant_id)
            self._evicted += 1
            self._host.remove(file.variant_id, file.created)
            self._forget(self._chunk_of.pop(file.variant_id))
            if self._own is not None:
                self._own.left(file.variant_id)

    def _forget(self, chunk: int) -> None:
        """What the catalog says of this chunk has changed."""
        self._variants.pop(chunk, None)
        for request in self._asked_by.pop(chunk, ()):
            self._plans.pop(request, None)

    # -- what is made up ----------------------------------------------------------------------------------------------

    def _length(self, chunk: int) -> int:
        return self._trace.tokens[chunk]

    def _segment(self, chunk: int) -> Segment:
        found = self._segments.get(chunk)
        if found is None:
            length = self._length(chunk)
            tokens = self._zeros.setdefault(length, (0,) * length)  # chunks share them
            found = self._segments[chunk] = Segment("chunk", digest("chunk", str(chunk)), tokens)
        return found

    def _variant(self, before: tuple[int, ...], chunk: int, exact_share: float) -> Variant:
        """A new capture; but for its time and exactness, the same as any other of this chunk behind these."""
        self._clock += 1.0
        facts = self._made.get((before, chunk))
        if facts is None:
            if len(self._made) >= _MOST_PLANS:
                self._made.clear()
            facts = self._made[before, chunk] = self._described(before, chunk)
        tokens = self._length(chunk)
        return Variant(
            key=facts.key,
            variant_id=facts.variant_id,
            tokens=tokens,
            tokens_digest=self._segment(chunk).tokens_digest,
            inter=facts.inter,
            intra=facts.intra,
            cci=facts.cci,
            exact_share=exact_share,
            session=None,
            codec="raw",
            nbytes=tokens * self._setting.bytes_per_token,
            reuse_frequency=0.0,
            created=self._clock,
        )

    def _described(self, before: tuple[int, ...], chunk: int) -> _Facts:
        tokens = self._length(chunk)
        names = [self._segment(other).segment_id for other in (*before, chunk)]
        prefix = (_SYSTEM.segment_id, *names[:-1])
        key = VariantKey(namespace=_NAMESPACE, fingerprint=_MODEL, chunk_id=names[-1], origin_prefix=prefix)
        weights = [attention(chunk, other) for other in before]
        intra = tokens / (1.0 + sum(weights))  # a token's attention is 1 in all
        inter = tuple([intra * weight for weight in weights])
        lengths = [self._length(other) for other in before]
        impact = context_impact(inter=inter, prefix_tokens=lengths, intra=intra, tokens=tokens)
        return _Facts(key, key.variant_id, (0.0, *inter), intra, impact)


def attention(chunk: int, other: int) -> float:
    """How much a chunk looks at another, relative to itself: the same for the same two, 1/8 on average, most at few.

    >>> attention(3, 4) == attention(3, 4), 0.0 < attention(4, 3) < 0.5
    (True, True)
    """
    drawn = ((chunk * 0x9E3779B1 ^ other * 0x85EBCA77) * 0xC2B2AE35 >> 11 & 0xFFFF) + 1
    return 0.5 * (drawn / 65537) ** 3
