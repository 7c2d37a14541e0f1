"""The left side of `streamlit_app.py`: documents, settings, and the contents of the store."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit_picture import meters, nbytes, plain, title_of

from cachecraft_rag import CacheCraft, CacheCraftError, ReuseConfig, SamplingParams

HANDBOOK = Path(__file__).parent / "handbook"
REMEMBERED_TURNS = 3
SENTENCE_ENDS = (". ", ".\n")  # a model as small as the demo's would go on after its first sentence, with inventions
FOCUS = {
    "off": "Off: recompute for every chunk",
    "gap": "On: only for chunks the question attends to",
    "printed": "On: the rule as printed in the paper",
}


@dataclass(frozen=True)
class Shared:
    """State shared by all browser sessions; `indexing` keeps two uploads from indexing each other's files."""

    rag: CacheCraft
    folder: Path
    indexing: threading.Lock

    @property
    def uploads(self) -> Path:
        """The folder of uploaded files; the index is kept in line with it."""
        return self.folder / "uploads"


@dataclass(frozen=True)
class Settings:
    """The settings of one session."""

    top_k: int
    sampling: SamplingParams
    reuse: ReuseConfig
    compare: bool
    remember: bool
    picked: tuple[str, ...]


# -- documents --------------------------------------------------------------------------------------------------------


def choose_documents(shared: Shared) -> list[str]:
    """Upload, load the sample, remove; returns the ids of all documents."""
    state = st.session_state
    st.subheader("Documents", anchor=False)
    files = st.file_uploader("Text, Markdown, HTML or PDF", accept_multiple_files=True, key=f"upload-{state.uploaded}")
    if files:
        with st.spinner("Indexing …"):
            state.notices = add_uploads(shared, [(file.name, file.getvalue()) for file in files])
        state.uploaded += 1  # a new key empties the uploader; otherwise each rerun would index the same files again
        st.rerun()
    stored = shared.rag.index.documents()
    names = [document.doc_id for document in stored]
    if not any(name.startswith("handbook/") for name in names) and st.button(
        "Add the sample handbook", icon=":material/menu_book:", width="stretch", key="sample"
    ):
        with st.spinner("Indexing the handbook …"), shared.indexing:
            shared.rag.add_documents(HANDBOOK)
        state.notices = []
        st.rerun()
    for kind, text in state.notices:
        (st.success if kind == "added" else st.warning)(text)
    root = os.path.abspath(shared.uploads)
    own = [document.doc_id for document in stored if document.root == root]
    if own:
        with st.popover("Remove uploads", icon=":material/delete:", width="stretch"):
            gone = st.multiselect("Documents to remove, for all users", own, key=f"remove-{state.uploaded}")
            if st.button("Remove them and their chunk-caches", disabled=not gone, key="remove"):
                with shared.indexing:
                    for name in gone:
                        (shared.uploads / name.partition("/")[2]).unlink(missing_ok=True)
                    shared.rag.add_documents(shared.uploads)
                state.notices, state.uploaded = [], state.uploaded + 1
                st.rerun()
    return names


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
    reuse = st.toggle("Reuse chunk-caches", True, key="reuse")
    how = st.segmented_control(
        "Recompute of reused chunks",
        ["CFO decides", "Fixed share"],
        default="CFO decides",
        required=True,
        key="recompute",
        help="CFO (eq. 12 of Cache-Craft): how much of a chunk depended on neighbours that are missing now.",
        disabled=not reuse,
        width="stretch",
    )
    ratio = None
    if how == "Fixed share":
        ratio = st.slider("Share of tokens", 0, 100, 15, 5, format="%d %%", key="ratio", disabled=not reuse) / 100
    focus: Any = st.selectbox(
        "Focus",
        list(FOCUS),
        format_func=lambda name: FOCUS[name],
        key="focus",
        disabled=not reuse,
        help="Ends the recomputing of chunks that the question does not attend to (Algorithm 1).",
    )
    top_k = st.slider("Chunks per question", 1, 10, 5, key="top_k")
    compare = st.toggle(
        "Compare with full prefill",
        True,
        key="compare",
        help="After each answer the same prompt is computed in full, up to the first token, and timed.",
    )
    with st.expander("Answer"):
        length = st.slider("Maximum tokens", 16, 512, 96, 16, key="length")
        brief = st.toggle("End after one sentence", small, key="brief")
        remember = st.toggle(
            "Remember the conversation",
            False,
            key="remember",
            help=f"The prompt includes the last {REMEMBERED_TURNS} turns. Small models get confused.",
        )
    sampling = SamplingParams(max_new_tokens=length, stop=SENTENCE_ENDS if brief else ())
    config = ReuseConfig(reuse=reuse, recompute_ratio=ratio, early_termination=focus)
    return Settings(top_k, sampling, config, compare, remember, tuple(state.get("picked", ())))


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
        f"{stats.variants} chunk-caches of {stats.chunks} segments",
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
