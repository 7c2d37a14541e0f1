"""Fit a learned correction on a user's own documents, and measure it on documents that it has not seen.

No questions and no labels: prompts are put together from the documents' chunks, and what full prefill computes for each
chunk is the target. See `compute.correction`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cachecraft_rag.compute.correction import Correction, unseen_share
from cachecraft_rag.compute.correction_fit import Moments, fit
from cachecraft_rag.compute.driver import prefill_steps
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import Interval, paired_interval
from cachecraft_rag.evaluation.measuring import methods_named, trials_of
from cachecraft_rag.evaluation.origins import condition_named
from cachecraft_rag.evaluation.records import RecordLog
from cachecraft_rag.evaluation.runner import Settings, evaluate
from cachecraft_rag.types import Chunk, Progress, Prompt, digest

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset, Question

Documents = Sequence[Sequence[Chunk]]
_SAVE_S = 30.0  # seconds between two saves of the sums
_CHECKED = 4  # prompts to fit on for each that is measured


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Amount of computation: each prompt once as a whole, and each of its chunks but the first once alone.

    prompts   to fit on; a quarter as many are measured
    passages  chunks in each
    seed      of the halves and of the prompts
    """

    prompts: int = 32
    passages: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.passages < 2:
            raise ConfigError("a correction is fitted on 1 prompt or more, of 2 chunks or more each")


@dataclass(frozen=True, slots=True)
class Gain:
    """Share of the squared error of stale keys and values that a correction removes; below 0 it adds some.

    tokens  on which this was measured
    """

    keys: float
    values: float
    tokens: int


def fit_correction(
    engine: Engine,
    documents: Documents,
    settings: FitSettings,
    *,
    folder: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[Correction, Gain]:
    """Fit on one half of the documents, and measure the gain on the other (of chunks, where there is one document).

    Args:
        engine: whose model and instruction chunks are computed with; its store is not touched.
        folder: of the sums so far, from which a stopped fit resumes; None keeps them in memory only.

    Raises:
        ConfigError: the documents have too few chunks or tokens.
    """
    parts, draw = two_halves(documents, seed=settings.seed), random.Random(settings.seed)
    checked = -(-settings.prompts // _CHECKED)
    total = settings.prompts + checked
    seen, unseen = (
        [prompt_of(part, settings.passages, number, draw) for number in range(count)]
        for part, count in zip(parts, (settings.prompts, checked), strict=True)
    )

    def show(done: int, what: str) -> None:
        progress(Progress(done, total, what))

    path = None if folder is None else folder / "moments.safetensors"
    halves = [{chunk.chunk_id for one in half for chunk in one} for half in two_halves(parts[0], seed=1)]
    moments = _moments(engine, seen, halves[1], path, show)
    correction = fit(moments, engine.decoder.fingerprint).to(engine.decoder.device)
    before, after, tokens = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), 0
    for number, prompt in enumerate(unseen, start=settings.prompts):
        show(number, "measuring it on the other half")
        for one in pairs(engine, prompt):
            before += squared_error(one.alone, one.behind)
            after += squared_error(correction.apply(one.alone, one.unseen), one.behind)
            tokens += len(one.unseen)
    show(total, "")
    keys, values = (1 - after / before.clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    return correction, Gain(keys, values, tokens)


def _moments(
    engine: Engine,
    prompts: Sequence[Sequence[Chunk]],
    second: Set[str],
    path: Path | None,
    show: Callable[[int, str], None],
) -> Moments:
    """The sums over all prompts to fit on; those in the file are not computed again.

    `second`: chunks that belong to the second half of the sums.
    """
    moments, done, saved_at = Moments(engine.decoder.layout), 0, time.monotonic()
    ids = [chunk.chunk_id for prompt in prompts for chunk in prompt]
    key = digest(engine.decoder.fingerprint, engine.prompts.system.segment_id, *ids)
    if path is not None:
        done = moments.load(path, key)
    whole = True  # no prompt is in the sums in part
    try:
        for prompt in prompts[done:]:
            show(done, "fitting a correction")
            started = time.monotonic()
            found = list(pairs(engine, prompt))
            whole = False
            for one in found:
                moments.add(one.alone, one.behind, one.unseen, half=int(one.chunk.chunk_id in second))
            done, whole, now = done + 1, True, time.monotonic()
            if done == 1:
                expected = (now - started) * len(prompts) * (1 + 1 / _CHECKED)
                show(done, f"expected to take {timedelta(seconds=round(expected))}")
            if path is not None and now > saved_at + _SAVE_S:
                moments.save(path, key, done)
                saved_at = time.monotonic()
    finally:
        if path is not None and done and whole:
            moments.save(path, key, done)
    return moments


def two_halves(documents: Documents, *, seed: int) -> tuple[Documents, Documents]:
    """Documents in two parts with about as many chunks each; the chunks of a single document.

    Raises:
        ConfigError: there are fewer than four chunks.
    """
    if sum(map(len, documents)) < 4:
        raise ConfigError("a correction needs four chunks or more: index more documents, or give a larger file")
    units = [document for document in documents if document]
    if len(units) == 1:
        middle = len(units[0]) // 2
        return [units[0][:middle]], [units[0][middle:]]
    random.Random(seed).shuffle(units)
    parts: tuple[list[Sequence[Chunk]], list[Sequence[Chunk]]] = ([], [])
    for unit in sorted(units, key=len, reverse=True):  # stable: of one length in the order drawn
        min(parts, key=lambda part: sum(map(len, part))).append(unit)
    return parts


def prompt_of(documents: Documents, passages: int, number: int, draw: random.Random) -> list[Chunk]:
    """The chunks of one prompt: by turns of one document and of any, in an order drawn."""
    long = [document for document in documents if len(document) > 1]
    if number % 2 == 0 and long:
        chunks = list(draw.choice(long))
    else:
        chunks = [chunk for document in documents for chunk in document]
    return draw.sample(chunks, min(passages, len(chunks)))


@dataclass(frozen=True)
class Pair:
    """A chunk computed twice, raw keys and values `[layers, 2, tokens, kv_heads, head_dim]`.

    alone   behind the instruction and nothing else
    behind  behind other chunks
    unseen  float32 `[tokens]`, see `correction.unseen_share`
    """

    chunk: Chunk
    alone: Tensor
    behind: Tensor
    unseen: Tensor


def pairs(engine: Engine, chunks: Sequence[Chunk]) -> Iterator[Pair]:
    """Each chunk of a prompt but the first.

    Chunks that do not fit the model's context any more are left out.
    """
    segments = [engine.prompts.chunk_segment(chunk) for chunk in chunks]
    room = engine.decoder.context_length - len(engine.prompts.system.token_ids)
    while sum(len(segment.token_ids) for segment in segments) > room:
        segments.pop()
    system = engine.prompts.system
    prompt = Prompt((system, *segments))
    behind = _captured(engine, prompt) if len(segments) > 1 else []
    for number in range(1, len(behind)):
        start, stop = prompt.bounds[number + 1 : number + 3]
        unseen = unseen_share(torch.arange(start, stop, device=engine.decoder.device), start - prompt.bounds[1])
        alone = _captured(engine, Prompt((system, segments[number])))[0]
        yield Pair(chunks[number], alone, behind[number], unseen)


def computed(engine: Engine, prompt: Prompt) -> PrefillResult:
    """Compute a prompt without a question as a whole, and record each of its chunks."""
    rows = Rows.of(prompt.bounds, new=range(prompt.bounds[-1]))
    job = PrefillJob(prompt.token_ids, rows, captures=range(1, len(prompt.bounds) - 1))
    return engine.loop.run(lambda _: prefill_steps(engine.decoder, job))


def _captured(engine: Engine, prompt: Prompt) -> list[Tensor]:
    """Raw keys and values of each chunk of a prompt without a question."""
    return [capture.kv for capture in computed(engine, prompt).recorder.captures]


def squared_error(found: Tensor, expected: Tensor) -> Tensor:
    """float64 `[2]`, of keys and of values, `[layers, 2, tokens, kv_heads, head_dim]` each."""
    return (found.double() - expected.double()).square().sum((0, 2, 3, 4)).cpu()


@dataclass(frozen=True, slots=True)
class GainInAnswers:
    """Mean KL to full prefill along its answers, without and with a correction, chunks captured alone.

    difference  `learned` − `off`, paired over the questions
    """

    questions: int
    off: float
    learned: float
    difference: Interval


def unseen_questions(dataset: Dataset, *, seed: int) -> list[Question]:
    """The questions all of whose passages are of the half that `fit_correction` measures on with this seed."""
    _, unseen = two_halves(dataset.documents, seed=seed)
    known = {chunk.chunk_id for document in unseen for chunk in document}
    return [one for one in dataset.questions if known.issuperset(chunk.chunk_id for chunk in one.passages)]


def gain_in_answers(
    engine: Engine,
    correction: Correction,
    dataset: Dataset,
    questions: Sequence[Question],
    *,
    answer_tokens: int,
    folder: Path,
    ratio: float = 0.15,
    progress: Callable[[Progress], None] = lambda _: None,
) -> GainInAnswers:
    """Answer questions with and without a correction, as the default does at a recompute ratio.

    Args:
        engine: from `runner.open_engine`, with an empty store; it keeps the correction.
        folder: of the measurements, from which a stopped call resumes.
    """
    engine.correction = correction
    names = ("no_correction", "default")
    settings = Settings(trials_of(methods_named(names), [ratio]), condition_named("alone"), answer_tokens=answer_tokens)
    asked = replace(dataset, questions=tuple(questions))
    with RecordLog(folder, settings.describe(engine, asked), discard_others=True) as log:
        records = evaluate(engine, asked, settings, log=log, progress=progress)
    kl = [
        [one.kl for one in sorted(records, key=lambda record: record.question_id) if one.method == name]
        for name in names
    ]
    off, learned = (sum(values) / len(values) for values in kl)
    return GainInAnswers(len(questions), off, learned, paired_interval(kl[1], kl[0]))
