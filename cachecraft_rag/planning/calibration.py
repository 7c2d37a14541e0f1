"""α calibrated on a validation set (Cache-Craft eq. 13), in a file next to the store.

`cachecraft calibrate` writes it; `Engine.from_pretrained` reads it if `ReuseConfig.alpha` is not given. It is valid for
one model and one way of choosing tokens: with another selector the same α gives another quality.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.early_termination import EarlyTerminationRule
from cachecraft_rag.store.small_file import replace_file

CALIBRATION_FILE = "calibration.json"  # inside the folder that a user names as the store

# of `evaluation.calibrate.METRICS`: the share of positions with the same most likely token, which audits measure too
AGREEMENT_METRIC = "top1"

_MOST_QUESTIONS = 1_000_000_000  # more are those of a damaged file

logger = logging.getLogger("cachecraft_rag")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of a calibration.

    alpha                     α* of eq. 13
    metric, quality           the target: a mean of at least `quality`
    reached, low              the mean on the validation set, and the lower end of its 90 % confidence interval
    recomputed                share of chunk tokens that were recomputed, on average (E[CFO])
    dataset, questions        the validation set
    origin                    context of the chunks at capture, a name of `evaluation.origins`
    selector, budget_scope, drift, nearest_share, scoring, early_termination, early_termination_window
                              settings of the calibration
    created                   time of the calibration, seconds since 1970; 0: not noted
    """

    alpha: float
    metric: str
    quality: float
    reached: float
    low: float
    recomputed: float
    dataset: str
    questions: int
    origin: str
    selector: str
    budget_scope: str
    drift: float
    # the fields below may be missing: files of earlier versions lack them, and were calibrated with these values
    nearest_share: float = 0.0
    created: float = 0.0
    scoring: str = "corrected"
    early_termination: EarlyTerminationRule = "off"
    early_termination_window: int = 3

    def fits(self, config: ReuseConfig) -> bool:
        """Return True for the calibration's way of choosing tokens, with any α and ratio, in the scope "anywhere"."""
        mine = _settings(self, self.nearest_share)
        theirs = _settings(config.method, config.nearest_share)
        return config.method.scope == "anywhere" and mine == theirs

    @property
    def agreement(self) -> float | None:
        """Share of tokens that agreed with full prefill at this α, or None if another metric was calibrated."""
        return self.reached if self.metric == AGREEMENT_METRIC else None

    def __str__(self) -> str:
        return (
            f"α = {self.alpha:.3g}, calibrated for {self.metric} ≥ {self.quality:g} on {self.questions} questions of "
            f"{self.dataset}"
        )


def _settings(method: Calibration | ReuseMethod, nearest_share: float) -> tuple[object, ...]:
    """Return the settings on which the quality at an α depends."""
    rule = method.early_termination
    window = method.early_termination_window if rule == "published" else None
    return (
        method.selector,
        method.budget_scope,
        method.drift,
        nearest_share,
        method.scoring,
        rule,
        window,
    )


def save_calibration(store: Path, fingerprint: str, calibration: Calibration) -> None:
    """Save the calibration of a model in a store's folder, in place of an earlier one; those of other models stay.

    A missing folder is created. A file that cannot be read is logged and replaced; one that cannot be written is a
    StoreError. Of two processes that save at once, one may lose its result.
    """
    path = store / CALIBRATION_FILE
    content = json.dumps(_known(path) | {fingerprint: asdict(calibration)}, indent=1)
    try:
        replace_file(path, content.encode())
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror}. Name a folder you may write to."
        ) from error


def load_calibration(store: Path, fingerprint: str) -> Calibration | None:
    """Return the calibration of this model, whatever it `fits`; None without one, or if it is damaged (logged)."""
    known = _known(store / CALIBRATION_FILE)
    if fingerprint not in known:
        return None
    entry = known[fingerprint]
    try:
        calibration = Calibration(**entry)  # type: ignore[arg-type]  # JSON says nothing about types
        shares = (calibration.quality, calibration.reached, calibration.recomputed)
        numbers = (
            calibration.alpha,
            calibration.low,
            calibration.questions,
            calibration.created,
            *shares,
        )
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError(
                "alpha, low, questions, created, quality, reached and recomputed must be numbers"
            )
        if not isinstance(calibration.metric, str):
            raise TypeError("metric must be a text")
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError("quality, reached and recomputed must lie between 0 and 1")
        if not 1 <= calibration.questions <= _MOST_QUESTIONS or not math.isfinite(
            calibration.created
        ):
            raise ValueError("questions or created is out of range")
        ReuseMethod(
            alpha=calibration.alpha,
            early_termination=calibration.early_termination,
            early_termination_window=calibration.early_termination_window,
        )
    except (TypeError, AttributeError, ValueError, ConfigError) as error:
        logger.warning(
            "%s is damaged (%s); run cachecraft calibrate again", store / CALIBRATION_FILE, error
        )
        return None
    return calibration


def all_calibrations(store: Path) -> dict[str, Calibration]:
    """Return fingerprint → calibration of each model in a store's folder; damaged ones are logged and left out."""
    calibrations = {
        name: load_calibration(store, name) for name in _known(store / CALIBRATION_FILE)
    }
    return {
        name: calibration for name, calibration in calibrations.items() if calibration is not None
    }


def _known(path: Path) -> dict[str, dict[str, object]]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read (%s); run cachecraft calibrate again", path, error)
        return {}
    if not isinstance(read, dict):
        logger.warning("%s is damaged (no object); run cachecraft calibrate again", path)
        return {}
    return read
