"""Bring the index in line with a folder: embed new text, remove deleted documents, skip unchanged ones.

Every document from a folder has a `doc_id` that begins with the folder's label: `docs/kettle.md` for `kettle.md` in a
folder named `docs`. A second folder of the same name gets the label `docs-2`, so that folders never overwrite one
another. A folder (or a single file) below one that has been indexed before belongs to it, under its label; a folder
around earlier ones takes over their documents. A folder is identified by its absolute path, links not followed.

A run deletes only documents of the folder that it indexes. A file that exists but cannot be opened keeps its chunks,
because its content may be unchanged; a file whose content can no longer be parsed (emptied, damaged) loses them. Both
are in the report. No document stops a run: an exception of its parser becomes a problem in the report too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from cachecraft_rag.checks import check_kind, check_mapping, check_text
from cachecraft_rag.errors import DocumentError, IndexStoreError, MissingPackageError
from cachecraft_rag.model.chunk_bound import ModelTokens
from cachecraft_rag.retrievers.folders import (
    Opener,
    OutsideError,
    Problem,
    inaccessible,
    list_files,
)
from cachecraft_rag.retrievers.index.filters import encoded
from cachecraft_rag.retrievers.index.schema import same_model
from cachecraft_rag.retrievers.own_readers import (
    OwnReaderError,
    OwnReaders,
    identity,
    read,
    require_splitter,
    split_by,
)
from cachecraft_rag.retrievers.reading.chunking import SPLITTER_VERSION, split
from cachecraft_rag.retrievers.reading.documents import (
    LARGEST_FILE,
    SourceFile,
    parsing,
    printable,
    too_large,
)
from cachecraft_rag.retrievers.reading.limited_reader import LimitedReader, ReaderStartError
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.documents import Chunk, Document
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.retrievers.embeddings import EmbeddingModel
    from cachecraft_rag.retrievers.index.faiss_store import Change, FaissStore, StoredDocument

# for embedding models that read thousands: a chunk should be about one topic
DEFAULT_CHUNK_TOKENS = 512

_READER_VERSION = 4  # raise it when the parser's output changes: documents are then indexed again
# embedded together; a killed run loses at most this many, or one longer document
_FLUSH_CHUNKS = 256
logger = logging.getLogger("cachecraft_rag.retrievers.indexer")


@dataclass(frozen=True, slots=True)
class IndexReport:
    """The result of a run. `added`, `updated`, `unchanged` and `removed` are doc_ids.

    chunks_embedded    chunks that the embedding model encoded
    chunks_reused      chunks of added and updated documents whose vectors were already in the index
    removed_chunk_ids  chunks that are in no document any more; their chunk-caches can be deleted too
    problems           files that gave no document, or not all of it (not again if unchanged), sorted by doc_id
    seconds            elapsed time of the run
    """

    added: tuple[str, ...]
    updated: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    chunks_embedded: int
    chunks_reused: int
    removed_chunk_ids: tuple[str, ...]
    problems: tuple[Problem, ...]
    seconds: float


def index_folder(
    path: str | os.PathLike[str],
    store: FaissStore,
    embedder: EmbeddingModel,
    *,
    progress: Callable[[Progress], None] | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    model: ModelTokens | None = None,
    follow_links: bool = False,
    opener: Opener | None = None,
    reader: Mapping[str, object] | object | None = None,
    splitter: object | None = None,
) -> IndexReport:
    """Add, update and remove documents until the index matches the folder, or the single file.

    A doc_id is the folder's name (with a number if another folder has it), "/" and the path below it: `docs/kettle.md`.
    A path inside a folder that was indexed before belongs to that folder; a folder around earlier ones replaces their
    documents by its own. Documents of the folder (or file) are removed if their file is gone, leads out of the folder,
    can no longer be parsed, or is of a kind that this run does not read. They stay if it cannot be opened, a package is
    missing, or your reader or splitter fails; other documents stay. Files are parsed only if they, the reader, the
    splitter or the limit of tokens changed. A file that was indexed twice, for a folder and for one around it, keeps
    one document, named as in this run. Each document is one transaction: the next run completes one that was killed or
    ended by an error.

    Args:
        progress: called after each file and after each batch of embeddings; `done` and `total` count files. Its errors
            pass, but an OSError or DocumentError in a batch may become a problem in the report.
        chunk_tokens: most tokens of a chunk, or the embedding model's limit if that is less; at least 16.
        model: the answering model's tokens, if it is known: they limit a chunk too.
        follow_links: also read targets of links outside the folder; otherwise such a link is a problem.
        opener: opens each folder and file, as with Python's `open`; a DocumentError of it makes them `inaccessible`.
        reader: reads files in place of the built-in readers, in this process and without limits; see `own_readers`.
        splitter: splits texts in place of the built-in splitter, as well.

    A file that cannot be read is a problem in the report. Raises DocumentError if there is nothing at `path`, or a file
    of a kind that cannot be indexed, and IndexStoreError if the index was made with another embedding model.
    """
    readers = OwnReaders(reader)
    listing = list_files(path, follow_links=follow_links, opener=opener, more=readers)
    run = _Run(
        store,
        embedder,
        chunk_tokens=chunk_tokens,
        progress=progress,
        model=model,
        opener=opener,
        own_readers=readers,
        splitter=splitter,
    )
    place = _place(Path(path), run.stored.values())
    run.files_total = len(listing.files)
    run.problems += [
        Problem(place.doc_id(problem.doc_id), problem.kind, problem.reason)
        for problem in listing.problems
    ]
    with run.reader:
        for file in listing.files:
            run.file(SourceFile(file.path, place.doc_id(file.doc_id)), root=place.root)
    run.flush()
    run.remove_vanished(place)
    return run.report()


def index_documents(
    documents: Iterable[Document],
    store: FaissStore,
    embedder: EmbeddingModel,
    *,
    progress: Callable[[Progress], None] | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    model: ModelTokens | None = None,
    splitter: object | None = None,
) -> IndexReport:
    """Add documents that are in memory to the index, or update them; none is removed. Their doc_ids are used unchanged.

    Of several documents with the same doc_id the last one stays. A document without text is added without chunks; one
    that cannot be split, or whose splitter fails, is `unreadable` in the report, and its chunks of before stay.
    Documents that were written before an error stay; those that waited to be embedded together are lost. The other
    arguments are as in `index_folder`, but `progress` counts documents.

    Raises ConfigError for an item that is no `Document` that the index can keep, before anything is written;
    DocumentError if a doc_id belongs to an indexed file; and IndexStoreError if the index was made with another
    embedding model.
    """
    given = list(documents)
    for document in given:
        _check_document(document)
    given = list({document.doc_id: document for document in given}.values())
    run = _Run(
        store,
        embedder,
        chunk_tokens=chunk_tokens,
        progress=progress,
        model=model,
        splitter=splitter,
    )
    run.files_total = len(given)
    for document in given:
        stored = run.stored.get(document.doc_id)
        if stored is not None and stored.root:
            raise DocumentError(
                f"{document.doc_id}: a file of {stored.root} has this doc_id; give the document another"
            )
        metadata = json.dumps(dict(document.metadata), sort_keys=True)
        content = digest("document", document.text, metadata, run.settings)
        try:
            if not run.is_unchanged(document.doc_id, content, root=""):
                run.put(document, content, root="")
        except DocumentError as error:
            run.problems.append(Problem(document.doc_id, "unreadable", str(error)))
        run.tick(document.doc_id)
    run.flush()
    return run.report()


def _check_document(document: object) -> None:
    check_kind("each document", document, Document, advice="write Document(doc_id, text)")
    assert isinstance(document, Document)
    check_text("a document's doc_id", document.doc_id, empty=False)
    check_text(f"the text of {document.doc_id}", document.text, damaged=True)
    check_mapping(f"the metadata of {document.doc_id}", document.metadata)
    encoded(document.metadata)  # raises ConfigError for what the index cannot keep


@dataclass(frozen=True, slots=True)
class _Place:
    """The folder that the documents of a path belong to (`root`), its label, and where the path is inside it.

    path   the indexed folder or file, absolute
    below  path of its folder inside `root`; "" for `root` itself
    """

    root: str
    label: str
    below: str
    path: str

    def doc_id(self, below_path: str) -> str:
        """Return the doc_id of the file at `below_path` inside the path that is being indexed."""
        return "/".join(part for part in (self.label, self.below, below_path) if part)

    def covers(self, document: StoredDocument) -> bool:
        """Return True if the document's file is at the path that is being indexed, whatever root it was read for."""
        if not document.root or not _file_of(document).is_relative_to(self.path):
            return False
        inside_root = PurePath(self.path).is_relative_to(document.root)
        return inside_root or _contains(self.path, document.root)

    def name_of(self, document: StoredDocument) -> str:
        """Return the doc_id that the file of a covered document has in this place."""
        return f"{self.label}/{_file_of(document).relative_to(self.root).as_posix()}"


def _file_of(document: StoredDocument) -> PurePath:
    """Return the absolute path of the file that a document was read from."""
    return PurePath(document.root, document.doc_id.partition("/")[2])


def _place(path: Path, stored: Iterable[StoredDocument]) -> _Place:
    """Return the known folder that a path belongs to, or a new label for a new folder."""
    # not resolve(): a link `docs` that moves on to a new release stays `docs`
    absolute = Path(os.path.abspath(path))
    folder = absolute if path.is_dir() else absolute.parent
    indexed = printable(absolute)
    labels = {
        document.root: document.doc_id.partition("/")[0] for document in stored if document.root
    }
    around = [root for root in labels if _contains(root, printable(folder))]
    if around:
        root = max(around, key=len)
        below = PurePath(printable(folder)).relative_to(root).as_posix()
        return _Place(root, labels[root], "" if below == "." else below, indexed)
    root = printable(folder)
    taken = {document.doc_id.partition("/")[0] for document in stored}
    name = printable(folder.name) or "root"
    label = name
    count = 1
    while label in taken:
        count += 1
        label = f"{name}-{count}"
    return _Place(root, label, "", indexed)


def _contains(root: str, folder: str) -> bool:
    """Return True if indexing `root` includes `folder`: it is inside and not in a hidden folder."""
    if not PurePath(folder).is_relative_to(root):
        return False
    return not any(part.startswith(".") for part in PurePath(folder).relative_to(root).parts)


class _Run:
    """The state of a run: documents waiting to be embedded together, and the results so far.

    `root` is the folder that a document belongs to, or ""; `content` the digest of its content and the settings.
    """

    def __init__(
        self,
        store: FaissStore,
        embedder: EmbeddingModel,
        *,
        chunk_tokens: int,
        progress: Callable[[Progress], None] | None,
        model: ModelTokens | None,
        opener: Opener | None = None,
        own_readers: OwnReaders | None = None,
        splitter: object | None = None,
    ) -> None:
        if splitter is not None:
            require_splitter(splitter)
        if not same_model(store.embedder, embedder.fingerprint):
            raise IndexStoreError(
                f"{store.folder}: the index was made with another embedding model than {embedder.name}; "
                "use that model, or index into another folder"
            )
        self.store = store
        self.embedder = embedder
        self.progress = progress
        self.model = model
        self.opener = opener
        self.own_readers = own_readers or OwnReaders()
        self.splitter = splitter
        self.reader = LimitedReader()
        self.limit = min(chunk_tokens, embedder.limit)
        versions = f"reader {_READER_VERSION}, splitter {SPLITTER_VERSION}"
        self.settings = f"{versions}, {self.limit} tokens{identity(splitter)}"
        self.stored = {document.doc_id: document for document in store.documents()}
        self.started = time.monotonic()
        self.files_total = 0
        self.files_done = 0
        self.embedded = 0
        self.reused = 0
        self.added: list[str] = []
        self.updated: list[str] = []
        self.unchanged: list[str] = []
        self.removed: list[str] = []
        self.problems: list[Problem] = []
        self.lost: dict[str, None] = {}  # chunk ids removed and not back since, in order
        self.waiting: list[tuple[Document, list[Chunk], str, str]] = []

    def file(self, file: SourceFile, *, root: str) -> None:
        """Read one file: it is unchanged, queued for embedding, or a problem."""
        try:
            data = self._bytes_of(file.path)
            settings = self.settings + identity(self.own_readers.of(file.path))
            content = digest("file", hashlib.blake2b(data).hexdigest(), settings)
            if not self.is_unchanged(file.doc_id, content, root=root):
                self.put(self._document_of(file, data), content, root=root)
        except FileNotFoundError:
            pass  # deleted since it was listed; the run removes it like any other that is gone
        except OSError as error:
            self.problems.append(
                Problem(file.doc_id, "inaccessible", inaccessible(file.path, error))
            )
        # nothing is known of its content: an earlier reading of it stays
        except (MissingPackageError, ReaderStartError) as error:
            self.problems.append(
                Problem(file.doc_id, "inaccessible", f"{printable(file.path)}: {error}")
            )
        except OutsideError as error:
            self.problems.append(Problem(file.doc_id, "outside", str(error)))
        except OwnReaderError as error:
            self.problems.append(Problem(file.doc_id, "inaccessible", str(error)))
        except DocumentError as error:
            self.problems.append(Problem(file.doc_id, "unreadable", str(error)))
        self.tick(file.doc_id)

    def _document_of(self, file: SourceFile, data: bytes) -> Document:
        own_reader = self.own_readers.of(file.path)
        document = None if own_reader is None else read(own_reader, file.path, file.doc_id)
        if document is not None:
            return document
        return self.reader.read(
            file, data, left_out=lambda what: self._incomplete(file.doc_id, what)
        )

    def _incomplete(self, doc_id: str, what: str) -> None:
        self.problems.append(Problem(doc_id, "incomplete", what))

    def _bytes_of(self, path: Path) -> bytes:
        try:
            with open(path, "rb", opener=self.opener) as opened:
                data = opened.read(LARGEST_FILE + 1)
        except OutsideError:
            raise
        except DocumentError as error:  # of the user's opener
            raise OwnReaderError(str(error)) from error
        if len(data) > LARGEST_FILE:
            raise DocumentError(too_large(path))
        return data

    def is_unchanged(self, doc_id: str, content: str, *, root: str) -> bool:
        """Return True if the index has the document with this content and chunk size; it is then added to `unchanged`.

        A stored digest ends in a colon and the name of the answering model whose tokens limited the chunks. With no
        name, or another one, the chunks are counted again: nearly all are short enough.
        """
        stored = self.stored.get(doc_id)
        if stored is None or stored.root != root:
            return False
        same, _, name = stored.content_digest.partition(":")
        if same != content:
            return False
        if self.model is not None and name != self.model.name:
            if not all(self.model.fits(chunk.text) for chunk in self.store.chunks_of(doc_id)):
                return False
            self.store.set_digest(doc_id, f"{content}:{self.model.name}")
        self.unchanged.append(doc_id)
        return True

    def put(self, document: Document, content: str, *, root: str) -> None:
        """Split a document and queue it for embedding."""
        count = self.embedder.count_tokens
        with parsing(document.doc_id):
            if self.splitter is None:
                chunks = split(document, count_tokens=count, limit=self.limit, model=self.model)
            else:
                chunks, cut = split_by(
                    self.splitter, document, count_tokens=count, limit=self.limit, model=self.model
                )
                if cut:
                    self._incomplete(document.doc_id, cut)
        if self.model is not None:
            content = f"{content}:{self.model.name}"
        self.waiting.append((document, chunks, content, root))
        if sum(len(waiting[1]) for waiting in self.waiting) >= _FLUSH_CHUNKS:
            self.flush()

    def flush(self) -> None:
        """Embed the chunks without a vector in the index, then write the queued documents, one transaction each."""
        if not self.waiting:
            return
        texts = {chunk.chunk_id: chunk.text for _, chunks, _, _ in self.waiting for chunk in chunks}
        vectors = dict(self.store.known_vectors(texts))
        missing = [chunk_id for chunk_id in texts if chunk_id not in vectors]
        self.reused += len(vectors)
        before = self.embedded

        def count(batch: Progress) -> None:
            self.embedded = before + batch.done
            self._report(f"{self.embedded} chunks embedded")

        fresh = self.embedder.encode_document(
            [texts[chunk_id] for chunk_id in missing], progress=count
        )
        vectors.update(zip(missing, fresh, strict=True))
        for document, chunks, content, root in self.waiting:
            matrix = [vectors[chunk.chunk_id] for chunk in chunks]
            self._note(
                self.store.upsert(
                    document.doc_id, chunks, matrix, content_digest=content, root=root
                )
            )
            (self.updated if document.doc_id in self.stored else self.added).append(document.doc_id)
        self.waiting = []

    def remove_vanished(self, place: _Place) -> None:
        """Remove the documents of this place whose files were not seen; unopenable files count as seen.

        Documents that were read from a file of this place for another root are removed too, so that no file has two
        documents.
        """
        seen = {*self.added, *self.updated, *self.unchanged}
        kept = [problem.doc_id for problem in self.problems if problem.kind == "inaccessible"]
        for document in self.stored.values():
            if document.doc_id in seen or not place.covers(document):
                continue
            name = place.name_of(document)
            if not _is_below(name, kept) or name in seen:
                self._note(self.store.delete_document(document.doc_id))
                self.removed.append(document.doc_id)

    def tick(self, doc_id: str) -> None:
        """Count one more file as done."""
        self.files_done += 1
        self._report(f"reading {doc_id}")

    def report(self) -> IndexReport:
        """Return the run's report. Also writes the index file, so that the next process starts faster."""
        self.store.save()
        logger.info(
            "%d added, %d updated, %d removed",
            len(self.added),
            len(self.updated),
            len(self.removed),
        )
        return IndexReport(
            added=tuple(self.added),
            updated=tuple(self.updated),
            unchanged=tuple(self.unchanged),
            removed=tuple(self.removed),
            chunks_embedded=self.embedded,
            chunks_reused=self.reused,
            removed_chunk_ids=tuple(self.lost),
            problems=tuple(sorted(self.problems, key=lambda problem: problem.doc_id)),
            seconds=time.monotonic() - self.started,
        )

    def _note(self, change: Change) -> None:
        for chunk_id in change.removed:
            self.lost[chunk_id] = None
        for chunk_id in change.added:
            self.lost.pop(chunk_id, None)

    def _report(self, what: str) -> None:
        if self.progress is not None:
            self.progress(Progress(self.files_done, self.files_total, what))


def _is_below(doc_id: str, places: Sequence[str]) -> bool:
    return any(doc_id == place or doc_id.startswith(f"{place}/") for place in places)
