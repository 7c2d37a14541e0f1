"""The exactness gates: what every path of the engine must keep, on all model families and on the demo model.

Largest difference of a logit ≤ 1e-3 in fp32, and the same greedy tokens; bf16: test_gates_bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import EarlyTermination, PrefillJob, PrefillResult
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.layer_survey import in_order
from cachecraft_rag.planning import early_termination

pytestmark = pytest.mark.gate

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2"]
TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
VARIATIONS: list[tuple[str, dict[str, Any]]] = [
    ("Mistral", {"sliding_window": 24}),
    ("Phi3", {"sliding_window": 24}),
    (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    (
        "Gemma2",
        {"sliding_window": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    # Local and global rotary tables; layers without rotation; adjoining pairs; sinks.
    ("Gemma3Text", {"head_dim": 16, "sliding_window": 24, "layer_types": TWO_KINDS}),
    ("SmolLM3", {"no_rope_layer_interval": 2}),
    ("Cohere", {}),
    (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "sliding_window": 24, "layer_types": TWO_KINDS},
    ),
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
]
BOUNDS = [0, 20, 70, 150, 190, 210]  # system, three chunks of different lengths, question
EVERYTHING = range(BOUNDS[-1])
QUESTION = range(BOUNDS[-2], BOUNDS[-1])
CHUNKS = (1, 2, 3)


@pytest.fixture(params=[*[(family, {}) for family in FAMILIES], *VARIATIONS, ("demo", {})], ids=str)
def decoder(request: pytest.FixtureRequest, tiny_decoder: Callable[..., Decoder]) -> Decoder:
    """Each family, each variation, and the demo model; in fp32."""
    family, settings = request.param
    return (
        request.getfixturevalue("demo_decoder")
        if family == "demo"
        else tiny_decoder(family, **settings)
    )


@pytest.fixture(scope="session")
def demo_decoder(demo_model: Path) -> Decoder:
    """The demo model in fp32."""
    return Decoder.load(str(demo_model), dtype="float32")


def token_ids(seed: int = 0, length: int = BOUNDS[-1]) -> list[int]:
    """Random tokens of every model's vocabulary."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def captures_of(output: PrefillResult) -> list[ResidentKV]:
    """Chunk-caches captured in a pass, at the positions of their capture."""
    return [ResidentKV(capture.start, capture.kv) for capture in output.recorder.captures]


def greedy(decoder: Decoder, output: PrefillResult, position: int, count: int = 8) -> list[int]:
    """The next tokens, decoded in the request's own buffer."""
    tokens = [int(decoder.next_logits(output.hidden).argmax())]
    while len(tokens) < count:
        hidden = extend(decoder, output.buffer, tokens[-1:], position)
        tokens.append(int(decoder.next_logits(hidden).argmax()))
        position += 1
    return tokens


def own_greedy(decoder: Decoder, ids: list[int], count: int = 8) -> list[int]:
    """The next tokens by the unmodified model, prefilled again for each."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(decoder.own_logits([*ids, *tokens])[0].argmax()))
    return tokens


def assert_same(found: Tensor, expected: Tensor) -> None:
    """The gate in fp32."""
    assert (found - expected).abs().max() <= 1e-3
    assert int(found.argmax()) == int(expected.argmax())


def test_g1_recomputing_everything_is_the_models_own_forward(decoder: Decoder) -> None:
    ids = token_ids()
    work = PrefillJob(
        ids, Rows.of(BOUNDS, new=EVERYTHING), captures=CHUNKS, capacity=BOUNDS[-1] + 8
    )
    output = prefill(decoder, work)
    assert_same(decoder.next_logits(output.hidden), decoder.own_logits(ids)[0])
    assert greedy(decoder, output, len(ids)) == own_greedy(decoder, ids)


def test_g2_reuse_after_the_same_prefix_is_the_models_own_forward(decoder: Decoder) -> None:
    ids = token_ids()
    captured = prefill(
        decoder,
        PrefillJob(ids[:-20], Rows.of(BOUNDS[:-1], new=range(BOUNDS[-2])), captures=(0, *CHUNKS)),
    )
    work = PrefillJob(
        ids, Rows.of(BOUNDS, new=QUESTION), resident=captures_of(captured), capacity=BOUNDS[-1] + 8
    )
    output = prefill(decoder, work)
    assert output.row_layers == len(QUESTION) * decoder.layout.layers
    assert_same(decoder.next_logits(output.hidden), decoder.own_logits(ids)[0])
    assert greedy(decoder, output, len(ids)) == own_greedy(decoder, ids)


def test_g3_a_moved_key_is_the_key_computed_there(decoder: Decoder) -> None:
    chunk = token_ids(seed=1, length=40)
    near = prefill(decoder, PrefillJob(chunk, Rows.of([0, 40], new=range(40)), captures=[0]))
    ids = [*token_ids(seed=2, length=60), *chunk, *token_ids(seed=3, length=10)]
    moved = prefill(
        decoder,
        PrefillJob(
            ids,
            Rows.of([0, 60, 100, 110], new=[*range(60), *range(100, 110)]),
            resident=[ResidentKV(60, captures_of(near)[0].kv)],
        ),
    )
    with decoder.stock() as model, torch.inference_mode():
        cache = model(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
    # [keys, kv_heads, head_dim]; layer 0 knows no neighbours
    own = cache.layers[0].keys[0].transpose(0, 1)
    own = in_order(own, decoder.survey.kinds[decoder.rotary_kinds[0]].form.order)
    seen = own.shape[0]  # a sliding-window layer keeps only its last keys
    assert (moved.buffer.kv[0, 0, 110 - seen : 110] - own)[-50:-10].abs().max() <= 1e-4


@pytest.mark.parametrize(
    "meeting",
    [20, 33, 190, *(pytest.param(rare, marks=pytest.mark.slow) for rare in (0, 1, 70, 149, 189))],
)
def test_g4_any_meeting_point_of_computed_front_and_loaded_tail_is_full_prefill(
    decoder: Decoder, meeting: int
) -> None:
    ids = token_ids()
    captured = captures_of(
        prefill(
            decoder,
            PrefillJob(
                ids[:-20], Rows.of(BOUNDS[:-1], new=range(BOUNDS[-2])), captures=(0, *CHUNKS)
            ),
        )
    )
    tail = [
        ResidentKV(max(one.start, meeting), one.kv[:, :, max(0, meeting - one.start) :])
        for one in captured
        if one.start + one.kv.shape[2] > meeting
    ]
    output = prefill(
        decoder, PrefillJob(ids, Rows.of(BOUNDS, new=[*range(meeting), *QUESTION]), resident=tail)
    )
    assert_same(decoder.next_logits(output.hidden), decoder.own_logits(ids)[0])


def test_g5_all_chunks_focused_is_no_early_termination(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = prefill(decoder, moved_chunks(decoder, share=0.3))
    job = replace(moved_chunks(decoder, share=0.3), early_termination=EarlyTermination(1))
    monkeypatch.setattr(early_termination, "focused_count", len)
    focused = prefill(decoder, job)
    assert focused.focus_layer == 0
    assert focused.row_layers == plain.row_layers
    assert torch.equal(focused.hidden, plain.hidden)


def test_early_termination_computes_fewer_rows_and_keeps_the_questions(decoder: Decoder) -> None:
    job = replace(moved_chunks(decoder, share=0.3), early_termination=EarlyTermination(1))
    output = prefill(decoder, job)
    layers, rows = decoder.layout.layers, len(job.rows.open())
    assert output.focus_layer is not None
    dropped, rest = divmod(rows * layers - output.row_layers, layers - output.focus_layer - 1)
    assert rest == 0
    sizes = [len(job.rows.offsets(chunk, RowReason.RECOMPUTED)) for chunk in CHUNKS]
    assert dropped in {
        sum(sizes) - focused for n in (1, 2) for focused in map(sum, combinations(sizes, n))
    }
    assert output.hidden.shape[1] == rows - dropped
    assert torch.isfinite(output.hidden).all()


def test_g6_chunks_born_alone_are_a_forward_with_a_block_diagonal_mask(decoder: Decoder) -> None:
    ids = token_ids()
    alone = []
    for start, stop in pairwise(BOUNDS[:-1]):
        captured = prefill(
            decoder,
            PrefillJob(
                ids[start:stop], Rows.of([0, stop - start], new=range(stop - start)), captures=[0]
            ),
        )
        alone.append(ResidentKV(start, captures_of(captured)[0].kv))
    output = prefill(decoder, PrefillJob(ids, Rows.of(BOUNDS, new=QUESTION), resident=alone))
    assert_same(decoder.next_logits(output.hidden), block_diagonal_logits(decoder, ids))


def block_diagonal_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """The model's own forward where every segment but the question sees itself only."""
    place = torch.arange(len(ids))
    own = torch.bucketize(place, torch.tensor(BOUNDS[1:]), right=True)
    visible = (own[:, None] == own[None, :]) | (own[:, None] == len(BOUNDS) - 2)
    visible &= place[:, None] >= place[None, :]
    window = getattr(decoder.model.config, "sliding_window", None) or len(ids)
    in_window = visible & (place[:, None] - place[None, :] < window)
    mixed = "sliding_attention" in (getattr(decoder.model.config, "layer_types", None) or [])
    masks = {"full_attention": visible if mixed else in_window, "sliding_attention": in_window}
    given = {
        kind: torch.zeros(mask.shape).masked_fill(~mask, -1e30)[None, None]
        for kind, mask in masks.items()
    }
    with decoder.stock() as model, torch.inference_mode():
        mask = given if mixed else given["full_attention"]
        logits: Tensor = model(input_ids=torch.tensor([ids]), attention_mask=mask).logits
        return logits[0, -1]


def moved_chunks(decoder: Decoder, *, share: float) -> PrefillJob:
    """All chunks captured in another order, some of their tokens recomputed."""
    ids = token_ids()
    pieces = [ids[BOUNDS[i] : BOUNDS[i + 1]] for i in (0, 3, 1, 2)]
    edges = [sum(map(len, pieces[:i])) for i in range(5)]
    elsewhere = [token for piece in pieces for token in piece]
    job = PrefillJob(elsewhere, Rows.of(edges, new=range(edges[-1])), captures=(0, 1, 2, 3))
    captured = captures_of(prefill(decoder, job))
    moved = [ResidentKV(BOUNDS[to], captured[i].kv) for to, i in ((1, 2), (2, 3), (3, 1))]
    recomputed = [
        p
        for i in CHUNKS
        for p in range(BOUNDS[i], BOUNDS[i] + int(share * (BOUNDS[i + 1] - BOUNDS[i])))
    ]
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=recomputed)
    return PrefillJob(ids, rows, resident=[ResidentKV(0, captured[0].kv), *moved])


def test_recomputing_every_token_of_moved_chunks_repairs_them(decoder: Decoder) -> None:
    work = moved_chunks(decoder, share=1.0)
    output = prefill(decoder, work)
    assert_same(decoder.next_logits(output.hidden), decoder.own_logits(work.token_ids)[0])
