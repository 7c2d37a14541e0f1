"""Other engines next to `python -m benchmarks ttft`: their weights, what is refused, what the report says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.first_token import Shape, run
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder


class _Quick:
    """A peer of 2 s to the first token and 10 ms for each further one, which notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def answer(self, ids: Sequence[int], tokens: int) -> tuple[float, float]:
        self.asked.append(len(ids))
        return 2.0, 2.0 + 0.01 * (tokens - 1)


class _Absent:
    def __init__(self, decoder: Decoder) -> None:
        import nothing_of_this_name  # noqa: F401


def test_a_peer_prefills_the_same_prompt(demo_model: Path) -> None:
    quick = _Quick()
    (report,) = run(
        "demo", [Shape(2, 64)], dtype="float32", pairs=1, peers={"quick": lambda decoder: quick}
    )
    assert report.peers == {"quick": 2.0}
    assert report.peers_decode_ms["quick"] == pytest.approx(10)
    assert report.peers_to_64_tokens_s["quick"] == pytest.approx(2.63)
    assert set(quick.asked) == {report.prompt_tokens}


def test_a_peer_that_is_not_there_is_refused_with_what_to_do(
    tiny_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder("Llama")
    with pytest.raises(ConfigError, match="choose among openvino"):
        peers.maker_of("closedvino")
    monkeypatch.setitem(peers.PEERS, "absent", (_Absent, "pip install absent"))
    with pytest.raises(ConfigError, match=r"absent is not installed .*; run: pip install absent"):
        peers.maker_of("absent")(decoder)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_openvinos_graph_gives_the_models_own_logits(
    family: str, tiny_decoder: Callable[..., Decoder]
) -> None:
    openvino = pytest.importorskip("openvino")
    decoder, ids = tiny_decoder(family), list(range(5, 45))
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    request = (
        openvino.Core()
        .compile_model(peers._Graph(decoder).model(), "CPU", properties)
        .create_infer_request()
    )
    for first, last in ((0, 39), (39, 40)):  # a prompt, and a token after it
        found = request.infer(
            {
                "input_ids": np.array([ids[first:last]]),
                "attention_mask": np.ones((1, last), dtype=np.int64),
                "position_ids": np.arange(first, last)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        logits = next(iter(found.values()))[0, -1]
        assert np.abs(logits - decoder.own_logits(ids[:last])[0].numpy()).max() < 1e-3


def test_openvino_refuses_layers_that_it_does_not_take(
    tiny_decoder: Callable[..., Decoder],
) -> None:
    pytest.importorskip("openvino")
    with pytest.raises(ConfigError, match="not Gemma2DecoderLayer"):
        peers._Graph(tiny_decoder("Gemma2"))
