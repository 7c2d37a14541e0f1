"""Fitting a `Correction`: ridge regression of low rank, per layer, from sums over tokens.

A chunk is computed twice, alone behind the instruction and behind other chunks; the difference of its keys and values
is what the correction has to predict. Only sums of products are kept, in float64, so memory does not depend on how much
was seen. They are kept for two halves of the chunks apart: the strength of the ridge is the one that predicts each half
best from the other. (Halves of the tokens would not do: a chunk's tokens in one prompt tell much about the same tokens
in another.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from cachecraft_rag.compute.correction import Correction
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types import KVLayout

RANK = 16  # more predicts no better (docs/log.md)
LIMIT = 4.0  # standard deviations: rarer values were hardly seen, and a line through the rest says nothing of them
RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # in units of a feature's variance
LEAST_TOKENS = 1000  # of each half: fewer say too little
_ROUNDING = 1e-8  # a change of this share of keys and values squared is none: the first layer sees no other token


class Moments:
    """Sums over the tokens of chunks that were computed alone and behind others.

    Attributes:
        gram: float64 `[2, layers, width + 1, width + 1]`, of the stale row and a 1, both times the share of unseen
            tokens, of each half.
        cross: float64 `[2, layers, width + 1, width]`, of the same with the change.
        square: float64 `[2, layers, width]`, of the change.
    """

    def __init__(self, layout: KVLayout) -> None:
        width = 2 * layout.kv_heads * layout.head_dim
        self.gram = torch.zeros(2, layout.layers, width + 1, width + 1, dtype=torch.float64)
        self.cross = torch.zeros(2, layout.layers, width + 1, width, dtype=torch.float64)
        self.square = torch.zeros(2, layout.layers, width, dtype=torch.float64)
        self.tokens = [0, 0]

    def add(self, alone: Tensor, behind: Tensor, unseen: Tensor, *, half: int) -> None:
        """Take in one chunk, `[layers, 2, tokens, kv_heads, head_dim]` raw, captured alone and behind others.

        `unseen`: `[tokens]`, see `correction.unseen_share`.
        """
        weight = unseen.double().cpu()[:, None]
        self.tokens[half] += len(weight)
        for layer, (before, after) in enumerate(zip(alone, behind, strict=True)):
            x, y = (one.transpose(0, 1).flatten(1).double().cpu() for one in (before, after))
            x, change = weight * torch.cat((x, x.new_ones(len(x), 1)), 1), y - x
            self.gram[half, layer] += x.T @ x
            self.cross[half, layer] += x.T @ change
            self.square[half, layer] += change.square().sum(0)

    def save(self, path: Path, key: str, done: int) -> None:
        """Replace the file with the sums and the number of prompts in them. Raises OSError."""
        scratch = path.with_suffix(".tmp")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        sums = {"gram": self.gram, "cross": self.cross, "square": self.square}
        save_file(sums, scratch, {"key": key, "state": json.dumps([done, self.tokens])})
        scratch.replace(path)

    def load(self, path: Path, key: str) -> int:
        """Take the sums that `save` has written with this key; the number of prompts in them, 0 if there are none."""
        try:
            data = path.read_bytes()
            fields = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            if fields["key"] != key:
                return 0
            done, tokens = json.loads(fields["state"])
            sums = load(data)
            gram, cross, square = sums["gram"], sums["cross"], sums["square"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return 0
        self.gram, self.cross, self.square, self.tokens = gram, cross, square, tokens
        return int(done)


@dataclass(frozen=True)
class _Sums:
    """One layer's sums: `gram`, `cross` and `square` as in `Moments`, of some tokens."""

    gram: Tensor
    cross: Tensor
    square: Tensor

    @property
    def weight(self) -> Tensor:
        """Of all tokens together: the sum of squared shares."""
        return self.gram[-1, -1]

    @property
    def mean(self) -> Tensor:
        """`[width]`, of the stale rows."""
        return self.gram[-1, :-1] / self.weight

    @property
    def shift(self) -> Tensor:
        """`[width]`, the mean change, for a token that has seen nothing of what stands before it."""
        return self.cross[-1] / self.weight

    def covariance(self) -> tuple[Tensor, Tensor]:
        """`[width, width]` each: of the stale rows, and of them with the change."""
        own = self.gram[:-1, :-1] / self.weight - torch.outer(self.mean, self.mean)
        return own, self.cross[:-1] / self.weight - torch.outer(self.mean, self.shift)

    def error(self, slope: Tensor, constant: Tensor) -> float:
        """Sum of squared errors, each channel in units of its own mean square change."""
        line = torch.cat((slope, constant[None]))
        left = self.square - 2 * (line * self.cross).sum(0) + (line * (self.gram @ line)).sum(0)
        return float((left / self.square.clamp_min(torch.finfo(torch.float64).tiny)).sum())


def fit(moments: Moments, fingerprint: str, *, rank: int = RANK, limit: float = LIMIT) -> Correction:
    """The correction that the sums imply.

    Args:
        fingerprint: of the model that computed the chunks.
        rank: directions through which a token's change is read; at most the width.
        limit: see `Correction`.

    Raises:
        ConfigError: there are too few tokens.
    """
    if min(moments.tokens) < LEAST_TOKENS:
        raise ConfigError(
            f"a correction needs {LEAST_TOKENS:,} tokens of chunks in each of two halves, not {min(moments.tokens):,}; "
            "give more documents"
        )
    layers = [
        _fit_layer([_Sums(*parts) for parts in zip(gram, cross, square, strict=True)], rank)
        for gram, cross, square in zip(
            moments.gram.unbind(1), moments.cross.unbind(1), moments.square.unbind(1), strict=True
        )
    ]
    down, offset, up, shift = (torch.stack(parts).float() for parts in zip(*layers, strict=True))
    return Correction(fingerprint, down, offset, up, shift, limit)


def _fit_layer(halves: list[_Sums], rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`down`, `offset`, `up` and `shift` of one layer, see `Correction`."""
    first, second = halves
    whole = _Sums(first.gram + second.gram, first.cross + second.cross, first.square + second.square)
    width = len(whole.square)
    rank = min(rank, width)
    if float(whole.square.sum()) <= _ROUNDING * float(whole.gram.diagonal()[:-1].sum()):
        zero = whole.gram.new_zeros
        return zero(width, rank), zero(rank), zero(rank, width), zero(width)
    errors = torch.zeros(len(RIDGES))
    for seen, unseen in ((first, second), (second, first)):
        for number, slope in enumerate(_slopes(seen)):
            errors[number] += unseen.error(slope, seen.shift - seen.mean @ slope)
    slope = _slopes(whole)[int(errors.argmin())]
    down, up = _of_rank(slope, whole, rank)
    # The directions of `down` are uncorrelated; in units of their spread they can be cut off alike.
    spread = (down * (whole.covariance()[0] @ down)).sum(0).clamp_min(0).sqrt()
    spread = torch.where(spread > 0, spread, 1.0)
    down, up = down / spread, up * spread[:, None]
    return down, -(whole.mean @ down), up, whole.shift


def _slopes(sums: _Sums) -> list[Tensor]:
    """`[width, width]` for each of `RIDGES`: features in units of their own spread."""
    own, with_change = sums.covariance()
    spread = own.diagonal().clamp_min(0).sqrt()
    spread = torch.where(spread > 0, spread, 1.0)
    values, vectors = torch.linalg.eigh(own / torch.outer(spread, spread))
    turned = vectors.T @ (with_change / spread[:, None])
    return [(vectors @ (turned / (values.clamp_min(0) + ridge)[:, None])) / spread[:, None] for ridge in RIDGES]


def _of_rank(slope: Tensor, sums: _Sums, rank: int) -> tuple[Tensor, Tensor]:
    """A slope as `[width, rank] @ [rank, width]`: what is left out explains least (reduced-rank regression).

    Every channel of the change counts in units of its own size: keys are larger than values in most models.
    """
    size = (sums.square / sums.weight).sqrt()
    size = torch.where(size > 0, size, 1.0)
    scaled = slope / size
    own, _ = sums.covariance()
    _, vectors = torch.linalg.eigh(scaled.T @ own @ scaled)
    kept = vectors[:, -rank:]
    return scaled @ kept, kept.T * size
