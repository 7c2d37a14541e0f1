"""OpenTelemetry traces: one span for each request, with child spans for retrieval, plan, load, prefill and decode.

A request is traced if the application has configured a tracer provider; this module imports nothing of OpenTelemetry
otherwise. Spans are made once a request has ended, from the times in its statistics; over vLLM the span of the request
itself begins with it, so that vLLM's spans become its children. Names follow the semantic
conventions for generative AI (open-telemetry/semantic-conventions-genai, 0.1) as far as they go; the others begin with
`cachecraft.`. Spans hold ids, codes and numbers, but no text of a question, passage or answer, and no session.
docs/guides/production.md lists the attributes.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cachecraft_rag import __version__
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.observability.stats import RequestStats

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger("cachecraft_rag.tracing")

OnEnd = Callable[[Callable[[], RequestStats], str | None], object]
Attributes = dict[str, "AttributeValue"]

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_RETRIEVAL_KEY = "cachecraft.retrieval"  # in OpenTelemetry's context
_PROVIDER = "cachecraft"


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A search whose passages a request is asked over.

    began, ended  in seconds of `time.perf_counter`
    top_k         passages that were asked for
    passages      passages that were found
    """

    began: float
    ended: float
    top_k: int
    passages: int


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request as it is known when it is made.

    started      time of the call, in seconds of `time.perf_counter`
    model        name of the model
    max_tokens   longest answer, in tokens
    temperature  randomness of the draw
    top_p        nucleus
    """

    started: float
    model: str
    max_tokens: int
    temperature: float
    top_p: float


def is_tracing() -> bool:
    """Return True if the application has configured a tracer provider; imports nothing of OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    # None too while another thread imports the module
    provider_of = getattr(trace, "get_tracer_provider", None)
    if trace is None or provider_of is None:
        return False
    return not isinstance(provider_of(), trace.ProxyTracerProvider)


@contextmanager
def following(retrieval: Retrieval) -> Iterator[None]:
    """Give requests that are made within the block, in this task or thread, a child span for this retrieval.

    Their own span then begins with the retrieval. Does nothing unless `is_tracing` at the begin of the block.
    """
    if not is_tracing():
        yield
        return
    from opentelemetry import context

    token = context.attach(context.set_value(_RETRIEVAL_KEY, retrieval))
    try:
        yield
    finally:
        context.detach(token)


def traced(ended: OnEnd, request: TracedRequest) -> OnEnd:
    """Return a function that calls `ended` and then records the request's spans; `ended` itself if nothing is traced.

    The spans' parent is the span that is current now, in the thread of the caller, and the retrieval of `following` is
    taken now. After an error of `ended` nothing is recorded; errors of recording are logged, because the answer is
    complete then.
    """
    if not is_tracing():
        return ended
    from opentelemetry import context

    current = context.get_current()
    clock = _WallClock(time.time_ns(), time.perf_counter())
    retrieval = context.get_value(_RETRIEVAL_KEY, current)
    assert retrieval is None or isinstance(retrieval, Retrieval)

    def ended_and_recorded(stats: Callable[[], RequestStats], error: str | None) -> None:
        ended(stats, error)
        try:
            _record(request, retrieval, stats(), error, parent=current, clock=clock)
        except Exception:  # of the provider: the answer itself is complete
            logger.exception("The spans of a request could not be recorded")

    return ended_and_recorded


@dataclass(frozen=True, slots=True)
class _WallClock:
    """Converts times of `time.perf_counter` into nanoseconds since 1970, by one moment read on both clocks."""

    wall_ns: int
    counter_s: float

    def ns(self, counter_s: float) -> int:
        """Return the time in nanoseconds since 1970."""
        return self.wall_ns + round((counter_s - self.counter_s) * 1e9)


def _record(
    request: TracedRequest,
    retrieval: Retrieval | None,
    stats: RequestStats,
    error: str | None,
    *,
    parent: Context,
    clock: _WallClock,
) -> None:
    """Make the spans of a request that has ended."""
    began = request.started if retrieval is None else retrieval.began
    root = _start(request, parent, began, clock)
    _finish(root, request, retrieval, stats, error, parent=parent, clock=clock)


def _start(request: TracedRequest, parent: Context, began: float, clock: _WallClock) -> Span:
    from opentelemetry import trace

    return trace.get_tracer("cachecraft_rag", __version__).start_span(
        f"chat {request.model}",
        context=parent,
        kind=trace.SpanKind.INTERNAL,  # the conventions' kind for a model in the same process
        start_time=clock.ns(began),
    )


def _finish(
    root: Span,
    request: TracedRequest,
    retrieval: Retrieval | None,
    stats: RequestStats,
    error: str | None,
    *,
    parent: Context,
    clock: _WallClock,
) -> None:
    """Make the child spans of a request that has ended, and end its own."""
    from opentelemetry import trace

    tracer = trace.get_tracer("cachecraft_rag", __version__)
    started = request.started
    root.set_attributes(_request_attributes(request, stats))
    within = trace.set_span_in_context(root, parent)

    def child(
        name: str, began: float, ended: float, attributes: Attributes, *, inside: Context = within
    ) -> Span:
        span = tracer.start_span(
            name, context=inside, start_time=clock.ns(began), attributes=attributes
        )
        span.end(clock.ns(ended))
        return span

    if root.is_recording():
        if retrieval is not None:
            child("retrieval", retrieval.began, retrieval.ended, _retrieval_attributes(retrieval))
        planned = started + stats.queue_s + stats.plan_s
        if stats.queue_s + stats.plan_s:
            child("cachecraft.plan", started, planned, _plan_attributes(stats))
        if stats.ttft_s:
            first_token = started + stats.ttft_s
            prefill = child("cachecraft.prefill", planned, first_token, _token_attributes(stats))
            inside = trace.set_span_in_context(prefill, within)
            child(
                "cachecraft.load",
                planned,
                planned + stats.load_s,
                _load_attributes(stats),
                inside=inside,
            )
            child(
                "cachecraft.decode", first_token, started + stats.total_s, _decode_attributes(stats)
            )
    if error is not None:
        root.set_attribute("error.type", error)
        root.set_status(trace.Status(trace.StatusCode.ERROR))
    root.end(clock.ns(started + stats.total_s))


class ServedTrace:
    """The trace of one request in a vLLM server, whose own span becomes a child of the request's.

    Attributes:
        headers: the trace as HTTP headers, for vLLM.
    """

    def __init__(self, request: TracedRequest, headers: Mapping[str, str] | None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        format = TraceContextTextMapPropagator()
        self._request = request
        self._clock = _WallClock(time.time_ns(), time.perf_counter())
        self._parent = format.extract(headers or {})
        self._root = _start(request, self._parent, request.started, self._clock)
        self.headers: dict[str, str] = {}
        format.inject(self.headers, trace.set_span_in_context(self._root, self._parent))

    @classmethod
    def begin(cls, request: TracedRequest, headers: Mapping[str, str] | None) -> Self | None:
        """Start the span of a request; its `end` records the rest. None, with a log, if that fails.

        Call it only while `is_tracing`. The client's HTTP `headers` (lower case, or None) may name its trace.
        """
        try:
            return cls(request, headers)
        except Exception:  # of the provider: the request goes on without a trace
            logger.exception("The spans of a request could not be recorded")
            return None

    def end(self, stats: RequestStats, error: str | None) -> None:
        """Record the child spans of the request, which has ended, and end its own. Call it once. Errors are logged.

        `error` is the name of the class of the exception that ended the request.
        """
        try:
            _finish(
                self._root,
                self._request,
                None,
                stats,
                error,
                parent=self._parent,
                clock=self._clock,
            )
        except Exception:  # of the provider: the answer itself is complete
            logger.exception("The spans of a request could not be recorded")


def _request_attributes(request: TracedRequest, stats: RequestStats) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": float(request.temperature),
        "gen_ai.request.top_p": float(request.top_p),
        "gen_ai.request.stream": True,
        "gen_ai.response.id": stats.request_id,
        "gen_ai.response.finish_reasons": [str(stats.finish)],
    }
    if stats.ttft_s:  # else it is unknown what was computed
        attributes |= {
            "gen_ai.response.time_to_first_chunk": stats.ttft_s,
            "gen_ai.usage.input_tokens": stats.tokens_prompt,
            "gen_ai.usage.output_tokens": stats.tokens_generated,
            "gen_ai.usage.cache_read.input_tokens": stats.tokens_reused,
        }
        attributes |= _token_attributes(stats)
    return attributes


def _retrieval_attributes(retrieval: Retrieval) -> Attributes:
    return {
        "gen_ai.operation.name": "retrieval",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.retrieval.top_k": retrieval.top_k,
        "cachecraft.passages": retrieval.passages,
    }


def _plan_attributes(stats: RequestStats) -> Attributes:
    """Return the wait for its turn, and lists with one entry for each chunk, in prompt order."""
    attributes: Attributes = {
        "cachecraft.queue_s": stats.queue_s,
        "cachecraft.chunk.ids": [chunk.chunk_id for chunk in stats.chunks],
        "cachecraft.chunk.outcomes": [chunk.outcome for chunk in stats.chunks],
        "cachecraft.chunk.reasons": [str(chunk.reason_code) for chunk in stats.chunks],
        "cachecraft.chunk.tokens": [chunk.tokens for chunk in stats.chunks],
        "cachecraft.chunk.recomputed": [chunk.recomputed for chunk in stats.chunks],
        "cachecraft.chunk.computed": [chunk.computed for chunk in stats.chunks],
    }
    if stats.remote is not None:
        attributes["cachecraft.remote"] = stats.remote
    return attributes


def _load_attributes(stats: RequestStats) -> Attributes:
    return {"cachecraft.tiers": [chunk.tier for chunk in stats.chunks if chunk.tier is not None]}


def _token_attributes(stats: RequestStats) -> Attributes:
    return {
        "cachecraft.tokens.reused": stats.tokens_reused,
        "cachecraft.tokens.recomputed": stats.tokens_recomputed,
        "cachecraft.tokens.computed": stats.tokens_computed,
    }


def _decode_attributes(stats: RequestStats) -> Attributes:
    return {
        "gen_ai.usage.output_tokens": stats.tokens_generated,
    }


def configure_tracing() -> None:
    """Send traces over OTLP if the environment names a collector, as the `cachecraft` command does.

    It reads OpenTelemetry's own variables: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`,
    `OTEL_SERVICE_NAME` ("cachecraft" without it), `OTEL_TRACES_SAMPLER` and so on. Does nothing without an endpoint, if
    `OTEL_TRACES_EXPORTER` or `OTEL_SDK_DISABLED` switches traces off, or if a provider is configured already. Queued
    spans are sent when the process ends. ConfigError if the extra "otel" is not installed, a variable is wrong, or
    another protocol than HTTP is asked for.
    """
    endpoint = _first_set(ENDPOINTS)
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None or is_off or "otlp" not in os.environ.get("OTEL_TRACES_EXPORTER", "otlp"):
        return
    if is_tracing():  # an application's provider may use another protocol
        return
    if os.environ.get(_first_set(PROTOCOLS) or "", "http/protobuf") != "http/protobuf":
        raise ConfigError(
            f"{_first_set(PROTOCOLS)} is not http/protobuf, the one protocol that traces are sent with: set it, and "
            "name the collector's HTTP port (4318 by default)"
        )
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{endpoint} is set, and sending traces needs packages that are not installed ({error}); type: "
            "pip install 'cachecraft-rag[otel]', or set OTEL_TRACES_EXPORTER=none"
        ) from error
    except ValueError as error:  # the SDK reads its limits when it is imported
        raise _refused_variable(error) from error
    if is_tracing():  # a provider that OTEL_PYTHON_TRACER_PROVIDER names is made only now
        return
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    try:
        provider = TracerProvider(
            resource=Resource.create({} if is_named else {"service.name": _PROVIDER})
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ValueError as error:
        raise _refused_variable(error) from error
    trace.set_tracer_provider(provider)


def _refused_variable(error: ValueError) -> ConfigError:
    return ConfigError(
        f"OpenTelemetry refuses the value of one of its variables ({error}); correct it, or set "
        "OTEL_TRACES_EXPORTER=none"
    )


def _first_set(names: tuple[str, ...]) -> str | None:
    """Return the first environment variable that is not empty."""
    return next((name for name in names if os.environ.get(name)), None)
