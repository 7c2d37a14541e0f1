"""The workers' end: fills the blocks of requests, in slices between vLLM's own forwards, and captures.

Nothing here waits. A filling that waits for a disk or a remote is passed over; those that stand before the same layer
run it as one forward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cachecraft_rag.compute.job import PrefillResult
from cachecraft_rag.compute.row_pass import advance
from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.compute.write_back import CaptureContext, WriteBackQueue
from cachecraft_rag.engine.scheduling import FairLock
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import exact_shares
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.expected import Found
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.vllm.filling import Filling
from cachecraft_rag.vllm.identity import ModelIdentity
from cachecraft_rag.vllm.messages import Fill, News
from cachecraft_rag.vllm.ranks import TensorParallel
from cachecraft_rag.vllm.stack import WorkerStack

logger = logging.getLogger("cachecraft_rag.vllm")

_SLICE_S = 0.05  # most of a step for filling, where one layer of one pass does not take longer


class Workers:
    """One rank's end.

    Args:
        block_size: tokens of a block of vLLM's.
    """

    def __init__(
        self, stack: WorkerStack, store: ChunkCacheStore, identity: ModelIdentity, *, namespace: str, block_size: int
    ) -> None:
        self._stack, self._store, self._block_size = stack, store, block_size
        self._several = isinstance(stack.ranks, TensorParallel)
        self.first_rank = not isinstance(stack.ranks, TensorParallel) or stack.ranks.rank == 0
        self._speed = ComputeSpeed(stack.keys_per_row)
        self._loader = Loader(store, stack.layout.layers)
        self._lock = FairLock()
        self._write_back = WriteBackQueue(
            store,
            namespace=namespace,
            fingerprint=identity.fingerprint,
            layout=identity.layout,
            take_lock=self._lock.take,
        )
        self._fillings: dict[str, Filling] = {}  # in the order of asking
        self._storing: dict[str, frozenset[str]] = {}  # filled, but to be told only once these segments are stored
        self._done: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._reports: dict[str, dict[str, Any]] = {}
        self._told_capturing: frozenset[str] = frozenset()

    def step(self, fills: Iterable[Fill], gone: Iterable[str], *, rows: int) -> None:
        """One step: begin what is new, drop what is gone, and compute up to `rows` rows through all layers."""
        for name in gone:
            self._drop(name)
        for fill in fills:
            self._begin(fill)
        for name in [name for name, ids in self._storing.items() if not self._write_back.pending(ids)]:
            del self._storing[name]
            self._done.add(name)
        for filling in list(self._fillings.values()):
            self._guarded(filling, filling.go_on)
        budget, until = rows * self._stack.layout.layers, time.perf_counter() + _SLICE_S
        while budget > 0 and (group := self._group()):
            budget -= self._run_layer(group)
            if not self._several and time.perf_counter() > until:  # ranks must run the same layers
                return

    def finished(self) -> set[str]:
        """Requests whose blocks are filled, or that are gone; each is told once."""
        done, self._done = self._done, set()
        return done

    def failed_blocks(self) -> set[int]:
        """Blocks that nothing could be done about; each is told once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def news(self) -> News | None:
        """What the scheduler's end does not know yet."""
        capturing = self._write_back.pending()
        reports, self._reports = self._reports, {}
        if not reports and capturing == self._told_capturing:
            return None
        self._told_capturing = capturing
        return News(reports, capturing)

    def close(self) -> None:
        """Give up what is being filled, and finish the captures."""
        for name in list(self._fillings):
            self._drop(name)
        self._write_back.close()

    # -- fillings -----------------------------------------------------------------------------------------------------

    def _begin(self, fill: Fill) -> None:
        with self._at_their_cost([fill]):
            self._fillings[fill.request_id] = Filling(
                fill,
                stack=self._stack,
                store=self._store,
                loader=self._loader,
                speed=self._speed,
                whole=self._several,
            )

    @contextmanager
    def _at_their_cost(self, fills: Sequence[Fill]) -> Iterator[None]:
        """What is raised inside is the trouble of these requests alone: they are computed from nothing instead.

        That is every exception, mistakes of ours too: one that went on to vLLM would end the server for everybody, and
        after one that was caught further up these requests would wait for their blocks for ever.
        """
        try:
            yield
        except Exception:  # noqa: BLE001  # see above; `_without_store` logs it with its traceback
            for fill in fills:
                if (filling := self._fillings.pop(fill.request_id, None)) is not None:
                    filling.give_up()
                self._without_store(fill)

    def _without_store(self, fill: Fill) -> None:
        """After a mistake of ours: compute the prompt, from nothing; if that fails too, vLLM fails the request."""
        if not fill.ask.config.reuse and not fill.ask.config.capture:
            logger.exception("Request %s cannot be filled", fill.request_id)
            first = fill.first // self._block_size
            self._failed_blocks.update(fill.blocks[first : fill.last // self._block_size + 1])
            self._done.add(fill.request_id)
            return
        logger.exception("Request %s is computed in full", fill.request_id)
        plain = replace(fill.ask, config=ReuseConfig(reuse=False, capture=False), captures=None, when_stored=False)
        self._begin(replace(fill, ask=plain, found=Found({}), scores={}))

    def _guarded(self, filling: Filling, act: Any) -> None:
        """Do one thing for one filling; whatever it raises is that request's alone."""
        with self._at_their_cost([filling.fill]):
            act()
            if filling.result is not None:
                self._finish(filling)

    def _drop(self, name: str) -> None:
        if (filling := self._fillings.pop(name, None)) is not None:
            filling.give_up()
        elif self._storing.pop(name, None) is None:
            return
        self._done.add(name)  # vLLM keeps the blocks until it is told

    def _group(self) -> list[Filling]:
        """The first filling that can compute, and those that stand before the same layer."""
        ready = [one for one in self._fillings.values() if one.row_pass is not None]
        if not ready:
            return []
        layer = ready[0].row_pass.layer if ready[0].row_pass is not None else 0
        return [one for one in ready if one.row_pass is not None and one.row_pass.layer == layer]

    def _run_layer(self, group: list[Filling]) -> int:
        """Run one layer of these fillings as one forward; returns how many rows that were."""
        passes = [one.row_pass for one in group if one.row_pass is not None]
        for one in group:
            one.begins_layer()
        rows = sum(len(one.positions) for one in passes)
        ran = False
        with self._at_their_cost([one.fill for one in group]), self._lock.take():  # whose fault it is nobody knows
            advance(self._stack, passes)
            ran = True
        for one in group if ran else ():
            self._guarded(one, one.ran_layer)
        return rows

    def _finish(self, filling: Filling) -> None:
        fill, result = filling.fill, filling.end()
        positions = torch.arange(fill.first, fill.last, device=self._stack.device)
        blocks = torch.tensor(fill.blocks, device=self._stack.device)
        slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        self._stack.write_blocks(result.buffer.kv, slots, fill.first)
        captured = self._capture(filling, result)
        if self.first_rank and not fill.again:
            for planned in filling.plan.segments:
                if planned.variant is not None:
                    self._store.used(planned.variant.variant_id, cfo=planned.cfo or 0.0, tokens=planned.variant.tokens)
        self._reports[fill.request_id] = filling.report()
        del self._fillings[fill.request_id]
        if fill.ask.when_stored:
            self._storing[fill.request_id] = captured
        else:
            self._done.add(fill.request_id)

    def _capture(self, filling: Filling, result: PrefillResult) -> frozenset[str]:
        """Hand over what was captured; returns the segments that this rank stores.

        Chunk-caches hold all heads, so that any number of ranks can use them. They are gathered here, in the step: a
        collective in the thread that describes them would meet those of the next forward.
        """
        recorder, keys = result.recorder, result.buffer.kv[:, 0]
        if isinstance(ranks := self._stack.ranks, TensorParallel):
            for segment in ranks.agree(recorder.missing):
                recorder.forget(segment)
            if recorder.captures:
                keys = ranks.gather_heads(keys[:, : recorder.captures[-1].stop])
                recorder = recorder.with_all_heads(ranks.gather_heads)
        if not recorder.captures:
            return frozenset()
        ask, segments = filling.fill.ask, filling.fill.ask.prompt.segments
        shares = exact_shares(filling.plan, [len(segment.token_ids) for segment in segments])
        context = CaptureContext(segments, ask.prompt.bounds, shares, ask.session, primed=ask.primed)
        self._write_back.submit(recorder, keys, context)
        return frozenset(segments[one.segment].segment_id for one in recorder.captures)
