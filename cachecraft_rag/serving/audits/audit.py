"""The result of an audit: how an answer with reuse compares with full prefill of the same prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final, Self

from cachecraft_rag.serving.request import Request, RequestProgress

NEAR_TIE: Final = 0.02  # difference of two probabilities, as in `cachecraft eval`
# Larger numbers are those of a damaged file.
_MOST = 1_000_000_000
_LATEST = 1e11  # seconds since 1970: the year 5138


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

    Reuse and full prefill each predict, at each place of the answer, the token that follows the same beginning. They
    agree at a place if both find the same token the likeliest. The token that stands in the answer does not matter: in
    a sampled answer it may be another one. For a greedy answer without a difference, full prefill would have given the
    same answer.

    request_id       id of the request, as in `RequestStats`
    created          time of the audit, seconds since 1970
    tokens           tokens of the answer, with the token that ended it; of an answer that its reader closed, those
                     that were read. Over vLLM the first 256 at most
    differences      places at which full prefill finds another token the likeliest than reuse does; 0 is that of the
                     answer's first token. Near-ties are among them
    near_ties        number of these places at which full prefill finds both tokens almost equally likely: their
                     probabilities differ by less than `NEAR_TIE`. In bfloat16, rounding alone decides many of them
    kl               mean over the tokens of KL(full prefill ‖ reuse) in nats, or a little less: see
                     `predictions.compare`; 0 if `exact`
    computed_tokens  tokens that were computed for the audit; 0 if `exact`, and for an answer of one token if the audit
                     of another answer has computed its prompt
    selector         how the tokens to recompute were chosen
    recomputed       share of the reused chunks' tokens that was recomputed; 0 if no chunk was reused
    origin           how the reused chunks were captured: "primed", "asked" (while answering questions), "mixed", or
                     "none" if no chunk-cache was read: nothing was reused, or a server's prefix cache still had the
                     prompt from an earlier request
    outcomes         number of the prompt's chunks by outcome, see `ChunkStats`; none is "trimmed"
    ratio            the recompute ratio, if a quality target chose it; else None
    early            True if early termination "published" has settled which chunks are in focus
    exact            True if every chunk was exact, or recomputed as a whole, so that there was nothing to compare
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
    exact: bool = False
    text: AuditText | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make an audit from the values of `as_dict`, converted to the fields' types; others are ignored.

        Raises KeyError, TypeError, ValueError, AttributeError or OverflowError for a missing or impossible value.
        """
        tokens = _whole(values["tokens"], least=1)
        differences = tuple(_whole(place) for place in values["differences"])
        near_ties = _whole(values["near_ties"])
        if any(before >= after for before, after in pairwise((-1, *differences, tokens))):
            raise ValueError("the differences are not ascending places of the answer")
        if near_ties > len(differences):
            raise ValueError("more near-ties than differences")
        ratio = values["ratio"]
        text = values["text"]
        if text is not None and not all(isinstance(part, str) for part in text.values()):
            raise TypeError("the text of an audit holds something else")
        return cls(
            request_id=str(values["request_id"]),
            created=_number(values["created"], most=_LATEST),
            tokens=tokens,
            differences=differences,
            near_ties=near_ties,
            kl=_number(values["kl"], most=_MOST),
            computed_tokens=_whole(values["computed_tokens"]),
            selector=str(values["selector"]),
            recomputed=_number(values["recomputed"], most=1.0),
            origin=str(values["origin"]),
            outcomes={str(name): _whole(count) for name, count in values["outcomes"].items()},
            ratio=None if ratio is None else _number(ratio, most=1.0),
            early=bool(values["early"]),
            exact=bool(values["exact"]),
            text=None if text is None else AuditText(**text),
        )

    @property
    def is_same(self) -> bool:
        """True if `differences` is empty, so there is not even a near-tie; also if `exact`."""
        return not self.differences

    @property
    def agreeing(self) -> int:
        """Number of places at which reuse and full prefill find the same token the likeliest; all if `exact`."""
        return self.tokens - len(self.differences)

    @property
    def agreeing_net(self) -> int:
        """`agreeing`, with the near-ties counted as agreement."""
        return self.agreeing + self.near_ties

    @property
    def agreement(self) -> float:
        """`agreeing` divided by the number of audited tokens: 0 to 1."""
        return self.agreeing / self.tokens

    @property
    def first_difference(self) -> int | None:
        """The first place that differs, counted from 0: the number of tokens that agree before it. None without one."""
        return self.differences[0] if self.differences else None

    def as_dict(self) -> dict[str, object]:
        """Return field name → plain value, for JSON, and with them `agreement`, `is_same` and `first_difference`."""
        derived = {
            "agreement": self.agreement,
            "is_same": self.is_same,
            "first_difference": self.first_difference,
        }
        return asdict(self) | derived


def _whole(value: str | float, *, least: int = 0) -> int:
    number = int(value)
    if not least <= number <= _MOST:
        raise ValueError(f"{value} is out of range")
    return number


def _number(value: str | float, *, most: float) -> float:
    number = float(value)
    if not 0.0 <= number <= most:  # NaN too
        raise ValueError(f"{value} is out of range")
    return number


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
    """Return how a prompt was reused, as its plan was carried out; `exact` is `RequestStats.exact`."""
    reports = progress.segment_reports()
    chunks = [
        (len(segment.token_ids), report)
        for segment, report in zip(request.prompt.segments, reports, strict=False)
        if segment.kind == "chunk"
    ]
    reused = [(tokens, report) for tokens, report in chunks if report.variant_id is not None]
    tokens_reused = sum(tokens for tokens, _ in reused)
    tokens_recomputed = sum(report.recomputed for _, report in reused)
    origins = {"primed" if report.primed else "asked" for _, report in reused}
    origin = "none"
    if origins:
        origin = origins.pop() if len(origins) == 1 else "mixed"
    return ReuseFacts(
        selector=request.config.method.selector,
        recomputed=tokens_recomputed / tokens_reused if tokens_reused else 0.0,
        origin=origin,
        outcomes=dict(Counter(str(report.outcome) for _, report in chunks)),
        ratio=request.config.recompute_ratio if request.quality else None,
        early=progress.focus_layer is not None,
        exact=exact,
    )
