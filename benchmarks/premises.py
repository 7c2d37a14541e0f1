"""The premises of both papers, looked at on one model and data: do chunks behave as the methods assume?

One pass computes all. For each article, each chunk is computed alone, and some prompts of its chunks in changing
orders, one of them from elsewhere, are computed in full. Each chunk in one prompt is then compared with itself in
another, as if its keys and values had been reused there untouched: the outcome is how far the last layer's hidden
states are from those it needs there. Chunks are the file's passages, or with `--fixed-tokens` pieces of equal length,
as the paper has them: CCI depends on the length of a chunk. A trace of requests tells how often chunks return, and
pieces of one long prompt how their time grows. Intervals are drawn over articles, because the prompts of one article
share chunks and the chunks of one prompt attend to each other.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import formats
from benchmarks.early_termination import Cell
from benchmarks.kept import Kept
from benchmarks.simulation.trace import Trace, read_trace
from benchmarks.traffic import Traffic, draw_trace
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.evaluation.evaluate import Questions
from cachecraft_rag.cli.options import print_json, progress_bar
from cachecraft_rag.compute.captures.capture import CaptureRecorder
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import EvaluationQuestion
from cachecraft_rag.kernels.visibility import Visibility
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.scoring import (
    adjusted_overlap,
    context_impact,
    order_penalty,
    prefix_overlap,
)
from cachecraft_rag.prompt.builder import PromptBuilder
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.prompts import Prompt

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.dataset import Dataset

TOP = (0.1, 0.2, 0.3)  # shares of a chunk's tokens (Cache-Craft Fig. 14)
EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of distances between tokens
_BINS = np.arange(-8.0, 0.1, 0.25)  # of the logarithm (base 10) of attention weights
_RESAMPLES = 2000
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


# -- one prompt -------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """Attention of one prompt, added up while it is computed; an `Observer`.

    Attributes:
        mass: `[tokens, segments]`, from each token to each segment without itself, averaged over heads and layers.
        asked: `[layers, chunks]`, from the question's own text to each chunk (eq. 15 before it is cumulated).
        near, far: `[distances, 2]`: sum of weights and their number, by `EDGES`; inside chunks, and between them.
        weights: segment → two histograms over `_BINS`, of weights inside it and towards the chunk before it.
    """

    prompt: Prompt
    layers: int

    def __post_init__(self) -> None:
        bounds = self.prompt.bounds
        self.watched = range(bounds[-1])
        self.segment = torch.from_numpy(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)))
        self.mass = torch.zeros(bounds[-1], len(bounds) - 1)
        self.asked = torch.zeros(self.layers, len(bounds) - 3)
        self.near, self.far = np.zeros((len(EDGES), 2)), np.zeros((len(EDGES), 2))
        self.weights = {one: np.zeros((2, len(_BINS) - 1)) for one in range(2, len(bounds) - 2)}

    def observe(
        self, layer: int, q: Tensor, k: Tensor, visible: Visibility, settings: AttentionSettings
    ) -> None:
        """See `Observer.observe`."""
        tokens, bounds = len(q), self.prompt.bounds
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum(
            "rhd,khd->hrk", q.float(), k[:tokens].float().repeat_interleave(group, 1)
        )
        scores = scores * settings.scale
        if settings.softcap is not None:
            scores = settings.softcap * torch.tanh(scores / settings.softcap)
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
        unseen = (
            distance < 0
            if settings.window is None
            else (distance < 0) | (distance >= settings.window)
        )
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1).mean(0).fill_diagonal_(0.0)
        member = torch.nn.functional.one_hot(self.segment).float()
        mass = weights @ member
        self.mass += mass / self.layers
        own_text = slice(bounds[-2], bounds[-1] - self.prompt.segments[-1].closing)
        self.asked[layer] = mass[own_text, 1:-1].sum(0)
        self._by_distance(weights, distance)
        for one, found in self.weights.items():
            rows = slice(bounds[one], bounds[one + 1])
            inside = weights[rows, rows][distance[rows, rows] > 0]
            for part, values in enumerate(
                (inside, weights[rows, bounds[one - 1] : bounds[one]].reshape(-1))
            ):
                found[part] += np.histogram(values.clamp_min(1e-8).log10().numpy(), _BINS)[0]

    def _by_distance(self, weights: Tensor, distance: Tensor) -> None:
        last = len(self.prompt.bounds) - 2
        chunk = (self.segment > 0) & (self.segment < last)
        both = chunk[:, None] & chunk[None, :] & (distance > 0)
        same = self.segment[:, None] == self.segment[None, :]
        place = np.searchsorted(EDGES, distance.numpy(), side="right") - 1
        for sums, where in ((self.near, both & same), (self.far, both & ~same)):
            chosen = where.numpy()
            sums[:, 0] += np.bincount(place[chosen], weights.numpy()[chosen], len(EDGES))[
                : len(EDGES)
            ]
            sums[:, 1] += np.bincount(place[chosen], minlength=len(EDGES))[: len(EDGES)]

    def overlap(self, segment: int) -> float:
        """Overlap of the two distributions of weights, 0 to 1: inside a chunk, and towards the one before it."""
        shares = self.weights[segment] / self.weights[segment].sum(1, keepdims=True)
        return float(np.minimum(*shares).sum())


@dataclass(frozen=True)
class Placement:
    """A chunk in one prompt: what stood before it, its keys and values, and what they attended to.

    kv      `[layers, 2, tokens, kv_heads, head_dim]`, raw
    hidden  `[tokens, hidden]` after the last layer
    inter   eq. 3 towards each chunk of `before`, averaged over layers
    top     share of the attention to other chunks that its best `TOP` tokens hold; none where it stood first
    overlap see `Watched.overlap`; None where it stood first
    """

    chunk_id: str
    before: tuple[str, ...]
    kv: Tensor
    hidden: Tensor
    inter: tuple[float, ...]
    cci: float
    top: tuple[float, ...] = ()
    overlap: float | None = None


@torch.inference_mode()
def compute(decoder: Decoder, prompt: Prompt) -> tuple[list[Placement], Watched]:
    """Compute a whole prompt, and describe its chunks."""
    bounds = prompt.bounds
    buffer = KVBuffer(decoder, bounds[-1])
    spans = [(one, bounds[one], bounds[one + 1]) for one in range(1, len(bounds) - 2)]
    recorder = CaptureRecorder(decoder.layout, buffer.kv, spans)
    watched = Watched(prompt, decoder.layout.layers)
    ids = torch.tensor(list(prompt.token_ids))
    run = RowPass(decoder, buffer, ids, np.arange(bounds[-1]), recorder=recorder, observer=watched)
    while run.layer < decoder.layout.layers:
        advance(decoder, [run])
    names = [segment.segment_id for segment in prompt.segments]
    lengths = np.diff(bounds)
    placements = []
    for one in recorder.captures:
        rows, own = slice(one.start, one.stop), one.segment
        inter = watched.mass[rows, 1:own].sum(0).tolist()
        cci = context_impact(
            inter=inter,
            prefix_tokens=lengths[1:own].tolist(),
            intra=float(watched.mass[rows, own].sum()),
            tokens=one.stop - one.start,
        )
        by_token = np.sort(watched.mass[rows, 1:own].sum(1).numpy())[::-1]
        whole = max(float(by_token.sum()), 1e-30)
        top = [float(by_token[: round(share * len(by_token))].sum()) / whole for share in TOP]
        first = own == 1
        placements.append(
            Placement(
                names[own],
                tuple(names[1:own]),
                one.kv,
                run.hidden[0, rows].float(),
                tuple(inter),
                cci,
                () if first else tuple(top),
                None if first else watched.overlap(own),
            )
        )
    return placements, watched


def hidden_deviation(reused: Placement, needed: Placement) -> float:
    """Return the distance of the last layer's hidden states as a share of their norm, averaged over the tokens."""
    error = (reused.hidden - needed.hidden).norm(dim=1) / needed.hidden.norm(dim=1)
    return float(error.mean())


def deviation(reused: Placement, needed: Placement) -> float:
    """Distance of the stored keys and values from those of full prefill, as a share of their norm, over all layers."""
    error = (reused.kv - needed.kv).float().flatten(3).norm(dim=(2, 3))  # [layers, 2]
    return float((error / needed.kv.float().flatten(3).norm(dim=(2, 3))).mean())


# -- one article ------------------------------------------------------------------------------------------------------


def look_at(
    decoder: Decoder,
    article: Sequence[EvaluationQuestion],
    others: Sequence[Chunk],
    draw: random.Random,
) -> Any:
    """Plain values of one article: `placements`, `pairs`, `prompts` and the sums by distance.

    Args:
        article: questions about it; each makes one prompt.
        others: chunks of other articles; one of them takes the place of one of its chunks in every prompt.
    """
    builder = PromptBuilder(
        decoder.tokenizer, context_length=decoder.context_length, best_last=False
    )
    alone: dict[str, Placement] = {}
    seen: list[list[Placement]] = []
    found: dict[str, Any] = {"placements": [], "pairs": [], "prompts": [], "near": 0.0, "far": 0.0}
    for chunk in {chunk.chunk_id: chunk for one in article for chunk in one.passages}.values():
        placements, _ = compute(decoder, builder.build(article[0].text, [chunk]))
        alone[chunk.chunk_id] = placements[0]
    for question in article:
        holding = [
            one for one in question.passages if any(gold in one.text for gold in question.answers)
        ]
        chunks = [*question.passages]
        left = [place for place, one in enumerate(chunks) if one not in holding]
        if left and others:
            chunks[draw.choice(left)] = draw.choice(others)
        draw.shuffle(chunks)
        prompt = builder.build(question.text, chunks)
        placements, watched = compute(decoder, prompt)
        seen.append(placements)
        found["near"], found["far"] = found["near"] + watched.near, found["far"] + watched.far
        found["prompts"].append(
            {
                "tokens": np.diff(prompt.bounds).tolist(),
                "asked": [[round(value, 5) for value in layer] for layer in watched.asked.tolist()],
                "holding": [place for place, one in enumerate(chunks) if one in holding],
            }
        )
        for one in placements:
            if one.chunk_id in alone:
                plain = alone[one.chunk_id]
                change = hidden_deviation(reused=one, needed=plain)
                found["placements"].append(
                    {"before": len(one.before), "change": change, "top": one.top}
                )
    for first, second in permutations(range(len(seen)), 2):
        needed = {one.chunk_id: one for one in seen[second]}
        found["pairs"] += [
            _pair(one, needed[one.chunk_id]) for one in seen[first] if one.chunk_id in needed
        ]
    found["near"], found["far"] = (np.asarray(found[name]).tolist() for name in ("near", "far"))
    return found


def _pair(reused: Placement, needed: Placement) -> dict[str, Any]:
    places = {chunk_id: place for place, chunk_id in enumerate(needed.before)}
    beta = prefix_overlap(reused.inter, reused.before, places)
    gamma = order_penalty(reused.before, places)
    return {
        "cci": reused.cci,
        "no_overlap": 1.0 - beta,
        "not_overlapping": 1.0 - adjusted_overlap(beta, gamma),
        "gamma": gamma,
        "shared": sum(chunk_id in places for chunk_id in reused.before),
        "before": len(reused.before),
        "needed_before": len(needed.before),
        "tokens": len(reused.hidden),
        "deviation": hidden_deviation(reused, needed),
        "kv_deviation": deviation(reused, needed),
    }


# -- what follows -----------------------------------------------------------------------------------------------------


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank; 0 where one side does not vary.

    >>> spearman([1, 2, 3, 4], [10, 20, 20, 50]) > 0.9, spearman([1, 2], [2, 1]), spearman([1, 2], [3, 3])
    (True, -1.0, 0.0)
    """
    first, second = (_ranks(np.asarray(values, float)) for values in (a, b))
    spread = first.std() * second.std()
    return (
        round(float(((first - first.mean()) * (second - second.mean())).mean() / spread), 12)
        if spread > 0
        else 0.0
    )


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def partial_spearman(
    a: Sequence[float], b: Sequence[float], given: Sequence[Sequence[float]]
) -> float:
    """Return the rank correlation of what is left of both sides after a linear fit on the ranks of `given`.

    >>> place = [1, 2, 3, 4, 5, 6]
    >>> partial_spearman([1, 2, 3, 5, 4, 6], [1, 3, 2, 4, 5, 6], []) > 0.8
    True
    >>> partial_spearman([1, 2, 3, 5, 4, 6], [1, 3, 2, 4, 5, 6], [place]) < 0.1
    True
    """
    first, second, *others = (_ranks(np.asarray(values, float)) for values in (a, b, *given))
    known = np.stack([np.ones(len(first)), *others], axis=1)
    left, right = (
        ranks - known @ np.linalg.lstsq(known, ranks, rcond=None)[0] for ranks in (first, second)
    )
    spread = float(np.sqrt((left**2).sum() * (right**2).sum()))
    return round(float((left * right).sum()) / spread, 12) if spread > 1e-9 else 0.0


# of a pair: the chunk's length and how many chunks stood before it, in the old prompt and in the new one
_CONTROLS = ("tokens", "before", "needed_before")


def correlation(
    groups: Sequence[Sequence[Mapping[str, Any]]],
    name: str,
    *,
    outcome: str = "deviation",
    given: Sequence[str] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """Return Spearman's ρ of a field with the outcome over all pairs, and its 95 % bootstrap interval over groups.

    Args:
        groups: the pairs of each article, which are alike.
        given: fields to hold constant, see `partial_spearman`.
    """
    rows = [np.array([[p[key] for key in (name, outcome, *given)] for p in g]) for g in groups if g]
    if not rows:
        return {"pairs": 0}

    def of(chosen: Sequence[int]) -> float:
        first, second, *others = np.concatenate([rows[one] for one in chosen]).T
        if others:
            return partial_spearman(first, second, others)  # type: ignore[arg-type]
        return spearman(first, second)  # type: ignore[arg-type]

    found = bootstrap(of, len(rows), seed=seed)
    return {"pairs": sum(map(len, rows)), "rho": found["mean"]} | {
        side: found[side] for side in ("low", "high")
    }


def clustered(groups: Sequence[Sequence[float]], *, seed: int = 0) -> dict[str, float]:
    """Return the mean of all values, and its 95 % bootstrap interval over groups.

    >>> clustered([[1.0, 1.0], [], [1.0]])
    {'mean': 1.0, 'low': 1.0, 'high': 1.0}
    """
    filled = [np.asarray(group) for group in groups if len(group)]
    return bootstrap(
        lambda chosen: float(np.concatenate([filled[one] for one in chosen]).mean()),
        len(filled),
        seed=seed,
    )


def bootstrap(
    value: Callable[[Sequence[int]], float], groups: int, *, seed: int = 0
) -> dict[str, float]:
    """Return the value of all groups, and its 95 % bootstrap interval over groups.

    Args:
        value: value of the groups with these indices; NaN for a resample that is left out.
    """
    draw = np.random.default_rng(seed)
    drawn = [value(draw.integers(groups, size=groups).tolist()) for _ in range(_RESAMPLES)]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return {"mean": value(range(groups)), "low": float(low), "high": float(high)}


def summary(articles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results by figure, from what `look_at` found in each article."""
    following = [[p for p in one["pairs"] if p["before"]] for one in articles]
    first = [p["deviation"] for one in articles for p in one["pairs"] if not p["before"]]
    places = sorted({p["before"] for one in articles for p in one["placements"]} - {0})
    return {
        "articles": len(articles),
        "prompts": sum(len(one["prompts"]) for one in articles),
        "placements": sum(len(one["placements"]) for one in articles),
        "fig5": _parts([p["tokens"] for one in articles for p in one["prompts"]]),
        "fig7": _growth(articles, places),
        "fig9": _distances(
            *(np.sum([one[name] for one in articles], axis=0) for name in ("near", "far"))
        ),
        "fig12": _what_deviation_grows_with(following)
        | {"of those captured first": float(np.mean(first)) if first else None},
        "fig14": {
            str(share): clustered(
                [[p["top"][place] for p in one["placements"] if p["top"]] for one in articles]
            )
            for place, share in enumerate(TOP)
        },
        "fig17": _focus([p for one in articles for p in one["prompts"]]),
    }


def _growth(articles: Sequence[Mapping[str, Any]], places: Sequence[int]) -> dict[str, Any]:
    """Return the change of the hidden states by the number of chunks before, and the difference of most and fewest."""

    def changes(before: int) -> list[list[float]]:
        return [
            [p["change"] for p in one["placements"] if p["before"] == before] for one in articles
        ]

    found: dict[str, Any] = {str(before): clustered(changes(before)) for before in places}
    if len(places) > 1:
        pairs = [
            [float(np.mean(most) - np.mean(fewest))] if most and fewest else []
            for most, fewest in zip(changes(places[-1]), changes(places[0]), strict=True)
        ]
        found["difference, mean of articles"] = clustered(pairs)
    return found


def _what_deviation_grows_with(following: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return rank correlations with the hidden states' deviation, plain and with length and places held constant."""
    lengths = sorted(p["tokens"] for group in following for p in group)
    ordered = [[p for p in group if p["shared"] >= 2] for group in following]
    fields = {"CCI": "cci", "1 - β": "no_overlap", "1 - β'": "not_overlapping"}
    found: dict[str, Any] = {"tokens of a chunk, least and most": [lengths[0], lengths[-1]]}
    for label, name, groups in [
        *((label, name, following) for label, name in fields.items()),
        ("γ", "gamma", ordered),
    ]:
        found[label] = {
            "hidden states": correlation(groups, name),
            "hidden states, partial": correlation(groups, name, given=_CONTROLS),
            "keys and values, partial": correlation(
                groups, name, outcome="kv_deviation", given=_CONTROLS
            ),
        }
    return found | {
        "CCI and length": correlation(following, "cci", outcome="tokens"),
        "mean deviation": float(np.mean([p["deviation"] for group in following for p in group])),
    }


def _parts(tokens: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of the prompts' tokens in each of their parts."""
    sums = np.array([[one[0], sum(one[1:-1]), one[-1]] for one in tokens]).sum(0)
    return dict(
        zip(("instruction", "chunks", "question"), (sums / sums.sum()).tolist(), strict=True)
    )


def _distances(near: NDArray[np.float64], far: NDArray[np.float64]) -> dict[str, Any]:
    both = np.flatnonzero(near[:, 1] * far[:, 1] > 0)
    return {
        "mean weight by distance, inside a chunk and between chunks": {
            str(EDGES[place]): [float(sums[place, 0] / sums[place, 1]) for sums in (near, far)]
            for place in both
        },
        "intra / inter": float(near[:, 0].sum() / far[:, 0].sum()),
    }


def _focus(prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Algorithm 1 with w = 3 from the first layer on, as published, from the middle on, and with w = 8."""
    found: dict[str, Any] = {"prompts": len(prompts), "layers": len(prompts[0]["asked"])}
    for window, first in ((3, 0.0), (3, 0.5), (8, 0.0)):
        decided = [
            (one, p) for p in prompts if (one := Cell(window, first).decide(p["asked"])) is not None
        ]
        if decided:
            hits = [bool(one[1] & {*p["holding"]}) for one, p in decided]
            found[f"w = {window}, from {first:g} of the layers"] = {
                "decided": len(decided),
                "deciding layer, quartiles": np.quantile(
                    [one[0] for one, _ in decided], _QUARTERS
                ).tolist(),
                "prompts by deciding layer": {
                    str(layer): count
                    for layer, count in sorted(Counter(one[0] for one, _ in decided).items())
                },
                "the answer is in a focused chunk": float(np.mean(hits)),
                "by chance": float(
                    np.mean([len(one[1]) / len(p["asked"][0]) for one, p in decided])
                ),
            }
    return found


def uses(trace: Trace) -> dict[str, Any]:
    """How chunks return in a trace (Cache-Craft Fig. 3, 6 and 8a)."""
    before: set[int] = set()
    prefixes: set[tuple[int, ...]] = set()
    past: list[frozenset[int]] = []
    known = returning = same_prefix = 0
    density = {k: [0, 0] for k in range(1, 6)}
    sources: list[int] = []
    for request in filter(None, trace.requests):
        cost = [trace.tokens[chunk] for chunk in request]
        known += sum(cost)
        returning += sum(n for n, chunk in zip(cost, request, strict=True) if chunk in before)
        longest = max(
            (k for k in range(len(request) + 1) if request[:k] in prefixes or k == 0), default=0
        )
        same_prefix += sum(cost[:longest])
        for k, counted in density.items():
            if len(request) >= k:
                counted[0] += request[:k] in prefixes
                counted[1] += 1
        if before.issuperset(request):
            sources.append(_sources(frozenset(request), past))
        before.update(request)
        past.append(frozenset(request))
        prefixes.update(request[:k] for k in range(1, len(request) + 1))
    counts = np.sort(np.bincount([chunk for request in trace.requests for chunk in request]))[::-1]
    top = set(
        np.argsort(-np.bincount([c for r in trace.requests for c in r]))[
            : max(1, len(counts) // 20)
        ].tolist()
    )
    return {
        "requests": len(trace.requests),
        "chunks": len(counts),
        "top 5 % of chunks": {
            "share of retrievals": float(counts[: max(1, len(counts) // 20)].sum() / counts.sum()),
            "share of requests with one": float(
                np.mean([bool(top & set(request)) for request in trace.requests])
            ),
        },
        "tokens of chunks seen before": returning / known,
        "tokens behind the same prefix": same_prefix / known,
        "requests whose first k chunks began one before": {
            str(k): n / max(of, 1) for k, (n, of) in density.items()
        },
        "past requests that hold all chunks": {
            str(n): sources.count(n) / len(sources) for n in sorted(set(sources))
        },
    }


def _sources(wanted: frozenset[int], past: Sequence[frozenset[int]]) -> int:
    """Number of past requests that together hold the chunks, the one with most of what is missing first."""
    count = 0
    while wanted:
        wanted -= max(past, key=lambda one: len(one & wanted))
        count += 1
    return count


@torch.inference_mode()
def piece_times(
    decoder: Decoder, ids: Sequence[int], *, pieces: int, tokens: int
) -> dict[str, Any]:
    """CPU seconds of each piece of one long prefill, and a line through them (Cake Fig. 3).

    Raises:
        ConfigError: the text is shorter than all pieces, or they do not fit the model's context.
    """
    if len(ids) < pieces * tokens or pieces * tokens > decoder.context_length:
        raise ConfigError(
            f"{pieces} pieces of {tokens} tokens need a longer text, or a longer context"
        )
    buffer, spent = KVBuffer(decoder, pieces * tokens), []
    # the first one twice: what runs for the first time takes longer
    for piece in [0, *range(pieces)]:
        where = np.arange(piece * tokens, (piece + 1) * tokens)
        started = time.process_time()
        run = RowPass(decoder, buffer, torch.tensor([ids[place] for place in where]), where)
        while run.layer < decoder.layout.layers:
            advance(decoder, [run])
        spent.append(time.process_time() - started)
    times = np.array(spent[1:])
    slope, start = np.polyfit(np.arange(pieces), times, 1)
    left = float(
        ((times - start - slope * np.arange(pieces)) ** 2).sum()
        / max(((times - times.mean()) ** 2).sum(), 1e-30)
    )
    return {"seconds": times.tolist(), "growth of a piece": float(slope / start), "r2": 1.0 - left}


# -- the command ------------------------------------------------------------------------------------------------------


def articles_of(dataset: Dataset, *, prompts: int) -> dict[str, list[EvaluationQuestion]]:
    """Questions of the articles that most of their passages are of, `prompts` of each, by the article's first chunk."""
    grouped: dict[str, list[EvaluationQuestion]] = {}
    for question in dataset.questions:
        firsts = Counter(
            dataset.document_of(chunk.chunk_id)[0].chunk_id for chunk in question.passages
        )
        grouped.setdefault(firsts.most_common(1)[0][0], []).append(question)
    return {
        name: asked[:prompts] for name, asked in sorted(grouped.items()) if len(asked) >= prompts
    }


def _others(
    dataset: Dataset, chosen: Mapping[str, list[EvaluationQuestion]], name: str, *, is_fixed: bool
) -> list[Chunk]:
    """Return the chunks of all other articles; of equal length if the prompts' chunks are."""
    if not is_fixed:
        return [chunk for one in dataset.documents if one[0].chunk_id != name for chunk in one]
    return [
        chunk
        for other, asked in chosen.items()
        if other != name
        for question in asked
        for chunk in question.passages
    ]


_PASSAGES = 5
_PIECES = 8  # of equal length, of which the prompts of one article take theirs


def fixed_articles(
    tokenizer: Any, dataset: Dataset, *, tokens: int, prompts: int, seed: int
) -> dict[str, list[EvaluationQuestion]]:
    """Return prompts of chunks of equal length, `prompts` for each document that is long enough.

    A document's text is cut after every `tokens` tokens. The first pieces that have this length as chunks too are
    used: a cut text may be tokenized in another way.
    """
    asked: dict[str, str] = {}
    for question in dataset.questions:
        for chunk in question.passages:
            asked.setdefault(dataset.document_of(chunk.chunk_id)[0].chunk_id, question.text)
    builder = PromptBuilder(tokenizer, context_length=tokens)
    encode, decode = tokenizer.encode, tokenizer.decode
    end = len(builder.chunk_segment(Chunk(" a")).token_ids) - len(
        encode(" a", add_special_tokens=False)
    )
    found: dict[str, list[EvaluationQuestion]] = {}
    for document in dataset.documents:
        name = document[0].chunk_id
        ids = encode("\n".join(chunk.text for chunk in document), add_special_tokens=False)
        cut = [Chunk(decode(ids[at : at + tokens])) for at in range(0, len(ids), tokens)]
        whole = {
            one.chunk_id: one
            for one in cut
            if len(builder.chunk_segment(one).token_ids) == tokens + end
        }
        pieces = list(whole.values())[:_PIECES]
        if len(pieces) <= _PASSAGES or name not in asked:
            continue
        draw = random.Random(f"{seed}/{name}")
        found[name] = [
            EvaluationQuestion(
                f"{name}/{number}", asked[name], tuple(draw.sample(pieces, _PASSAGES)), ()
            )
            for number in range(prompts)
        ]
    return found


def main(
    data: Annotated[Path | None, typer.Option("--data", "-d", help="File of questions.")] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="Its format.", show_default="recognised")
    ] = None,
    model: options.Model = "demo",
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="File of requests.", show_default="drawn by Zipf's law"),
    ] = None,
    articles: Annotated[int, typer.Option("--articles", min=2, help="Articles to look at.")] = 12,
    prompts: Annotated[int, typer.Option("--prompts", min=2, help="Prompts of each article.")] = 5,
    fixed_tokens: Annotated[
        int | None,
        typer.Option(
            "--fixed-tokens",
            min=8,
            help="Cut articles into chunks of this many tokens.",
            show_default="the file's passages",
        ),
    ] = None,
    pieces: Annotated[int, typer.Option("--pieces", min=2, help="Pieces of the long prefill.")] = 8,
    piece_tokens: Annotated[
        int, typer.Option("--piece-tokens", min=1, help="Length of each.")
    ] = 512,
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="What is there is not measured again.")
    ] = Path("cachecraft-premises"),
    dtype: options.Dtype = "float32",
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of questions, passages and orders.")
    ] = 0,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """What the papers presuppose: CCI, β′ and γ against deviation, attention by distance, chunks that return.

    Cache-Craft Fig. 3, 5 to 10, 12, 14 and 17, and Cake Fig. 3. A stopped run resumes.
    """
    options.set_threads(threads)
    options.quiet_libraries()
    settings = Questions(data, format, limit=10_000, passages=_PASSAGES, seed=seed)
    dataset = settings.load(formats.read)
    with progress_bar("Premises") as show:
        decoder = Decoder.load(model, dtype=dtype)
        builder = PromptBuilder(decoder.tokenizer, context_length=decoder.context_length)
        if fixed_tokens is None:
            chosen = articles_of(dataset, prompts=prompts)
        else:
            chosen = fixed_articles(
                decoder.tokenizer, dataset, tokens=fixed_tokens, prompts=prompts, seed=seed
            )
        names = list(chosen)[:articles]
        if len(names) < articles:
            raise ConfigError(
                f"only {len(names)} articles are long enough for {prompts} prompts; lower --articles, --prompts or "
                "--fixed-tokens"
            )
        given = {
            "fingerprint": decoder.fingerprint,
            "data": dataset.name,
            "prompts": prompts,
            "seed": seed,
            "fixed": fixed_tokens,
        }
        kept = Kept(folder / "premises.jsonl", given)
        found = []
        for done, name in enumerate(names):
            show(Progress(done, len(names) + 1, "articles"))
            others = _others(dataset, chosen, name, is_fixed=fixed_tokens is not None)
            draw = random.Random(f"{seed}/{name}")
            found.append(kept.get(name, lambda: look_at(decoder, chosen[name], others, draw)))  # noqa: B023
        show(Progress(len(names), len(names) + 1, "pieces"))
        ids = [
            token
            for one in dataset.documents
            for chunk in one
            for token in builder.chunk_segment(chunk).token_ids.tolist()
        ]
        long = kept.get(
            f"pieces {pieces} {piece_tokens}",
            lambda: piece_times(decoder, ids, pieces=pieces, tokens=piece_tokens),
        )
    requests = draw_trace(Traffic()) if trace is None else read_trace(trace)
    report = summary(found) | {"trace": uses(requests), "cake fig3": long}
    if as_json:
        print_json(report)
    else:
        out.print_json(json.dumps(report, ensure_ascii=False))
