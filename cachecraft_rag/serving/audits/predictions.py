"""Predictions of a model along an answer, in few numbers: the likeliest tokens and their probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

KEPT = 32  # likeliest tokens whose probabilities are kept at each place of an answer
# Reuse's smallest probability in a divergence, as a natural logarithm: with 0 the divergence would be infinite.
_LEAST_LOG_SHARE = -100.0


@dataclass(eq=False)
class Predictions:
    """The likeliest next tokens at each place of an answer, noted while it is decoded.

    A full distribution takes 0.2 to 0.6 MB per token; this takes about 1 kB.

    likeliest  for each place the likeliest token, as greedy sampling takes it
    ids        for each place `[KEPT]` ids of the likeliest tokens
    log_shares for each place float32 `[KEPT]`: the natural logarithms of their probabilities
    """

    likeliest: list[Tensor] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)
    log_shares: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @torch.inference_mode()
    def note(self, logits: Tensor) -> None:
        """Note the next token's prediction from `[vocabulary]` logits: its `KEPT` likeliest tokens.

        The tensors stay on the device of the logits.
        """
        logits = logits.float()
        highest = logits.topk(min(KEPT, len(logits)))
        self.likeliest.append(logits.argmax())  # of equal logits `topk` may put another one first
        self.ids.append(highest.indices)
        self.log_shares.append(highest.values - logits.logsumexp(-1))

    def stacked(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places `begin` to `end - 1` (at least one), counted from 0, as new tensors on the CPU.

        These are the likeliest token ids, int64 `[places]`; the ids of the `KEPT` likeliest, int64 `[places, KEPT]`;
        and their log-probabilities, float32 `[places, KEPT]`.
        """
        likeliest = torch.stack(self.likeliest[begin:end]).cpu()
        return (
            likeliest,
            torch.stack(self.ids[begin:end]).cpu(),
            torch.stack(self.log_shares[begin:end]).cpu(),
        )


@dataclass(frozen=True, slots=True)
class ComparedPlace:
    """One place of an answer.

    likeliest  full prefill's likeliest token
    differs    True if reuse finds another token the likeliest
    margin     full prefill's probability of its likeliest token, less that of reuse's likeliest; 0 if they agree
    kl         KL(full prefill ‖ reuse) in nats, or a little less
    """

    likeliest: int
    differs: bool
    margin: float
    kl: float


def compare(predictions: Predictions, logits: Tensor, *, begin: int) -> list[ComparedPlace]:
    """Compare reuse's predictions with full prefill's `logits` `[places, vocabulary]`, from the place `begin` on.

    The divergence is taken over the `KEPT` likeliest tokens of reuse and all other tokens together. It is never more
    than the divergence over the whole vocabulary (the data-processing inequality).

    >>> reuse = Predictions()
    >>> reuse.note(torch.tensor([0.0, 1.0, 0.0]))
    >>> (place,) = compare(reuse, torch.tensor([[0.0, 1.0, 0.0]]), begin=0)
    >>> place.likeliest, place.differs, round(place.kl, 6)
    (1, False, 0.0)
    """
    noted, ids, log_shares = predictions.stacked(begin, begin + len(logits))
    full = logits.float().cpu()  # [places, vocabulary]
    whole = full.double().logsumexp(-1, keepdim=True)
    highest, likeliest = full.max(-1)
    share_highest = (highest.double()[:, None] - whole).exp().squeeze(-1)
    share_noted = (full.gather(-1, noted[:, None]).double() - whole).exp().squeeze(-1)

    log_full = full.gather(-1, ids).double() - whole  # [places, KEPT]
    log_reuse = log_shares.double().clamp(min=_LEAST_LOG_SHARE)
    share_full = log_full.exp()
    of_kept = torch.where(share_full > 0, share_full * (log_full - log_reuse), 0.0).sum(-1)
    rest_full = (1.0 - share_full.sum(-1)).clamp(min=0.0)
    rest_reuse = (1.0 - log_reuse.exp().sum(-1)).clamp(min=1e-7)  # rounding of float32 shares
    of_rest = torch.where(rest_full > 1e-7, rest_full * (rest_full / rest_reuse).log(), 0.0)
    divergence = (of_kept + of_rest).clamp(min=0.0)

    differs = noted != likeliest
    margins = torch.where(differs, share_highest - share_noted, 0.0)
    columns = (likeliest.tolist(), differs.tolist(), margins.tolist(), divergence.tolist())
    return [ComparedPlace(*values) for values in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class LikeliestTokens:
    """The likeliest next tokens at one place, as vLLM reports them.

    likeliest   the likeliest token, as greedy sampling takes it
    log_shares  token id → natural logarithm of its probability; at least those of the likeliest tokens
    """

    likeliest: int
    log_shares: Mapping[int, float]


def compare_likeliest(reuse: LikeliestTokens, full: LikeliestTokens) -> ComparedPlace:
    """Compare what reuse predicts at a place with what full prefill predicts, where only few tokens of each are known.

    The divergence is taken over the tokens known of both, and all other tokens together. Like `compare`'s it is never
    more than the divergence over the whole vocabulary. If reuse's likeliest token is not among those known of full
    prefill, the margin is taken to the least likely one of these, and so a little less than the true margin.

    >>> reuse = LikeliestTokens(5, {5: math.log(0.5), 6: math.log(0.25)})
    >>> full = LikeliestTokens(6, {5: math.log(0.25), 6: math.log(0.5)})
    >>> place = compare_likeliest(reuse, full)
    >>> place.differs, place.likeliest, round(place.margin, 6), round(place.kl, 6)
    (True, 6, 0.25, 0.173287)
    """
    divergence = 0.0
    rest_reuse = 1.0
    rest_full = 1.0
    for token in reuse.log_shares.keys() & full.log_shares.keys():
        share_full = math.exp(full.log_shares[token])
        if share_full > 0.0:
            log_share_reuse = max(reuse.log_shares[token], _LEAST_LOG_SHARE)
            divergence += share_full * (full.log_shares[token] - log_share_reuse)
        rest_full -= share_full
        rest_reuse -= math.exp(reuse.log_shares[token])
    if rest_full > 1e-7:
        divergence += rest_full * math.log(rest_full / max(rest_reuse, 1e-7))

    margin = 0.0
    differs = reuse.likeliest != full.likeliest
    if differs:
        least_known = min(full.log_shares.values())
        log_share = full.log_shares.get(reuse.likeliest, least_known)
        margin = math.exp(full.log_shares[full.likeliest]) - math.exp(log_share)
    return ComparedPlace(full.likeliest, differs, margin, max(0.0, divergence))
