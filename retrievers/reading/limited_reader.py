"""Read documents within a budget of time and memory, in a process that is ended when one exceeds it.

Documents are untrusted: a PDF of two kilobytes can keep a parser busy for hours. The process is this module, run as
`python -m`: it reads a line of JSON and the bytes of a document, writes a line of JSON, and goes on with the next
document until its input ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.retrievers.reading.documents import (
    SourceFile,
    printable,
    read_text,
    require_known_kind,
)
from cachecraft_rag.retrievers.reading.markup import Reading
from cachecraft_rag.retrievers.reading.office import require_reader
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types.documents import Document

_UNLIMITED_SUFFIXES = (".txt", ".md", ".markdown", ".rst")
_START_SECONDS = 120.0  # to import the parsers, on a busy machine
_LONGEST_LOSSES = 500  # characters
_MODULE = "cachecraft_rag.retrievers.reading.limited_reader"
logger = logging.getLogger("cachecraft_rag.retrievers.reading")


@dataclass(frozen=True, slots=True)
class ReadingBudget:
    """Budget of one document: CPU time and memory for a small one, and more for each MiB or byte of the file.

    A page of a real PDF takes some 0.05 s, and the parsers of Word files and JSON some ten bytes of memory per byte.
    Elapsed time is limited to the CPU seconds times `waiting_factor`, CPU time not on Windows, memory on Linux only.
    """

    cpu_seconds: int = 7
    cpu_seconds_per_mib: int = 10
    waiting_factor: int = 4  # elapsed time per CPU second, for a busy machine
    memory_bytes: int = 400 << 20
    memory_per_byte: int = 10


class ReaderStartError(DocumentError):
    """The process that reads documents cannot be started, so nothing is known of the document."""


class LimitedReader(Closeable):
    """Reads documents, one at a time, in a process that the first one starts. Not thread-safe."""

    def __init__(self, budget: ReadingBudget | None = None) -> None:
        self._budget = budget or ReadingBudget()
        self._worker: subprocess.Popen[bytes] | None = None

    def read(
        self, file: SourceFile, data: bytes, *, left_out: Callable[[str], None] = logger.warning
    ) -> Document:
        """Return the document in the bytes of a file, read within the budget. The file itself is not opened.

        Text, Markdown and reStructuredText are read in this process, and have no budget; so is every file if
        `sys.executable` is empty. `left_out` is called with a sentence about what the document lacks.

        Raises DocumentError for a file that cannot be read, exceeds the budget or has no text; ReaderStartError; and
        MissingPackageError.
        """
        require_known_kind(file.path, len(data))
        suffix = file.path.suffix.lower()
        require_reader(suffix)
        if suffix in _UNLIMITED_SUFFIXES or not sys.executable:
            reading = read_text(file.path, data)
        else:
            reading = self._ask(file.path, data)
        name = printable(file.path)
        if not reading.text.strip():
            scan = "if it is a scan, run OCR first (for example ocrmypdf)"
            advice = scan if "pages" in reading.metadata else "add some or remove it"
            raise DocumentError(f"{name}: holds no text; {advice}")
        if reading.losses:
            left_out(f"{name}: was read without {'; '.join(reading.losses)[:_LONGEST_LOSSES]}")
        return Document(file.doc_id, reading.text, reading.metadata)

    def close(self) -> None:
        """End the reading process, if one runs. The next `read` starts another."""
        worker = self._worker
        self._worker = None
        if worker is not None:
            _end(worker)

    def _ask(self, path: Path, data: bytes) -> Reading:
        """Return the answer of the process about one document; it is ended if it takes too long."""
        budget = self._budget
        seconds = budget.cpu_seconds + budget.cpu_seconds_per_mib * len(data) // (1 << 20)
        memory = budget.memory_bytes + budget.memory_per_byte * len(data)
        header = {"name": printable(path), "bytes": len(data), "seconds": seconds, "memory": memory}
        worker = self._worker = self._worker or _start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        line = b""
        try:
            # it may end while the document is being written
            with _ended_after(worker, seconds * budget.waiting_factor), suppress(OSError):
                worker.stdin.write(json.dumps(header).encode() + b"\n" + data)
                worker.stdin.flush()
                line = worker.stdout.readline()
        finally:
            if not line.endswith(b"\n"):
                line = b""
                self.close()
        if not line:
            killed = (-signal.SIGKILL, -signal.SIGXCPU) if sys.platform != "win32" else (1,)
            line = b'["time"]' if worker.returncode in killed else b'["crash"]'
        kind, *answer = json.loads(line)
        if kind == "reading":
            return Reading(*answer)
        if kind == "error":
            raise DocumentError(answer[0])
        self.close()  # the memory that it holds would count against the next document
        reasons = {
            "time": f"reading it takes more than {seconds} s of CPU time",
            "memory": f"reading it takes more than {memory >> 20} MiB of memory",
            "crash": "its parser crashed",
        }
        advice = "save it again with another program, split it, or leave it out"
        raise DocumentError(f"{printable(path)}: skipped: {reasons[kind]}; {advice}")


def _start() -> subprocess.Popen[bytes]:
    """Start the process, and wait until it can read documents. Raises ReaderStartError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],  # -P: never import from the working directory
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
    with _ended_after(worker, _START_SECONDS):
        assert worker.stdout is not None
        is_ready = bool(worker.stdout.readline())
    if is_ready:
        return worker
    _end(worker)
    raise ReaderStartError(
        f"the process that reads documents ended before it could read (exit code {worker.returncode}); "
        f"try `python -m {_MODULE}`"
    )


@contextmanager
def _ended_after(worker: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, worker.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    with suppress(OSError):  # what it did not read any more
        worker.communicate()


def _serve() -> None:
    """Read documents from the standard input, each within its limits, and answer each on the standard output."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # a parser that prints must not write into the answers
    print('["ready"]', file=answers, flush=True)
    while header := sys.stdin.buffer.readline():
        request = json.loads(header)
        data = sys.stdin.buffer.read(request["bytes"])
        _limit(request["seconds"], request["memory"])
        answer: tuple[object, ...]
        try:
            answer = ("reading", *read_text(Path(request["name"]), data))
        except (MemoryError, DocumentError) as error:
            is_memory = any(isinstance(cause, MemoryError) for cause in (error, error.__cause__))
            answer = ("memory",) if is_memory else ("error", str(error))
        print(json.dumps(answer), file=answers, flush=True)


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process to so much more CPU time, and to so many bytes in all; not on Windows."""
    if sys.platform == "win32":
        return
    import resource

    def lower(kind: int, limit: int) -> None:
        _, hard = resource.getrlimit(kind)  # -1: none
        resource.setrlimit(kind, (limit if hard < 0 else min(limit, hard), hard))

    usage = resource.getrusage(resource.RUSAGE_SELF)
    lower(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + cpu_seconds)
    if sys.platform == "linux":  # others ignore it, or count what was mapped and never touched
        lower(resource.RLIMIT_AS, memory_bytes)


if __name__ == "__main__":
    _serve()
