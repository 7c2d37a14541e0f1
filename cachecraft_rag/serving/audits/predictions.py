"""What a model predicted along an answer, in few numbers: the likeliest tokens and their probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

KEPT = 32  # likeliest tokens whose probabilities are kept at each place of an answer


@dataclass(eq=False)
class Predictions:
    """The likeliest next tokens at each place of an answer, noted while it is decoded.

    A full distribution takes 0.2 to 0.6 MB per token; this takes 0.4 kB.

    ids        for each place `[KEPT]` token ids, the likeliest first
    log_shares for each place float32 `[KEPT]`: the natural logarithms of their probabilities
    """

    ids: list[Tensor] = field(default_factory=list)
    log_shares: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @torch.inference_mode()
    def note(self, logits: Tensor) -> None:
        """Note the prediction for the next token, from `[vocabulary]` logits."""
        logits = logits.float()
        highest = logits.topk(min(KEPT, len(logits)))
        self.ids.append(highest.indices)
        self.log_shares.append(highest.values - logits.logsumexp(-1))

    def stacked(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return ids and log-probabilities `[places, KEPT]` of these places, on the CPU."""
        return torch.stack(self.ids[begin:end]).cpu(), torch.stack(self.log_shares[begin:end]).cpu()


def compare(predictions: Predictions, logits: Tensor, *, begin: int) -> tuple[list[int], list[float]]:
    """Compare reuse's predictions with full prefill's, from the place `begin` of the answer on.

    The divergence KL(full prefill ‖ reuse) is taken over the `KEPT` likeliest tokens of reuse and all other tokens
    together. It is never more than the divergence over the whole vocabulary (the data-processing inequality).

    Args:
        predictions: what was predicted with reuse.
        logits: `[places, vocabulary]` of full prefill at the places from `begin` on.

    Returns:
        For each place full prefill's likeliest token, and the divergence in nats.

    >>> reuse = Predictions()
    >>> reuse.note(torch.tensor([0.0, 1.0, 0.0]))
    >>> likeliest, kl = compare(reuse, torch.tensor([[0.0, 1.0, 0.0]]), begin=0)
    >>> likeliest, round(kl[0], 6)
    ([1], 0.0)
    """
    ids, log_shares = predictions.stacked(begin, begin + len(logits))
    full = logits.cpu().double().log_softmax(-1)  # [places, vocabulary]
    likeliest: list[int] = full.argmax(-1).tolist()

    log_full = full.gather(-1, ids)  # [places, KEPT]
    log_reuse = log_shares.double()
    share_full = log_full.exp()
    of_kept = torch.where(share_full > 0, share_full * (log_full - log_reuse), 0.0).sum(-1)

    rest_full = (1.0 - share_full.sum(-1)).clamp(min=0.0)
    rest_reuse = (1.0 - log_reuse.exp().sum(-1)).clamp(min=1e-7)  # rounding of float32 shares
    of_rest = torch.where(rest_full > 1e-7, rest_full * (rest_full / rest_reuse).log(), 0.0)
    divergence: list[float] = (of_kept + of_rest).clamp(min=0.0).tolist()
    return likeliest, divergence
