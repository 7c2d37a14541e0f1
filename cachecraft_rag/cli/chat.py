"""`cachecraft chat`."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.ask import load, print_calibration, print_sources, print_stats, print_stream, require_index
from cachecraft_rag.cli.option_groups import CacheOptions, ComputeOptions, SamplingOptions, takes
from cachecraft_rag.cli.options import DEFAULT_STORE, err, out, print_error
from cachecraft_rag.errors import ContextLengthError

if TYPE_CHECKING:
    from cachecraft_rag.engine.prompt import Turn
    from cachecraft_rag.engine.sampling import SamplingParams
    from cachecraft_rag.engine.stats import RequestStats
    from cachecraft_rag.planning.config import ReuseConfig
    from cachecraft_rag.rag import AnswerStream, CacheCraft
    from cachecraft_rag.retrievers.filters import Where

HELP = "Ask a question. /sources, /new, /quit; Ctrl-C stops an answer"


@takes(compute=ComputeOptions, caches=CacheOptions, sampling=SamplingOptions)
def chat(
    context: typer.Context,
    store: options.Store = DEFAULT_STORE,
    model: options.Model = "demo",
    embeddings: options.Embeddings = None,
    top_k: options.TopK = 5,
    max_new_tokens: options.MaxTokens = 256,
    recompute_ratio: options.Ratio = None,
    where: options.WhereOption = None,
    server: options.Server = None,
    metrics_port: options.MetricsPort = None,
    new_variants: options.NewVariantsOption = "idle",
    *,
    compute: ComputeOptions,
    caches: CacheOptions,
    sampling: SamplingOptions,
) -> None:
    """Chat about the indexed documents.

    /sources lists the sources of the last answer, /new clears the conversation, /quit leaves; Ctrl-C stops an answer.
    """
    options.set_threads(compute.threads)
    config = caches.engine_config(
        context.obj, compute=compute, reuse={"recompute_ratio": recompute_ratio}, new_variants=new_variants
    )
    drawn = sampling.params(max_new_tokens)
    allowed = options.where_of(where)
    require_index(store)
    with (
        load(model, store, config, embeddings=embeddings, server=server, system=caches.system) as rag,
        metrics(rag, metrics_port),
    ):
        conversation = Conversation(
            rag,
            top_k=top_k,
            sampling=drawn,
            where=allowed,
            reuse=None if server is None else config.reuse,  # in this process the engine has it
        )
        if isinstance(sys.stdin, TextIOWrapper):  # input that is not UTF-8 must not end the conversation
            sys.stdin.reconfigure(errors="replace")
        with suppress(ImportError):
            import_module("readline")  # if installed, it gives `input` arrow keys and a history
        err.print(HELP, style="dim")
        print_calibration(rag)
        converse(conversation)


@contextmanager
def metrics(rag: CacheCraft, port: int | None) -> Iterator[None]:
    """Serve metrics while the block runs, where a port is given."""
    if port is None:
        yield
        return
    from cachecraft_rag.engine.metrics import serve_metrics

    with serve_metrics(rag.engine, port) as server:
        err.print(f"metrics: http://127.0.0.1:{server.port}/metrics", style="dim", highlight=False)
        yield


def converse(conversation: Conversation) -> None:
    """Handle lines until the end of the input, or /quit."""
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
    """The turns so far, and the handling of the next line."""

    def __init__(
        self,
        rag: CacheCraft,
        *,
        top_k: int,
        sampling: SamplingParams,
        where: Where | None = None,
        reuse: ReuseConfig | None = None,
    ) -> None:
        self._rag, self._top_k, self._sampling, self._where, self._reuse = rag, top_k, sampling, where, reuse
        self._session = uuid.uuid4().hex
        self._history: list[Turn] = []
        self._last: AnswerStream | None = None

    def take(self, typed: str) -> None:
        """Handle a line: a command, or a question to answer."""
        if typed == "/new":
            self._history.clear()
        elif typed == "/sources" and self._last is None:
            err.print("nothing has been answered yet", style="dim")
        elif typed == "/sources" and self._last is not None:
            print_sources(self._last)
        elif typed.startswith("/") and " " not in typed:
            err.print(HELP, style="dim")
        elif typed:
            self._answer(typed)

    def _answer(self, question: str) -> None:
        """Answer and add the turn to the history. Ctrl-C ends only the answer; its text so far is kept."""
        said = ""
        try:
            stream = self._rag.stream(
                question,
                top_k=self._top_k,
                where=self._where,
                history=self._history,
                session=self._session,
                sampling=self._sampling,
                config=self._reuse,
            )
            try:
                print_stream(stream)
                print_stats(stream.stats)
                print_searched(stream.stats)
            finally:
                stream.close()
                said = stream.text
                if stream.stats.finish is not None:  # an answer stopped before its first token has no sources to list
                    self._last = stream
        except KeyboardInterrupt:
            err.print("\nstopped", style="dim")
        except ContextLengthError as error:
            print_error(error, "/new forgets the conversation.")
        if said:
            self._history += [("user", question), ("assistant", said)]


def print_searched(stats: RequestStats) -> None:
    """One line about what a follow-up was searched with."""
    if len(stats.searched) > 1:
        out.print(f"searched for it, and for: {stats.searched[-1]}", style="dim", markup=False, highlight=False)
