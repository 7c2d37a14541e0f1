"""One measurement: a question answered by full prefill, and by a method that is led along that answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.quality.methods import METHODS, Method
from cachecraft_rag.evaluation.quality.metrics import divergence, jaccard, rouge_l, squad_f1

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine, ScoredAnswer
    from cachecraft_rag.evaluation.compression.base import Compressor
    from cachecraft_rag.evaluation.formats.dataset import Question
    from cachecraft_rag.planning.config import ReuseConfig


def label(method: str, ratio: float | None) -> str:
    """What a method at a ratio is called in reports.

    >>> label("craft", 0.15), label("full_cache", None)
    ('craft@0.15', 'full_cache')
    """
    return method if ratio is None else f"{method}@{ratio:g}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A method at a recompute ratio; None for methods that take none."""

    method: Method
    ratio: float | None = None

    @property
    def label(self) -> str:
        """`NAME@R`, or `NAME` without a ratio."""
        return label(self.method.name, self.ratio)

    @property
    def config(self) -> ReuseConfig:
        """How the engine is to answer."""
        return self.method.config(self.ratio or 0.0)


def trials_of(methods: Sequence[Method], ratios: Sequence[float]) -> tuple[Trial, ...]:
    """Each method at each ratio, and once if it takes none.

    Raises:
        ConfigError: no ratio for a method that takes one, or a ratio out of range.
    """
    if any(not 0 < ratio <= 1 for ratio in ratios):
        raise ConfigError("a ratio must lie above 0 and at most at 1 (nothing recomputed is the method full_cache)")
    needing = [method.name for method in methods if method.takes_ratio]
    if needing and not ratios:
        raise ConfigError(f"{', '.join(needing)} need a recompute ratio; name one, for example 0.15")
    distinct = sorted(set(ratios))
    return tuple(Trial(method, ratio) for method in methods for ratio in (distinct if method.takes_ratio else [None]))


@dataclass(frozen=True, slots=True)
class Record:
    """What one method did on one question.

    kl, top1            `metrics.divergence` from full prefill along its answer
    rouge_l             of the method's own greedy answer against that of full prefill
    f1, jaccard         of that answer against the gold ones; None where there are none. `reference_…`: of full
                        prefill's
    ttft_s              to the first token, with a compressor's work and a selector's own passes
    recomputed          chunk tokens recomputed or computed, of all chunk tokens of the full prompt
    text                the method's answer
    """

    question_id: str
    method: str
    ratio: float | None
    kl: float
    top1: float
    rouge_l: float
    f1: float | None
    jaccard: float | None
    reference_f1: float | None
    reference_jaccard: float | None
    ttft_s: float
    reference_ttft_s: float
    recomputed: float
    text: str

    @property
    def label(self) -> str:
        """As `Trial.label`."""
        return label(self.method, self.ratio)


@dataclass(frozen=True)
class Reference:
    """A question's answer by full prefill, of at most `answer_tokens` tokens."""

    question: Question
    answer: ScoredAnswer
    answer_tokens: int


def reference_of(engine: Engine, question: Question, *, answer_tokens: int) -> Reference:
    """Answer by full prefill (FULL-RECOMP); nothing is stored.

    Args:
        engine: made with `best_last=False`, because a question's passages stand in prompt order.
    """
    full = METHODS["full_recompute"].config(0.0)
    answer = engine.score_answer(question.text, question.passages, max_new_tokens=answer_tokens, config=full)
    return Reference(question, answer, answer_tokens)


def measure(engine: Engine, reference: Reference, trial: Trial, *, compressor: Compressor | None = None) -> Record:
    """Answer by one method over the store as it is, along the reference, and compare.

    Args:
        engine: that of the reference.
        compressor: for a method that compresses; its time counts.

    Raises:
        ConfigError: the method compresses, and there is no compressor.
    """
    question, full = reference.question, reference.answer
    passages, shortening_s = question.passages, 0.0
    if trial.method.compression is not None:
        if compressor is None:
            raise ConfigError(f"{trial.method.name} needs its compressor; see evaluation.compression")
        started = time.perf_counter()
        shorter = compressor.compress(question.text, passages, trial.ratio or 0.0)
        passages = tuple(chunk for chunk in shorter if chunk.text.strip())
        shortening_s = time.perf_counter() - started
    found = engine.score_answer(
        question.text, passages, target=full.tokens, max_new_tokens=reference.answer_tokens, config=trial.config
    )
    kl, top1 = divergence(full.logits, found.logits)
    golds = question.answers
    chunk_tokens = sum(chunk.tokens for chunk in full.stats.chunks)
    spent = sum(chunk.recomputed + chunk.computed for chunk in found.stats.chunks)
    return Record(
        question_id=question.question_id,
        method=trial.method.name,
        ratio=trial.ratio,
        kl=kl,
        top1=top1,
        rouge_l=rouge_l(full.text, found.text),
        f1=squad_f1(found.text, golds) if golds else None,
        jaccard=jaccard(found.text, golds) if golds else None,
        reference_f1=squad_f1(full.text, golds) if golds else None,
        reference_jaccard=jaccard(full.text, golds) if golds else None,
        ttft_s=shortening_s + found.stats.ttft_s,
        reference_ttft_s=full.stats.ttft_s,
        recomputed=spent / max(chunk_tokens, 1),
        text=found.text,
    )
