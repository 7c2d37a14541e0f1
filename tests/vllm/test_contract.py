"""Parts of vLLM's inside that are used, by name: a version that changes one of them fails here, not in an answer."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import pickle
import sys
from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from benchmarks.vllm_families import missing_torchvision
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store import StoreConfig
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.vllm.plugin import ARCHITECTURES, CONNECTOR, register
from cachecraft_rag.vllm.served_model import ModelIdentity
from cachecraft_rag.vllm.settings import ConnectorSettings


def source(name: str) -> str:
    return inspect.getsource(importlib.import_module(f"vllm.{name}"))


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_versions() -> None:
    import vllm

    assert vllm.__version__.startswith(("0.32.", "0.33."))


@pytest.fixture(autouse=True)
def _torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of multimodal models import it."""
    for name, module in missing_torchvision().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_models_have_the_parts_that_passes_use(name: str) -> None:
    """How their layers are called is found by a survey, see `worker.layers`; tests/vllm/test_families.py runs them."""
    model = stock_model(name)
    assert {"vllm_config", "prefix"} <= set(parameters(model.__init__))
    assert parameters(model.embed_input_ids)[:2] == ["self", "input_ids"]


def stock_model(architecture: str) -> Any:
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_layers_call_their_rotary_embedding_and_their_attention(name: str) -> None:
    text = source(f"model_executor.models.{ARCHITECTURES[name].partition(':')[0]}")
    assert "q, k = self.rotary_emb(positions, q, k)" in text
    assert "attn_output = self.attn(q, k, v)" in text


def test_our_models_are_the_registered_ones() -> None:
    from vllm import ModelRegistry

    register()
    register()
    for name in ARCHITECTURES:
        registered = ModelRegistry.models[name]
        assert registered.module_name == "cachecraft_rag.vllm.worker.models"
        made = registered.load_model_cls()
        assert issubclass(made, stock_model(name))
        assert made.__name__ == stock_model(name).__name__, "vLLM recognises its classes by it"
        assert made.__qualname__ == name


def test_rotary_embeddings_are_shared_and_have_a_table() -> None:
    text = source("model_executor.layers.rotary_embedding.base")
    assert 'register_buffer("cos_sin_cache", cache' in text
    assert "is_neox_style" in text
    assert "_ROPE_DICT" in source("model_executor.layers.rotary_embedding")


def test_attention_writes_its_blocks_by_one_call() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    found = parameters(CPUAttentionBackendImpl.do_kv_cache_update)
    assert found == ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]
    text = source("model_executor.layers.attention.attention")
    for name in (
        "self.num_kv_heads",
        "self.head_size",
        "self.layer_name",
        "self.sliding_window",
        "self.impl",
    ):
        assert f"{name} = " in text or f"{name}:" in text, name
    assert "static_forward_context[prefix] = self" in text


def test_the_connector_s_base_calls_what_ours_answers() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from cachecraft_rag.vllm.worker.connector import CacheCraftConnector

    assert issubclass(CacheCraftConnector, SupportsHMA)
    assert not CacheCraftConnector.__abstractmethods__
    register()
    assert CONNECTOR in KVConnectorFactory._registry
    for name in (
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
        "start_load_kv",
        "wait_for_layer_load",
        "wait_for_save",
        "get_finished",
        "get_block_ids_with_load_errors",
        "on_new_request",
        "build_connector_worker_meta",
        "get_kv_connector_stats",
        "build_kv_connector_stats",
        "shutdown",
    ):
        ours, base = getattr(CacheCraftConnector, name), getattr(KVConnectorBase_V1, name)
        assert parameters(ours) == parameters(base), name
    assert isinstance(KVConnectorBase_V1.requires_kv_delivery, property)


def test_counts_travel_with_vllm_s_statistics() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase, StatLoggerManager
    from vllm.v1.metrics.stats import SchedulerStats

    from cachecraft_rag.vllm.metrics import ServerStatistics, StoreCounts, reported_counts

    assert {"to_dict", "reset", "aggregate", "reduce", "is_empty"} <= set(dir(KVConnectorStats))
    assert "self.logger_manager" in source("v1.engine.async_llm")
    assert "self.stat_loggers" in inspect.getsource(StatLoggerManager)
    assert parameters(StatLoggerBase.record) == parameters(ServerStatistics.record)
    text = source("v1.metrics.loggers")

    both = StoreCounts({"worker": {"loads": {"disk": 1}, "captures": {}}}).aggregate(
        StoreCounts(
            {
                "worker": {"loads": {"disk": 2}, "captures": {}},
                "scheduler": {"lookups": {"found": 3}},
            }
        )
    )
    assert (both.is_empty(), StoreCounts().is_empty()) == (False, True)
    assert both.reduce() == {"chunk-caches loaded so far": 2, "captures so far": 0}
    reports: list[Any] = []
    take = lambda *report: reports.append(report)  # noqa: E731
    manager = SimpleNamespace(stat_loggers=[SimpleNamespace()])
    latest = reported_counts(SimpleNamespace(logger_manager=manager), take)
    received: Any = manager.stat_loggers[0]  # before those that it corrects
    received.record(SchedulerStats(kv_connector_stats=both.to_dict()), None)
    received.record(SchedulerStats(kv_connector_stats={"worker": {"loads": {"disk": 4}}}), None)
    received.record(None, None)
    assert latest == {
        (0, "worker"): {"loads": {"disk": 4}},
        (0, "scheduler"): {"lookups": {"found": 3}},
    }
    assert reported_counts(SimpleNamespace(logger_manager=None), take) == {}
    filled = StoreCounts(
        {"reports": {"a name": {"row_layers": 3}}, "worker": {"loads": {"disk": 5}}}
    )
    assert filled.reduce() == {"chunk-caches loaded so far": 5, "captures so far": 0}
    received.record(SchedulerStats(kv_connector_stats=filled.to_dict()), None)
    assert reports == [("a name", {"row_layers": 3})]
    assert (0, "reports") not in latest
    assert "custom_stat_loggers" in text
    assert {"record", "log_engine_initialized"} == StatLoggerBase.__abstractmethods__ - {"__init__"}
    assert parameters(AsyncLLM.from_engine_args)[:2] == ["engine_args", "start_engine_loop"]
    assert "stat_loggers" in parameters(AsyncLLM.from_engine_args)


def test_totals_in_vllm_s_log_never_fall() -> None:
    """A step reports on one store only, or on none: the log says what all of them have done so far."""
    from vllm.v1.metrics.stats import SchedulerStats

    from cachecraft_rag.vllm.metrics import ServerStatistics, StoreCounts

    statistics = ServerStatistics(on_report=lambda *_: None)
    shown = []
    for data in (
        {"worker": {"loads": {"disk": 2}, "captures": {"stored": 1}}},
        {"scheduler": {"lookups": {"found": 3}}},
        {"reports": {"a name": {"row_layers": 3}}},
        {"worker": {"loads": {"disk": 3}, "captures": {"stored": 1}}},
    ):
        step = SchedulerStats(kv_connector_stats=data)
        statistics.record(step, None)
        shown.append(StoreCounts(step.kv_connector_stats or {}).reduce())
    assert [one["chunk-caches loaded so far"] for one in shown] == [2, 2, 2, 3]
    assert [one["captures so far"] for one in shown] == [1, 1, 1, 1]


def test_vllm_counts_reused_tokens_as_hits_and_no_work_in_idle_time_as_waiting() -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.metrics.stats import CachingMetrics, PrefixCacheStats, SchedulerStats

    from cachecraft_rag.vllm.metrics import ServerStatistics

    statistics = ServerStatistics(on_report=lambda *_: None)
    shown = CachingMetrics()  # of vLLM's log

    def step(**values: Any) -> SchedulerStats:
        look_ups = PrefixCacheStats(**values.pop("look_ups", {}))
        made = SchedulerStats(connector_prefix_cache_stats=look_ups, **values)
        statistics.record(made, None)
        shown.observe(look_ups)
        return made

    source = CacheHitSource.EXTERNAL_UNSPECIFIED
    counted = {"requests": 2, "queries": 900, "hits": 800, "hits_by_source": {source: 800}}
    begun = {"requests": -1, "queries": -801, "hits": 0, "idle_waiting": 3}
    first = step(
        look_ups=counted,
        kv_connector_stats={"corrections": begun},
        num_skipped_waiting_reqs=2,
        num_waiting_reqs=4,
    )
    look_ups = first.connector_prefix_cache_stats
    assert look_ups is not None
    assert (look_ups.requests, look_ups.queries, look_ups.hits) == (1, 99, 0)
    assert look_ups.hits_by_source == {}
    assert (first.num_skipped_waiting_reqs, first.num_waiting_reqs) == (0, 3)
    still = step(num_skipped_waiting_reqs=5, num_waiting_reqs=1)
    assert (still.num_skipped_waiting_reqs, still.num_waiting_reqs) == (2, 1)
    ended = {"requests": 0, "queries": 0, "hits": 450, "idle_waiting": 0}
    last = step(kv_connector_stats={"corrections": ended}).connector_prefix_cache_stats
    assert last is not None
    assert (last.requests, last.queries, last.hits) == (1, 801, 450)
    assert last.hits_by_source == {source: 450}
    assert shown.hit_rate == 450 / 900


def test_a_server_shows_what_all_its_stores_have_done(tmp_path: Path) -> None:
    from cachecraft_rag.observability.request_counts import RequestCounts
    from cachecraft_rag.store import ChunkCacheStore
    from cachecraft_rag.vllm.metrics import ServerCollector, counts_of, summed

    assert summed([{"a": {"b": 1}, "c": 2}, {"a": {"b": 2, "d": 1}, "c": 3}]) == {
        "a": {"b": 3, "d": 1},
        "c": 5,
    }
    (tmp_path / "remote").mkdir()
    with ChunkCacheStore.open(tmp_path / "caches", remote=f"file://{tmp_path / 'remote'}") as store:
        counts = counts_of(store)
        worker = counts | {
            "loads": {"remote": 2},
            "captures": {"stored": 3},
            "remote": counts["remote"] | {"captures": {"sent": 3}, "breakers": {"probing": 1}},
        }
        scheduler = counts | {"lookups": {"found": 5}}
        # vLLM's processes send plain values
        assert json.loads(json.dumps([worker, scheduler])) == [worker, scheduler]
        engine: Any = SimpleNamespace(store=store, request_counts=RequestCounts())
        collector = ServerCollector(engine, {(0, "worker"): worker, (0, "scheduler"): scheduler})
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in collector.collect()
            for sample in family.samples
        }
    assert samples["cachecraft_loads_total", "remote"] == 2
    assert samples["cachecraft_captures_total", "stored", ""] == 3
    assert samples["cachecraft_lookups_total", "found"] == 5
    assert samples["cachecraft_remote_captures_total", "sent"] == 3
    assert [
        samples["cachecraft_remote_breaker", state] for state in ("probing", "closed", "open")
    ] == [1, 0, 0]


def test_the_scheduler_hands_over_what_is_read() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    text = source("v1.request")
    for name in (
        "kv_transfer_params",
        "num_prompt_tokens",
        "prompt_token_ids",
        "prompt_embeds",
        "mm_features",
        "lora_request",
        "cache_salt",
        "prefill_stats",
        "skip_reading_prefix_cache",
        "block_hashes",
    ):
        assert f"self.{name}" in text, name
    assert "self.block_hashes.extend(self._block_hasher(self))" in text
    hashing = source("v1.core.kv_cache_utils")
    for statement in (
        "start_token_idx = len(request.block_hashes) * hash_block_size",
        "request.block_hashes[-1] if request.block_hashes else None",
        "if (start_token_idx == 0 and request.cache_salt)",
    ):
        assert statement in hashing, statement
    assert hasattr(KVCacheBlocks, "get_block_ids")
    assert {
        "finished_req_ids",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
    } <= SchedulerOutput.__dataclass_fields__.keys()
    assert {
        "kv_connector_worker_meta",
        "finished_recving",
    } <= KVConnectorOutput.__dataclass_fields__.keys()
    identity = ModelIdentity("fingerprint", KVLayout(1, 1, 1, "float32"), 8)
    settings = ConnectorSettings(
        "store", identity, EngineConfig(store=StoreConfig(remote="memory://"))
    )
    config = pickle.loads(pickle.dumps(settings.transfer_config()))  # noqa: S301  # as vLLM sends it to its processes
    assert (config.kv_load_failure_policy, config.kv_connector) == (
        "recompute",
        "CacheCraftConnector",
    )
    assert ConnectorSettings.of(SimpleNamespace(kv_transfer_config=config)) == settings
    assert settings.key not in repr(config)
    with pytest.raises(ConfigError, match="cachecraft serve"):
        ConnectorSettings.of(SimpleNamespace(kv_transfer_config=None))
    text = source("v1.core.sched.scheduler")
    assert "WAITING_FOR_REMOTE_KVS" in text
    assert "if ext_tokens is None:" in text


def test_ranks_have_one_group() -> None:
    from vllm.distributed.parallel_state import GroupCoordinator

    assert parameters(GroupCoordinator.all_reduce)[:2] == ["self", "input_"]
    assert parameters(GroupCoordinator.all_gather) == ["self", "input_", "dim"]
    text = inspect.getsource(GroupCoordinator.__init__)
    for name in ("rank_in_group", "world_size", "ranks"):
        assert f"self.{name}" in text, name


def test_the_engine_s_front_end() -> None:
    from vllm.config import CacheConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    assert parameters(AsyncLLM.generate)[:4] == ["self", "prompt", "sampling_params", "request_id"]
    wanted = {
        "model",
        "dtype",
        "max_model_len",
        "enable_prefix_caching",
        "kv_transfer_config",
        "disable_log_stats",
    }
    assert wanted <= AsyncEngineArgs.__dataclass_fields__.keys()
    assert "self.vllm_config = vllm_config" in inspect.getsource(AsyncLLM.__init__)
    assert "block_size" in CacheConfig.__dataclass_fields__


def test_settings_that_are_refused_have_these_names() -> None:
    from vllm import envs
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

    wanted = {
        "pipeline_parallel_size",
        "tensor_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    }
    assert wanted <= ParallelConfig.__dataclass_fields__.keys()
    parts = {
        "model_config",
        "parallel_config",
        "cache_config",
        "scheduler_config",
        "speculative_config",
    }
    assert parts <= VllmConfig.__dataclass_fields__.keys()
    assert {"cache_dtype", "enable_prefix_caching"} <= CacheConfig.__dataclass_fields__.keys()
    for name in ("use_mla", "is_encoder_decoder"):
        assert isinstance(getattr(ModelConfig, name), property | cached_property), name
    assert "self.hf_text_config" in source("config.model")
    assert "kv_cache_groups" in KVCacheConfig.__dataclass_fields__
    assert {FullAttentionSpec.__name__, SlidingWindowSpec.__name__} == {
        "FullAttentionSpec",
        "SlidingWindowSpec",
    }
    assert "VLLM_LOG_STATS_INTERVAL" in envs.environment_variables
    assert "VLLM_ENABLE_RESPONSES_API_STORE" in envs.environment_variables
    assert {
        "disable_log_stats",
        "max_num_queued_reqs",
    } <= AsyncEngineArgs.__dataclass_fields__.keys()


def test_the_api_server_has_what_the_endpoint_uses() -> None:
    from importlib.metadata import entry_points

    from vllm.entrypoints.openai.chat_completion import api_router
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    from cachecraft_rag.vllm.plugin import ENDPOINT
    from cachecraft_rag.vllm.server.endpoint import ChatWithDocuments

    (found,) = entry_points(group="vllm.endpoint_plugins", name=ENDPOINT)
    assert found.load() is ChatWithDocuments
    assert isinstance(ChatWithDocuments(), EndpointPlugin)
    assert ChatWithDocuments.name == ENDPOINT
    fields = {
        "documents",
        "kv_transfer_params",
        "cache_salt",
        "n",
        "echo",
        "tools",
        "max_completion_tokens",
    }
    assert fields <= ChatCompletionRequest.model_fields.keys()
    assert parameters(api_router.create_chat_completion) == ["request", "raw_request"]
    from vllm.entrypoints.openai.completion.api_router import create_completion
    from vllm.entrypoints.openai.responses.api_router import create_responses

    assert (
        parameters(create_completion) == parameters(create_responses) == ["request", "raw_request"]
    )
    for name in ("enable_prompt_tokens_details", "num_cached_tokens"):
        assert f"self.{name}" in inspect.getsource(OpenAIServingChat) or name in inspect.getsource(
            OpenAIServingChat
        )
    assert "self.engine_client.generate(" in inspect.getsource(
        OpenAIServingChat._create_chat_completion
    )
    assert parameters(OpenAIServingChat.create_chat_completion) == [
        "self",
        "request",
        "raw_request",
    ]
    ids = source("renderers.online_renderer")
    assert 'ids = kv.pop("prompt_token_ids", None)' in ids
    assert "reuse_ids, cache_salt=request.cache_salt" in ids


async def changing(*_: object, **__: object) -> dict[str, bool]:
    return {"changed": True}


async def empty_body() -> AsyncIterator[bytes]:
    yield b"{}"


def test_priming_and_evicting_ask_for_an_admin_key() -> None:
    from fastapi import HTTPException

    from cachecraft_rag.server.settings import EndpointSettings
    from cachecraft_rag.vllm.server.endpoint import evict

    for keys, given, allowed in (
        (None, "", True),
        ((), "", False),
        (("the first key", "the second key"), "", False),
        (("the first key", "the second key"), "the second key", True),
        (("the first key",), "the first", False),
    ):
        endpoint = SimpleNamespace(
            engine=SimpleNamespace(settings=EndpointSettings(admin_keys=keys)),
            engine_for=lambda _request: None,
            in_thread=changing,
        )
        headers = {"X-CacheCraft-Admin-Key": given} if given else {}
        state = SimpleNamespace(cachecraft=endpoint)
        request: Any = SimpleNamespace(
            headers=headers, app=SimpleNamespace(state=state), stream=empty_body
        )
        if allowed:
            assert asyncio.run(evict(request)) == {"changed": True}
        else:
            with pytest.raises(HTTPException, match=r"admin.key") as refused:
                asyncio.run(evict(request))
            assert refused.value.status_code == 403
