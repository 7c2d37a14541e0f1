"""The documents of `streamlit_app.py`: upload, the sample handbook, removal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit_conversations import Activity, Conversations
from streamlit_picture import plain, title_of

from cachecraft_rag import CacheCraft

HANDBOOK = Path(__file__).parent / "handbook"
SAMPLE = "the sample handbook"


@dataclass(frozen=True)
class Shared:
    """State shared by all visitors; `indexing` keeps two uploads from indexing each other's files."""

    rag: CacheCraft
    uploads: Path
    indexing: threading.Lock
    conversations: Conversations
    activity: Activity = field(default_factory=Activity)


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
            state.notices, state.added = add_uploads(
                shared, [(file.name, file.getvalue()) for file in files]
            )
            state.confirmation = confirmation(shared, state.added)
            changed()
        handbook = os.path.abspath(HANDBOOK)
        choices: dict[str, list[str]] = {}
        for document in stored:
            choices.setdefault(SAMPLE if document.root == handbook else document.doc_id, []).append(
                document.doc_id
            )
        if SAMPLE not in choices and st.button(
            "Add the sample handbook", icon=":material/menu_book:", key="sample"
        ):
            with shared.indexing, shared.activity.running(), reading("the handbook") as progress:
                shared.rag.add_documents(HANDBOOK, progress=progress)
            changed()
        if choices:
            gone = st.multiselect(
                "Remove for everyone", list(choices), key=f"remove-{changes}", placeholder="nothing"
            )
            if st.button("Remove", disabled=not gone, key="remove"):
                remove(shared, [name for choice in gone for name in choices[choice]])
                changed()
    return names


@contextmanager
def reading(what: str) -> Iterator[Callable[[Any], None]]:
    """A bar that shows how far the reading of documents has come: a value for `progress=` of `add_documents`."""
    bar = st.progress(0.0, f"Reading {what} …")

    def show(step: Any) -> None:
        bar.progress(min(1.0, step.done / max(1, step.total)), f"Reading {what}: {step.what} …")

    yield show
    bar.empty()


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


def add_uploads(shared: Shared, files: list[tuple[str, bytes]]) -> tuple[list[str], list[str]]:
    """Store and index uploaded files; returns the problems as Markdown, and the ids of the documents.

    A file that yields no document is deleted again, and all of them if indexing fails: otherwise the next upload would
    fail too. An older file of the same name is replaced.
    """
    problems = []
    stored: list[Path] = []
    with shared.indexing, shared.activity.running():
        for given, data in files:
            path = shared.uploads / file_name(given)
            try:
                path.write_bytes(data)
                stored.append(path)
            except OSError as error:
                problems.append(f"**{plain(path.name)}** cannot be stored: {error.strerror}.")
        try:
            with reading("the upload") as progress:
                report = shared.rag.add_documents(shared.uploads, progress=progress)
        except BaseException:  # a rerun of the page too: no upload stays without its documents
            for path in stored:
                path.unlink(missing_ok=True)
            raise
        for problem in report.problems:
            name = problem.doc_id.partition("/")[2]
            (shared.uploads / name).unlink(missing_ok=True)
            reason = plain(problem.reason.rpartition(f"/{name}: ")[2])
            problems.append(f"**{plain(name)}** was not added: {reason}")
    return problems, [*report.added, *report.updated]


def file_name(given: str) -> str:
    """The file name for an upload: no folder, not hidden (the indexer skips those), only printable characters."""
    name = "".join(
        letter if letter.isprintable() else "_"
        for letter in given.replace("\\", "/").rpartition("/")[2]
    )
    return name.strip().lstrip(".") or "unnamed"
