"""The result of an audit: how an answer with reuse compares with full prefill of the same prompt."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Final

from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.serving.request import Request, RequestProgress

NEAR_TIE: Final = 0.02  # difference of two probabilities, as in `cachecraft eval`


@dataclass(frozen=True, slots=True)
class AuditText:
    """Text of an audited answer; it is kept only with `Audits.keep_text`.

    question  the prompt after its chunks: the question, and earlier turns of the conversation
    same      beginning that both answers have
    reuse     the rest of the answer that was given
    full      the rest of full prefill's answer, decoded greedily from the first token that differs
    """

    question: str
    same: str
    reuse: str
    full: str


@dataclass(frozen=True, slots=True)
class Audit:
    """An answer compared with full prefill, token by token.

    Full prefill is asked at each place of the answer for the token that follows the same beginning. Two predictions
    agree if both find the same token the likeliest. For a greedy answer without a difference, full prefill would have
    given the same answer.

    request_id       id of the request, as in `RequestStats`
    created          time of the audit, seconds since 1970
    tokens           tokens of the answer, with the token that ended it; of an answer that its reader closed, those
                     that were read
    differences      places at which full prefill finds another token the likeliest; 0 is the answer's first token
    near_ties        number of these places at which full prefill finds both tokens almost equally likely: their
                     probabilities differ by less than `NEAR_TIE`. In bfloat16, rounding alone decides many of them
    kl               mean over the tokens of KL(full prefill ‖ reuse) in nats, or a little less: see
                     `predictions.compare`
    computed_tokens  tokens that were computed for the audit; 0 if every chunk was exact, so that there was nothing to
                     compare
    selector         how the tokens to recompute were chosen
    recomputed       share of the reused chunks' tokens that was recomputed; 0 if no chunk was reused
    origin           how the reused chunks were captured: "primed", "asked" (while answering questions), "mixed", or
                     "none" if no chunk was reused
    outcomes         number of chunks by outcome, see `ChunkStats`
    ratio            the recompute ratio, if a quality target chose it; else None
    early            True if early termination ended the computation of the chunks
    text             the text, if it is kept
    """

    request_id: str
    created: float
    tokens: int
    differences: tuple[int, ...]
    near_ties: int
    kl: float
    computed_tokens: int
    selector: str
    recomputed: float
    origin: str
    outcomes: dict[str, int]
    ratio: float | None = None
    early: bool = False
    text: AuditText | None = None

    @property
    def is_same(self) -> bool:
        """True if full prefill agrees with every token."""
        return not self.differences

    @property
    def agreeing(self) -> int:
        """Number of tokens that full prefill agrees with."""
        return self.tokens - len(self.differences)

    @property
    def agreeing_net(self) -> int:
        """Number of tokens that full prefill agrees with, near-ties included."""
        return self.agreeing + self.near_ties

    @property
    def is_exact(self) -> bool:
        """True if every chunk was exact, so that nothing was compared."""
        return self.computed_tokens == 0

    @property
    def agreement(self) -> float:
        """Share of the tokens that full prefill agrees with, 0 to 1."""
        return self.agreeing / self.tokens

    @property
    def first_difference(self) -> int | None:
        """The first place that differs, or None."""
        return self.differences[0] if self.differences else None

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        derived = {
            "agreement": self.agreement,
            "is_same": self.is_same,
            "first_difference": self.first_difference,
        }
        return asdict(self) | derived


@dataclass(frozen=True, slots=True)
class ReuseFacts:
    """Facts about the reuse in an answer; fields as those of `Audit`, `exact` as `RequestStats.exact`."""

    selector: str
    recomputed: float
    origin: str
    outcomes: dict[str, int]
    ratio: float | None
    early: bool
    exact: bool


def reuse_facts(request: Request, progress: RequestProgress, *, exact: bool) -> ReuseFacts:
    """Return the facts about a prompt as its plan was carried out."""
    recomputed, reused = _reused_tokens(request, progress.plan)
    chunks = [
        planned
        for segment, planned in zip(request.prompt.segments, progress.plan.segments, strict=True)
        if segment.kind == "chunk"
    ]
    origins = {
        "primed" if planned.variant.primed else "asked"
        for planned in chunks
        if planned.variant is not None
    }
    origin = "none"
    if origins:
        origin = origins.pop() if len(origins) == 1 else "mixed"
    return ReuseFacts(
        selector=request.config.selector,
        recomputed=recomputed / reused if reused else 0.0,
        origin=origin,
        outcomes=dict(Counter(str(planned.outcome) for planned in chunks)),
        ratio=request.config.recompute_ratio if request.quality else None,
        early=progress.focus_layer is not None,
        exact=exact,
    )


def _reused_tokens(request: Request, plan: Plan) -> tuple[int, int]:
    """Return the recomputed tokens of reused chunks, and all their tokens."""
    recomputed = 0
    total = 0
    for segment, planned in zip(request.prompt.segments, plan.segments, strict=True):
        if segment.kind == "chunk" and planned.variant is not None:
            recomputed += len(planned.recompute)
            total += len(segment.token_ids)
    return recomputed, total
