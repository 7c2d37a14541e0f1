"""One measurement: full prefill answers a question, and a method is scored against the tokens of that answer."""

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
    """The name of a method at a ratio in reports.

    >>> label("craft", 0.15), label("full_cache", None)
    ('craft@0.15', 'full_cache')
    """
    return method if ratio is None else f"{method}@{ratio:g}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A method at a recompute ratio; the ratio is None for methods that take none."""

    method: Method
    ratio: float | None = None

    @property
    def label(self) -> str:
        """`NAME@R`, or `NAME` without a ratio."""
        return label(self.method.name, self.ratio)

    @property
    def config(self) -> ReuseConfig:
        """Settings of the engine."""
        return self.method.config(self.ratio or 0.0)


def trials_of(methods: Sequence[Method], ratios: Sequence[float]) -> tuple[Trial, ...]:
    """Each method at each ratio, or once if it takes no ratio.

    Raises:
        ConfigError: a method needs a ratio and none is given, or a ratio is out of range.
    """
    if any(not 0 < ratio <= 1 for ratio in ratios):
        raise ConfigError("a ratio must lie above 0 and at most at 1 (for 0 use the method full_cache)")
    needing = [method.name for method in methods if method.takes_ratio]
    if needing and not ratios:
        raise ConfigError(f"{', '.join(needing)} need a recompute ratio; name one, for example 0.15")
    distinct = sorted(set(ratios))
    return tuple(Trial(method, ratio) for method in methods for ratio in (distinct if method.takes_ratio else [None]))


@dataclass(frozen=True, slots=True)
class Record:
    """The result of one method on one question.

    kl, top1            `metrics.divergence` from full prefill, over the tokens of full prefill's answer
    rouge_l             of the method's own greedy answer against full prefill's
    f1, jaccard         of the method's answer against the gold answers; None if there are none
    reference_f1, reference_jaccard   the same of full prefill's answer
    ttft_s              seconds to the first token, including a compressor's work and a selector's probes
    reference_ttft_s    the same of full prefill
    recomputed          chunk tokens recomputed or computed / all chunk tokens of the full prompt
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
    """Full prefill's answer to a question, of at most `answer_tokens` tokens."""

    question: Question
    answer: ScoredAnswer
    answer_tokens: int


def reference_of(engine: Engine, question: Question, *, answer_tokens: int) -> Reference:
    """Answer with full prefill (FULL-RECOMP) and capture nothing.

    Args:
        engine: opened with `best_last=False`, because a question's passages are in prompt order already.
    """
    full = METHODS["full_recompute"].config(0.0)
    answer = engine.score_answer(question.text, question.passages, max_new_tokens=answer_tokens, config=full)
    return Reference(question, answer, answer_tokens)


def measure(engine: Engine, reference: Reference, trial: Trial, *, compressor: Compressor | None = None) -> Record:
    """Answer with one method over the store as it is, and compare with the reference.

    Args:
        engine: the one that made the reference.
        compressor: needed by a method that compresses; its time counts.

    Raises:
        ConfigError: the method compresses and no compressor is given.
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
