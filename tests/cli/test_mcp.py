"""`cachecraft mcp`: the official client against the server, in this process and as a process over stdio and HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from mcp import Client, StdioServerParameters

from cachecraft_rag import CacheCraft, ReuseConfig, SamplingParams
from cachecraft_rag.cli.mcp.allowed_folders import AllowedFolders
from cachecraft_rag.cli.mcp.server import Address, server_of
from cachecraft_rag.cli.mcp.tools import DocumentTools
from cachecraft_rag.errors import CacheCraftError, ConfigError, DocumentError, ModelNotFoundError
from cachecraft_rag.planning.config import ReuseMethod
from cachecraft_rag.retrievers.indexer import IndexReport
from cachecraft_rag.types.progress import Progress

COMMAND = str(Path(sys.executable).with_name("cachecraft"))
QUESTION = "How many days do I have to return an appliance?"
Command = Callable[..., Any]  # of the fixture `cachecraft`

pytestmark = pytest.mark.usefixtures("as_loud_as_before")


# -- the folders that may be indexed ----------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An allowed folder beside a private one, with links that lead out of it and back."""
    allowed = tmp_path / "allowed"
    (allowed / "deep").mkdir(parents=True)
    (allowed / "deep" / "kettle.md").write_text("Descale the kettle.")
    (allowed / ".keys.json").write_text("{}")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "diary.md").write_text("A diary.")
    (tmp_path / "allowed-too").mkdir()
    (allowed / "out").symlink_to("../private")
    (allowed / "diary.md").symlink_to("../private/diary.md")
    (allowed / "loop").symlink_to("loop")
    (allowed / "near").symlink_to("deep")
    (tmp_path / "private" / "back").symlink_to("../allowed/deep")
    return tmp_path


OUTSIDE = [
    "..",
    "../private",
    "deep/../../private/diary.md",
    "out",
    "out/diary.md",
    "diary.md",
    "loop",
    "/",
    "/etc/passwd",
    "~root",
    "{tree}/private",
    "{tree}/allowed-too",
    "{tree}/allowed/../private",
    "{tree}/nothing",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_outside_the_allowed_folders_is_refused(tree: Path, path: str) -> None:
    allowed = AllowedFolders([tree / "allowed"])
    with pytest.raises(
        DocumentError, match=r"is outside the folders that may be indexed .*--allow"
    ):
        allowed.path_of(path.format(tree=tree))


def test_a_path_inside_is_resolved_below_the_name_that_the_operator_gave(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "current").symlink_to("allowed")
    allowed = AllowedFolders([tree / "allowed-too", tree / "current"])
    kettle = tree / "current" / "deep" / "kettle.md"
    for path in (
        "deep/kettle.md",
        "near/kettle.md",
        "near/../deep/kettle.md",
        str(kettle),
        "{tree}/private/back/kettle.md",
    ):
        assert allowed.path_of(path.format(tree=tree)) == kettle
    assert allowed.path_of(str(tree / "current")) == tree / "current"
    assert allowed.path_of(".") == tree / "allowed-too"
    monkeypatch.setenv("HOME", str(tree))
    assert allowed.path_of("~/allowed/deep") == tree / "current" / "deep"


def test_empty_missing_and_hidden_paths_are_refused(tree: Path) -> None:
    allowed = AllowedFolders([tree / "allowed"])
    for path, said in {
        "": "empty",
        " ": "empty",
        "a\0b": "NUL",
        ".keys.json": "hidden",
        "kettle.md": "no such",
        "\ud800": "outside",  # no path has half a surrogate pair
    }.items():
        with pytest.raises(DocumentError, match=said):
            allowed.path_of(path)
    with pytest.raises(ConfigError, match=r"--allow .*nowhere: there is no such folder"):
        AllowedFolders([tree / "nowhere"])


@pytest.mark.parametrize("replaced", ["deep", "deep/kettle.md"])
@pytest.mark.parametrize("has_dir_fd", [True, False])
def test_a_link_made_after_the_path_was_compared_is_not_followed(
    tree: Path, monkeypatch: pytest.MonkeyPatch, has_dir_fd: bool, replaced: str
) -> None:
    if not has_dir_fd:
        monkeypatch.setattr(os, "supports_dir_fd", set())
    (tree / "private" / "kettle.md").write_text("A diary, too.")
    allowed = AllowedFolders([tree / "allowed"])
    realpath = os.path.realpath

    def realpath_then_swap(path: str | Path) -> str:
        real = realpath(path)
        target = tree / "allowed" / replaced
        if not target.is_symlink():
            target.rename(tree / "aside")
            target.symlink_to(tree / "private" / replaced.removeprefix("deep").lstrip("/"))
        return real

    monkeypatch.setattr(os.path, "realpath", realpath_then_swap)
    with pytest.raises(DocumentError, match="was replaced while it was opened"):
        allowed.open(str(tree / "allowed" / "deep" / "kettle.md"), os.O_RDONLY)


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tree: Path) -> None:
    os.mkfifo(tree / "allowed" / "pipe.md")
    allowed = AllowedFolders([tree / "allowed"])
    with pytest.raises(DocumentError, match="was replaced while it was opened"):
        allowed.open(str(tree / "allowed" / "pipe.md"), os.O_RDONLY)


# -- the tools, with the client in this process -----------------------------------------------------------------------


@pytest.fixture
def rag(home: Path, tmp_path: Path) -> Iterator[CacheCraft]:
    """A tiny model over an empty store."""
    reuse = ReuseConfig(method=ReuseMethod(loading="layerwise"))
    with CacheCraft.from_pretrained(
        str(home / "model"), store=tmp_path / "store", reuse=reuse
    ) as opened:
        yield opened


@asynccontextmanager
async def client_of(rag: CacheCraft | CacheCraftError, *folders: Path) -> AsyncIterator[Client]:
    """A client of a server over this `CacheCraft`, or over the error that kept it from loading."""
    loaded: Future[CacheCraft] = Future()
    if isinstance(rag, CacheCraft):
        loaded.set_result(rag)
    else:
        loaded.set_exception(rag)
    allowed = AllowedFolders(folders)
    asking: Any = {"top_k": 2, "sampling": SamplingParams(max_new_tokens=4), "where": None}
    tools = DocumentTools(loaded, allowed=allowed, asking=asking)
    async with Client(server_of(tools, folders=str(allowed))) as client:
        yield client


async def failure(client: Client, tool: str, **arguments: Any) -> str:
    """The text of a call that must fail."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)  # type: ignore[union-attr]


async def success(client: Client, tool: str, **arguments: Any) -> Any:
    """The structured result of a call that must succeed."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert json.loads(result.content[0].text) == result.structured_content  # type: ignore[union-attr]
    return result.structured_content


async def test_index_search_and_ask_twice(rag: CacheCraft, home: Path) -> None:
    async with client_of(rag, home / "docs") as client:
        steps: list[tuple[float, float | None]] = []

        async def note(done: float, total: float | None, message: str | None) -> None:
            assert message is not None
            assert message.startswith("reading docs/")
            steps.append((done, total))

        result = await client.call_tool(
            "index", {"path": str(home / "docs")}, progress_callback=note
        )
        assert result.structured_content is not None
        assert result.structured_content["added"] == ["docs/returns.md", "docs/warranty.md"]
        assert steps == [(1, 2), (2, 2)]
        again = await success(client, "index", path="returns.md")
        assert (again["unchanged"], again["added"], again["passages_embedded"]) == (1, [], 0)

        (passage,) = (await success(client, "search", question=QUESTION, k=1))["passages"]
        assert passage["text"] == (home / "docs" / "returns.md").read_text()
        assert passage["source"] == "docs/returns.md"
        assert 0.5 < passage["score"] <= 1
        assert len((await success(client, "search", question=QUESTION))["passages"]) == 2

        first = await success(client, "ask", question=QUESTION)
        rag.engine.settle()
        second = await success(client, "ask", question=QUESTION)
        assert [source["outcome"] for source in first["sources"]] == ["computed", "computed"]
        assert [source["outcome"] for source in second["sources"]] == ["exact", "exact"]
        assert second["answer"] == first["answer"]
        assert first["reuse"]["tokens_reused"] == 0 < second["reuse"]["tokens_reused"]
        parts = [second["reuse"][f"tokens_{part}"] for part in ("reused", "recomputed", "computed")]
        assert sum(parts) == second["reuse"]["tokens_prompt"]


async def test_bad_arguments_get_errors_that_say_what_to_do(rag: CacheCraft, home: Path) -> None:
    async with client_of(rag, home / "docs") as client:
        assert "holds no documents yet; add some" in await failure(client, "ask", question=QUESTION)
        assert "holds no documents yet; add some" in await failure(
            client, "search", question=QUESTION
        )
        await success(client, "index", path=".")
        for tool in ("ask", "search"):
            assert "the question is empty; write one" in await failure(client, tool, question=" ")
            assert "question\n  Field required" in await failure(client, tool)
        assert "greater than or equal to 1" in await failure(
            client, "search", question=QUESTION, k=0
        )
        assert "less than or equal to 50" in await failure(
            client, "search", question=QUESTION, k=51
        )
        assert "is outside the folders" in await failure(client, "index", path=str(home / "model"))
        assert "no such file or folder below" in await failure(client, "index", path="typo.md")
        assert "Shorten the question" in await failure(client, "ask", question="How often? " * 2000)


async def test_a_model_that_cannot_be_loaded_is_reported_by_each_tool(tmp_path: Path) -> None:
    async with client_of(ModelNotFoundError("no/such-model: check its name"), tmp_path) as client:
        assert len((await client.list_tools()).tools) == 3
        assert "no/such-model: check its name" in await failure(client, "ask", question=QUESTION)
        assert "no/such-model: check its name" in await failure(client, "index", path=".")


async def test_without_allowed_folders_there_is_no_tool_to_index(
    rag: CacheCraft, home: Path
) -> None:
    async with client_of(rag) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["search", "ask"]
        assert client.instructions is not None
        assert "index" not in client.instructions
    async with client_of(rag, home / "docs") as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"search", "ask", "index"}
        assert client.instructions is not None
        assert str(home / "docs") in client.instructions
        described = [tool.input_schema["properties"] for tool in tools.values()]
        assert all(
            argument["description"] for arguments in described for argument in arguments.values()
        )


async def test_indexing_ends_when_the_client_cancels_it(rag: CacheCraft, tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for number in range(30):
        (many / f"{number}.md").write_text(f"The mill number {number} leaks.")
    async with client_of(rag, many) as client:
        with anyio.CancelScope() as scope:

            async def cancel(done: float, total: float | None, message: str | None) -> None:
                scope.cancel()

            await client.call_tool("index", {"path": "."}, progress_callback=cancel)
        assert scope.cancelled_caught
        assert rag.index.documents() == []
        assert len((await success(client, "index", path="."))["added"]) == 30


@pytest.mark.parametrize("has_dir_fd", [True, False])
async def test_a_file_that_becomes_a_link_out_of_the_folder_is_not_read(
    rag: CacheCraft, tree: Path, monkeypatch: pytest.MonkeyPatch, has_dir_fd: bool
) -> None:
    if not has_dir_fd:
        monkeypatch.setattr(os, "supports_dir_fd", set())
    notes = tree / "notes"
    (notes / "last").mkdir(parents=True)
    for name in ("a.md", "b.md", "last/diary.md"):
        (notes / name).write_text(f"A note named {name}.")
    add_documents = rag.add_documents

    def swap(step: Progress) -> None:
        if step.done != 1:
            return
        (notes / "b.md").unlink()
        (notes / "b.md").symlink_to(tree / "private" / "diary.md")
        (notes / "last").rename(tree / "last")
        (notes / "last").symlink_to(tree / "private")

    def swapping(path: Path, *, progress: object, **options: Any) -> IndexReport:
        report = add_documents(path, progress=swap, **options)
        assert {problem.kind for problem in report.problems} == {"outside"}
        return report

    monkeypatch.setattr(rag, "add_documents", swapping)
    async with client_of(rag, notes) as client:
        result = await success(client, "index", path=".")
        assert result["added"] == ["notes/a.md"]
        replaced, below_replaced = result["problems"]
        assert "b.md: now leads out of the folders that may be indexed" in replaced
        assert "diary.md: now leads out of the folders that may be indexed" in below_replaced
        (passage,) = (await success(client, "search", question="A diary."))["passages"]
        assert passage["text"] == "A note named a.md."


def test_a_folder_that_becomes_a_link_while_it_is_listed_shows_no_names_from_outside(
    rag: CacheCraft, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = AllowedFolders([tree / "allowed"])
    listdir = os.listdir
    deep = tree / "allowed" / "deep"

    def swap_then_listdir(place: Path | int) -> Any:
        is_deep = isinstance(place, int) and os.path.samestat(os.fstat(place), os.stat(deep))
        if is_deep or place == deep:
            deep.rename(tree / "aside")
            deep.symlink_to(tree / "private")
        return listdir(place)

    monkeypatch.setattr(os, "listdir", swap_then_listdir)
    monkeypatch.setattr(os, "supports_fd", {*os.supports_fd, swap_then_listdir})
    report = rag.add_documents(tree / "allowed", opener=allowed.open)
    assert deep.is_symlink()
    names = {*report.added, *(problem.doc_id for problem in report.problems)}
    assert "allowed/deep/kettle.md" in names
    assert "allowed/deep/diary.md" not in names


async def test_links_within_an_allowed_folder_are_indexed(rag: CacheCraft, tree: Path) -> None:
    (tree / "allowed" / "copy.md").symlink_to("deep/kettle.md")
    (tree / "current").symlink_to("allowed")
    async with client_of(rag, tree / "current") as client:
        added = (await success(client, "index", path="."))["added"]
        assert added == ["current/copy.md", "current/deep/kettle.md"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_said_before_a_model_is_loaded(
    home: Path, tmp_path: Path, cachecraft: Command
) -> None:
    refused = {
        ("--store", "typo"): "typo holds no documents yet",
        ("--allow", "nowhere"): "there is no such folder",
        ("--http", "here:there"): "write HOST:PORT",
        ("--http", "http://127.0.0.1:80/mcp"): "write HOST:PORT",
        ("--http", "203.0.113.1:80"): "cannot listen there",
        ("--http", "ü..b:80"): "write HOST:PORT",
        ("--top-k", "0"): "top_k",
        ("--where", "source"): "write NAME=VALUE",
    }
    for arguments, said in refused.items():
        done = cachecraft("mcp", *arguments, "--model", "no/such-model", cwd=home, code=2)
        assert said in done.stderr, arguments
        assert done.stdout == ""


def test_without_the_extra_the_command_names_it(
    home: Path, cachecraft: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcp"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("server", "tools"):
        monkeypatch.delitem(sys.modules, f"cachecraft_rag.cli.mcp.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "mcp", None)  # importing it now fails
    assert "pip install 'cachecraft-rag[mcp]'" in cachecraft("mcp", cwd=home, code=2).stderr
    assert "--allow" in cachecraft("mcp", "--help", cwd=home).stdout


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("8080", "127.0.0.1", 8080),
        (":0", "127.0.0.1", 0),
        ("0.0.0.0:80", "0.0.0.0", 80),
        ("[::1]:80", "::1", 80),
    ],
)
def test_an_address_without_a_host_is_of_this_computer(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert address.is_local == (host in ("127.0.0.1", "::1"))


@pytest.mark.parametrize("text", ["8080?x", "8080#f", "8080/path", "me@host:80", "port", "8080?"])
def test_an_address_with_more_than_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        Address.parse(text)


@contextmanager
def running(*arguments: str | Path, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """The command as a process with pipes; it must have ended when the block ends."""
    process = subprocess.Popen(
        [COMMAND, *map(str, arguments)],
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell makes processes in its background ignore Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            yield process
            process.wait(120)
        finally:
            process.kill()


class Wire:
    """A client that writes and reads the lines of the protocol itself."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._count = 0
        self._send(
            "initialize",
            protocolVersion="2025-06-18",
            capabilities={},
            clientInfo={"name": "t", "version": "1"},
        )
        self.answer()
        self._write({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def call(self, tool: str, **arguments: Any) -> Any:
        """Call a tool and return its structured result."""
        self._send("tools/call", name=tool, arguments=arguments)
        return self.answer()["structuredContent"]

    def answer(self) -> Any:
        """Read lines up to the answer to the last request; each must be of the protocol."""
        assert self._process.stdout is not None
        while True:
            message = json.loads(self._process.stdout.readline())
            assert message["jsonrpc"] == "2.0"
            if message.get("id") == self._count:
                return message["result"]

    def _send(self, method: str, **parameters: Any) -> None:
        self._count += 1
        self._write({"jsonrpc": "2.0", "id": self._count, "method": method, "params": parameters})

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


def test_stdout_carries_the_protocol_only_and_the_end_of_stdin_ends_the_server(
    home: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    arguments = ("--verbose", "mcp", "--allow", "docs", "--store", store, "--max-tokens", "4")
    with running(*arguments, cwd=home) as process:
        wire = Wire(process)
        assert wire.call("index", path="docs/../.")["added"] == [
            "docs/returns.md",
            "docs/warranty.md",
        ]
        assert wire.call("ask", question=QUESTION)["reuse"]["tokens_prompt"] > 0
        rest, log = process.communicate(timeout=120)  # closes stdin
    assert rest == ""
    assert "2 added, 0 updated, 0 removed" in log
    assert process.returncode == 0, log


def test_ctrl_c_ends_the_server(home: Path) -> None:
    with running("mcp", cwd=home) as process:
        wire = Wire(process)
        assert wire.call("search", question=QUESTION)["passages"]
        process.send_signal(signal.SIGINT)
        rest, log = process.communicate(timeout=120)
    assert (process.returncode, rest) == (130, ""), log
    assert "interrupted; finished work is kept" in log


@pytest.mark.slow
async def test_over_http_only_this_computer_is_served(home: Path) -> None:
    with running("mcp", "--http", "127.0.0.1:0", cwd=home) as process:
        assert process.stderr is not None
        url = re.fullmatch(
            r"listening on (http://127\.0\.0\.1:\d+/mcp)\n", process.stderr.readline()
        )
        assert url is not None
        async with Client(url[1]) as client:
            assert (await success(client, "search", question=QUESTION, k=1))["passages"][0][
                "source"
            ] == "docs/returns.md"
        for name, value in {"Host": "evil.example", "Origin": "http://evil.example"}.items():
            asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            headers = {name: value, "Accept": "application/json, text/event-stream"}
            assert httpx.post(url[1], json=asked, headers=headers).status_code in (403, 421)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130


def configured() -> list[str]:
    """The arguments in the configuration for clients in docs/guides/agents.md."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "agents.md").read_text(encoding="utf-8")
    block = re.search(r"^```\n(\{.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert block is not None
    (server,) = json.loads(block[1])["mcpServers"].values()
    assert Path(server["command"]).name == "cachecraft"
    return list(server["args"])


@pytest.mark.slow
async def test_a_client_of_the_documented_configuration_reuses_what_was_computed_before(
    demo_model: Path, handbook: Path, tmp_path: Path
) -> None:
    paths = {"/path/to/chunk-caches": str(tmp_path / "store"), "/path/to/notes": str(handbook)}
    arguments = [paths.get(argument, argument) for argument in configured()]
    assert paths.keys() <= set(configured())
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    async with Client(
        StdioServerParameters(command=COMMAND, args=arguments, env=environment)
    ) as client:
        assert len((await client.list_tools()).tools) == 3
        assert len((await success(client, "index", path=str(handbook)))["added"]) == 21
        (nearest, *_) = (await success(client, "search", question=QUESTION))["passages"]
        assert nearest["source"].endswith("returns.md")
        first = await success(client, "ask", question=QUESTION)
        second = await success(client, "ask", question=QUESTION)
        third = await success(client, "ask", question="Who pays for the postage of a return?")
        assert "45 days" in first["answer"]
        assert second["answer"] == first["answer"]
        assert first["reuse"]["tokens_reused"] == 0
        # The page says 864 of 883, and 551 of 975.
        assert second["reuse"]["tokens_reused"] > 0.95 * second["reuse"]["tokens_prompt"]
        assert third["reuse"]["tokens_reused"] > 0.5 * third["reuse"]["tokens_prompt"]
        assert "is outside the folders" in await failure(client, "index", path=str(handbook.parent))
