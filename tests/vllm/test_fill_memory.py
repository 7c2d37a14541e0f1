"""Memory of fillings on a GPU: reserved before vLLM sizes its KV cache, and admitted by bytes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.late_device import DeviceTensor, installed
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.vllm.plugin import CONNECTOR, SEAL_KEY
from cachecraft_rag.vllm.served_model import ModelIdentity
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker import fill_memory
from cachecraft_rag.vllm.worker.fill_memory import FillBudget, FillMemory, FillSize, reserve

GB = 10**9
# the shape of Qwen3-8B
LAYOUT = KVLayout(layers=36, kv_heads=8, head_dim=128, dtype="bfloat16")
CONFIG = SimpleNamespace(hidden_size=4096, num_attention_heads=32, intermediate_size=12288)


def settings_of(layout: KVLayout = LAYOUT) -> ConnectorSettings:
    return ConnectorSettings("unused", ModelIdentity("model", layout, 40960), key="key")


def vllm_config(
    *, longest: int, ranks: int = 1, rows: int = 8192, started_here: bool = True
) -> Any:
    extra = {"settings": settings_of()} if started_here else {}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(max_model_len=longest, hf_text_config=CONFIG),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=rows),
        kv_transfer_config=SimpleNamespace(kv_connector=CONNECTOR, kv_connector_extra_config=extra),
    )


def memory_of(*, longest: int, ranks: int = 1, gpu_bytes: int = 80 * GB) -> FillMemory:
    return FillMemory.of(
        vllm_config(longest=longest, ranks=ranks), settings_of(), gpu_bytes=gpu_bytes
    )


TOKEN = 36 * 2 * 8 * 128 * 2  # bytes of keys and values
COPIED = TOKEN * 4 // 36  # in the copies of four layers on their way into the buffer
ROW = 2 * (6 * 4096 + 3 * 12288)


def test_sizes_are_those_of_the_model() -> None:
    memory = memory_of(longest=8192)
    assert memory.buffer_token == TOKEN + COPIED
    assert memory.captured_token == TOKEN, "no queries"
    assert memory.pass_row == ROW


def test_all_of_the_memory_can_be_used_by_two_of_the_longest_prompts() -> None:
    memory = memory_of(longest=2048, gpu_bytes=800 * GB)
    assert memory.longest() == 2048, "vLLM takes no longer prompt"
    room = memory.room()
    assert room is not None
    assert room == 2 * 2048 * memory.buffer_token + 2048 * memory.captured_token


def test_a_rank_holds_its_own_heads_and_all_heads_of_its_captures() -> None:
    memory = memory_of(longest=8192, ranks=4)
    assert memory.buffer_token == (TOKEN + COPIED) // 4
    assert memory.captured_token == TOKEN // 4 + TOKEN
    assert memory.pass_row == 2 * 6 * 4096 + 2 * 3 * 12288 // 4


def reserved_by_whole_prompts(longest: int, *, gpu_bytes: int = 80 * GB) -> tuple[int, int]:
    """What was reserved while rows and captures of whole prompts were kept, of eight at once: bytes, longest prompt."""
    single = longest * (2 * TOKEN + ROW)
    several = 8 * longest * 2 * TOKEN + longest * ROW
    total = min(several, int(max(0.1 * gpu_bytes, min(single, 0.25 * gpu_bytes))))
    return total, min(longest, total // (2 * TOKEN + ROW))


PASSES = 8192 * (TOKEN + ROW)  # one pass and its captures


@pytest.mark.parametrize(
    ("longest", "reserved", "filled"),
    [
        (8192, 2 * 8192 * (TOKEN + COPIED) + PASSES, 8192),  # two prompts: 4.9 GB
        (32768, 8 * GB, 32768),  # a tenth of the GPU
        (131072, 20 * GB, (20 * GB - PASSES) // (TOKEN + COPIED)),  # a quarter: 108 553 tokens
    ],
)
def test_less_is_reserved_than_for_whole_prompts_and_longer_prompts_are_filled(
    longest: int, reserved: int, filled: int
) -> None:
    memory = memory_of(longest=longest)
    assert (memory.total, memory.longest()) == (reserved, filled)
    before, filled_before = reserved_by_whole_prompts(longest)
    assert reserved <= before
    assert filled >= filled_before
    assert (reserved, filled) != (before, filled_before)
    room = memory.room()
    assert room is not None
    assert room >= filled * memory.buffer_token + 8192 * memory.captured_token


def test_short_prompts_reserve_what_two_of_them_need() -> None:
    memory = memory_of(longest=1024)
    assert memory.total == 1024 * (2 * (TOKEN + COPIED) + TOKEN + ROW)
    assert memory.pass_rows == 1024


def test_a_pass_has_no_more_rows_than_those_of_vllm() -> None:
    config = vllm_config(longest=8192, rows=2048)
    memory = FillMemory.of(config, settings_of(), gpu_bytes=80 * GB)
    assert memory.pass_rows == 2048
    assert memory.total == 2 * 8192 * (TOKEN + COPIED) + 2048 * (TOKEN + ROW)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A simulated GPU that vLLM would report as one of 4 MB."""

    def of_gpu(config: Any, settings: ConnectorSettings) -> FillMemory:
        return FillMemory.of(config, settings, gpu_bytes=4 << 20)

    monkeypatch.setattr(fill_memory, "fill_memory", of_gpu)
    with installed():
        yield torch.device("cuda:1")


def test_memory_is_allocated_with_the_model_and_held(gpu: torch.device) -> None:
    (reserved,) = reserve(vllm_config(longest=8192), gpu)
    assert isinstance(reserved, DeviceTensor)
    assert reserved.device == gpu
    assert reserved.nbytes == (4 << 20) // 4


def test_nothing_is_reserved_without_a_gpu_or_in_a_server_of_somebody_else(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM sets it once it has loaded the plugin, as servers of other tests in this process do
    monkeypatch.delenv(SEAL_KEY, raising=False)
    assert reserve(vllm_config(longest=8192), torch.device("cpu")) == []
    assert reserve(vllm_config(longest=8192, started_here=False), gpu) == []


def test_a_gpu_without_room_is_reported_with_advice(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_size: Any, **_how: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        reserve(vllm_config(longest=8192), gpu)


def test_a_filling_begins_when_those_before_it_have_given_their_memory_back() -> None:
    memory = FillMemory(buffer_token=10, captured_token=10, pass_row=5, total=2500)
    assert (memory.longest(), memory.room()) == (100, 2000)
    budget = FillBudget(memory)
    first = FillSize(80, {"a": 40})  # 800 + 400 bytes
    second = FillSize(90, {})
    assert budget.fits(first, ())
    budget.take("first", first)
    assert not budget.fits(second, ())
    assert budget.fits(FillSize(80, {}), ())
    # it is filled, and its capture is on its way to the store
    budget.give_back("first")
    budget.stored({"a"})
    assert budget.fits(second, {"a"})
    assert not budget.fits(FillSize(90, {"b": 80}), {"a"})
    budget.stored(())
    assert budget.fits(FillSize(90, {"b": 80}), ())


def test_a_prompt_that_never_fits_is_refused_with_advice() -> None:
    budget = FillBudget(FillMemory(buffer_token=10, captured_token=10, pass_row=5, total=2500))
    assert budget.refusal(FillSize(100, {})) is None
    refused = budget.refusal(FillSize(101, {}))
    assert refused is not None
    assert "101 tokens" in refused
    assert "--max-model-len" in refused


def test_captures_of_earlier_passes_leave_the_gpu_and_are_not_counted() -> None:
    # 100 · 10 for the buffer, and 20 · (10 + 5) for a pass
    memory = FillMemory(10, 10, 5, total=1300, pass_rows=20)
    assert (memory.longest(), memory.room()) == (100, 1200)
    budget = FillBudget(memory)
    chunks = {f"c{number}": 10 for number in range(8)}
    size = FillSize(100, chunks)
    assert budget.refusal(size) is None
    budget.take("first", size)
    budget.give_back("first")
    budget.stored(chunks)
    assert budget.fits(FillSize(100, {}), chunks), "two chunks are still on the GPU"
    assert not budget.fits(FillSize(100, {"d": 10}), chunks)
    budget.stored(())
    assert budget.fits(FillSize(100, {"d": 10}), ())


def test_a_chunk_that_is_longer_than_a_pass_needs_the_memory_of_its_rows() -> None:
    budget = FillBudget(FillMemory(10, 10, 5, total=1300, pass_rows=20))
    assert budget.refusal(FillSize(70, {"long": 40})) is None  # 700 + 40 · 15
    refused = budget.refusal(FillSize(71, {"long": 40}))
    assert refused is not None
    assert "40 tokens" in refused
    assert "shorter chunks" in refused


def test_without_a_gpu_everything_fits() -> None:
    budget = FillBudget(fill_memory.UNLIMITED)
    budget.take("first", FillSize(10**9, {}))
    assert budget.fits(FillSize(10**9, {}), ())
    assert budget.refusal(FillSize(10**9, {})) is None
