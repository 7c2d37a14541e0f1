"""The KV connector: glue between vLLM's calls and the two sides, scheduler and workers.

vLLM ends the whole server if a connector raises. So exceptions here are logged, and the request is computed like any
other; only the constructor, `update_state_after_alloc` and `build_connector_meta` raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from cachecraft_rag.compute.warm_up import warm_up
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.vllm.messages import (
    CORRECTIONS,
    REPORTS,
    Corrections,
    Fill,
    FillReport,
    StepResult,
)
from cachecraft_rag.vllm.metrics import NoFurtherMetrics, StoreCounts, counts_of
from cachecraft_rag.vllm.options import VLLMConfig
from cachecraft_rag.vllm.processes import settle_in
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker.adapters.active import Adapters
from cachecraft_rag.vllm.worker.fill_memory import fill_memory
from cachecraft_rag.vllm.worker.interfaces import (
    EngineRequest,
    KVCacheConfig,
    RequestBlocks,
    SchedulerOutput,
    VLLMModule,
)
from cachecraft_rag.vllm.worker.models import model_of
from cachecraft_rag.vllm.worker.ranks import ranks_of_worker
from cachecraft_rag.vllm.worker.refusals import start_up_refusal
from cachecraft_rag.vllm.worker.scheduling import Scheduling
from cachecraft_rag.vllm.worker.stack import WorkerStack
from cachecraft_rag.vllm.worker.working import Workers

logger = logging.getLogger("cachecraft_rag.vllm")
T = TypeVar("T")

# no tokens to be filled; annotated with the return type of `Scheduling.matched`
_NONE: int | None = 0


@dataclass
class StepWork(KVConnectorMetadata):
    """Scheduler → workers, once per step: fillings to begin, requests to give up, and the most rows to compute.

    ended             ids of the requests that have ended or are given up
    vllm_is_free      True if vLLM itself computes nothing in this step
    idle              True if no requests are running except work in idle time: new variants and audits
    captures_awaited  True if a request waits for captures
    """

    fills: list[Fill]
    ended: list[str]
    rows: int
    vllm_is_free: bool
    idle: bool
    captures_awaited: bool


@dataclass
class WorkerOutput(KVConnectorWorkerMetadata):
    """Workers → scheduler, once per step."""

    result: StepResult

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return the results of both ranks as one; if both report a request, this rank's report counts."""
        assert isinstance(other, WorkerOutput), "all ranks run this connector"
        return WorkerOutput(self.result.joined(other.result))


class ConnectorOutput(Protocol):
    """`vllm.v1.outputs.KVConnectorOutput`, the workers' results of a step."""

    kv_connector_worker_meta: WorkerOutput | None
    finished_recving: set[str] | None


class CacheCraftConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector in vLLM's scheduler, and in each worker; `KVConnectorBase_V1` says when each method is called."""

    def __init__(
        self, vllm_config: VLLMConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Open this process's side: that of the scheduler or, in a worker, that of its rank."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settle_in()
        self._settings = ConnectorSettings.of(vllm_config)
        refusal = start_up_refusal(vllm_config, kv_cache_config)
        if refusal is not None:
            raise refusal.error(vllm_config.model_config.model)
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._step_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._sender = str(role.name).lower()
        self._sent_counts: dict[str, object] = {}
        self._sent_corrections: Corrections | None = None
        stack: WorkerStack | None = None
        self._reserved: list[Tensor] = []
        if role == KVConnectorRole.WORKER:
            model = _running_model(vllm_config)
            self._reserved = model.reserved_memory
            self._adapters = Adapters(model)
            stack = WorkerStack(model, ranks_of_worker())
            warm_up(stack)
        memory = fill_memory(vllm_config, self._settings)
        store_config = self._settings.config.store
        if stack is not None and stack.device.type == "cuda":
            # Page-locked memory: copies from it are several times as fast. vLLM needs the GPU's memory for itself.
            store_config = replace(store_config, device=str(stack.device), device_bytes=0)
        share = None if stack is None else stack.ranks.share
        self._store = ChunkCacheStore.open(self._settings.store, store_config, share=share)
        # Only one of the two is set: vLLM calls the methods of one side only.
        self._scheduling: Scheduling
        self._workers: Workers
        self._end: Scheduling | Workers
        if stack is None:
            caching = bool(vllm_config.cache_config.enable_prefix_caching)
            self._end = self._scheduling = Scheduling(
                self._store,
                self._settings,
                block_size=block_size,
                prefix_caching=caching,
                memory=memory,
            )
        else:
            self._end = self._workers = Workers(
                stack,
                self._store,
                self._settings,
                block_size=block_size,
                memory=memory,
                whole_model=stack.vllm_forward(),
                adapters=self._adapters,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: captures are for later questions; `get_finished` alone makes requests with `when_stored` wait."""
        return False

    # -- scheduler ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest) -> None:
        """Note a request of this package that is not known yet; keep its blocks with chunks apart in vLLM's cache."""
        self._safely(None, lambda: self._scheduling.arrived(request))

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many further tokens will be filled, and True if there are any: they are filled between steps.

        (0, False) means that vLLM computes the rest of the prompt. (None, False) means that it is not known yet, or
        that the request has to wait, and vLLM asks again in the next step.

        Args:
            request: the request.
            num_computed_tokens: first tokens of the prompt that are in vLLM's prefix cache.
        """
        tokens = self._safely(_NONE, lambda: self._scheduling.matched(request, num_computed_tokens))
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: EngineRequest, blocks: RequestBlocks, num_external_tokens: int
    ) -> None:
        """Note that a request has its blocks, and how many of its tokens are to be filled; 0: vLLM computes them."""
        # Not caught: the request already waits for its blocks, and would wait forever.
        self._scheduling.allocated(request, tuple(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the work of this step, a `StepWork`, with as many rows as vLLM's own requests leave.

        There are at least `ConnectorSettings.least_rows` rows, and exactly as many while the server is idle; but none
        in the step that computes a filled request's first token, which other fillings would delay. Each filling is
        handed out once. `ended` has the requests that have ended and those to be given up, in order of their ids.
        """
        scheduled = int(scheduler_output.total_num_scheduled_tokens)
        left = self._step_tokens - scheduled
        rows = max(left, self._settings.least_rows)
        scheduling = self._scheduling
        scheduling.corrections.scheduled(scheduler_output.num_scheduled_tokens.keys())
        fills = scheduling.take_fills()
        idle = scheduling.idle
        if idle:
            # a request that arrives now waits for the end of this step
            rows = self._settings.least_rows
        if scheduling.computes_first_token(scheduler_output.num_scheduled_tokens.keys()):
            rows = 0
        ended = sorted({*scheduler_output.finished_req_ids, *scheduling.take_given_up()})
        return StepWork(
            fills, ended, rows, scheduled == 0, idle, scheduling.take_captures_awaited()
        )

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Take the workers' results, and note the requests that are filled or given up.

        Either may be missing.
        """
        sent = connector_output.kv_connector_worker_meta
        self._safely(
            None, lambda: self._scheduling.take_result(sent.result) if sent is not None else None
        )
        self._safely(
            None, lambda: self._scheduling.ended(set(connector_output.finished_recving or ()))
        )

    def request_finished(
        self, request: EngineRequest, block_ids: list[int]
    ) -> tuple[bool, dict[str, FillReport] | None]:
        """Forget a request; return False, because vLLM may free the blocks, and `messages.FIELD` → report.

        The answer carries the report. None instead for a request that is not of this package, or was forgotten before.
        """
        return False, self._safely(None, lambda: self._scheduling.finished(request))

    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, FillReport] | None]:
        """Return (False, report) as `request_finished`; vLLM calls this if layers may be in several groups."""
        return self.request_finished(request, [])

    # -- workers ------------------------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Begin, continue and end fillings for this step's share of time, before vLLM's own forward pass.

        The work is the `StepWork` of `build_connector_meta`; the arguments are not used. The first filling frees the
        memory that was reserved for fillings on a GPU.
        """
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork), "made by build_connector_meta"
        if work.fills:
            self._reserved.clear()  # vLLM has its KV cache and its graphs by now
        self._safely(None, lambda: self._step(work))

    def _step(self, work: StepWork) -> None:
        has_passes = work.fills or self._workers.is_filling
        with self._adapters.inactive() if has_passes else nullcontext():
            self._workers.step(**vars(work))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: blocks are filled before vLLM computes with them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: object
    ) -> None:
        """Do nothing: captures come from our own passes."""

    def wait_for_save(self) -> None:
        """Do nothing: captures are stored in the background."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return (None, ids of requests filled, left to vLLM, ended or given up, each once), or (None, None)."""
        return None, self._workers.finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the ids of blocks that could not be filled and that vLLM has to compute; each is returned once."""
        return self._workers.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return new reports and the running captures as `WorkerOutput`; None if there is no change since last time."""
        result = self._safely(None, lambda: self._workers.take_result())
        return None if result is None else WorkerOutput(result)

    # -- both ---------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> StoreCounts | None:
        """Return running totals of the store, if they have changed since the last call; None if there is nothing new.

        The scheduler's side also returns changed corrections to vLLM's own statistics, and each report of a filled
        request once. Of the workers only the first one returns anything.
        """
        return self._safely(None, self._new_counts)

    def _new_counts(self) -> StoreCounts | None:
        if isinstance(self._end, Workers) and not self._end.first_rank:
            return None
        counts = counts_of(self._store)
        data: dict[str, object] = {}
        if counts != self._sent_counts:
            self._sent_counts = data[self._sender] = counts
        if isinstance(self._end, Scheduling):
            if reports := self._end.take_reports():
                data[REPORTS] = reports
            corrections = self._end.corrections.totals()
            if corrections != self._sent_corrections:
                self._sent_corrections = data[CORRECTIONS] = corrections
        return StoreCounts(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, object] | None = None) -> StoreCounts:
        """Return the counts that have arrived in the API server, `StoreCounts.data`, as an object; None: no counts."""
        return StoreCounts(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> NoFurtherMetrics:
        """Return metrics of vLLM's own, of which there are none. `given`: see `KVConnectorPromMetrics`."""
        return NoFurtherMetrics(*given)

    def shutdown(self) -> None:
        """In a worker, give up fillings and finish the captures; in the scheduler, end look-ups. Close the store."""
        for part in (self._end, self._store):
            self._safely(None, part.close)

    def _safely(self, otherwise: T, act: Callable[[], T]) -> T:
        """Return the result of `act`, or `otherwise` after an exception.

        Failures of a disk, a remote or a request are handled further down. An exception that arrives here is a bug;
        vLLM would end its engine, and with it the requests of all users.
        """
        try:
            return act()
        except Exception:  # any: vLLM would end its engine, and all requests
            logger.exception("A mistake in the connector; the server goes on")
            return otherwise


def _running_model(vllm_config: VLLMConfig) -> VLLMModule:
    """Return the model of this worker. Raises UnsupportedModelError if it is not a class of this package."""
    model = model_of(vllm_config)
    if model is None:
        raise UnsupportedModelError(
            f"another plugin has taken over {vllm_config.model_config.hf_config.architectures}: the model that "
            "vLLM runs is not the one of this package. Name the plugins to load: VLLM_PLUGINS=cachecraft"
        )
    return model
