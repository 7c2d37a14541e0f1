"""A quality target instead of a recompute ratio: audits raise or lower the ratio until answers agree as wanted.

The controller knows nothing but audits. Each counts for the ratio that its answer was given with. It goes up a step
when the audits at the present ratio show that too few tokens agree, and down a step when they show that more agree than
wanted, unless the lower ratio was found too low not long ago. Old audits fade, so it follows documents and questions
that change.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass

from cachecraft_rag.checks import check_number
from cachecraft_rag.errors import ConfigError

LEVELS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
FIRST = 0.15  # ratio before the first audits
_LEAST = 20.0  # audits at a ratio before it is left
_ENOUGH = 60.0  # audits after which a mean below the target is enough to go up
_HALF_LIFE = 150.0  # audits after which one counts half
_REMEMBERED = 8.0  # audits, as far as they still count, that keep a ratio known as too low
_Z = 1.645  # of a one-sided 95 % bound


@dataclass(frozen=True, slots=True)
class QualityTarget:
    """Agreement of answers with full prefill that is wanted, and the ratios to keep it with.

    agreement  the target for `Audit.agreement`, with near-ties counted as agreement; more than 0 and less than 1
    min_ratio  smallest recompute ratio, 0 to 1
    max_ratio  largest recompute ratio; at 1 every token agrees

    Raises ConfigError for a value of a wrong type or out of range, and for a `min_ratio` above `max_ratio`.
    """

    agreement: float
    min_ratio: float = 0.0
    max_ratio: float = 1.0

    def __post_init__(self) -> None:
        """Check every field. Raises ConfigError."""
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

    @property
    def ratio(self) -> float:
        """The recompute ratio of the next answer, from the target's `min_ratio` to its `max_ratio`.

        It is one of these two or of the `LEVELS` between them. Before the first audit it is the largest of them that is
        at most 0.15, or else the smallest.
        """
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

    def resume(self, audits: Iterable[tuple[float, int, int]]) -> None:
        """Take up earlier audits, oldest first: (ratio, tokens, agreeing tokens) of each.

        Their ratios say where the controller was, so it goes on there even if the first audits are gone; the last one
        may move it a step further, as in `add`. Audits with a ratio that this controller does not choose among are
        ignored. Raises nothing.
        """
        for ratio, tokens, agreeing in audits:
            if ratio in self._ratios:
                place = self._ratios.index(ratio)
                if place != self._place:
                    self._place = place
                    self._since = 0
                self.add(ratio, tokens=tokens, agreeing=agreeing)

    def choice(self) -> tuple[float, str]:
        """Return the recompute ratio of the next answer, and a sentence with the reason. Any thread may call this.

        The sentence is such as "r = 0.15: not audited yet, target 0.98". Raises nothing.
        """
        place = self._place
        return self._ratios[place], self._reason(place)

    def add(self, ratio: float, *, tokens: int, agreeing: int) -> None:
        """Take up an audit of an answer that was given with this ratio, and choose the next ratio.

        The ratio moves by one step at most, and only if this audit is of the present ratio and at least the 20th since
        that was chosen. An audit with a ratio that this controller does not choose among is ignored. Raises nothing.

        Args:
            ratio: recompute ratio of the answer.
            tokens: tokens of the answer that were audited, at least 1.
            agreeing: how many of them full prefill finds the likeliest, too.
        """
        if ratio not in self._ratios:
            return
        factor = 0.5 ** (1.0 / _HALF_LIFE)
        for level in self._levels:
            level.fade(factor)
        place = self._ratios.index(ratio)
        self._levels[place].add(tokens, agreeing)
        if place == self._place:
            self._since += 1
            self._choose()

    def _choose(self) -> None:
        if self._since < _LEAST:
            return
        level = self._levels[self._place]
        target = self.target.agreement
        is_below = level.agreement + level.half_width < target
        is_below_for_long = self._since >= _ENOUGH and level.agreement < target
        if is_below or is_below_for_long:
            self._move(1)
        elif level.agreement - level.half_width > target and not self._is_known_as_too_low(
            self._place - 1
        ):
            self._move(-1)

    def _is_known_as_too_low(self, place: int) -> bool:
        if place < 0:
            return True
        level = self._levels[place]
        return level.answers >= _REMEMBERED and level.agreement < self.target.agreement

    def _move(self, step: int) -> None:
        place = min(max(self._place + step, 0), len(self._ratios) - 1)
        if place != self._place:
            self._place = place
            self._since = 0
