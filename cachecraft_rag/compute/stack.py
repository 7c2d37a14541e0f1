"""A stack of decoder layers, wherever it runs: in this process on Hugging Face's layers, or in a server's worker.

Stack       one rank's decoder layers
LayerPass   what a layer's attention calls: a pass of some rows
Ranks       what tensor-parallel ranks have to agree on; `Alone` where there is one rank
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from cachecraft_rag.kernels.attention_paths import AttentionPaths
from cachecraft_rag.kernels.memory import Recycler
from cachecraft_rag.types import KVLayout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Settings of a layer: factor on the scores, sliding window in tokens, soft cap of the scores (None = none)."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class LayerPass(Protocol):
    """A pass of some rows through the layers; called back by each layer's attention."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> Tensor:
        """Attend in one layer.

        Args:
            q: raw queries (before rotary embedding) `[rows, heads, head_dim]`.
            k, v: raw keys and values of the same rows `[rows, kv_heads, head_dim]`.

        Returns:
            `[rows, heads, head_dim]`.
        """


class Ranks(Protocol):
    """The tensor-parallel ranks that run one model, each with its share of the heads.

    Every rank makes the same calls in the same order; each call is a collective where there are several ranks.
    """

    def own_heads(self, kv: Tensor) -> Tensor:
        """This rank's share of `[2, tokens, all kv_heads, head_dim]`; a view."""

    def mean(self, seen: Tensor) -> Tensor:
        """A statistic of this rank's heads, averaged over the ranks."""

    def agree(self, lost: frozenset[T]) -> frozenset[T]:
        """Union of the losses of all ranks."""

    def lead(self, decision: T) -> T:
        """The first rank's decision: what depends on clocks would differ from rank to rank."""


class Alone:
    """One rank with all heads; see `Ranks`."""

    def own_heads(self, kv: Tensor) -> Tensor:
        """All of them."""
        return kv

    def mean(self, seen: Tensor) -> Tensor:
        """`seen` itself."""
        return seen

    def agree(self, lost: frozenset[T]) -> frozenset[T]:
        """`lost` itself."""
        return lost

    def lead(self, decision: T) -> T:
        """`decision` itself."""
        return decision


class Stack(Protocol):
    """One rank's decoder layers.

    Hidden states are `[streams, rows, hidden]`: one stream on Hugging Face, two where a layer carries its residual
    beside its output. Rows are cut and joined along dimension 1.

    Attributes:
        layout: shape and dtype of a chunk-cache, with this rank's heads.
        device: of the layers.
        dtype: of hidden states, keys and values.
        keys_per_row: attending to this many keys costs as much as the rest of a row. From the config: weights may be
            packed.
        attention_paths: the fastest ways to attend on this CPU.
        memory: of the requests' keys and values.
    """

    layout: KVLayout
    device: torch.device
    dtype: torch.dtype
    keys_per_row: float
    attention_paths: AttentionPaths
    memory: Recycler

    @property
    def ranks(self) -> Ranks:
        """The ranks that run this model."""

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids `[rows]` to the first layer's input `[streams, rows, hidden]`."""

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the model's own rotary embedding at these positions, each `[tokens, rotary_dim]`."""

    def layer(self, index: int, hidden: Tensor, *, positions: Tensor, layer_pass: LayerPass) -> Tensor:
        """Run one layer over `[streams, rows, hidden]`; its attention calls `layer_pass.attend`."""


def keys_per_row_of(config: Any) -> float:
    """`Stack.keys_per_row` of a Hugging Face config; of a mixture of experts, those that one token passes through."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    experts = getattr(config, "num_experts_per_tok", None) or 1
    inner = (getattr(config, "moe_intermediate_size", None) or config.intermediate_size) * experts
    products = config.hidden_size * (2 * (heads + kv_heads) * head_dim + 3 * inner)
    return float(products / (2 * heads * head_dim))
