"""Ask a server through each client library that is installed, three times, and print what was reused each time.

    cachecraft serve demo --store /tmp/empty        # in the server's environment
    pip install openai litellm langchain-openai llama-index-llms-openai-like haystack-ai dspy "pydantic-ai-slim[openai]"
    python benchmarks/clients.py                    # in the clients' environment, which needs nothing of this package

Each library asks about three pages of the sample handbook, each time in another order and with another question: in the
field `documents` where it can pass one on, else in its own kind of prompt. Each paragraph begins with the library's
name, so none finds what another has sent. The shares come from the server's metrics.
"""

import argparse
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

HANDBOOK = Path(__file__).parents[1] / "examples" / "handbook"
PAGES = ("coffee-otter-c6", "kettle-wren-k2", "returns")
QUESTIONS = (
    "How do I clean it?",
    "What has to be paid, and by whom?",
    "Who should be called when it leaks?",
)
LETTERS = 1200  # of each page
QUIET_S = 4.0  # without a capture, until all are taken for done
ANSWER_TOKENS = 8


def _text(documents: list[str], question: str) -> str:
    return "\n\n".join([*documents, question])


def _field(documents: list[str]) -> dict[str, object]:
    return {"documents": [{"text": text} for text in documents]}


def _openai_chat(url: str, documents: list[str], question: str) -> None:
    import openai

    openai.OpenAI(base_url=url, api_key="none").chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        max_tokens=ANSWER_TOKENS,
        extra_body=_field(documents),
    )


def _openai_stream(url: str, documents: list[str], question: str) -> None:
    import openai

    list(
        openai.OpenAI(base_url=url, api_key="none").chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": _text(documents, question)}],
            max_tokens=ANSWER_TOKENS,
            stream=True,
        )
    )


def _openai_responses(url: str, documents: list[str], question: str) -> None:
    import openai

    openai.OpenAI(base_url=url, api_key="none").responses.create(
        model="demo", input=_text(documents, question), max_output_tokens=ANSWER_TOKENS
    )


def _litellm_documents(url: str, documents: list[str], question: str) -> None:
    import litellm

    litellm.completion(
        model="hosted_vllm/demo",
        api_base=url,
        api_key="none",
        messages=[{"role": "user", "content": question}],
        max_tokens=ANSWER_TOKENS,
        extra_body=_field(documents),
    )


def _litellm_text(url: str, documents: list[str], question: str) -> None:
    import litellm

    litellm.completion(
        model="openai/demo",
        api_base=url,
        api_key="none",
        messages=[{"role": "user", "content": _text(documents, question)}],
        max_tokens=ANSWER_TOKENS,
    )


def _langchain_documents(url: str, documents: list[str], question: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="demo", base_url=url, api_key="none", max_tokens=ANSWER_TOKENS)
    chat.invoke(question, extra_body=_field(documents))


def _langchain_text(url: str, documents: list[str], question: str) -> None:
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    template = ChatPromptTemplate.from_messages(
        [
            ("system", "Answer from the context."),
            ("human", "Context:\n\n{context}\n\nQuestion: {question}"),
        ]
    )
    chat = ChatOpenAI(model="demo", base_url=url, api_key="none", max_tokens=ANSWER_TOKENS)
    (template | chat).invoke({"context": "\n\n".join(documents), "question": question})


def _llama_index_text(url: str, documents: list[str], question: str) -> None:
    from llama_index.core.response_synthesizers import get_response_synthesizer
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model="demo",
        api_base=url,
        api_key="none",
        is_chat_model=True,
        context_window=8192,
        max_tokens=ANSWER_TOKENS,
    )
    nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in documents]
    get_response_synthesizer(llm=llm).synthesize(question, nodes)


def _haystack_text(url: str, documents: list[str], question: str) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        model="demo",
        api_base_url=url,
        generation_kwargs={"max_tokens": ANSWER_TOKENS},
    )
    generator.run([ChatMessage.from_user(_text(documents, question))])


def _dspy_text(url: str, documents: list[str], question: str) -> None:
    import dspy

    lm = dspy.LM("openai/demo", api_base=url, api_key="none", max_tokens=ANSWER_TOKENS, cache=False)
    lm(_text(documents, question))


def _pydantic_ai_text(url: str, documents: list[str], question: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, instructions="Answer from the context.")
    agent.run_sync(_text(documents, question), model_settings={"max_tokens": ANSWER_TOKENS})


Ask = Callable[[str, list[str], str], None]
# name of the package → (how it is used, how it asks)
CLIENTS: dict[str, tuple[tuple[str, Ask], ...]] = {
    "openai": (
        ("chat, documents", _openai_chat),
        ("streamed chat", _openai_stream),
        ("responses", _openai_responses),
    ),
    "litellm": (("completion, documents", _litellm_documents), ("completion", _litellm_text)),
    "langchain-openai": (
        ("ChatOpenAI, documents", _langchain_documents),
        ("ChatOpenAI after a prompt template", _langchain_text),
    ),
    "llama-index-llms-openai-like": (("OpenAILike, response synthesizer", _llama_index_text),),
    "haystack-ai": (("OpenAIChatGenerator", _haystack_text),),
    "dspy": (("LM", _dspy_text),),
    "pydantic-ai-slim": (("Agent", _pydantic_ai_text),),
}


def metrics(server: str) -> dict[str, float]:
    """Metrics of the server, by name with labels."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("cachecraft_"))
    return {name: float(value) for name, _, value in pairs}


def prompt_tokens(server: str) -> tuple[float, float]:
    """Reused tokens, and all tokens of prompts, since the server's start."""
    now = metrics(server)
    reused, *rest = (
        now[f'cachecraft_tokens_total{{kind="{kind}"}}']
        for kind in ("reused", "recomputed", "computed")
    )
    return reused, reused + sum(rest)


def settle(server: str) -> None:
    """Wait until the server has captured nothing for some seconds."""
    name = 'cachecraft_captures_total{outcome="stored",reason=""}'
    before = -1.0
    while (now := metrics(server)[name]) != before:
        before = now
        time.sleep(QUIET_S)


def shares(server: str, name: str, ask: Ask) -> Iterator[tuple[float, float]]:
    """Ask three times; yield the tokens of each prompt, and the share that was reused."""
    pages = [(HANDBOOK / f"{page}.md").read_text(encoding="utf-8")[:LETTERS] for page in PAGES]
    texts = [page.strip().replace("\n\n", f"\n\nSent with {name}. ") for page in pages]
    for place, question in enumerate(QUESTIONS):
        before = prompt_tokens(server)
        ask(f"{server}/v1", texts[place:] + texts[:place], question)
        reused, tokens = (
            now - then for now, then in zip(prompt_tokens(server), before, strict=True)
        )
        yield tokens, reused / tokens
        settle(server)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--only", help="names of packages, separated by commas")
    arguments = parser.parse_args()
    with urllib.request.urlopen(f"{arguments.server}/v1/models", timeout=60) as reply:
        assert "demo" in [model["id"] for model in json.load(reply)["data"]], "serve demo"
    print("| library | used as | prompt tokens | first time | second time | third time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for package, uses in CLIENTS.items():
        if arguments.only and package not in arguments.only.split(","):
            continue
        for use, ask in uses:
            try:
                row = list(shares(arguments.server, f"{package} {use}", ask))
            except ImportError as error:
                print(f"| {package} | not installed: {error} | | | | |", flush=True)
                continue
            cells = " | ".join(f"{share:.2f}" for _, share in row)
            name = f"{package} {version(package)}"
            print(f"| {name} | {use} | {row[-1][0]:,.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
