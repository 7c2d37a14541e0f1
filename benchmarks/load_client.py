"""Client of `benchmarks load`: sends requests at their times, and reads when each token arrives."""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.load_figures import Answered, Figures, figures
from benchmarks.load_requests import (
    REUSE,
    REUSE_OFF,
    VLLM_ALONE,
    Arrival,
    Mix,
    batches,
    body,
    drawn,
)
from benchmarks.own_instruction import Server
from cachecraft_rag.errors import ServerError

_STORED_S = 60.0  # longest wait for the documents that are stored before
_LONE = 3  # requests of each kind that are timed alone
_FOUND = ("exact", "reused")


@dataclass(frozen=True, slots=True)
class Servers:
    """The server that is measured, and vLLM alone, if there is one."""

    ours: Server
    alone: Server | None = None

    def of(self, side: str) -> Server:
        """Return the server of a side."""
        return self.alone if side == VLLM_ALONE and self.alone else self.ours


async def _events(client: httpx.AsyncClient, asked: Mapping[str, Any]) -> AsyncIterator[Any]:
    """Yield the events of a streamed chat completion. Raises ServerError if the server refuses it or fails."""
    async with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        if reply.status_code != 200:
            text = (await reply.aread()).decode(errors="replace")
            raise ServerError(f"the server refused a request: {text[:500]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerError(f"a request failed, see the server's log: {event['error']}")
            yield event


async def _answer(
    client: httpx.AsyncClient, asked: Mapping[str, Any], arrival: Arrival, began: float
) -> Answered:
    """Send a request at its time, and read all of its answer."""
    await asyncio.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
    tokens_s: list[float] = []
    prompt_tokens, name = 0, ""
    async for event in _events(client, asked):
        now = time.perf_counter() - began
        for choice in event["choices"]:
            tokens_s += [now] * len(choice.get("token_ids") or ())
        prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        name = event["id"]
    if not tokens_s:
        raise ServerError("an answer had no token; set --max-model-len higher, or send fewer words")
    return Answered(arrival.at_s, tuple(tokens_s), prompt_tokens, bool(arrival.documents), name)


async def _answers(
    server: Server, asked: Sequence[tuple[Arrival, Mapping[str, Any]]], done: Callable[[], None]
) -> list[Answered]:
    async with httpx.AsyncClient(
        base_url=server.url,
        headers=server.headers,
        timeout=600,
        limits=httpx.Limits(max_connections=None),
    ) as client:
        began = time.perf_counter()

        async def answer(arrival: Arrival, body_of_it: Mapping[str, Any]) -> Answered:
            answered = await _answer(client, body_of_it, arrival, began)
            done()
            return answered

        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(answer(*one)) for one in asked]
    return [task.result() for task in started]


class Load:
    """Sends requests to the servers."""

    def __init__(self, servers: Servers, mix: Mix) -> None:
        self._servers = servers
        self._mix = mix
        # hit rate → series of documents that are new to the server, also if others have measured it
        self._new: dict[float, str] = {}

    def send(
        self, side: str, arrivals: Sequence[Arrival], done: Callable[[], None] = lambda: None
    ) -> list[Answered]:
        """Send each request at its time; return all answers once the server is idle again."""
        server = self._servers.of(side)
        salt = secrets.token_hex(4)
        asked = [(arrival, self._body(server, arrival, side, salt)) for arrival in arrivals]
        try:
            answered = asyncio.run(_answers(server, asked, done))
        except* (httpx.HTTPError, ServerError) as errors:
            first = errors.exceptions[0]
            raise ServerError(f"{server.url}: {first or type(first).__name__}") from first
        server.become_idle()
        return answered

    def _body(self, server: Server, arrival: Arrival, side: str, salt: str) -> dict[str, Any]:
        own: dict[str, Any] = {"model": server.model}
        if server.is_vllm:
            own["ignore_eos"] = True
        return own | body(arrival, side, self._mix, salt=salt)

    def store(self) -> None:
        """Ask about the documents that are to be stored. Raises ServerError if the server does not store them."""
        texts = self._mix.stored()
        for number, documents in enumerate(batches(texts, self._mix.chunks)):
            self.send(REUSE, [Arrival(0.0, f"What are the notes about? ({number})", documents)])
        deadline = time.monotonic() + _STORED_S
        while missing := set(texts) - self._held(texts):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server has stored {len(texts) - len(missing)} of {len(texts)} documents: its log and "
                    "cachecraft_captures_total in /metrics say why"
                )
            time.sleep(0.5)

    def _held(self, texts: Sequence[str]) -> set[str]:
        asked = {"documents": [{"text": text} for text in texts]}
        chunks = self._servers.ours.post("/v1/cachecraft/holds", asked)["chunks"]
        return {text for text, chunk in zip(texts, chunks, strict=True) if chunk["tokens"]}

    def lone_s(self) -> float:
        """Return the mean seconds of a request that is alone, with reuse off."""
        share = self._mix.documents_share
        documents = tuple(self._mix.stored()[: self._mix.chunks])
        seconds = {}
        for kind in (documents, ()):
            times = []
            for number in range(_LONE + 1):
                arrival = Arrival(0.0, f"What is number {number} about?", kind)
                times.append(self.send(REUSE_OFF, [arrival])[0].tokens_s[-1])
            seconds[bool(kind)] = statistics.mean(times[1:])  # the first one warms up
        return share * seconds[True] + (1 - share) * seconds[False]

    def measured(
        self, side: str, count: int, qps: float, hit_rate: float, done: Callable[[], None]
    ) -> Figures:
        """Return the figures of one run."""
        new = self._new.setdefault(hit_rate, secrets.token_hex(4))
        arrivals = drawn(self._mix, count, qps, hit_rate, new=new)
        answered = self.send(side, arrivals, done)
        found, left = self._found(answered) if side == REUSE else (0.0, 0)
        return figures(answered, found_share=found, left_to_vllm=left)

    def _found(self, answered: Sequence[Answered]) -> tuple[float, int]:
        """Return the share of documents from chunk-caches, and the number of requests left to vLLM."""
        outcomes = []
        left = 0
        for answer in answered:
            if not answer.with_documents:
                continue
            report = self._servers.ours.get(f"/v1/cachecraft/requests/{answer.request_id}")
            chunks = report["stats"]["chunks"]
            outcomes += [chunk["outcome"] in _FOUND for chunk in chunks]
            left += any(chunk["reason_code"] == "left_to_server" for chunk in chunks)
        return sum(outcomes) / max(len(outcomes), 1), left
