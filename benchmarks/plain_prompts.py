"""Prompts that nobody marked against the same passages sent as documents: divergence, reuse and time.

The prompts are those of stock applications: LlamaIndex's template for questions, and LangChain's usual instruction with
a context. Both sides reuse passages that were captured alone, each of its own prompts, and each is compared with full
prefill of its own prompt.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import formats
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.evaluation import evaluate
from cachecraft_rag.cli.options import print_json, progress_bar, takes, waiting
from cachecraft_rag.evaluation import runner
from cachecraft_rag.evaluation.intervals import (
    Interval,
    mean_interval,
    paired_interval,
    ratio_interval,
)
from cachecraft_rag.evaluation.measuring import PLAIN
from cachecraft_rag.evaluation.metrics import divergence, is_right
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.prompts import Prompt

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import EvaluationQuestion
    from cachecraft_rag.planning.config import ReuseConfig

TEMPLATES = {
    "llama_index": (
        "Context information is below.\n---------------------\n{context}\n---------------------\n"
        "Given the context information and not prior knowledge, answer the query.\nQuery: {question}\nAnswer: "
    ),
    "langchain": (
        "Use the following pieces of retrieved context to answer the question. If you don't know the answer, say that "
        "you don't know.\n\n{context}\n\n{question}"
    ),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt from passages that were captured alone.

    kl          to full prefill of the same prompt
    reused      share of the passages' tokens that came from chunk-caches, recomputed ones left out
    ttft        as a multiple of full prefill's
    right       whether the answer holds a gold answer
    full_right  whether full prefill's does
    """

    kl: float
    reused: float
    ttft: float
    right: bool
    full_right: bool


def prompt_of(question: EvaluationQuestion, template: str) -> str:
    """The question and its passages as an application writes them."""
    return template.format(
        context="\n\n".join(one.text for one in question.passages), question=question.text
    )


def measure(
    engine: Engine,
    question: EvaluationQuestion,
    template: str | None,
    config: ReuseConfig,
    *,
    answer_tokens: int,
) -> Measured:
    """Answer one question in full, and from chunk-caches captured behind the passage that stands in for neighbours.

    Args:
        template: of the prompt; None: the passages are documents.
    """
    chunks: Sequence[Chunk] = question.passages if template is None else ()
    text = question.text if template is None else prompt_of(question, template)
    full = engine.score_answer(
        text, chunks, max_new_tokens=answer_tokens, config=replace(config, reuse=False)
    )
    prompt = engine.prompts.build(text, chunks, reserve=answer_tokens, recognise=lambda _: [])
    engine.capture(Prompt((engine.prompts.system,)), [0], primed=False)
    for segment in prompt.segments:
        if segment.kind == "chunk":
            before = (engine.prompts.system, engine.prompts.stand_in)
            engine.capture(Prompt((*before, replace(segment, found=False))), [2], primed=False)
    found = engine.score_answer(
        text, chunks, target=full.tokens, max_new_tokens=answer_tokens, config=config
    )
    passages = sum(len(engine.prompts.chunk_segment(one).token_ids) for one in question.passages)
    kl, _ = divergence(full.logits, found.logits)
    right, full_right = (is_right(answer.text, question.answers) for answer in (found, full))
    ttft = found.stats.ttft_s / full.stats.ttft_s
    return Measured(kl, found.stats.tokens_reused / passages, ttft, right, full_right)


def first_time(
    engine: Engine, question: EvaluationQuestion, template: str, config: ReuseConfig, *, pairs: int
) -> float:
    """TTFT of a prompt that was never seen, as a multiple of that with `plain_prompts` off: the median of pairs."""
    sides = (config, replace(config, plain_prompts="off"))
    ratios = []
    for pair in range(pairs):
        own: dict[str, float] = {}
        for side in sides[:: 1 if pair % 2 else -1]:  # neither is always the later one
            scored = engine.score_answer(
                prompt_of(question, template), (), max_new_tokens=1, config=side
            )
            own[side.plain_prompts] = scored.stats.ttft_s
        ratios.append(own["reuse"] / own["off"])
    return median(ratios)


Ratio = Annotated[
    float, typer.Option("--recompute-ratio", min=0.0, max=1.0, help="Recompute ratio.")
]
Templates = Annotated[
    list[str] | None, typer.Option("--template", help=f"Of {', '.join(TEMPLATES)}; all by default.")
]
Pairs = Annotated[
    int,
    typer.Option(help="Only time prompts never seen, with the search and without: so many pairs."),
]


@takes(questions=evaluate.Questions, defaults={"limit": 40})
def main(
    model: options.Model = "demo",
    recompute_ratio: Ratio = 0.15,
    template: Templates = None,
    first_time_pairs: Pairs = 0,
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    as_json: options.Json = False,
    *,
    questions: evaluate.Questions,
) -> None:
    """Compare prompts of stock applications with the same passages sent as documents."""
    options.set_threads(threads)
    options.quiet_libraries()
    evaluate.require_packages()
    dataset = questions.load(formats.read)
    config = replace(PLAIN, recompute_ratio=recompute_ratio)
    templates = {name: TEMPLATES[name] for name in template or TEMPLATES}
    rows: dict[str, dict[str, Interval]] = {}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        with waiting("Loading the model"):
            engine = opened.enter_context(runner.open_engine(model, folder, dtype=dtype))
        show = opened.enter_context(progress_bar("Measuring", remaining=True))
        found: dict[str | None, list[Measured]] = {name: [] for name in (None, *templates)}
        times: dict[str, list[float]] = {name: [] for name in templates}
        for done, question in enumerate(dataset.questions):
            show(Progress(done, len(dataset.questions), ""))
            if first_time_pairs:
                for name, text in templates.items():
                    times[name].append(
                        first_time(engine, question, text, config, pairs=first_time_pairs)
                    )
                continue
            for key, measured in found.items():
                engine.store.evict(down_to_bytes=0)
                text_or_none = None if key is None else templates[key]
                measured.append(
                    measure(
                        engine,
                        question,
                        text_or_none,
                        config,
                        answer_tokens=questions.answer_tokens,
                    )
                )
    if first_time_pairs:
        rows = {name: {"first_ttft": mean_interval(ratios)} for name, ratios in times.items()}
    else:
        base = [one.kl for one in found[None]]
        rows = {key or "documents": _row(measured, base) for key, measured in found.items()}
    if as_json:
        shown = {
            name: {key: [one.mean, one.low, one.high] for key, one in row.items()}
            for name, row in rows.items()
        }
        print_json(
            {"questions": len(dataset.questions), "passages": questions.passages, "prompts": shown}
        )
        return
    table = Table(box=SIMPLE_HEAD)
    for heading in ("prompt", *next(iter(rows.values()))):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for name, row in rows.items():
        table.add_row(
            name, *(f"{one.mean:.4f} [{one.low:.4f}, {one.high:.4f}]" for one in row.values())
        )
    out.print(table)


def _row(measured: Sequence[Measured], base: Sequence[float]) -> dict[str, Interval]:
    right = [one.right for one in measured]
    return {
        "kl": mean_interval([one.kl for one in measured]),
        "kl_ratio": ratio_interval([one.kl for one in measured], base),
        "reused": mean_interval([one.reused for one in measured]),
        "ttft": mean_interval([one.ttft for one in measured]),
        "right": mean_interval(right),
        "right_gained": paired_interval(right, [one.full_right for one in measured]),
    }
