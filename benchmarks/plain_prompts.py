"""Unmarked prompts against the same passages sent as documents: divergence, reuse and time.

The forms are those of stock applications: LlamaIndex's template for questions, LangChain's usual instruction with a
context, and an agent whose tool returned the passages. All sides reuse passages that were captured alone, each of its
own prompts, and each is compared with full prefill of its own prompt.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import formats
from cachecraft_rag.checks import check_names
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
    from cachecraft_rag.prompt.builder import Turn
    from cachecraft_rag.prompt.tools import Tool

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
DOCUMENTS = "documents"
TOOL_RESULT = "tool_result"
SEARCH_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds passages about a question.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """What the engine is given: the arguments of `Engine.score_answer`."""

    text: str
    chunks: Sequence[Chunk] = ()
    history: Sequence[Turn] = ()
    tools: Sequence[Tool] = ()


Form = Callable[["EvaluationQuestion"], AskedPrompt]


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt from passages that were captured alone.

    kl          to full prefill of the same prompt
    reused      share of the passages' tokens that were taken from chunk-caches and not recomputed
    ttft        as a multiple of full prefill's
    right       whether the answer holds a gold answer
    full_right  whether full prefill's does
    """

    kl: float
    reused: float
    ttft: float
    right: bool
    full_right: bool


def as_documents(question: EvaluationQuestion) -> AskedPrompt:
    """The question with its passages marked as documents."""
    return AskedPrompt(question.text, question.passages)


def from_template(question: EvaluationQuestion, template: str) -> AskedPrompt:
    """The question and its passages as an application writes them into one text."""
    text = template.format(context=_context(question), question=question.text)
    return AskedPrompt(text)


def as_tool_result(question: EvaluationQuestion) -> AskedPrompt:
    """An agent's conversation: the question, the model's call of a search tool, and the passages as its result."""
    call = {"name": "search", "arguments": {"query": question.text}}
    history: list[Turn] = [
        ("user", question.text),
        ("calls", json.dumps([call])),
        ("result", _context(question)),
    ]
    return AskedPrompt("", history=history, tools=[SEARCH_TOOL])


def _context(question: EvaluationQuestion) -> str:
    return "\n\n".join(passage.text for passage in question.passages)


def form_named(name: str) -> Form:
    """The form of this name: a template's, DOCUMENTS, or TOOL_RESULT. Raises KeyError for other names."""
    if name == DOCUMENTS:
        return as_documents
    if name == TOOL_RESULT:
        return as_tool_result
    template = TEMPLATES[name]
    return lambda question: from_template(question, template)


def measure(
    engine: Engine,
    question: EvaluationQuestion,
    form: Form,
    config: ReuseConfig,
    *,
    answer_tokens: int,
    along_gold: bool = False,
) -> Measured:
    """Answer one question in full, and from chunk-caches that were captured after a fixed passage.

    Args:
        along_gold: compare the predictions along the first gold answer, instead of along full prefill's own answer.
    """
    asked = form(question)
    gold = None
    if along_gold:
        gold = engine.prompts.text_ids(question.answers[0])[:answer_tokens]
    full = engine.score_answer(
        asked.text,
        asked.chunks,
        history=asked.history,
        tools=asked.tools,
        target=gold,
        max_new_tokens=answer_tokens,
        config=replace(config, reuse=False),
    )
    _capture_alone(engine, asked, answer_tokens)
    reusing = engine.score_answer(
        asked.text,
        asked.chunks,
        history=asked.history,
        tools=asked.tools,
        target=full.tokens if gold is None else gold,
        max_new_tokens=answer_tokens,
        config=config,
    )
    segments = [engine.prompts.chunk_segment(passage) for passage in question.passages]
    passage_tokens = sum(len(segment.token_ids) for segment in segments)
    kl, _ = divergence(full.logits, reusing.logits)
    return Measured(
        kl,
        reused=reusing.stats.tokens_reused / passage_tokens,
        ttft=reusing.stats.ttft_s / full.stats.ttft_s,
        right=is_right(reusing.text, question.answers),
        full_right=is_right(full.text, question.answers),
    )


def _capture_alone(engine: Engine, asked: AskedPrompt, answer_tokens: int) -> None:
    """Capture each passage of a prompt after the instruction and the fixed passage that stands in for neighbours."""
    builder = engine.prompts_with(asked.tools)
    prompt = builder.build(
        asked.text,
        asked.chunks,
        history=asked.history,
        reserve=answer_tokens,
        recognise=lambda _: [],
    )
    engine.capture(Prompt((builder.system,)), [0], primed=False)
    for segment in prompt.segments:
        if segment.kind == "chunk":
            alone = (builder.system, builder.stand_in, replace(segment, found=False))
            engine.capture(Prompt(alone), [2], primed=False)


def first_time(
    engine: Engine, question: EvaluationQuestion, form: Form, config: ReuseConfig, *, pairs: int
) -> float:
    """TTFT of a prompt that was never seen, as a multiple of that with `plain_prompts` off: the median of pairs."""
    sides = (config, replace(config, plain_prompts="off"))
    asked = form(question)
    ratios = []
    for pair in range(pairs):
        times: dict[str, float] = {}
        for side in sides[:: 1 if pair % 2 else -1]:  # neither is always the later one
            scored = engine.score_answer(
                asked.text,
                asked.chunks,
                history=asked.history,
                tools=asked.tools,
                max_new_tokens=1,
                config=side,
            )
            times[side.plain_prompts] = scored.stats.ttft_s
        ratios.append(times["reuse"] / times["off"])
    return median(ratios)


Ratio = Annotated[
    float, typer.Option("--recompute-ratio", min=0.0, max=1.0, help="Recompute ratio.")
]
Forms = Annotated[
    list[str] | None,
    typer.Option(
        "--form",
        help=f"Forms besides documents: of {', '.join((*TEMPLATES, TOOL_RESULT))}; the templates by default. "
        f"{TOOL_RESULT} needs a model whose chat template writes calls of tools.",
    ),
]
AlongGold = Annotated[
    bool,
    typer.Option(
        "--along-gold",
        help="Measure the divergence along the gold answers, for models that answer the forms differently.",
    ),
]
Pairs = Annotated[
    int,
    typer.Option(help="Only time prompts never seen, with the search and without: so many pairs."),
]


@takes(questions=evaluate.Questions, defaults={"limit": 40})
def main(
    model: options.Model = "demo",
    recompute_ratio: Ratio = 0.15,
    form: Forms = None,
    along_gold: AlongGold = False,
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
    chosen = form or list(TEMPLATES)
    check_names(chosen, (*TEMPLATES, TOOL_RESULT), what="form")
    forms = {name: form_named(name) for name in (DOCUMENTS, *chosen)}
    dataset = questions.load(formats.read)
    config = replace(PLAIN, recompute_ratio=recompute_ratio)
    measured: dict[str, list[Measured]] = {name: [] for name in forms}
    first_times: dict[str, list[float]] = {name: [] for name in chosen}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        with waiting("Loading the model"):
            engine = opened.enter_context(runner.open_engine(model, folder, dtype=dtype))
        show = opened.enter_context(progress_bar("Measuring", remaining=True))
        for done, question in enumerate(dataset.questions):
            show(Progress(done, len(dataset.questions), ""))
            if first_time_pairs:
                for name in chosen:
                    ratio = first_time(
                        engine, question, forms[name], config, pairs=first_time_pairs
                    )
                    first_times[name].append(ratio)
                continue
            for name, asked_in in forms.items():
                engine.store.evict(down_to_bytes=0)
                measured[name].append(
                    measure(
                        engine,
                        question,
                        asked_in,
                        config,
                        answer_tokens=questions.answer_tokens,
                        along_gold=along_gold,
                    )
                )
    rows: dict[str, dict[str, Interval]]
    if first_time_pairs:
        rows = {name: {"first_ttft": mean_interval(ratios)} for name, ratios in first_times.items()}
    else:
        base = [item.kl for item in measured[DOCUMENTS]]
        rows = {name: _row(values, base) for name, values in measured.items()}
    if as_json:
        shown = {
            name: {key: [value.mean, value.low, value.high] for key, value in row.items()}
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
        cells = (f"{value.mean:.4f} [{value.low:.4f}, {value.high:.4f}]" for value in row.values())
        table.add_row(name, *cells)
    out.print(table)


def _row(measured: Sequence[Measured], base: Sequence[float]) -> dict[str, Interval]:
    right = [item.right for item in measured]
    kl = [item.kl for item in measured]
    return {
        "kl": mean_interval(kl),
        "kl_ratio": ratio_interval(kl, base),
        "reused": mean_interval([item.reused for item in measured]),
        "ttft": mean_interval([item.ttft for item in measured]),
        "right": mean_interval(right),
        "right_gained": paired_interval(right, [item.full_right for item in measured]),
    }
