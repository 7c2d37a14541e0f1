"""Three documents in four orders after a client's own system message: a server with chunk-caches against vLLM alone.

Both run on this machine, started here, and are asked in turn. Each round has new documents; with each setting its four
orders are asked one after another, the first one when nothing is stored. vLLM alone gets the same texts in the user's
message. A request is one token long, so its time is that to the first token. Between requests both servers become idle.

    python -m benchmarks own-instruction demo --pairs 10 --out own-instruction.json

For each setting and order the table has the ratio of the times in pairs (median, with its 95 % bootstrap interval over
pairs), the share of the documents' tokens that was reused, and the prompt tokens that vLLM's own prefix cache had.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import typer

from benchmarks.premises import bootstrap
from benchmarks.server import answers

ORDERS = ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0))
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "default": {},
    "recompute_ratio=0.15": {"recompute_ratio": 0.15},
}
INSTRUCTION = " ".join(
    f"The workshop answers in plain words, by rule {rule} of the house." for rule in range(12)
)
THINGS = ("kettle", "toaster", "mill")
_IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
_QUIET_S = 1.0  # without a request, until a server counts as idle


@dataclass(frozen=True)
class Asked:
    """One pair of requests with the same texts.

    seconds, plain_seconds  times with chunk-caches, and of vLLM alone
    reused         share of the documents' tokens that were reused unchanged; 0 for those that vLLM computed
    cached         prompt tokens in the own prefix cache of the vLLM with chunk-caches
    plain_cached   the same, of vLLM alone
    note           the server's note; "" without one
    """

    seconds: float
    plain_seconds: float
    reused: float
    cached: float
    plain_cached: float
    note: str

    @property
    def ratio(self) -> float:
        """Time with chunk-caches as a share of vLLM's."""
        return self.seconds / self.plain_seconds


class Server:
    """A server that runs, with or without chunk-caches."""

    def __init__(self, url: str) -> None:
        self.url = url
        key = os.environ.get("CACHECRAFT_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url, timeout=None, headers=self.headers)

    @cached_property
    def model(self) -> str:
        """Name under which it serves the model."""
        return str(self.get("/v1/models")["data"][0]["id"])

    @cached_property
    def is_vllm(self) -> bool:
        """True for vLLM, with and without this package."""
        return "vllm:" in self._client.get("/metrics").text

    def ask(self, body: Mapping[str, object]) -> tuple[float, float, dict[str, Any]]:
        """Ask while it is idle; return seconds, prompt tokens in vLLM's own prefix cache, and the answer."""
        hits = self.metric("vllm:prefix_cache_hits_total")
        asked = {"model": self.model, "max_tokens": 1, "temperature": 0, **body}
        began = time.perf_counter()
        answer = self._client.post("/v1/chat/completions", json=asked)
        seconds = time.perf_counter() - began
        answer.raise_for_status()
        self.become_idle()
        return seconds, self.metric("vllm:prefix_cache_hits_total") - hits, answer.json()

    def get(self, path: str) -> Any:
        """Return the JSON of a path."""
        return self._client.get(path).raise_for_status().json()

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Return the JSON of a reply."""
        return self._client.post(path, json=body).raise_for_status().json()

    def close(self) -> None:
        """Close the connections to it; it runs on."""
        self._client.close()

    def become_idle(self) -> None:
        """Wait until nothing runs and no capture has been stored for a second."""
        since = time.monotonic()
        before = -1.0
        while time.monotonic() < since + _QUIET_S:
            captures = self.metric("cachecraft_captures_total")
            if any(map(self.metric, _IDLE)) or captures != before:
                before = captures
                since = time.monotonic()
            time.sleep(0.1)

    def metric(self, name: str) -> float:
        """Return the sum of a metric; 0 without it."""
        text = self._client.get("/metrics").text
        return sum(map(float, re.findall(rf"^{re.escape(name)}.* (\S+)$", text, re.MULTILINE)))


@contextmanager
def running(command: Sequence[str], log: Path, **environment: str) -> Iterator[Server]:
    """Start a server and stop it at the end; `command` lacks the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # GiB; otherwise vLLM would take nearly all of a CPU's memory
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ | environment
    url = f"http://127.0.0.1:{port}"
    full_command = [str(port) if part == "PORT" else part for part in command]
    with (
        log.open("w") as output,
        subprocess.Popen(full_command, stdout=output, stderr=output, env=variables) as process,
    ):
        try:
            while not answers(f"{url}/health"):
                if process.poll() is not None:
                    raise SystemExit(f"a server ended before it was ready: see {log}")
                time.sleep(1)
            with closing(Server(url)) as server:
                yield server
        finally:
            process.terminate()


def documents(series: str, sentences: int) -> list[str]:
    """Return three documents that no other series has."""
    return [
        " ".join(
            f"The {thing} number {place} of {series} was made in {1800 + 7 * place} and weighs {place + 2} kilos."
            for place in range(sentences)
        )
        for thing in THINGS
    ]


def pair(
    ours: Server,
    plain: Server,
    texts: Sequence[str],
    question: str,
    settings: Mapping[str, object],
    *,
    plain_first: bool,
) -> Asked:
    """Ask both servers about the texts, best first."""
    system = {"role": "system", "content": INSTRUCTION}
    own: dict[str, object] = {
        "messages": [system, {"role": "user", "content": question}],
        "documents": [{"text": text} for text in texts],
    }
    if settings:
        own["cachecraft"] = settings
    context = "\n\n".join([*reversed(texts), question])  # the best one stands last, as in ours
    same = {"messages": [system, {"role": "user", "content": context}]}
    if plain_first:
        plain_seconds, plain_cached, _ = plain.ask(same)
        seconds, cached, answer = ours.ask(own)
    else:
        seconds, cached, answer = ours.ask(own)
        plain_seconds, plain_cached, _ = plain.ask(same)
    details = answer["kv_transfer_params"]["cachecraft"]
    chunks = details["stats"]["chunks"]
    computed = sum(chunk["computed"] + chunk["recomputed"] for chunk in chunks)
    reused = 1 - computed / sum(chunk["tokens"] for chunk in chunks)
    return Asked(seconds, plain_seconds, reused, cached, plain_cached, details["note"] or "")


def measured(
    ours: Server, plain: Server, pairs: int, sentences: int
) -> dict[str, list[list[Asked]]]:
    """Return setting → order → its pairs, without those of a first round that warms up.

    Ctrl-C and SIGTERM end it: what was measured until then is returned.
    """
    found: dict[str, list[list[Asked]]] = {name: [[] for _ in ORDERS] for name in SETTINGS}
    with suppress(KeyboardInterrupt, SystemExit):
        _measure(ours, plain, pairs, sentences, found)
    return found


def _measure(
    ours: Server, plain: Server, pairs: int, sentences: int, found: dict[str, list[list[Asked]]]
) -> None:
    for number in range(-1, pairs):
        for name, settings in SETTINGS.items():
            texts = documents(f"series {number + 1}{len(settings)}", sentences)
            for place, order in enumerate(ORDERS):
                asked = pair(
                    ours,
                    plain,
                    [texts[index] for index in order],
                    f"When was it made? {place}",
                    settings if place else {},  # such settings capture nothing
                    plain_first=(number + place) % 2 == 0,
                )
                if number >= 0:
                    found[name][place].append(asked)
                print(
                    f"round {number}, {name}, order {place}: {asked.seconds:.2f} s, vLLM alone "
                    f"{asked.plain_seconds:.2f} s, {asked.reused:.0%} reused",
                    file=sys.stderr,
                )


def summary(pairs: Sequence[Asked]) -> dict[str, object]:
    """Return the figures of one order."""
    ratios = [asked.ratio for asked in pairs]

    def middle(chosen: Sequence[int]) -> float:
        return median(ratios[index] for index in chosen)

    interval = bootstrap(middle, len(ratios))
    return {
        "ratio": {"median": interval["mean"], "low": interval["low"], "high": interval["high"]},
        "ms": 1e3 * median(asked.seconds for asked in pairs),
        "plain_ms": 1e3 * median(asked.plain_seconds for asked in pairs),
        "reused_share": median(asked.reused for asked in pairs),
        "prefix_cached": median(asked.cached for asked in pairs),
        "plain_prefix_cached": median(asked.plain_cached for asked in pairs),
        "notes": sorted({asked.note for asked in pairs if asked.note}),
        "pairs": [asdict(asked) for asked in pairs],
    }


def main(
    model: Annotated[
        str, typer.Argument(help="Model to serve: a name, a folder, or demo.")
    ] = "demo",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs for each setting and order.")] = 10,
    sentences: Annotated[
        int, typer.Option(min=1, help="Sentences of each document, of some 20 tokens.")
    ] = 16,
    dtype: str = "float32",
    length: Annotated[int, typer.Option(help="Longest prompt, in tokens.")] = 4096,
    out: Annotated[Path | None, typer.Option(help="File for the figures, as JSON.")] = None,
) -> None:
    """Ask a server with chunk-caches and vLLM alone about three documents in four orders, in turn."""
    from cachecraft_rag.model.demo_model import demo_model_folder

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    folder = str(demo_model_folder()) if model == "demo" else model
    shared = ["--max-model-len", str(length), "--dtype", dtype, "--port", "PORT"]
    with ExitStack() as opened:
        work = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        logs = Path(tempfile.mkdtemp(prefix="own-instruction-"))
        print(f"logs: {logs}", file=sys.stderr)
        program = str(Path(sys.executable).with_name("cachecraft"))
        serve = [program, "serve", folder, "--store", str(work)]
        ours = opened.enter_context(
            running([*serve, *shared, "--", "--enforce-eager"], logs / "ours.log")
        )
        # the command `vllm` of its CPU build does not find its own package
        module = "vllm.entrypoints.openai.api_server"
        stock = [sys.executable, "-m", module, "--model", folder, *shared, "--enforce-eager"]
        plain = opened.enter_context(running(stock, logs / "plain.log", VLLM_PLUGINS=""))
        found = measured(ours, plain, pairs, sentences)
    figures = {
        name: [summary(asked) for asked in by_order if asked] for name, by_order in found.items()
    }
    for name, orders in figures.items():
        for place, figure in enumerate(orders):
            shown = {key: value for key, value in figure.items() if key != "pairs"}
            print(f"{name}, order {place}: {json.dumps(shown)}")
    if out is not None:
        about = {"model": model, "sentences": sentences, "dtype": dtype}
        out.write_text(json.dumps(about | {"settings": figures}, indent=2))
