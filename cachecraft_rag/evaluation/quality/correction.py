"""Fit a learned correction on a user's own documents, and measure it on documents that it has not seen.

No questions and no labels: prompts are put together from the documents' chunks, and what full prefill computes for each
chunk is the target. See `compute.correction`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cachecraft_rag.compute.correction import Correction, unseen_share
from cachecraft_rag.compute.correction_fit import Moments, fit
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.quality.conditions import condition_named, origins_of
from cachecraft_rag.evaluation.quality.intervals import Interval, paired_interval
from cachecraft_rag.evaluation.quality.measuring import Trial, measure, reference_of
from cachecraft_rag.evaluation.quality.methods import methods_named
from cachecraft_rag.types import Chunk, Progress, Prompt

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.formats.dataset import Dataset, Question

Documents = Sequence[Sequence[Chunk]]
_CHECKED = 4  # prompts to fit on for each that is measured


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How much is computed: each prompt once as a whole, and each of its chunks but the first once alone.

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
    """What a correction takes away of the squared error of stale keys and of values: 1 = all, below 0 = it adds some.

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
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Correction, Gain]:
    """Fit on one half of the documents, and measure the gain on the other (of chunks, where there is one document).

    Args:
        engine: whose model and instruction chunks are computed with; its store is not touched.

    Raises:
        ConfigError: the documents have too few chunks or tokens.
    """
    seen, unseen = two_halves(documents, seed=settings.seed)
    draw, checked = random.Random(settings.seed), -(-settings.prompts // _CHECKED)
    total, moments = settings.prompts + checked, Moments(engine.decoder.layout)
    own_half = {
        chunk.chunk_id: half for half, part in enumerate(two_halves(seen, seed=1)) for one in part for chunk in one
    }

    def tell(done: int, what: str) -> None:
        if progress is not None:
            progress(Progress(done, total, what))

    for number in range(settings.prompts):
        tell(number, "fitting a correction")
        for one in pairs(engine, prompt_of(seen, settings.passages, number, draw)):
            moments.add(one.alone, one.behind, one.unseen, half=own_half[one.chunk.chunk_id])
    correction = fit(moments, engine.decoder.fingerprint).to(engine.decoder.device)
    before, after, tokens = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), 0
    for number in range(checked):
        tell(settings.prompts + number, "measuring it on the other half")
        for one in pairs(engine, prompt_of(unseen, settings.passages, number, draw)):
            before += squared_error(one.alone, one.behind)
            after += squared_error(correction.apply(one.alone, one.unseen), one.behind)
            tokens += len(one.unseen)
    tell(total, "")
    keys, values = (1 - after / before.clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    return correction, Gain(keys, values, tokens)


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


def _captured(engine: Engine, prompt: Prompt) -> list[Tensor]:
    """Raw keys and values of each chunk of a prompt without a question."""
    rows, bounds = Rows.of(prompt.bounds, new=range(prompt.bounds[-1])), prompt.bounds
    job = PrefillJob(prompt.token_ids, rows, captures=range(1, len(bounds) - 1))
    with engine.lock.take():
        return [capture.kv for capture in prefill(engine.decoder, job).recorder.captures]


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
    ratio: float = 0.15,
    progress: Callable[[Progress], None] | None = None,
) -> GainInAnswers:
    """Answer questions with and without a correction, as the default does at a recompute ratio.

    Args:
        engine: from `runner.open_engine`, with an empty store; it keeps the correction.
    """
    engine.correction = correction
    origins = origins_of(condition_named("alone"), engine, dataset, seed=0, answer_tokens=answer_tokens)
    trials = [Trial(method, ratio) for method in methods_named(["no_correction", "default"])]
    kl: list[list[float]] = [[], []]
    for done, question in enumerate(questions):
        if progress is not None:
            progress(Progress(done, len(questions), "answering questions about the other half"))
        origins.before(question)
        reference = reference_of(engine, question, answer_tokens=answer_tokens)
        for values, trial in zip(kl, trials, strict=True):
            values.append(measure(engine, reference, trial).kl)
    if progress is not None:
        progress(Progress(len(questions), len(questions), ""))
    off, learned = (sum(values) / len(values) for values in kl)
    return GainInAnswers(len(questions), off, learned, paired_interval(kl[1], kl[0]))
