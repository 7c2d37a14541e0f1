"""Joint forwards: rows of several requests in one forward, if the model computes each row independently.

Reading the weights is most of a decode step, and one forward reads them once for all its rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from prometheus_client import CollectorRegistry, Histogram
from torch import Tensor

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.decode import DecodeStep, extend_all
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import TOLERANCE

logger = logging.getLogger("cachecraft_rag")

ROW_BOUNDS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
_MAX_FAILURES = 3  # in a row; then each request is computed separately
# lengths of the prompts that are compared before the first joint forward
_CHECKED_ROWS = (1, 5, 12)


class JointRows:
    """Computes decode steps and layers of prefills, several in one forward if the result is the same. For one thread.

    Attributes:
        speed: of computing; learns from decode steps that run alone.
        most: answers in a forward at most; 1 once each request is computed separately.
    """

    def __init__(
        self,
        decoder: Decoder,
        speed: ComputeSpeed,
        *,
        most: int,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`registry` takes the metrics."""
        self.speed = speed
        self.most = most
        self._decoder = decoder
        self._rows = Histogram(
            "cachecraft_decode_rows",
            "Answers that a decode step computed together",
            buckets=ROW_BOUNDS,
            registry=registry,
        )
        self._checked = False
        self._failures = 0

    @property
    def fixed_rows(self) -> float:
        """Number of rows that take as long as the fixed part of a forward; 0.0 if unknown or computing separately."""
        if self.most == 1 or not self.speed.known:
            return 0.0
        row_s = self.speed.seconds(1.0, passes=0.0)
        return self.speed.piece_s / row_s if row_s > 0.0 else 0.0

    def decode(self, steps: Sequence[DecodeStep]) -> list[Tensor | Exception]:
        """Return the logits `[vocabulary]` (float32) after each of at most `most` steps, or the step's exception.

        They are in order. A step that runs alone, also after a joint forward has failed, is timed for `speed`.
        """
        if len(steps) > 1:
            logits = self._jointly(lambda: self._decode_jointly(steps))
            if logits is not None:
                return list(logits)
        return [_tried(lambda step=step: self._decode_alone(step)) for step in steps]  # type: ignore[misc]

    def advance(self, passes: Sequence[RowPass]) -> list[Exception | None]:
        """Run the next layer of passes, which must be before the same layer; changes the passes and their buffers.

        Returns None for each pass in order, or in its place the exception of that pass, which stays before this layer.
        """
        if (
            len(passes) > 1
            and self._jointly(lambda: advance(self._decoder, passes) or ()) is not None
        ):
            return [None] * len(passes)
        return [
            _tried(lambda row_pass=row_pass: advance(self._decoder, [row_pass]))  # type: ignore[misc]
            for row_pass in passes
        ]

    def _jointly(self, forward: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor] | None:
        """Run a joint forward, if the model allows it; returns None if it does not, or if the forward failed."""
        if not self._checked:
            self._check()
        if self.most == 1:
            return None
        try:
            result = forward()
        except Exception as error:  # noqa: BLE001  # if one request causes it, its own forward raises it
            self._failures += 1
            logger.warning("A joint forward failed: %s", error)
            if self._failures == _MAX_FAILURES:
                self._compute_separately(f"{_MAX_FAILURES} joint forwards in a row failed")
            return None
        self._failures = 0
        return result

    def _decode_jointly(self, steps: Sequence[DecodeStep]) -> Sequence[Tensor]:
        logits = self._decoder.logits(extend_all(self._decoder, steps))
        self._rows.observe(len(steps))
        return list(logits)

    def _decode_alone(self, step: DecodeStep) -> Tensor:
        started = time.perf_counter()
        logits = self._decoder.next_logits(extend_all(self._decoder, [step]))
        self.speed.stepped(time.perf_counter() - started)
        self._rows.observe(1)
        return logits

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare a few short prompts, computed as one forward, with the same computed one after the other."""
        self._checked = True
        generator = torch.Generator().manual_seed(0)
        vocabulary = int(self._decoder.model.config.vocab_size)
        prompts = [
            torch.randint(0, vocabulary, (rows,), generator=generator) for rows in _CHECKED_ROWS
        ]
        try:
            separate = torch.stack([self._last_logits([ids])[0] for ids in prompts])
            difference = self._last_logits(prompts) - separate
        except Exception as failure:  # noqa: BLE001  # such as torch without memory; requests raise their own
            self._compute_separately(f"comparing joint with single forwards failed: {failure}")
            return
        error = float((difference.norm(dim=-1) / separate.norm(dim=-1)).max())
        if not error <= TOLERANCE[self._decoder.dtype]:  # NaN too is an error
            self._compute_separately(f"the logits of {self._decoder.name} differ by {error:.1%}")

    def _last_logits(self, prompts: Sequence[Tensor]) -> Tensor:
        decoder = self._decoder
        passes = []
        for ids in prompts:
            buffer = KVBuffer(decoder, len(ids))
            passes.append(RowPass(decoder, buffer, ids.to(decoder.device), np.arange(len(ids))))
        for _ in range(decoder.layout.layers):
            advance(decoder, passes)
        # [streams, prompts, hidden]
        hidden = torch.cat([row_pass.hidden[:, -1:] for row_pass in passes], dim=1)
        return decoder.logits(hidden)

    def _compute_separately(self, reason: str) -> None:
        self.most = 1
        logger.warning("Each request is computed separately from now on: %s", reason)


def _tried(function: Callable[[], Tensor | None]) -> Tensor | Exception | None:
    try:
        return function()
    except Exception as error:  # noqa: BLE001  # it is raised in the request's own steps
        return error
