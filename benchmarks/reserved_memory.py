"""Concurrency that a vLLM server loses to the GPU memory reserved for fillings, counted without a GPU.

The bytes are those of `cachecraft_rag.vllm.worker.fill_memory`. vLLM's KV cache has its share of the GPU without the
weights and these; activations and CUDA graphs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from rich.table import Table

from benchmarks.gpu import LLAMA_8B
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.vllm.served_model import ModelIdentity
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker.fill_memory import FillMemory

GB = 10**9
GPU_BYTES = 80 * GB
UTILIZATION = 0.9  # vLLM's default for --gpu-memory-utilization
BATCHED_TOKENS = 8192  # vLLM's default for --max-num-batched-tokens in a server on an H100
CONTEXTS = (8192, 32768, 131072)
_WIDTH = 2  # bytes of a number in bfloat16

QWEN3_8B = LLAMA_8B | {
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
# name → shape and ranks
SERVERS: Mapping[str, tuple[Mapping[str, int], int]] = {
    "Llama-3-8B, 1 GPU": (LLAMA_8B, 1),
    "Qwen3-8B, 1 GPU": (QWEN3_8B, 1),
    "Llama-3-70B, 4 GPUs": (LLAMA_70B, 4),
}


@dataclass(frozen=True, slots=True)
class Reserved:
    """Memory of each GPU of a server, in bytes.

    context   vLLM's `max_model_len`
    free      memory that vLLM's KV cache would have without this package
    reserved  memory that is reserved for fillings
    longest   tokens of the longest prompt that can be filled; None = no limit
    token     keys and values of a token in vLLM's KV cache
    """

    server: str
    context: int
    free: int
    reserved: int
    longest: int | None
    token: int

    @property
    def lost_share(self) -> float:
        """Share of vLLM's KV cache, and so of the requests that fit at the same time."""
        return self.reserved / self.free

    @property
    def at_once(self) -> tuple[float, float]:
        """Requests of `context` tokens that fit at the same time, without this package and with it."""
        request = self.context * self.token
        return self.free / request, (self.free - self.reserved) / request


def reserved(server: str, context: int) -> Reserved:
    """Return the memory of a server in `SERVERS`.

    >>> row = reserved("Llama-3-8B, 1 GPU", 131072)
    >>> row.token, row.longest is None or row.longest <= 131072
    (131072, True)
    """
    shape, ranks = SERVERS[server]
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    layout = KVLayout(
        layers=shape["num_hidden_layers"],
        kv_heads=shape["num_key_value_heads"],
        head_dim=head_dim,
        dtype="bfloat16",
    )
    settings = ConnectorSettings("", ModelIdentity(server, layout, context))
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=BATCHED_TOKENS),
        model_config=SimpleNamespace(
            max_model_len=context, hf_text_config=SimpleNamespace(**shape)
        ),
    )
    memory = FillMemory.of(config, settings, gpu_bytes=GPU_BYTES)
    return Reserved(
        server=server,
        context=context,
        free=int(UTILIZATION * GPU_BYTES) - _weights(shape, head_dim) * _WIDTH // ranks,
        reserved=memory.total or 0,
        longest=memory.longest(),
        token=layout.nbytes(1) // ranks,
    )


def rows() -> Iterator[Reserved]:
    """Yield every server with every context."""
    for server in SERVERS:
        for context in CONTEXTS:
            yield reserved(server, context)


def as_plain() -> list[dict[str, Any]]:
    """Return all rows for JSON."""
    return [asdict(row) | {"lost_share": row.lost_share, "at_once": row.at_once} for row in rows()]


def cells(row: Reserved) -> list[str]:
    """Return a row as in the table: `COLUMNS`."""
    without, with_it = row.at_once
    return [
        row.server,
        f"{row.context:,}",
        f"{row.reserved / GB:.1f} GB",
        f"{row.lost_share:.2f}",
        f"{without:.1f} → {with_it:.1f}",
        "any" if row.longest is None else f"{row.longest:,}",
    ]


COLUMNS = (
    f"server, GPUs of {GPU_BYTES // GB} GB",
    "longest prompt",
    "reserved on each",
    "share of the KV cache",
    "longest prompts at once, without → with it",
    "longest prompt that is filled",
)


def print_table() -> None:
    """Print all rows."""
    table = Table(*COLUMNS)
    for row in rows():
        table.add_row(*cells(row))
    out.print(table)


def main(as_json: options.Json = False) -> None:
    """Memory that is reserved for filling prompts on GPUs, and the requests at once that it costs; needs no GPU."""
    if as_json:
        print_json(as_plain())
    else:
        print_table()


def _weights(shape: Mapping[str, int], head_dim: int) -> int:
    """Return the number of weights in projections and embeddings."""
    hidden = shape["hidden_size"]
    heads = shape["num_attention_heads"] + shape["num_key_value_heads"]
    attention = 2 * hidden * heads * head_dim
    feed_forward = 3 * hidden * shape["intermediate_size"]
    layers = shape["num_hidden_layers"] * (attention + feed_forward)
    return layers + 2 * shape["vocab_size"] * hidden
