"""The buffer of one request: room for the answer, and chunk-caches at their places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stack import Alone, Ranks
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.kv_layout import KVLayout

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 10, 40, 60, 75]
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.fixture
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama")


@pytest.fixture
def chunk(decoder: Decoder) -> Tensor:
    """The first chunk as it is in the full prompt, `[layers, 2, 30, kv_heads, head_dim]`."""
    output = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75)), captures=[1]))
    return output.recorder.captures[0].kv


def test_room_is_made_for_the_answer_and_at_least_for_the_prompt(decoder: Decoder) -> None:
    everything = Rows.of(BOUNDS, new=range(75))
    assert prefill(decoder, PrefillJob(IDS, everything, capacity=90)).buffer.kv.shape[2] == 90
    assert prefill(decoder, PrefillJob(IDS, everything)).buffer.kv.shape[2] == 75


def test_a_chunk_goes_to_its_place_rotated(decoder: Decoder, chunk: Tensor) -> None:
    buffer = KVBuffer(decoder, 75)
    buffer.kv.zero_()
    buffer.place(1, chunk[1], 10)
    assert not buffer.kv[1, :, :10].any()
    assert not buffer.kv[1, :, 40:].any()
    assert torch.equal(buffer.kv[1, 1, 10:40], chunk[1, 1])
    assert not buffer.kv[0].any()


class SecondOfTwo(Alone):
    """The second of two ranks, which has the second half of the heads."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def own_heads(self, kv: Tensor) -> Tensor:
        self.asked.append(tuple(kv.shape))
        return kv[:, :, kv.shape[2] // 2 :]


def test_a_rank_takes_its_own_heads_of_a_chunk(
    decoder: Decoder, chunk: Tensor, on_ranks: Callable[[Decoder, Ranks], Decoder]
) -> None:
    ranks, layout = SecondOfTwo(), decoder.layout
    stack = on_ranks(decoder, ranks)
    stack.layout = KVLayout(layout.layers, layout.kv_heads // 2, layout.head_dim, layout.dtype)
    own, all_heads = KVBuffer(stack, 75), KVBuffer(decoder, 75)
    for buffer in (own, all_heads):
        buffer.place(3, chunk[3], 10)
    assert ranks.asked == [(2, 30, layout.kv_heads, layout.head_dim)]
    assert torch.equal(own.kv[3, :, 10:40], all_heads.kv[3, :, 10:40, layout.kv_heads // 2 :])


@pytest.mark.parametrize("has_all_heads", [True, False])
def test_a_rank_cuts_its_heads_out_of_every_chunk_that_has_those_of_all_ranks(
    has_all_heads: bool,
    decoder: Decoder,
    chunk: Tensor,
    on_ranks: Callable[[Decoder, Ranks], Decoder],
) -> None:
    ranks = SecondOfTwo()
    stored = torch.cat((torch.zeros_like(chunk), chunk), dim=3) if has_all_heads else chunk
    rows = Rows.of(BOUNDS, new=[*range(10), *range(40, 75)])
    job = PrefillJob(IDS, rows, resident=[ResidentKV(10, stored)])
    buffer = prefill(on_ranks(decoder, ranks), job).buffer
    assert len(ranks.asked) == has_all_heads * decoder.layout.layers
    alone = prefill(decoder, PrefillJob(IDS, rows, resident=[ResidentKV(10, chunk)]))
    assert torch.equal(buffer.kv, alone.buffer.kv)
