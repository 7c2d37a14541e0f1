"""Hit rates on follow-up questions, searched for alone, with their conversation, and written out in full."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachecraft_rag.cli import options
from cachecraft_rag.cli.ask import require_index
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json, progress_bar, waiting
from cachecraft_rag.errors import ConfigError, DocumentError
from cachecraft_rag.evaluation.formats import JsonRecord, read_records
from cachecraft_rag.model.demo_model import handbook_folder
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER, Embedder
from cachecraft_rag.retrievers.indexer import index_folder
from cachecraft_rag.retrievers.retriever import Retriever, open_index
from cachecraft_rag.types.documents import SearchHit
from cachecraft_rag.types.progress import Progress

Way = Literal["the question alone", "with its conversation", "written out in full"]
WAYS: tuple[Way, ...] = ("the question alone", "with its conversation", "written out in full")
OWN = Path(__file__).parent / "follow-ups.jsonl"


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A question that leans on the conversation before it.

    standalone  the same question, as one would ask it without the conversation
    expect      found in the text of every chunk that answers it
    """

    history: tuple[Turn, ...]
    question: str
    standalone: str
    expect: re.Pattern[str]

    def rank(self, hits: Sequence[SearchHit]) -> int | None:
        """The place, from 1, of the first hit that answers the question."""
        return next(
            (place for place, hit in enumerate(hits, start=1) if self.expect.search(hit.text)), None
        )


@dataclass(frozen=True, slots=True)
class HitRates:
    """One way of searching. `ranks` has for each follow-up the place of the first chunk that answers it, or None."""

    way: Way
    ranks: tuple[int | None, ...]

    def at(self, k: int) -> float:
        """The share of follow-ups with a chunk that answers them among the first `k`.

        >>> HitRates("the question alone", (1, 3, None, 2)).at(2)
        0.5
        """
        return sum(rank is not None and rank <= k for rank in self.ranks) / len(self.ranks)


def read_follow_ups(path: Path = OWN) -> tuple[FollowUp, ...]:
    """The follow-ups in a file (JSON, JSON lines, CSV …); without a path those about the sample handbook.

    Each record has `conversation` (texts: user, assistant, user, assistant …), `question`, `standalone` and `expect`, a
    regular expression. Raises DocumentError with the place of what is wrong.
    """
    return tuple(_follow_up(record) for record in read_records(path))


def _follow_up(record: JsonRecord) -> FollowUp:
    texts = record.texts("conversation")
    if not texts or len(texts) % 2:
        raise DocumentError(
            f'{record.where}: "conversation" has {len(texts)} texts; it must have pairs of a question and its answer'
        )
    history = tuple(
        ("assistant" if place % 2 else "user", text) for place, text in enumerate(texts)
    )
    try:
        expect = re.compile(record.text("expect"))
    except re.error as error:
        raise DocumentError(
            f'{record.where}: "expect" is no regular expression ({error})'
        ) from error
    return FollowUp(history, record.text("question"), record.text("standalone"), expect)  # type: ignore[arg-type]


def hit_rates(
    retriever: Retriever,
    follow_ups: Sequence[FollowUp],
    *,
    top_k: int,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[HitRates, ...]:
    """The hit rates of each way, up to the `top_k`-th chunk.

    Raises DocumentError if no chunk of the index answers one of the follow-ups: it would count as a miss of every way.
    """
    documents = [document.doc_id for document in retriever.index.documents()]
    texts = [chunk.text for doc_id in documents for chunk in retriever.index.chunks_of(doc_id)]
    ranks: dict[Way, list[int | None]] = {way: [] for way in WAYS}
    for done, one in enumerate(follow_ups, start=1):
        if not any(map(one.expect.search, texts)):
            raise DocumentError(
                f"{one.question!r}: no chunk of the index has {one.expect.pattern!r}; index the documents it is about, "
                'or correct its "expect"'
            )
        found = (
            retriever.retrieve(one.question, top_k=top_k),
            retriever.retrieve(one.question, top_k=top_k, history=one.history),
            retriever.retrieve(one.standalone, top_k=top_k),
        )
        for way, hits in zip(WAYS, found, strict=True):
            ranks[way].append(one.rank(hits))
        if progress is not None:
            progress(Progress(done, len(follow_ups), "searching"))
    return tuple(HitRates(way, tuple(ranks[way])) for way in WAYS)


@contextmanager
def handbook_retriever(embedder: Embedder) -> Iterator[Retriever]:
    """A separate index of the sample handbook, while the block runs."""
    with TemporaryDirectory() as folder, open_index(folder, embedder) as index:
        index_folder(handbook_folder(), index, embedder)
        yield Retriever(index, embedder)


Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        help='File of records with "conversation", "question", "standalone" and "expect"; needs --store.',
        show_default="40 about the sample handbook",
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        "--store", "-s", help="Folder of the retrieval index that the questions are about."
    ),
]


def main(
    data: Data = None,
    store: Store = None,
    embeddings: Annotated[str | None, options.option_of("embeddings")] = None,
    top_k: Annotated[int, options.option_of("top_k", min=1)] = 5,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Compare the hit rates of follow-up questions, alone and with their conversation; no answering model is loaded."""
    if (data is None) != (store is None):
        raise ConfigError(
            "name both --data and --store: the questions and the index of the documents they are about"
        )
    options.set_threads(threads)
    asked = read_follow_ups(data or OWN)
    if store is not None:
        require_index(store)
    with ExitStack() as opened:
        with waiting("Loading the embedding model"):
            options.quiet_libraries()
            embedder = Embedder(embeddings or BUNDLED_EMBEDDER)
            if store is None:
                retriever = opened.enter_context(handbook_retriever(embedder))
            else:
                retriever = Retriever(opened.enter_context(open_index(store, embedder)), embedder)
        with progress_bar("Searching") as show:
            found = hit_rates(retriever, asked, top_k=top_k, progress=show)
    shown = sorted({min(k, top_k) for k in (1, 3, top_k)})
    if as_json:
        rates = {one.way: {str(k): one.at(k) for k in shown} for one in found}
        print_json(
            {
                "questions": len(asked),
                "hit_rate": rates,
                "ranks": {one.way: one.ranks for one in found},
            }
        )
    else:
        _print(found, shown)


def _print(found: tuple[HitRates, ...], shown: list[int]) -> None:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("searched for")
    for k in shown:
        table.add_column(f"hit rate at {k}", justify="right")
    for one in found:
        table.add_row(one.way, *(f"{one.at(k):.2f}" for k in shown))
    out.print(table)
