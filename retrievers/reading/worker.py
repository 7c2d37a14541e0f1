"""The process that runs parsers of untrusted documents, so that a document's time and memory have a limit.

Run as `python -m cachecraft_rag.retrievers.reading.worker` by `limited_reader.LimitedReader`. It reads a line of JSON
and the bytes of a document from its standard input, writes a line of JSON to its standard output, and goes on with the
next document until its input ends. Whatever exceeds a limit ends this process or raises MemoryError in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, TypedDict

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.retrievers.reading.documents import read_text
from cachecraft_rag.types.documents import Scalar


def main() -> None:
    """Read documents from the standard input and answer each on the standard output; return None when the input ends.

    It first answers {"ready": true}, sends what parsers print to the standard error, and limits the CPU time and memory
    of this process (on Windows neither, outside Linux no memory) for each document. Errors of a document are in its
    answer. Raises ValueError for a header that is no JSON and if the system allows less than such a limit, KeyError for
    one that lacks a field or names a kind of file that is not read, BrokenPipeError if the answers are not read any
    more, and MissingReaderError if the package that reads the file is not installed. MemoryError passes if there is no
    memory for the bytes of a document or for its answer.
    """
    documents = sys.stdin.buffer
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # a parser that prints must not write into the answers
    _write(answers, {"ready": True})
    while header := documents.readline():
        request = json.loads(header)
        data = documents.read(request["bytes"])
        _limit(request["cpu_seconds"], request["memory_bytes"])
        _write(answers, _answer(Path(request["name"]), data))


class Answer(TypedDict, total=False):
    """Answer about one document; without `text`, one of the last two fields says why.

    text, metadata  the document
    losses          what it lacks
    exceeded        name of the limit that it exceeds
    error           message of a DocumentError
    """

    text: str
    metadata: dict[str, Scalar]
    losses: list[str]
    exceeded: str
    error: str


def _answer(path: Path, data: bytes) -> Answer:
    try:
        text, metadata, losses = read_text(path, data)
        return {"text": text, "metadata": metadata, "losses": list(losses)}
    except MemoryError:
        return {"exceeded": "memory"}
    except DocumentError as error:
        is_memory = isinstance(error.__cause__, MemoryError)
        return {"exceeded": "memory"} if is_memory else {"error": str(error)}


def _write(answers: BinaryIO, answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process to so much more CPU time, and to so many bytes in all; not on Windows."""
    if sys.platform == "win32":
        return
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_seconds = int(usage.ru_utime + usage.ru_stime) + 1
    _, most_seconds = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = _at_most(used_seconds + cpu_seconds, most_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most_seconds))
    if sys.platform == "linux":  # others ignore it, or count what was mapped and never touched
        _, most_bytes = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_at_most(memory_bytes, most_bytes), most_bytes))


def _at_most(limit: int, hard_limit: int) -> int:
    """Return the limit, lowered to the system's hard limit if there is one (-1: none)."""
    return limit if hard_limit < 0 else min(limit, hard_limit)


if __name__ == "__main__":
    main()
