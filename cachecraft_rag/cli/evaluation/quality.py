"""`cachecraft quality`: how often the answers of a store equal full prefill's, from its audits."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachecraft_rag.checks import check_text
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json, print_table, takes
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.errors import StoreError

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.intervals import Interval
    from cachecraft_rag.evaluation.quality import QualityGroup, QualityReport
    from cachecraft_rag.serving.audits.audit import Audit

ID_LETTERS = 8  # of a request id in the table
ADVICE = (
    "answers are audited while the engine is idle: start `cachecraft chat` with --audit idle, or open the engine of "
    "a program with audit='idle'"
)
_ORIGINS = {"primed": "by priming", "asked": "while answering", "mixed": "both ways"}


@takes("store")
def quality(
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", help="Only answers of this tenant; without it, of all."),
    ] = None,
    worst: Annotated[
        int, typer.Option("--worst", min=0, help="How many of the worst answers to list.")
    ] = 10,
    as_json: options.Json = False,
    *,
    settings: Settings,
) -> None:
    """Show how often answers with reuse equal full prefill's, from the audits of a store.

    Audits run where answers are given, with the setting audit: for example `cachecraft chat --audit idle`. Agreement is
    the share of an answer's places at which reuse and full prefill find the same token the likeliest. "Same" means that
    they do at every place. Brackets are 95 % intervals. Exit code 0 also for poor quality and for a store without
    audits; 2 if there is no store, or its audits cannot be read.
    """
    # Raises StoreError and ConfigError; see `app.main` for exit codes.
    from cachecraft_rag.evaluation.quality import summarise_audits
    from cachecraft_rag.serving.audits.audit_log import audits_in
    from cachecraft_rag.store.config import CACHE_FOLDER

    store = Path(settings["store"])
    if not os.path.isdir(store / CACHE_FOLDER):
        raise StoreError(
            f"{store} holds no chunk-caches, and so no audits of answers; name the folder with --store"
        )
    check_text("--namespace", namespace, optional=True)
    audits = audits_in(store / CACHE_FOLDER, namespace=namespace)
    report = summarise_audits(audits, worst=worst)
    if as_json:
        answers = 0 if report.overall is None else report.overall.answers
        print_json({"answers": answers} | report.as_dict())
    elif audits:
        print_report(report)
    elif namespace is not None and audits_in(store / CACHE_FOLDER, limit=1):
        out.print(
            f"No audited answers of the tenant {namespace!r} in {store}, but of others: leave --namespace out to see "
            "those of all.",
            soft_wrap=True,
        )
    else:
        out.print(
            f"No audited answers in {store} (--store names another folder); {ADVICE}.",
            soft_wrap=True,
        )


def print_report(report: QualityReport) -> None:
    """Print a report to stdout as tables; of exact answers only the number, because nothing was compared."""
    if report.exact:
        out.print(
            f"{options.counted(report.exact, 'exact answer')}: all chunks were computed or reused without a change, as "
            "in full prefill. Not part of the results below.",
            soft_wrap=True,
        )
    overall = report.overall
    if overall is None:
        return
    out.print(
        f"{options.counted(overall.answers, 'answer')} compared with full prefill. It agrees with every token of "
        f"{_share(overall.same)} of them, and with {_share(overall.agreement)} of all tokens; "
        f"{_share(overall.net)} with near-ties, where it finds both tokens almost equally likely. "
        f"KL divergence {_number(overall.kl)} nats per token.",
        soft_wrap=True,
    )
    out.print(
        f"{options.counted(report.computed_tokens, 'token')} computed for these audits, in idle time.",
        soft_wrap=True,
    )
    _print_groups("chunks captured", report.by_origin)
    _print_groups("selector", report.by_selector)
    _print_groups("recomputed", report.by_recomputed)
    if len(report.by_termination) > 1:
        _print_groups("layers", report.by_termination)

    out.print()
    places = []
    for group in report.by_position:
        name = f"{group.first} and on" if group.last is None else f"{group.first} to {group.last}"
        places.append(
            (
                name if group.first != group.last else str(group.first),
                group.tokens,
                f"{group.agreement:.1%}",
            )
        )
    print_table(("place in the answer", "tokens", "agreement"), places, numbers=True)
    if report.worst:
        _print_worst(report.worst)


def _print_groups(heading: str, groups: Sequence[QualityGroup]) -> None:
    rows = [
        (
            _ORIGINS.get(group.name, group.name),
            group.answers,
            _share(group.same),
            _share(group.agreement),
            _share(group.net),
            _number(group.kl),
        )
        for group in groups
    ]
    out.print()
    print_table(
        (heading, "answers", "same", "agreement", "with near-ties", "KL"), rows, numbers=True
    )


def _print_worst(audits: Sequence[Audit]) -> None:
    out.print()
    rows = []
    for audit in audits:
        first = audit.first_difference
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(audit.created))
        rows.append(
            (
                audit.request_id[:ID_LETTERS],
                when,
                audit.tokens,
                "" if first is None else first,
                f"{audit.agreement:.0%}",
                f"{audit.kl:.3f}",
                _ORIGINS.get(audit.origin, audit.origin),
            )
        )
    print_table(
        (
            "worst answer",
            "audited",
            "tokens",
            "tokens before the first difference",
            "agreement",
            "KL",
            "chunks captured",
        ),
        rows,
    )
    for audit in audits:
        text = audit.text
        if text is not None:
            out.print(f"\n{audit.request_id[:ID_LETTERS]} {text.question.strip()}", soft_wrap=True)
            out.print(f"  both:         {text.same}", soft_wrap=True)
            out.print(f"  reuse:        {text.reuse}", soft_wrap=True)
            out.print(f"  full prefill: {text.full}", soft_wrap=True)


def _share(interval: Interval) -> str:
    return f"{interval.mean:.1%} [{interval.low:.1%}, {interval.high:.1%}]"


def _number(interval: Interval) -> str:
    return f"{interval.mean:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
