"""Reuse in the prompts that applications write: passages in a new order each time, in the form of each application.

Each form is sent several times. A passage can be reused from the third time on: the first time it is new, the second
time it is recognised and captured. Without a server the search alone is measured, with the model's tokenizer and no
model: the share of passage tokens in found segments that two earlier prompts held. With `--server` the same prompts are
sent to a `cachecraft serve --reuse-plain-prompts --search-system` server, and its statistics are counted.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachecraft_rag.checks import check_names
from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import out, print_json
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import handbook_dataset
from cachecraft_rag.planning.found_text import TokenKinds
from cachecraft_rag.prompt.unmarked import PromptPiece, segments_of

Message = dict[str, Any]
Form = Callable[[Sequence[str], str], list[Message]]

_INSTRUCTION = "You are a helpful assistant. Answer from the given context, and say so if it does not hold the answer."
_SETTLE_S = 12.0  # captures are made when the server idles, or after ten seconds each


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def open_webui(passages: Sequence[str], question: str) -> list[Message]:
    """Open WebUI's default template: numbered sources in tags."""
    sources = "\n".join(
        f'<source id="{number}" name="page {number}.md">{text}</source>'
        for number, text in enumerate(passages, 1)
    )
    return [
        _user(
            "### Task:\nRespond to the user query using the provided context, incorporating inline citations in the "
            "format [id] **only when the <source> tag includes an explicit id attribute**.\n\n### Guidelines:\n- If "
            "you don't know the answer, clearly state that.\n- Respond in the same language as the user's query.\n\n"
            f"<context>\n{sources}\n</context>\n\n{question}"
        )
    ]


def anythingllm(passages: Sequence[str], question: str) -> list[Message]:
    """AnythingLLM: numbered contexts at the end of the system message."""
    contexts = "".join(
        f"\n[CONTEXT {number}]:\n{text}\n[END CONTEXT {number}]\n\n"
        for number, text in enumerate(passages)
    )
    return [_system(f"{_INSTRUCTION}\nContext:\n    {contexts}"), _user(question)]


def dify(passages: Sequence[str], question: str) -> list[Message]:
    """Dify: passages joined by one line end, in the system message."""
    context = "\n".join(passages)
    return [
        _system(
            "Use the following context as your learned knowledge, inside <context></context> XML tags.\n\n<context>\n"
            f"{context}\n</context>\n\nWhen answer to user:\n- If you don't know, just say that you don't know."
        ),
        _user(question),
    ]


def langchain(passages: Sequence[str], question: str) -> list[Message]:
    """LangChain's usual instruction with a context."""
    context = "\n\n".join(passages)
    return [
        _user(
            "Use the following pieces of retrieved context to answer the question. If you don't know the answer, say "
            f"that you don't know.\n\n{context}\n\n{question}"
        )
    ]


def llama_index(passages: Sequence[str], question: str) -> list[Message]:
    """LlamaIndex's template for questions."""
    context = "\n\n".join(passages)
    line = "---------------------"
    return [
        _user(
            f"Context information is below.\n{line}\n{context}\n{line}\nGiven the context information and not prior "
            f"knowledge, answer the query.\nQuery: {question}\nAnswer: "
        )
    ]


def _agent(question: str, results: Sequence[str]) -> list[Message]:
    messages = [_system(_INSTRUCTION), _user(question)]
    for number, result in enumerate(results):
        call = {"name": "search", "arguments": json.dumps({"query": question})}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
    return messages


def tool_text(passages: Sequence[str], question: str) -> list[Message]:
    """An agent whose tool returns the passages as text."""
    return _agent(question, ["\n\n".join(passages)])


def tool_sources(passages: Sequence[str], question: str) -> list[Message]:
    """An agent whose tool names a source before each passage."""
    texts = [f"Source: page {number}\nContent: {text}" for number, text in enumerate(passages, 1)]
    return _agent(question, ["\n\n".join(texts)])


def tool_json(passages: Sequence[str], question: str) -> list[Message]:
    """An agent whose tool returns JSON with scores."""
    rows = [
        {"rank": rank, "score": round(0.9 - rank / 50, 3), "content": text}
        for rank, text in enumerate(passages)
    ]
    return _agent(question, [json.dumps(rows, ensure_ascii=False)])


def tool_several(passages: Sequence[str], question: str) -> list[Message]:
    """An agent with one call for each passage."""
    return _agent(question, passages)


FORMS: dict[str, Form] = {
    form.__name__.replace("_", "-"): form
    for form in (
        open_webui,
        anythingllm,
        dify,
        langchain,
        llama_index,
        tool_text,
        tool_sources,
        tool_json,
        tool_several,
    )
}


@dataclass(frozen=True)
class Reused:
    """Share of passage tokens that could be, or were, taken from chunk-caches, for each time a form was sent."""

    shares: tuple[float, ...]


def orders(passages: Sequence[str], times: int, seed: int) -> list[list[str]]:
    """The passages in a new order for each time."""
    dice = random.Random(seed)
    return [dice.sample(list(passages), len(passages)) for _ in range(times)]


def searched(
    form: Form, prompts: Sequence[Sequence[str]], question: str, tokenizer: Any, kinds: TokenKinds
) -> Reused:
    """Search the prompts of one form as the server does, without a model."""
    seen: Counter[str] = Counter()
    shares = []
    for passages in prompts:
        pieces: list[PromptPiece] = []
        for message in form(passages, question):
            head = tokenizer(f"<|im_start|>{message['role']}\n", add_special_tokens=False)[
                "input_ids"
            ]
            text = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
            pieces.append(PromptPiece(tuple(head), is_searched=False))
            pieces.append(
                PromptPiece(
                    tuple(text), message["role"] != "assistant" and len(message["content"]) >= 200
                )
            )
        pieces.append(PromptPiece((), is_searched=True))
        segments = segments_of(pieces, kinds, lambda _ids: [], private=False) or []
        found = [segment for segment in segments if segment.found]
        total = sum(
            len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in passages
        )
        reused = sum(len(segment.token_ids) for segment in found if seen[segment.segment_id] >= 2)
        shares.append(min(1.0, reused / total))
        seen.update({segment.segment_id for segment in found})
    return Reused(tuple(shares))


def served(
    form: Form, prompts: Sequence[Sequence[str]], question: str, url: str, tokenizer: Any
) -> Reused:
    """Send the prompts of one form to a server, leaving it time to capture after each.

    Counted are the tokens of passages that were taken from chunk-caches or from the server's prefix cache, with those
    that were then recomputed to repair them.
    """
    shares = []
    with httpx.Client(base_url=url, timeout=600) as client:
        for number, passages in enumerate(prompts):
            body = {
                "messages": form(passages, f"{question} ({number})"),
                "max_tokens": 4,
                "temperature": 0,
            }
            answer = client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            found = client.get(f"/v1/cachecraft/requests/{answer.json()['id']}")
            # A prompt in which nothing was found has no statistics.
            chunks = found.json()["stats"]["chunks"] if found.status_code == 200 else []
            reused = sum(
                chunk["tokens"] - chunk["computed"]
                for chunk in chunks
                if chunk["outcome"] in ("exact", "reused")
            )
            total = sum(
                len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in passages
            )
            shares.append(min(1.0, reused / total))
            _wait_for_captures(client)
    return Reused(tuple(shares))


def _wait_for_captures(client: httpx.Client) -> None:
    """Wait until the server has captured nothing for a while; at most two minutes."""
    deadline = time.monotonic() + 120.0
    last_change = time.monotonic()
    before = ""
    while time.monotonic() < min(deadline, last_change + _SETTLE_S):
        time.sleep(0.5)
        lines = client.get("/metrics").text.splitlines()
        captures = "\n".join(line for line in lines if line.startswith("cachecraft_captures_total"))
        if captures != before:
            before = captures
            last_change = time.monotonic()


def handbook_passages(count: int) -> list[str]:
    """Return passages of the sample handbook, each of two sections."""
    documents = handbook_dataset(passages=1, limit=1, seed=0).documents
    return [chunk.text for document in documents for chunk in document][:count]


def main(
    model: options.Model = "demo",
    passages: Annotated[
        int | None,
        typer.Option(min=2, help="Passages of each prompt.", show_default="8; 5 with --server"),
    ] = None,
    times: Annotated[int, typer.Option(min=3, help="Times that each form is sent.")] = 5,
    form: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(FORMS)}; all by default.")
    ] = None,
    server: Annotated[
        str, typer.Option(help="URL of a server; without it the search alone is measured.")
    ] = "",
    seed: int = 0,
    as_json: options.Json = False,
) -> None:
    """Measure what prompts as applications write them reuse, each time with the passages in a new order."""
    from transformers import AutoTokenizer

    from cachecraft_rag.model.demo_model import demo_model_folder

    options.quiet_libraries()
    tokenizer = AutoTokenizer.from_pretrained(
        str(demo_model_folder()) if model == "demo" else model
    )
    vocabulary = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    kinds = TokenKinds.of(vocabulary)
    passages = passages or (5 if server else 8)
    chosen = form or list(FORMS)
    check_names(chosen, FORMS, what="form")
    # A server remembers what other forms have sent, so each form has passages that no other one sends.
    wanted = passages * len(chosen) if server else passages
    texts = handbook_passages(wanted)
    if len(texts) < wanted:
        raise ConfigError(
            f"{len(chosen)} forms of {passages} passages need {wanted}, and the handbook has {len(texts)}: lower "
            "--passages, or name fewer forms with --form"
        )
    rows: dict[str, Reused] = {}
    for number, name in enumerate(chosen):
        first = number * passages if server else 0
        own = texts[first : first + passages]
        prompts = orders(own, times, seed)
        question = f"What is said about this? {name}"
        if server:
            rows[name] = served(FORMS[name], prompts, question, server, tokenizer)
        else:
            rows[name] = searched(FORMS[name], prompts, question, tokenizer, kinds)
    if as_json:
        print_json({name: list(reused.shares) for name, reused in rows.items()})
        return
    table = Table(box=SIMPLE_HEAD)
    for heading in ("form", *(f"time {number}" for number in range(1, times + 1))):
        table.add_column(heading, justify="left" if heading == "form" else "right")
    for name, reused in rows.items():
        table.add_row(name, *(f"{share:.0%}" for share in reused.shares))
    out.print(table)
