"""The benchmark of audits compares the same requests and audits each answer once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import audits
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.progress import Progress


def test_each_answer_is_asked_twice_and_audited_once(
    tiny_decoder: Callable[..., Decoder], town_dataset: Dataset, tmp_path: Path
) -> None:
    shown: list[Progress] = []
    cost = audits.measure(
        tiny_decoder("Llama"),
        town_dataset,
        tmp_path / "caches",
        requests=25,
        pause_s=0.0,
        answer_tokens=3,
        progress=shown.append,
    )
    assert cost.requests == cost.audited == 25
    assert min(*cost.ttft_s, *cost.total_s) > 0
    assert cost.ttft_ratio[1] <= cost.ttft_ratio[0] <= cost.ttft_ratio[2]
    assert 0.0 < cost.computed_share < 1.5  # the whole prompt and the answer at most
    assert shown[-1] == replace(shown[-1], done=50, total=50)
