"""Metrics and logs: every request and chunk is counted once, with its reason, over real HTTP."""

from __future__ import annotations

import copy
import json
import logging
import re
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cachecraft_rag.engine.config import EngineTuning
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import BusyError, ConfigError, ContextLengthError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.observability.metrics import EngineCollector, serve_metrics
from cachecraft_rag.observability.request_log import JsonFormatter
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from tests.engines import Asking, Turn, waiting

CHUNKS = [
    Chunk(f"{thing} number {n}: empty it before you clean it with vinegar.")
    for n, thing in enumerate(("The kettle", "The toaster", "The fridge", "The oven", "The washer"))
]
QUESTION = "How do I clean Gundula's kettle?"
SHORT = SamplingParams(max_new_tokens=4)
# takes what is stored, also where computing is faster
LAYERWISE = ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise"))


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


Scraped = dict[str, list[Sample]]


def scrape(port: int) -> Scraped:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: Scraped = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    return found


def by(samples: list[Sample], *labels: str) -> dict[Any, float]:
    """Sums by these labels, without what was never seen."""
    sums: Counter[Any] = Counter()
    for sample in samples:
        sums[
            tuple(sample.labels[label] for label in labels)
            if len(labels) > 1
            else sample.labels[labels[0]]
        ] += sample.value
    return {name: value for name, value in sums.items() if value}


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    """A tiny Llama that writes letters, so that each token is a piece of the answer."""
    random = tiny_decoder("Llama")
    model, tokenizer = copy.deepcopy(random.model), random.tokenizer
    letters = [
        tokenizer.decode([token]).isalpha() and tokenizer.decode([token]).isascii()
        for token in range(260)
    ]
    with torch.no_grad():
        model.lm_head.weight[~torch.tensor(letters)] = 0.0
    return Decoder(model, tokenizer, name="tiny Llama of letters")


@pytest.fixture
def engine(decoder: Decoder, tmp_path: Path) -> Iterator[Engine]:
    with (
        ChunkCacheStore.open(tmp_path / "caches", host_bytes=0) as store,
        Engine(decoder, store, config=LAYERWISE, new_variants="off") as opened,
    ):
        yield opened


def ask(engine: Engine, *chunks: Chunk, **options: Any) -> None:
    for _ in engine.stream(QUESTION, chunks, sampling=SHORT, **options):
        pass


def written(engine: Engine) -> None:
    engine.write_back.wait_for(list(engine.write_back.pending()))
    assert engine.store.flush(60)


def mixture(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits, misses, damaged files, dropped captures, cancelled, failed and refused requests: 9, with 23 chunks."""
    store = engine.store
    ask(engine, *CHUNKS[:3])  # misses
    written(engine)
    ask(engine, *CHUNKS[:3])  # hits
    ask(engine, CHUNKS[2], CHUNKS[0], CHUNKS[1])  # reused elsewhere
    files = sorted((store.root / "variants").rglob("*.safetensors"))
    files[0].write_bytes(b"damaged")
    files[1].unlink()
    ask(engine, *CHUNKS[:3])
    written(engine)
    ask(engine, *CHUNKS[:3], config=ReuseConfig(reuse=False, capture=False))
    monkeypatch.setattr(store._writer, "_queue_bytes", 1)
    ask(engine, CHUNKS[3])  # its capture is dropped
    written(engine)
    cancelled = engine.stream(QUESTION, CHUNKS[:4], sampling=SamplingParams(max_new_tokens=50))
    next(cancelled)
    cancelled.close()
    with monkeypatch.context() as broken:
        broken.setattr(engine.decoder, "next_logits", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(engine, *CHUNKS[:3])
    with pytest.raises(ContextLengthError):
        engine.stream(QUESTION * 200, CHUNKS[:3], sampling=SHORT)
    assert engine.settle(400)  # what the cancelled request computed is dropped in the background


def test_requests_that_wait_and_that_are_turned_away(decoder: Decoder, tmp_path: Path) -> None:
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(decoder, store, new_variants="off", tuning=EngineTuning(max_waiting=1)) as engine,
        serve_metrics(engine, 0) as server,
    ):
        with Turn(engine, CHUNKS[:3]) as first:
            second = Asking(engine, CHUNKS[:3])
            waiting(engine, 1)
            with pytest.raises(BusyError):
                ask(engine, *CHUNKS[:3])
            found = scrape(server.port)
        assert by(found["cachecraft_turned_away_total"], "reason") == {"full": 1}
        assert [sample.value for sample in found["cachecraft_waiting_requests"]] == [1]
        assert by(found["cachecraft_requests_total"], "outcome") == {"failed": 1}
        assert by(found["cachecraft_chunks_total"], "outcome", "reason") == {
            ("failed", "failed"): 3
        }
        first.ended()
        second.ended()
        found = scrape(server.port)
    assert [sample.value for sample in found["cachecraft_waiting_requests"]] == [0]
    assert by(found["cachecraft_requests_total"], "outcome") == {"failed": 1, "length": 2}


def test_sums_over_reasons_are_the_requests_and_their_chunks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture(engine, monkeypatch)
    with serve_metrics(engine, 0) as server:
        found = scrape(server.port)
        again = scrape(server.port)
    assert again.keys() == found.keys()
    assert by(found["cachecraft_requests_total"], "outcome") == {
        "length": 6,
        "closed": 1,
        "failed": 1,
        "refused": 1,
    }
    chunks = by(found["cachecraft_chunks_total"], "outcome", "reason")
    assert sum(chunks.values()) == 3 + 3 + 3 + 3 + 3 + 1 + 4 + 3
    assert chunks["failed", "failed"] == 3
    assert chunks["computed", "reuse_off"] == 3
    assert chunks["computed", "not_loaded"] >= 1
    assert chunks["computed", "not_stored"] >= 3 + 1
    assert (
        sum(count for (outcome, _), count in chunks.items() if outcome in ("exact", "reused")) >= 6
    )
    stats = engine.store.stats()
    captures = by(found["cachecraft_captures_total"], "outcome", "reason")
    assert captures["dropped", "queue_full"] == stats.captures["queue_full"] >= 1
    assert captures["stored", ""] == stats.captures["stored"]
    assert sum(captures.values()) == sum(stats.captures.values())
    failures = by(found["cachecraft_load_failures_total"], "tier", "reason")
    assert failures == {("disk", "damaged"): 1, ("disk", "missing"): 1}
    assert by(found["cachecraft_loads_total"], "tier") == stats.loads
    evictions = by(found["cachecraft_evictions_total"], "tier", "reason")
    assert evictions["disk", "damaged"] == 2
    assert stats.captures["stored"] - sum(evictions.values()) == stats.variants
    assert by(found["cachecraft_bytes"], "tier")["disk"] == stats.disk_bytes
    assert by(found["cachecraft_budget_bytes"], "tier")["disk"] == stats.disk_budget
    assert found["cachecraft_store_readable"] == [Sample({}, 1.0)]


def test_times_and_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = engine.stream(QUESTION, CHUNKS[:2], sampling=SHORT)
    for _ in first:
        pass
    with serve_metrics(engine, 0) as server:
        found = scrape(server.port)
        kinds = by(found["cachecraft_tokens_total"], "kind")
        stats = first.stats
        assert sum(kinds.values()) == stats.tokens_prompt + stats.tokens_generated
        assert kinds["generated"] == stats.tokens_generated == 4
        for name, seconds in (("ttft", stats.ttft_s), ("request", stats.total_s)):
            assert found[f"cachecraft_{name}_seconds_count"] == [Sample({}, 1.0)]
            assert found[f"cachecraft_{name}_seconds_sum"][0].value == pytest.approx(seconds)
            buckets = {
                sample.labels["le"]: sample.value
                for sample in found[f"cachecraft_{name}_seconds_bucket"]
            }
            assert buckets["+Inf"] == 1
            assert all(count == (seconds <= float(end)) for end, count in buckets.items())
        assert (
            found["cachecraft_decode_rows_sum"]
            == found["cachecraft_decode_rows_count"]
            == [Sample({}, 3.0)]
        )
        # steps of one row each
        assert {sample.value for sample in found["cachecraft_decode_rows_bucket"]} == {3.0}
        mixture(engine, monkeypatch)
        found = scrape(server.port)
        # all but the refused one
        assert found["cachecraft_request_seconds_count"][0].value == 1 + 8
        assert found["cachecraft_ttft_seconds_count"][0].value == 1 + 7  # nor the failed one


@pytest.fixture
def families(decoder: Decoder, tmp_path: Path) -> list[Metric]:
    """The metrics of an engine with a remote, after one request, as Prometheus reads them."""
    with (
        ChunkCacheStore.open(tmp_path / "caches", remote="memory://") as store,
        Engine(decoder, store) as opened,
    ):
        ask(opened, CHUNKS[0])
        registry = CollectorRegistry()
        registry.register(EngineCollector(opened))
        return list(text_string_to_metric_families(generate_latest(registry).decode()))


def test_the_guide_names_every_metric(families: list[Metric]) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/production.md").read_text("utf-8")
    names = {family.name for family in families}
    assert len(names) >= 20
    missing = {
        name for name in names if name not in guide and f"…_{name.rsplit('_', 1)[1]}" not in guide
    }
    assert not missing


ROOT = Path(__file__).resolve().parents[2]


def test_the_operators_page_explains_every_panel_and_alert() -> None:
    page = (ROOT / "docs/guides/operating.md").read_text("utf-8")
    folder = ROOT / "examples/monitoring"
    panels = json.loads((folder / "dashboard.json").read_text())["panels"]
    alerts = yaml.safe_load((folder / "alerts.yml").read_text())["groups"][0]["rules"]
    for title in [panel["title"] for panel in panels]:
        assert f"\n| {title} |" in page, title
    for name in [alert["alert"] for alert in alerts]:
        assert f"`{name}`" in page, name


def test_dashboard_and_alerts_ask_for_what_is_there(families: list[Metric]) -> None:
    folder = ROOT / "examples/monitoring"
    panels = json.loads((folder / "dashboard.json").read_text())["panels"]
    rules = [
        rule
        for group in yaml.safe_load((folder / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    asked = [target["expr"] for panel in panels for target in panel["targets"]] + [
        rule["expr"] for rule in rules
    ]
    there: dict[str, list[Mapping[str, str]]] = {}
    for sample in (sample for family in families for sample in family.samples):
        there.setdefault(sample.name, []).append(sample.labels)
    # Counters of what has not happened yet, and their labels.
    there |= {
        "cachecraft_load_failures_total": [{"tier": "", "reason": ""}],
        "cachecraft_loads_total": [{"tier": ""}],
    }
    assert len(set(asked)) == len(asked) >= 15
    for expression in asked:
        assert expression.count("(") == expression.count(")")
        grouped = {
            label
            for labels in re.findall(r"by \(([^)]*)\)", expression)
            for label in labels.split(", ")
        }
        found = re.findall(r"\b(cachecraft_\w+)(?:\{(\w+)(=~|!=|=)\"([^\"]*)\"\})?", expression)
        assert found or "vllm:" in expression, expression  # tests/vllm/test_http.py has these
        for name, label, _sign, values in found:
            assert name in there, name
            assert not label or {one[label] for one in there[name]} >= set(values.split("|")), (
                expression
            )
            assert grouped - {"instance"} <= there[name][0].keys(), expression


def test_a_closed_store_leaves_the_numbers_of_requests(engine: Engine) -> None:
    ask(engine, CHUNKS[0])
    engine.close()
    engine.store.close()
    with serve_metrics(engine, 0) as server:
        found = scrape(server.port)
    assert found["cachecraft_store_readable"] == [Sample({}, 0.0)]
    assert by(found["cachecraft_requests_total"], "outcome") == {"length": 1}
    assert "cachecraft_variants" not in found


def test_an_application_registers_the_collector_in_its_own_registry(engine: Engine) -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    assert registry.get_sample_value("cachecraft_requests_total", {"outcome": "end"}) == 0
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(EngineCollector(engine))


def test_a_port_that_is_taken_is_an_error_with_advice(engine: Engine) -> None:
    with (
        serve_metrics(engine, 0) as server,
        pytest.raises(ConfigError, match="choose another port"),
    ):
        serve_metrics(engine, server.port)
    with pytest.raises(ConfigError, match="port"):
        serve_metrics(engine, 70_000)
    with pytest.raises(ConfigError, match=r"cannot be served at a\.\.b:0"):
        serve_metrics(engine, 0, address="a..b")  # no name of a host


def test_every_request_is_one_line_of_json_without_private_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="cachecraft_rag")
    mixture(engine, monkeypatch)
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert not any("\n" in line for line in lines)
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in found)
    requests = [line for line in found if line.get("event") == "request"]
    assert Counter(line["finish"] for line in requests) == {"length": 6, "closed": 1, "failed": 1}
    assert len({line["request_id"] for line in requests}) == 8
    assert [line["error"] for line in requests if "error" in line] == ["ZeroDivisionError"]
    logged = Counter((one["outcome"], one["reason"]) for line in requests for one in line["chunks"])
    value = engine.request_counts.registry.get_sample_value
    assert all(
        value("cachecraft_chunks_total", {"outcome": outcome, "reason": reason}) == count
        for (outcome, reason), count in logged.items()
    )
    reasons = {
        (line["event"], line["reason"])
        for line in found
        if line.get("event", "request") != "request"
    }
    assert {
        ("load_failed", "damaged"),
        ("load_failed", "missing"),
        ("eviction", "damaged"),
    } <= reasons
    assert ("capture_dropped", "queue_full") in reasons
    text = "\n".join(lines)
    assert not any(private in text for private in ("Gundula", "vinegar", "toaster"))


def test_a_record_of_anything_else_is_json_too() -> None:
    record = logging.makeLogRecord(
        {
            "msg": "said %s",
            "args": ("so",),
            "levelname": "INFO",
            "cachecraft": {"nan": float("nan")},
        }
    )
    found = json.loads(JsonFormatter().format(record))
    assert (found["message"], found["nan"]) == ("said so", None)
