"""Traces: the spans of real requests, and what a collector receives over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cachecraft_rag import CacheCraft, ReuseConfig, SamplingParams
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import BusyError, ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.observability.tracing import configure_tracing
from cachecraft_rag.planning.config import ReuseMethod
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.retriever import open_index
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk, Document

QUESTION = "How often is Gundula's kettle descaled?"
PASSAGES = ("Descale the kettle every 8 weeks.", "The toaster has a drawer for crumbs.")
CHUNKS = [Chunk(text) for text in PASSAGES]
SHORT = SamplingParams(max_new_tokens=6, temperature=0.5, seed=1)
LAYERWISE = ReuseConfig(
    method=ReuseMethod(loading="layerwise")
)  # takes what is stored, also where computing is faster


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans of the test, in memory. A process takes one provider only, so it is put back afterwards."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield memory
    provider.shutdown()


@pytest.fixture
def engine(decoder_of_letters: Callable[..., Decoder], tmp_path: Path) -> Iterator[Engine]:
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(decoder_of_letters(), store, reuse=LAYERWISE, new_variants="off") as opened,
    ):
        yield opened


def tree(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    """The spans of one trace by their path from the root."""
    assert len({span.context.trace_id for span in spans}) == 1
    by_id = {span.context.span_id: span for span in spans}

    def path(span: ReadableSpan) -> str:
        above = by_id.get(span.parent.span_id) if span.parent is not None else None
        return span.name if above is None else f"{path(above)} > {span.name}"

    paths = {path(span): span for span in spans}
    assert len(paths) == len(spans)
    return paths


def attributes(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_has_a_span_for_each_part(engine: Engine, exporter: InMemorySpanExporter) -> None:
    "".join(engine.stream(QUESTION, CHUNKS, sampling=SHORT))
    engine.settle()
    exporter.clear()
    generation = engine.stream(QUESTION, CHUNKS[::-1], sampling=SHORT)
    "".join(generation)
    stats = generation.stats
    assert stats.tokens_reused > 0 < stats.tokens_recomputed
    spans = tree(exporter.get_finished_spans())
    name = f"chat {engine.decoder.name}"
    prefill = f"{name} > cachecraft.prefill"
    assert set(spans) == {
        name,
        f"{name} > cachecraft.plan",
        prefill,
        f"{prefill} > cachecraft.load",
        f"{name} > cachecraft.decode",
    }
    tokens = {
        "cachecraft.tokens.reused": stats.tokens_reused,
        "cachecraft.tokens.recomputed": stats.tokens_recomputed,
        "cachecraft.tokens.computed": stats.tokens_computed,
    }
    assert attributes(spans[name]) == tokens | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "cachecraft",
        "gen_ai.request.model": engine.decoder.name,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": stats.request_id,
        "gen_ai.response.finish_reasons": (stats.finish,),
        "gen_ai.response.time_to_first_chunk": stats.ttft_s,
        "gen_ai.usage.input_tokens": stats.tokens_prompt,
        "gen_ai.usage.output_tokens": stats.tokens_generated,
        "gen_ai.usage.cache_read.input_tokens": stats.tokens_reused,
    }
    assert attributes(spans[prefill]) == tokens
    plan = attributes(spans[f"{name} > cachecraft.plan"])
    assert plan == {
        "cachecraft.queue_s": stats.queue_s,
        "cachecraft.chunk.ids": tuple(chunk.chunk_id for chunk in stats.chunks),
        "cachecraft.chunk.outcomes": ("reused", "reused"),
        "cachecraft.chunk.reasons": tuple(str(chunk.reason_code) for chunk in stats.chunks),
        "cachecraft.chunk.tokens": tuple(chunk.tokens for chunk in stats.chunks),
        "cachecraft.chunk.recomputed": tuple(chunk.recomputed for chunk in stats.chunks),
        "cachecraft.chunk.computed": (0, 0),
    }
    assert attributes(spans[f"{prefill} > cachecraft.load"]) == {
        "cachecraft.tiers": ("host", "host")
    }
    assert attributes(spans[f"{name} > cachecraft.decode"]) == {
        "gen_ai.usage.output_tokens": stats.tokens_generated,
    }
    assert spans[name].status.is_ok or spans[name].status.is_unset


def test_the_parts_begin_and_end_where_the_statistics_say(
    engine: Engine, exporter: InMemorySpanExporter
) -> None:
    for _ in range(2):
        exporter.clear()
        generation = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
        "".join(generation)
        engine.settle()
    stats = generation.stats
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans[f"chat {engine.decoder.name}"]
    plan, prefill, load, decode = (
        spans[f"cachecraft.{part}"] for part in ("plan", "prefill", "load", "decode")
    )
    assert plan.start_time == root.start_time
    assert prefill.start_time == load.start_time == plan.end_time
    assert decode.start_time == prefill.end_time
    assert decode.end_time == root.end_time
    lengths = {
        root: stats.total_s,
        plan: stats.queue_s + stats.plan_s,
        prefill: stats.load_s + stats.prefill_s,
    }
    for span, length in (lengths | {load: stats.load_s}).items():
        assert seconds(span) == pytest.approx(length, abs=1e-6), span.name


def test_an_applications_span_is_the_parent_in_threads_and_event_loops(
    engine: Engine, exporter: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer("application")
    with tracer.start_as_current_span("in a thread"):
        generation = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
    # read where another span, or none, is current
    thread = threading.Thread(target=list, args=(generation,))
    thread.start()
    thread.join()

    async def read() -> None:
        with tracer.start_as_current_span("in a loop"):
            generation = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
        async for _ in generation:
            pass

    asyncio.run(read())
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    roots = [span for span in spans if span.name.startswith("chat ")]
    assert [names[span.parent.span_id] for span in roots if span.parent is not None] == [
        "in a thread",
        "in a loop",
    ]


@pytest.fixture
def rag(engine: Engine, tmp_path: Path) -> Iterator[CacheCraft]:
    embedder = Embedder()
    with open_index(tmp_path / "store", embedder) as index:
        assert isinstance(index, FaissStore)
        opened = CacheCraft(engine, index, embedder)
        opened.add_documents(
            [Document(f"page {place}", text) for place, text in enumerate(PASSAGES)]
        )
        yield opened


def test_retrieval_comes_first_in_the_trace_of_its_request(
    rag: CacheCraft, exporter: InMemorySpanExporter
) -> None:
    rag.ask(QUESTION, top_k=2, sampling=SHORT)
    asyncio.run(rag.aask(QUESTION, top_k=1, sampling=SHORT))
    spans = exporter.get_finished_spans()
    traces = [
        tree([span for span in spans if span.context.trace_id == trace_id])
        for trace_id in dict.fromkeys(span.context.trace_id for span in spans)
    ]
    assert len(traces) == 2
    for number, paths in zip((2, 1), traces, strict=True):
        name = f"chat {rag.engine.decoder.name}"
        root, retrieval, plan = (
            paths[path] for path in (name, f"{name} > retrieval", f"{name} > cachecraft.plan")
        )
        assert attributes(retrieval) == {
            "gen_ai.operation.name": "retrieval",
            "gen_ai.provider.name": "cachecraft",
            "gen_ai.retrieval.top_k": number,
            "cachecraft.passages": number,
        }
        assert retrieval.start_time == root.start_time
        assert retrieval.end_time is not None
        assert plan.start_time is not None
        assert retrieval.end_time <= plan.start_time
    exporter.clear()
    # the retrieval before it is not its own
    "".join(rag.engine.stream(QUESTION, CHUNKS, sampling=SHORT))
    assert "retrieval" not in {span.name for span in exporter.get_finished_spans()}


def test_no_text_is_in_a_span(rag: CacheCraft, exporter: InMemorySpanExporter) -> None:
    history = [("user", "Is Gundula at home?"), ("assistant", "She is out.")]
    answer = rag.ask(QUESTION, history=history, session="session of ann", sampling=SHORT)
    assert len(answer.text.strip()) >= 4
    written = json.dumps([json.loads(span.to_json()) for span in exporter.get_finished_spans()])
    assert answer.stats.request_id in written
    for text in (
        "Gundula",
        "kettle",
        "weeks",
        "toaster",
        "She is out",
        "session of ann",
        answer.text.strip(),
    ):
        assert text not in written


def test_requests_that_fail_or_are_closed_are_traced_too(
    engine: Engine, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
    next(generation)
    recorded: Future[object] = Future()
    later = engine._later

    def run(function: Callable[..., object], *arguments: Any) -> None:
        later(lambda: recorded.set_result(function(*arguments)))

    generation._later = run
    generation.close()
    recorded.result(60)
    (closed,) = (span for span in exporter.get_finished_spans() if span.name.startswith("chat "))
    assert attributes(closed)["gen_ai.response.finish_reasons"] == ("closed",)
    assert closed.status.status_code is trace.StatusCode.UNSET
    exporter.clear()

    def refuse(*_: object, **__: object) -> None:
        raise BusyError("as many requests are waiting as may")

    monkeypatch.setattr("cachecraft_rag.serving.admission.AdmissionQueue.enter", refuse)
    with pytest.raises(BusyError):
        next(engine.stream(QUESTION, CHUNKS, sampling=SHORT))
    (failed,) = exporter.get_finished_spans()
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert attributes(failed)["error.type"] == "BusyError"
    assert "gen_ai.usage.input_tokens" not in attributes(failed)


def test_a_provider_that_fails_takes_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no collector")

    provider = TracerProvider()
    monkeypatch.setattr(provider, "get_tracer", fail)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    assert "".join(engine.stream(QUESTION, CHUNKS, sampling=SHORT))
    assert "The spans of a request could not be recorded" in caplog.text
    assert "no collector" in caplog.text


# -- without a provider -----------------------------------------------------------------------------------------------

ASK = """
import sys
from pathlib import Path
{before}
from cachecraft_rag import Chunk, Engine
with Engine.from_pretrained("model", store="store") as engine:
    assert "".join(engine.stream("How often?", [Chunk("Descale the kettle.")]))
{after}
"""


@pytest.fixture(scope="module")
def model(
    decoder_of_letters: Callable[..., Decoder], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a tiny model."""
    folder = tmp_path_factory.mktemp("model")
    decoder = decoder_of_letters()
    decoder.model.save_pretrained(folder / "model")
    decoder.tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"),
        ("sys.modules['opentelemetry'] = None  # importing it now fails", ""),
        (
            "from opentelemetry import trace",
            "assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)",
        ),
    ],
    ids=["not imported", "not installed", "no provider"],
)
def test_without_a_provider_answers_need_nothing_of_opentelemetry(
    model: Path, before: str, after: str
) -> None:
    code = ASK.format(
        before=before, after=f"{after}\nassert 'opentelemetry.sdk' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=model, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


# -- over the network -------------------------------------------------------------------------------------------------


class Collector:
    """Receives traces over HTTP as a collector does: OTLP's protobuf messages at /v1/traces."""

    def __init__(self) -> None:
        received: list[ExportTraceServiceRequest] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.received = received
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def plain(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    """Attributes of a received message that are single values."""
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}


def command(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `cachecraft` in a process."""
    names = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [str(Path(sys.executable).with_name("cachecraft")), *arguments],
        cwd=folder,
        env=names | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_collector_receives_the_trace_of_a_command(model: Path) -> None:
    (model / "docs").mkdir()
    (model / "docs" / "kettle.md").write_text(PASSAGES[0])
    options = ("--model", "model", "--store", "asked")
    assert command(model, "index", "docs", *options).returncode == 0
    with Collector() as collector:
        ask = ("ask", QUESTION, *options, "--max-tokens", "4", "--json")
        done = command(model, *ask, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
        off = command(
            model, *ask, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_TRACES_EXPORTER="none"
        )
    assert done.returncode == off.returncode == 0, done.stderr + off.stderr
    stats = json.loads(done.stdout)["stats"]
    resources = [resource for message in collector.received for resource in message.resource_spans]
    assert {plain(resource.resource.attributes)["service.name"] for resource in resources} == {
        "cachecraft"
    }
    spans = {
        span.name: span
        for resource in resources
        for scope in resource.scope_spans
        for span in scope.spans
    }
    root = spans["chat model"]
    assert plain(root.attributes)["gen_ai.response.id"] == stats["request_id"]
    assert plain(root.attributes)["gen_ai.usage.input_tokens"] == stats["tokens_prompt"]
    assert set(spans) == {"chat model", "retrieval"} | {
        f"cachecraft.{part}" for part in ("plan", "prefill", "load", "decode")
    }
    assert {span.trace_id for span in spans.values()} == {root.trace_id}
    assert spans["retrieval"].parent_span_id == root.span_id
    assert not any(
        text.encode() in message.SerializeToString()
        for message in collector.received
        for text in PASSAGES
    )


def test_a_collector_that_cannot_be_used_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = trace.get_tracer_provider()
    configure_tracing()  # no endpoint is named
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is not http/protobuf"):
        configure_tracing()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'cachecraft-rag\[otel\]'"):
        configure_tracing()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    configure_tracing()
    assert trace.get_tracer_provider() is provider


def test_a_provider_of_the_application_stays_even_with_another_protocol(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = trace.get_tracer_provider()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    configure_tracing()
    assert trace.get_tracer_provider() is provider


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"), ("OTEL_BSP_MAX_QUEUE_SIZE", "-1")],
)
def test_a_variable_that_opentelemetry_refuses_is_an_error_that_says_what_to_do(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = trace.get_tracer_provider()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="refuses the value of one of its variables"):
        configure_tracing()
    assert trace.get_tracer_provider() is provider
