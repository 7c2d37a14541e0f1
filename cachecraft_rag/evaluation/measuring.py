"""A measurement: full prefill answers a question, and a method is scored against the tokens of that answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from cachecraft_rag.checks import check_names
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.metrics import (
    divergence,
    first_difference,
    is_right,
    margin_at,
    rouge_l,
    squad_f1,
)
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine, ScoredAnswer
    from cachecraft_rag.evaluation.dataset import EvaluationQuestion
    from cachecraft_rag.types.documents import Chunk

# A difference of two probabilities. Below it, rounding can decide between full prefill's two likeliest tokens, so an
# answer that departs from full prefill's there departs by chance.
NEAR_TIE = 0.02
Preparation = Callable[
    ["Engine", "EvaluationQuestion", float], AbstractContextManager[Sequence["Chunk"]]
]


@dataclass(frozen=True)
class Method:
    """A way to answer.

    name         in tables and in `cachecraft eval --methods`
    source       the paper or package that it comes from
    config       recompute ratio r → settings of the engine; methods without a ratio get 0.0
    takes_ratio  True: the method runs at each r
    prepare      made before a request; entering it counts as part of the time to the first token, and gives the
                 passages to answer over. For baselines that shorten passages or bring scores of their own
    """

    name: str
    source: str
    config: Callable[[float], ReuseConfig]
    takes_ratio: bool = False
    prepare: Preparation | None = None


_FULL_MEANS = (
    "full_recompute (prefill of the whole prompt) or full_cache (all reused, nothing recomputed)"
)
_OFTEN_TRIED = MappingProxyType(dict.fromkeys(("full", "none", "all", "baseline"), _FULL_MEANS))
# Captures nothing, and loads every stored layer even where computing it would be faster.
PLAIN = ReuseConfig(capture=False, method=ReuseMethod(loading="layerwise"))
_FULL = replace(PLAIN, reuse=False)
_PREFIX = PLAIN.with_method(scope="prefix")
_NOTHING = replace(PLAIN.with_method(drift=0.0), recompute_ratio=0.0)
FULL_PREFILL = Method("full_recompute", "any engine", lambda _: _FULL)

# Methods that a user chooses between; the papers' baselines are in `benchmarks/methods.py` of the repository.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            FULL_PREFILL,
            Method("prefix_cache", "any engine", lambda _: _PREFIX),
            Method("full_cache", "this package, nothing recomputed", lambda _: _NOTHING),
            Method(
                "default",
                "this package",
                lambda r: replace(PLAIN, recompute_ratio=r),
                takes_ratio=True,
            ),
        )
    }
)


def methods_named(names: Sequence[str], known: Mapping[str, Method] = METHODS) -> list[Method]:
    """Return the methods with these names, in the given order, each once."""
    check_names(names, known, what="method", hints=_OFTEN_TRIED)
    return [known[name] for name in dict.fromkeys(names)]


def label(method: str, ratio: float | None) -> str:
    """Return the name of a method at a ratio in reports.

    >>> label("default", 0.15), label("full_cache", None)
    ('default@0.15', 'full_cache')
    """
    if ratio is None:
        return method
    return f"{method}@{ratio:g}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A method at a recompute ratio.

    ratio  None for a method without a ratio. None for a method that takes one: the engine's own choice
    """

    method: Method
    ratio: float | None = None

    @property
    def label(self) -> str:
        """`NAME@R`, or `NAME` without a ratio."""
        return label(self.method.name, self.ratio)

    @property
    def config(self) -> ReuseConfig:
        """Settings of reuse for this trial; if the method takes a ratio and `ratio` is None, the engine chooses one."""
        config = self.method.config(self.ratio or 0.0)
        if self.method.takes_ratio and self.ratio is None:
            return replace(config, recompute_ratio=None)
        return config


def trials_of(methods: Sequence[Method], ratios: Sequence[float | None]) -> tuple[Trial, ...]:
    """Return each method at each ratio, or once if it takes no ratio. The ratio None is the engine's own choice.

    The methods are in the given order; the ratios of each are ascending, each once, and None is the first. ConfigError
    for a ratio outside of (0, 1], for no ratio if a method takes one, and for None if such a method has `prepare`.
    """
    numbers = {ratio for ratio in ratios if ratio is not None}
    if any(not 0 < ratio <= 1 for ratio in numbers):
        raise ConfigError(
            "a ratio must lie above 0 and at most at 1 (for 0 use the method full_cache)"
        )
    needing = [method.name for method in methods if method.takes_ratio]
    if needing and not ratios:
        raise ConfigError(
            f"{', '.join(needing)} need a recompute ratio; name one, for example 0.15"
        )
    distinct: list[float | None] = [*sorted(numbers)]
    if None in ratios:
        unable = [method.name for method in methods if method.takes_ratio and method.prepare]
        if unable:
            raise ConfigError(
                f"{', '.join(unable)} need a number as recompute ratio, not auto; name one, for example 0.15"
            )
        distinct.insert(0, None)
    return tuple(
        Trial(method, ratio)
        for method in methods
        for ratio in (distinct if method.takes_ratio else [None])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of one method on one question.

    kl, top1            `metrics.divergence` from full prefill, over the tokens of full prefill's answer
    rouge_l             of the method's own greedy answer against full prefill's
    right, reference_right  True if the answer holds a gold answer, the method's and full prefill's; None without gold
                        answers
    margin              difference of full prefill's two highest probabilities at the first token at which the method's
                        answer departs from full prefill's; None if it does not
    f1, reference_f1    of the method's answer and of full prefill's against the gold answers; None if there are none
    ttft_s              seconds to the first token, with the method's preparation and a selector's probes
    reference_ttft_s    the same of full prefill
    recomputed          chunk tokens recomputed or computed / all chunk tokens of full prefill's prompt, which
                        `Method.prepare` has not shortened; 0 without chunk tokens
    text                the method's answer
    """

    question_id: str
    method: str
    ratio: float | None
    kl: float
    top1: float
    rouge_l: float
    f1: float | None
    reference_f1: float | None
    ttft_s: float
    reference_ttft_s: float
    recomputed: float
    text: str
    right: bool | None = None
    reference_right: bool | None = None
    margin: float | None = None

    @property
    def is_near_tie(self) -> bool:
        """True if `margin` is below `NEAR_TIE` (0.02); False if the answers do not depart."""
        return self.margin is not None and self.margin < NEAR_TIE

    @property
    def is_lost(self) -> bool:
        """True if full prefill's answer is right and the method's is wrong; False without gold answers."""
        return self.reference_right is True and self.right is False

    @property
    def is_won(self) -> bool:
        """True if full prefill's answer is wrong and the method's is right; False without gold answers."""
        return self.reference_right is False and self.right is True

    @property
    def label(self) -> str:
        """Label of the trial, see `Trial.label`."""
        return label(self.method, self.ratio)


@dataclass(frozen=True)
class Reference:
    """Full prefill's answer to a question, of at most `answer_tokens` tokens."""

    question: EvaluationQuestion
    answer: ScoredAnswer
    answer_tokens: int


def reference_of(engine: Engine, question: EvaluationQuestion, *, answer_tokens: int) -> Reference:
    """Answer greedily with full prefill (FULL-RECOMP); nothing is reused or captured.

    The engine must have `best_last=False`: passages are in prompt order already.
    """
    answer = engine.score_answer(
        question.text, question.passages, max_new_tokens=answer_tokens, config=_FULL
    )
    return Reference(question, answer, answer_tokens)


def measure(engine: Engine, reference: Reference, trial: Trial) -> Record:
    """Answer with one method over the store as it is, and compare with the reference of the same engine.

    The store counts the uses of chunk-caches; chunks are captured only if the method says so, and `METHODS` do not.
    """
    question = reference.question
    full = reference.answer
    passages = question.passages
    prepare_s = 0.0
    with ExitStack() as prepared:
        if trial.method.prepare is not None:
            preparation = trial.method.prepare(engine, question, trial.ratio or 0.0)
            started = time.perf_counter()
            passages = tuple(prepared.enter_context(preparation))
            prepare_s = time.perf_counter() - started
        answer = engine.score_answer(
            question.text,
            passages,
            target=full.tokens,
            max_new_tokens=reference.answer_tokens,
            config=trial.config,
        )
    departure = first_difference(full.tokens, answer.tokens)
    kl, top1 = divergence(full.logits, answer.logits)
    golds = question.answers
    chunk_tokens = sum(chunk.tokens for chunk in full.stats.chunks)
    spent = sum(chunk.recomputed + chunk.computed for chunk in answer.stats.chunks)
    return Record(
        question_id=question.question_id,
        method=trial.method.name,
        ratio=trial.ratio,
        kl=kl,
        top1=top1,
        rouge_l=rouge_l(full.text, answer.text),
        f1=squad_f1(answer.text, golds) if golds else None,
        reference_f1=squad_f1(full.text, golds) if golds else None,
        ttft_s=prepare_s + answer.stats.ttft_s,
        reference_ttft_s=full.stats.ttft_s,
        recomputed=spent / max(chunk_tokens, 1),
        text=answer.text,
        right=is_right(answer.text, golds) if golds else None,
        reference_right=is_right(full.text, golds) if golds else None,
        margin=None if departure is None else margin_at(full.logits, departure),
    )
