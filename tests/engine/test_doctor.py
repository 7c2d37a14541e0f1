"""The doctor: each advice in the state that it is about, and silence where all is well."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cachecraft_rag.cli.app import app
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.doctor import Facts, RemoteFacts, examine, findings, measure_disk
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.engine.metrics import read_counts, serve_metrics
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.remote import RemoteConfig
from cachecraft_rag.types import Chunk

CHUNKS = [Chunk(f"Page {n}: empty the kettle before you clean it.") for n in range(3)]
SHORT = SamplingParams(max_new_tokens=1)
MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(family: str = "Llama", **settings: Any) -> Engine:
        small = {"host_bytes": 1 << 20, "disk_bytes": 1 << 20}
        store = ChunkCacheStore.open(tmp_path / "caches", **(small | settings))
        made.append(Engine(tiny_decoder(family), store, config=ReuseConfig(alpha=0.3, loading="layerwise")))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        engine.store.close()


def ask(engine: Engine, **options: Any) -> None:
    for _ in engine.stream("How?", CHUNKS, sampling=SHORT, **options):
        pass
    engine.write_back.wait_for(list(engine.write_back.pending()))
    assert engine.store.flush(60)


def advised(facts: Facts, level: str = "advice") -> set[str]:
    """What there is advice about, but for what the machine decides that runs the test."""
    machine = {"threads", "dtype", "disk", "remote", "free disk", "memory"} if level == "advice" else set()
    return {one.about for one in findings(facts) if one.level == level} - machine


@pytest.fixture
def facts(make_engine: MakeEngine) -> Facts:
    engine = make_engine()
    ask(engine)
    ask(engine)
    return examine(engine)


def test_what_is_well_needs_no_advice(facts: Facts) -> None:
    assert advised(facts) == advised(facts, "error") == set()
    assert facts.model.fingerprint
    assert (facts.model.dtype, facts.model.attention, facts.model.kv_bytes) == ("float32", "torch", 4 * 2 * 2 * 16 * 4)
    assert facts.model.tokens_per_s > 0
    assert facts.store.read_bytes_per_s
    assert facts.store.problems == ()
    assert facts.chunks == {("computed", "not_stored"): 3, ("exact", ""): 3}


def test_a_store_that_is_full(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ask(engine)
    used = engine.store.stats()
    engine.store.close()
    limits = {"disk_bytes": used.disk_bytes, "max_variants": used.variants}
    assert advised(examine(make_engine(**limits))) == {"disk budget", "number of variants"}


def test_budgets_larger_than_the_machine(make_engine: MakeEngine) -> None:
    facts = examine(make_engine(disk_bytes=1 << 60, host_bytes=1 << 60))
    assert {"free disk", "memory"} <= {one.about for one in findings(facts)}


def test_a_damaged_file_is_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ask(engine)
    next((engine.store.root / "variants").rglob("*.safetensors")).write_bytes(b"damaged")
    assert advised(examine(engine, check=False), "error") == set()
    facts = examine(engine)
    assert advised(facts, "error") == {"check"}
    assert "check --repair" in next(one.change for one in findings(facts) if one.about == "check")


def test_a_store_of_another_model(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ask(engine)
    engine.store.close()
    assert advised(examine(make_engine("Qwen3"))) == {"other models"}


def test_misses_and_dropped_captures(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(queue_bytes=1)
    ask(engine)
    assert advised(examine(engine)) == {"reason not_stored", "captures dropped: queue_full"}
    for _ in range(3):
        ask(engine, config=ReuseConfig(reuse=False, capture=False))
    facts = examine(engine)
    assert advised(facts) == {"reason reuse_off", "captures dropped: queue_full"}
    with serve_metrics(engine, 0) as server:
        assert read_counts(f"http://127.0.0.1:{server.port}/metrics") == (facts.chunks, facts.captures)


def test_what_is_no_address_of_metrics() -> None:
    for url, says in (("file:///etc/passwd", "no address"), ("http://127.0.0.1:1/metrics", "cannot be read")):
        with pytest.raises(ConfigError, match=says):
            read_counts(url)


def test_threads_that_are_not_the_cores(facts: Facts) -> None:
    assert facts.model.threads == torch.get_num_threads()
    for threads in (facts.model.cores, facts.model.cores + 1):
        model = replace(facts.model, threads=threads)
        told = {one.about for one in findings(replace(facts, model=model))}
        assert ("threads" in told) == (threads != facts.model.cores)


def test_float32_where_the_cpu_knows_better(facts: Facts) -> None:
    for features, dtype, wanted in (
        (("avx2", "amx_bf16"), "float32", True),
        (("avx2",), "float32", False),
        (("avx2", "amx_bf16"), "bfloat16", False),
    ):
        model = replace(facts.model, cpu_features=features, dtype=dtype)
        assert ("dtype" in {one.about for one in findings(replace(facts, model=model))}) == wanted


def test_a_folder_that_cannot_be_written(facts: Facts, tmp_path: Path) -> None:
    assert measure_disk(tmp_path / "nowhere") is None
    store = replace(facts.store, read_only=True, read_bytes_per_s=None)
    assert advised(replace(facts, store=store)) == {"folder"}


def test_loading_that_is_slower_than_computing(facts: Facts) -> None:
    per_token, computed = facts.store.stored_bytes, facts.model.tokens_per_s
    for speed, level in ((2.0, "ok"), (0.5, "advice")):
        store = replace(facts.store, read_bytes_per_s=speed * computed * per_token)
        remote = RemoteFacts("redis://there", speed * computed * facts.model.kv_bytes)
        told = {one.about: one for one in findings(replace(facts, store=store, remote=remote))}
        for about in ("disk", "remote"):
            assert told[about].level == level
            assert f"{speed:.1f} times as fast as computing" in told[about].what


def test_a_remote_is_measured_and_left_as_it_was(make_engine: MakeEngine, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    facts = examine(make_engine(), remote=RemoteConfig(f"file://{shared}"))
    assert facts.remote is not None
    assert facts.remote.problem == ""
    assert facts.remote.bytes_per_s
    assert not list(shared.rglob("*.row"))


def test_a_remote_that_does_not_answer_is_an_error(make_engine: MakeEngine) -> None:
    facts = examine(make_engine(), remote=RemoteConfig("redis://:secret@127.0.0.1:1/0", put_timeout_s=2.0))
    (found,) = [one for one in findings(facts) if one.about == "remote"]
    assert found.level == "error"
    assert "secret" not in found.what


def test_the_command(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    options = ["-m", str(tmp_path / "model"), "-s", str(tmp_path / "store"), "--memory-mb", "1"]
    done = CliRunner().invoke(app, ["doctor", *options, "--json"], catch_exceptions=False)
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0
    assert "index" in {one["about"] for one in told["findings"]}
    assert told["facts"]["model"]["tokens_per_s"] > 0
    assert not (tmp_path / "store").exists()  # it looks, and leaves nothing
    assert not list(tmp_path.glob(".cachecraft*"))
    done = CliRunner().invoke(app, ["doctor", "-m", str(tmp_path / "no model"), "-s", str(tmp_path)])
    assert done.exit_code == 1
    assert "error model" in done.stdout
