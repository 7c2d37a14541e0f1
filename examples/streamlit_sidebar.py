"""The left side of `streamlit_app.py`: documents, settings, and the contents of the store."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st
from streamlit_conversations import Conversations
from streamlit_picture import meters, nbytes, plain, title_of

from cachecraft_rag import CacheCraft, CacheCraftError, ReuseConfig, SamplingParams

if TYPE_CHECKING:
    from cachecraft_rag.engine.metrics import MetricsServer

HANDBOOK = Path(__file__).parent / "handbook"
REMEMBERED_TURNS = 3
AUTOMATIC, FIXED = "Automatic", "Fixed share"
SAMPLE = "the sample handbook"
FOCUS = {
    "off": "Refresh every passage",
    "gap": "Refresh only what the question needs",
    "printed": "Refresh only what it needs, by the paper's rule",
}


@dataclass(frozen=True)
class Shared:
    """State shared by all visitors; `indexing` keeps two uploads from indexing each other's files."""

    rag: CacheCraft
    folder: Path
    indexing: threading.Lock
    conversations: Conversations
    metrics: MetricsServer | None = None

    def close(self) -> None:
        """Let go of the engine and its metrics."""
        if self.metrics is not None:
            self.metrics.close()
        self.rag.close()

    @property
    def uploads(self) -> Path:
        """The folder of uploaded files; the index is kept in line with it."""
        return self.folder / "uploads"


@dataclass(frozen=True)
class Settings:
    """The settings of one session; `brief` ends an answer after its first sentence."""

    top_k: int
    sampling: SamplingParams
    reuse: ReuseConfig
    compare: bool
    remember: bool
    brief: bool
    picked: tuple[str, ...]


# -- documents --------------------------------------------------------------------------------------------------------


def choose_documents(shared: Shared) -> list[str]:
    """Upload, load the sample, remove; returns the ids of all documents."""
    state = st.session_state
    st.subheader("Documents", anchor=False)
    stored = shared.rag.documents()
    names = [document.doc_id for document in stored]
    if os.environ.get("CACHECRAFT_READ_ONLY") == "1":
        return names
    files = st.file_uploader(
        "Add documents",
        accept_multiple_files=True,
        key=f"upload-{state.uploaded}",
        help="Text, Markdown, HTML, PDF, Word, CSV, JSON",
    )
    if files:
        with st.spinner("Reading …"):
            state.notices = add_uploads(shared, [(file.name, file.getvalue()) for file in files])
        state.uploaded += 1  # a new key empties the uploader; otherwise each rerun would index the same files again
        st.rerun()
    if names and not any(name.startswith("handbook/") for name in names):
        offer_handbook(shared)
    for kind, text in state.notices:
        (st.success if kind == "added" else st.warning)(text)
    choices = removable([(document.doc_id, document.root) for document in stored])
    if choices:
        # The key changes with each removal: a popover with a new key is closed.
        with st.popover("Remove documents", icon=":material/delete:", width="stretch", key=f"open-{state.uploaded}"):
            gone = st.multiselect("What to remove, for everyone", list(choices), key=f"remove-{state.uploaded}")
            if st.button("Remove", disabled=not gone, key="remove", type="primary"):
                state.notices = remove(shared, [name for choice in gone for name in choices[choice]])
                state.uploaded += 1
                st.rerun()
    return names


def offer_handbook(shared: Shared) -> None:
    """A button that adds the sample handbook."""
    if os.environ.get("CACHECRAFT_READ_ONLY") == "1":
        return
    if st.button("Add the sample handbook", icon=":material/menu_book:", width="stretch", key="sample"):
        with st.spinner("Reading the handbook …"), shared.indexing:
            shared.rag.add_documents(HANDBOOK)
        st.session_state.notices = []
        st.rerun()


def removable(documents: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """What can be removed: each document by its name, and the pages of the handbook together.

    documents  (doc_id, folder) of each
    """
    handbook = os.path.abspath(HANDBOOK)
    choices: dict[str, list[str]] = {}
    for doc_id, root in documents:
        choices.setdefault(SAMPLE if root == handbook else doc_id, []).append(doc_id)
    return choices


def remove(shared: Shared, names: list[str]) -> list[tuple[str, str]]:
    """Remove documents with their chunk-caches, and uploaded files; returns messages as `add_uploads`."""
    root = os.path.abspath(shared.uploads)
    with shared.indexing:
        present = {document.doc_id: document.root for document in shared.rag.documents()}
        names = [name for name in names if name in present]  # someone else may have removed one
        for name in names:
            if present[name] == root:
                (shared.uploads / name.partition("/")[2]).unlink(missing_ok=True)
        shared.rag.remove_documents(names)
    return [("added", f"Removed: {len(names)} {'document' if len(names) == 1 else 'documents'}")]


def add_uploads(shared: Shared, files: list[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """Store and index uploaded files; returns messages for the page: ("added" or "problem", Markdown).

    A file that yields no document is deleted again, and all of them if indexing fails: otherwise the next upload would
    fail too. An older file of the same name is replaced.
    """
    notices = []
    stored: list[Path] = []
    with shared.indexing:
        for given, data in files:
            name = file_name(given)
            try:
                (shared.uploads / name).write_bytes(data)
                stored.append(shared.uploads / name)
            except OSError as error:
                notices.append(("problem", f"**{plain(name)}** cannot be stored: {error.strerror}."))
        try:
            report = shared.rag.add_documents(shared.uploads)
        except BaseException:
            for path in stored:
                path.unlink(missing_ok=True)
            raise
        for problem in report.problems:
            name = problem.doc_id.partition("/")[2]
            (shared.uploads / name).unlink(missing_ok=True)
            notices.append(
                ("problem", f"**{plain(name)}** was not added: {plain(problem.reason.rpartition(f'/{name}: ')[2])}")
            )
    done = [name.partition("/")[2] for name in (*report.added, *report.updated)]
    if done:
        notices.append(("added", f"Ready: {', '.join(map(plain, done))}"))
    return notices


def file_name(given: str) -> str:
    """The file name for an upload: no folder, not hidden (the indexer skips those), only printable characters."""
    name = "".join(letter if letter.isprintable() else "_" for letter in given.replace("\\", "/").rpartition("/")[2])
    return name.strip().lstrip(".") or "unnamed"


# -- settings and store -----------------------------------------------------------------------------------------------


def choose_settings(documents: list[str], *, small: bool) -> Settings:
    """The settings; by default `small` models stop after their first sentence."""
    state = st.session_state
    if documents:
        state.picked = [name for name in state.get("picked", []) if name in documents]  # others may have removed some
        st.multiselect("Ask only about", documents, key="picked", placeholder="all documents")
    st.subheader("Reuse", anchor=False)
    reuse = st.toggle("Reuse what was computed before", True, key="reuse")
    how = st.segmented_control(
        "How much of a reused passage to refresh",
        [AUTOMATIC, FIXED],
        default=AUTOMATIC,
        required=True,
        key="recompute",
        help="Automatic: the more, the more a passage depended on text that stands elsewhere now (CFO, eq. 12 of "
        "Cache-Craft).",
        disabled=not reuse,
        width="stretch",
    )
    ratio = None
    if how == FIXED:
        ratio = st.slider("Share of its tokens", 0, 100, 15, 5, format="%d %%", key="ratio", disabled=not reuse) / 100
    focus: Any = st.selectbox(
        "Which passages to refresh",
        list(FOCUS),
        format_func=lambda name: FOCUS[name],
        key="focus",
        disabled=not reuse,
        help="Early termination (Algorithm 1 of Cache-Craft): passages that the question does not attend to are no "
        "longer refreshed.",
    )
    top_k = st.slider("Passages per question", 1, 10, 5, key="top_k")
    compare = st.toggle(
        "Compare with the time without reuse",
        True,
        key="compare",
        help="After each answer the same prompt is computed in full, up to the first token, and timed.",
    )
    length, brief, remember = answer_settings(small=small)
    sampling = SamplingParams(max_new_tokens=length)
    config = ReuseConfig(reuse=reuse, recompute_ratio=ratio, early_termination=focus)
    return Settings(top_k, sampling, config, compare, remember, brief, tuple(state.get("picked", ())))


def answer_settings(*, small: bool) -> tuple[int, bool, bool]:
    """The longest answer in tokens, whether it ends after one sentence, and whether earlier turns are included."""
    with st.expander("Answer"):
        length = st.slider("Maximum length", 16, 512, 96, 16, key="length", help="In tokens, about ¾ of a word each.")
        brief = st.toggle(
            "Stop after the first sentence", small, key="brief", help="Very small models go on with inventions."
        )
        remember = st.toggle(
            "Remember the conversation",
            False,
            key="remember",
            help=f"The prompt includes the last {REMEMBERED_TURNS} turns. Small models get confused.",
        )
    return length, brief, remember


@st.fragment(run_every=4.0)
def store_section(shared: Shared) -> None:
    """The store's size and hit rate; refreshed every few seconds, because captures are written after an answer."""
    st.subheader("Store", anchor=False)
    try:
        stats = shared.rag.engine.store.stats()
    except CacheCraftError as error:  # a fragment runs without `main` around it
        st.warning(plain(str(error)))
        return
    found, asked = stats.lookups.get("found", 0), sum(stats.lookups.values())
    rate = found / asked if asked else 0.0
    st.html(
        meters(
            [
                ("Hit rate", f"{rate:.0%} of {asked} look-ups", rate),
                (
                    "Disk",
                    f"{nbytes(stats.disk_bytes)} of {nbytes(stats.disk_budget)}",
                    stats.disk_bytes / stats.disk_budget,
                ),
                (
                    "Memory",
                    f"{nbytes(stats.host_bytes)} of {nbytes(stats.host_budget)}",
                    stats.host_bytes / max(1, stats.host_budget),
                ),
            ]
        )
    )
    if st.button(
        f"Show the {stats.variants} stored chunk-caches",
        width="stretch",
        key="contents",
        icon=":material/database:",
        disabled=not stats.variants,
    ):
        contents(shared)


@st.dialog("Stored chunk-caches", width="large")
def contents(shared: Shared) -> None:
    """The store's rows, highest eviction score first, without those private to another session."""
    try:
        rows = [row.variant for row in shared.rag.engine.store.rows(limit=200)]
    except CacheCraftError as error:
        st.warning(plain(str(error)))
        return
    rows = [variant for variant in rows if variant.session in (None, st.session_state.session)]
    st.dataframe(
        [
            {
                "chunk": segment_title(shared, v.key.chunk_id),
                "variant": v.variant_id[:12],
                "captured behind": len(v.key.origin_prefix),
                "tokens": v.tokens,
                "CCI": v.cci,
                "f_r": v.reuse_frequency,
                "exact": v.exact_share * 100,
                "MB": v.nbytes / 1e6,
            }
            for v in rows
        ],
        column_config={
            "captured behind": st.column_config.NumberColumn(format="%d segments"),
            "CCI": st.column_config.NumberColumn(format="%.3f"),
            "f_r": st.column_config.NumberColumn(format="%.1f", help="Uses, each divided by its CFO"),
            "exact": st.column_config.NumberColumn(format="%.0f %%", help="Share of its origin prefix that was exact"),
            "MB": st.column_config.NumberColumn(format="%.1f"),
        },
        hide_index=True,
    )


def segment_title(shared: Shared, segment_id: str) -> str:
    """The title of a stored segment."""
    if segment_id == shared.rag.engine.prompts.system.segment_id:
        return "Instruction"
    try:
        return title_of(shared.rag.index.get([segment_id])[0].metadata)
    except CacheCraftError:  # removed meanwhile, or of another instruction
        return "not in the index"
