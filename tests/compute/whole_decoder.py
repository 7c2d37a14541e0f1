"""A model's own forward for tests, on Hugging Face's layers."""

from __future__ import annotations

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings, LayerPass, RotaryTables, WholePass
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.model.decoder import Decoder


class WholeDecoder:
    """A Hugging Face decoder as a `WholeModel`: queries and keys reach the pass rotated, and layers cannot be paused.

    Args:
        positions_off: added to all positions, as by a forward that is wrong.
        raw_values_off: added to the values of a pass with raw keys.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        most_rows: int = 10_000,
        positions_off: int = 0,
        raw_values_off: float = 0.0,
        error: str = "",
    ) -> None:
        self.decoder = decoder
        self.most_rows = most_rows
        self.positions_off = positions_off
        self.raw_values_off = raw_values_off
        self.error = error
        self.gives_raw = False
        self.runs: list[tuple[int, int]] = []  # rows and layers of each call

    def run(self, ids: Tensor, positions: Tensor, whole_pass: WholePass, layers: int) -> None:
        self.runs.append((len(ids), layers))
        if self.error:
            raise RuntimeError(self.error)
        rotary = RotaryTables.of(self.decoder, positions + self.positions_off)

        class Rotated:
            def attend(
                self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
            ) -> Tensor:
                cos, sin = rotary.of_layer(layer)
                queries = rotate(q, cos, sin)
                whole_pass.write_rotated(layer, queries, rotate(k, cos, sin), v, settings)
                if layer == layers - 1:
                    return torch.zeros_like(q)
                return whole_pass.attend_rotated(layer, queries, settings)

        self._run(ids, positions, Rotated(), layers)

    def run_raw(self, ids: Tensor, layer_pass: LayerPass, layers: int) -> None:
        self.runs.append((len(ids), layers))
        off = self.raw_values_off

        class Raw:  # not the pass itself, of which layers would write the rows
            def attend(
                self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
            ) -> Tensor:
                return layer_pass.attend(layer, q, k, v + off, settings)

        self._run(ids, torch.zeros_like(ids), Raw(), layers)

    def _run(self, ids: Tensor, positions: Tensor, layer_pass: LayerPass, layers: int) -> None:
        hidden = self.decoder.embed(ids)
        for layer in range(layers):
            hidden = self.decoder.layer(layer, hidden, positions=positions, layer_pass=layer_pass)
