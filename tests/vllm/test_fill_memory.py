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


def vllm_config(*, longest: int, ranks: int = 1, started_here: bool = True) -> Any:
    extra = {"settings": settings_of()} if started_here else {}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(max_model_len=longest, hf_text_config=CONFIG),
        kv_transfer_config=SimpleNamespace(kv_connector=CONNECTOR, kv_connector_extra_config=extra),
    )


def memory_of(*, longest: int, ranks: int = 1, gpu_bytes: int = 80 * GB) -> FillMemory:
    return FillMemory.of(
        vllm_config(longest=longest, ranks=ranks), settings_of(), gpu_bytes=gpu_bytes
    )


def test_sizes_are_those_of_the_model() -> None:
    memory = memory_of(longest=8192)
    assert memory.buffer_token == 36 * 2 * 8 * 128 * 2
    assert memory.captured_token == memory.buffer_token, "no queries"
    assert memory.pass_row == 2 * (6 * 4096 + 3 * 12288)


def test_all_of_the_memory_can_be_used_by_as_many_prompts_as_are_filled_at_once() -> None:
    memory = memory_of(longest=2048, gpu_bytes=800 * GB)
    assert memory.longest() == 2048, "vLLM takes no longer prompt"
    room = memory.room()
    assert room is not None
    prompt = 2048 * (memory.buffer_token + memory.captured_token)
    assert room == settings_of().fill_at_once * prompt


def test_a_rank_holds_its_own_heads_and_all_heads_of_its_captures() -> None:
    memory = memory_of(longest=8192, ranks=4)
    whole = 36 * 2 * 8 * 128 * 2
    assert memory.buffer_token == whole // 4
    assert memory.captured_token == whole // 4 + whole
    assert memory.pass_row == 2 * 6 * 4096 + 2 * 3 * 12288 // 4


@pytest.mark.parametrize(
    ("longest", "reserved"),
    [
        (1024, 8 * 1024 * 2 * 147456 + 1024 * 122880),  # eight of the longest prompts
        (8192, 8 * GB),  # a tenth of the GPU
        (32768, 32768 * (2 * 147456 + 122880)),  # one of the longest prompts
        (131072, 20 * GB),  # a quarter of the GPU
    ],
)
def test_the_longest_prompts_decide_how_much_is_reserved(longest: int, reserved: int) -> None:
    memory = memory_of(longest=longest)
    assert memory.total == reserved
    fits = memory.longest()
    assert fits is not None
    assert (fits >= longest) == (longest < 131072)
    room = memory.room()
    assert room is not None
    assert room >= fits * (memory.buffer_token + memory.captured_token)


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


def test_without_a_gpu_everything_fits() -> None:
    budget = FillBudget(fill_memory.UNLIMITED)
    budget.take("first", FillSize(10**9, {}))
    assert budget.fits(FillSize(10**9, {}), ())
    assert budget.refusal(FillSize(10**9, {})) is None
