"""Calls from threads to vLLM's engine, through its event loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.vllm.messages import FillReport
from cachecraft_rag.vllm.options import VLLMConfig

T = TypeVar("T")

_START_S = 600.0  # compiling and loading a large model take minutes
_CLOSE_S = 30.0


class TokenLogprob(Protocol):
    """`vllm.logprobs.Logprob`."""

    logprob: float


class CompletionOutput(Protocol):
    """`vllm.outputs.CompletionOutput`, new tokens of an answer."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, TokenLogprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


class RequestOutput(Protocol):
    """`vllm.RequestOutput`, an output of a request."""

    outputs: Sequence[CompletionOutput]
    prompt_logprobs: Sequence[Mapping[int, TokenLogprob] | None] | None
    finished: bool
    kv_transfer_params: dict[str, Any] | None
    num_cached_tokens: int | None
    metrics: object


class EngineClient(Protocol):
    """`vllm.engine.protocol.EngineClient`, of which `AsyncLLM` is one."""

    vllm_config: VLLMConfig

    def generate(
        self, prompt: object, params: object, request_id: str, **options: object
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs of a request, the last one with `finished`; closing the generator aborts it.

        `prompt` is vLLM's, such as a mapping with "prompt_token_ids", `params` its `SamplingParams` or `PoolingParams`,
        and `options` are further arguments of its method, such as `trace_headers`.
        """

    def shutdown(self) -> None:
        """End vLLM's processes, and return None. Raises vLLM's own errors."""


@dataclass(frozen=True)
class Step:
    """New token ids of one step.

    report           `kv_transfer_params`; sent with the last step only
    logprobs         for each new token the log-probabilities of the likeliest tokens in its place, if requested
    prompt_logprobs  the same for each token of the prompt; sent with one step, and only if requested
    error            the exception that ended the request; `Calls.generate` raises it, and yields no such step
    """

    tokens: tuple[int, ...]
    finished: bool = False
    report: Mapping[str, FillReport] = field(default_factory=dict)
    logprobs: Sequence[Mapping[int, TokenLogprob]] = ()
    prompt_logprobs: Sequence[Mapping[int, TokenLogprob] | None] = ()
    error: BaseException | None = None


class Calls(Closeable):
    """Requests to a vLLM engine that runs in an event loop of another thread, such as an API server's.

    Args:
        engine: vLLM's `AsyncLLM`; its owner ends it. None before `Serving` has started it.
    """

    def __init__(self, engine: EngineClient | None, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        # running request → its report, once it is filled
        self.reports: dict[str, FillReport | None] = {}
        self._numbers = itertools.count()
        self._jobs: set[Future[None]] = set()  # running requests
        self._ended = False  # the loop runs no further requests

    def generate(self, prompt: dict[str, object], params: object) -> Generator[Step]:
        """Yield the steps of a request, the last one with `finished`; closing the iterator aborts the request.

        `prompt` is vLLM's, `params` its `SamplingParams`. The request begins once the first step is asked for. Not to
        be called in the loop's own thread, which would wait for itself. Raises asyncio.CancelledError if the event loop
        has cancelled the request, such as when its server ends, and concurrent.futures.CancelledError if `close` has.
        """
        steps: SimpleQueue[Step] = SimpleQueue()
        name = f"cachecraft-{next(self._numbers)}"
        job = self._run(self._generate(prompt, params, name, steps))
        self._jobs.add(job)
        # read only where it was cancelled
        job.add_done_callback(lambda _: steps.put(Step((), error=CancelledError())))
        if self._ended:  # it may have come too late for the loop, and for `_end_loop`
            job.cancel()
        try:
            while True:
                step = steps.get()
                if step.error is not None:
                    raise step.error
                yield step
                if step.finished:
                    return
        finally:
            job.cancel()
            self._jobs.discard(job)

    @property
    def vllm_config(self) -> VLLMConfig:
        """vLLM's `VllmConfig`, not a copy. Raises AssertionError after `Serving.close`."""
        assert self._engine is not None, "it is closed"
        return self._engine.vllm_config

    def close(self) -> None:
        """End requests under way, without waiting; the engine has another owner, and later requests are served."""
        for job in list(self._jobs):
            job.cancel()

    async def _generate(
        self, prompt: dict[str, object], params: object, name: str, steps: SimpleQueue[Step]
    ) -> None:
        try:
            if self._engine is None:
                raise RuntimeError("vLLM is closed")
            async for output in self._engine.generate(prompt, params, name):
                best = output.outputs[0]
                steps.put(
                    Step(
                        tuple(best.token_ids),
                        output.finished,
                        output.kv_transfer_params or {},
                        best.logprobs or (),
                        output.prompt_logprobs or (),
                    )
                )
        except BaseException as error:  # otherwise the reader of the steps would wait forever
            steps.put(Step((), error=error))
            raise

    def _run(self, work: Coroutine[object, object, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()  # otherwise Python warns that it was never awaited
            raise RuntimeError("vLLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class Serving(Calls):
    """A vLLM engine that is started here, with its own event loop.

    Args:
        arguments: keyword arguments of vLLM's `AsyncEngineArgs`.
    """

    def __init__(self, arguments: dict[str, object]) -> None:
        super().__init__(None, asyncio.new_event_loop())
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="cachecraft-vllm", daemon=True
        )
        self._thread.start()
        self._closed = False
        try:
            self._engine = self._run(_start(arguments, self.reports)).result(_START_S)
        except BaseException:  # Ctrl-C too: the thread ends
            self._end_loop()
            raise

    def close(self) -> None:
        """End requests under way, then vLLM's processes, and wait for these.

        If that fails, the event loop's thread stays, and a second call does not try again.
        """
        if self._closed:
            return
        self._closed = True
        super().close()
        self._run(self._shut_down()).result(_CLOSE_S)
        self._end_loop()

    async def _shut_down(self) -> None:
        engine = self._engine
        self._engine = None  # otherwise its finaliser fails when the interpreter exits
        assert engine is not None, "it is closed once"
        engine.shutdown()

    def _end_loop(self) -> None:
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        super().close()  # requests that came after the last step of the loop
        if not self._thread.is_alive():
            self._loop.close()


async def _start(
    arguments: dict[str, object], reports: dict[str, FillReport | None]
) -> EngineClient:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from cachecraft_rag.vllm.metrics import ServerStatistics

    def take(name: str, report: FillReport) -> None:
        if name in reports:
            reports[name] = report

    engine: EngineClient = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments), stat_loggers=[partial(ServerStatistics, on_report=take)]
    )
    return engine
