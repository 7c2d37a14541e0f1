"""One replay: every request of a trace is looked up, planned, counted and captured, as the engine does it.

Planner, eviction rules and memory tier are the package's own; tensors, tokens and attention are made up.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from benchmarks.simulation.disk import Disk
from benchmarks.simulation.policies import MAKERS, Maker, Rival
from benchmarks.simulation.trace import Trace
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import exact_shares, make_plan
from cachecraft_rag.planning.scoring import context_impact
from cachecraft_rag.store.catalog_records import Limits
from cachecraft_rag.store.config import DEFAULT_LIMITS
from cachecraft_rag.store.eviction import Use
from cachecraft_rag.store.memory import MemoryTier
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.variants import Variant, VariantKey

NewVariants = Literal["computed", "always"]
_SYSTEM = Segment("system", digest("instruction"), (0,) * 32)
_QUESTION = Segment("question", digest("question"), (0,) * 16)


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a replay.

    policy, makers      name of a policy, and how each is made
    disk_bytes, host_bytes, max_variants, variants_per_chunk   as in `StoreConfig`
    bytes_per_token     of a chunk-cache
    new_variants        "computed": a chunk that is computed afresh is captured. "always": so is, exactly, one that was
                        reused and had to be fixed, as an idle engine does it
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
    makers: Mapping[str, Maker] = field(default_factory=lambda: MAKERS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of a replay; tokens are those of chunks, without instructions and questions.

    computed, recomputed   tokens of chunks computed afresh; tokens fixed in chunks that were reused
    exact, reused          tokens after their origin prefix; tokens that were moved, those that were fixed included
    saved                  share of all tokens that was neither computed nor fixed
    outcomes               chunks asked for, by plan: "exact", "reused", or the reason why computed
    loads                  chunk-caches used, by tier
    disk_bytes, host_bytes at the end
    evicted                variants that had to leave the disk
    variants_per_chunk     at the end: number of variants → number of chunks
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


def replay(trace: Trace, setting: Setting) -> Outcome:
    """Replay the whole trace against an empty store."""
    run = _Replay(trace, setting)
    for number, request in enumerate(trace.requests):
        run.serve(number, request)
    return run.outcome()


class _Replay:
    def __init__(self, trace: Trace, setting: Setting) -> None:
        self._trace, self._setting = trace, setting
        policy = setting.makers[setting.policy](trace, setting.disk_bytes)
        self._rival = policy if isinstance(policy, Rival) else Rival()
        self._disk = Disk(
            policy, Limits(setting.disk_bytes, setting.max_variants, setting.variants_per_chunk)
        )
        # the same above every policy, so that the disk alone is compared
        self._host = MemoryTier(setting.host_bytes)
        self._segment = lru_cache(maxsize=None)(self._new_segment)
        self._tensor = lru_cache(maxsize=None)(self._new_tensor)
        self._captured = 0
        self._tokens: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()

    def serve(self, number: int, request: tuple[int, ...]) -> None:
        """One request, from the look-up to its captures."""
        self._rival.asked(number)
        segments = [self._segment(chunk) for chunk in request]
        stored = {
            one.segment_id: self._disk.variants(chunk)
            for one, chunk in zip(segments, request, strict=True)
        }
        prompt = Prompt((_SYSTEM, *segments, _QUESTION))
        plan = make_plan(prompt, stored, self._setting.config)
        used, captures = [], []
        shares: list[float] = []
        for place, (planned, chunk) in enumerate(zip(plan[1:-1], request, strict=True)):
            length, variant, cfo = self._trace.tokens[chunk], planned.variant, planned.cfo or 0.0
            self._outcomes[planned.reason if variant is None else planned.outcome] += 1
            self._tokens["computed" if variant is None else planned.outcome] += length
            if variant is not None:
                used.append((variant, Use.of(cfo, length)))
                self._tokens["recomputed"] += math.ceil(cfo * length) if planned.to_fix else 0
            idle = self._setting.new_variants == "always" and planned.to_fix and cfo > 0.0
            if variant is None or idle:
                shares = shares or exact_shares(
                    plan, [len(one.token_ids) for one in prompt.segments]
                )
                captures.append((place, 1.0 if idle else shares[place + 1]))
        for variant, _ in used:
            self._loads["host" if variant in self._host else "disk"] += 1
            if variant not in self._host:
                self._host.add(variant, self._tensor(variant.nbytes))
        for variant, use in used:
            self._host.record_use(variant.variant_id, use)
            self._disk.record_use(variant, use)
        for place, exact_share in captures:
            variant = self._capture(request[:place], request[place], exact_share)
            gone = self._disk.add(variant, request[place])
            if gone is not None:
                self._host.add(variant, self._tensor(variant.nbytes))
            for left in gone or ():
                self._host.remove(left.variant_id, left.created)

    def outcome(self) -> Outcome:
        """Counts so far."""
        tokens = self._tokens
        return Outcome(
            requests=len(self._trace.requests),
            computed=tokens["computed"],
            recomputed=tokens["recomputed"],
            exact=tokens["exact"],
            reused=tokens["reused"],
            saved=1.0
            - (tokens["computed"] + tokens["recomputed"]) / max(self._trace.asked_tokens, 1),
            outcomes=dict(self._outcomes),
            loads=dict(self._loads),
            disk_bytes=self._disk.nbytes,
            host_bytes=self._host.used_bytes,
            evicted=self._disk.evicted,
            variants_per_chunk=dict(sorted(Counter(self._disk.variants_per_chunk()).items())),
        )

    # -- what is made up ----------------------------------------------------------------------------------------------

    def _new_segment(self, chunk: int) -> Segment:
        return Segment("chunk", digest("chunk", str(chunk)), (0,) * self._trace.tokens[chunk])

    def _new_tensor(self, nbytes: int) -> Any:
        # all that the tier asks of a tensor: torch would take two seconds
        return SimpleNamespace(nbytes=nbytes)

    def _capture(self, before: tuple[int, ...], chunk: int, exact_share: float) -> Variant:
        """A new capture of a chunk after others."""
        self._captured += 1
        tokens = self._trace.tokens[chunk]
        segment = self._segment(chunk)
        prefix = (_SYSTEM.segment_id, *(self._segment(other).segment_id for other in before))
        key = VariantKey("simulation", "model", segment.segment_id, prefix)
        weights = [attention(chunk, other) for other in before]
        intra = tokens / (1.0 + sum(weights))  # a token's attention is 1 in all
        inter = [intra * weight for weight in weights]
        lengths = [self._trace.tokens[other] for other in before]
        return Variant(
            key=key,
            variant_id=key.variant_id,
            tokens=tokens,
            tokens_digest=segment.tokens_digest,
            inter=(0.0, *array("f", inter)),  # as a catalog keeps them
            intra=intra,
            cci=context_impact(inter=inter, prefix_tokens=lengths, intra=intra, tokens=tokens),
            exact_share=exact_share,
            session=None,
            codec="raw",
            nbytes=tokens * self._setting.bytes_per_token,
            reuse_frequency=0.0,
            created=float(self._captured),
        )


def attention(chunk: int, other: int) -> float:
    """Made-up attention of one chunk to another, relative to itself: fixed per pair, 1/8 on average, mostly small.

    >>> attention(3, 4) == attention(3, 4), 0.0 < attention(4, 3) < 0.5
    (True, True)
    """
    drawn = ((chunk * 0x9E3779B1 ^ other * 0x85EBCA77) * 0xC2B2AE35 >> 11 & 0xFFFF) + 1
    return 0.5 * (drawn / 65537) ** 3
