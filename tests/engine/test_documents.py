"""Documents of a foreign database: primed as the model reads them, and removed when the database holds them no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

from cachecraft_rag.engine.documents import HeldTexts, by_source, chunks_of
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.llama_index.sources import Sources
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import CHUNK_ID_KEY, Chunk, Document, chunk_id_of
from cachecraft_rag.types.progress import Progress

TEXTS = [
    f"Part {number} of the kettle is cleaned every {number + 2} weeks. " for number in range(5)
]
SHORT = SamplingParams(max_new_tokens=4)
Open = Callable[..., Engine]


@pytest.fixture
def opened(tiny_decoder: Callable[..., Decoder], make_engine: Open) -> Open:
    """Opens an engine over one folder; two of them share it as two processes do."""
    return partial(make_engine, decoder=tiny_decoder("Llama"))


def ask(engine: Engine, *texts: str) -> Generation:
    answer = engine.stream("How often?", [Chunk(text) for text in texts], sampling=SHORT)
    for _ in answer:
        pass
    assert engine.settle(60)
    return answer


def outcomes(answer: Generation) -> set[str]:
    return {chunk.outcome for chunk in answer.stats.chunks}


def shaped(engine: Engine, text: str) -> int:
    """How many stored variants hold a text, or were captured after it."""
    rows = engine.store.rows(limit=1000)
    return sum(row.variant.key.holds({chunk_id_of(text)}) for row in rows)


def node(number: int, **settings: Any) -> TextNode:
    made = TextNode(
        text=TEXTS[number],
        metadata={"file_path": f"/home/me/{number}.md", "page": number},
        text_template="[{metadata_str}]\n{content}",
        **settings,
    )
    made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="kettle.md")
    return made


def test_a_first_question_reuses_texts_that_were_primed(opened: Open) -> None:
    engine = opened()
    assert engine.estimate_priming(TEXTS).captures == 7
    assert engine.prime(text for text in TEXTS) == 7  # with the instruction and the stand-in
    assert engine.estimate_priming(TEXTS).captures == 0
    assert outcomes(ask(engine, *TEXTS[:3])) <= {"reused", "exact"}


def test_a_node_is_primed_with_the_text_that_the_model_reads(opened: Open) -> None:
    engine = opened()
    nodes = [node(number) for number in range(3)]
    engine.prime([nodes[0], NodeWithScore(node=nodes[1], score=1.0), nodes[2]])
    sources = Sources([NodeWithScore(node=primed) for primed in nodes])
    assert "/home/me" not in sources.texts[0]
    assert sources.texts[0].startswith("[page: 0]")
    assert outcomes(ask(engine, *sources.texts)) <= {"reused", "exact"}


def test_a_note_of_an_earlier_answer_is_no_part_of_the_text() -> None:
    noted = node(0)
    noted.metadata[CHUNK_ID_KEY] = "0" * 32
    noted.metadata["cachecraft_outcome"] = "exact"
    assert chunks_of([noted]) == chunks_of([node(0)])


def test_documents_of_one_source_are_neighbours() -> None:
    given: list[Any] = [
        LangChainDocument(TEXTS[0], metadata={"source": "a.md"}),
        TEXTS[1],
        LangChainDocument(TEXTS[2], metadata={"source": "a.md"}),
        Document("b.md", TEXTS[3]),
        Chunk(TEXTS[4], {"source": "b.md"}),
        node(1),
        Document("text 2", TEXTS[2]),
    ]
    assert [(name, len(chunks)) for name, chunks in by_source(given)] == [
        ("a.md", 2),
        ("text 2", 1),
        ("b.md", 2),
        ("kettle.md", 1),
        ("text 2", 1),
    ]


class Recorder:
    """Takes the place of an engine, and adds the removed text again, in another thread, while it is removed."""

    def __init__(self) -> None:
        self.texts = HeldTexts(self, chunks_of)
        self.calls: list[str] = []
        self.readmitted = threading.Event()
        self.adding = threading.Thread(target=self.texts.add, args=(["2"], TEXTS[:1]))

    def remove(self, documents: Iterable[object]) -> None:
        self.adding.start()
        self.readmitted.wait(0.5)  # it waits for this removal
        self.calls.append("remove")

    def readmit(self, documents: Iterable[object]) -> None:
        self.calls.append("readmit")
        self.readmitted.set()


def test_a_text_that_is_added_while_it_is_removed_is_stored_again() -> None:
    recorder = Recorder()
    recorder.texts.remove(["1"], TEXTS[:1])
    recorder.adding.join()
    assert recorder.calls == ["remove", "readmit"]


class Failing:
    """Takes the place of an engine whose store fails once."""

    def __init__(self) -> None:
        self.removed: list[Chunk] = []
        self.is_broken = True

    def remove(self, documents: Iterable[object]) -> None:
        if self.is_broken:
            raise StoreError("the disk is full")
        self.removed += chunks_of(documents)

    def readmit(self, documents: Iterable[object]) -> None:
        pass


def test_a_text_stays_known_after_a_removal_that_failed() -> None:
    engine = Failing()
    texts = HeldTexts(engine, chunks_of)
    texts.add(["1", "2"], [TEXTS[0], TEXTS[1]])
    with pytest.raises(StoreError):
        texts.remove(["1"], [TEXTS[0]])
    engine.is_broken = False
    texts.remove(["3"], [TEXTS[0]])  # another document with the text that the database still holds
    assert engine.removed == []


@pytest.mark.parametrize("wrong", [3, None, {"text": "x"}, b"x", [TEXTS[0]]])
def test_what_is_no_document_is_refused_with_what_may_be_given(opened: Open, wrong: Any) -> None:
    engine = opened()
    for call in (engine.prime, engine.estimate_priming, engine.remove, engine.sync):
        with pytest.raises(ConfigError, match="each of documents must be"):
            call([TEXTS[0], wrong])
    with pytest.raises(ConfigError):
        engine.prime(TEXTS[0])
    assert engine.store.stats().variants == 0


def test_an_iterator_that_fails_changes_nothing(opened: Open) -> None:
    engine = opened()
    engine.prime(TEXTS)
    before = engine.store.stats().variants

    def scrolled() -> Iterator[str]:
        yield TEXTS[0]
        raise TimeoutError("the database does not answer")

    for call in (engine.prime, engine.estimate_priming, engine.remove, engine.sync):
        with pytest.raises(TimeoutError):
            call(scrolled())
    assert engine.store.stats().variants == before
    assert engine.sync(TEXTS).variants == 0
    assert outcomes(ask(engine, TEXTS[0])) <= {"reused", "exact"}


def test_priming_goes_on_after_ctrl_c(opened: Open) -> None:
    engine = opened()
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if progress.done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prime(TEXTS, progress=stop)
    assert seen[0].total == 7
    assert engine.prime(TEXTS) == 7 - seen[-1].done
    assert engine.prime(TEXTS) == 0


def test_a_text_that_is_too_long_is_named_and_the_others_are_primed(opened: Open) -> None:
    engine = opened()
    sentences: list[str] = []
    engine.prime(["word " * 3000, *TEXTS], skipped=sentences.append)
    assert len(sentences) == 1
    assert "text 1" in sentences[0]
    assert outcomes(ask(engine, TEXTS[0])) <= {"reused", "exact"}


def test_removed_documents_leave_with_all_that_they_shaped(opened: Open) -> None:
    engine = opened()
    engine.prime([Chunk(text, {"source": "kettle"}) for text in TEXTS])
    ask(engine, *TEXTS[:3])
    before = shaped(engine, TEXTS[1])

    removed = engine.remove([LangChainDocument(TEXTS[1])])

    assert removed.variants == before > 1
    assert shaped(engine, TEXTS[1]) == 0
    assert shaped(engine, TEXTS[0]) > 0
    answer = ask(engine, TEXTS[1])
    assert [str(chunk.reason_code) for chunk in answer.stats.chunks] == ["removed"]
    assert shaped(engine, TEXTS[1]) == 0


@pytest.mark.parametrize("add", ["prime", "sync"])
def test_a_removed_document_that_is_back_is_stored_again(opened: Open, add: str) -> None:
    engine = opened()
    engine.remove(TEXTS)
    getattr(engine, add)(TEXTS[:2])
    ask(engine, *TEXTS[:2])
    ask(engine, TEXTS[2])
    assert shaped(engine, TEXTS[0]) > 0
    assert shaped(engine, TEXTS[2]) == 0


def test_sync_keeps_what_the_database_holds_and_instructions(opened: Open) -> None:
    engine = opened()
    other_instruction = opened(system="Answer in verse.")
    for asked in (engine, other_instruction):
        asked.prime(TEXTS[:3])
    ask(engine, *TEXTS[:4])
    ask(engine, TEXTS[4])

    removed = engine.sync(LangChainDocument(text) for text in TEXTS[:3])

    assert removed.variants > 0
    assert [shaped(engine, text) for text in TEXTS[3:]] == [0, 0]
    assert engine.prime(TEXTS[:3]) == other_instruction.prime(TEXTS[:3]) == 0
    assert engine.sync(TEXTS[:3]).variants == 0
    assert outcomes(ask(engine, *TEXTS[:3])) <= {"reused", "exact"}


def test_sync_reaches_captures_that_are_not_stored_yet(opened: Open) -> None:
    engine = opened()
    answer = engine.stream("How often?", [Chunk(text) for text in TEXTS], sampling=SHORT)
    assert "".join(answer) == answer.text
    engine.sync(TEXTS[:1])
    assert engine.settle(60)
    assert [shaped(engine, text) for text in TEXTS[1:]] == [0] * 4


def test_sync_of_nothing_is_refused_because_an_unreadable_database_looks_empty(
    opened: Open,
) -> None:
    engine = opened()
    engine.prime(TEXTS)
    with pytest.raises(ConfigError, match="down_to_bytes=0"):
        engine.sync([])
    assert shaped(engine, TEXTS[0]) > 0


def test_sync_leaves_other_tenants_alone(opened: Open) -> None:
    ada = opened(namespace="ada")
    bob = opened(namespace="bob")
    for tenant in (ada, bob):
        tenant.prime(TEXTS)
    ada.sync(TEXTS[:1])
    ada.remove(TEXTS[:1])
    assert bob.prime(TEXTS) == 0
    ask(bob, *TEXTS)
    assert outcomes(ask(bob, *TEXTS)) <= {"reused", "exact"}


def test_passages_of_unmarked_prompts_leave_with_sync_and_can_be_captured_again(
    opened: Open,
) -> None:
    engine = opened(new_variants="idle")
    page = " ".join(f"Part {number} is cleaned every {number} weeks." for number in range(20))

    def tokens_reused() -> int:
        for _ in range(3):
            answer = engine.stream_text(f"{page}\n\nHow often?", sampling=SHORT)
            for _ in answer:
                pass
            assert engine.settle(60)
        return answer.stats.tokens_reused

    assert tokens_reused() > 0
    engine.prime(TEXTS)
    instructions_and_texts = len(TEXTS) + 2
    engine.sync(TEXTS)
    assert engine.store.stats().chunks <= instructions_and_texts
    assert tokens_reused() > 0
