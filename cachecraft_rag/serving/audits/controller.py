"""A quality target instead of a recompute ratio: audits raise or lower the ratio until answers agree as wanted.

The controller knows nothing but audits. Each counts for the ratio that its answer was given with, and old ones fade, so
the controller follows documents and questions that change. It estimates for every ratio which share of tokens would
differ from full prefill's: from the audits at that ratio, and, as far as these are few, from those at all other ratios.
It then chooses the smallest ratio for which the estimate is good enough. So it can go from the first ratio to the right
one in a single step, and needs not try those between.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass

from cachecraft_rag.checks import check_number
from cachecraft_rag.errors import ConfigError

LEVELS = tuple(step / 20 for step in range(21))  # 0, 0.05, 0.1 … 1
FIRST = 0.15  # ratio before the first audits
_BEFORE_UP = 10  # audits at a ratio before it is left for a larger one
_BEFORE_DOWN = 20  # audits at a ratio before it is left for a smaller one
# A smaller ratio is chosen only if this times the share of tokens that may differ is not exceeded there: otherwise the
# controller would go up and down between two neighbouring ratios.
_SPARE = 0.9
_FADING = 0.5 ** (1.0 / 150.0)  # of audits with each newer one: after 150 an audit counts half
# Share of tokens that differ at a ratio r, as a multiple of what differs at 0: (1 - r) to this power. Of the exponents
# tried it holds a target with two models with the fewest recomputed tokens (docs/decisions/quality-target.md).
_EXPONENT = 1.5
_TOKENS_OF_OTHERS = 800.0  # tokens at a ratio that count as much as those at all others
# Assumed beside the audits: this share of tokens differs at ratio 0, as if so many tokens had been audited there.
_ASSUMED_DIFFERING = 0.06
_ASSUMED_TOKENS = 100.0
_Z = 1.645  # of a one-sided 95 % bound


@dataclass(frozen=True, slots=True)
class QualityTarget:
    """Agreement of answers with full prefill that is wanted, and the ratios to keep it with.

    agreement  the target for `Audit.agreement`, with near-ties counted as agreement; more than 0 and less than 1
    min_ratio  smallest recompute ratio, 0 to 1
    max_ratio  largest recompute ratio; at 1 every token agrees
    """

    agreement: float
    min_ratio: float = 0.0
    max_ratio: float = 1.0

    def __post_init__(self) -> None:
        """Check every field."""
        check_number("quality_target", self.agreement, most=1.0)
        check_number("min_ratio", self.min_ratio, most=1.0)
        check_number("max_ratio", self.max_ratio, most=1.0)
        if not 0.0 < self.agreement < 1.0:
            raise ConfigError(
                f"quality_target must be between 0 and 1, such as 0.98, not {self.agreement}"
            )
        if self.min_ratio > self.max_ratio:
            raise ConfigError(
                f"min_ratio {self.min_ratio} is above max_ratio {self.max_ratio}; exchange them"
            )


@dataclass(slots=True)
class _Level:
    """Fading sums over the audits at one ratio.

    answers    number of audits, each counted less the older it is
    tokens     their tokens
    agreeing   `Audit.agreeing_net` of them
    squares    sums of tokens², tokens × agreeing and agreeing², for the variance between answers
    """

    answers: float = 0.0
    tokens: float = 0.0
    agreeing: float = 0.0
    tokens_squared: float = 0.0
    products: float = 0.0
    agreeing_squared: float = 0.0

    def fade(self, factor: float) -> None:
        self.answers *= factor
        self.tokens *= factor
        self.agreeing *= factor
        self.tokens_squared *= factor
        self.products *= factor
        self.agreeing_squared *= factor

    def add(self, tokens: int, agreeing: int) -> None:
        self.answers += 1.0
        self.tokens += tokens
        self.agreeing += agreeing
        self.tokens_squared += tokens * tokens
        self.products += tokens * agreeing
        self.agreeing_squared += agreeing * agreeing

    @property
    def differing(self) -> float:
        return self.tokens - self.agreeing

    @property
    def agreement(self) -> float:
        return self.agreeing / self.tokens if self.tokens else 1.0

    @property
    def half_width(self) -> float:
        """Half the width of a one-sided 95 % interval: the standard error of a ratio of means over answers.

        Answers without any difference have no variance; one token that differs is assumed then.
        """
        if not self.tokens:
            return 1.0
        share = self.agreement
        spread = (
            self.agreeing_squared - 2 * share * self.products + share * share * self.tokens_squared
        )
        assumed = 1.0 if share == 1.0 else 0.0
        return _Z * math.sqrt(max(spread, 0.0) + assumed) / self.tokens


class RatioController:
    """Chooses the recompute ratio. Not thread-safe, except `ratio` and `choice`.

    Ratios are `min_ratio`, `max_ratio` and the multiples of 0.05 between; audits with others are ignored.

    >>> controller = RatioController(QualityTarget(0.98))
    >>> controller.ratio
    0.15
    >>> for _ in range(40):
    ...     controller.add(controller.ratio, tokens=16, agreeing=14)
    >>> controller.ratio > 0.15
    True
    """

    def __init__(self, target: QualityTarget) -> None:
        self.target = target
        within = [level for level in LEVELS if target.min_ratio < level < target.max_ratio]
        self._ratios = sorted({target.min_ratio, *within, target.max_ratio})
        self._levels = [_Level() for _ in self._ratios]
        self._place = max(0, bisect.bisect_right(self._ratios, FIRST) - 1)
        self._since = 0  # audits at the present ratio since it was chosen
        # What `seed` was given: the share of tokens that would differ at ratio 0, as if so many tokens had been audited
        # there. The weight is 1 at first and fades as audits do; 0: without a measurement.
        self._seed_share = 0.0
        self._seed_tokens = 0.0
        self._seed_weight = 0.0

    @property
    def ratio(self) -> float:
        """Ratio of the next answer: first the largest up to 0.15, or the smallest, if no `seed` or `resume` set it."""
        return self._ratios[self._place]

    def _reason(self, place: int) -> str:
        ratio = self._ratios[place]
        level = self._levels[place]
        target = self.target.agreement
        if level.answers < 1.0:
            return f"r = {ratio:g}: not audited yet, target {target:g}"
        low = max(0.0, level.agreement - level.half_width)
        high = min(1.0, level.agreement + level.half_width)
        return (
            f"r = {ratio:g}: {level.answers:.0f} audits, agreement {level.agreement:.3f} [{low:.3f}, {high:.3f}], "
            f"target {target:g}"
        )

    def seed(self, *, ratio: float, tokens: int, agreement: float, newer: int = 0) -> None:
        """Begin with an earlier measurement, as by `cachecraft calibrate`: `agreement` (0 to 1) of `tokens` at `ratio`.

        It takes the place of what is otherwise assumed, counts as audits of so many tokens do, 800 at most, and fades
        like them. While there are fewer than ten audits it chooses the ratio; with more, it is chosen as by `resume`.
        At least one token is assumed to differ, and a ratio of 1 says nothing. `newer` of the audits of `resume`, which
        is called before, are newer than the measurement.
        """
        remaining = _remaining(ratio)
        if not remaining:
            return
        weight = min(float(tokens), _TOKENS_OF_OTHERS)
        self._seed_share = max(1.0, weight * (1.0 - agreement)) / (weight * remaining)
        self._seed_tokens = weight * remaining
        self._seed_weight = _FADING**newer
        if sum(level.answers for level in self._levels) < _BEFORE_UP:
            self._move(self._smallest_that_holds(1.0 - self.target.agreement, 0))
        else:
            self._choose_from_evidence()

    def resume(self, audits: Iterable[tuple[float, int, int]]) -> None:
        """Start from earlier audits, oldest first: (ratio, tokens, agreeing tokens) of each, as of `add`.

        The controller begins at the ratio of the last one. From ten audits on it begins where all of them together
        lead, however few are of that ratio, because the last one may be of another process or of another target.
        """
        count = 0
        for ratio, tokens, agreeing in audits:
            if ratio in self._ratios:
                place = self._ratios.index(ratio)
                self._since = self._since + 1 if place == self._place else 1
                self._place = place
                self._take_up(place, tokens, agreeing)
                count += 1
        if count >= _BEFORE_UP:
            self._choose_from_evidence()

    def choice(self) -> tuple[float, str]:
        """Return the next answer's ratio, and why: "r = 0.15: not audited yet, target 0.98". For any thread."""
        place = self._place
        return self._ratios[place], self._reason(place)

    def add(self, ratio: float, *, tokens: int, agreeing: int) -> None:
        """Take up an audit of an answer that was given with this ratio, and choose the next ratio.

        The ratio changes only if this audit is of the present ratio, and at least the 10th since that was chosen (the
        20th to go down). `agreeing` is `Audit.agreeing_net`: near-ties count as agreement.
        """
        if ratio not in self._ratios:
            return
        place = self._ratios.index(ratio)
        self._take_up(place, tokens, agreeing)
        if place == self._place:
            self._since += 1
            self._choose()

    def _take_up(self, place: int, tokens: int, agreeing: int) -> None:
        """Add an audit of the ratio at a place; all earlier ones, and the measurement, fade a little."""
        for level in self._levels:
            if level.answers:
                level.fade(_FADING)
        self._seed_weight *= _FADING
        self._levels[place].add(tokens, agreeing)

    def _choose_from_evidence(self) -> None:
        """Go where all audits lead, however few there were since the last change."""
        allowed = 1.0 - self.target.agreement
        if self._differing(self._place, self._differing_at_zero()) > allowed:
            self._move(self._smallest_that_holds(allowed, 0))
        else:
            self._move(min(self._place, self._smallest_that_holds(_SPARE * allowed, 0)))

    def _choose(self) -> None:
        if self._since < _BEFORE_UP:
            return
        allowed = 1.0 - self.target.agreement
        if self._differing(self._place, self._differing_at_zero()) > allowed:
            self._move(self._smallest_that_holds(allowed, self._place + 1))
        elif self._since >= _BEFORE_DOWN:
            self._move(min(self._place, self._smallest_that_holds(_SPARE * allowed, 0)))

    def _smallest_that_holds(self, allowed: float, begin: int) -> int:
        """Return the first place from `begin` on where no more than this share of tokens should differ, or the last."""
        at_zero = self._differing_at_zero()
        last = len(self._ratios) - 1
        places = range(begin, last)
        return next((place for place in places if self._differing(place, at_zero) <= allowed), last)

    def _differing(self, place: int, at_zero: float) -> float:
        """Estimate the share of tokens that differ at a ratio: from its own audits and, as a prior, all ratios'."""
        level = self._levels[place]
        expected = _TOKENS_OF_OTHERS * at_zero * _remaining(self._ratios[place])
        return (level.differing + expected) / (level.tokens + _TOKENS_OF_OTHERS)

    def _differing_at_zero(self) -> float:
        """Estimate the share of tokens that differ at ratio 0, from the audits at all ratios."""
        # What is assumed gives way to a measurement, and comes back as that fades.
        assumed = _ASSUMED_TOKENS * (1.0 - self._seed_weight)
        measured = self._seed_tokens * self._seed_weight
        differing = assumed * _ASSUMED_DIFFERING + measured * self._seed_share
        tokens = assumed + measured
        for ratio, level in zip(self._ratios, self._levels, strict=True):
            if level.answers:
                differing += level.differing
                tokens += level.tokens * _remaining(ratio)
        return differing / tokens

    def _move(self, place: int) -> None:
        if place != self._place:
            self._place = place
            self._since = 0


def _remaining(ratio: float) -> float:
    """Return what usually remains at this ratio of the differences at ratio 0, as a share of them."""
    return float((1.0 - ratio) ** _EXPONENT)
