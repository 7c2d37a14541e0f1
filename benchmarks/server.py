"""Measure a vLLM server with chunk-caches against itself with prefix caching only: the same chunks, moved about.

    python -m benchmarks.server --concurrency 1,8 --requests 16 --out load.json

starts the demo model and asks it; `--server http://127.0.0.1:8000` asks one that runs. Each request has other chunks
in another order, so that vLLM's prefix cache has the instruction of it and no more. With

    python -m benchmarks.server --together 2,4,8 --chunks 4 --rounds 3

so many requests with the same new documents come at once, both ways in turn. The output is JSON:

    {"loads": [{"concurrency": 1, "prefix_cache": {"ttft_s": {"p50": …, "p99": …}, "requests_per_s": …},
                "reuse@0.15": {…}, "ratio": {"ttft_p50": …, "ttft_p99": …, "throughput": …}}]}
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

HANDBOOK = Path(__file__).parents[1] / "examples" / "handbook"
PORT, PLAIN = "8766", "prefix_cache"
Asked = tuple[str, list[str]]  # question and chunks


def pool(words: int) -> list[str]:
    """Chunks of so many words: the handbook's pages, cut."""
    text = [path.read_text(encoding="utf-8").split() for path in sorted(HANDBOOK.glob("*.md"))]
    return [" ".join(page[first : first + words]) for page in text for first in range(0, len(page) - words + 1, words)]


def body(asked: Asked, ratio: float | None, tokens: int) -> dict[str, Any]:
    """A streamed chat completion; without a ratio the chunks stand in the user's message, as in any RAG. A negative one
    leaves reuse and captures to the server's settings.
    """
    question, chunks = asked
    made: dict[str, Any] = {"stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if ratio is None:
        return made | {"messages": [{"role": "user", "content": "\n\n".join([*chunks, question])}]}
    documents = [{"text": chunk} for chunk in reversed(chunks)]  # best first; the best one stands last
    made |= {"messages": [{"role": "user", "content": question}], "documents": documents}
    return made | ({} if ratio < 0 else {"cachecraft": {"recompute_ratio": ratio, "capture": False}})


def answer(client: httpx.Client, asked: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first token and to the end."""
    began, first = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=asked) as lines:
        if lines.status_code != 200:
            raise SystemExit(lines.read().decode())
        for line in lines.iter_lines():
            if not first and line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - began
    return first, time.perf_counter() - began


def quantile(values: list[float], share: float) -> float:
    """The smallest value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def load(client: httpx.Client, bodies: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Ask all of them, so many at a time."""
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as threads:
        times = list(threads.map(lambda one: answer(client, one), bodies))
    seconds = time.perf_counter() - began
    first, last = ([one[place] for one in times] for place in (0, 1))
    return {
        "requests": len(bodies),
        "ttft_s": {"p50": quantile(first, 0.5), "p99": quantile(first, 0.99)},
        "total_s": {"p50": quantile(last, 0.5), "p99": quantile(last, 0.99)},
        "requests_per_s": len(bodies) / seconds,
    }


def ratios(reuse: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Ratios of reuse to prefix caching."""
    ttft = {f"ttft_{name}": reuse["ttft_s"][name] / plain["ttft_s"][name] for name in ("p50", "p99")}
    return ttft | {"throughput": reuse["requests_per_s"] / plain["requests_per_s"]}


def measured(client: httpx.Client, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One entry for each concurrency; both ways are asked equally many requests."""
    dice, chunks = random.Random(chosen.seed), pool(chosen.words)
    dice.shuffle(chunks)
    chunks = chunks[: chosen.pool]
    for place, chunk in enumerate(chunks, start=1):  # captured as their own documents
        client.post("/v1/cachecraft/prime", json={"documents": [{"text": chunk}]}).raise_for_status()
        print(f"{place} of {len(chunks)} chunks captured", file=sys.stderr)
    for concurrency in chosen.concurrency:
        entry: dict[str, Any] = {"concurrency": concurrency}
        name = f"reuse@{chosen.ratio}"
        for what, ratio in ((PLAIN, None), (name, chosen.ratio)):
            asked = [(f"What does point {n} of the handbook say?", dice.sample(chunks, chosen.chunks))
                     for n in range(1 + max(concurrency, chosen.requests))]  # fmt: skip
            bodies = [body(one, ratio, chosen.tokens) for one in asked]
            load(client, bodies[:1], 1)  # the first one finds nothing warm
            entry[what] = load(client, bodies[1:], concurrency)
            print(f"concurrency {concurrency}, {what}: {entry[what]}", file=sys.stderr)
        entry["ratio"] = ratios(entry[name], entry[PLAIN])
        yield entry


def together(client: httpx.Client, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One entry for each number of requests that come at once with the same new documents."""
    dice, chunks = random.Random(), pool(chosen.words)
    for count in chosen.together:
        seconds: dict[str, list[float]] = {PLAIN: [], "documents": []}
        for place in range(1 + chosen.rounds):  # the first one finds nothing warm
            for what, ratio in ((PLAIN, None), ("documents", -1.0)):
                new = [f"Note {dice.randrange(10**9)}. {one}" for one in dice.sample(chunks, chosen.chunks)]
                questions = [f"What does point {n} of the notes say?" for n in range(count)]
                asked = [body((question, new), ratio, chosen.tokens) for question in questions]
                began = time.perf_counter()
                load(client, asked, count)
                seconds[what] += [time.perf_counter() - began] if place else []
                time.sleep(chosen.pause)  # captures are stored behind the answers
            print(f"{count} at once: {seconds}", file=sys.stderr)
        medians = {what: quantile(some, 0.5) for what, some in seconds.items()}
        yield {"at_once": count, "seconds": seconds, "ratio": medians["documents"] / medians[PLAIN]}


def answers(url: str) -> bool:
    """True if a server is ready."""
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """The address of a server; None starts one of the demo model, with a store that is removed in the end."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).with_name("cachecraft"), "serve", "demo", "--store", folder, "--port", PORT]
        memory = {"VLLM_CPU_KVCACHE_SPACE": "2"} | os.environ  # GiB; by itself it would take nearly all of a CPU's
        with subprocess.Popen([*command, "--", "--enforce-eager"], stdout=sys.stderr, env=memory) as process:
            try:
                while not answers(f"http://127.0.0.1:{PORT}/health"):
                    if process.poll() is not None:
                        raise SystemExit("the server ended before it was ready; its log is above")
                    time.sleep(1)
                yield f"http://127.0.0.1:{PORT}"
            finally:
                process.terminate()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="address of a server of `cachecraft serve`; without it one is started")
    parser.add_argument("--concurrency", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8])
    parser.add_argument("--requests", type=int, default=16, help="measured ones, for each concurrency and way")
    parser.add_argument("--chunks", type=int, default=8, help="of a prompt")
    parser.add_argument("--words", type=int, default=210, help="of a chunk; 8 of 210 are some 2,300 tokens")
    parser.add_argument("--pool", type=int, default=24, help="chunks that prompts are drawn from")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--ratio", type=float, default=0.15, help="of the chunks' tokens that are recomputed")
    parser.add_argument("--together", type=lambda text: [int(one) for one in text.split(",")], help="see above")
    parser.add_argument("--rounds", type=int, default=3, help="with --together")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes; without it: standard output")
    chosen = parser.parse_args()
    with server(chosen.server) as url, httpx.Client(base_url=url, timeout=None) as client:
        facts = client.get("/v1/cachecraft").json()
        about = {
            "model": facts["model"],
            "settings": {name: value for name, value in vars(chosen).items() if name != "out"},
        }
        loads = measured(client, chosen) if chosen.together is None else together(client, chosen)
        text = json.dumps(about | {"loads": list(loads)}, indent=2)
    if chosen.out is None:
        print(text)
    else:
        chosen.out.write_text(text)


if __name__ == "__main__":
    main()
