"""A browser app: drop documents, ask, and watch which parts of each prompt were reused, recomputed and computed.

    streamlit run examples/streamlit_app.py

`CACHECRAFT_MODEL` (default "demo") and `CACHECRAFT_STORE` (default "chunk-caches/app") choose the model and the folder
for the index, uploads and chunk-caches. Everybody who opens the page shares one engine, its documents and the
chunk-caches of these; a conversation belongs to its browser session.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit_picture import (
    WELCOME,
    Turn,
    headline,
    markdown_safe,
    meters,
    nbytes,
    prompt_bar,
    seconds,
    sources,
    title_of,
    ttft_chart,
)

from cachecraft_rag import Answer, CacheCraft, CacheCraftError, Chunk, ReuseConfig, SamplingParams

HERE = Path(__file__).parent
HANDBOOK = HERE / "handbook"
FULL_PREFILL = ReuseConfig(reuse=False, births=False)
# Not an emoji or one of Streamlit's own icons: those come from a font server, and this app talks to nobody.
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#0d9488"/>'
    '<path d="M6 19h6v6H6zm8-6h5v12h-5zm7-6h5v18h-5z" fill="#fff"/></svg>'
)
SENTENCE_ENDS = (". ", ".\n")  # a model as small as the demo's goes on after its first sentence, and invents
REMEMBERED_TURNS = 3
FOCUS = {
    "off": "Off: recompute for every chunk",
    "gap": "On: only for chunks the question looks at",
    "printed": "On: the paper's rule to the letter",
}


@dataclass(frozen=True)
class Shared:
    """What all browser sessions share. The lock is for indexing: two uploads at once would see half of each other."""

    rag: CacheCraft
    folder: Path
    indexing: threading.Lock

    @property
    def uploads(self) -> Path:
        """Uploaded files lie here, and the index is made to match."""
        return self.folder / "uploads"


@dataclass(frozen=True)
class Settings:
    """The switches of one session."""

    top_k: int
    sampling: SamplingParams
    reuse: ReuseConfig
    compare: bool
    remember: bool
    picked: tuple[str, ...]


@st.cache_resource(
    show_spinner="Loading the model: a few seconds, the very first time half a minute …",
    on_release=lambda shared: shared.rag.close(),
)
def load(model: str, folder: str) -> Shared:
    """The engine of this server, loaded once. Its first pass runs here: it is always slow, nobody should time it."""
    rag = CacheCraft.from_pretrained(model, store=folder)
    try:
        one_token = SamplingParams(max_new_tokens=1)
        for _ in rag.engine.stream("Ready?", [Chunk("warm up " * 300)], sampling=one_token, config=FULL_PREFILL):
            pass
        shared = Shared(rag, Path(folder), threading.Lock())
        shared.uploads.mkdir(parents=True, exist_ok=True)
    except BaseException:
        rag.close()
        raise
    return shared


def main() -> None:
    """The page, from top to bottom."""
    st.set_page_config("cachecraft-rag", ICON, layout="wide")
    st.html(HERE / "streamlit_style.css")
    state = st.session_state
    for name, value in {"session": uuid.uuid4().hex, "turns": [], "notices": [], "uploaded": 0}.items():
        state.setdefault(name, value)
    st.html(
        '<div class="cc-title"><h1>Ask your documents</h1><p>Chunks that were read once are not read again: '
        "every answer shows what its prompt reused, and what that saved.</p></div>"
    )
    model = os.environ.get("CACHECRAFT_MODEL", "demo")
    try:
        shared = load(model, os.environ.get("CACHECRAFT_STORE", "chunk-caches/app"))
        with st.sidebar:
            documents = choose_documents(shared)
            settings = choose_settings(documents, small=model == "demo")
            store_section(shared)
        conversation(shared, settings, documents)
    except CacheCraftError as error:
        st.error(f"This did not work: {error}", icon=":material/error:")


# -- documents --------------------------------------------------------------------------------------------------------


def choose_documents(shared: Shared) -> list[str]:
    """Upload, load the sample, remove; returns the ids of all documents."""
    state = st.session_state
    st.subheader("Documents", anchor=False)
    files = st.file_uploader("Text, Markdown, HTML or PDF", accept_multiple_files=True, key=f"upload-{state.uploaded}")
    if files:
        with st.spinner("Indexing …"):
            state.notices = add_uploads(shared, [(file.name, file.getvalue()) for file in files])
        state.uploaded += 1  # a new key empties the uploader: else each rerun would index the same files again
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
        (st.success if kind == "added" else st.warning)(markdown_safe(text))
    root = os.path.abspath(shared.uploads)
    own = [document.doc_id for document in stored if document.root == root]
    if own:
        with st.popover("Remove uploads", icon=":material/delete:", width="stretch"):
            gone = st.multiselect("Documents to remove, for everybody", own, key=f"remove-{state.uploaded}")
            if st.button("Remove them and their chunk-caches", disabled=not gone, key="remove"):
                with shared.indexing:
                    for name in gone:
                        (shared.uploads / name.partition("/")[2]).unlink(missing_ok=True)
                    shared.rag.add_documents(shared.uploads)
                state.notices, state.uploaded = [], state.uploaded + 1
                st.rerun()
    return names


def add_uploads(shared: Shared, files: list[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """Store and index uploaded files; returns what to say about each: ("added" or "problem", text).

    A file that gives no document is deleted again. An older one of the same name is replaced, as in any folder.
    """
    notices = []
    with shared.indexing:
        for given, data in files:
            name = Path(given.replace("\\", "/")).name.lstrip(".") or "unnamed"  # hidden files would be passed over
            try:
                (shared.uploads / name).write_bytes(data)
            except OSError as error:
                notices.append(("problem", f"**{name}** cannot be stored: {error.strerror}."))
        report = shared.rag.add_documents(shared.uploads)
        for problem in report.problems:
            name = problem.doc_id.partition("/")[2]
            (shared.uploads / name).unlink(missing_ok=True)
            notices.append(("problem", f"**{name}** was not added: {problem.reason.rpartition(f'/{name}: ')[2]}"))
    done = [name.partition("/")[2] for name in (*report.added, *report.updated)]
    if done:
        notices.append(("added", f"Ready: {', '.join(done)}"))
    return notices


# -- settings and store -----------------------------------------------------------------------------------------------


def choose_settings(documents: list[str], *, small: bool) -> Settings:
    """The switches; `small` models are stopped after their first sentence unless told otherwise."""
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
        help="CFO (eq. 12 of Cache-Craft) says per chunk how many tokens depended on neighbours that are gone.",
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
        length = st.slider("At most so many tokens", 16, 512, 96, 16, key="length")
        brief = st.toggle("End after one sentence", small, key="brief")
        remember = st.toggle(
            "Remember the conversation",
            False,
            key="remember",
            help=f"The last {REMEMBERED_TURNS} turns go along with the question. Small models get confused.",
        )
    sampling = SamplingParams(max_new_tokens=length, stop=SENTENCE_ENDS if brief else ())
    config = ReuseConfig(reuse=reuse, recompute_ratio=ratio, focus=focus)
    return Settings(top_k, sampling, config, compare, remember, tuple(state.get("picked", ())))


@st.fragment(run_every=4.0)
def store_section(shared: Shared) -> None:
    """How full the store is and how often it had what was asked for; looked at again and again, as births come late."""
    st.subheader("Store", anchor=False)
    try:
        stats = shared.rag.engine.store.stats()
    except CacheCraftError as error:  # a fragment runs without `main` around it
        st.warning(str(error))
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
    """The store's rows, the most worthy first; those private to another session are left out."""
    try:
        rows = [row.variant for row in shared.rag.engine.store.rows(limit=200)]
    except CacheCraftError as error:
        st.warning(str(error))
        return
    rows = [variant for variant in rows if variant.session in (None, st.session_state.session)]
    st.dataframe(
        [
            {
                "chunk": segment_title(shared, v.key.chunk_id),
                "variant": v.variant_id[:12],
                "born behind": len(v.key.birth_prefix),
                "tokens": v.tokens,
                "CCI": v.cci,
                "f_r": v.reuse_frequency,
                "exact": v.exact_share * 100,
                "MB": v.nbytes / 1e6,
            }
            for v in rows
        ],
        column_config={
            "born behind": st.column_config.NumberColumn(format="%d segments"),
            "CCI": st.column_config.NumberColumn(format="%.3f"),
            "f_r": st.column_config.NumberColumn(format="%.1f", help="How much it was used; the lowest is evicted"),
            "exact": st.column_config.NumberColumn(format="%.0f %%", help="Share of its birth prefix that was exact"),
            "MB": st.column_config.NumberColumn(format="%.1f"),
        },
        hide_index=True,
    )


def segment_title(shared: Shared, segment_id: str) -> str:
    """What a chunk-cache is of."""
    if segment_id == shared.rag.engine.prompts.system.segment_id:
        return "Instruction"
    try:
        return title_of(shared.rag.index.get([segment_id])[0].metadata)
    except CacheCraftError:  # removed meanwhile, or of another instruction
        return "not in the index"


# -- the conversation -------------------------------------------------------------------------------------------------


def conversation(shared: Shared, settings: Settings, documents: list[str]) -> None:
    """Earlier turns, the new question if there is one, and the panel beside them."""
    turns: list[Turn] = st.session_state.turns
    typed = st.chat_input("Ask something about your documents", key="question")
    if not turns and not typed:
        st.html(WELCOME)
    left, right = st.columns([3, 2], gap="large")
    panel = right.empty()
    with panel.container(key="panel"):
        draw_panel(turns)
    with left:
        for number, turn in enumerate(turns, start=1):
            draw_turn(shared, turn, number)
        fresh = st.empty()
        question = (typed or suggestion(documents) or "").strip()
    if not question:
        return
    with fresh.container():
        if not documents:
            st.info(
                "There is nothing to ask about yet. Drop a document on the left, or add the sample handbook.",
                icon=":material/upload_file:",
            )
            return

        def show(turn: Turn) -> None:
            with panel.container(key="panel-live"):
                draw_panel([*turns, turn])

        if answer(shared, settings, question, number=len(turns) + 1, show=show):
            st.rerun()


def suggestion(documents: list[str]) -> str | None:
    """Offer a few questions about the sample handbook that have not been asked; returns the one that was clicked."""
    if not any(name.startswith("handbook/") for name in documents):
        return None
    turns = st.session_state.turns
    asked = {turn.question for turn in turns}
    known = [entry["question"] for entry in json.loads((HANDBOOK / "questions.json").read_text(encoding="utf-8"))]
    offered = [question for question in known[1:] if question not in asked][:3]
    clicked: str | None = st.pills("Questions to try", offered, key=f"try-{len(turns)}")
    return clicked


def answer(shared: Shared, settings: Settings, question: str, *, number: int, show: Callable[[Turn], None]) -> bool:
    """Stream one answer into the page, then time full prefill; False when there was only an error to show.

    A reader who goes on before the end interrupts the script, at any line that touches the page or its state: what has
    come by then is kept.
    """
    state = st.session_state
    turns: list[Turn] = state.turns  # looked up now: once interrupted, the script may not look anything up
    asked_line(question, number)
    earlier = turns[-REMEMBERED_TURNS:] if settings.remember else []
    arguments: dict[str, Any] = {
        "sampling": settings.sampling,
        "top_k": settings.top_k,
        "where": (lambda metadata: metadata["source"] in settings.picked) if settings.picked else None,
        "history": [pair for turn in earlier for pair in (("user", turn.question), ("assistant", turn.answer.text))],
        "session": state.session,
    }
    place, picture = st.empty(), st.empty()
    place.markdown(":gray[Reading …]")
    try:
        with closing(shared.rag.stream(question, config=settings.reuse, **arguments)) as stream:
            try:
                for piece in stream:
                    if stream.text == piece:  # the first one: the plan is known, so the picture can be drawn
                        turn = Turn(question, Answer(piece, stream.sources, stream.stats), arguments)
                        picture.html(prompt_bar(turn.answer, system_tokens(shared)))
                        show(turn)
                    place.markdown(markdown_safe(stream.text) + " ▌")
            finally:
                stream.close()
                if stream.stats.ttft_s:
                    turn = Turn(question, Answer(stream.text, stream.sources, stream.stats), arguments)
                    turns.append(turn)
    except CacheCraftError as error:
        place.warning(f"This question could not be answered: {error}", icon=":material/error:")
        return False
    if settings.compare and settings.reuse.reuse:
        place.markdown(markdown_safe(answer_text(turn)))
        with st.spinner("For comparison: full prefill …"):
            time_full_prefill(shared, turn)
    return True


def time_full_prefill(shared: Shared, turn: Turn) -> None:
    """Ask again with nothing reused and stop after the first piece; so the prompt is the same, trimmed by one rule."""
    engine = shared.rag.engine
    # What the answer bore is still being described and written, and would share the processor with this.
    engine.births.wait_for([engine.prompts.system.segment_id, *(source.chunk_id for source in turn.answer.sources)])
    engine.store.flush(timeout=20)
    with closing(shared.rag.stream(turn.question, config=FULL_PREFILL, **turn.arguments)) as stream:
        next(stream, "")
        turn.full_ttft_s = stream.stats.ttft_s


def draw_turn(shared: Shared, turn: Turn, number: int) -> None:
    """A question, its answer, its numbers and its bar."""
    asked_line(turn.question, number)
    st.markdown(markdown_safe(answer_text(turn)))
    st.html(headline(turn) + prompt_bar(turn.answer, system_tokens(shared)))
    if turn.full_ttft_s is None and st.button("Time full prefill", key=f"full-{number}", icon=":material/timer:"):
        with st.spinner("Full prefill …"):
            time_full_prefill(shared, turn)
        st.rerun()


def asked_line(question: str, number: int) -> None:
    """The question as the heading of its turn."""
    st.html(f'<p class="cc-asked"><small>{number}</small>{escape(question)}</p>')


def answer_text(turn: Turn) -> str:
    """The answer, with the full stop that ended it."""
    return turn.answer.text.strip() + ("." if turn.answer.stats.finish == "stop" else "")


def draw_panel(turns: list[Turn]) -> None:
    """Beside the conversation: the newest answer's numbers and sources, and the times of all."""
    if not turns:
        return
    last, asked = turns[-1], sum(turn.answer.stats.tokens_prompt for turn in turns)
    reused = sum(turn.answer.stats.tokens_reused for turn in turns)
    first, second, third = st.columns(3)
    first.metric("First token", seconds(last.answer.stats.ttft_s))
    second.metric("Full prefill", seconds(last.full_ttft_s) if last.full_ttft_s else "–")
    third.metric("Reused so far", f"{reused / asked:.0%}", help="Of the tokens of all prompts above")
    st.subheader("Time to the first token", anchor=False)
    st.altair_chart(ttft_chart(turns))
    st.subheader(f"Sources of answer {len(turns)}", anchor=False)
    st.html(sources(last.answer))
    if st.button("New conversation", icon=":material/restart_alt:", type="tertiary", key=f"restart-{len(turns)}"):
        st.session_state.turns = []
        st.rerun()


def system_tokens(shared: Shared) -> int:
    """The length of the instruction, which an answer's numbers do not name."""
    return len(shared.rag.engine.prompts.system.token_ids)


if __name__ == "__main__":
    main()
