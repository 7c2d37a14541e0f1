"""Early termination compared fairly: against a smaller recompute ratio of the same cost.

Every rule that stops recomputation early saves work, whichever tokens it stops at, so a comparison with no rule at all
shows nothing. Here each question is answered three times: at the full ratio, at the full ratio with the rule, and
without a rule at the smaller ratio that computes as many token-layers as the rule left. The rule wins if its KL is
lower than that of the smaller ratio.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import formats
from benchmarks.evaluate import origin_named
from benchmarks.methods import CRAFT
from cachecraft_rag.cli import evaluate, options
from cachecraft_rag.cli.options import out, print_json, progress_bar, waiting
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation import runner
from cachecraft_rag.evaluation.intervals import Interval, mean_interval, paired_interval
from cachecraft_rag.evaluation.measuring import METHODS, Method, reference_of
from cachecraft_rag.evaluation.metrics import divergence
from cachecraft_rag.evaluation.origins import Origins
from cachecraft_rag.planning.early_termination import FocusRule
from cachecraft_rag.types import Progress

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset
    from cachecraft_rag.evaluation.measuring import Reference
    from cachecraft_rag.planning.config import ReuseConfig

RULES: tuple[FocusRule, ...] = get_args(FocusRule)


@dataclass(frozen=True, slots=True)
class RuleComparison:
    """One rule under one method, over all questions.

    kl, flat_kl   with the rule, and without it at the smaller ratio of the same cost
    difference    kl - flat_kl, paired by question: above 0 the rule loses
    saved         share of the recomputed token-layers that the rule saves
    """

    method: str
    rule: str
    kl: Interval
    flat_kl: Interval
    difference: Interval
    saved: float

    @property
    def wins(self) -> bool:
        """True if the whole interval is in the rule's favour."""
        return self.difference.high < 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "method": self.method,
            "rule": self.rule,
            "kl": self.kl.mean,
            "flat_kl": self.flat_kl.mean,
            "difference": self.difference.mean,
            "difference_ci": [self.difference.low, self.difference.high],
            "saved": self.saved,
            "wins": self.wins,
        }


def compare_rules(
    engine: Engine,
    dataset: Dataset,
    origins: Origins,
    *,
    ratio: float = 0.15,
    methods: Sequence[Method] = (CRAFT, METHODS["default"]),
    answer_tokens: int = 16,
    progress: Callable[[Progress], None] | None = None,
) -> list[RuleComparison]:
    """Compare every rule under every method over all questions.

    Args:
        engine: as in `runner.evaluate`.
        origins: keeps the engine's store under an origin condition, see `origins.Origins`.
        ratio: recompute ratio r without a rule.
        progress: called before each question.
    """
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for done, question in enumerate(dataset.questions):
        if progress is not None:
            progress(Progress(done, len(dataset.questions), ""))
        origins.before(question)
        reference = reference_of(engine, question, answer_tokens=answer_tokens)
        for method in methods:
            # All three runs probe, however few rows are left: otherwise they would differ in more than the rule.
            config = replace(method.config(ratio), probe_min_rows=0)
            for rule, trial in _trials(engine, reference, config, ratio):
                found.setdefault((method.name, rule), []).append(trial)
    return [_comparison(method, rule, trials) for (method, rule), trials in found.items()]


def _trials(
    engine: Engine, reference: Reference, config: ReuseConfig, ratio: float
) -> list[tuple[str, tuple[float, float, float]]]:
    """For each rule: KL with the rule, KL at the smaller ratio of the same cost, and the share that the rule saves."""
    _, rows, recomputed = _answer(engine, reference, config)
    trials = []
    for rule in RULES:
        kl, rows_left, _ = _answer(engine, reference, replace(config, early_termination=rule))
        saved = (rows - rows_left) / recomputed if recomputed else 0.0
        flat_kl, _, _ = _answer(engine, reference, replace(config, recompute_ratio=ratio * max(0.0, 1.0 - saved)))
        trials.append((str(rule), (kl, flat_kl, saved)))
    return trials


def _answer(engine: Engine, reference: Reference, config: ReuseConfig) -> tuple[float, float, int]:
    """KL to full prefill; rows computed, averaged over the layers; chunk tokens recomputed."""
    question, full = reference.question, reference.answer
    found = engine.score_answer(
        question.text, question.passages, target=full.tokens, max_new_tokens=reference.answer_tokens, config=config
    )
    stats = found.stats
    kl, _ = divergence(full.logits, found.logits)
    return kl, stats.recompute_share * stats.tokens_prompt, stats.tokens_recomputed


def _comparison(method: str, rule: str, trials: Sequence[tuple[float, float, float]]) -> RuleComparison:
    kl, flat, saved = ([trial[part] for trial in trials] for part in range(3))
    return RuleComparison(
        method, rule, mean_interval(kl), mean_interval(flat), paired_interval(kl, flat), sum(saved) / len(saved)
    )


Ratio = Annotated[
    float, typer.Option("--recompute-ratio", min=0.01, max=1.0, help="Recompute ratio without early termination.")
]


def main(
    data: evaluate.Data = None,
    format: evaluate.Format = None,
    model: options.Model = "demo",
    recompute_ratio: Ratio = 0.15,
    limit: evaluate.Limit = 40,
    passages: evaluate.Passages = 10,
    origin: evaluate.Origin = "unrelated",
    answer_tokens: evaluate.AnswerTokens = 16,
    dtype: options.Dtype = "float32",
    seed: evaluate.Seed = 0,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Compare every rule of early termination with a smaller recompute ratio of the same cost."""
    options.set_threads(threads)
    options.quiet_libraries()
    evaluate.require_packages()
    condition = origin_named(origin)
    if condition.behind is None:
        raise ConfigError(
            f"with the origin {origin}, chunk-caches change from question to question; choose unrelated, neighbours, "
            "alone or similar"
        )
    asked = evaluate.Questions(data, format, limit, passages, answer_tokens=answer_tokens, seed=seed)
    dataset = asked.load(formats.read)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        with waiting("Loading the model"):
            engine = opened.enter_context(runner.open_engine(model, folder, dtype=dtype))
        origins = Origins(condition, engine, dataset, seed, answer_tokens)
        with progress_bar("Measuring", remaining=True) as show:
            found = compare_rules(
                engine, dataset, origins, ratio=recompute_ratio, answer_tokens=answer_tokens, progress=show
            )
    if as_json:
        print_json(
            {"questions": len(dataset.questions), "passages": passages, "rules": [one.as_dict() for one in found]}
        )
    else:
        _print(found)


def _print(found: list[RuleComparison]) -> None:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("method", "rule", "saved", "KL", "KL at same cost", "difference (95 %)", "verdict"):
        table.add_column(heading, justify="left" if heading in ("method", "rule", "verdict") else "right")
    for one in found:
        verdict = "wins" if one.wins else "loses" if one.difference.low > 0 else "no difference shown"
        low, high = one.difference.low, one.difference.high
        table.add_row(
            one.method,
            one.rule,
            f"{one.saved:.0%}",
            f"{one.kl.mean:.4f}",
            f"{one.flat_kl.mean:.4f}",
            f"{one.difference.mean:+.4f} [{low:+.4f}, {high:+.4f}]",
            verdict,
        )
    out.print(table)
