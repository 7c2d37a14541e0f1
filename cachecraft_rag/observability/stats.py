"""Statistics of an answer: per-request numbers come back as data, never as log lines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.types import Metadata, TierName

Finish = Literal["end", "length", "stop", "closed", "failed"]


@dataclass(frozen=True, slots=True)
class ChunkStats:
    """Outcome of one chunk of the prompt.

    outcome     exact: behind its origin prefix and stored by a lossless codec; reused: moved and partly recomputed, or
                behind its origin prefix but stored by a lossy codec; computed: afresh; trimmed: left out;
                failed: the request failed before its first token
    reason, reason_code   why it was not simply reused, as a sentence and as a `Reason`; empty otherwise
    tokens              its length
    recomputed          how many of them were recomputed to fix them
    computed            how many were computed afresh: all, or those that were faster computed than loaded
    cfo, beta_prime     eq. 12 and eq. 8 of the chosen variant; None where none was stored
    variant_id, tier    which chunk-cache, and where it was read from; None where it was computed
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


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Times in seconds and tokens of one request.

    ttft_s             from the call to the first answer token: queue_s + plan_s + load_s + prefill_s
    load_s             waiting for what was being loaded; most loading goes on beside computing and shows nowhere
    queue_s            waiting for its turn, see `EngineConfig.max_waiting`
    plan_s             prompt, look-up and plan, including any wait for a chunk that was still being captured
    tokens_prompt      tokens_reused + tokens_recomputed + tokens_computed
    tokens_reused      taken over from chunk-caches untouched
    tokens_recomputed  of reused chunks, recomputed
    tokens_refreshed   of those reused, recomputed while the answer was decoded
    tokens_computed    of chunks without a chunk-cache, of the question, of the system segment the first time, and of
                       chunks that were faster computed than loaded
    recompute_share    row-layers computed / (prompt tokens × layers): what early termination saves shows here
    focus_layer        the layer that settled the focused chunks; None when early termination was off or never settled
    finish             why the answer ended: by itself, at max_new_tokens, at a stop string, closed by its reader, or
                       failed with an exception; None while it is still being written
    remote             outcome of the remote look-up: "answered", "too slow", "failed", "left alone"; None where there
                       is none, or where it need not be asked
    request_id         names the request in logs
    searched           what the retriever searched for: the question, and for a follow-up also the questions before it
                       with the question; empty where the caller brought the chunks
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
    tokens_refreshed: int = 0

    @property
    def exact(self) -> bool:
        """True if the answer is that of a full prefill: every chunk computed, recomputed whole or reused exactly."""
        kept = ("exact", "computed", "trimmed")
        whole = all(one.outcome in kept or 0 < one.tokens == one.recomputed + one.computed for one in self.chunks)
        in_time = all(one.reason_code is not Reason.COMPUTED_LATE for one in self.chunks)
        return whole and in_time and self.focus_layer is None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Source:
    """A retrieved chunk, as ranked by the retriever: best first."""

    chunk_id: str
    text: str
    score: float | None
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer's text, the chunks it could draw on (best first), and its numbers (chunks in prompt order)."""

    text: str
    sources: tuple[Source, ...]
    stats: RequestStats

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
