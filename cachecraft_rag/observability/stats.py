"""Statistics of an answer, returned as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.types.documents import Metadata
from cachecraft_rag.types.variants import TierName

Finish = Literal["end", "length", "stop", "closed", "failed"]


@dataclass(frozen=True, slots=True)
class ChunkStats:
    """Outcome of one chunk, or found segment, of the prompt.

    outcome      exact: after its origin prefix, from an exact capture and a lossless codec; reused: otherwise from a
                 chunk-cache, mostly moved and partly recomputed; computed: without a chunk-cache; trimmed: left out of
                 the prompt; failed: the request failed, or was closed, before its first token
    reason       sentence that says why tokens of it were computed or recomputed; empty if it was reused without that
    reason_code  the same as a `Reason`, whose docstring names the setting for each; the request log writes this code
                 as `reason`
    tokens       its length; 0 if it was left out of the prompt
    recomputed   tokens that were chosen to be recomputed. This is not ⌈cfo · tokens⌉ where the budgets of all chunks
                 are spent together (`ReuseConfig.budget_scope`). After early termination it includes tokens that only
                 the first layers recomputed
    computed     tokens that were computed without its chunk-cache: all, or those that were computed instead of loaded
    cfo          eq. 12 of the best variant that fitted, even if the chunk was then computed; None if none fitted. It
                 sets what the chunk adds to the budget, unless `ReuseConfig.recompute_ratio` does; then it only ranks
                 variants
    beta_prime   eq. 8 of the same variant; None likewise
    variant_id   id of the variant; None if the chunk was computed
    tier         tier that the variant was read from; None if nothing was read: the chunk was computed, or all of it was
                 recomputed
    stale_id     id that came with its text, if the text was edited after it was retrieved; else empty
    focus        the question's attention to the chunk's strongest tokens, as a part of the highest in the prompt, in
                 [0, 1]; None if no probe ran, or the chunk was computed after it
    in_focus     True if that is enough for the chunk to be in focus; None like `focus`
    spared       tokens that were not recomputed because the chunk is out of focus (`ReuseConfig.early_termination`)
    """

    chunk_id: str
    outcome: Literal["exact", "reused", "computed", "trimmed", "failed"]
    reason: str = ""
    reason_code: Reason = Reason.REUSED
    tokens: int = 0
    recomputed: int = 0
    computed: int = 0
    cfo: float | None = None
    beta_prime: float | None = None
    variant_id: str | None = None
    tier: TierName | None = None
    stale_id: str = ""
    focus: float | None = None
    in_focus: bool | None = None
    spared: int = 0


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Times in seconds and tokens of one request; made by `serving.request.stats_of`.

    ttft_s             from the call to the first answer token: queue_s + plan_s + load_s + prefill_s; 0 before it
    queue_s            waiting for its turn, see `EngineTuning.max_waiting`
    plan_s             prompt, look-up and plan, including any wait for a chunk that was still being captured
    load_s             waiting for what was being loaded; loading beside computing does not count
    prefill_s          computing the prompt
    total_s            from the call to the end of the answer; until then, from the call to now
    tokens_prompt      tokens_reused + tokens_recomputed + tokens_computed
    tokens_reused      taken from chunk-caches and not recomputed; drift correction may change them
    tokens_recomputed  of reused chunks, recomputed
    tokens_spared      of the reused tokens, not recomputed because their chunks are out of focus
    tokens_computed    of chunks without a chunk-cache, of the question, of the instruction the first time, and of
                       chunks that were computed instead of loaded
    tokens_generated   of the answer
    recompute_share    row-layers computed / (prompt tokens × layers); early termination lowers it
    focus_layer        layer in which Algorithm 1 settled the focused chunks; None if it was off or never settled
    finish             "end": the model ended it; "length": at max_new_tokens; "stop": at a stop string; "closed": by
                       its reader; "failed": by an exception; None while it is still being written
    chunks             outcome of each chunk, in prompt order, then of those left out of it; until the plan only these
    remote             outcome of the remote look-up: "answered", "too slow", "failed", "left alone"; None without a
                       remote, or if it need not be asked
    request_id         names the request in logs
    quality            reason for the recompute ratio, if a quality target (`EngineConfig.quality_target`) chose it,
                       such as "r = 0.2: 180 audits, agreement 0.981 [0.974, 0.987], target 0.98"; else empty
    searched           queries of the retriever: the question, and for a follow-up also the questions before it together
                       with the question; empty if there was no search, or the caller brought the chunks
    """

    ttft_s: float
    plan_s: float
    load_s: float
    prefill_s: float
    total_s: float
    tokens_prompt: int
    tokens_reused: int
    tokens_recomputed: int
    tokens_computed: int
    tokens_generated: int
    recompute_share: float
    focus_layer: int | None
    finish: Finish | None
    chunks: tuple[ChunkStats, ...]
    remote: str | None = None
    searched: tuple[str, ...] = ()
    request_id: str = ""
    queue_s: float = 0.0
    tokens_spared: int = 0
    quality: str = ""

    @property
    def exact(self) -> bool:
        """True if each chunk in the prompt was exact or wholly computed in all layers, or not planned; else False."""
        if self.focus_layer is not None:
            return False
        return all(_is_exact(chunk) for chunk in self.chunks)

    def as_dict(self) -> dict[str, Any]:
        """Return field name → plain value, for JSON; `chunks` is a tuple of dicts of `ChunkStats`."""
        return asdict(self)


def _is_exact(chunk: ChunkStats) -> bool:
    if chunk.reason_code in (Reason.COMPUTED_LATE, Reason.NOT_REPORTED):
        return False
    is_recomputed = 0 < chunk.tokens == chunk.recomputed + chunk.computed
    return is_recomputed or chunk.outcome in ("exact", "computed", "trimmed")


@dataclass(frozen=True, slots=True)
class Source:
    """A retrieved chunk with its score."""

    chunk_id: str
    text: str
    score: float | None
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's text, its retrieved chunks (best first), and its statistics."""

    text: str
    sources: tuple[Source, ...]
    stats: RequestStats

    def as_dict(self) -> dict[str, Any]:
        """Return field name → plain value, for JSON; `sources` are dicts of `Source`, best first."""
        return asdict(self)
