"""Tools through LlamaIndex: an agent calls them, and what is asked for is kept to."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.tools import FunctionTool

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index import CacheCraftLLM
from cachecraft_rag.llama_index.tools import question_of, turns_of
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store import ChunkCacheStore

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["The Wren K2 holds 1.7 litres.", "Descale the Wren K2 every 8 weeks."]
# as Qwen and Hermes write tools and calls
WITH_TOOLS = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{{ '<|' + m.role + '|>' + (m.content or '') }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED = ChatMessage(content="When is the kettle descaled?")


def weeks() -> int:
    """Weeks until descaling."""
    return 8


def litres(kettle: str = "") -> str:
    """How much a kettle holds."""
    return f"{kettle} holds 1.7 litres"


TOOLS = [FunctionTool.from_defaults(weeks), FunctionTool.from_defaults(litres)]


@pytest.fixture
def engine(tiny_decoder: Callable[..., Decoder], store: ChunkCacheStore) -> Iterator[Engine]:
    """A random model with a template for tools: what is right in its answers was forced."""
    random = tiny_decoder("Llama", seed=4)
    tokenizer = copy.deepcopy(random.tokenizer)
    tokenizer.chat_template = WITH_TOOLS
    decoder = Decoder(random.model, tokenizer, name="tiny with tools")
    with Engine(decoder, store, new_variants="off") as made:
        yield made


@pytest.fixture
def llm(engine: Engine) -> CacheCraftLLM:
    return CacheCraftLLM(engine, max_tokens=200)


# LlamaIndex's agents read deprecated attributes of pydantic
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
def test_an_agent_of_functions_calls_a_tool_and_goes_on_after_its_result(engine: Engine) -> None:
    called: list[str] = []

    def descaling() -> int:
        """Weeks until descaling."""
        called.append("descaling")
        return 8

    llm = CacheCraftLLM(engine, max_tokens=60)
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(descaling)],
        llm=llm,
        system_prompt="Be brief.",
        initial_tool_choice="descaling",
    )

    async def run() -> Any:
        return await agent.run(user_msg="When is the kettle descaled?")

    output = asyncio.run(run())
    assert called == ["descaling"]
    assert [call.tool_name for call in output.tool_calls] == ["descaling"]
    assert output.response.role == MessageRole.ASSISTANT
    assert output.raw["cachecraft"]["tokens_generated"] > 0


@pytest.mark.parametrize("way", ["chat", "achat", "stream", "astream"])
def test_a_call_that_is_asked_for_is_made(llm: CacheCraftLLM, way: str) -> None:
    asked: dict[str, Any] = {
        "chat_history": [ASKED],
        "tool_choice": "weeks",
        "documents": TEXTS,
    }

    async def streamed() -> Any:
        stream = await llm.astream_chat_with_tools(TOOLS, **asked)
        return [response async for response in stream][-1]

    response = {
        "chat": lambda: llm.chat_with_tools(TOOLS, **asked),
        "achat": lambda: asyncio.run(llm.achat_with_tools(TOOLS, **asked)),
        "stream": lambda: list(llm.stream_chat_with_tools(TOOLS, **asked))[-1],
        "astream": lambda: asyncio.run(streamed()),
    }[way]()
    (call,) = llm.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("weeks", {})
    assert call.tool_id
    assert not response.message.content
    assert len(response.raw["cachecraft"]["chunks"]) == 2


def test_a_required_tool_is_called_and_its_result_returned(llm: CacheCraftLLM) -> None:
    tools = [FunctionTool.from_defaults(weeks)]
    output = llm.predict_and_call(tools, user_msg="When?", tool_required=True)
    assert output.response == "8"


def test_without_a_choice_the_model_may_answer_in_text(llm: CacheCraftLLM) -> None:
    for choice in (None, "auto", "none"):
        response = llm.chat_with_tools(TOOLS, user_msg="Hello!", tool_choice=choice, max_tokens=20)
        assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
        assert response.message.content
    with pytest.raises(ConfigError, match="the answer calls no tool; pass tool_required=True"):
        llm.get_tool_calls_from_response(response)
    with pytest.raises(ConfigError, match="there are auto, none, any, weeks, litres"):
        llm.chat_with_tools(TOOLS, user_msg="Hello!", tool_choice="hours")
    with pytest.raises(ConfigError, match="there are auto, none"):
        llm.chat_with_tools([], user_msg="Hello!", tool_required=True)


def test_only_a_template_with_tools_makes_a_function_calling_model(
    llm: CacheCraftLLM, decoder: Decoder, tmp_path: Path
) -> None:
    assert llm.metadata.is_function_calling_model
    with (
        ChunkCacheStore.open(tmp_path / "plain") as store,
        Engine(decoder, store, new_variants="off") as plain,
    ):
        assert not CacheCraftLLM(plain).metadata.is_function_calling_model


def test_messages_with_calls_become_turns_of_calls_and_results() -> None:
    calls = ChatMessage(
        role="assistant",
        blocks=[
            TextBlock(text="Let me see."),
            ToolCallBlock(tool_call_id="1", tool_name="weeks"),
            ToolCallBlock(tool_call_id="2", tool_name="litres", tool_kwargs='{"kettle": "K2"}'),
            ToolCallBlock(tool_call_id="3", tool_name="weeks"),
        ],
    )
    results = [
        ChatMessage("1.7", role="tool", additional_kwargs={"tool_call_id": "2"}),
        ChatMessage("8", role="tool", additional_kwargs={"tool_call_id": "1"}),
    ]
    lost = ChatMessage("9", role="tool", additional_kwargs={"tool_call_id": "of a lost message"})
    question, history = question_of([lost, ASKED, calls, *results])
    assert question == ""
    made = [{"name": "weeks", "arguments": {}}, {"name": "litres", "arguments": {"kettle": "K2"}}]
    assert history == [
        ("user", "9\n\nWhen is the kettle descaled?"),
        ("assistant", "Let me see."),
        ("calls", json.dumps(made)),
        ("result", "8"),
        ("result", "1.7"),
    ]
    assert turns_of([calls]) == [("assistant", "Let me see.")]  # none of its calls has a result
    with pytest.raises(ConfigError, match="the last message must be the user's or a tool's result"):
        question_of([ASKED, calls])
