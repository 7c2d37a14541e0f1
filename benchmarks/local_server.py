"""Compare the server without vLLM with the engine that it serves: time to the first token, and eight clients.

    python -m benchmarks.local_server --pairs 20 --out local_server.json

Both ask the same engine in turn, in alternating order, over the same four chunks, in another order and with another
question in each pair; the server is asked over a socket, as a stream. Then eight requests decode at once, both ways.
The output is JSON:

    {"tokens_prompt": …, "ttft_s": {"engine": …, "server": …, "ratio": …, "ratio_range": […, …]},
     "eight": {"engine": tokens per second, "server": tokens per second, "one_by_one": tokens per second}}
"""

import argparse
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import permutations
from math import factorial
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import uvicorn

from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.server.local.app import LocalServer
from cachecraft_rag.server.local.embeddings import Embeddings
from cachecraft_rag.server.local.start import SWITCH_S
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import Chunk

HANDBOOK = Path(__file__).parents[1] / "examples" / "handbook"
CLIENTS = 8
# chunks, question, tokens of the answer → seconds to the first token, and to the end
Ask = Callable[[list[Chunk], str, int], tuple[float, float]]


@contextmanager
def serving(engine: Engine, config: EngineConfig) -> Iterator[str]:
    """Serve an engine in a thread; gives the URL of chat completions."""
    server = LocalServer(
        engine,
        EndpointSettings(model="demo", plain_prompts="reuse"),
        system=config.system,
        embeddings=Embeddings("none"),
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = uvicorn.Server(uvicorn.Config(server.app(), log_config=None, lifespan="on"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1/chat/completions"
        running.should_exit = True
        thread.join()


def direct(engine: Engine) -> Ask:
    """Ask the engine."""

    def ask(chunks: list[Chunk], question: str, tokens: int) -> tuple[float, float]:
        began = time.perf_counter()
        sampling = SamplingParams(max_new_tokens=tokens)
        answer = engine.stream(question, chunks, sampling=sampling)
        next(answer)
        first = time.perf_counter()
        for _ in answer:
            pass
        return first - began, time.perf_counter() - began

    return ask


def over_http(client: httpx.Client, url: str) -> Ask:
    """Ask the server."""

    def ask(chunks: list[Chunk], question: str, tokens: int) -> tuple[float, float]:
        body = {
            "messages": [{"role": "user", "content": question}],
            "documents": [{"text": chunk.text} for chunk in chunks],
            "max_tokens": tokens,
            "stream": True,
        }
        began = time.perf_counter()
        first = 0.0
        with client.stream("POST", url, json=body) as reply:
            for line in reply.iter_lines():
                has_text = line.startswith("data: {") and json.loads(line[6:])["choices"][0][
                    "delta"
                ].get("content")
                if has_text and not first:
                    first = time.perf_counter()
        return first - began, time.perf_counter() - began

    return ask


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Let threads take turns as often as in a process with this switch interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    yield
    sys.setswitchinterval(before)


def paired(
    ways: dict[str, Ask], chunks: list[Chunk], pairs: int, tokens: int
) -> dict[str, list[float]]:
    """Times to the first token of each way, asked in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for pair in range(pairs):
        names = list(ways) if pair % 2 else list(ways)[::-1]
        order = list(list(permutations(chunks))[pair % factorial(len(chunks))])
        for name in names:
            with switching(SWITCH_S if name == "server" else sys.getswitchinterval()):
                ttft, _ = ways[name](order, f"What does it say about number {pair}?", tokens)
            times[name].append(ttft)
    return times


def together(ask: Ask, chunks: list[Chunk], clients: int, tokens: int) -> float:
    """Tokens per second of so many requests at once."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(lambda n: ask(chunks, f"Tell me about part {n}.", tokens), range(CLIENTS)))
    return CLIENTS * tokens / (time.perf_counter() - began)


def measured(pairs: int, tokens: int, letters: int) -> dict[str, object]:
    """Return what the module's docstring shows."""
    names = ("coffee-otter-c6", "kettle-wren-k2", "returns", "warranty")
    chunks = [Chunk((HANDBOOK / f"{name}.md").read_text("utf-8")[:letters]) for name in names]
    config = EngineConfig(new_variants="off")
    with (
        TemporaryDirectory() as store,
        Engine.from_pretrained("demo", store=store, config=config) as engine,
        serving(engine, config) as url,
        httpx.Client(timeout=600) as client,
    ):
        ways = {"engine": direct(engine), "server": over_http(client, url)}
        for ask in (*ways.values(), *ways.values()):  # captures, and first uses of everything
            ask(chunks, "What is it about?", 2)
            engine.settle()
        times = paired(ways, chunks, pairs, tokens=2)
        ratios = [
            server / alone for alone, server in zip(times["engine"], times["server"], strict=True)
        ]
        answer = engine.stream("How?", chunks, sampling=SamplingParams(max_new_tokens=1))
        list(answer)
        return {
            "tokens_prompt": answer.stats.tokens_prompt,
            "ttft_s": {name: statistics.median(values) for name, values in times.items()}
            | {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]},
            "eight": {name: together(ask, chunks, CLIENTS, tokens) for name, ask in ways.items()}
            | {"one_by_one": together(ways["engine"], chunks, 1, tokens)},
        }


def main() -> None:
    """Print the result, or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32, help="length of the eight answers")
    parser.add_argument("--letters", type=int, default=1200, help="of each of four chunks")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(measured(arguments.pairs, arguments.tokens, arguments.letters), indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
