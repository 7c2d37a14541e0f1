"""The tools that an agent calls, over a `CacheCraft`. Imports the official SDK, of the extra `mcp`.

A new tool is a method of `DocumentTools` and a line in `server.server_of`; docs/guides/agents.md lists them. Docstrings
of the tools and of their results, and the descriptions of fields, are sent to the agent's model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypedDict, TypeVar

import anyio.from_thread
import anyio.to_thread
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from cachecraft_rag.cli.first_sentence import first_sentence
from cachecraft_rag.cli.mcp.allowed_folders import AllowedFolders
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.types.documents import Metadata
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.rag import AskOptions, CacheCraft

Result = TypeVar("Result")
MOST_PASSAGES = 50  # per search: agents ask for too many, and each has up to 512 tokens


class Place(TypedDict):
    """The source of a passage."""

    source: str
    heading: str | None
    page: int | None


class LocatedPassage(BaseModel):
    """The place of a passage, and its similarity to the question."""

    source: str = Field(description="The document it is from.")
    heading: str | None = Field(
        description="The heading above it, where the document has headings."
    )
    page: int | None = Field(description="Its page, where the document has pages.")
    score: float | None = Field(description="Similarity to the question; higher is more similar.")


class Passage(LocatedPassage):
    """A passage of the user's documents."""

    text: str


class SearchResult(BaseModel):
    """Passages, the most similar first."""

    passages: list[Passage]


class AnswerSource(LocatedPassage):
    """A passage that the answer was made from."""

    outcome: str = Field(
        description="exact or reused: its chunk-cache was used; computed: it had none."
    )


class Reuse(BaseModel):
    """Tokens of the prompt by how they were obtained, and the time to the first token of the answer."""

    tokens_prompt: int
    tokens_reused: int = Field(description="Taken from chunk-caches.")
    tokens_recomputed: int = Field(description="Of reused passages, recomputed to fit this prompt.")
    tokens_computed: int = Field(description="Computed without a chunk-cache.")
    ttft_s: float = Field(description="Time to the first token, in seconds.")


class AnswerResult(BaseModel):
    """An answer from the user's documents."""

    answer: str
    sources: list[AnswerSource] = Field(
        description="The passages in the prompt, the most similar first."
    )
    reuse: Reuse


class IndexResult(BaseModel):
    """The documents that changed in the index."""

    added: list[str]
    updated: list[str]
    removed: list[str] = Field(description="Documents whose files no longer exist.")
    unchanged: int
    passages_embedded: int
    problems: list[str] = Field(description="Files that were left out, with the reason.")


class DocumentTools:
    """The tools `search`, `ask` and `index`.

    `search` returns no passage if the filter `where` leaves none; an index without documents is a `ToolError`.

    Each tool waits until the model is loaded. It raises `ToolError`, whose text the agent's model reads, for a blank
    question and in place of every CacheCraftError. Other errors pass, such as CancelledError if the client cancels.

    Args:
        loaded: the `CacheCraft` once its model is loaded, or the error that kept it from loading.
        allowed: folders that `index` may read.
        asking: options of each question; their `top_k` and `where` hold for `search` too.
        brief: end answers after their first sentence.
    """

    def __init__(
        self,
        loaded: Future[CacheCraft],
        *,
        allowed: AllowedFolders,
        asking: AskOptions,
        brief: bool = False,
    ) -> None:
        self._loaded = loaded
        self._allowed = allowed
        self._asking = asking
        self._brief = brief
        self._indexing = asyncio.Lock()  # two runs over one folder would embed the same text twice

    async def search(
        self,
        question: Annotated[
            str, Field(description="What to look for, as a question or in keywords.")
        ],
        k: Annotated[
            int | None,
            Field(
                ge=1,
                le=MOST_PASSAGES,
                description="Passages to return; without it the server's default.",
            ),
        ] = None,
    ) -> SearchResult:
        """Find the passages in the user's documents that are most similar to a question, to read or quote them."""
        # The docstring is sent to the agent's model. Raises ToolError, see the class. No hit: an empty list.
        rag = await self._rag()
        _require_question(question)
        top_k = self._asking["top_k"] if k is None else k
        hits = await _call(
            partial(rag.retrieve, question, top_k=top_k, where=self._asking["where"])
        )
        passages = [
            Passage(text=hit.text, score=_rounded(hit.score), **_place(hit.metadata))
            for hit in hits
        ]
        return SearchResult(passages=passages)

    async def ask(
        self,
        question: Annotated[
            str, Field(description="A question that stands alone, without what was asked before.")
        ],
    ) -> AnswerResult:
        """Answer a question from the user's documents with a local model. Use it for facts, and name the sources."""
        # The docstring is sent to the agent's model. Raises ToolError, see the class.
        rag = await self._rag()
        _require_question(question)
        return await _checked(self._answer(rag, question))

    async def index(
        self,
        path: Annotated[
            str,
            Field(
                description="A file or folder below an allowed folder; absolute or relative to it."
            ),
        ],
        context: Context,
    ) -> IndexResult:
        """Add a file or folder to the user's documents, or bring it up to date. Unchanged files are skipped.

        Documents of the folder whose files were deleted leave the index.
        """
        # The docstring is sent to the agent's model. Raises ToolError, see the class, also for a path that is not
        # allowed. Files that cannot be read are not raised: they are the result's `problems`.
        rag = await self._rag()

        def run() -> IndexResult:
            report = rag.add_documents(
                self._allowed.path_of(path),
                progress=_ProgressSender(context),
                opener=self._allowed.open,
            )
            return IndexResult(
                added=list(report.added),
                updated=list(report.updated),
                removed=list(report.removed),
                unchanged=len(report.unchanged),
                passages_embedded=report.chunks_embedded,
                problems=[problem.reason for problem in report.problems],
            )

        async with self._indexing:
            return await _call(run)

    async def _rag(self) -> CacheCraft:
        """Wait until the model is loaded. Cancelling one call that waits does not affect the others."""
        return await _checked(asyncio.shield(asyncio.wrap_future(self._loaded)))

    async def _answer(self, rag: CacheCraft, question: str) -> AnswerResult:
        stream = rag.astream(question, **self._asking)
        sentence = None
        try:
            async for _ in stream:
                sentence = first_sentence(stream.text) if self._brief else None
                if sentence is not None:
                    break
        finally:
            await stream.aclose()
        stats = stream.stats
        assert stats is not None  # no piece or many: the stream has begun
        outcomes = {chunk.chunk_id: chunk.outcome for chunk in stats.chunks}
        sources = [
            AnswerSource(
                outcome=outcomes[source.chunk_id],
                score=_rounded(source.score),
                **_place(source.metadata),
            )
            for source in stream.sources
        ]
        reuse = Reuse(
            tokens_prompt=stats.tokens_prompt,
            tokens_reused=stats.tokens_reused,
            tokens_recomputed=stats.tokens_recomputed,
            tokens_computed=stats.tokens_computed,
            ttft_s=round(stats.ttft_s, 4),
        )
        return AnswerResult(answer=(sentence or stream.text).strip(), sources=sources, reuse=reuse)


class _ProgressSender:
    """Sends progress of indexing to the client, from the thread that indexes.

    The protocol wants each number higher than the last, so steps that only change the text are left out.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._done = 0

    def __call__(self, step: Progress) -> None:
        """Send a step. If the client has cancelled the call, raises the event loop's cancellation and ends the run."""
        anyio.from_thread.check_cancelled()
        if step.done > self._done:
            self._done = step.done
            anyio.from_thread.run(self._context.report_progress, step.done, step.total, step.what)


def _require_question(question: str) -> None:
    if not question.strip():
        raise ToolError("the question is empty; write one")


async def _call(work: Callable[[], Result]) -> Result:
    """Run work in a thread; errors as in `_checked`."""
    return await _checked(anyio.to_thread.run_sync(work))


async def _checked(work: Awaitable[Result]) -> Result:
    """Return the result. An error of this package becomes a `ToolError`, whose text the client's model can read."""
    try:
        return await work
    except CacheCraftError as error:
        raise ToolError(str(error)) from error


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(float(score), 4)


def _place(metadata: Metadata) -> Place:
    page = metadata.get("page")
    heading = metadata.get("heading")
    return Place(
        source=str(metadata.get("source") or ""),
        heading=str(heading) if heading else None,
        page=page if isinstance(page, int) else None,
    )
