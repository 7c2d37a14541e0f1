"""`EngineConfig.paper()` and the default through both frameworks: the papers' methods in one request from the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.types.documents import Chunk

TEXTS = [
    f"The {name} of the Wren K2 {verb} {n} times a year, and nobody at the works has ever found out the reason for it."
    for n, (name, verb) in enumerate(
        [("lid", "leaks"), ("cord", "frays"), ("base", "warms"), ("spout", "drips")], 2
    )
]
FRONT, SECOND, THIRD, LAST = CHUNKS = [Chunk(text) for text in TEXTS]
OTHER = Chunk("The toaster has a crumb tray; pull it out to the left.")
QUESTION = "How often does the lid leak?"
# One layer decides: whether the same chunks lead in three layers of a random model says nothing of what is tested here.
PAPER = ReuseConfig.paper(method=ReuseMethod.paper(early_termination_window=1))

Stats = dict[str, Any]


def ask_langchain(engine: Engine) -> Stats:
    """The prompt `CHUNKS` through LangChain's generator."""
    from langchain_core.documents import Document

    from cachecraft_rag.langchain import CacheCraftGenerator, ChatCacheCraft

    found: list[Stats] = []

    class Keeping(ChatCacheCraft):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._generate(*args, **kwargs)
            found.append(result.generations[0].message.response_metadata["cachecraft"])
            return result

    generator = CacheCraftGenerator(llm=Keeping(engine=engine, max_tokens=4))
    generator.invoke({"input": QUESTION, "context": [Document(text) for text in TEXTS]})
    return found[-1]


def ask_llama_index(engine: Engine) -> Stats:
    """The prompt `CHUNKS` through LlamaIndex's query engine."""
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    from cachecraft_rag.llama_index import CacheCraftQueryEngine

    class Given(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in TEXTS]

    query_engine = CacheCraftQueryEngine.from_defaults(Given(), engine=engine, max_tokens=4)
    response: Any = query_engine.query(QUESTION)
    return response.metadata["cachecraft"]


@pytest.fixture
def open_engine(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> Iterator[Callable[..., Engine]]:
    """Opens an engine over the same folder, which closes the one before; with the papers' settings unless given."""
    opened: list[tuple[Engine, ChunkCacheStore]] = []

    def close() -> None:
        for engine, store in opened:
            engine.close()
            store.close()
        opened.clear()

    def make(config: EngineConfig | None = None, **options: Any) -> Engine:
        close()
        config = config or EngineConfig.paper(reuse=PAPER, **options)
        store = ChunkCacheStore.open(tmp_path / "caches", config.store)
        engine = Engine(tiny_decoder("Llama"), store, config)
        opened.append((engine, store))
        return engine

    yield make
    close()


def capture(engine: Engine, *prompts: Sequence[Chunk]) -> None:
    """Capture each prompt's chunks in full, in this order."""
    for chunks in prompts:
        full = engine.stream("Why?", chunks, config=replace(PAPER, reuse=False))
        assert list(full) is not None
        engine.settle()


@pytest.mark.parametrize("ask", [ask_langchain, ask_llama_index])
def test_variants_early_termination_and_tail_loading_act_in_one_request(
    ask: Callable[[Engine], Stats],
    open_engine: Callable[..., Engine],
    front_is_late: Callable[..., None],
) -> None:
    engine = open_engine(new_variants="off")
    capture(engine, CHUNKS[:1], [OTHER, THIRD], [SECOND, THIRD], [OTHER, SECOND], [OTHER, LAST])
    variants = {
        row.variant.variant_id: row.variant
        for row in engine.store.rows(RowFilter(chunk_ids=(THIRD.chunk_id,)))
    }
    assert len(variants) == 2
    engine = open_engine(new_variants="off")  # with nothing in memory
    front_is_late(engine.prompts, FRONT)
    stats = ask(engine)
    first, second, third, last = stats["chunks"]
    # variant selection: of the third chunk's two, the one whose old prefix stands before it again
    assert SECOND.chunk_id in variants[third["variant_id"]].key.origin_prefix
    assert third["cfo"] < last["cfo"]
    # tail loading: the front was computed, what follows it came from the disk
    assert (first["computed"], first["reason_code"]) == (first["tokens"], Reason.COMPUTED_FASTER)
    assert [(one["tier"], one["computed"]) for one in (second, third, last)] == [("disk", 0)] * 3
    # early termination: settled in the first layer, so fewer rows than were chosen went through the others
    assert stats["focus_layer"] == 0
    chosen = stats["tokens_recomputed"] + stats["tokens_computed"]
    assert 0 < second["recomputed"] < second["tokens"]
    assert stats["recompute_share"] < chosen / stats["tokens_prompt"]


@pytest.mark.parametrize("ask", [ask_langchain, ask_llama_index])
def test_by_default_variants_focus_and_tail_loading_act_in_one_request(
    ask: Callable[[Engine], Stats],
    open_engine: Callable[..., Engine],
    front_is_late: Callable[..., None],
) -> None:
    config = EngineConfig(new_variants="off", best_last=False)
    engine = open_engine(config)
    capture(engine, CHUNKS[:1], [OTHER, THIRD], [SECOND, THIRD], [OTHER, SECOND], [OTHER, LAST])
    variants = {row.variant.variant_id: row.variant for row in engine.store.rows()}
    engine = open_engine(config)  # with nothing in memory
    front_is_late(engine.prompts, FRONT)
    stats = ask(engine)
    first, second, third, last = stats["chunks"]
    assert SECOND.chunk_id in variants[third["variant_id"]].key.origin_prefix
    assert (first["computed"], first["reason_code"]) == (first["tokens"], Reason.COMPUTED_FASTER)
    assert [(one["tier"], one["computed"]) for one in (second, third, last)] == [("disk", 0)] * 3
    assert max(one["focus"] for one in stats["chunks"]) == 1.0
    assert {one["in_focus"] for one in stats["chunks"]} <= {True, False}
    assert stats["tokens_spared"] == sum(one["spared"] for one in stats["chunks"])


def test_a_chunk_that_was_fixed_becomes_a_variant_of_its_new_prefix(
    open_engine: Callable[..., Engine],
) -> None:
    engine = open_engine()
    capture(engine, [OTHER, THIRD])
    answer = engine.stream("Why?", [SECOND, THIRD])
    assert list(answer) is not None
    engine.settle()
    rows = engine.store.rows(RowFilter(chunk_ids=(THIRD.chunk_id,)))
    prefixes = {row.variant.key.origin_prefix[1:] for row in rows}
    assert prefixes == {(OTHER.chunk_id,), (SECOND.chunk_id,)}
