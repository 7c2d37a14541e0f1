"""Measure a vLLM server with chunk-caches against itself with prefix caching only: the same chunks, moved about.

    python -m benchmarks.server --concurrency 1,8 --requests 16 --out load.json

starts the demo model and asks it; `--server http://127.0.0.1:8000` asks one that runs. Each request has other chunks
in another order, so that vLLM's prefix cache has the instruction of it and no more. With `--plain-prompts` both ways
send the same text with the package `openai`, to a server with `--reuse-plain-prompts` that has seen each passage twice;
prompts that it never saw are timed, too. With

    python -m benchmarks.server --together 2,4,8 --chunks 4 --rounds 3

so many requests with the same new documents come at once, both ways in turn. The output is JSON:

    {"loads": [{"concurrency": 1, "prefix_cache": {"ttft_s": {"p50": …, "p99": …}, "requests_per_s": …},
                "reuse@0.15": {…}, "ratio": {"ttft_p50": …, "ttft_p99": …, "throughput": …}}],
     "first_time": {"pairs": …, "ttft_ratio": …}}
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

HANDBOOK = Path(__file__).parents[1] / "examples" / "handbook"
PORT, PLAIN = "8766", "prefix_cache"
QUIET_S = 20.0  # without a capture, until all are taken for done
Asked = tuple[str, list[str]]  # question and chunks
# a request's body → seconds to the first token and to the end
Ask = Callable[[dict[str, Any]], tuple[float, float]]


def pool(words: int) -> list[str]:
    """Chunks of so many words: the handbook's pages, cut."""
    text = [path.read_text(encoding="utf-8").split() for path in sorted(HANDBOOK.glob("*.md"))]
    return [
        " ".join(page[first : first + words])
        for page in text
        for first in range(0, len(page) - words + 1, words)
    ]


def body(asked: Asked, ratio: float | None, tokens: int, *, plain: bool = False) -> dict[str, Any]:
    """A streamed chat completion; without a ratio the chunks stand in the user's message, as in any RAG. A negative one
    leaves reuse and captures to the server's settings.

    Args:
        plain: they stand there with a ratio, too.
    """
    question, chunks = asked
    made: dict[str, Any] = {
        "stream": True,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if plain or ratio is None:
        made["messages"] = [{"role": "user", "content": "\n\n".join([*chunks, question])}]
        reuse = {"plain_prompts": "off"} if ratio is None else {"recompute_ratio": ratio}
        return made | ({"cachecraft": reuse} if plain else {})
    # best first; the best one stands last
    documents = [{"text": chunk} for chunk in reversed(chunks)]
    made |= {"messages": [{"role": "user", "content": question}], "documents": documents}
    return made | (
        {} if ratio < 0 else {"cachecraft": {"recompute_ratio": ratio, "capture": False}}
    )


def answer(client: httpx.Client, asked: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first token and to the end."""
    began, first = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=asked) as lines:
        if lines.status_code != 200:
            raise SystemExit(lines.read().decode())
        for line in lines.iter_lines():
            if (
                not first
                and line.startswith("data: {")
                and json.loads(line[6:])["choices"][0]["delta"].get("content")
            ):
                first = time.perf_counter() - began
    return first, time.perf_counter() - began


def stock(url: str) -> Ask:
    """Asks with the package `openai`, as most applications do."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=None)
    model = client.models.list().data[0].id

    def ask(asked: dict[str, Any]) -> tuple[float, float]:
        own = {name: asked[name] for name in ("ignore_eos", "cachecraft")}
        given = {name: value for name, value in asked.items() if name not in own}
        began, first = time.perf_counter(), 0.0
        for piece in client.chat.completions.create(model=model, extra_body=own, **given):
            if not first and piece.choices[0].delta.content:
                first = time.perf_counter() - began
        return first, time.perf_counter() - began

    return ask


def quantile(values: list[float], share: float) -> float:
    """The smallest value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def load(ask: Ask, bodies: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Ask all of them, so many at a time."""
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as threads:
        times = list(threads.map(ask, bodies))
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
    ttft = {
        f"ttft_{name}": reuse["ttft_s"][name] / plain["ttft_s"][name] for name in ("p50", "p99")
    }
    return ttft | {"throughput": reuse["requests_per_s"] / plain["requests_per_s"]}


def prime(client: httpx.Client, chunks: list[str]) -> None:
    """Have the chunks captured as their own documents."""
    for place, chunk in enumerate(chunks, start=1):
        client.post(
            "/v1/cachecraft/prime", json={"documents": [{"text": chunk}]}
        ).raise_for_status()
        print(f"{place} of {len(chunks)} chunks captured", file=sys.stderr)


def show_twice(
    client: httpx.Client, ask: Ask, chunks: list[str], chosen: argparse.Namespace
) -> None:
    """Ask about all chunks twice, in other prompts, and wait until they are captured."""
    for turn in range(2):
        rest = random.Random(turn).sample(chunks, len(chunks))
        while rest:
            asked = (
                "What is it about?",
                [rest.pop() for _ in range(min(chosen.chunks, len(rest)))],
            )
            ask(body(asked, chosen.ratio, 1, plain=True))
    known, since = -1.0, time.monotonic()
    while time.monotonic() < since + QUIET_S:
        counts = re.findall(
            r'cachecraft_captures_total{outcome="stored".*} (\S+)', client.get("/metrics").text
        )
        if (captures := sum(map(float, counts))) != known:
            known, since = captures, time.monotonic()
            print(f"{known:.0f} captures", file=sys.stderr)
        time.sleep(1.0)


def first_time(ask: Ask, chunks: list[str], chosen: argparse.Namespace) -> float:
    """TTFT of prompts that were never seen, as a multiple of that without the search: the median of pairs.

    Both of a pair have the same words in other orders.
    """
    dice, ratios = random.Random(chosen.seed), []
    for pair in range(chosen.first_time):
        own: dict[bool, float] = {}
        words = " ".join(dice.sample(chunks, chosen.chunks)).split()
        for searched in (False, True) if pair % 2 else (True, False):
            text = " ".join(dice.sample(words, len(words)))
            own[searched], _ = ask(
                body(("What?", [text]), chosen.ratio if searched else None, 1, plain=True)
            )
        ratios.append(own[True] / own[False])
        print(f"pair {pair + 1}: {ratios[-1]:.3f}", file=sys.stderr)
    return median(ratios)


def measured(ask: Ask, chunks: list[str], chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One entry for each concurrency; both ways are asked equally many requests."""
    dice = random.Random(chosen.seed)
    for concurrency in chosen.concurrency:
        entry: dict[str, Any] = {"concurrency": concurrency}
        name = f"reuse@{chosen.ratio}"
        for what, ratio in ((PLAIN, None), (name, chosen.ratio)):
            asked = [
                (f"What does point {n} of the handbook say?", dice.sample(chunks, chosen.chunks))
                for n in range(1 + max(concurrency, chosen.requests))
            ]
            bodies = [body(one, ratio, chosen.tokens, plain=chosen.plain_prompts) for one in asked]
            load(ask, bodies[:1], 1)  # the first one finds nothing warm
            entry[what] = load(ask, bodies[1:], concurrency)
            print(f"concurrency {concurrency}, {what}: {entry[what]}", file=sys.stderr)
        entry["ratio"] = ratios(entry[name], entry[PLAIN])
        yield entry


def together(ask: Ask, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One entry for each number of requests that come at once with the same new documents."""
    dice, chunks = random.Random(), pool(chosen.words)
    for count in chosen.together:
        seconds: dict[str, list[float]] = {PLAIN: [], "documents": []}
        for place in range(1 + chosen.rounds):  # the first one finds nothing warm
            for what, ratio in ((PLAIN, None), ("documents", -1.0)):
                new = [
                    f"Note {dice.randrange(10**9)}. {one}"
                    for one in dice.sample(chunks, chosen.chunks)
                ]
                questions = [f"What does point {n} of the notes say?" for n in range(count)]
                asked = [body((question, new), ratio, chosen.tokens) for question in questions]
                began = time.perf_counter()
                load(ask, asked, count)
                seconds[what] += [time.perf_counter() - began] if place else []
                time.sleep(chosen.pause)  # captures are stored after the answers
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
def server(url: str | None, options: list[str]) -> Iterator[str]:
    """The address of a server; None starts one of the demo model, with a store that is removed in the end.

    Args:
        options: of `cachecraft serve`.
    """
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).with_name("cachecraft"),
            "serve",
            "demo",
            "--store",
            folder,
            "--port",
            PORT,
            *options,
        ]
        # GiB; otherwise it would take nearly all of a CPU's
        memory = {"VLLM_CPU_KVCACHE_SPACE": "2"} | os.environ
        with subprocess.Popen(
            [*command, "--", "--enforce-eager"], stdout=sys.stderr, env=memory
        ) as process:
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--server", help="address of a server of `cachecraft serve`; without it one is started"
    )
    parser.add_argument(
        "--concurrency", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8]
    )
    parser.add_argument(
        "--requests", type=int, default=16, help="measured ones, for each concurrency and way"
    )
    parser.add_argument("--chunks", type=int, default=8, help="of a prompt")
    parser.add_argument(
        "--words", type=int, default=210, help="of a chunk; 8 of 210 are some 2,300 tokens"
    )
    parser.add_argument("--pool", type=int, default=24, help="chunks that prompts are drawn from")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument(
        "--ratio", type=float, default=0.15, help="of the chunks' tokens that are recomputed"
    )
    parser.add_argument(
        "--plain-prompts", action="store_true", help="send no documents, as a stock client"
    )
    parser.add_argument(
        "--first-time",
        type=int,
        default=20,
        help="pairs of prompts never seen; with --plain-prompts",
    )
    parser.add_argument(
        "--together", type=lambda text: [int(one) for one in text.split(",")], help="see above"
    )
    parser.add_argument(
        "--nearest-share", type=float, help="of the server that is started; its default without it"
    )
    parser.add_argument("--rounds", type=int, default=3, help="with --together")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes; without it: standard output")
    chosen = parser.parse_args()
    if chosen.server is not None and chosen.nearest_share is not None:
        parser.error("--nearest-share is for a server that is started here; start yours with it")
    options = ["--reuse-plain-prompts"] if chosen.plain_prompts else []
    if chosen.nearest_share is not None:
        options += ["--nearest-share", str(chosen.nearest_share)]
    chunks = pool(chosen.words)
    random.Random(chosen.seed).shuffle(chunks)
    chunks = chunks[: chosen.pool]
    with (
        server(chosen.server, options) as url,
        httpx.Client(base_url=url, timeout=None) as client,
    ):
        ask = stock(url) if chosen.plain_prompts else partial(answer, client)
        facts = client.get("/v1/cachecraft").json()
        about = {
            "model": facts["model"],
            "settings": {name: value for name, value in vars(chosen).items() if name != "out"},
        }
        if chosen.together is not None:
            loads = together(ask, chosen)
        else:
            if chosen.plain_prompts and chosen.first_time:
                about["first_time"] = {
                    "pairs": chosen.first_time,
                    "ttft_ratio": first_time(ask, chunks, chosen),
                }
            if chosen.plain_prompts:
                show_twice(client, ask, chunks, chosen)
            else:
                prime(client, chunks)
            loads = measured(ask, chunks, chosen)
        text = json.dumps(about | {"loads": list(loads)}, indent=2)
    if chosen.out is None:
        print(text)
    else:
        chosen.out.write_text(text)


if __name__ == "__main__":
    main()
