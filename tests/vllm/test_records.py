"""Accounts of a server's requests: however an answer ends, statistics and metrics say the same. Needs no vLLM."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from cachecraft_rag.observability.request_counts import RequestCounts
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.serving.request import Request, SegmentReport
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.vllm.messages import FIELD
from cachecraft_rag.vllm.records import RecordingClient, Records, RequestRecord, cached_report

LAYERS = 2
PROMPT = Prompt(
    (
        Segment("system", "s", (1, 2)),
        Segment("chunk", "c", (3, 4, 5, 6)),
        Segment("question", "q", (7, 8)),
    )
)
REPORT: dict[str, Any] = {
    "segments": [
        SegmentReport("exact", variant_id="v").as_dict(),
        SegmentReport("reused", recomputed=1, variant_id="w").as_dict(),
        SegmentReport("computed", Reason.QUESTION).as_dict(),
    ],
    "row_layers": 3 * LAYERS,
}
FILLED = {"reused": 5, "recomputed": 1, "computed": 2}
UNKNOWN = {"reused": 0, "recomputed": 0, "computed": 8}


def output(
    *tokens: int,
    finish: str | None = None,
    stop: Any = None,
    report: dict[str, Any] | None = None,
    cached: int | None = None,
) -> Any:
    """One of vLLM's outputs, as far as it is read."""
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=tokens, finish_reason=finish, stop_reason=stop)],
        metrics=None,
        kv_transfer_params=None if report is None else {FIELD: report},
        finished=finish is not None,
        num_cached_tokens=cached,
    )


# Outputs; how many of them the reader takes, None: all; the report is sent once it is filled; what is expected.
ENDS: dict[str, tuple[list[Any], int | None, bool, str, int, dict[str, int]]] = {
    "length": (
        [output(1), output(2, finish="length", report=REPORT)],
        None,
        False,
        "length",
        2,
        FILLED,
    ),
    "an end token": ([output(1, 2, finish="stop", report=REPORT)], None, False, "end", 1, FILLED),
    "a stop token": (
        [output(1, 2, finish="stop", stop=2, report=REPORT)],
        None,
        False,
        "end",
        1,
        FILLED,
    ),
    "a stop string": (
        [output(1), output(2, finish="stop", stop="x")],
        None,
        True,
        "stop",
        2,
        FILLED,
    ),
    "closed in decode": ([output(1)], 1, True, "closed", 1, FILLED),
    "closed in prefill": ([], 0, False, "closed", 0, {}),
    "closed once it is filled": ([], 0, True, "closed", 0, FILLED),
    "refused by the connector": (
        [output(1, finish="length", report={"refused": "its cache_salt …"})],
        None,
        False,
        "length",
        1,
        UNKNOWN,
    ),
    "refused, and partly in vLLM's prefix cache": (
        [output(1, finish="length", report={"refused": "nothing …"}, cached=4)],
        None,
        False,
        "length",
        1,
        {"reused": 4, "recomputed": 0, "computed": 4},
    ),
    "vLLM aborts it": ([output(1, finish="abort")], None, True, "closed", 1, FILLED),
}


async def served(name: str, records: Records) -> None:
    outputs, taken, early, *_ = ENDS[name]

    async def generate(*_arguments: Any, **_options: Any) -> AsyncIterator[Any]:
        if early:
            records.take(f"ask of {name}", REPORT)
        for one in outputs:
            yield one
        if taken is not None:
            await asyncio.sleep(3600)

    request = Request(PROMPT, ReuseConfig(), SamplingParams(), None, 0.0)
    record = RequestRecord(request, LAYERS, f"ask of {name}")
    answer = RecordingClient(SimpleNamespace(generate=generate), record, records).generate(
        None, None, name
    )

    async def read() -> None:
        async for _ in answer:
            pass

    reader = asyncio.create_task(read())
    if taken is None:
        await reader
        return
    while (
        record.progress.generated < taken
        or (early and not record.report)
        or records.get(name, owner=("", None)) is None
    ):
        await asyncio.sleep(0)
    reader.cancel()  # what vLLM's server does where a client hangs up
    with pytest.raises(asyncio.CancelledError):
        await reader


def test_statistics_and_metrics_agree_however_an_answer_ends() -> None:
    counts, ended = RequestCounts(), list[RequestStats]()

    def end(record: RequestRecord) -> None:
        ended.append(record.stats())
        counts.add(ended[-1])

    records = Records(end)
    for name in ENDS:
        asyncio.run(served(name, records))
    counts.refuse()
    for (name, (_, _, _, finish, generated, tokens)), stats in zip(
        ENDS.items(), ended, strict=True
    ):
        assert (stats.finish, stats.tokens_generated) == (finish, generated), name
        assert (
            stats.tokens_reused + stats.tokens_recomputed + stats.tokens_computed
            == stats.tokens_prompt
            == 8
        ), name
        if tokens:
            assert {kind: getattr(stats, f"tokens_{kind}") for kind in tokens} == tokens, name
        kept = records.get(name, owner=("", None))
        assert kept is not None, name
        assert kept["stats"] == stats.as_dict(), name
    samples = [sample for family in counts.collect() for sample in family.samples]
    counted = {
        one.labels["kind"]: one.value for one in samples if one.name == "cachecraft_tokens_total"
    }
    for kind in ("reused", "recomputed", "computed", "generated"):
        assert counted[kind] == sum(getattr(stats, f"tokens_{kind}") for stats in ended)
    ends = {
        one.labels["outcome"]: one.value
        for one in samples
        if one.name == "cachecraft_requests_total"
    }
    expected = Counter(str(stats.finish) for stats in ended) + Counter(["refused"])
    assert {end: value for end, value in ends.items() if value} == expected


def test_chunks_of_a_refused_request_say_why_they_were_computed() -> None:
    records = Records(lambda _record: None)
    name = "refused by the connector"
    asyncio.run(served(name, records))
    kept: Any = records.get(name, owner=("", None))
    (chunk,) = kept["stats"]["chunks"]
    assert (chunk["outcome"], chunk["reason_code"]) == ("computed", Reason.LEFT_TO_SERVER)
    assert chunk["reason"] == (
        "the server computed the request without chunk-caches: its cache_salt …"
    )
    asyncio.run(served("refused, and partly in vLLM's prefix cache", records))
    kept = records.get("refused, and partly in vLLM's prefix cache", owner=("", None))
    (chunk,) = kept["stats"]["chunks"]
    assert (chunk["outcome"], chunk["reason_code"]) == ("reused", Reason.PREFIX_CACHED)
    assert (chunk["tokens"], chunk["computed"]) == (4, 2)
    assert kept["refused"] == "nothing …"


def test_a_stored_chunk_that_vllm_computed_itself_is_not_called_unknown() -> None:
    report = cached_report(PROMPT, 1, LAYERS, outcome="exact", unused={"c": "too little of it"})
    _, chunk, _ = report["segments"]
    assert (chunk["outcome"], chunk["reason"]) == ("computed", Reason.LEFT_TO_SERVER)
    assert chunk["detail"].endswith("without chunk-caches: too little of it")
    _, chunk, _ = cached_report(PROMPT, 1, LAYERS, outcome="exact")["segments"]
    assert chunk["reason"] == Reason.NOT_STORED


def test_a_request_is_traced_and_vllms_span_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    passed_on: list[dict[str, str]] = []

    async def generate(*_: Any, trace_headers: dict[str, str], **__: Any) -> AsyncIterator[Any]:
        passed_on.append(trace_headers)
        yield output(1, finish="length", report=REPORT)

    async def read(headers: dict[str, str] | None) -> None:
        record = RequestRecord(
            Request(PROMPT, ReuseConfig(), SamplingParams(), None, time.perf_counter()), LAYERS
        )
        client = RecordingClient(
            SimpleNamespace(generate=generate), record, Records(lambda _: None, model="tiny")
        )
        params = SimpleNamespace(max_tokens=7, temperature=0.0, top_p=1.0)
        async for _ in client.generate(None, params, "an id", trace_headers=headers):
            pass

    client_trace = "0af7651916cd43dd8448eb211c80319c"
    asyncio.run(read({"traceparent": f"00-{client_trace}-b7ad6b7169203331-01"}))
    asyncio.run(read(None))
    ended = [span for span in memory.get_finished_spans() if span.name == "chat tiny"]
    for span, headers in zip(ended, passed_on, strict=True):
        assert span.attributes is not None
        counts = {
            name: span.attributes[f"cachecraft.tokens.{name}"]
            for name in ("reused", "recomputed", "computed")
        }
        assert counts == FILLED
        assert span.attributes["gen_ai.request.max_tokens"] == 7
        assert span.attributes["gen_ai.response.id"] == "an id"
        # vLLM's span is a child of this one
        ids = f"{span.context.trace_id:032x}-{span.context.span_id:016x}"
        assert headers["traceparent"][3:-3] == ids
    assert [span.parent is None for span in ended] == [False, True]
    assert f"{ended[0].context.trace_id:032x}" == client_trace


def test_a_request_of_another_tenant_with_the_same_id_hides_no_statistics() -> None:
    def record_of(tenant: str) -> RequestRecord:
        request = Request(PROMPT, ReuseConfig(), SamplingParams(), None, 0.0, namespace=tenant)
        return RequestRecord(request, LAYERS, name=tenant)

    records = Records(lambda _: None)
    ended = record_of("acme")
    records.begin("chatcmpl-1", ended)
    under_way = record_of("bolt")
    records.begin("chatcmpl-1", under_way)
    assert records.get("chatcmpl-1", owner=("acme", None)) is not None
    records.end("chatcmpl-1", ended)
    for owner in (("acme", None), ("bolt", None)):
        assert records.get("chatcmpl-1", owner=owner) is not None
    assert records.get("chatcmpl-1", owner=("cobalt", None)) is None


@pytest.mark.parametrize("numbered", ["chatcmpl-1", "cmpl-1-0", "resp_1_0"])
def test_statistics_are_found_by_the_id_of_the_answer(numbered: str) -> None:
    """vLLM numbers the prompts of completions and responses, and their answers have no number."""
    request = Request(PROMPT, ReuseConfig(), SamplingParams(), None, 0.0)
    records = Records(lambda _: None)
    records.begin(numbered, RequestRecord(request, LAYERS))
    for answer_id in (numbered.removesuffix("-0").removesuffix("_0"), numbered):
        found = records.of_answer(answer_id, owner=("", None))
        assert found is not None
        assert found["id"] == numbered
    assert records.of_answer("cmpl-2", owner=("", None)) is None


@pytest.mark.parametrize("remark", ["", "nothing was captured: alpha would shape chunk-caches"])
def test_the_note_says_why_vllm_computed_a_request(remark: str) -> None:
    record = RequestRecord(
        Request(PROMPT, ReuseConfig(), SamplingParams(), None, 0.0), LAYERS, remark=remark
    )
    assert record.as_dict()["note"] == (remark or None)
    record.note(output(5, finish="stop", report={"refused": "its question is a single token"}))
    note = record.as_dict()["note"]
    assert isinstance(note, str)
    assert note.startswith(remark)
    assert note.endswith("left to vLLM: its question is a single token")
