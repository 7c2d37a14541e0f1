"""The documents of `streamlit_app.py`: upload, the sample handbook, removal."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit_conversations import Activity, Conversations
from streamlit_picture import in_words, plain, title_of
from streamlit_savings import Savings

from cachecraft_rag import CacheCraft, CacheCraftError

HANDBOOK = Path(__file__).parent / "handbook"
SAMPLE = "the sample handbook"
POLL_S = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shared:
    """State shared by all visitors; `indexing` keeps two uploads from indexing each other's files."""

    rag: CacheCraft
    uploads: Path
    indexing: threading.Lock
    conversations: Conversations
    activity: Activity = field(default_factory=Activity)
    savings: Savings = field(default_factory=Savings)


class Reading:
    """Documents that a thread reads, so that the reading goes on when Streamlit interrupts the page.

    `what`: words for the page. `add`: reads; takes a callback for each step, returns problems and ids of documents.
    """

    def __init__(
        self, what: str, add: Callable[[Callable[[Any], None]], tuple[list[str], list[str]]]
    ) -> None:
        self.what = what
        self.share = 0.0
        self.step = ""
        self.problems: list[str] = []
        self.added: list[str] = []
        self._add = add
        self._thread = threading.Thread(target=self._run, name="reading", daemon=True)
        self._start = threading.Lock()

    def start(self) -> None:
        """Begin to read; a second call does nothing."""
        with self._start:
            if self._thread.ident is None:
                self._thread.start()

    def has_ended(self) -> bool:
        """Return whether `problems` and `added` are complete."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.problems, self.added = self._add(self._progress)
        except CacheCraftError as error:
            self.problems = [f"Nothing was added from {self.what}: {plain(in_words(error))}"]
        except Exception:
            logger.exception("reading %s failed", self.what)
            self.problems = [
                f"Nothing was added from {self.what}: the log of this server says why."
            ]

    def _progress(self, step: Any) -> None:
        self.share = min(1.0, step.done / max(1, step.total))
        self.step = step.what


def documents_section(shared: Shared) -> list[str]:
    """Upload, load the sample, remove, in one box of the page; returns the ids of all documents."""
    state = st.session_state
    stored = shared.rag.documents()
    names = [document.doc_id for document in stored]
    for text in state.pop("notices", []):
        st.warning(text)
    if text := state.pop("confirmation", ""):
        st.success(text, icon=":material/check_circle:")
    if os.environ.get("CACHECRAFT_READ_ONLY") == "1":
        return names
    if "reading" in state:
        st.caption(
            f"{state.reading.what.capitalize()} is being read; more can be added afterwards."
        )
        return names
    # in the keys: a new key empties the uploader and closes the box
    changes = state.setdefault("changes", 0)
    label = f"Documents: {len(names)}" if names else "Add documents"
    with st.expander(
        label, expanded=not names, icon=":material/upload_file:", key=f"documents-{changes}"
    ):
        files = st.file_uploader(
            "Text, Markdown, HTML, PDF, Word, CSV, JSON",
            accept_multiple_files=True,
            key=f"upload-{changes}",
        )
        if files:
            given = [(file.name, file.getvalue()) for file in files]
            state.reading = Reading(
                "the upload", lambda progress: add_uploads(shared, given, progress)
            )
        handbook = os.path.abspath(HANDBOOK)
        choices: dict[str, list[str]] = {}
        for document in stored:
            choices.setdefault(SAMPLE if document.root == handbook else document.doc_id, []).append(
                document.doc_id
            )
        if SAMPLE not in choices and st.button(
            "Add the sample handbook", icon=":material/menu_book:", key="sample"
        ):
            state.reading = Reading("the handbook", lambda progress: add_handbook(shared, progress))
        if choices:
            gone = st.multiselect(
                "Remove for everyone", list(choices), key=f"remove-{changes}", placeholder="nothing"
            )
            if st.button("Remove", disabled=not gone, key="remove"):
                try:
                    remove(shared, [name for choice in gone for name in choices[choice]])
                except CacheCraftError as error:
                    state.notices = [f"Removing did not work: {plain(in_words(error))}"]
                changed()
    return names


def wait_for_reading(shared: Shared) -> None:
    """Show how far the reading of this page's documents is, and run the page again at its end.

    Streamlit may interrupt this at any time; the next run of the page goes on waiting.
    """
    state = st.session_state
    reading: Reading = state.reading
    reading.start()
    bar = st.progress(0.0, f"Reading {reading.what} …")
    for question in state.get("waiting", []):
        st.caption(f"Next, once {reading.what} is read: {plain(question)}")
    while not reading.has_ended():
        bar.progress(reading.share, f"Reading {reading.what}: {plain(reading.step)} …")
        time.sleep(POLL_S)
    state.notices = reading.problems
    if reading.added:
        state.added = reading.added
        state.confirmation = confirmation(shared, reading.added)
    # interrupted before the last line, this is done once more, and no upload twice
    state.changes = state.get("changes", 0) + 1
    state.pop("reading")
    st.rerun()


def confirmation(shared: Shared, added: list[str]) -> str:
    """Return a sentence about added documents; "" if there are none."""
    if not added:
        return ""
    passages = sum(len(shared.rag.index.chunks_of(name)) for name in added)
    names = [plain(name.partition("/")[2]) for name in added]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    count = "1 passage" if passages == 1 else f"{passages} passages"
    return f"Added **{', '.join(names[:3])}**{more}: {count}. Ask about it above."


def questions_about(shared: Shared, names: list[str]) -> list[str]:
    """Return questions about the headings of these documents, or about a document that has none."""
    questions = []
    for name in names:
        file = name.partition("/")[2]
        headings = [
            title_of(chunk.metadata)
            for chunk in shared.rag.index.chunks_of(name)
            if chunk.metadata.get("heading")
        ]
        for heading in dict.fromkeys(headings):
            questions.append(f"What does {file} say about “{heading}”?")
        if not headings:
            questions.append(f"What is {file} about?")
    return questions


def changed() -> None:
    """Run the page again with the documents that there are now."""
    st.session_state.changes += 1
    st.rerun()


def remove(shared: Shared, names: list[str]) -> None:
    """Remove documents with their chunk-caches, and uploaded files."""
    root = os.path.abspath(shared.uploads)
    with shared.indexing:
        # someone else may have removed one
        present = [one for one in shared.rag.documents() if one.doc_id in names]
        for document in present:
            if document.root == root:
                (shared.uploads / document.doc_id.partition("/")[2]).unlink(missing_ok=True)
        shared.rag.remove_documents([document.doc_id for document in present])
    st.toast(f"{len(present)} removed")


def add_handbook(shared: Shared, progress: Callable[[Any], None]) -> tuple[list[str], list[str]]:
    """Index the sample handbook; returns no problems and no documents, because its questions are written down."""
    with shared.indexing, shared.activity.running():
        shared.rag.add_documents(HANDBOOK, progress=progress)
    return [], []


def add_uploads(
    shared: Shared, files: list[tuple[str, bytes]], progress: Callable[[Any], None]
) -> tuple[list[str], list[str]]:
    """Store and index uploaded files; returns the problems as Markdown, and the ids of the documents.

    A file that yields no document is deleted again, and all of them if indexing fails: otherwise the next upload would
    fail too. An older file of the same name is replaced once the new one is indexed.
    """
    problems = []
    with shared.indexing, shared.activity.running():
        stored = Uploads(shared.uploads)
        try:
            for given, data in files:
                name = file_name(given)
                try:
                    stored.write(name, data)
                except OSError as error:
                    problems.append(f"**{plain(name)}** cannot be stored: {error.strerror}.")
            report = shared.rag.add_documents(shared.uploads, progress=progress)
            for problem in report.problems:
                name = problem.doc_id.partition("/")[2]
                reason = plain(in_words(problem.reason.rpartition(f"/{name}: ")[2]))
                if problem.kind == "incomplete":
                    problems.append(f"**{plain(name)}** lacks something: {reason}")
                    continue
                problems.append(f"**{plain(name)}** was not added: {reason}")
                stored.take_back(name)
            if stored.brought_back:
                shared.rag.add_documents(shared.uploads, progress=progress)
            stored.names.clear()
        finally:  # no upload stays without its documents
            stored.close()
    return problems, [*report.added, *report.updated]


class Uploads:
    """Uploaded files in a folder, and the older ones of their names until the new ones are indexed."""

    def __init__(self, folder: Path) -> None:
        self.names: set[str] = set()
        self.brought_back = False
        self._folder = folder
        self._older = folder / ".older"  # hidden: it is not indexed
        self._older.mkdir(exist_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Store a file; raises OSError, after which the folder is as before."""
        if name not in self.names and (self._folder / name).exists():
            os.replace(self._folder / name, self._older / name)
        self.names.add(name)
        try:
            (self._folder / name).write_bytes(data)
        except OSError:
            self.take_back(name)
            raise

    def take_back(self, name: str) -> None:
        """Delete a file; the older one of its name is back."""
        self.names.discard(name)
        (self._folder / name).unlink(missing_ok=True)
        if (self._older / name).exists():
            os.replace(self._older / name, self._folder / name)
            self.brought_back = True

    def close(self) -> None:
        """Take back the files that are left in `names`, and delete the older files of others."""
        for name in tuple(self.names):
            self.take_back(name)
        shutil.rmtree(self._older, ignore_errors=True)


def file_name(given: str) -> str:
    """The file name for an upload: no folder, not hidden (the indexer skips those), only printable characters."""
    name = "".join(
        letter if letter.isprintable() else "_"
        for letter in given.replace("\\", "/").rpartition("/")[2]
    )
    return name.strip().lstrip(".") or "unnamed"
