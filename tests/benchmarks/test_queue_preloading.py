"""The benchmark of preloading answers the same bursts with both kinds of loading, within the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import queue_preloading
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.progress import Progress


def test_each_burst_is_answered_with_both_kinds_of_loading(
    tiny_decoder: Callable[..., Decoder], town_dataset: Dataset, tmp_path: Path
) -> None:
    shown: list[Progress] = []
    gain = queue_preloading.measure(
        tiny_decoder("Llama"),
        town_dataset,
        tmp_path / "caches",
        mb_per_s=1.0,
        bursts=3,
        requests=4,
        passages=2,
        computed=1,
        ahead=3,
        progress=shown.append,
    )
    assert gain.bursts == 3
    assert min(gain.median_ttft_s) > 0
    assert gain.ttft_ratio[1] <= gain.ttft_ratio[0] <= gain.ttft_ratio[2]
    assert 0 <= gain.most_bytes <= gain.preload_bytes
    assert [progress.done for progress in shown] == [1, 2, 3]
