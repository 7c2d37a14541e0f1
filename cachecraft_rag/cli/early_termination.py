"""`cachecraft eval early-termination`: whether early termination pays on your model and data."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachecraft_rag.cli import evaluate, options
from cachecraft_rag.cli.options import out, print_json, progress_bar, waiting

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.quality.early_termination import RuleComparison

Ratio = Annotated[
    float, typer.Option("--recompute-ratio", min=0.01, max=1.0, help="Recompute ratio without early termination.")
]


def early_termination(
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
    from cachecraft_rag.errors import ConfigError
    from cachecraft_rag.evaluation.quality import runner
    from cachecraft_rag.evaluation.quality.conditions import condition_named, origins_of
    from cachecraft_rag.evaluation.quality.early_termination import compare_rules

    condition = condition_named(origin)
    if condition.behind is None:
        raise ConfigError(
            f"with the origin {origin}, chunk-caches change from question to question; choose unrelated, neighbours, "
            "alone or similar"
        )
    dataset = evaluate.dataset_of(data, format, passages=passages, limit=limit, seed=seed, chunk_tokens=None)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        with waiting("Loading the model"):
            engine = opened.enter_context(runner.open_engine(model, folder, dtype=dtype))
        origins = origins_of(condition, engine, dataset, seed=seed, answer_tokens=answer_tokens)
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
