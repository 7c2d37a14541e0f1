"""Summary of audits: the share of answers that equal full prefill's, with intervals, and the worst answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from cachecraft_rag.checks import check_whole
from cachecraft_rag.evaluation.intervals import (
    RESAMPLES,
    Interval,
    mean_interval,
    ratio_interval,
    share_interval,
)
from cachecraft_rag.serving.audits.audit import Audit

WORST = 10
# Places of an answer's tokens that are counted together; the first token is 1.
_POSITIONS = ((1, 1), (2, 4), (5, 16), (17, 64), (65, None))
_SHARES = (0.1, 0.2, 0.3, 0.5, 1.0)  # upper ends of the groups by recomputed share
# Answers that are drawn for one interval: 10,000 resamples of 500 answers, and fewer of more, or the summary of a full
# store would take minutes. The ends of an interval then vary by some hundredths of its width.
_DRAWS = 5_000_000
_LEAST_RESAMPLES = 400


@dataclass(frozen=True, slots=True)
class QualityGroup:
    """Audited answers with something in common.

    name       what they have in common
    answers    how many there are
    same       share with `Audit.is_same`; 95 % Wilson interval
    agreement  share of the places at which reuse and full prefill find the same token the likeliest; 95 % bootstrap
               interval over answers
    net        the same with near-ties (see `Audit.near_ties`) counted as agreeing
    kl         mean KL(full prefill ‖ reuse) per token in nats; 95 % bootstrap interval over answers
    """

    name: str
    answers: int
    same: Interval
    agreement: Interval
    net: Interval
    kl: Interval


@dataclass(frozen=True, slots=True)
class PositionGroup:
    """Tokens at the same places of their answers.

    first, last  places, the answer's first token is 1; `last`: None for "and all further ones"
    tokens       audited tokens at these places
    agreement    share of them at which reuse and full prefill find the same token the likeliest, after the same
                 beginning
    """

    first: int
    last: int | None
    tokens: int
    agreement: float


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The audits of a store, summed up. Exact answers are counted, and are in no group.

    exact            answers with `Audit.exact`: no chunk was reused inexactly, so that nothing was compared
    overall          all answers that were compared; None if there are none
    by_origin        by how their chunks were captured: primed, asked (while answering), mixed, or none (none was read)
    by_selector      by how the recomputed tokens were chosen
    by_recomputed    by the share of the reused chunks' tokens that was recomputed
    by_termination   with and without early termination
    by_position      by the token's place in its answer
    computed_tokens  tokens that were computed for the audits
    worst            answers with a difference, those that agree least first; () if every answer agrees everywhere
    """

    exact: int
    overall: QualityGroup | None
    by_origin: tuple[QualityGroup, ...]
    by_selector: tuple[QualityGroup, ...]
    by_recomputed: tuple[QualityGroup, ...]
    by_termination: tuple[QualityGroup, ...]
    by_position: tuple[PositionGroup, ...]
    computed_tokens: int
    worst: tuple[Audit, ...]

    def as_dict(self) -> dict[str, object]:
        """Return plain values by field name, for JSON; each of `worst` is the dict of `Audit.as_dict`."""
        return asdict(self) | {"worst": [audit.as_dict() for audit in self.worst]}


def summarise_audits(audits: Sequence[Audit], *, worst: int = WORST) -> QualityReport:
    """Return the summary of audits, over all and in groups, which are sorted by name or place; empty ones are left out.

    Exact answers are only counted. At most `worst` (0 or more) answers that differ are listed, the worst first.
    """
    check_whole("worst", worst)
    exact = sum(audit.exact for audit in audits)
    audits = [audit for audit in audits if not audit.exact]
    changed = [audit for audit in audits if not audit.is_same]
    changed.sort(key=lambda audit: (audit.agreement, -audit.kl))
    return QualityReport(
        exact=exact,
        overall=_group("all", audits) if audits else None,
        by_origin=_groups(audits, lambda audit: audit.origin),
        by_selector=_groups(audits, lambda audit: audit.selector),
        by_recomputed=_groups(audits, _share_name),
        by_termination=_groups(
            audits, lambda audit: "terminated early" if audit.early else "all layers"
        ),
        by_position=_positions(audits),
        computed_tokens=sum(audit.computed_tokens for audit in audits),
        worst=tuple(changed[:worst]),
    )


def _share_name(audit: Audit) -> str:
    """Return the group of a recomputed share."""
    if audit.recomputed == 0.0:
        return "nothing"
    lower = 0.0
    for upper in _SHARES:
        if audit.recomputed <= upper:
            break
        lower = upper
    return f"{lower:.0%} to {upper:.0%}"


def _groups(audits: Sequence[Audit], name_of: Callable[[Audit], str]) -> tuple[QualityGroup, ...]:
    members: dict[str, list[Audit]] = {}
    for audit in audits:
        members.setdefault(name_of(audit), []).append(audit)
    return tuple(_group(name, members[name]) for name in sorted(members))


def _group(name: str, audits: Sequence[Audit]) -> QualityGroup:
    agreeing = [audit.agreeing for audit in audits]
    tokens = [audit.tokens for audit in audits]
    resamples = max(_LEAST_RESAMPLES, min(RESAMPLES, _DRAWS // len(audits)))
    return QualityGroup(
        name=name,
        answers=len(audits),
        same=share_interval(sum(audit.is_same for audit in audits), len(audits)),
        agreement=ratio_interval(agreeing, tokens, resamples=resamples),
        net=ratio_interval([audit.agreeing_net for audit in audits], tokens, resamples=resamples),
        kl=mean_interval([audit.kl for audit in audits], resamples=resamples),
    )


def _positions(audits: Sequence[Audit]) -> tuple[PositionGroup, ...]:
    groups = []
    for first, last in _POSITIONS:
        tokens = 0
        differing = 0
        for audit in audits:
            end = audit.tokens if last is None else min(audit.tokens, last)
            tokens += max(0, end - first + 1)
            differing += sum(first <= place + 1 <= end for place in audit.differences)
        if tokens:
            groups.append(PositionGroup(first, last, tokens, 1.0 - differing / tokens))
    return tuple(groups)
