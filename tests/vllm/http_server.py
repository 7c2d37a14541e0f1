"""A server of `cachecraft serve` in separate processes, for tests over HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_S = 900.0  # two busy cores take a minute and more


def running(group: int) -> list[str]:
    """Names of the processes of a group; without one that has ended and was not waited for."""
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:  # it has just ended
            continue
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state != "Z":
            names.append(name)
    return names


class ServerProcess:
    """`cachecraft serve`; everything it writes goes to `log`. `settings` are variables of its environment."""

    def __init__(
        self,
        model: Path | str,
        store: Path,
        log: Path,
        *options: str,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.store, self._log = f"http://127.0.0.1:{port}", store, log
        command = self.command(model, port, options)
        command += ["--enforce-eager", "--max-num-seqs", "8", "--block-size", "32", "--seed", "0"]
        env = {
            name: value
            for name, value in os.environ.items()
            if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
        }
        # with "idle", what a request finds depends on the moment
        env["CACHECRAFT_NEW_VARIANTS"] = "off"
        env |= settings or {}
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                cwd=log.parent,
            )
        self._wait()

    def command(self, model: Path | str, port: int, options: tuple[str, ...]) -> list[str]:
        """The command, up to the arguments of vLLM that all servers get."""
        command = [str(Path(sys.executable).with_name("cachecraft")), "serve", str(model)]
        command += ["--store", str(self.store), "--port", str(port), *options]
        return command if "--" in options else [*command, "--"]

    @property
    def pid(self) -> int:
        """Id of the process that serves HTTP."""
        return self._process.pid

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:  # it does not listen yet
                time.sleep(0.5)
        self.kill()
        raise AssertionError(self._log.read_text()[-4000:])

    def chat(
        self, documents: Any = None, question: str = "How is it descaled?", **body: Any
    ) -> httpx.Response:
        """A chat completion, not streamed; twelve greedy tokens."""
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 12,
        }
        asked |= {"temperature": 0, "return_token_ids": True}
        if documents is not None:
            asked["documents"] = documents
        headers = body.pop("headers", None)
        return httpx.post(
            f"{self.url}/v1/chat/completions", json=asked | body, headers=headers, timeout=600
        )

    def metric(self, name: str) -> float:
        """The sum of one of vLLM's own metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]
        assert values, name
        return sum(values)

    def counts(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Our own metrics by name and values of labels, from a scrape."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("cachecraft_")
        }

    def settles(self) -> None:
        """Wait until no request runs or waits, and no block is in use."""
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting{",
            "vllm:kv_cache_usage_perc",
        )
        deadline = time.monotonic() + START_S
        while any(self.metric(name) for name in names):
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def alive(self) -> bool:
        """True while the server runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """`kill -9` for all of its processes."""
        if self.alive():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def kill_front(self) -> None:
        """`kill -9` for the process that serves HTTP; wait until those that it started have ended, too."""
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + 300
        while left := running(self._process.pid):
            if time.monotonic() > deadline:
                os.killpg(self._process.pid, signal.SIGKILL)
                raise AssertionError(f"{left} have outlived the server")
            time.sleep(0.1)

    def ends_when_asked(self) -> bool:
        """Ask it to end; returns whether it does, without being killed."""
        self._process.terminate()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def stop(self) -> None:
        """Ask it to end, and wait."""
        if self.alive():
            self._process.terminate()
            try:
                self._process.wait(120)
            except subprocess.TimeoutExpired:
                self.kill()
