"""A stack of decoder layers, wherever it runs: in this process on Hugging Face's layers, or in a server's worker.

Stack         one rank's decoder layers
RotaryTables  cos and sin of some positions, for each kind of layer
LayerPass     what a layer's attention calls: a pass of some rows
WholeModel    a model's own forward, which runs a pass through many layers in one call, see `WholePass`
Ranks         what tensor-parallel ranks have to agree on; `Alone` where there is one rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from cachecraft_rag.kernels.attention_paths import AttentionPaths
from cachecraft_rag.kernels.memory import Recycler
from cachecraft_rag.types.kv_layout import KVLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Attention settings of a layer.

    scale    factor on the scores
    window   sliding window in tokens; None = every earlier token is visible
    softcap  scores become softcap · tanh(scores / softcap); None = as they are
    sinks    `[heads]`, the score of a position without a value that each head may attend to; None = no sinks
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)


class LayerPass(Protocol):
    """A pass of some rows through the layers; each layer calls its `attend` once."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Attend in one layer, from the rows of the pass to everything before them.

        A prefill or decode step also writes the rows' rotated keys and their values to the request's buffer here. `q`
        `[rows, heads, head_dim]`, `k` and `v` `[rows, kv_heads, head_dim]` are not rotated. Returns `[rows, heads,
        head_dim]`, before the output projection. For a layer that failed before see `row_pass.RowPass.attend`.
        """


class WholePass(Protocol):
    """A pass of some rows in a `WholeModel`, whose layers rotate queries and keys themselves."""

    def write_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
    ) -> None:
        """Write the rows' keys and values of one layer.

        Args:
            layer: index of the layer; each layer is written once, in ascending order.
            q: rotated queries `[rows, heads, head_dim]`.
            k: rotated keys `[rows, kv_heads, head_dim]`.
            v: values of the same shape.
            settings: attention settings of the layer.
        """

    def attend_rotated(
        self, layer: int, q: Tensor, settings: AttentionSettings, out: Tensor | None = None
    ) -> Tensor:
        """Return the attention's output `[rows, heads, head_dim]`, before the layer's output projection.

        It is written to `out` if that is given, a tensor in the form of `q`.
        """


class WholeModel(Protocol):
    """A model's own forward, perhaps compiled.

    Its layers rotate keys before anyone sees them, and nothing can be done between two layers. So it runs no pass that
    waits for loads, or may drop or join rows on the way.

    Attributes:
        most_rows: most rows of a call.
        gives_raw: True if `run_raw` may be called, as passes with captures need.
    """

    most_rows: int
    gives_raw: bool

    def run(self, ids: Tensor, positions: Tensor, whole_pass: WholePass, layers: int) -> None:
        """Run rows through the first layers. The last of these writes keys and values, and attends to nothing.

        Args:
            ids: int64 `[rows]`, token ids, on the device.
            positions: int64 `[rows]`, positions of the rows in their prompts, on the device.
            whole_pass: the pass, or several joint passes, whose rows these are. What it raises is raised after the last
                layer.
            layers: number of layers, at most all.
        """

    def run_raw(self, ids: Tensor, layer_pass: LayerPass, layers: int) -> None:
        """Run rows through the first layers, each of which calls `attend` with raw queries and keys; see `run`."""


class Ranks(Protocol):
    """The tensor-parallel ranks that run one model, each with its share of the heads.

    Every rank makes the same calls in the same order. With several ranks, every method but `own_heads` waits for the
    same call of all ranks, and raises AnotherRankFailedError if another rank has given up this call, and
    RanksApartError if a rank does not make it in time (`vllm.worker.ranks`).
    """

    def own_heads(self, kv: Tensor) -> Tensor:
        """Return this rank's share of `kv` `[…, tokens, all kv_heads, head_dim]`, a view. Asks no other rank."""

    def mean(self, seen: Tensor) -> Tensor:
        """Return a statistic of this rank's heads, of any shape, averaged over the ranks. May return `seen` itself."""

    def agree(self, lost: frozenset[T]) -> frozenset[T]:
        """Return the union of the sets of all ranks, such as of what each could not load; the same on every rank."""

    def least(self, own: int) -> int:
        """Return the smallest number of all ranks, such as of the layers that each has loaded."""

    def lead(self, decision: T) -> T:
        """Return the first rank's decision on every rank, because decisions by time would differ from rank to rank."""


class Alone:
    """A single rank with all heads. Its methods exchange nothing and raise nothing."""

    def own_heads(self, kv: Tensor) -> Tensor:
        """Return `kv` itself, `[…, tokens, kv_heads, head_dim]`."""
        return kv

    def mean(self, seen: Tensor) -> Tensor:
        """Return `seen` itself, of any shape."""
        return seen

    def agree(self, lost: frozenset[T]) -> frozenset[T]:
        """Return `lost` itself."""
        return lost

    def least(self, own: int) -> int:
        """Return `own` itself."""
        return own

    def lead(self, decision: T) -> T:
        """Return `decision` itself."""
        return decision


class Stack(Protocol):
    """Decoder layers of a single rank.

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
        whole_model: runs passes through many layers in one call; None if layers run one after the other only.
    """

    layout: KVLayout
    device: torch.device
    dtype: torch.dtype
    keys_per_row: float
    attention_paths: AttentionPaths
    memory: Recycler
    whole_model: WholeModel | None

    @property
    def ranks(self) -> Ranks:
        """The ranks that run this model; `Alone` for a single one."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return the first layer's input `[streams, rows, hidden]` for token ids, int64 `[rows]` on the device."""

    @property
    def rotary_kinds(self) -> Sequence[int]:
        """For each layer, the number of its rotary table: layers with equal numbers rotate alike."""

    def rope(self, positions: Tensor, kind: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of one of `rotary_kinds`, `[rows, rotary_dim]`, at int64 `[rows]` on the stack's device.

        They are in the stack's dtype, on that device. The table of layers that do not rotate has a rotary_dim of 0.
        """

    def layer(
        self, index: int, hidden: Tensor, *, positions: Tensor, layer_pass: LayerPass
    ) -> Tensor:
        """Run one layer over `hidden` `[streams, rows, hidden]`, which may be overwritten, and return its output.

        The layer's attention calls `layer_pass.attend`, or writes and attends to the rows of a pass itself if all of
        them are `plain` (`row_pass.plain_rows`). `positions` are int64 `[rows]`.
        """


@dataclass(frozen=True)
class RotaryTables:
    """cos and sin of the rotary embedding at some positions, for each kind of layer.

    kinds   for each layer, the number of its table
    tables  cos and sin of each kind, each `[positions, rotary_dim]`
    """

    kinds: Sequence[int]
    tables: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, stack: Stack, positions: Tensor) -> RotaryTables:
        """Return the tables of a stack at these positions, int64 `[positions]` on its device."""
        kinds = stack.rotary_kinds
        return cls(kinds, [stack.rope(positions, kind) for kind in range(max(kinds) + 1)])

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of one layer, each `[positions, rotary_dim]`."""
        return self.tables[self.kinds[layer]]

    def rows(self, positions: Tensor) -> RotaryTables:
        """Return a copy of the tables' rows at these indices, int64 `[rows]`."""
        return RotaryTables(
            self.kinds, [(cos[positions], sin[positions]) for cos, sin in self.tables]
        )

    def layers(self, kind: int) -> list[int]:
        """Return the indices of the layers of one kind, ascending.

        >>> RotaryTables([0, 1, 0], []).layers(0)
        [0, 2]
        """
        return [layer for layer, own_kind in enumerate(self.kinds) if own_kind == kind]


def keys_per_row_of(config: PretrainedConfig) -> float:
    """Return the number of keys that cost as much to attend to as the rest of a row, estimated from a model's config.

    Of a mixture of experts, only the experts that one token uses count; of layers that differ, the last one.
    """
    # Gemma 4: its layers differ
    last_layer = [config, *(getattr(config, "per_layer_config", None) or ())][-1]
    heads = config.num_attention_heads
    kv_heads = getattr(last_layer, "num_key_value_heads", None) or heads
    head_dim = getattr(last_layer, "head_dim", None) or config.hidden_size // heads
    experts = getattr(config, "num_experts_per_tok", None) or 1
    inner = (getattr(config, "moe_intermediate_size", None) or config.intermediate_size) * experts
    products = config.hidden_size * (2 * (heads + kv_heads) * head_dim + 3 * inner)
    return float(products / (2 * heads * head_dim))
