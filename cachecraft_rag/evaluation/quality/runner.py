"""An evaluation: every method answers every question over the same store; each measurement is written at once."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.quality.conditions import Embed, Origins, condition_named, origins_of
from cachecraft_rag.evaluation.quality.measuring import Record, Trial, measure, reference_of
from cachecraft_rag.evaluation.quality.records import RecordLog
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types import Progress, digest

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.engine.new_variants import NewVariants, When
    from cachecraft_rag.evaluation.compression.base import Compressor
    from cachecraft_rag.evaluation.formats.dataset import Dataset, Question

# Nothing is evicted: the chunk-caches a method finds must not depend on how often other methods have used them.
VARIANTS_PER_CHUNK = 10_000
_CACHES = ".caches-"


@dataclass(frozen=True)
class Settings:
    """What to measure, and how.

    origin         a name of `conditions.CONDITIONS`
    warmup         with the origin "stream": the first N questions are asked but not measured (Cache-Craft §5.1.2)
    answer_tokens  longest answer, in tokens
    seed           of the origin prefixes and of the order of methods
    """

    trials: tuple[Trial, ...]
    origin: str = "unrelated"
    warmup: int = 20
    answer_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        condition_named(self.origin)
        if not self.trials or self.answer_tokens < 1 or self.warmup < 0:
            raise ConfigError("an evaluation needs a method, answers of 1 token or more, and a warm-up of 0 or more")

    def measured(self, dataset: Dataset) -> tuple[Question, ...]:
        """The questions without those of the warm-up; ConfigError if none is left."""
        warmup = self._warmup
        if warmup >= len(dataset.questions):
            raise ConfigError(
                f"the warm-up takes {warmup} of {len(dataset.questions)} questions and leaves none to measure; raise "
                "--limit or lower --warmup"
            )
        return dataset.questions[warmup:]

    @property
    def _warmup(self) -> int:
        return self.warmup if condition_named(self.origin).behind is None else 0

    def describe(self, engine: Engine, dataset: Dataset) -> dict[str, Any]:
        """Everything that the measurements depend on, as plain values."""
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
            "correction": None if engine.correction is None else engine.correction.checksum,
            "threads": torch.get_num_threads(),
            "dataset": dataset.name,
            "data_digest": digest(*asked, *(chunk.chunk_id for one in dataset.documents for chunk in one)),
            "questions": len(dataset.questions),
            "origin": self.origin,
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
) -> Iterator[Engine]:
    """An engine with the model and an empty store in a hidden folder inside `folder`, which is removed afterwards.

    Raises:
        ModelNotFoundError, UnsupportedModelError, StoreError, ConfigError: each says what to do.
    """
    from cachecraft_rag.engine.decoder import Decoder
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.engine.self_check import self_check
    from cachecraft_rag.store import ChunkCacheStore

    decoder = Decoder.load(model, dtype=dtype, device=device)
    self_check(decoder)
    own_device = None if decoder.device.type == "cpu" else str(decoder.device)
    with (
        scratch_folder(folder) as caches,
        ChunkCacheStore.open(caches, variants_per_chunk=VARIANTS_PER_CHUNK, device=own_device) as store,
        Engine(decoder, store, best_last=False, new_variants=new_variants) as engine,
    ):
        yield engine


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder`, removed afterwards. Folders that killed processes left there are removed too."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_CACHES}*"):
            if not _lives(left.name.removeprefix(_CACHES).partition("-")[0]):
                shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f"{_CACHES}{os.getpid()}-", dir=folder))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error}); choose another folder with --out, or --store of calibrate"
        ) from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _lives(pid: str) -> bool:
    """Whether a process with this id runs on this machine."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True


def compressors_of(
    engine: Engine, trials: Sequence[Trial], *, lingua2_model: str | None = None
) -> dict[str, Compressor]:
    """The compressors that the trials need, by `Method.compression`.

    Raises:
        ConfigError: lingua2 is wanted without a model, or its package is missing.
        ModelNotFoundError: that model cannot be loaded.
    """
    wanted = {trial.method.compression for trial in trials}
    found: dict[str, Compressor] = {}
    if "mapreduce" in wanted:
        from cachecraft_rag.evaluation.compression.mapreduce import MapReduce

        found["mapreduce"] = MapReduce(engine)
    if "lingua2" in wanted:
        from cachecraft_rag.evaluation.compression.lingua2 import PUBLISHED, Lingua2

        if lingua2_model is None:
            raise ConfigError(f"lingua2 needs its own model: add --lingua2-model {PUBLISHED}")
        found["lingua2"] = Lingua2(lingua2_model, tokenizer=engine.decoder.tokenizer, device=str(engine.decoder.device))
    return found


def evaluate(
    engine: Engine,
    dataset: Dataset,
    settings: Settings,
    *,
    log: RecordLog,
    compressors: Mapping[str, Compressor] | None = None,
    embed: Embed | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Record]:
    """Measure what the log does not hold yet; returns all its records.

    Args:
        engine: from `open_engine`, with an empty store. Every run captures chunk-caches anew; with the origin "stream"
            that includes those of questions that an earlier run has measured.
        compressors: from `compressors_of`.

    Raises:
        ConfigError: the warm-up leaves no question to measure, or this data cannot provide the origin condition.
    """
    measured = settings.measured(dataset)
    run = _Run(engine, settings, log, compressors or {}, progress, total=len(measured) * len(settings.trials))
    run.tell("")
    if run.complete:
        return log.records
    origins = origins_of(
        condition_named(settings.origin),
        engine,
        dataset,
        seed=settings.seed,
        answer_tokens=settings.answer_tokens,
        embed=embed,
    )
    for question in dataset.questions[: -len(measured)]:
        run.tell("warm-up")
        origins.after(question)
    for question in measured:
        run.ask(question, origins)
    return log.records


class _Run:
    """One run through the questions."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        log: RecordLog,
        compressors: Mapping[str, Compressor],
        progress: Callable[[Progress], None] | None,
        *,
        total: int,
    ) -> None:
        self._engine, self._settings, self._log = engine, settings, log
        self._compressors, self._progress, self._total = compressors, progress, total
        self._done = {(record.question_id, record.label) for record in log.records}
        self._warm = False

    @property
    def complete(self) -> bool:
        return len(self._done) >= self._total

    def tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(Progress(len(self._done), self._total, what))

    def ask(self, question: Question, origins: Origins) -> None:
        """Measure one question with the trials that the log lacks, then bring the store up to date."""
        # A different order for each question, so that no method always profits from what another has warmed up.
        order = list(self._settings.trials)
        random.Random(f"{self._settings.seed}/{question.question_id}").shuffle(order)
        missing = [trial for trial in order if (question.question_id, trial.label) not in self._done]
        if missing:
            self.tell("computing chunk-caches")
            origins.before(question)
            self.tell("full prefill")
            self._measure(question, missing)
        origins.after(question)

    def _measure(self, question: Question, trials: Sequence[Trial]) -> None:
        engine, tokens = self._engine, self._settings.answer_tokens
        if not self._warm:  # the first requests of a process take longer
            reference_of(engine, question, answer_tokens=tokens)
            engine.score_answer(
                question.text, question.passages, max_new_tokens=tokens, config=ReuseConfig(capture=False)
            )
            self._warm = True
        reference = reference_of(engine, question, answer_tokens=tokens)
        for trial in trials:
            self.tell(trial.label)
            compressor = self._compressors.get(trial.method.compression or "")
            self._log.append(measure(engine, reference, trial, compressor=compressor))
            self._done.add((question.question_id, trial.label))
        self.tell("")


def _ids(question: Question) -> list[str]:
    return [chunk.chunk_id for chunk in question.passages]


def _plain(config: ReuseConfig) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in asdict(config).items()}
