"""A browser app: drop documents, ask, and see which parts of each prompt were reused, recomputed and computed.

    pip install -e '.[demo,streamlit]'  # in a checkout
    streamlit run examples/streamlit_app.py

`CACHECRAFT_MODEL` (default "demo") and `CACHECRAFT_STORE` (default "chunk-caches/app") choose the model and the folder
for the index, uploads and chunk-caches. All visitors share one engine, its documents and their chunk-caches; a
conversation belongs to the address of its page. The server listens on 127.0.0.1 only: docs/guides/browser_app.md says
how to publish it. `CACHECRAFT_READ_ONLY=1` hides everything that adds or removes documents. `CACHECRAFT_METRICS_PORT`
serves Prometheus metrics on that port of this machine.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import closing
from html import escape
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit_conversations import Conversations, Turn
from streamlit_documents import (
    HANDBOOK,
    Shared,
    documents_section,
    questions_about,
    wait_for_reading,
)
from streamlit_picture import (
    headline,
    in_words,
    markdown_safe,
    plain,
    prompt_bar,
    size,
    sources,
    verdict,
)
from streamlit_savings import plan, strip

from cachecraft_rag import (
    Answer,
    CacheCraft,
    CacheCraftError,
    Chunk,
    ReuseConfig,
    SamplingParams,
)
from cachecraft_rag.cli.first_sentence import first_sentence

STYLE = Path(__file__).parent / "streamlit_style.css"
WELCOME = (
    "Ask questions about your documents: {model} answers on this server, and answers begin sooner where the same text "
    "was read before."
)
DEMO_MODEL = "the small demo model SmolLM2-135M-Instruct"
REMEMBERED_TURNS = 3
AUTOMATIC = "automatic"
FULL_PREFILL = ReuseConfig.full_prefill()


@st.cache_resource(
    show_spinner="Loading the model: a few seconds, the very first time half a minute …",
    on_release=lambda shared: shared.rag.close(),
)
def load(model: str, folder: str) -> Shared:
    """The engine of this server, loaded once. Its slow first pass runs here, so that it is in no measured time."""
    port = int(os.environ.get("CACHECRAFT_METRICS_PORT", 0))
    uploads = Path(folder) / "uploads"
    uploads.mkdir(parents=True, exist_ok=True)
    # Text of audited answers is kept in memory only, because each answer here belongs to a session.
    rag = CacheCraft.from_pretrained(model, store=folder, audit="idle", audit_text=True)
    one_token = SamplingParams(max_new_tokens=1)
    list(
        rag.engine.stream(
            "Ready?", [Chunk("warm up " * 300)], sampling=one_token, config=FULL_PREFILL
        )
    )
    if port:
        from cachecraft_rag.observability.metrics import serve_metrics

        serve_metrics(rag.engine, port)
    return Shared(rag, uploads, threading.Lock(), Conversations())


def main() -> None:
    """The page, from top to bottom."""
    st.set_page_config("cachecraft-rag")
    st.html(STYLE)
    st.title("Ask your documents", anchor=False)
    if st.secrets.load_if_toml_exists() and "auth" in st.secrets and not st.user.is_logged_in:
        st.button("Log in", on_click=st.login, type="primary", key="login")
        return
    model = os.environ.get("CACHECRAFT_MODEL", "demo")
    try:
        shared = load(model, os.environ.get("CACHECRAFT_STORE", "chunk-caches/app"))
        turns = resume(shared)
        if show_plan(turns):
            return
        if saved := strip(shared.savings.totals(shared.rag.engine.audit_of)):
            st.html(saved)
        # at the top: from the bottom Streamlit scrolls past each answer's beginning
        with st.container(key="ask"):
            typed = st.chat_input("Ask something about your documents", key="question")
        documents = documents_section(shared)
        with st.sidebar:
            choose_settings(shared, documents, small=model == "demo")
        welcome = WELCOME.format(model=DEMO_MODEL if model == "demo" else plain(model))
        conversation(shared, turns, documents, str(typed or "").strip(), welcome)
    except CacheCraftError as error:
        st.error(f"This did not work: {plain(in_words(error))}", icon=":material/error:")


def resume(shared: Shared) -> list[Turn]:
    """The conversation of the page's address; a page without one gets a new one."""
    owner, key = str(st.user.get("sub") or ""), str(st.query_params.get("c", ""))
    turns = shared.conversations.find(key, owner)
    if turns is None:
        key = shared.conversations.new(owner)
        turns = shared.conversations.find(key, owner)
        st.query_params["c"] = key
    assert turns is not None
    st.session_state.session, st.session_state.turns = key, turns
    return turns


def show_plan(turns: list[Turn]) -> bool:
    """Show only the plan of the answer that the page's address names, such as `?c=…&plan=2`; False if it names none."""
    number = str(st.query_params.get("plan", ""))
    if not number.isdecimal() or not 1 <= int(number) <= len(turns):
        return False
    turn = turns[int(number) - 1]
    if turn.answer is None:
        return False
    st.html(plan(turn, int(number)))
    if st.button("Back to the conversation", key="back"):
        del st.query_params["plan"]
        st.rerun()
    return True


def choose_settings(shared: Shared, documents: list[str], *, small: bool) -> None:
    """The settings, in the session under their keys; by default `small` models stop after their first sentence."""
    state = st.session_state
    # others may have removed some
    state.picked = [name for name in state.get("picked", []) if name in documents]
    st.multiselect("Ask only about", documents, key="picked", placeholder="all documents")
    st.toggle(f"Remember the last {REMEMBERED_TURNS} turns", True, key="remember")
    st.slider(
        "Maximum length in tokens", 16, 512, 96, 16, key="length", help="About ¾ of a word each."
    )
    st.toggle(
        "Stop after the first sentence", small, key="brief", help="Small models go on to invent."
    )
    with st.expander("Expert settings", icon=":material/tune:"):
        off = not st.toggle("Reuse what was computed before", True, key="reuse")
        label = "How much of a reused passage is recomputed, in %"
        help = "Automatic: the more, the more a passage depended on text that stands elsewhere now."
        st.select_slider(
            label, [AUTOMATIC, *range(0, 101, 5)], key="ratio", disabled=off, help=help
        )
        st.toggle(
            "Recompute only passages that the question needs", False, key="focus", disabled=off
        )
        help = (
            "After the answer, to the first token; left out if something else runs on this server."
        )
        st.toggle("Time each prompt without reuse too", True, key="compare", help=help)
        st.slider("Passages per question", 1, 10, 5, key="top_k")
    if st.button("New conversation", icon=":material/restart_alt:", key="restart"):
        del st.query_params["c"]
        state.waiting = []
        st.rerun()
    stats = shared.rag.engine.store.stats()
    st.caption(
        f"{stats.variants} chunk-caches: {size(stats.disk_bytes)} of {size(stats.disk_budget)} on disk"
    )


def conversation(
    shared: Shared, turns: list[Turn], documents: list[str], question: str, welcome: str
) -> None:
    """Show the new question if there is one, then the earlier turns, the newest first.

    While this page's documents are read, questions wait. A baseline is timed when everything is shown, so no reader
    waits for it.
    """
    question = question or suggestion(shared, turns, documents)
    question = (
        put_off(question) if "reading" in st.session_state else next_question(turns, question)
    )
    fresh = st.empty()
    if not turns:
        fresh.caption(welcome)
    for number in range(len(turns), 0, -1):
        turn = turns[number - 1]
        asked_line(turn.question, number)
        if turn.answer is not None:
            st.markdown(markdown_safe(turn.answer.text))
            bar = prompt_bar(turn.answer, system_tokens(shared))
            checked = verdict(turn, shared.rag.engine.audit_of(turn.answer.stats.request_id))
            st.html(
                headline(turn) + checked + bar + sources(turn.answer, unfolded=number == len(turns))
            )
            st.markdown(f"[Plan of this answer](?c={st.session_state.session}&plan={number})")
        if not turn.whole and st.button(
            "Ask again", key=f"again-{number}", icon=":material/replay:"
        ):
            question = turn.question
    if "reading" in st.session_state:
        if question:
            put_off(question)
        with fresh.container():
            wait_for_reading(shared)
    elif question and not documents:
        fresh.info("There is nothing to ask about yet: add a document, or the sample handbook.")
    elif question:
        with fresh.container():
            while question:
                for waiting in st.session_state.waiting:
                    st.caption(f"Next: {plain(waiting)}")
                if answer(shared, turns, question):
                    st.rerun()
                question = next_question(turns, "")
    elif turns and turns[-1].whole and turns[-1].compare:
        with fresh.container():
            time_full_prefill(shared, turns[-1])
        st.rerun()
    elif turns and turns[-1].answer is not None and turns[-1].whole:
        request_id = turns[-1].answer.stats.request_id
        if request_id not in st.session_state.get("audits_shown", ()):
            with fresh.container():
                wait_for_audit(shared, request_id)


@st.fragment(run_every=1.0)
def wait_for_audit(shared: Shared, request_id: str) -> None:
    """Show the page again once an answer has been compared with one without reuse, which happens in idle time."""
    engine = shared.rag.engine
    if engine.audit_of(request_id) is not None or not engine.auditor.busy:
        st.session_state.setdefault("audits_shown", set()).add(request_id)
        st.rerun()
    st.caption("Comparing this answer with one without reuse …")


def put_off(question: str) -> str:
    """Let a question wait in the session; returns "", as there is nothing to answer now."""
    waiting: list[str] = st.session_state.setdefault("waiting", [])
    if question and question not in waiting:
        waiting.append(question)
    return ""


def next_question(turns: list[Turn], asked: str) -> str:
    """Return the question to answer now; the others wait in the session.

    A question that is asked during an answer makes Streamlit interrupt that answer. Its question is answered once more,
    before the new one.
    """
    state = st.session_state
    waiting: list[str] = state.setdefault("waiting", [])
    interrupted = state.pop("answering", None)
    if asked:
        if turns and turns[-1] is interrupted:
            waiting.append(turns.pop().question)
        # a suggestion that was clicked while documents were read waits already
        if asked not in waiting:
            waiting.append(asked)
    return waiting.pop(0) if waiting else ""


def suggestion(shared: Shared, turns: list[Turn], documents: list[str]) -> str:
    """Offer questions that were not asked yet; returns the one that was clicked.

    They are about the visitor's own upload, then about the sample handbook.
    """
    added = [name for name in st.session_state.get("added", []) if name in documents]
    questions = questions_about(shared, added)
    if any(name.startswith("handbook/") for name in documents):
        known = json.loads((HANDBOOK / ".questions.json").read_text(encoding="utf-8"))
        questions += [entry["question"] for entry in known[1:]]
    asked = {turn.question for turn in turns}
    offered = [question for question in questions if question not in asked][:3]
    if not offered:
        return ""
    return str(st.pills("Questions to try", offered, key=f"try-{len(turns)}") or "")


def answer(shared: Shared, turns: list[Turn], question: str) -> bool:
    """Stream one answer into the page; False if there was only an error to show.

    A user who clicks before the end interrupts the script at any line that touches the page or its state; the answer so
    far is kept.
    """
    state = st.session_state
    picked = list(state.picked)
    brief = state.brief
    earlier = [turn for turn in turns[-REMEMBERED_TURNS:] if state.remember and turn.answer]
    history = [
        said
        for turn in earlier
        for said in (("user", turn.question), ("assistant", turn.answer.text))
    ]
    arguments: dict[str, Any] = {
        "sampling": SamplingParams(max_new_tokens=state.length),
        "top_k": state.top_k,
        "where": (lambda metadata: metadata["source"] in picked) if picked else None,
        "history": history,
        "session": state.session,
    }
    ratio = None if state.ratio == AUTOMATIC else state.ratio / 100
    reuse = ReuseConfig(reuse=state.reuse, recompute_ratio=ratio).with_method(
        early_termination="probe" if state.focus else "off"
    )
    turn = Turn(question, arguments, compare=state.compare and state.reuse)
    turns.append(turn)
    state.answering = turn
    asked_line(question, len(turns))
    place, picture = st.empty(), st.empty()
    place.markdown(":gray[Reading …]")
    try:
        with (
            shared.activity.running(),
            closing(shared.rag.stream(question, config=reuse, **arguments)) as stream,
        ):
            for piece in stream:
                sentence = first_sentence(stream.text) if brief else None
                turn.answer = Answer(
                    (sentence or stream.text).strip(), stream.sources, stream.stats
                )
                # the first one: the plan is known, so the picture can be drawn
                if stream.text == piece:
                    picture.html(prompt_bar(turn.answer, system_tokens(shared)))
                place.markdown(markdown_safe(turn.answer.text) + " ▌")
                if sentence:
                    break
            turn.whole = True
            stream.close()
            turn.answer = Answer(
                turn.answer.text if turn.answer else "", stream.sources, stream.stats
            )
    except CacheCraftError as error:
        del state.answering
        turns.remove(turn)
        place.warning(
            f"This question could not be answered: {plain(in_words(error))}",
            icon=":material/error:",
        )
        return False
    del state.answering
    shared.savings.add(turn)
    return True


def time_full_prefill(shared: Shared, turn: Turn) -> None:
    """Ask again without reuse and stop after the first piece; the prompt is the same, trimmed chunks included.

    The time is discarded if anything else ran on this server meanwhile: both would have shared the processor.
    """
    with st.spinner("The same without reuse …"):
        engine = shared.rag.engine  # its captures would share the processor with this pass
        engine.write_back.wait_for(
            [engine.prompts.system.segment_id, *(s.chunk_id for s in turn.answer.sources)]
        )
        engine.store.flush(timeout=20)
        mark = shared.activity.idle_mark()
        if mark is not None:
            with closing(
                shared.rag.stream(turn.question, config=FULL_PREFILL, **turn.arguments)
            ) as stream:
                next(stream, "")
                full_ttft_s = stream.stats.ttft_s
            if shared.activity.idle_since(mark):
                turn.full_ttft_s = full_ttft_s
                shared.savings.add(turn)
        turn.compare = False


def asked_line(question: str, number: int) -> None:
    """The question as the heading of its turn."""
    st.html(f'<p class="cc-asked"><small>{number}</small>{escape(question)}</p>')


def system_tokens(shared: Shared) -> int:
    """The length of the instruction; an answer's statistics do not have it."""
    return len(shared.rag.engine.prompts.system.token_ids)


if __name__ == "__main__":
    main()
