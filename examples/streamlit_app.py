"""A browser app: drop documents, ask, and see which parts of each prompt were reused, recomputed and computed.

    pip install '.[demo,streamlit]'  # in a checkout
    streamlit run examples/streamlit_app.py

`CACHECRAFT_MODEL` (default "demo") and `CACHECRAFT_STORE` (default "chunk-caches/app") choose the model and the folder
for the index, uploads and chunk-caches. All visitors share one engine, its documents and their chunk-caches; a
conversation belongs to the address of its page. The server listens on 127.0.0.1 only: docs/streamlit.md says how to
publish it. `CACHECRAFT_READ_ONLY=1` hides everything that adds or removes documents. `CACHECRAFT_METRICS_PORT` serves
Prometheus metrics on that port of this machine.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import closing
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st
from streamlit_conversations import Conversations, first_sentence
from streamlit_picture import WELCOME, Turn, headline, markdown_safe, plain, prompt_bar, seconds, sources, ttft_chart
from streamlit_sidebar import (
    HANDBOOK,
    REMEMBERED_TURNS,
    Settings,
    Shared,
    choose_documents,
    choose_settings,
    offer_handbook,
    store_section,
)

from cachecraft_rag import Answer, CacheCraft, CacheCraftError, Chunk, ReuseConfig, SamplingParams

if TYPE_CHECKING:
    from cachecraft_rag.engine.metrics import MetricsServer

HERE = Path(__file__).parent
FULL_PREFILL = ReuseConfig(reuse=False, capture=False)
# Run once for each new question: a reader who has scrolled down to a suggestion and clicks it sees the answer begin.
SCROLL_UP = "<script>document.querySelector('[data-testid=\"stMain\"]')?.scrollTo(0, 0) // {number}</script>"
# Not an emoji or a Streamlit icon: those are fetched from a font server, and this app makes no requests.
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#0d9488"/>'
    '<path d="M6 19h6v6H6zm8-6h5v12h-5zm7-6h5v18h-5z" fill="#fff"/></svg>'
)


@st.cache_resource(
    show_spinner="Loading the model: a few seconds, the very first time half a minute …",
    on_release=lambda shared: shared.close(),
)
def load(model: str, folder: str) -> Shared:
    """The engine of this server, loaded once. Its slow first pass runs here, so that it is in no measured time."""
    rag = CacheCraft.from_pretrained(model, store=folder)
    try:
        one_token = SamplingParams(max_new_tokens=1)
        for _ in rag.engine.stream("Ready?", [Chunk("warm up " * 300)], sampling=one_token, config=FULL_PREFILL):
            pass
        metrics = metrics_of(rag, os.environ.get("CACHECRAFT_METRICS_PORT"))
        shared = Shared(rag, Path(folder), threading.Lock(), Conversations(), metrics)
        shared.uploads.mkdir(parents=True, exist_ok=True)
    except BaseException:
        rag.close()
        raise
    return shared


def metrics_of(rag: CacheCraft, port: str | None) -> MetricsServer | None:
    """A server of the engine's metrics, where a port is given."""
    if not port:
        return None
    from cachecraft_rag.engine.metrics import serve_metrics

    if not port.isdecimal():
        raise CacheCraftError(f"CACHECRAFT_METRICS_PORT is {port!r}; it must be the number of a port")
    return serve_metrics(rag.engine, int(port))


def main() -> None:
    """The page, from top to bottom."""
    st.set_page_config("cachecraft-rag", ICON, layout="wide")
    st.html(HERE / "streamlit_style.css")
    if not may_enter():
        return
    for name, value in {"notices": [], "uploaded": 0}.items():
        st.session_state.setdefault(name, value)
    st.html(
        '<div class="cc-title"><h1>Ask your documents</h1><p>Text that was computed once is reused: '
        "every answer shows the reused part of its prompt and the time it saved.</p></div>"
    )
    model = os.environ.get("CACHECRAFT_MODEL", "demo")
    try:
        shared = load(model, os.environ.get("CACHECRAFT_STORE", "chunk-caches/app"))
        resume(shared)
        with st.sidebar:
            documents = choose_documents(shared)
            settings = choose_settings(documents, small=model == "demo")
            store_section(shared)
        conversation(shared, settings, documents)
    except CacheCraftError as error:
        st.error(f"This did not work: {plain(str(error))}", icon=":material/error:")


def may_enter() -> bool:
    """Whether the visitor may use the app: always, unless the server's secrets name a log-in (`[auth]`)."""
    if not st.secrets.load_if_toml_exists() or "auth" not in st.secrets or st.user.is_logged_in:
        return True
    st.html('<div class="cc-title"><h1>Ask your documents</h1><p>Please log in.</p></div>')
    st.button("Log in", on_click=st.login, type="primary", key="login")
    return False


def resume(shared: Shared) -> None:
    """Put the conversation of the page's address into the session; a page without one gets a new one."""
    state, owner = st.session_state, str(st.user.get("sub") or "")
    key = str(st.query_params.get("c", ""))
    turns = shared.conversations.find(key, owner)
    if turns is None:
        key = shared.conversations.new(owner)
        turns = shared.conversations.find(key, owner)
    if st.query_params.get("c") != key:
        st.query_params["c"] = key
    state.session, state.turns = key, turns


# -- the conversation -------------------------------------------------------------------------------------------------


def conversation(shared: Shared, settings: Settings, documents: list[str]) -> None:
    """The newest turn first, the new question if there is one, and the panel beside them.

    The field to type in stands at the top, in a container. With the field at its usual place, the bottom of the page,
    Streamlit scrolls to the end of the page after each answer, past the answer's beginning.
    """
    turns: list[Turn] = st.session_state.turns
    with st.container(key="ask"):
        typed = st.chat_input("Ask something about your documents", key="question")
    if not turns and not typed:
        st.html(WELCOME)
        if not documents:
            offer_handbook(shared)
    left, right = st.columns([3, 2], gap="large")
    panel = right.empty()
    with panel.container(key="panel"):
        draw_panel(turns)
    with left:
        fresh = st.empty()
        if turns:
            draw_turn(shared, turns[-1], len(turns), newest=True)
        question = (typed or suggestion(documents) or "").strip()
        for number in range(len(turns) - 1, 0, -1):
            draw_turn(shared, turns[number - 1], number, newest=False)
    if not question:
        return
    with fresh.container():
        if not documents:
            st.info(
                "There is nothing to ask about yet. Add a document on the left, or the sample handbook.",
                icon=":material/upload_file:",
            )
            offer_handbook(shared)
            return

        def show(turn: Turn) -> None:
            with panel.container(key="panel-live"):
                draw_panel([*turns, turn])

        if answer(shared, settings, question, number=len(turns) + 1, show=show):
            st.rerun()


def suggestion(documents: list[str]) -> str | None:
    """Offer questions about the sample handbook that were not asked yet; returns the one that was clicked."""
    if not any(name.startswith("handbook/") for name in documents):
        return None
    turns = st.session_state.turns
    asked = {turn.question for turn in turns}
    known = [entry["question"] for entry in json.loads((HANDBOOK / ".questions.json").read_text(encoding="utf-8"))]
    offered = [question for question in known[1:] if question not in asked][:3]
    clicked: str | None = st.pills("Questions to try", offered, key=f"try-{len(turns)}")
    return clicked


def answer(shared: Shared, settings: Settings, question: str, *, number: int, show: Callable[[Turn], None]) -> bool:
    """Stream one answer into the page, then time full prefill; False if there was only an error to show.

    A user who clicks before the end interrupts the script at any line that touches the page or its state; the answer so
    far is kept.
    """
    state = st.session_state
    turns: list[Turn] = state.turns  # looked up now: an interrupted script cannot read the session state
    st.html(SCROLL_UP.format(number=number), unsafe_allow_javascript=True)
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
    text, whole = "", False  # `whole`: it was to end after one sentence, and did
    try:
        with closing(shared.rag.stream(question, config=settings.reuse, **arguments)) as stream:
            try:
                for piece in stream:
                    first = first_sentence(stream.text) if settings.brief else None
                    if stream.text == piece:  # the first one: the plan is known, so the picture can be drawn
                        turn = Turn(question, Answer(piece, stream.sources, stream.stats), arguments)
                        picture.html(prompt_bar(turn.answer, system_tokens(shared)))
                        show(turn)
                    place.markdown(markdown_safe(first or stream.text) + " ▌")
                    if first is not None:
                        text, whole = first, True
                        break
                    text = stream.text
            finally:
                stream.close()
                if stream.stats.ttft_s:
                    turn = Turn(question, Answer(text.strip(), stream.sources, stream.stats), arguments, brief=whole)
                    turns.append(turn)
    except CacheCraftError as error:
        place.warning(f"This question could not be answered: {plain(str(error))}", icon=":material/error:")
        return False
    if settings.compare and settings.reuse.reuse:
        place.markdown(markdown_safe(turn.answer.text))
        with st.spinner("For comparison: the same without reuse …"):
            time_full_prefill(shared, turn)
    return True


def time_full_prefill(shared: Shared, turn: Turn) -> None:
    """Ask again without reuse and stop after the first piece; the prompt is the same, trimmed chunks included."""
    engine = shared.rag.engine
    # First wait for the answer's captures: they are still being written and would share the processor with this pass.
    engine.write_back.wait_for([engine.prompts.system.segment_id, *(source.chunk_id for source in turn.answer.sources)])
    engine.store.flush(timeout=20)
    with closing(shared.rag.stream(turn.question, config=FULL_PREFILL, **turn.arguments)) as stream:
        next(stream, "")
        turn.full_ttft_s = stream.stats.ttft_s


def draw_turn(shared: Shared, turn: Turn, number: int, *, newest: bool) -> None:
    """A question, its answer, its statistics, its bar and its sources."""
    asked_line(turn.question, number)
    st.markdown(markdown_safe(turn.answer.text))
    st.html(headline(turn) + prompt_bar(turn.answer, system_tokens(shared)) + sources(turn.answer, unfolded=newest))
    if turn.full_ttft_s is None and st.button("Time it without reuse", key=f"full-{number}", icon=":material/timer:"):
        with st.spinner("The same without reuse …"):
            time_full_prefill(shared, turn)
        st.rerun()


def asked_line(question: str, number: int) -> None:
    """The question as the heading of its turn."""
    st.html(f'<p class="cc-asked"><small>{number}</small>{escape(question)}</p>')


def draw_panel(turns: list[Turn]) -> None:
    """Beside the conversation: the newest answer's statistics, and the times of all answers."""
    if not turns:
        return
    last, asked = turns[-1], sum(turn.answer.stats.tokens_prompt for turn in turns)
    reused = sum(turn.answer.stats.tokens_reused for turn in turns)
    first, second, third = st.columns(3)
    first.metric("First token", seconds(last.answer.stats.ttft_s))
    second.metric("Without reuse", seconds(last.full_ttft_s) if last.full_ttft_s else "–")
    third.metric("Reused", f"{reused / asked:.0%}", help="Share of all prompt tokens of this conversation")
    st.subheader("Time to the first token", anchor=False)
    st.altair_chart(ttft_chart(turns))
    if st.button("New conversation", icon=":material/restart_alt:", type="tertiary", key=f"restart-{len(turns)}"):
        del st.query_params["c"]
        st.rerun()


def system_tokens(shared: Shared) -> int:
    """The length of the instruction; an answer's statistics do not have it."""
    return len(shared.rag.engine.prompts.system.token_ids)


if __name__ == "__main__":
    main()
