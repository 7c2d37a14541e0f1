"""Answers through LlamaIndex: the same events, objects and ways to call as its own query engine, and reuse beneath."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core import (
    Document,
    MockEmbedding,
    PromptTemplate,
    Settings,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.utils import node_to_metadata_dict
from pydantic import BaseModel

from cachecraft_rag import Engine, SamplingParams
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index import (
    AnswerStatsEvent,
    CacheCraftChatEngine,
    CacheCraftLLM,
    CacheCraftQueryEngine,
    CacheCraftSynthesizer,
)
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.retrievers.llama_index import (
    CacheCraftEmbedding,
    CacheCraftRetriever,
    CacheCraftVectorStore,
    with_notes,
)
from cachecraft_rag.types.documents import CHUNK_ID_KEY, OUTCOME_KEY, chunk_id_of
from cachecraft_rag.types.documents import Document as OwnDocument

SHORT = SamplingParams(max_new_tokens=10)
QUESTION = "How do I descale the kettle?"
TEXTS = {
    "kettle": "Empty the kettle before you descale it with vinegar.",
    "toaster": "The toaster has a crumb tray; pull it out to the left.",
    "fridge": "Set the fridge to four degrees.",
}


class Page(BaseModel):
    found: bool


@pytest.fixture
def index() -> VectorStoreIndex:
    """An index built the ordinary way: LlamaIndex's own vector store in memory."""
    documents = [
        Document(id_=name, text=text, metadata={"page": name}) for name, text in TEXTS.items()
    ]
    return VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(embed_dim=4))


def query_engine_of(
    index: VectorStoreIndex, engine: Engine, **options: Any
) -> CacheCraftQueryEngine:
    return CacheCraftQueryEngine.from_index(
        index, **({"engine": engine, "similarity_top_k": 3, "sampling": SHORT} | options)
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_model_does_not_see_where_a_file_lies(engine: Engine, asynchronous: bool) -> None:
    nodes = [
        NodeWithScore(
            node=TextNode(text=TEXTS["kettle"], metadata={"file_path": "manuals/kettle.md"}),
            score=1.0,
        )
    ]
    synthesizer = CacheCraftSynthesizer(engine, sampling=SHORT)
    if asynchronous:
        response = asyncio.run(synthesizer.asynthesize(QUESTION, nodes=nodes))
    else:
        response = synthesizer.synthesize(QUESTION, nodes=nodes)
    assert list(response.metadata["cachecraft"]["chunk_ids"].values()) == [
        chunk_id_of(TEXTS["kettle"])
    ]
    assert [chunk["chunk_id"] for chunk in response.metadata["cachecraft"]["chunks"]] == [
        chunk_id_of(TEXTS["kettle"])
    ]
    assert response.source_nodes[0].node.metadata["file_path"] == "manuals/kettle.md"


class Recorder(BaseEventHandler):
    events: list[Any] = []  # noqa: RUF012  # pydantic copies it

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.events]


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Events that reach LlamaIndex's dispatcher."""
    recorder, root = Recorder(), get_dispatcher()
    root.add_event_handler(recorder)
    try:
        yield recorder
    finally:
        root.event_handlers.remove(recorder)


# --- classes ---


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (CacheCraftSynthesizer, "BaseSynthesizer"),
        (CacheCraftQueryEngine, "RetrieverQueryEngine"),
        (CacheCraftQueryEngine, "BaseQueryEngine"),
        (CacheCraftLLM, "FunctionCallingLLM"),
        (CacheCraftLLM, "LLM"),
        (CacheCraftRetriever, "BaseRetriever"),
    ],
)
def test_classes_are_llama_indexs(ours: type, theirs: str) -> None:
    assert theirs in [
        base.__name__ for base in ours.__mro__ if base.__module__.startswith("llama_index.core")
    ]


def test_another_retriever_keeps_the_class_and_the_engine(
    index: VectorStoreIndex, engine: Engine
) -> None:
    first = query_engine_of(index, engine)
    other = first.with_retriever(index.as_retriever(similarity_top_k=1))
    assert type(other) is CacheCraftQueryEngine
    assert other.engine is engine
    assert len(other.query(QUESTION).source_nodes) == 1


# --- answers ---


def test_the_second_question_reuses_what_the_first_one_bore(
    index: VectorStoreIndex, engine: Engine
) -> None:
    query_engine = query_engine_of(index, engine)
    first = query_engine.query(QUESTION)
    second = query_engine.query("What is the fridge set to?")
    assert isinstance(first, Response)
    assert first.metadata["cachecraft"]["tokens_reused"] == 0
    assert second.metadata["cachecraft"]["tokens_reused"] > 0
    assert {chunk["outcome"] for chunk in second.metadata["cachecraft"]["chunks"]} <= {
        "exact",
        "reused",
    }
    assert {node.metadata["page"] for node in second.source_nodes} == set(TEXTS)
    source = second.source_nodes[0]
    assert second.metadata[source.node_id] == source.metadata  # LlamaIndex's own part of it


def test_every_way_to_ask_gives_the_same_answer_and_numbers(
    index: VectorStoreIndex, engine: Engine
) -> None:
    whole, streaming = (
        query_engine_of(index, engine),
        query_engine_of(index, engine, streaming=True),
    )
    whole.query(QUESTION)  # from here on every chunk is there
    expected = whole.query(QUESTION)
    streamed = streaming.query(QUESTION)
    assert isinstance(streamed, StreamingResponse)
    assert "finish" not in streamed.metadata["cachecraft"]  # it has not begun
    pieces = list(streamed.response_gen)

    async def ask() -> tuple[Any, list[str], dict[str, Any]]:
        response = await streaming.aquery(QUESTION)
        assert isinstance(response, AsyncStreamingResponse)
        return (
            await whole.aquery(QUESTION),
            [piece async for piece in response.response_gen],
            response.metadata,
        )

    later, apieces, metadata = asyncio.run(ask())
    assert len(set(str(expected))) > 3
    assert str(expected) == "".join(pieces) == "".join(apieces) == str(later)
    assert len(pieces) > 1
    for record in (
        streamed.metadata["cachecraft"],
        metadata["cachecraft"],
        later.metadata["cachecraft"],
    ):
        assert record["finish"] == "length"
        assert record["tokens_reused"] == expected.metadata["cachecraft"]["tokens_reused"] > 0
        assert record["chunk_ids"] == expected.metadata["cachecraft"]["chunk_ids"]


def test_the_chunk_is_the_text_the_model_sees(engine: Engine) -> None:
    node = TextNode(id_="n1", text="Descale it.", metadata={"page": "kettle", "size": 3})
    node.excluded_llm_metadata_keys = ["size"]
    same = TextNode(id_="n2", text="Descale it.", metadata={"page": "kettle", "size": 4})
    same.excluded_llm_metadata_keys = ["size"]
    synthesizer = CacheCraftSynthesizer(engine, sampling=SHORT)
    found = [
        synthesizer.synthesize(QUESTION, [NodeWithScore(node=one, score=1.0)])
        for one in (node, same)
    ]
    records = [response.metadata["cachecraft"] for response in found]
    seen = node.get_content(metadata_mode=MetadataMode.LLM)
    assert "page: kettle" in seen
    assert records[0]["chunk_ids"] == {"n1": chunk_id_of(seen)}
    assert records[1]["chunk_ids"] == {"n2": chunk_id_of(seen)}
    assert [record["chunks"][0]["chunk_id"] for record in records] == [chunk_id_of(seen)] * 2
    assert [record["chunks"][0]["outcome"] for record in records] == ["computed", "exact"]


class Given(BaseRetriever):
    """Retrieves the nodes that it was given."""

    def __init__(self, *nodes: TextNode) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self._nodes]


class LookUps:
    """The real look-up of an engine's store, with the ids that it was asked for."""

    def __init__(self, engine: Engine) -> None:
        self.asked: list[str] = []
        self._find = engine.store.find
        engine.store.find = self  # type: ignore[method-assign,assignment]

    def __call__(
        self, namespace: str, fingerprint: str, chunk_ids: list[str], **options: Any
    ) -> Any:
        self.asked += chunk_ids
        return self._find(namespace, fingerprint, chunk_ids, **options)


def test_a_vector_stores_chunk_id_is_what_the_look_up_is_asked_for(
    engine: Engine, tmp_path: Path
) -> None:
    look_ups = LookUps(engine)
    with CacheCraftVectorStore(tmp_path / "index") as vectors:
        index = VectorStoreIndex.from_vector_store(vectors, embed_model=MockEmbedding(embed_dim=8))
        index.insert_nodes(
            [TextNode(text=text, metadata={"page": name}) for name, text in TEXTS.items()]
        )
        nodes = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
        ids = [scored.node.metadata[CHUNK_ID_KEY] for scored in nodes]
        assert ids == [
            chunk_id_of(scored.node.get_content(metadata_mode=MetadataMode.LLM)) for scored in nodes
        ]
        for mode in (MetadataMode.LLM, MetadataMode.EMBED):
            assert all(
                CHUNK_ID_KEY not in scored.node.get_content(metadata_mode=mode) for scored in nodes
            )
        CacheCraftSynthesizer(engine, sampling=SHORT).synthesize(QUESTION, nodes)
        chat = CacheCraftChatEngine.from_defaults(
            Given(*(scored.node for scored in nodes)), engine=engine
        )
        chat.chat(QUESTION)
        # The very objects: nothing between the vector store and the look-up made the ids again.
        assert set(map(id, ids)) <= set(map(id, look_ups.asked))
        # as they came back
        vectors.add([scored.node.model_copy(update={"embedding": [1.0] * 8}) for scored in nodes])
        assert sorted(node.metadata[CHUNK_ID_KEY] for node in vectors.get_nodes()) == sorted(ids)


def test_an_edited_node_is_computed_and_its_old_id_is_named(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    old_id = chunk_id_of(TEXTS["kettle"])
    edited = TextNode(text=TEXTS["kettle"] + " Or was it?", metadata={CHUNK_ID_KEY: old_id})
    strange = TextNode(text=TEXTS["kettle"], metadata={CHUNK_ID_KEY: 7})
    synthesizer = CacheCraftSynthesizer(engine, sampling=SHORT)
    for node, stale_id in ((edited, old_id), (strange, "7")):
        hidden = node.model_copy(update={"excluded_llm_metadata_keys": [CHUNK_ID_KEY]})
        nodes = [NodeWithScore(node=hidden, score=1.0)]
        chat = CacheCraftChatEngine.from_defaults(Given(hidden), engine=engine, sampling=SHORT)
        streamed = chat.stream_chat(QUESTION)
        "".join(streamed.response_gen)
        responses = [
            synthesizer.synthesize(QUESTION, nodes),
            asyncio.run(synthesizer.asynthesize(QUESTION, nodes)),
            chat.chat(QUESTION),
            streamed,
        ]
        for response in responses:
            (chunk,) = response.metadata["cachecraft"]["chunks"]
            assert (chunk["chunk_id"], chunk["stale_id"]) == (chunk_id_of(node.text), stale_id)
            assert response.metadata["cachecraft"]["chunk_ids"] == {
                node.node_id: chunk_id_of(node.text)
            }
    assert len([record for record in caplog.records if record.name == "cachecraft_rag.prompt"]) == 1
    with pytest.raises(ConfigError, match="give one for each"):
        CacheCraftLLM(engine).complete(QUESTION, documents=["a", "b"], document_ids=["c"])


def test_source_nodes_say_what_became_of_them(engine: Engine) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in TEXTS.values()]
    ids = [chunk_id_of(text) for text in TEXTS.values()]
    whole = CacheCraftSynthesizer(engine, sampling=SHORT)
    streaming = CacheCraftSynthesizer(engine, sampling=SHORT, streaming=True)
    chat = CacheCraftChatEngine.from_defaults(
        Given(*(scored.node for scored in nodes)), engine=engine, sampling=SHORT
    )
    responses: list[Any] = [
        whole.synthesize(QUESTION, nodes),
        asyncio.run(whole.asynthesize(QUESTION, nodes)),
    ]
    stream = streaming.synthesize(QUESTION, nodes)
    assert {scored.node.metadata[OUTCOME_KEY] for scored in stream.source_nodes} == {""}
    "".join(stream.response_gen)
    told = chat.stream_chat(QUESTION)
    "".join(told.response_gen)
    responses += [stream, chat.chat(QUESTION), told]
    for response in responses:
        outcomes = [scored.node.metadata[OUTCOME_KEY] for scored in response.source_nodes]
        assert [scored.node.metadata[CHUNK_ID_KEY] for scored in response.source_nodes] == ids
        for scored in response.source_nodes:
            assert scored.node.get_content(metadata_mode=MetadataMode.LLM) == scored.node.text
            assert all(type(value) is str for value in scored.node.metadata.values())
            # what vector stores of databases write; it refuses anything nested
            assert node_to_metadata_dict(scored.node, flat_metadata=True)
    assert outcomes == ["exact"] * len(ids)
    assert all(scored.node.metadata == {} for scored in nodes)


def test_source_nodes_have_no_notes_without_outcomes(engine: Engine) -> None:
    plain = TextNode(text=TEXTS["kettle"], metadata={"file_path": "/kettle.txt", "page": 3})
    noted = with_notes(TextNode(text=TEXTS["fridge"]), {CHUNK_ID_KEY: chunk_id_of(TEXTS["fridge"])})
    nodes = [NodeWithScore(node=node, score=1.0) for node in (plain, noted)]
    options: dict[str, Any] = {"engine": engine, "sampling": SHORT, "with_outcomes": False}
    query_engine = CacheCraftQueryEngine.from_defaults(Given(plain, noted), **options)
    chat = CacheCraftChatEngine.from_defaults(Given(plain, noted), **options)
    streaming = CacheCraftSynthesizer(
        engine, sampling=SHORT, streaming=True, with_outcomes=False
    ).synthesize(QUESTION, nodes)
    "".join(streaming.response_gen)
    told = chat.stream_chat(QUESTION)
    "".join(told.response_gen)
    responses: list[Any] = [
        query_engine.query(QUESTION),
        asyncio.run(query_engine.aquery(QUESTION)),
        streaming,
        chat.chat(QUESTION),
        asyncio.run(chat.achat(QUESTION)),
        told,
    ]
    for response in responses:
        found = [scored.node.metadata for scored in response.source_nodes]
        assert found == [plain.metadata, {}]
        statistics = response.metadata["cachecraft"]
        assert set(statistics["chunk_ids"]) == {plain.node_id, noted.node_id}
        assert len(statistics["chunks"]) == len(nodes)
    assert noted.metadata != {}
    with pytest.raises(ConfigError, match="with_outcomes"):
        CacheCraftSynthesizer(engine, with_outcomes="no")  # type: ignore[arg-type]


def test_max_tokens_limits_an_answer_wherever_it_is_given(
    engine: Engine, index: VectorStoreIndex
) -> None:
    llm = CacheCraftLLM(engine, max_tokens=3)
    assert llm.metadata.num_output == 3
    counts = [
        llm.complete(QUESTION).raw["cachecraft"]["tokens_generated"],
        llm.complete(QUESTION, max_tokens=2).raw["cachecraft"]["tokens_generated"],
    ]
    engines = [
        CacheCraftQueryEngine.from_index(index, engine=engine, max_tokens=3),
        CacheCraftQueryEngine.from_defaults(
            index.as_retriever(), engine=engine, sampling=SHORT, max_tokens=2
        ),
    ]
    counts += [made.query(QUESTION).metadata["cachecraft"]["tokens_generated"] for made in engines]
    chat = CacheCraftChatEngine.from_index(index, engine=engine, max_tokens=3)
    counts.append(chat.chat(QUESTION).metadata["cachecraft"]["tokens_generated"])
    assert counts == [3, 2, 3, 2, 3]


def test_a_stock_query_engine_reports_what_was_reused(engine: Engine) -> None:
    llm = CacheCraftLLM(engine, sampling=SHORT)
    index = VectorStoreIndex(
        [TextNode(text=text) for text in TEXTS.values()], embed_model=MockEmbedding(embed_dim=8)
    )
    responses: list[Any] = []
    for mode in ("compact", "refine"):
        responses.append(index.as_query_engine(llm=llm, response_mode=mode).query(QUESTION))
        responses.append(
            asyncio.run(index.as_query_engine(llm=llm, response_mode=mode).aquery(QUESTION))
        )
    stream = index.as_query_engine(llm=llm, streaming=True).query(QUESTION)
    assert "cachecraft" not in stream.metadata
    assert "".join(stream.response_gen)

    async def read() -> Any:
        response = await index.as_query_engine(llm=llm, streaming=True).aquery(QUESTION)
        assert [piece async for piece in response.response_gen]
        return response

    responses += [stream, asyncio.run(read())]
    for response in responses:
        numbers = response.metadata["cachecraft"]
        assert numbers["tokens_prompt"] > numbers["tokens_generated"] > 0
        assert numbers["finish"] in ("length", "end")
    calls = [len(response.metadata["cachecraft"]["earlier_calls"]) for response in responses]
    assert calls == [
        0,
        0,
        len(calls_of_refine := responses[2].source_nodes) - 1,
        len(calls_of_refine) - 1,
        0,
        0,
    ]
    ours = CacheCraftQueryEngine.from_index(index, engine=engine, sampling=SHORT).query(QUESTION)
    assert "earlier_calls" not in ours.metadata["cachecraft"]


class OnlyKettles(BaseNodePostprocessor):
    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [node for node in nodes if "kettle" in node.text]


def test_any_index_and_postprocessor_may_stand_in_front(engine: Engine) -> None:
    summary = SummaryIndex.from_documents([Document(text=text) for text in TEXTS.values()])
    response = CacheCraftQueryEngine.from_index(summary, engine=engine, sampling=SHORT).query(
        QUESTION
    )
    assert [node.text for node in response.source_nodes] == list(TEXTS.values())
    filtered = CacheCraftQueryEngine.from_index(
        summary, engine=engine, sampling=SHORT, node_postprocessors=[OnlyKettles()]
    ).query(QUESTION)
    assert [node.text for node in filtered.source_nodes] == [TEXTS["kettle"]]
    assert len(filtered.metadata["cachecraft"]["chunks"]) == 1


def test_nothing_found_is_llama_indexs_empty_response(engine: Engine) -> None:
    empty = VectorStoreIndex([], embed_model=MockEmbedding(embed_dim=4))
    assert str(query_engine_of(empty, engine).query(QUESTION)) == "Empty Response"
    query_engine = query_engine_of(
        empty, engine, streaming=True, empty_response="I know nothing of it."
    )
    assert "".join(query_engine.query(QUESTION).response_gen) == "I know nothing of it."


def test_a_stream_that_is_left_early_frees_the_engine_and_keeps_its_captures(
    index: VectorStoreIndex, engine: Engine
) -> None:
    query_engine = query_engine_of(index, engine, streaming=True)
    with recorded() as recorder:  # whose events keep the frames of what was left alive
        response = query_engine.query(QUESTION)
        next(response.response_gen)
        response.response_gen.close()

    async def leave() -> dict[str, Any]:
        answer = await query_engine.aquery(QUESTION)
        async for _ in answer.response_gen:
            break
        await answer.response_gen.aclose()
        return answer.metadata["cachecraft"]

    record = asyncio.run(leave())
    assert response.metadata["cachecraft"]["finish"] == record["finish"] == "closed"
    assert record["tokens_reused"] > 0
    assert recorder.names()[-1] == AnswerStatsEvent.class_name()
    assert len(str(query_engine.query(QUESTION))) > 3


def test_a_question_that_is_given_up_does_not_keep_the_engine(
    index: VectorStoreIndex, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, embed = list[int](), engine.decoder.embed

    def counted(ids: torch.Tensor) -> torch.Tensor:
        passes.append(len(ids))
        time.sleep(0.002)  # 1000 tokens take longer than anybody waits below, on any machine
        return embed(ids)

    monkeypatch.setattr(engine.decoder, "embed", counted)
    endless = query_engine_of(index, engine, sampling=SamplingParams(max_new_tokens=1000))

    async def give_up() -> None:
        with recorded() as recorder, pytest.raises(TimeoutError):
            await asyncio.wait_for(endless.aquery(QUESTION), 0.5)
        assert "QueryEndEvent" not in recorder.names()

    asyncio.run(give_up())
    assert engine.settle(60)
    assert len(passes) < 1000  # nothing is computed that no reader takes
    assert len(str(query_engine_of(index, engine).query(QUESTION))) > 3


def test_sixteen_streams_at_once_give_the_answers_of_one_by_one(
    index: VectorStoreIndex, engine: Engine
) -> None:
    query_engine = query_engine_of(index, engine, streaming=True)
    questions = [f"What is number {number}?" for number in range(16)]
    for _ in range(2):  # the first time captures the chunks
        expected = [str(query_engine.query(question)) for question in questions]

    async def ask(question: str) -> tuple[str, dict[str, Any]]:
        response = await query_engine.aquery(question)
        return "".join([piece async for piece in response.response_gen]), response.metadata[
            "cachecraft"
        ]

    async def all_at_once() -> list[tuple[str, dict[str, Any]]]:
        return await asyncio.wait_for(asyncio.gather(*map(ask, questions)), 60)

    answers = asyncio.run(all_at_once())
    assert [text for text, _ in answers] == expected
    assert len(set(expected)) > 2
    assert all(record["finish"] == "length" for _, record in answers)


def test_an_index_that_was_saved_and_loaded_finds_its_chunk_caches(
    index: VectorStoreIndex, engine: Engine, tmp_path: Path
) -> None:
    query_engine_of(index, engine).query(QUESTION)
    index.storage_context.persist(tmp_path / "saved")
    storage = StorageContext.from_defaults(persist_dir=str(tmp_path / "saved"))
    loaded = load_index_from_storage(storage, embed_model=MockEmbedding(embed_dim=4))
    record = query_engine_of(loaded, engine).query(QUESTION).metadata["cachecraft"]
    assert {chunk["outcome"] for chunk in record["chunks"]} == {"exact"}


def test_the_one_line_swap(demo_model: Path, index: VectorStoreIndex, tmp_path: Path) -> None:
    with CacheCraftQueryEngine.from_index(
        index, model=str(demo_model), store=tmp_path, sampling=SHORT
    ) as query_engine:
        first, second = (
            query_engine.query(QUESTION),
            query_engine.query("Where is the crumb tray of the toaster?"),
        )
    assert first.metadata["cachecraft"]["tokens_reused"] == 0
    assert second.metadata["cachecraft"]["tokens_reused"] > 0
    with CacheCraftQueryEngine.from_index(
        index,
        model=str(demo_model),
        store=tmp_path,
        sampling=SHORT,
        streaming=True,
        namespace="another tenant",
    ) as query_engine:
        response = query_engine.query(QUESTION)
        assert "".join(response.response_gen)
    assert response.metadata["cachecraft"]["tokens_reused"] == 0
    # an open store has a lock file here
    assert list((tmp_path / "caches" / "writers").iterdir()) == []


# --- events ---


def stock_events(
    index: VectorStoreIndex, ask: Callable[[Any], None], *, streaming: bool
) -> list[str]:
    """Events of LlamaIndex's own query engine, apart from those of its LLM calls."""
    stock = index.as_query_engine(
        llm=MockLLM(max_tokens=4), similarity_top_k=3, streaming=streaming
    )
    with recorded() as recorder:
        ask(stock)
    return [name for name in recorder.names() if not name.startswith("LLM")]


def ask_sync(query_engine: Any) -> None:
    response = query_engine.query(QUESTION)
    for _ in getattr(response, "response_gen", None) or ():
        pass


def ask_async(query_engine: Any) -> None:
    async def ask() -> None:
        response = await query_engine.aquery(QUESTION)
        if isinstance(response, AsyncStreamingResponse):
            async for _ in response.response_gen:
                pass

    asyncio.run(ask())


@pytest.mark.parametrize("ask", [ask_sync, ask_async])
@pytest.mark.parametrize("streaming", [False, True])
def test_events_come_as_from_llama_index_itself(
    index: VectorStoreIndex, engine: Engine, ask: Callable[[Any], None], streaming: bool
) -> None:
    with recorded() as recorder:
        ask(query_engine_of(index, engine, streaming=streaming))
    names = recorder.names()
    ours = [name for name in names if name.startswith(("LLM", "CacheCraft"))]
    progress = ["LLMCompletionInProgressEvent"] * ours.count("LLMCompletionInProgressEvent")
    assert ours == [
        "LLMCompletionStartEvent",
        *progress,
        "LLMCompletionEndEvent",
        "CacheCraftAnswerStatsEvent",
    ]
    assert (len(progress) > 2) is streaming
    general = [name for name in names if name not in ours]
    assert general == stock_events(index, ask, streaming=streaming)
    assert general[0] == "QueryStartEvent"
    assert general[-1] == "QueryEndEvent"
    begun, ended = names.index("GetResponseStartEvent"), names.index("GetResponseEndEvent")
    assert begun < names.index("LLMCompletionStartEvent") < ended
    assert (names.index("LLMCompletionEndEvent") < ended) is not streaming
    assert all(
        event.span_id
        for event in recorder.events
        if event.class_name() not in ("CacheCraftAnswerStatsEvent",)
    )
    completed = recorder.events[names.index("LLMCompletionEndEvent")]
    assert completed.response.raw["usage"]["prompt_tokens"] > 100
    assert recorder.events[names.index("CacheCraftAnswerStatsEvent")].stats["finish"] == "length"


@pytest.mark.parametrize("ask", [ask_sync, ask_async])
@pytest.mark.parametrize(
    "options", [{"streaming": False}, {"streaming": True}, {"output_cls": Page}]
)
def test_events_of_the_model_name_what_it_was_asked_and_can_be_written_as_json(
    index: VectorStoreIndex, engine: Engine, ask: Callable[[Any], None], options: dict[str, Any]
) -> None:
    template = PromptTemplate("{context_str}\nAnswer briefly: {query_str}")
    longer = SamplingParams(max_new_tokens=200)
    with recorded() as recorder:
        ask(query_engine_of(index, engine, text_qa_template=template, sampling=longer, **options))
    events = [one for one in recorder.events if one.class_name().startswith(("LLM", "CacheCraft"))]
    assert events[0].prompt.startswith(f"Answer briefly: {QUESTION}")
    assert ("JSON" in events[0].prompt) is ("output_cls" in options)
    assert events[-2].prompt == events[0].prompt
    assert set(events[0].additional_kwargs["documents"]) == {
        f"page: {name}\n\n{text}" for name, text in TEXTS.items()
    }
    for event in events:
        assert json.loads(event.model_dump_json())


def test_callbacks_of_the_older_kind_come_in_pairs_and_count_tokens(
    index: VectorStoreIndex, engine: Engine
) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    counter = TokenCountingHandler(tokenizer=engine.decoder.tokenizer.encode)
    query_engine = query_engine_of(
        index, engine, callback_manager=CallbackManager([debug, counter])
    )
    response = query_engine.query(QUESTION)
    for kind in (CBEventType.QUERY, CBEventType.SYNTHESIZE, CBEventType.LLM):
        assert len(debug.get_event_pairs(kind)) == 1
    assert counter.prompt_llm_token_count == response.metadata["cachecraft"]["tokens_prompt"]
    assert counter.completion_llm_token_count == response.metadata["cachecraft"]["tokens_generated"]


# --- no way to OpenAI or to the network ---


def test_nothing_asks_for_openai(
    index: VectorStoreIndex, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_llm", None)
    query_engine = query_engine_of(index, engine)
    CacheCraftQueryEngine.from_args(index.as_retriever(), engine=engine).query(QUESTION)
    CacheCraftQueryEngine.from_defaults(index.as_retriever(), engine=engine).with_retriever(
        index.as_retriever()
    )
    asyncio.run(query_engine.aquery(QUESTION))
    query_engine.synthesize(QueryBundle(QUESTION), query_engine.retrieve(QueryBundle(QUESTION)))
    assert query_engine.get_prompts() == {}
    assert Settings._llm is None
    with pytest.raises(ImportError, match="openai"):  # what would have happened
        index.as_query_engine()


def test_options_for_another_llm_or_prompt_are_refused(
    index: VectorStoreIndex, engine: Engine
) -> None:
    with pytest.raises(ConfigError, match="llm, refine_template"):
        query_engine_of(index, engine, refine_template=None, llm=None)
    with pytest.raises(ConfigError, match="open already"):
        query_engine_of(index, engine, namespace="other")
    with pytest.raises(ConfigError, match="model, store: the engine is open already"):
        query_engine_of(index, engine, model="demo", store="chunk-caches")
    with pytest.raises(ConfigError, match="store: the engine is open already"):
        CacheCraftQueryEngine.from_defaults(
            index.as_retriever(), engine=engine, store="chunk-caches"
        )
    with pytest.raises(ConfigError, match="config: the engine is open already"):
        query_engine_of(index, engine, config=EngineConfig())
    with pytest.raises(ConfigError, match=r"config .*EngineConfig"):
        CacheCraftQueryEngine.from_defaults(index.as_retriever(), config="other")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="namspace: no such option"):
        CacheCraftQueryEngine.from_defaults(index.as_retriever(), namspace="other")  # type: ignore[call-arg]
    with pytest.raises(
        ConfigError, match=r"similarty_top_k: no such option.*Did you mean similarity_top_k"
    ):
        query_engine_of(index, engine, similarty_top_k=3)
    query_engine_of(index, engine, similarity_top_k=3, vector_store_kwargs={}, verbose=False)
    with pytest.raises(ConfigError, match="node_ids"):  # as_retriever itself gives them
        query_engine_of(index, engine, node_ids=[])
    with pytest.raises(ConfigError, match="embed_batch_sise"):
        CacheCraftEmbedding(embed_batch_sise=3)
    with pytest.raises(ConfigError, match="from_index"):
        CacheCraftQueryEngine(index.as_retriever(), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="refine_template: there is one prompt"):
        CacheCraftSynthesizer(engine)._update_prompts(
            {"refine_template": PromptTemplate("{query_str}")}
        )


def test_an_index_and_a_retriever_are_not_confused(index: VectorStoreIndex, engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"from_index\(index"):
        CacheCraftQueryEngine.from_defaults(index, engine=engine)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"from_defaults\(retriever"):
        CacheCraftQueryEngine.from_index(index.as_retriever(), engine=engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("question", ["", " "])
def test_an_empty_question_is_refused_by_the_engine(
    index: VectorStoreIndex, engine: Engine, question: str
) -> None:
    query_engine = query_engine_of(index, engine)
    with pytest.raises(ConfigError, match="the question is empty"):
        query_engine.query(question)
    with pytest.raises(ConfigError, match="the question is empty"):
        asyncio.run(query_engine.aquery(question))


@pytest.mark.parametrize(
    "module", ["cachecraft_rag.llama_index", "cachecraft_rag.retrievers.llama_index"]
)
def test_a_missing_llama_index_is_named_with_the_command(module: str) -> None:
    code = f"import sys; sys.modules['llama_index.core'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "pip install 'cachecraft-rag[llama-index]'" in done.stderr.splitlines()[-1]


# --- the LLM ---


def test_the_llm_in_all_its_ways(engine: Engine) -> None:
    llm = CacheCraftLLM(engine, sampling=SHORT)
    expected = llm.complete(QUESTION)
    messages = [ChatMessage(role="user", content=QUESTION)]
    streamed = list(llm.stream_complete(QUESTION))
    assert streamed[-1].text == "".join(response.delta for response in streamed) == expected.text
    assert llm.chat(messages).message.content == expected.text
    assert [response.delta for response in llm.stream_chat(messages)] == [
        response.delta for response in streamed
    ]

    async def ask() -> None:
        assert (await llm.acomplete(QUESTION)).text == expected.text
        assert (await llm.achat(messages)).message.content == expected.text
        assert [part.text async for part in await llm.astream_complete(QUESTION)] == [
            part.text for part in streamed
        ]
        assert [part.delta async for part in await llm.astream_chat(messages)] == [
            part.delta for part in streamed
        ]

    asyncio.run(ask())
    assert llm.metadata.context_window == 2048
    assert llm.metadata.num_output == 10
    assert expected.raw["usage"]["completion_tokens"] == 10


def test_the_llm_reuses_documents_and_keeps_prompts_to_itself(engine: Engine) -> None:
    llm = CacheCraftLLM(engine, sampling=SHORT)
    texts = list(TEXTS.values())
    first, second = (llm.complete(QUESTION, documents=texts).raw["cachecraft"] for _ in range(2))
    assert (first["tokens_reused"], second["tokens_recomputed"]) == (0, 0)
    assert second["tokens_reused"] > sum(map(len, texts))
    engine.store.flush()
    before = engine.store.stats().chunks
    llm.complete("A secret of mine: " + texts[0])
    engine.store.flush()
    assert engine.store.stats().chunks == before == 4  # three texts and the system segment


def test_chat_turns_become_the_history(engine: Engine) -> None:
    llm = CacheCraftLLM(engine, sampling=SHORT)
    talk = [
        ("system", "Be kind."),
        ("user", "Hello."),
        ("assistant", "Hello!"),
        ("user", "Well?"),
        ("user", "Say!"),
    ]
    answer = llm.chat([ChatMessage(role=role, content=text) for role, text in talk])
    history = [("user", "Be kind.\n\nHello."), ("assistant", "Hello!")]
    assert answer.message.content == "".join(
        engine.stream("Well?\n\nSay!", [], history=history, sampling=SHORT)
    )
    assert answer.message.content != llm.complete("Well?\n\nSay!").text
    with pytest.raises(ConfigError, match="last message"):
        llm.chat([ChatMessage(role="assistant", content="Hello!")])
    for call in (llm.complete, llm.stream_complete):
        with pytest.raises(
            ConfigError, match=r"max_new_tokens: no such option; there are documents, .*max_tokens"
        ):
            call(QUESTION, max_new_tokens=5)


@pytest.mark.parametrize("documents", ["abc", [TextNode(text="abc")]])
def test_documents_that_are_no_texts_are_refused(engine: Engine, documents: Any) -> None:
    with pytest.raises(ConfigError, match="documents must be a list of texts"):
        CacheCraftLLM(engine).complete(QUESTION, documents=documents)


def test_a_chat_engine_of_llama_indexs_keeps_what_was_said_to_itself(
    index: VectorStoreIndex, engine: Engine
) -> None:
    query_engine = query_engine_of(index, engine)
    chat = CondenseQuestionChatEngine.from_defaults(
        query_engine=query_engine, llm=query_engine.synthesizer.llm, memory_cls=ChatMemoryBuffer
    )
    first = chat.chat("How do I descale the kettle, Ann asks?")
    engine.write_back.wait_for(
        list(first.sources[0].raw_output.metadata["cachecraft"]["chunk_ids"].values())
    )
    engine.store.flush()
    before = engine.store.stats().chunks
    second = chat.chat("And how often?")
    engine.store.flush()
    assert second.sources[0].raw_output.metadata["cachecraft"]["tokens_reused"] > 0
    # three texts and the system segment, and no word of Ann's
    assert engine.store.stats().chunks == before == 4


# --- the facade's index ---


def test_what_the_facade_indexed_answers_through_llama_index(
    engine: Engine, tmp_path: Path
) -> None:
    from cachecraft_rag.retrievers.embeddings import Embedder
    from cachecraft_rag.retrievers.retriever import open_index

    embedder = Embedder()
    with open_index(tmp_path, embedder) as own_index:
        rag = CacheCraft(engine, own_index, embedder)
        rag.add_documents(
            [OwnDocument(name, text, {"kind": "note"}) for name, text in TEXTS.items()], prime=True
        )
        query_engine = CacheCraftQueryEngine.from_defaults(
            CacheCraftRetriever(rag, top_k=2), engine=engine, sampling=SHORT
        )
        response = query_engine.query(QUESTION)
        assert response.source_nodes[0].text == TEXTS["kettle"]
        assert response.source_nodes[0].node.ref_doc_id == "kettle"
        assert response.source_nodes[0].score > response.source_nodes[1].score
        assert {chunk["outcome"] for chunk in response.metadata["cachecraft"]["chunks"]} <= {
            "exact",
            "reused",
        }
        assert asyncio.run(query_engine.aquery(QUESTION)).source_nodes == response.source_nodes
        instead = QueryBundle("What?", custom_embedding_strs=["the temperature of the fridge"])
        assert query_engine.retrieve(instead)[0].text == TEXTS["fridge"]


def test_texts_and_documents_may_come_from_a_generator(engine: Engine) -> None:
    llm, synthesizer = (
        CacheCraftLLM(engine, sampling=SHORT),
        CacheCraftSynthesizer(engine, sampling=SHORT),
    )
    texts = list(TEXTS.values())
    raw = llm.complete(QUESTION, documents=(text for text in texts)).raw
    assert {chunk["chunk_id"] for chunk in raw["cachecraft"]["chunks"]} == set(
        map(chunk_id_of, texts)
    )
    with recorded() as recorder:
        answer = synthesizer.get_response(QUESTION, (text for text in texts))  # type: ignore[arg-type]
    assert type(answer) is str
    (event,) = (event for event in recorder.events if isinstance(event, AnswerStatsEvent))
    assert {chunk["chunk_id"] for chunk in event.stats["chunks"]} == set(map(chunk_id_of, texts))
