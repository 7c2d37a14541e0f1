"""Naive reuse of two passages: is it wrong where attention overlaps much? (Cache-Craft Fig. 8b, 9 and 10).

Each question has two passages C1 and C2, and each of them was captured after chunks of other documents. Naive reuse
takes both from the store and recomputes nothing. The overlap is that of the new prompt: of the attention weights from
C2 to itself and of those from C2 to C1. The paper shows one prompt with little overlap and a right answer, and one
with much and a wrong one; here the question is whether overlap tells wrong answers from right ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks import evaluate, formats
from benchmarks.kept import Kept
from benchmarks.premises import bootstrap, compute, correlation
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json, progress_bar, takes, waiting
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import share_interval
from cachecraft_rag.evaluation.measuring import METHODS, Trial, measure, reference_of
from cachecraft_rag.evaluation.origins import Origins, condition_named
from cachecraft_rag.evaluation.runner import VARIANTS_PER_CHUNK
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion

_NAIVE = Trial(METHODS["full_cache"], None)


def answer(
    engine: Engine, origins: Origins, question: EvaluationQuestion, *, answer_tokens: int
) -> dict[str, Any]:
    """Return plain values of one question: `overlap` in its prompt, and quality of naive reuse."""
    origins.before(question)
    reference = reference_of(engine, question, answer_tokens=answer_tokens)
    record = measure(engine, reference, _NAIVE)
    _, watched = compute(engine.decoder, engine.prompts.build(question.text, question.passages))
    return {
        "overlap": watched.overlap(2),
        "full_right": bool(record.reference_right),
        "naive_right": bool(record.right),
        "kl": record.kl,
        "rouge_l": record.rouge_l,
    }


def summary(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what overlap tells about the answers; intervals are drawn over questions.

    Of the questions that full prefill answers rightly:

    - `halves`: share that naive reuse answers wrongly, of the half with less overlap and of the half with more
    - `overlap`: its mean where naive reuse is right and where it is wrong, and the difference
    - `above`: probability that a question answered wrongly has more overlap than one answered rightly; by chance 0.5

    Of all questions: rank correlations of overlap with KL and with 1 - ROUGE-L against full prefill.
    """
    known = sorted((one for one in answers if one["full_right"]), key=lambda one: one["overlap"])
    half = len(known) // 2
    alone = [[{**one, "lost words": 1.0 - one["rouge_l"]}] for one in answers]
    return {
        "questions": len(answers),
        "right: full prefill": len(known),
        "right: both": sum(one["naive_right"] for one in known),
        "right: naive reuse": sum(one["naive_right"] for one in answers),
        "ROUGE-L of naive reuse": float(np.mean([one["rouge_l"] for one in answers])),
        "wrong of the half with less overlap": _wrong(known[:half]),
        "wrong of the half with more overlap": _wrong(known[half:]),
        **_separated(known),
        "overlap and KL": correlation(alone, "overlap", outcome="kl"),
        "overlap and 1 - ROUGE-L": correlation(alone, "overlap", outcome="lost words"),
    }


def _wrong(known: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not known:
        return None
    wrong = sum(not one["naive_right"] for one in known)
    return {"wrong": wrong, "of": len(known)} | asdict(share_interval(wrong, len(known)))


def _separated(known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    overlap = np.array([one["overlap"] for one in known])
    wrong = np.array([not one["naive_right"] for one in known], bool)
    if not wrong.any() or wrong.all():
        return {}
    return {
        "mean overlap: right, wrong": [float(overlap[~wrong].mean()), float(overlap[wrong].mean())],
        "difference": _drawn(overlap, wrong, lambda w, r: float(w.mean() - r.mean())),
        "a wrong answer has more overlap than a right one": _drawn(overlap, wrong, above),
    }


def above(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the share of pairs in which the first value is higher; equal ones count half.

    >>> above(np.array([1.0, 3.0]), np.array([2.0, 1.0]))
    0.625
    """
    gaps = first[:, None] - second[None, :]
    return float((gaps > 0).mean() + (gaps == 0).mean() / 2)


def _drawn(
    overlap: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    value: Callable[[NDArray[np.float64], NDArray[np.float64]], float],
) -> dict[str, float]:
    """Return the value of (wrong, right) and its 95 % bootstrap interval over questions."""

    def of(chosen: Sequence[int]) -> float:
        is_wrong = wrong[chosen]
        if is_wrong.all() or not is_wrong.any():
            return float("nan")
        drawn = overlap[chosen]
        return value(drawn[is_wrong], drawn[~is_wrong])

    return bootstrap(of, len(overlap))


@takes(questions=evaluate.Questions, defaults={"limit": 150, "passages": 2})
def main(
    model: options.Model = "demo",
    dtype: options.Dtype = "float32",
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="What is there is not measured again.")
    ] = Path("cachecraft-naive-reuse"),
    threads: options.Threads = None,
    as_json: options.Json = False,
    *,
    questions: evaluate.Questions,
) -> None:
    """Overlap of attention in prompts of two passages, and wrong answers of naive reuse.

    A stopped run resumes.
    """
    if questions.passages != 2:
        raise ConfigError(
            "naive-reuse compares two passages, as the paper does: leave --passages out"
        )
    options.set_threads(threads)
    options.quiet_libraries()
    dataset: Dataset = questions.load(formats.read)
    with ExitStack() as opened:
        with waiting("Loading the model"):
            from cachecraft_rag.engine.engine import Engine
            from cachecraft_rag.model.decoder import Decoder
            from cachecraft_rag.store import ChunkCacheStore

            decoder = Decoder.load(model, dtype=dtype)
        settings = {
            "fingerprint": decoder.fingerprint,
            "data": dataset.name,
            "limit": questions.limit,
            "answer": questions.answer_tokens,
            "seed": questions.seed,
        }
        kept = Kept(folder / "answers.jsonl", settings)
        store = opened.enter_context(
            ChunkCacheStore.open(folder / "caches", variants_per_chunk=VARIANTS_PER_CHUNK)
        )
        engine = opened.enter_context(Engine(decoder, store, best_last=False, new_variants="off"))
        origins = Origins(
            condition_named("unrelated"), engine, dataset, questions.seed, questions.answer_tokens
        )
        answers = []
        with progress_bar("Measuring", remaining=True) as show:
            for place, question in enumerate(dataset.questions):
                show(Progress(place, len(dataset.questions), "questions"))
                if len(question.passages) == 2:
                    answers.append(
                        kept.get(
                            question.question_id,
                            lambda: answer(
                                engine,
                                origins,
                                question,  # noqa: B023
                                answer_tokens=questions.answer_tokens,
                            ),
                        )
                    )
    report = summary(answers)
    if as_json:
        print_json(report)
        return
    out.print_json(json.dumps(report, ensure_ascii=False))
