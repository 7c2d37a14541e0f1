"""LangChain's chat model and generator on real engines: a tiny random model, and the demo model for what users see."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, ModelNotFoundError
from cachecraft_rag.langchain import (
    CacheCraftGenerator,
    ChatCacheCraft,
    conversation,
    with_outcomes,
)
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.langchain import CacheCraftEmbeddings, CacheCraftVectorStore
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import (
    CHUNK_ID_KEY,
    OUTCOME_KEY,
    REASON_KEY,
    Chunk,
    chunk_id_of,
)

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

TEXTS = [
    "The Wren K2 holds 1.7 litres.",
    "Descale the Wren K2 every 8 weeks.",
    "The warranty of the Wren K2 runs for 3 years.",
    "The Wren K2 boils a litre in 130 seconds.",
]
CALL = {"name": "add", "args": {"a": 1}, "id": "one"}
DOCUMENTS = [Document(text) for text in TEXTS]
SECRET = [HumanMessage("My PIN is 4711."), AIMessage("I shall keep it to myself.")]
# As long as the secret: matrix products of other shapes round differently, and bits are compared below.
OTHER = [HumanMessage("Good day to you"), AIMessage("And a very good day to you")]


@pytest.fixture
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    """A small random decoder; of the first few this one does not end its answers at once."""
    return tiny_decoder("Llama", seed=4)


@pytest.fixture
def engine(decoder: Decoder, store: ChunkCacheStore) -> Iterator[Engine]:
    """An engine of the two. It captures nothing between answers: what is reused decides, by a little, what is said."""
    with Engine(decoder, store, new_variants="off") as made:
        yield made


@pytest.fixture
def chat(engine: Engine) -> ChatCacheCraft:
    """A chat model of the engine, which draws: two questions that differ get answers that differ."""
    return ChatCacheCraft(engine=engine, max_tokens=24, temperature=0.3, seed=1)


@pytest.fixture
def generator(chat: ChatCacheCraft) -> CacheCraftGenerator:
    """A generator of the chat model."""
    return CacheCraftGenerator(llm=chat)


def settle(engine: Engine) -> None:
    """Wait until what was captured is in the store."""
    engine.write_back.wait_for([engine.prompts.system.segment_id, *map(chunk_id_of, TEXTS)])
    engine.store.flush()


def details(message: BaseMessage) -> dict[str, int]:
    """A message's tokens from chunk-caches and of new chunk-caches."""
    assert isinstance(message, AIMessage)
    assert message.usage_metadata is not None
    return dict(message.usage_metadata["input_token_details"])


# --- messages ---


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([HumanMessage("q")], ["q"]),
        ([HumanMessage([{"type": "text", "text": "in parts"}])], ["in parts"]),
        (
            [SystemMessage("rule"), HumanMessage("a"), AIMessage("b"), HumanMessage("q")],
            ["rule\n\na", "b", "q"],
        ),
        ([SystemMessage("rule"), SystemMessage("rule"), HumanMessage("q")], ["rule\n\nrule\n\nq"]),
        ([SystemMessage("all there is")], ["all there is"]),
        ([AIMessage("hello"), HumanMessage("q")], ["", "hello", "q"]),
        (
            [HumanMessage("a"), HumanMessage("b"), AIMessage("c"), HumanMessage("q")],
            ["a\n\nb", "c", "q"],
        ),
        (
            [HumanMessage("a"), AIMessage("b"), AIMessage("c"), HumanMessage("q")],
            ["a", "b\n\nc", "q"],
        ),
        (
            [ChatMessage("a", role="user"), ChatMessage("b", role="assistant"), HumanMessage("q")],
            ["a", "b", "q"],
        ),
    ],
)
def test_messages_become_turns(messages: list[BaseMessage], turns: list[str]) -> None:
    history, question = conversation(messages)
    assert [text for _, text in history] + [question] == turns
    assert [role for role, _ in history] == ["user", "assistant"] * (len(turns) // 2)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([HumanMessage("a"), AIMessage("b")], "last message must be the user's"),
        (
            [HumanMessage("a"), ChatMessage("b", role="critic"), HumanMessage("c")],
            "no critic messages",
        ),
        (
            [HumanMessage("a"), AIMessage("", tool_calls=[CALL]), HumanMessage("c")],
            "no ToolMessage with the result",
        ),
        (
            [HumanMessage([{"type": "image", "url": "https://example.org/a.png"}])],
            "text only, and a message holds image",
        ),
    ],
)
def test_messages_that_the_model_cannot_read(messages: list[BaseMessage], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        conversation(messages)


def test_calls_and_results_become_turns_in_the_order_of_the_calls() -> None:
    calls = [CALL, {"name": "add", "args": {}, "id": "two"}]
    messages = [
        HumanMessage("a"),
        AIMessage("Let me see.", tool_calls=calls),
        ToolMessage("second", tool_call_id="two"),
        ToolMessage("first", tool_call_id="one"),
    ]
    made = '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]'
    turns = [
        ("user", "a"),
        ("assistant", "Let me see."),
        ("calls", made),
        ("result", "first"),
        ("result", "second"),
    ]
    assert conversation(messages) == (turns, "")
    assert conversation([*messages, HumanMessage("c")]) == (turns, "c")
    assert conversation([*messages, AIMessage("b"), HumanMessage("c")]) == (
        [*turns, ("assistant", "b")],
        "c",
    )


def test_an_assistant_that_begins_or_says_nothing_is_no_trouble(chat: ChatCacheCraft) -> None:
    for said in ([AIMessage("hello")], [HumanMessage("a"), AIMessage("")]):
        assert chat.invoke([*said, HumanMessage("q")], documents=DOCUMENTS).text


# --- the chat model ---


def test_usage_counts_captured_and_reused_tokens(chat: ChatCacheCraft) -> None:
    first = chat.invoke("What does it hold?", documents=DOCUMENTS)
    second = chat.invoke("How long is the warranty?", documents=DOCUMENTS)
    stats = second.response_metadata["cachecraft"]
    assert details(first)["cache_read"] == 0
    assert details(first)["cache_creation"] == sum(chunk["tokens"] for chunk in stats["chunks"])
    assert details(second) == {"cache_read": stats["tokens_reused"], "cache_creation": 0}
    assert stats["tokens_reused"] > 0
    assert {chunk["outcome"] for chunk in stats["chunks"]} == {"exact"}
    assert second.usage_metadata is not None
    assert second.usage_metadata["input_tokens"] == stats["tokens_prompt"]
    assert second.usage_metadata["output_tokens"] == stats["tokens_generated"] == 24
    assert second.response_metadata["finish_reason"] == "length"


def test_settings_of_the_model_and_of_a_call(engine: Engine) -> None:
    chat = ChatCacheCraft(engine=engine, max_tokens=30, temperature=0.3, seed=3)
    whole = chat.invoke("q").text
    assert chat.invoke("q").text == whole
    assert chat.invoke("q", seed=4).text != whole
    assert (
        chat.bind(max_tokens=2).invoke("q").response_metadata["cachecraft"]["tokens_generated"] == 2
    )
    mark = whole[len(whole) // 2]
    bound = ChatCacheCraft(engine=engine, max_tokens=30, temperature=0.3, seed=3, stop=[mark])
    for stopped in (
        chat.invoke("q", stop=[mark]),
        chat.bind(stop=[mark]).invoke("q"),
        bound.invoke("q"),
    ):
        assert stopped.text == whole.partition(mark)[0]
        assert stopped.response_metadata["finish_reason"] == "stop"
    full = ChatCacheCraft(
        engine=engine, max_tokens=2, reuse=ReuseConfig(reuse=False, capture=False)
    )
    full.invoke("q", documents=DOCUMENTS)
    assert details(full.invoke("q", documents=DOCUMENTS)) == {"cache_read": 0, "cache_creation": 0}


def test_what_langchain_does_with_models_in_general(chat: ChatCacheCraft, engine: Engine) -> None:
    adjustable = chat.configurable_fields(max_tokens=ConfigurableField(id="length"))
    answer = adjustable.invoke("q", {"configurable": {"length": 3}})
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 3
    assert chat.get_num_tokens("seven b") == 7  # the tokenizer has a token for each byte
    decoder = chat.engine.decoder
    name = decoder.tokenizer.convert_ids_to_tokens(min(decoder.end_tokens))
    assert chat.get_num_tokens(name) == len(name), "a control token's name is text, as in a prompt"
    assert chat.get_num_tokens("a\ud800") == 2
    assert chat.get_token_ids("") == []
    long = [HumanMessage("x" * 50), AIMessage("y"), HumanMessage("z")]
    assert trim_messages(long, max_tokens=30, token_counter=chat, strategy="last") == long[1:]


def test_langchains_own_chain_reuses_passages_that_come_again(
    decoder: Decoder, store: ChunkCacheStore
) -> None:
    """In another order, beside others."""
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from this:\n\n{context}"), ("human", "{input}")]
    )
    passages = [
        f"The {name} is descaled every {len(name)} weeks, "
        + f"never before the {name} is cold. " * 3
        for name in ("kettle", "dishwasher", "coffee machine", "steam iron", "washing machine")
    ]
    turn: list[Document] = []
    shares = []
    # Without `nearest_share`, because the last of three chunks would be recomputed in full.
    with Engine(decoder, store, config=ReuseConfig(nearest_share=0.0)) as engine:
        combine = create_stuff_documents_chain(ChatCacheCraft(engine=engine, max_tokens=4), prompt)
        chain = create_retrieval_chain(RunnableLambda(lambda _: turn), combine)
        for order in ((0, 1, 2), (3, 2, 0, 1), (1, 4, 0, 2)):
            turn[:] = [Document(passages[place]) for place in order]
            with get_usage_metadata_callback() as counter:
                chain.invoke({"input": "How often is the kettle descaled?"})
            (usage,) = counter.usage_metadata.values()
            details = usage["input_token_details"]
            assert details["cache_creation"] == 0
            instruction = len(engine.prompts.system.token_ids) if shares else 0
            shares.append((details["cache_read"] - instruction) / sum(map(len, passages[:3])))
            assert engine.settle(60)
    assert shares[:2] == [0.0, 0.0]
    assert shares[2] >= 0.75


def test_settings_that_do_not_exist_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="temprature"):
        ChatCacheCraft(engine=engine, temprature=0.1)
    # of servers: no meaning here
    chat = ChatCacheCraft(engine=engine, timeout=30, max_retries=2, api_key="none")
    with pytest.raises(
        ConfigError, match=r"document: no setting .* documents, json_schema, max_tokens"
    ):
        chat.invoke("q", document=DOCUMENTS)
    with pytest.raises(ConfigError, match="stop must be a list"):
        chat.invoke("q", stop="END")  # would be three stop strings
    for made in (ChatCacheCraft, CacheCraftGenerator):
        with pytest.raises(ConfigError, match=r"max_tokens|llm"):
            made(engine=engine, max_tokens="many")
    for wrong in ("x", ["x"], 5):
        with pytest.raises(ConfigError, match=r"'documents' must be a list of .*Document\(text\)"):
            chat.invoke("q", documents=wrong)


@pytest.mark.parametrize("made", [ChatCacheCraft, CacheCraftGenerator])
def test_names_of_settings_are_checked_before_a_model_is_loaded(made: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-model")
    with pytest.raises(
        ConfigError,
        match=r"max_new_tokens, stor: no such setting\. Did you mean max_tokens, store\?$",
    ):
        made.from_pretrained(missing, stor="x", max_new_tokens=5)
    with pytest.raises(
        ConfigError, match=r"colour: no such setting; .*max_tokens.*namespace.*store"
    ):
        made.from_pretrained(missing, colour="x")
    with pytest.raises(ConfigError, match="engine: no such setting"):
        made.from_pretrained(missing, engine=None)
    with pytest.raises(ConfigError, match="config"):
        made.from_pretrained(missing, config={"namespace": "n"})
    with pytest.raises(ModelNotFoundError):  # these exist, so the model is looked for
        made.from_pretrained(
            missing, store=tmp_path, max_tokens=5, namespace="n", reuse=None, timeout=3
        )


def test_langchains_cache_of_answers_tells_documents_and_tenants_apart(
    decoder: Decoder, store: ChunkCacheStore
) -> None:
    cache = InMemoryCache()
    with Engine(decoder, store) as ours, Engine(decoder, store, namespace="another") as theirs:
        seen = set()
        for engine in (ours, theirs):
            chat = ChatCacheCraft(engine=engine, max_tokens=3, cache=cache)
            for documents in (DOCUMENTS[:1], DOCUMENTS[1:]):
                seen.add(chat.invoke("q", documents=documents).id)
        assert len(cache._cache) == 4
        # served by LangChain
        assert chat.invoke("q", documents=DOCUMENTS[1:]).usage_metadata["total_cost"] == 0
    assert len(seen) == 4


async def test_leaving_early_stops_the_computing(
    engine: Engine, chat: ChatCacheCraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, embed = list[int](), engine.decoder.embed
    monkeypatch.setattr(engine.decoder, "embed", lambda ids: passes.append(len(ids)) or embed(ids))
    async with aclosing(
        chat.astream("q", documents=DOCUMENTS, max_tokens=1500, temperature=0)
    ) as chunks:  # type: ignore[type-var]
        assert (await anext(chunks)).text
    task = asyncio.create_task(
        chat.ainvoke("q", documents=DOCUMENTS, max_tokens=1500, temperature=0)
    )
    computed = len(passes)
    while len(passes) == computed and not task.done():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(engine.settle, 60)
    assert len(passes) < 1500  # of the two answers at least half was never computed
    assert (await asyncio.wait_for(chat.ainvoke("q"), 60)).text


async def test_sixteen_streams_at_once_are_the_answers_of_one_after_the_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(number: int, **settings: Any) -> dict[str, Any]:
        turned = number % len(TEXTS)
        # chunks at places where most were not captured
        documents = DOCUMENTS[turned:] + DOCUMENTS[:turned]
        return {"input": f"Question {number}?", "documents": documents, "seed": number, **settings}

    bearing = ChatCacheCraft(engine=engine, max_tokens=24, temperature=0.3)
    for number in range(2):
        await bearing.ainvoke(**ask(number))
    settle(engine)
    # From here on the store stays as it is: what is reused decides, by a little, what is answered.
    chat = ChatCacheCraft(
        engine=engine, max_tokens=24, temperature=0.3, reuse=ReuseConfig(capture=False)
    )
    rows, decode = list[int](), engine.loop.joint.decode
    monkeypatch.setattr(
        engine.loop.joint,
        "decode",
        lambda steps: rows.extend([len(steps)] if steps else []) or decode(steps),
    )
    alone = [await chat.ainvoke(**ask(number)) for number in range(16)]
    assert set(rows) == {1}
    rows.clear()
    assert all(details(message)["cache_read"] > 0 for message in alone)
    assert any(
        message.response_metadata["cachecraft"]["tokens_recomputed"] > 0 for message in alone
    )
    assert len({message.text for message in alone}) == 16

    async def follow(number: int) -> str:
        return "".join([chunk.text async for chunk in chat.astream(**ask(number))])

    together = await asyncio.gather(*(follow(number) for number in range(16)))
    assert together == [message.text for message in alone]
    assert sum(rows) > 2 * len(rows)  # decoded together: more than two answers in the mean step


# --- private text ---

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FaissStore, Embedder]]:
    """The texts in an index of ours."""
    embedder = Embedder()
    with FaissStore.open(
        tmp_path_factory.mktemp("index"),
        dim=embedder.dim,
        embedder_fingerprint=embedder.fingerprint,
    ) as made:
        made.upsert("texts", [Chunk(text) for text in TEXTS], embedder.encode_document(TEXTS))
        yield made, embedder


@pytest.fixture(params=["chat model", "facade"])
def asking(
    request: pytest.FixtureRequest, index: tuple[FaissStore, Embedder]
) -> Callable[[Engine], Ask]:
    """`asking(engine)(history, session)` asks one and the same question and returns the answer's numbers and text."""

    def through_chat_model(engine: Engine) -> Ask:
        chat = ChatCacheCraft(engine=engine, max_tokens=8)

        def ask(history: Sequence[BaseMessage] = (), session: str | None = None) -> dict[str, Any]:
            answer = chat.invoke(
                [*history, HumanMessage("How long?")], documents=DOCUMENTS, session=session
            )
            return answer.response_metadata["cachecraft"] | {"text": answer.text}

        return ask

    def through_facade(engine: Engine) -> Ask:
        rag = CacheCraft(engine, *index)

        def ask(history: Sequence[BaseMessage] = (), session: str | None = None) -> dict[str, Any]:
            turns, _ = conversation([*history, HumanMessage("How long?")])
            sampling = SamplingParams(max_new_tokens=8)
            # Searching with the conversation may rank other chunks first, as another question may: not meant here.
            answer = rag.ask(
                "How long?", history=turns, session=session, sampling=sampling, search_history=False
            )
            return answer.stats.as_dict() | {"text": answer.text}

        return ask

    return through_chat_model if request.param == "chat model" else through_facade


def contents(engine: Engine, session: str | None) -> dict[str, tuple[str | None, bytes]]:
    """Chunk-caches that a session may use: each variant's owner and bytes."""
    settle(engine)
    ids = [engine.prompts.system.segment_id, *map(chunk_id_of, TEXTS)]
    found = engine.store.find(
        engine.namespace, engine.decoder.fingerprint, ids, session=session
    ).variants
    variants = [variant for of_segment in found.values() for variant in of_segment]
    loaded = map(engine.store.load, variants)
    return {
        v.variant_id: (v.session, x.kv.numpy().tobytes())
        for v, x in zip(variants, loaded, strict=True)
    }


def test_a_conversation_shapes_nothing_that_others_are_served(
    asking: Callable[[Engine], Ask], decoder: Decoder, tmp_path: Path
) -> None:
    with (
        ChunkCacheStore.open(tmp_path / "with") as after_alice,
        ChunkCacheStore.open(tmp_path / "without") as untouched,
        Engine(decoder, after_alice) as shared,
        Engine(decoder, untouched) as alone,
    ):
        alice = asking(shared)(SECRET, "alice")
        assert alice["tokens_reused"] == 0
        asking(alone)(OTHER, "carol")
        left_by_alice = contents(shared, "bob")
        assert len(left_by_alice) == len(TEXTS) + 1
        assert {session for session, _ in left_by_alice.values()} == {None}
        # to the bit what another conversation leaves
        assert left_by_alice == contents(alone, "bob")
        bob, bob_alone = asking(shared)((), "bob"), asking(alone)((), "bob")
        assert bob["tokens_reused"] == bob_alone["tokens_reused"] > 0
        assert bob["text"] == bob_alone["text"]
        # her second turn reuses them, too
        assert asking(shared)(SECRET, "alice")["tokens_reused"] > 0


def test_captures_after_private_text_are_kept_to_their_session(
    asking: Callable[[Engine], Ask], decoder: Decoder, store: ChunkCacheStore
) -> None:
    with Engine(
        decoder, store, system="You speak with Alice, whose PIN is 4711.", private_system=True
    ) as engine:
        asking(engine)()  # no session could be served the captures, so they are not stored
        assert contents(engine, None) == {}
        asking(engine)(SECRET, "alice")
        assert contents(engine, None) == {}
        assert contents(engine, "bob") == {}
        hers = contents(engine, "alice")
        assert len(hers) == len(TEXTS) + 1
        assert {session for session, _ in hers.values()} == {"alice"}
        assert asking(engine)((), "alice")["tokens_reused"] > 0
        assert asking(engine)(SECRET, "bob")["tokens_reused"] == 0  # even with her very words


def test_another_namespace_is_served_nothing(
    asking: Callable[[Engine], Ask], decoder: Decoder, store: ChunkCacheStore
) -> None:
    with (
        Engine(decoder, store, namespace="acme") as acme,
        Engine(decoder, store, namespace="globex") as globex,
    ):
        asking(acme)(SECRET, "alice")
        assert len(contents(acme, "alice")) == len(TEXTS) + 1
        assert contents(globex, "alice") == {}
        # not even under the same session's name
        assert asking(globex)(SECRET, "alice")["tokens_reused"] == 0
        assert asking(acme)((), "bob")["tokens_reused"] > 0


def test_captures_count_only_where_they_are_stored(
    decoder: Decoder, store: ChunkCacheStore
) -> None:
    with Engine(decoder, store, system="You speak with Alice.", private_system=True) as engine:
        chat = ChatCacheCraft(engine=engine, max_tokens=2)
        assert details(chat.invoke("q", documents=DOCUMENTS))["cache_creation"] == 0
        assert details(chat.invoke("q", documents=DOCUMENTS, session="alice"))["cache_creation"] > 0


# --- the generator ---

INPUT = {"input": "How long is the warranty?", "context": DOCUMENTS}


async def test_every_way_of_calling_gives_the_same_answer(generator: CacheCraftGenerator) -> None:
    generator = CacheCraftGenerator(
        llm=generator.llm.model_copy(update={"reuse": ReuseConfig(reuse=False)})
    )
    answer = generator.invoke(INPUT)
    assert answer
    assert await generator.ainvoke(INPUT) == answer
    assert generator.batch([INPUT, INPUT]) == [answer, answer]
    assert await generator.abatch([INPUT, INPUT]) == [answer, answer]
    pieces = list(generator.stream(INPUT))
    assert len(pieces) > 3
    assert "".join(pieces) == answer
    assert [piece async for piece in generator.astream(INPUT)] == pieces
    assert generator.bind(seed=2).invoke(INPUT) != answer
    asked = generator.llm.invoke(INPUT["input"], documents=DOCUMENTS)  # type: ignore[arg-type]
    assert asked.text == answer


async def test_events_show_the_generator_and_the_model_within(
    generator: CacheCraftGenerator,
) -> None:
    events = [event async for event in generator.astream_events(INPUT, version="v2")]
    assert [event["event"] for event in events if "stream" not in event["event"]] == [
        "on_chain_start",
        "on_chat_model_start",
        "on_chat_model_end",
        "on_chain_end",
    ]
    pieces = [event["data"]["chunk"] for event in events if event["event"] == "on_chain_stream"]
    tokens = [
        event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"
    ]
    assert "".join(tokens) == "".join(pieces) == events[-1]["data"]["output"]
    ended = next(event for event in events if event["event"] == "on_chat_model_end")
    assert details(ended["data"]["output"])["cache_creation"] > 0


async def test_callbacks_fire_sync_and_async(generator: CacheCraftGenerator) -> None:
    class Seen(BaseCallbackHandler):
        def __init__(self) -> None:
            self.names: list[str] = []

        def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
            self.names.append("chain start")

        def on_chain_end(self, *args: Any, **kwargs: Any) -> None:
            self.names.append("chain end")

        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.names.append("model start")

        def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
            self.names.append("model end")

        def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            self.names.append("token")

        def on_llm_error(self, *args: Any, **kwargs: Any) -> None:
            self.names.append("model error")

        def on_chain_error(self, *args: Any, **kwargs: Any) -> None:
            self.names.append("chain error")

    whole = ["chain start", "model start", "model end", "chain end"]

    async def astreamed(config: Any) -> list[str]:
        return [piece async for piece in generator.astream(INPUT, config)]

    for call in (
        partial(generator.invoke, INPUT),
        lambda config: list(generator.stream(INPUT, config)),
    ):
        seen = Seen()
        call({"callbacks": [seen]})
        assert [name for name in seen.names if name != "token"] == whole
    for acall in (partial(generator.ainvoke, INPUT), astreamed):
        seen = Seen()
        await acall({"callbacks": [seen]})
        assert [name for name in seen.names if name != "token"] == whole
    assert seen.names.count("token") > 3  # the last one streamed
    seen = Seen()
    with pytest.raises(ConfigError, match="empty"):
        generator.invoke({"input": " ", "context": []}, {"callbacks": [seen]})
    assert seen.names == ["chain start", "model start", "model error", "chain error"]


def test_usage_reaches_langchains_own_counter(generator: CacheCraftGenerator) -> None:
    generator.invoke(INPUT)
    with get_usage_metadata_callback() as counter:
        generator.invoke(INPUT)
    (usage,) = counter.usage_metadata.values()
    assert usage["input_token_details"]["cache_read"] > 0


async def test_pipes(chat: ChatCacheCraft) -> None:
    generator = CacheCraftGenerator(llm=chat, input_key="question")
    find = RunnableLambda(
        lambda question: [text for text in DOCUMENTS if "warranty" in text.page_content]
    )
    chain = (
        {"context": find, "question": RunnablePassthrough()} | generator | RunnableLambda(str.upper)
    )
    question = "How long is the warranty?"
    answer = chain.invoke(question)
    assert answer
    assert await chain.ainvoke(question) == answer
    parts = {"context": find, "question": RunnablePassthrough()} | generator
    assert "".join(parts.stream(question)).upper() == answer

    async def whole(pieces: AsyncIterator[str]) -> str:
        return "".join([piece async for piece in pieces])

    assert (await whole(parts.astream(question))).upper() == answer
    plain = (
        ChatPromptTemplate.from_messages([("system", "Rhyme."), ("human", "{question}")])
        | chat
        | StrOutputParser()
    )
    assert plain.invoke({"question": question})


def test_history_and_document_prompt(chat: ChatCacheCraft) -> None:
    prompt = PromptTemplate.from_template("{source}: {page_content}")
    generator = CacheCraftGenerator(llm=chat, document_prompt=prompt)
    documents = [
        Document(text, metadata={"source": f"page {place}"}) for place, text in enumerate(TEXTS)
    ]
    said = [("human", "My PIN is 4711."), ("ai", "I shall keep it to myself.")]
    answer = generator.invoke({"input": "And now?", "context": documents, "chat_history": said})
    seen = [Document(f"page {place}: {text}") for place, text in enumerate(TEXTS)]
    again = chat.invoke([*SECRET, HumanMessage("And now?")], documents=seen)
    assert again.text == answer
    assert details(again)["cache_read"] > 0  # the same texts, so the same chunks


# and yet it is what most applications have
@pytest.mark.filterwarnings("ignore:.*MessageHistory.* deprecated")
def test_langchain_keeps_the_conversations(generator: CacheCraftGenerator) -> None:
    kept: dict[str, InMemoryChatMessageHistory] = defaultdict(InMemoryChatMessageHistory)
    talking = RunnableWithMessageHistory(
        generator,
        lambda session_id: kept[session_id],
        input_messages_key="input",
        history_messages_key="chat_history",
    )
    for name in ("alice", "bob", "alice"):
        talking.invoke(
            {"input": f"I am {name}", "context": DOCUMENTS}, {"configurable": {"session_id": name}}
        )
    assert [message.text for message in kept["alice"].messages][::2] == ["I am alice"] * 2
    assert len(kept["bob"].messages) == 2


def test_inputs_that_are_wrong_say_what_to_do(generator: CacheCraftGenerator) -> None:
    with pytest.raises(ConfigError, match=r"no 'input', only 'question', 'context'; .* input_key"):
        generator.invoke({"question": "q", "context": DOCUMENTS})
    with pytest.raises(ConfigError, match="leave out the step that joins them"):
        generator.invoke({"input": "q", "context": "\n\n".join(TEXTS)})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("fan?", "must be a dict with 'input' and 'context', not 'fan"),
        (None, "must be a dict"),
        ({"input": "q", "context": None}, "'context' must be a list"),
        ({"input": "q", "context": 5}, "'context' must be a list"),
        ({"input": "q", "context": TEXTS}, "'context' must be a list"),
        ({"input": None, "context": []}, "'input' must be the question, a text, not None"),
        ({"input": 7, "context": []}, "'input' must be the question"),
        (
            {"input": "q", "context": [], "chat_history": "hello"},
            "'chat_history' must be a list of messages",
        ),
        (
            {"input": "q", "context": [], "chat_history": HumanMessage("hello")},
            "'chat_history' must be a list",
        ),
        (
            {"input": "q", "context": [], "chat_history": {"role": "user", "content": "hello"}},
            "'chat_history' must",
        ),
        ({"input": "q", "context": [], "chat_history": 5}, "'chat_history' must"),
    ],
)
async def test_inputs_of_the_wrong_kind_say_what_to_pass(
    generator: CacheCraftGenerator, given: Any, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        generator.invoke(given)
    with pytest.raises(ConfigError, match=complaint):
        await generator.ainvoke(given)
    with pytest.raises(ConfigError, match=complaint):
        list(generator.stream(given))


# --- as users have it ---


def test_from_pretrained_takes_the_generators_own_settings(
    demo_model: Path, tmp_path: Path
) -> None:
    prompt = PromptTemplate.from_template("Note: {page_content}")
    settings: dict[str, Any] = {
        "input_key": "question",
        "context_key": "found",
        "history_key": "before",
    }
    settings |= {"document_prompt": prompt, "store": tmp_path, "max_tokens": 2}
    config = EngineConfig(namespace="acme", system="Answer.")
    with CacheCraftGenerator.from_pretrained(
        str(demo_model), config=config, namespace="tenant", **settings
    ) as generator:
        question = {"question": "How much does it hold?", "found": DOCUMENTS[:1], "before": SECRET}
        with get_usage_metadata_callback() as counter:
            assert generator.invoke(question)
        (usage,) = counter.usage_metadata.values()
        assert usage["output_tokens"] == 2
        engine = generator.llm.engine
        assert engine.namespace == "tenant"  # an option goes before the config
        assert "Answer." in engine.decoder.tokenizer.decode(engine.prompts.system.token_ids)
        noted = chunk_id_of(f"Note: {TEXTS[0]}")
        engine.write_back.wait_for([noted])
        engine.store.flush()
        assert engine.store.find(engine.namespace, engine.decoder.fingerprint, [noted]).variants[
            noted
        ]
    with pytest.raises(ValueError, match="input_key"):
        CacheCraftGenerator.from_pretrained(str(demo_model), store=tmp_path, input_key=5)


def test_the_one_line_swap(demo_model: Path, handbook: Path, tmp_path: Path) -> None:
    """An index built the ordinary way, with no class of ours but the embeddings, and `create_retrieval_chain`."""
    pages = [handbook / name for name in ("kettle-wren-k2.md", "descaling.md", "warranty.md")]
    pieces = RecursiveCharacterTextSplitter(chunk_size=500, chunk_overlap=0).create_documents(
        [page.read_text(encoding="utf-8") for page in pages],
        [{"source": page.name} for page in pages],
    )
    vectors = InMemoryVectorStore.from_documents(pieces, CacheCraftEmbeddings())
    with CacheCraftGenerator.from_pretrained(
        str(demo_model), store=tmp_path, max_tokens=12, new_variants="off"
    ) as generator:
        chain = create_retrieval_chain(vectors.as_retriever(search_kwargs={"k": 3}), generator)
        reused = []
        for question in (
            "How often should I descale the Wren K2 kettle?",
            "How do I descale the Wren K2 kettle?",
        ):
            with get_usage_metadata_callback() as counter:
                result = chain.invoke({"input": question})
            assert result["answer"]
            assert len(result["context"]) == 3
            (usage,) = counter.usage_metadata.values()
            reused.append(usage["input_token_details"]["cache_read"])
        streamed = [
            part["answer"] for part in chain.stream({"input": question}) if "answer" in part
        ]
        assert len(streamed) > 3
        assert "".join(streamed) == result["answer"]
    assert reused[0] == 0 < reused[1]


@pytest.mark.parametrize(
    "module", ["cachecraft_rag.langchain.chat_model", "cachecraft_rag.retrievers.langchain"]
)
def test_without_langchain_the_error_says_what_to_install(module: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules['langchain_core'] = None; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "type: pip install 'cachecraft-rag[langchain]'" in done.stderr.splitlines()[-1]


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


def test_a_stores_chunk_id_is_what_the_look_up_is_asked_for(
    chat: ChatCacheCraft, tmp_path: Path
) -> None:
    look_ups = LookUps(chat.engine)
    with CacheCraftVectorStore.from_texts(
        TEXTS, DeterministicFakeEmbedding(size=8), folder=tmp_path
    ) as vectors:
        retriever = vectors.as_retriever()
        chain = create_retrieval_chain(retriever, CacheCraftGenerator(llm=chat))
        result = chain.invoke({"input": "Why?"})
        by_hand = vectors.similarity_search("Why?")
        chat.invoke("Why not?", documents=by_hand)
        assert (
            vectors.get_by_ids([str(by_hand[0].id)])[0].metadata[CHUNK_ID_KEY]
            == by_hand[0].metadata[CHUNK_ID_KEY]
        )
    for documents in (result["context"], by_hand):
        assert [document.metadata[CHUNK_ID_KEY] for document in documents] == [
            chunk_id_of(document.page_content) for document in documents
        ]
        assert {document.metadata[CHUNK_ID_KEY] for document in documents} <= set(look_ups.asked)
    # The very objects of the vector store: nothing up to the look-up made an id again. The second question may be asked
    # with those of the first, whose tokens are kept.
    ids = [document.metadata[CHUNK_ID_KEY] for document in (*result["context"], *by_hand)]
    assert {id(asked) for asked in look_ups.asked if asked in ids} <= set(map(id, ids))
    assert set(map(id, ids[: len(result["context"])])) <= set(map(id, look_ups.asked))


def test_an_edited_document_is_computed_and_its_old_id_is_named(
    chat: ChatCacheCraft, caplog: pytest.LogCaptureFixture
) -> None:
    noted = [Document(text, metadata={CHUNK_ID_KEY: chunk_id_of(text)}) for text in TEXTS]
    generator = CacheCraftGenerator(llm=chat)
    generator.invoke({"input": "Why?", "context": noted})
    settle(chat.engine)
    edited = noted[0].model_copy(update={"page_content": "It is shorter now."})
    strange = Document("x", metadata={CHUNK_ID_KEY: 1})
    chunks = []
    for given in ([edited, noted[1]], [strange]):
        answer = chat.invoke("Why?", documents=given)
        chunks += answer.response_metadata["cachecraft"]["chunks"]
    by_text = {chunk["chunk_id"]: (chunk["stale_id"], chunk["outcome"]) for chunk in chunks}
    assert by_text == {
        chunk_id_of("It is shorter now."): (chunk_id_of(TEXTS[0]), "computed"),
        chunk_id_of(TEXTS[1]): ("", "reused"),
        chunk_id_of("x"): ("1", "computed"),
    }
    assert len([record for record in caplog.records if record.name == "cachecraft_rag.prompt"]) == 1
    plain = chat.engine.stream("Why?", [Chunk(TEXTS[0])], sampling=SamplingParams(max_new_tokens=4))
    list(plain)
    # the edit did not touch what it had
    assert [chunk.outcome for chunk in plain.stats.chunks] == ["reused"]


@pytest.mark.parametrize("is_formatted", [False, True])
def test_the_context_of_a_chain_says_what_became_of_each_passage(
    chat: ChatCacheCraft, is_formatted: bool
) -> None:
    documents = [
        Document(text, id=str(place), metadata={"place": place}) for place, text in enumerate(TEXTS)
    ]
    before = [document.model_copy(deep=True) for document in documents]
    prompt = PromptTemplate.from_template("Note: {page_content}") if is_formatted else None
    generator = CacheCraftGenerator(llm=chat, document_prompt=prompt)
    # the retriever returns its own objects each time
    chain = RunnablePassthrough.assign(context=lambda _: documents) | generator.with_context()
    first: Any = chain.invoke({"input": "Why?"})
    settle(chat.engine)
    streamed: dict[str, Any] = {}
    for part in chain.stream({"input": "Why?"}):
        streamed = {
            **streamed,
            **part,
            "answer": streamed.get("answer", "") + part.get("answer", ""),
        }
    again: Any = asyncio.run(chain.ainvoke({"input": "Why?"}))
    assert first["input"] == "Why?"
    assert first["answer"] == streamed["answer"] == again["answer"]
    for result, outcome in ((first, "computed"), (streamed, "exact"), (again, "exact")):
        assert [document.metadata[OUTCOME_KEY] for document in result["context"]] == [
            outcome
        ] * len(TEXTS)
        assert [document.page_content for document in result["context"]] == TEXTS
        assert [document.metadata["place"] for document in result["context"]] == [0, 1, 2, 3]
    assert [dict(document.metadata) for document in documents] == [
        document.metadata for document in before
    ]


def test_what_a_caller_gave_does_not_change_and_copies_have_flat_notes(
    chat: ChatCacheCraft,
) -> None:
    documents = [Document(text, metadata={"source": "kettle.txt"}) for text in TEXTS]
    shared = [document.metadata for document in documents]
    answer = chat.invoke("Why?", documents=documents)
    generator = CacheCraftGenerator(llm=chat)
    generator.invoke({"input": "Why?", "context": documents})
    "".join(generator.stream({"input": "Why?", "context": documents}))
    asyncio.run(generator.ainvoke({"input": "Why?", "context": documents}))
    list(chat.stream("Why?", documents=documents))
    assert all(
        document.metadata is given and given == {"source": "kettle.txt"}
        for document, given in zip(documents, shared, strict=True)
    )
    copies = with_outcomes(documents, answer)
    for copy in copies:
        assert copy.metadata.keys() == {"source", OUTCOME_KEY, REASON_KEY}
        assert all(type(value) is str for value in copy.metadata.values())
        assert json.loads(json.dumps(copy.metadata)) == copy.metadata
    assert {copy.metadata[OUTCOME_KEY] for copy in copies} == {"computed"}
    with pytest.raises(ConfigError, match="documents of its call"):
        with_outcomes(documents[:1], answer)
    with pytest.raises(ConfigError, match="documents of its call"):
        with_outcomes(documents, AIMessage("from another model"))


def test_the_numbers_say_which_document_is_which_chunk(chat: ChatCacheCraft) -> None:
    prompt = PromptTemplate.from_template("Note: {page_content}")
    seen: list[Any] = []

    class Listener(BaseCallbackHandler):
        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            seen.append(response.generations[0][0].message.response_metadata["cachecraft"])

    documents = [Document(text, id=f"page {place}") for place, text in enumerate(TEXTS)] + [
        Document("No id.")
    ]
    for document_prompt, form in ((None, "{}"), (prompt, "Note: {}")):
        generator = CacheCraftGenerator(llm=chat, document_prompt=document_prompt)
        generator.invoke({"input": "Why?", "context": documents}, {"callbacks": [Listener()]})
        numbers = seen.pop()
        expected = [
            {"id": one.id, "chunk_id": chunk_id_of(form.format(one.page_content))}
            for one in documents
        ]
        assert [
            {"id": one["id"], "chunk_id": one["chunk_id"]} for one in numbers["documents"]
        ] == expected
        assert {one["chunk_id"] for one in expected} == {
            chunk["chunk_id"] for chunk in numbers["chunks"]
        }
