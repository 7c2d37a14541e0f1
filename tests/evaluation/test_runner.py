"""Evaluations: resumed ones equal uninterrupted ones, the stream goes on as in use, all settings are described."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.evaluation.measuring import Record, methods_named, trials_of
from cachecraft_rag.evaluation.origins import CONDITIONS
from cachecraft_rag.evaluation.records import FILE, RecordLog
from cachecraft_rag.evaluation.runner import (
    VARIANTS_PER_CHUNK,
    EvaluationSettings,
    evaluate,
    open_engine,
    scratch_folder,
)
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.progress import Progress

MakeEngine = Callable[[], AbstractContextManager[Engine]]
TRIALS = trials_of(
    methods_named(["full_recompute", "full_cache", "prefix_cache", "default"]), [0.2, 0.5]
)
SETTINGS = EvaluationSettings(TRIALS, warmup=2, answer_tokens=6, seed=5)


@pytest.fixture
def new_engine(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> MakeEngine:
    """Opens an engine over an empty store, as every run does."""

    @contextmanager
    def opened() -> Iterator[Engine]:
        with (
            scratch_folder(tmp_path) as folder,
            ChunkCacheStore.open(folder, variants_per_chunk=VARIANTS_PER_CHUNK) as store,
            Engine(tiny_decoder("Llama"), store, best_last=False) as engine,
        ):
            yield engine

    return opened


def run(
    new_engine: MakeEngine, dataset: Dataset, settings: EvaluationSettings, folder: Path, **how: Any
) -> list[Record]:
    with new_engine() as engine, RecordLog(folder, settings.describe(engine, dataset)) as log:
        return list(evaluate(engine, dataset, settings, log=log, **how))


def untimed(records: list[Record]) -> list[dict[str, Any]]:
    """The records, in an order and without the times that are their own."""
    return sorted(
        (asdict(replace(record, ttft_s=0.0, reference_ttft_s=0.0)) for record in records),
        key=lambda fields: (fields["question_id"], fields["method"], fields["ratio"] or 0.0),
    )


class StopAfter:
    """Ctrl-C once so many measurements are done."""

    def __init__(self, done: int) -> None:
        self._done = done

    def __call__(self, progress: Progress) -> None:
        if progress.done >= self._done:
            raise KeyboardInterrupt


@pytest.mark.parametrize("origin", ["documents", "stream", "unrelated"])
def test_a_stopped_evaluation_goes_on_and_comes_out_the_same(
    new_engine: MakeEngine, town_dataset: Dataset, tmp_path: Path, origin: str
) -> None:
    settings = replace(SETTINGS, origin=CONDITIONS[origin])
    whole = run(new_engine, town_dataset, settings, tmp_path / "whole")
    for done in (0, 3, 9):  # before anything, within a question, within a later one
        with pytest.raises(KeyboardInterrupt):
            run(new_engine, town_dataset, settings, tmp_path / "parts", progress=StopAfter(done))
    path = tmp_path / "parts" / FILE
    path.write_bytes(path.read_bytes()[:-10])
    resumed = run(new_engine, town_dataset, settings, tmp_path / "parts")
    assert untimed(resumed) == untimed(whole)
    assert len(whole) == len(TRIALS) * (4 if origin == "stream" else 6)


def test_a_complete_evaluation_computes_nothing(
    new_engine: MakeEngine, town_dataset: Dataset, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, origin=CONDITIONS["stream"])
    whole = run(new_engine, town_dataset, settings, tmp_path / "out")
    steps: list[Progress] = []
    again = run(new_engine, town_dataset, settings, tmp_path / "out", progress=steps.append)
    assert again == whole
    assert steps == [Progress(len(whole), len(whole), "")]


def test_methods_take_turns_in_being_first(
    new_engine: MakeEngine, town_dataset: Dataset, tmp_path: Path
) -> None:
    records = run(new_engine, town_dataset, SETTINGS, tmp_path / "out")
    first: dict[str, str] = {}
    for record in records:
        first.setdefault(record.question_id, record.label)
    assert len(first) == 6
    assert len(set(first.values())) > 1


def test_captures_of_the_stream_come_from_the_questions_before(
    new_engine: MakeEngine, town_dataset: Dataset, tmp_path: Path
) -> None:
    found = run(
        new_engine, town_dataset, replace(SETTINGS, origin=CONDITIONS["stream"]), tmp_path / "out"
    )
    computed = {
        record.question_id: record.recomputed for record in found if record.method == "full_cache"
    }
    # Nothing of full reuse is computed but what no question before has asked for.
    known: set[str] = set()
    for question in town_dataset.questions:
        ids = {chunk.chunk_id for chunk in question.passages}
        if question.question_id in computed:
            assert (computed[question.question_id] == 0.0) == (ids <= known), question
        known |= ids
    assert 0.0 in computed.values()
    assert any(value > 0 for value in computed.values())


def test_a_warm_up_that_takes_all_is_refused(
    new_engine: MakeEngine, town_dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="raise --limit or lower --warmup"):
        run(
            new_engine,
            town_dataset,
            replace(SETTINGS, origin=CONDITIONS["stream"], warmup=6),
            tmp_path / "out",
        )


def test_settings_are_checked() -> None:
    for wrong in ({"trials": ()}, {"answer_tokens": 0}, {"warmup": -1}):
        with pytest.raises(ConfigError, match="an evaluation needs"):
            replace(SETTINGS, **wrong)


def test_every_setting_that_changes_measurements_is_described(
    new_engine: MakeEngine, town_dataset: Dataset
) -> None:
    other_gold = replace(
        town_dataset,
        questions=(replace(town_dataset.questions[0], answers=("1",)), *town_dataset.questions[1:]),
    )
    with new_engine() as engine:
        described = SETTINGS.describe(engine, town_dataset)
        assert json.loads(json.dumps(described))["methods"]["default@0.2"]["recompute_ratio"] == 0.2
        others = [
            SETTINGS.describe(engine, other_gold),
            SETTINGS.describe(
                engine, replace(town_dataset, documents=town_dataset.documents[::-1])
            ),
            replace(SETTINGS, seed=6).describe(engine, town_dataset),
            replace(SETTINGS, origin=CONDITIONS["alone"]).describe(engine, town_dataset),
            replace(SETTINGS, answer_tokens=7).describe(engine, town_dataset),
            replace(SETTINGS, trials=TRIALS[:2]).describe(engine, town_dataset),
        ]
        assert all(other != described for other in others)
        # there is none
        assert replace(SETTINGS, warmup=3).describe(engine, town_dataset) == described
    assert described["fingerprint"] == engine.decoder.fingerprint


def test_scratch_folders_go_with_what_killed_processes_left(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = tmp_path / "out" / f".caches-{ended.pid}-x"
    dead.mkdir(parents=True)
    (dead / "file").write_text("x", encoding="utf-8")
    with scratch_folder(tmp_path / "out") as first, scratch_folder(tmp_path / "out") as second:
        assert not dead.exists()
        assert first.exists()  # a running one keeps its folder
        assert first != second
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_the_scratch_folder(tmp_path: Path, kind: signal.Signals) -> None:
    before = signal.signal(kind, signal.SIG_DFL)  # `nohup` makes a process ignore SIGHUP
    try:
        with pytest.raises(SystemExit) as left, scratch_folder(tmp_path):
            signal.raise_signal(kind)
        assert left.value.code == 128 + kind
        assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(kind) == signal.SIG_DFL
    finally:
        signal.signal(kind, before)


def test_a_scratch_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="--out"), scratch_folder(tmp_path / "out"):
        pass


def test_an_engine_opened_for_evaluation_keeps_the_order_of_passages(
    tiny_decoder: Callable[..., Decoder], town_dataset: Dataset, tmp_path: Path
) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    with open_engine(str(tmp_path / "model"), tmp_path / "out") as engine:
        passages = town_dataset.questions[0].passages
        prompt = engine.prompts.build("Why?", passages)
        assert [one.segment_id for one in prompt.segments[1:-1]] == [
            chunk.chunk_id for chunk in passages
        ]
    assert list((tmp_path / "out").iterdir()) == []
