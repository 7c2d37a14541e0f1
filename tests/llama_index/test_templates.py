"""LlamaIndex's templates, response modes and output classes: what fits the layout works, the rest says what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, PromptTemplate, VectorStoreIndex
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.response_synthesizers import ResponseMode
from pydantic import BaseModel, Field

from cachecraft_rag import Engine, SamplingParams
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index import CacheCraftLLM, CacheCraftQueryEngine, CacheCraftSynthesizer

TEXTS = ["Descale the kettle with vinegar.", "The toaster has a crumb tray."]
LONG = SamplingParams(max_new_tokens=200)
PIRATE = PromptTemplate("{context_str}\nAnswer like a {who}: {query_str}", who="pirate")


class Weeks(BaseModel):
    """Weeks between two descalings."""

    weeks: int = Field(ge=0, le=52)
    sure: bool


def query_engine_of(engine: Engine, **options: Any) -> CacheCraftQueryEngine:
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in TEXTS], embed_model=MockEmbedding(4)
    )
    return CacheCraftQueryEngine.from_index(
        index, **({"engine": engine, "sampling": LONG} | options)
    )


def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Questions as the engine gets them."""
    questions: list[str] = []
    stream = engine.stream

    def noted(question: str, *arguments: Any, **options: Any) -> Any:
        questions.append(question)
        return stream(question, *arguments, **options)

    monkeypatch.setattr(engine, "stream", noted)
    return questions


def test_a_template_says_how_the_question_is_put(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = asked(engine, monkeypatch)
    made = query_engine_of(engine, text_qa_template=PIRATE)
    first, second = made.query("How?"), made.query("When?")
    assert questions == ["Answer like a pirate: How?", "Answer like a pirate: When?"]
    assert {chunk["outcome"] for chunk in second.metadata["cachecraft"]["chunks"]} == {"exact"}
    assert first.source_nodes
    made.update_prompts(
        {
            "response_synthesizer:text_qa_template": PromptTemplate(
                "{context_str} {query_str} Briefly!"
            )
        }
    )
    asyncio.run(made.aquery("Why?"))
    assert questions[-1] == "Why? Briefly!"
    assert list(made.get_prompts()) == ["response_synthesizer:text_qa_template"]


@pytest.mark.parametrize(
    ("template", "advice"),
    [
        (
            "You are a pirate.\n{context_str}\n{query_str}",
            r"system=.*begin the template with \{context_str\}",
        ),
        ("{query_str}\n{context_str}", "system"),
        ("{query_str}", "needs {context_str}"),
        ("{context_str}", "{query_str} after it"),
        ("{context_str} {query_str} {context_str}", "once"),
    ],
)
def test_a_template_that_does_not_fit_says_what_does(
    engine: Engine, template: str, advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        CacheCraftSynthesizer(engine, text_qa_template=PromptTemplate(template))


def test_modes_of_one_pass_are_taken_and_others_refused(engine: Engine) -> None:
    for mode in ("compact", "simple_summarize", ResponseMode.COMPACT):
        query_engine_of(engine, response_mode=mode)
    for mode in ("refine", "tree_summarize", ResponseMode.ACCUMULATE, 5):
        with pytest.raises(ConfigError, match="compact or simple_summarize"):
            query_engine_of(engine, response_mode=mode)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_answers_keep_to_an_output_class(engine: Engine, asynchronous: bool) -> None:
    made = query_engine_of(engine, output_cls=Weeks, text_qa_template=PIRATE)
    response: Any = (
        asyncio.run(made.aquery("How often?")) if asynchronous else made.query("How often?")
    )
    assert isinstance(response, PydanticResponse)
    assert isinstance(response.response, Weeks)
    assert response.metadata is not None
    assert response.metadata["cachecraft"]["finish"] == "end"
    assert len(response.source_nodes) == len(TEXTS)


def test_an_output_class_of_an_answer_that_is_cut_or_streamed(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="allow it more max_tokens"):
        query_engine_of(engine, output_cls=Weeks, sampling=SamplingParams(max_new_tokens=3)).query(
            "How often?"
        )
    for options in ({"output_cls": Weeks, "streaming": True}, {"output_cls": dict}):
        with pytest.raises(ConfigError, match="output_cls"):
            query_engine_of(engine, **options)


def test_the_llm_predicts_objects(engine: Engine) -> None:
    llm, prompt = CacheCraftLLM(engine, sampling=LONG), PromptTemplate("Weeks until {what}?")
    assert isinstance(llm.structured_predict(Weeks, prompt, what="Easter"), Weeks)
    assert isinstance(asyncio.run(llm.astructured_predict(Weeks, prompt, what="Easter")), Weeks)
    with pytest.raises(ConfigError, match="sampling"):
        llm.structured_predict(Weeks, prompt, {"sampling": {"temperature": 0.5}}, what="Easter")
    assert isinstance(llm.as_structured_llm(Weeks).complete("Weeks until Easter?").raw, Weeks)
