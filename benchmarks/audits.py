"""`python -m benchmarks audits`: what audits cost the requests beside them, and what they cost in all.

Blocks of requests run without audits and with them in turn, over the same primed chunk-caches. Each question is asked
in both kinds of blocks, so times are compared in pairs. The next request comes after a pause in which the audit of the
one before has begun.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json, print_table, progress_bar
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion, handbook_dataset
from cachecraft_rag.evaluation.intervals import ratio_interval
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import load_checked
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.audits.audit_log import audits_in
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.progress import Progress

_BLOCK = 20  # requests of one kind in a row


@dataclass
class RequestTimes:
    """Times of the requests of one kind, in the order of the questions; in seconds.

    ttft   to the first token
    total  to the end of the answer
    """

    ttft: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class AuditCost:
    """Result of the benchmark; pairs of means are (without audits, with audits), in seconds.

    requests          number of pairs
    ttft_s, total_s   times of the requests
    ttft_ratio        time to the first token with audits, divided by that without, and its 95 % interval
    total_ratio       the same of the whole request
    audited           answers that were audited
    computed_share    tokens computed for audits, divided by the tokens of the audited prompts
    """

    requests: int
    ttft_s: tuple[float, float]
    total_s: tuple[float, float]
    ttft_ratio: tuple[float, float, float]
    total_ratio: tuple[float, float, float]
    audited: int
    computed_share: float


def measure(
    decoder: Decoder,
    dataset: Dataset,
    folder: Path,
    *,
    requests: int,
    pause_s: float,
    answer_tokens: int,
    progress: Callable[[Progress], None],
) -> AuditCost:
    """Ask each question without audits and with them, over the same primed chunk-caches."""
    times = {"off": RequestTimes(), "idle": RequestTimes()}
    prompt_tokens = 0
    questions = [dataset.questions[number % len(dataset.questions)] for number in range(requests)]
    with ChunkCacheStore.open(folder) as store:
        with Engine(decoder, store, new_variants="off") as engine:
            primer = engine.primer()
            for chunks in dataset.documents:
                primer.prime(chunks)

        for begin in range(0, requests, _BLOCK):
            kinds = ("off", "idle") if begin // _BLOCK % 2 == 0 else ("idle", "off")
            for kind in kinds:
                # Nothing is captured, so both kinds find the same chunk-caches.
                config = ReuseConfig.deterministic()
                with Engine(
                    decoder, store, new_variants="off", audit=kind, config=config
                ) as engine:
                    for question in questions[begin : begin + _BLOCK]:
                        stats = _ask(engine, question, answer_tokens)
                        times[kind].ttft.append(stats.ttft_s)
                        times[kind].total.append(stats.total_s)
                        prompt_tokens += stats.tokens_prompt if kind == "idle" else 0
                        time.sleep(pause_s)
                    engine.settle()
                done = len(times["off"].ttft) + len(times["idle"].ttft)
                progress(Progress(done, 2 * requests, "Asking"))

    audits = audits_in(folder)
    ttft = ratio_interval(times["idle"].ttft, times["off"].ttft)
    total = ratio_interval(times["idle"].total, times["off"].total)
    return AuditCost(
        requests=requests,
        ttft_s=(statistics.fmean(times["off"].ttft), statistics.fmean(times["idle"].ttft)),
        total_s=(statistics.fmean(times["off"].total), statistics.fmean(times["idle"].total)),
        ttft_ratio=(ttft.mean, ttft.low, ttft.high),
        total_ratio=(total.mean, total.low, total.high),
        audited=len(audits),
        computed_share=sum(audit.computed_tokens for audit in audits) / prompt_tokens,
    )


def _ask(engine: Engine, question: EvaluationQuestion, answer_tokens: int) -> RequestStats:
    answer = engine.stream(
        question.text, question.passages, sampling=SamplingParams(max_new_tokens=answer_tokens)
    )
    for _ in answer:
        pass
    return answer.stats


def main(
    model: options.Model = "demo",
    dtype: Annotated[
        str, typer.Option(help="Number format of the model; auto is that of the checkpoint.")
    ] = "auto",
    requests: Annotated[int, typer.Option(min=2, help="Requests of each kind.")] = 200,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    pause: Annotated[float, typer.Option(min=0.0, help="Seconds between two requests.")] = 0.2,
    as_json: options.Json = False,
) -> None:
    """Measure what audits cost the requests beside them, and what they compute."""
    options.quiet_libraries()
    decoder = load_checked(model, dtype=dtype)
    dataset = handbook_dataset(passages=5, limit=None, seed=0)
    with tempfile.TemporaryDirectory() as folder, progress_bar("Asking", remaining=True) as show:
        cost = measure(
            decoder,
            dataset,
            Path(folder),
            requests=requests,
            pause_s=pause,
            answer_tokens=answer_tokens,
            progress=show,
        )
    if as_json:
        print_json(asdict(cost))
        return
    rows = []
    for name, seconds, ratio in (
        ("first token", cost.ttft_s, cost.ttft_ratio),
        ("whole request", cost.total_s, cost.total_ratio),
    ):
        interval = f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"
        rows.append((name, f"{seconds[0]:.3f} s", f"{seconds[1]:.3f} s", interval))
    print_table(
        (f"{cost.requests} pairs", "without audits", "with audits", "ratio of means"),
        rows,
        numbers=True,
    )
    out.print(
        f"{cost.audited} answers were audited, for which {cost.computed_share:.2f} times the tokens of their prompts "
        "were computed.",
        soft_wrap=True,
    )
