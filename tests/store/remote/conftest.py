"""Real servers for tests of the remote tier, and a network that fails between them and us."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def not_there(what: str) -> None:
    """Skip, or fail where the servers are required."""
    message = f"{what}; TESTS_REQUIRE_SERVERS=1 makes this a failure"
    if os.environ.get("TESTS_REQUIRE_SERVERS") == "1":
        pytest.fail(message)
    pytest.skip(message)


class Server:
    """A server process on a loopback port."""

    def __init__(self, command: list[str], port: int, *, log: Path, cwd: Path) -> None:
        self.port = port
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=cwd)
        until = time.monotonic() + 30
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} does not start: {log.read_text()[-1000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Let it hang: connections stand, nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Proxy:
    """A TCP proxy with faults, which count bytes per connection from the moment they are set.

    delay_s         every piece from the server comes so much later
    stall_after     … bytes from the server, nothing more comes
    stall_up_after  … bytes to the server, nothing more gets there
    cut_after       … bytes from the server, both ends are closed
    """

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self.stall_after = self.stall_up_after = self.cut_after = sys.maxsize
        self._target, self._closing = port, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets.append(server)
            except OSError:  # closed, or the server is gone: then the client hears of it
                with suppress(IndexError, OSError):
                    self._sockets[-1].shutdown(socket.SHUT_RDWR)
                continue
            for pair in ((client, server, False), (server, client, True)):
                self._threads.append(threading.Thread(target=self._pump, args=pair))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, down: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                stall, cut = (
                    (self.stall_after, self.cut_after)
                    if down
                    else (self.stall_up_after, sys.maxsize)
                )
                passed = passed + len(data) if min(stall, cut) < sys.maxsize else 0
                if passed > stall:
                    self._closing.wait()
                if passed > cut:
                    break
                if down and self.delay_s:
                    self._closing.wait(self.delay_s)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for end in self._sockets:
            end.close()


@pytest.fixture
def make_redis(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts Redis servers, with settings such as `requirepass="x"`; `port` to start one again where one was."""
    started: list[Server] = []

    def make(port: int = 0, **settings: str) -> Server:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            not_there("redis-server is not installed (Debian: apt-get install redis-server)")
        assert program is not None
        port = port or free_port()
        command = [
            program,
            "--bind",
            "127.0.0.1",
            "--port",
            str(port),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        command += [word for name, value in settings.items() for word in (f"--{name}", value)]
        started.append(Server(command, port, log=tmp_path / f"redis-{port}.log", cwd=tmp_path))
        return started[-1]

    yield make
    for server in started:
        server.kill()


def start_s3(folder: Path) -> Server:
    """An S3 server in a separate process."""
    try:
        import moto.server  # noqa: F401
    except ImportError as error:
        not_there(f"moto is not installed ({error})")
    port = free_port()
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "moto.server",
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    return Server(command, port, log=folder / f"s3-{port}.log", cwd=folder)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_s3(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], str]:
    """Makes a bucket on an S3 server and points the environment at the server; returns the bucket's URL."""

    def make(server: Server, *, port: int = 0) -> str:
        endpoint = f"http://127.0.0.1:{server.port}"
        environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "a secret key",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": f"http://127.0.0.1:{port or server.port}",
            "AWS_ALLOW_HTTP": "true",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        name = f"bucket-{time.time_ns()}"
        bucket = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(bucket).close()
        return f"s3://{name}/shared"

    return make


@pytest.fixture
def make_proxy() -> Iterator[Callable[[int], Proxy]]:
    made: list[Proxy] = []

    def make(port: int) -> Proxy:
        made.append(Proxy(port))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture
def own_s3_server(tmp_path: Path) -> Iterator[Server]:
    """An S3 server that a test may kill."""
    server = start_s3(tmp_path)
    yield server
    server.kill()
