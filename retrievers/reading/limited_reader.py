"""Read documents within a budget of time and memory.

Documents are untrusted: a PDF of two kilobytes can keep a parser busy for hours. Parsers whose work is not bounded by
the size of their input run in a process of their own (`worker`), which is ended when a document exceeds its budget.
The others run here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.retrievers.reading.documents import (
    SourceFile,
    document_of,
    read_text,
    require_known_kind,
    shown,
)
from cachecraft_rag.retrievers.reading.office import require_reader
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types.documents import Document, Scalar

if TYPE_CHECKING:
    from cachecraft_rag.retrievers.reading.worker import Answer

_LIMITED_SUFFIXES = frozenset(
    {".pdf", ".docx", ".pptx", ".xlsx", ".epub", ".csv", ".tsv", ".json", ".jsonl"}
)
_START_SECONDS = 120.0  # to import the parsers, on a busy machine
_LONGEST_LOSSES = 500  # characters
logger = logging.getLogger("cachecraft_rag.retrievers.reading")
_WORKER = "cachecraft_rag.retrievers.reading.worker"


@dataclass(frozen=True, slots=True)
class ReadingBudget:
    """Budget of one document.

    A page of a real PDF takes some 0.05 s, and the parsers of Word files and JSON some ten bytes of memory per byte.

    cpu_seconds      CPU time of a small document, in seconds
    cpu_seconds_per_mib  more CPU time for each MiB of the file
    waiting_factor   elapsed time per CPU second, for a busy machine; the limit where CPU time cannot be limited
    memory_bytes     memory of the reading process for a small document
    memory_per_byte  more memory for each byte of the file
    """

    cpu_seconds: int = 7
    cpu_seconds_per_mib: int = 10
    waiting_factor: int = 4
    memory_bytes: int = 400 << 20
    memory_per_byte: int = 10

    def seconds_for(self, nbytes: int) -> int:
        """Return the CPU time that a file of `nbytes` bytes may take, in whole seconds. Raises nothing."""
        return self.cpu_seconds + self.cpu_seconds_per_mib * nbytes // (1 << 20)

    def memory_for(self, nbytes: int) -> int:
        """Return the memory, in bytes, that the process may have for a file of `nbytes` bytes. Raises nothing."""
        return self.memory_bytes + self.memory_per_byte * nbytes


class ReaderStartError(DocumentError):
    """The process that reads documents cannot be started, so nothing is known of the document."""


class LimitedReader(Closeable):
    """Reads documents, one at a time; close it at the end. The process is started by the first document that needs it.

    Not thread-safe.
    """

    def __init__(self, budget: ReadingBudget | None = None) -> None:
        self._budget = budget or ReadingBudget()
        self._worker: subprocess.Popen[bytes] | None = None

    def read(
        self, file: SourceFile, data: bytes, *, left_out: Callable[[str], None] = logger.warning
    ) -> Document:
        """Return the document in the bytes of a file, read within the budget. The file itself is not opened.

        Waits for the reading process, at most `waiting_factor` times the CPU time, and up to 120 seconds for its start.
        A process that exceeds the budget or crashes is ended, and the next document that needs one starts another.
        Text, Markdown, reStructuredText and HTML are read in this process, and have no budget; so is every file if
        `sys.executable` is empty or the module of the reading process is missing.

        Args:
            file: path and doc_id.
            data: the file's bytes.
            left_out: called with a sentence about what the document lacks; by default it is logged as a warning.

        Raises:
            DocumentError: the file is of a kind that is not read or larger than `LARGEST_FILE`, holds no text or none
                that can be read, or exceeds the budget; or its parser crashed.
            ReaderStartError: the reading process cannot be started; it is a DocumentError, too.
            MissingReaderError: the package that reads this kind of file is not installed; it is an ImportError.
        """
        require_known_kind(file.path, len(data))
        suffix = file.path.suffix.lower()
        require_reader(suffix)
        if suffix not in _LIMITED_SUFFIXES or not _can_start():
            text, metadata, losses = read_text(file.path, data)
            return self._document(file, text, metadata, losses, left_out)
        answer = self._ask(file.path, data)
        if "exceeded" in answer:
            raise DocumentError(
                f"{shown(file.path)}: skipped: {self._reason(answer['exceeded'], len(data))}"
            )
        if "error" in answer:
            raise DocumentError(answer["error"])
        return self._document(file, answer["text"], answer["metadata"], answer["losses"], left_out)

    @staticmethod
    def _document(
        file: SourceFile,
        text: str,
        metadata: dict[str, Scalar],
        losses: Sequence[str],
        left_out: Callable[[str], None],
    ) -> Document:
        document = document_of(file, text, metadata)
        if losses:
            left_out(f"{shown(file.path)}: was read without {'; '.join(losses)[:_LONGEST_LOSSES]}")
        return document

    def close(self) -> None:
        """End the reading process, if one runs. The next `read` starts another. Raises nothing."""
        worker = self._worker
        self._worker = None
        if worker is not None:
            _end(worker)

    def _ask(self, path: Path, data: bytes) -> Answer:
        """Return the answer of the process about one document; it is ended if it takes too long."""
        seconds = self._budget.seconds_for(len(data))
        header = {
            "name": shown(path),
            "bytes": len(data),
            "cpu_seconds": seconds,
            "memory_bytes": self._budget.memory_for(len(data)),
        }
        worker = self._started()
        assert worker.stdin is not None
        timer = threading.Timer(seconds * self._budget.waiting_factor, worker.kill)
        timer.daemon = True
        timer.start()
        answered = b""
        try:
            worker.stdin.write(json.dumps(header).encode() + b"\n" + data)
            worker.stdin.flush()
            answered = _line(worker)
        except OSError:
            pass  # it has ended while the document was being written
        finally:
            timer.cancel()
            if not answered.endswith(b"\n"):
                self.close()
        if not answered.endswith(b"\n"):
            is_killed = sys.platform == "win32" or worker.returncode in (
                -signal.SIGKILL,
                -signal.SIGXCPU,
            )
            return {"exceeded": "time" if is_killed else "parser"}
        answer: Answer = json.loads(answered)
        if answer.get("exceeded") == "memory":
            self.close()  # what it holds would count against the next document
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._worker is None:
            self._worker = _start()
        return self._worker

    def _reason(self, exceeded: str, nbytes: int) -> str:
        """Return why a document was skipped, and what to do."""
        if exceeded == "parser":
            return "its parser crashed; save it again with another program, or leave it out"
        limit = f"{self._budget.seconds_for(nbytes)} s of CPU time"
        if exceeded == "memory":
            limit = f"{self._budget.memory_for(nbytes) >> 20} MiB of memory"
        return f"reading it takes more than {limit}; save it again with another program, split it, or leave it out"


def parse_document(file: SourceFile, data: bytes) -> Document:
    """Return the document in the bytes of a file, read in a process that then ends; for several, use a `LimitedReader`.

    The file itself is not opened. Text, Markdown, reStructuredText and HTML are read in this process, without a budget.

    Args:
        file: path and doc_id.
        data: the file's bytes.

    Raises:
        DocumentError: the file is of a kind that is not read or larger than `LARGEST_FILE`, holds no text or none that
            can be read, or exceeds the budget of `ReadingBudget()`; or its parser crashed.
        ReaderStartError: the reading process cannot be started; it is a DocumentError, too.
        MissingReaderError: the package that reads this kind of file is not installed; it is an ImportError.
    """
    with LimitedReader() as reader:
        return reader.read(file, data)


def _can_start() -> bool:
    return bool(sys.executable) and find_spec(_WORKER) is not None


def _start() -> subprocess.Popen[bytes]:
    """Start the process, and wait until it can read documents. Raises ReaderStartError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER],  # -P: never import from the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # a Ctrl-C is for the program that reads, which then closes this one
            start_new_session=True,
        )
    except OSError as error:
        raise ReaderStartError(
            f"the process that reads documents cannot be started ({error.strerror or error})"
        ) from error
    timer = threading.Timer(_START_SECONDS, worker.kill)
    timer.daemon = True
    timer.start()
    ready = _line(worker)
    timer.cancel()
    if not ready:
        _end(worker)
        raise ReaderStartError(
            f"the process that reads documents ended before it could read (exit code {worker.returncode}); "
            f"try `python -m {_WORKER}`"
        )
    return worker


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what it did not read any more
                pipe.close()


def _line(worker: subprocess.Popen[bytes]) -> bytes:
    assert worker.stdout is not None
    return worker.stdout.readline()
