"""The doctor: each advice in the state that it is about, and silence where all is well."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cachecraft_rag.cli.app import app
from cachecraft_rag.engine.doctor import Facts, examine, findings, read_speed
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk

CHUNKS = [Chunk(f"Page {n}: empty the kettle before you clean it.") for n in range(3)]
SHORT = SamplingParams(max_new_tokens=1)
MakeEngine = Callable[..., Engine]
about_cpus = pytest.mark.skipif(
    os.environ.get("TESTS_DEVICE", "cpu") != "cpu", reason="advice about a CPU"
)


@pytest.fixture
def make_engine(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(family: str = "Llama", **settings: Any) -> Engine:
        small = {"host_bytes": 1 << 20, "disk_bytes": 1 << 20}
        store = ChunkCacheStore.open(tmp_path / "caches", **(small | settings))
        made.append(
            Engine(
                tiny_decoder(family),
                store,
                config=ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise")),
            )
        )
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
    """Subjects of advice, but for those that depend on the machine that runs the test."""
    machine = {"threads", "dtype", "disk", "kernels"} if level == "advice" else set()
    return {one.about for one in findings(facts) if one.level == level} - machine


@pytest.fixture
def facts(make_engine: MakeEngine) -> Facts:
    engine = make_engine()
    ask(engine)
    ask(engine)
    return examine(engine)


def test_what_is_well_needs_no_advice(facts: Facts) -> None:
    assert advised(facts) == advised(facts, "error") == set()
    assert (facts.dtype, facts.store.variants, facts.problems) == ("float32", 4, ())
    assert facts.compute_speed > 0
    assert facts.disk_bytes_per_s is not None
    # bytes of a token
    assert facts.load_speed == pytest.approx(facts.disk_bytes_per_s / (4 * 2 * 2 * 16 * 4))


def test_a_store_that_is_full(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ask(engine)
    used = engine.store.stats()
    engine.store.close()
    assert advised(examine(make_engine(disk_bytes=used.disk_bytes))) == {"disk budget"}


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


@about_cpus
def test_threads_that_are_not_the_cores(facts: Facts) -> None:
    assert facts.threads == torch.get_num_threads()
    for threads in (facts.cores, facts.cores + 1):
        subjects = {one.about for one in findings(replace(facts, threads=threads))}
        assert ("threads" in subjects) == (threads != facts.cores)


@about_cpus
def test_threads_chosen_by_omp_num_threads_are_no_advice(facts: Facts) -> None:
    chosen = replace(facts, threads=facts.cores + 1, omp_num_threads=str(facts.cores + 1))
    (advice,) = [advice for advice in findings(chosen) if advice.about == "threads"]
    assert (advice.level, advice.change) == ("ok", "")
    assert "OMP_NUM_THREADS" in advice.what


@about_cpus
def test_float32_where_the_cpu_knows_better(facts: Facts) -> None:
    cases = (
        (True, "float32", True),
        (False, "float32", False),
        (True, "bfloat16", False),
        (False, "bfloat16", True),
    )
    for fast, dtype, wanted in cases:
        subjects = {one.about for one in findings(replace(facts, fast_bfloat16=fast, dtype=dtype))}
        assert ("dtype" in subjects) == wanted


def test_a_folder_that_cannot_be_written(facts: Facts, tmp_path: Path) -> None:
    assert read_speed(tmp_path / "nowhere") is None
    assert advised(replace(facts, read_only=True, disk_bytes_per_s=None, load_speed=None)) == {
        "folder"
    }


def test_loading_that_is_slower_than_computing(facts: Facts) -> None:
    for times, level in ((2.0, "ok"), (0.5, "advice")):
        found = {
            one.about: one
            for one in findings(replace(facts, load_speed=times * facts.compute_speed))
        }
        assert found["disk"].level == level
        assert f"{times:.1f} times as fast as computing" in found["disk"].what


def test_the_command(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    options = ["-m", str(tmp_path / "model"), "-s", str(tmp_path / "store"), "--host-bytes", "1 MB"]
    done = CliRunner().invoke(app, ["doctor", *options, "--json"], catch_exceptions=False)
    printed = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0
    assert "index" in {one["about"] for one in printed["findings"]}
    assert printed["facts"]["compute_speed"] > 0
    assert not (tmp_path / "store").exists()  # it looks, and leaves nothing
    assert not list(tmp_path.glob(".cachecraft*"))
    done = CliRunner().invoke(
        app, ["doctor", "-m", str(tmp_path / "no model"), "-s", str(tmp_path)]
    )
    assert done.exit_code == 1
    assert "error model" in done.stdout
