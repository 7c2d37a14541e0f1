"""Metrics: answers against gold answers, and next-token distributions against full prefill's.

To add a metric, write a function here; a field of `records.Record`, with a new `records.VERSION`, and its value in
`measuring.measure`; and a line in `report.MEASURES`, or `eval` does not show it. To calibrate on it, extend
`calibrate.METRICS` and the help of `--metric`. docs/results/quality.md and the glossary define all metrics.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cachecraft_rag.checks import from_extra

if TYPE_CHECKING:
    from torch import Tensor


def normalised_words(text: str) -> list[str]:
    """Return the words of an answer as SQuAD's evaluation script compares them (Rajpurkar et al., 2016).

    >>> normalised_words("The Rhine's  (upper) end, a lake.")
    ['rhines', 'upper', 'end', 'lake']
    """
    lowered = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", lowered).split()


def squad_f1(prediction: str, golds: Sequence[str]) -> float:
    """Return SQuAD 2.0's F1 (0 to 1) of two bags of words, the best over one or more golds; 1 if neither has words.

    >>> squad_f1("the tall red fox", ["a red fox"])  # precision 2/3, recall 2/2
    0.8
    >>> squad_f1("in 1815", ["1815", "in June 1815"])  # 2/3 against the first, 4/5 against the second
    0.8
    """
    return max(_f1(normalised_words(prediction), normalised_words(gold)) for gold in golds)


def _f1(words: list[str], gold: list[str]) -> float:
    if not words or not gold:
        return float(words == gold)
    same = sum((Counter(words) & Counter(gold)).values())
    return 2 * same / (len(words) + len(gold))


def is_right(prediction: str, golds: Sequence[str]) -> bool:
    """Return True if the answer holds, in a row, all `normalised_words` of a gold answer that has any; 10.9 is not 109.

    >>> is_right("It was founded in 1815 by two brothers.", ["1815"]), is_right("In 18150.", ["1815"])
    (True, False)
    >>> is_right("It weighs 10.9 kg.", ["10.9 kg"]), is_right("It weighs 109 kg.", ["10.9 kg"])
    (True, False)
    """
    words_of_answer = f" {' '.join(_words_with_decimals(prediction))} "
    for gold in golds:
        words = _words_with_decimals(gold)
        if words and f" {' '.join(words)} " in words_of_answer:
            return True
    return False


def _words_with_decimals(text: str) -> list[str]:
    """Return the normalised words; a decimal point becomes a letter, because punctuation is removed."""
    return normalised_words(re.sub(r"(?<=\d)\.(?=\d)", "p", text))


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place at which two answers' tokens differ; None if they do not.

    >>> first_difference([5, 7, 9], [5, 8, 9]), first_difference([5, 7], [5, 7])
    (1, None)
    >>> first_difference([5, 7, 9], [5, 7])  # the other one ends earlier
    2
    """
    for place, (token, other_token) in enumerate(zip(reference, other, strict=False)):
        if token != other_token:
            return place
    return min(len(reference), len(other)) if len(reference) != len(other) else None


def margin_at(logits: Tensor, place: int) -> float | None:
    """Return the two highest probabilities' difference at a place of `[positions, vocabulary]`; None past the end.

    >>> import math, torch
    >>> round(margin_at(torch.tensor([[5.0, 5.0], [math.log(3.0), 0.0]]), 1), 3)  # ¾ − ¼
    0.5
    """
    if place >= len(logits):
        return None
    highest, second = logits[place].double().softmax(-1).topk(2).values.tolist()
    return float(highest - second)


def rouge_l(reference: str, prediction: str) -> float:
    """Return the ROUGE-L F1 (0 to 1) of one answer against another, with stems (Lin, 2004; the package rouge_score).

    Answers that are equal but for white space score 1, empty ones too, and need no package. Its tokenizer knows only
    a–z and 0–9, so answers in other scripts that differ score 0.

    >>> rouge_l("The cat sat on the mat", "the cats sat there")  # the cat sat: 3 of 6 words, and 3 of 4
    0.6
    """
    if reference.split() == prediction.split():
        return 1.0
    with from_extra("eval", "ROUGE-L"):
        from rouge_score.rouge_scorer import RougeScorer
    return float(
        RougeScorer(["rougeL"], use_stemmer=True).score(reference, prediction)["rougeL"].fmeasure
    )


def divergence(reference_logits: Tensor, logits: Tensor) -> tuple[float, float]:
    """Return KL(reference ‖ method) of the next-token distributions in nats, and the share of equal likeliest tokens.

    Both logits are `[positions, vocabulary]` in any float type. Both results are means over positions; the log-softmax
    is in float64. A token that the reference rules out (logit −∞) adds nothing; one that only the method rules out
    makes the divergence infinite. ValueError for different shapes and for no positions.

    >>> import math, torch
    >>> even, uneven = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])  # (½, ½) and (¾, ¼)
    >>> kl, _ = divergence(uneven, even)  # ¾ ln(¾ / ½) + ¼ ln(¼ / ½)
    >>> round(kl, 4), round(divergence(even, uneven)[0], 4)  # ½ ln(½ / ¾) + ½ ln(½ / ¼)
    (0.1308, 0.1438)
    """
    import torch

    if reference_logits.shape != logits.shape or logits.dim() != 2 or not len(logits):
        raise ValueError(
            f"cannot compare logits of shapes {tuple(reference_logits.shape)} and {tuple(logits.shape)}"
        )
    reference = reference_logits.double().log_softmax(-1)  # [positions, vocabulary]
    method = logits.double().log_softmax(-1)
    share = reference.exp()
    kl = torch.where(share > 0, share * (reference - method), 0.0).sum(-1).mean()
    agreement = (reference.argmax(-1) == method.argmax(-1)).double().mean()
    return float(kl), float(agreement)
