"""`cachecraft chat`."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, Unpack

from cachecraft_rag.cli import ask
from cachecraft_rag.cli.console import err, out, print_error
from cachecraft_rag.cli.first_sentence import first_sentence
from cachecraft_rag.cli.options import ANSWER_KEYS, ENGINE_KEYS, takes
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.errors import BusyError, ConfigError, ContextLengthError, ServerError

if TYPE_CHECKING:
    from cachecraft_rag.observability.stats import RequestStats
    from cachecraft_rag.prompt.builder import Turn
    from cachecraft_rag.rag import AnswerStream, AskOptions, CacheCraft

HELP = "Ask a question. /sources, /new, /quit; Ctrl-C stops an answer"
KEYS = (*ENGINE_KEYS, *ANSWER_KEYS, "metrics_port", "new_variants", "audit", "quality_target")


@takes(*KEYS, defaults={"max_new_tokens": 256}, chosen=ask.AskingOptions)
def chat(*, settings: Settings, chosen: ask.AskingOptions) -> None:
    """Chat about the indexed documents.

    /sources lists the sources of the last answer, /new clears the conversation, /quit leaves; Ctrl-C stops an answer.
    If a server fails, the conversation goes on without that question. Exit code 0 at /quit and at the end of the input,
    130 for Ctrl-C at the prompt; 2 if no document is indexed, or a setting, the model or the server cannot be used.
    """
    # Raises the errors of `AskingOptions.open`, `metrics` and `converse`; see `app.main` for exit codes.
    with chosen.open(settings) as (rag, asking), metrics(rag, settings["metrics_port"]):
        conversation = Conversation(rag, brief=chosen.is_brief(settings), **asking)
        # input that is not UTF-8 must not end the conversation
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        with suppress(ImportError):
            import_module("readline")  # if installed, it gives `input` arrow keys and a history
        err.print(HELP, style="dim")
        ask.print_calibration(rag)
        converse(conversation)


@contextmanager
def metrics(rag: CacheCraft, port: int | None) -> Iterator[None]:
    """Serve the engine's metrics on 127.0.0.1 in the block, and print the address. Port 0: any free one; None: not."""
    if port is None:
        yield
        return
    from cachecraft_rag.observability.metrics import serve_metrics

    with serve_metrics(rag.engine, port) as server:
        err.print(f"metrics: http://127.0.0.1:{server.port}/metrics", style="dim")
        yield


def converse(conversation: Conversation) -> None:
    """Read lines of stdin, after the prompt "> ", and handle them until the input ends, or until /quit or /exit."""
    while True:
        try:
            typed = input("> ").strip()
        except EOFError:
            out.print()
            return
        if typed in ("/quit", "/exit"):
            return
        conversation.take(typed)


class Conversation:
    """The turns so far, and the handling of the next line.

    Args:
        rag: answers the questions.
        brief: end answers after their first sentence.
        asking: options of every question, as `CacheCraft.stream` takes them; history and session are its own.
    """

    def __init__(self, rag: CacheCraft, *, brief: bool, **asking: Unpack[AskOptions]) -> None:
        self._rag = rag
        self._brief = brief
        self._asking = asking
        self._session = uuid.uuid4().hex
        self._history: list[Turn] = []
        self._last: AnswerStream | None = None

    def take(self, typed: str) -> None:
        """Handle a stripped line: a command, or a question to answer. An empty line does nothing.

        /new forgets the turns, /sources prints the sources of the last answer, and any other single word after a slash
        prints the help. If a question is refused, or fails because of a server or other requests, the error is printed,
        and the conversation goes on without it. Ctrl-C ends only the answer; its text so far stays in the conversation.
        """
        if typed == "/new":
            self._history.clear()
        elif typed == "/sources":
            if self._last is None:
                err.print("nothing has been answered yet", style="dim")
            else:
                ask.print_sources(self._last)
        elif typed.startswith("/") and " " not in typed:
            err.print(HELP, style="dim")
        elif typed:
            self._answer(typed)

    def _answer(self, question: str) -> None:
        """Answer and add the turn to the history. Ctrl-C ends only the answer; its text so far is kept."""
        said = ""
        try:
            asking: AskOptions = {
                **self._asking,
                "history": self._history,
                "session": self._session,
            }
            stream = self._rag.stream(question, **asking)
            has_failed = False
            try:
                ask.print_stream(stream, brief=self._brief)
                ask.print_stats(stream.stats)
                print_searched(stream.stats)
            except (BusyError, ServerError):
                has_failed = True
                if stream.text:
                    out.print()  # so that the message begins a line
                raise
            finally:
                stream.close()
                said = self._shown(stream.text)
                # an answer stopped before its first token has no sources to list
                if stream.stats.finish is not None and not has_failed:
                    self._last = stream
        except KeyboardInterrupt:
            err.print("\nstopped", style="dim")
        except ContextLengthError as error:
            print_error(error, "/new forgets the conversation.")
        # the documents that match the filter were removed by another process
        except ConfigError as error:
            print_error(error)
        # the server may answer the next question; a broken answer does not become a part of the conversation
        except (BusyError, ServerError) as error:
            said = ""
            print_error(error, "The conversation goes on; ask again.")
        if said:
            self._history += [("user", question), ("assistant", said)]

    def _shown(self, text: str) -> str:
        """Return the part of an answer that was printed."""
        sentence = first_sentence(text) if self._brief else None
        return sentence or text


def print_searched(stats: RequestStats) -> None:
    """Print to stdout the text that a follow-up was searched with besides the question; nothing without such a text."""
    if len(stats.searched) > 1:
        out.print(f"searched for it, and for: {stats.searched[-1]}", style="dim")
