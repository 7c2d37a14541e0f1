"""`cachecraft chat` when the server that answers fails: the conversation goes on, without the failed question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cachecraft_rag.cli.chat import Conversation
from cachecraft_rag.errors import BusyError, CacheCraftError, ServerError, WaitTimeoutError
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.serving.sampling import SamplingParams


@dataclass
class Stream:
    """An answer that breaks off after its first piece if there is an error."""

    error: CacheCraftError | None
    text: str = ""
    stats: Any = field(
        default_factory=lambda: SimpleNamespace(finish="end", searched=("a question",))
    )

    def __iter__(self) -> Iterator[str]:
        self.text = "Every eight weeks."
        yield self.text
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class AnsweringAtFirst:
    """Answers, fails with each of the errors, and answers again; notes the history that it is given."""

    errors: list[CacheCraftError | None]
    histories: list[list[Turn]] = field(default_factory=list)

    def stream(self, question: str, *, history: Sequence[Turn], **_options: object) -> Stream:
        self.histories.append(list(history))
        return Stream(self.errors.pop(0))


def test_a_failing_server_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cachecraft_rag.cli.ask.print_stats", lambda _stats: None)
    failures: list[CacheCraftError] = [
        ServerError("it went away"),
        BusyError("64 requests wait"),
        WaitTimeoutError("it waited 30 s"),
    ]
    rag: Any = AnsweringAtFirst([None, *failures, None])
    talk: Any = Conversation(rag, brief=False, top_k=1, sampling=SamplingParams())
    for number in range(5):
        talk.take(f"Question {number}?")
        assert talk._last is not None
        assert talk._last.error is None  # /sources lists those of the last whole answer
    shown = capsys.readouterr().err
    assert all(str(error) in shown for error in failures)
    assert shown.count("The conversation goes on") == 3
    first = [("user", "Question 0?"), ("assistant", "Every eight weeks.")]
    assert rag.histories == [[], first, first, first, first]
