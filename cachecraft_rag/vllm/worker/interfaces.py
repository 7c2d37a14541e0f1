"""The attributes of vLLM's objects that the scheduler's side reads. vLLM itself is untyped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class RequestSampling(Protocol):
    """`vllm.SamplingParams` of a request."""

    prompt_logprobs: int | None


class EngineRequest(Protocol):
    """`vllm.v1.request.Request`, a request in vLLM's scheduler."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, object] | None
    cache_salt: str | None
    sampling_params: RequestSampling | None
    prompt_embeds: object
    mm_features: Sequence[object]
    lora_request: object
    skip_reading_prefix_cache: bool | None


class RequestBlocks(Protocol):
    """`vllm.v1.core.kv_cache_manager.KVCacheBlocks`, the blocks of a request."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block ids of each group of layers."""


class SchedulerOutput(Protocol):
    """`vllm.v1.core.sched.output.SchedulerOutput`, the work of a step."""

    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
