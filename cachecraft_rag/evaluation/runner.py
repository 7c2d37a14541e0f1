"""An evaluation: every method answers every question over the same store; each measurement is written at once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.measuring import Record, Reference, Trial, measure, reference_of
from cachecraft_rag.evaluation.origins import CONDITIONS, DEFAULT_ORIGIN, OriginCondition, Origins
from cachecraft_rag.evaluation.records import RecordLog
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion
    from cachecraft_rag.serving.config import NewVariants, When
    from cachecraft_rag.store import ChunkCacheStore

# Nothing is evicted: the chunk-caches a method finds must not depend on how often other methods have used them.
VARIANTS_PER_CHUNK = 10_000
_CACHES = ".caches-"


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation.

    warmup         with the origin "stream": the first N questions are asked but not measured (Cache-Craft §5.1.2)
    answer_tokens  longest answer, in tokens
    seed           of the origin prefixes and of the order of methods
    """

    trials: tuple[Trial, ...]
    origin: OriginCondition = CONDITIONS[DEFAULT_ORIGIN]
    warmup: int = 20
    answer_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.trials or self.answer_tokens < 1 or self.warmup < 0:
            raise ConfigError(
                "an evaluation needs a method, answers of 1 token or more, and a warm-up of 0 or more"
            )

    def measured(self, dataset: Dataset) -> tuple[EvaluationQuestion, ...]:
        """Return the questions without those of the warm-up (origin "stream"); ConfigError if none is left."""
        warmup = self._warmup
        if warmup >= len(dataset.questions):
            raise ConfigError(
                f"the warm-up takes {warmup} of {len(dataset.questions)} questions and leaves none to measure; raise "
                "--limit or lower --warmup"
            )
        return dataset.questions[warmup:]

    @property
    def _warmup(self) -> int:
        return self.warmup if self.origin.is_stream else 0

    def describe(self, engine: Engine, dataset: Dataset) -> dict[str, object]:
        """Return everything that the measurements depend on, by name, as values that JSON has.

        The model with its dtype, device and torch's threads; a digest of the questions, gold answers and chunks; these
        settings; and under "methods" the settings of reuse of each trial by its label.
        """
        import torch

        asked = [
            part
            for question in dataset.questions
            for part in (question.question_id, question.text, *_ids(question), *question.answers)
        ]
        return {
            "model": engine.decoder.name,
            "fingerprint": engine.decoder.fingerprint,
            "dtype": engine.decoder.layout.dtype,
            "device": str(engine.decoder.device),
            "threads": torch.get_num_threads(),
            "dataset": dataset.name,
            "data_digest": digest(
                *asked, *(chunk.chunk_id for document in dataset.documents for chunk in document)
            ),
            "questions": len(dataset.questions),
            "origin": self.origin.name,
            "warmup": self._warmup,
            "answer_tokens": self.answer_tokens,
            "seed": self.seed,
            "methods": {trial.label: _plain(trial.config) for trial in self.trials},
        }


@contextmanager
def open_engine(
    model: str,
    folder: Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    new_variants: NewVariants | When = "off",
    kind: type[ChunkCacheStore] | None = None,
    reuse: ReuseConfig | None = None,
) -> Iterator[Engine]:
    """Open an engine for the block, with an empty store in a hidden folder inside `folder` that is removed afterwards.

    `folder` is made if it is missing; two machines must not use it at the same time. SIGTERM and SIGHUP end the block
    with SystemExit. The engine keeps the order of the passages (`best_last=False`), and up to `VARIANTS_PER_CHUNK`
    variants of a chunk. `kind` is the class of the store, for experiments that change its look-ups; `reuse` are the
    engine's settings of reuse (None: the defaults). The other arguments are those of `EngineConfig`.
    """
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.model.decoder import Decoder
    from cachecraft_rag.model.self_check import self_check
    from cachecraft_rag.store import ChunkCacheStore as Usual

    decoder = Decoder.load(model, dtype=dtype, device=device)
    self_check(decoder)
    own_device = None if decoder.device.type == "cpu" else str(decoder.device)
    with (
        scratch_folder(folder) as caches,
        (kind or Usual).open(
            caches, variants_per_chunk=VARIANTS_PER_CHUNK, device=own_device
        ) as store,
        Engine(decoder, store, config=reuse, best_last=False, new_variants=new_variants) as engine,
    ):
        yield engine


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Make a folder inside `folder` for the block, which gets its path; it is removed afterwards.

    `folder` is made if it is missing, and stays; ConfigError if it cannot be written. Such folders there of processes
    that do not run on this machine are removed, so machines must not share it. In the main thread SIGTERM and SIGHUP
    raise SystemExit within the block, with the exit codes 143 and 129, unless the program handles or ignores them.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_CACHES}*"):
            if not _is_running(left.name.removeprefix(_CACHES).partition("-")[0]):
                shutil.rmtree(left, ignore_errors=True)
        made = tempfile.TemporaryDirectory(
            prefix=f"{_CACHES}{os.getpid()}-", dir=folder, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror or error}); choose another folder with --out, or --store of "
            "calibrate"
        ) from error
    with made as name, _signals_as_exits():
        yield Path(name)


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit in the main thread, so that folders are removed and progress is saved."""
    kinds = (
        (signal.SIGTERM, signal.SIGHUP)
        if threading.current_thread() is threading.main_thread()
        else ()
    )
    # nohup ignores SIGHUP
    replaced = [kind for kind in kinds if signal.getsignal(kind) is signal.SIG_DFL]
    for kind in replaced:
        signal.signal(kind, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for kind in replaced:
            signal.signal(kind, signal.SIG_DFL)


def _is_running(pid: str) -> bool:
    """True if a process with this id runs on this machine."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True


def evaluate(
    engine: Engine,
    dataset: Dataset,
    settings: EvaluationSettings,
    *,
    log: RecordLog,
    progress: Callable[[Progress], None] = lambda _: None,
) -> list[Record]:
    """Measure every question with every trial, except for the measurements in the log; return the log's `records`.

    Args:
        engine: from `open_engine`, with an empty store. Every run captures its chunk-caches; with the origin "stream"
            also those of questions that an earlier run has measured.
        settings: what is measured, and how chunks are captured.
        log: the open log, made with `settings.describe(engine, dataset)`; it stays open.
        progress: called with the number of measurements so far and in all, and what is done now.
    """
    measured = settings.measured(dataset)
    run = Run(engine, dataset, settings, log=log, progress=progress)
    run.total = len(measured) * len(settings.trials)
    run.show("")
    if len(log.records) >= run.total:
        return log.records
    for question in dataset.questions[: -len(measured)]:
        run.show("warm-up")
        run.origins.after(question)
    for question in measured:
        # A different order for each question, so that no method always profits from what another has warmed up.
        order = list(settings.trials)
        random.Random(f"{settings.seed}/{question.question_id}").shuffle(order)
        run.ask(question, order)
        run.origins.after(question)
    run.show("")
    return log.records


class Run:
    """Measures questions over one store, one trial after another; a measurement in the log is not repeated.

    Args:
        log: every measurement is appended to it; None keeps them in memory only.
        keep_references: keep full prefill's answers for further trials of the same questions, with their logits
            `[answer, vocabulary]` in float32: 3 MB per question for the demo model.

    Attributes:
        total: the number of measurements, for `progress`; 0 until the caller sets it.
        origins: brings the store into the condition's state; `ask` calls its `before`, the caller calls its `after`.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: Dataset,
        settings: EvaluationSettings,
        *,
        log: RecordLog | None = None,
        progress: Callable[[Progress], None] | None = None,
        keep_references: bool = False,
    ) -> None:
        self.origins = Origins(
            settings.origin, engine, dataset, settings.seed, settings.answer_tokens
        )
        self.total = 0
        self._engine = engine
        self._log = log
        self._progress = progress
        self._tokens = settings.answer_tokens
        earlier = log.records if log else ()
        self._records = {(record.question_id, record.label): record for record in earlier}
        self._references: dict[str, Reference] | None = {} if keep_references else None
        self._warm = False

    def show(self, what: str) -> None:
        """Report to `progress` how many of `total` are measured, and what is done now ("" for nothing)."""
        if self._progress is not None:
            self._progress(Progress(min(len(self._records), self.total), self.total, what))

    def ask(self, question: EvaluationQuestion, trials: Sequence[Trial]) -> list[Record]:
        """Return the records of one question, one per trial, in that order; measures those that are missing.

        If one is missing, the question's chunks are captured first as the origin condition says, and full prefill
        answers the question, unless its answer was kept; the first time, two answers for warm-up precede that.
        """
        missing = [
            trial for trial in trials if (question.question_id, trial.label) not in self._records
        ]
        reference = self._reference(question) if missing else None
        for trial in missing:
            assert reference is not None
            self.show(trial.label)
            record = measure(self._engine, reference, trial)
            self._records[question.question_id, trial.label] = record
            if self._log is not None:
                self._log.append(record)
        return [self._records[question.question_id, trial.label] for trial in trials]

    def _reference(self, question: EvaluationQuestion) -> Reference:
        """Full prefill's answer, over chunk-caches that are ready for trials."""
        if self._references is not None and (kept := self._references.get(question.question_id)):
            return kept
        if not self._warm:
            self._warm_up(question)
        self.show("computing chunk-caches")
        self.origins.before(question)
        self.show("full prefill")
        reference = reference_of(self._engine, question, answer_tokens=self._tokens)
        if self._references is not None:
            self._references[question.question_id] = reference
        return reference

    def _warm_up(self, question: EvaluationQuestion) -> None:
        """Answer once before anything counts, because the first requests of a process take longer."""
        self._warm = True
        self.show("warming up")
        reference_of(self._engine, question, answer_tokens=self._tokens)
        started = time.perf_counter()
        self._engine.score_answer(
            question.text,
            question.passages,
            max_new_tokens=self._tokens,
            config=ReuseConfig(capture=False),
        )
        seconds = (time.perf_counter() - started) * (self.total - len(self._records))
        self.show(f"expected to take {timedelta(seconds=round(seconds))}")


def _ids(question: EvaluationQuestion) -> list[str]:
    return [chunk.chunk_id for chunk in question.passages]


def _plain(config: ReuseConfig) -> dict[str, object]:
    return {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in asdict(config).items()
    }
