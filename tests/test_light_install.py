"""What works without an extra, and what each part says that needs one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.vllm.test_client import answers_of, serving, tokens

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Top-level modules of what the extra `retrieval` brings.
RETRIEVAL = (
    "sentence_transformers",
    "faiss",
    "semantic_text_splitter",
    "pypdf",
    "lxml",
    "html_to_markdown",
    "webencodings",
)
BLOCK = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def run_without(names: tuple[str, ...], code: str, *arguments: str, cwd: Path) -> str:
    """Run code in an interpreter that finds none of these modules; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCK.format(names=names) + code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_engine_imports_no_reader_no_index_and_no_command_line(tmp_path: Path) -> None:
    code = """
from cachecraft_rag import Engine
heavy = set(sys.argv[1].split()) & {name.partition(".")[0] for name in sys.modules}
print(sorted(heavy))
"""
    unneeded = (*RETRIEVAL, "markdown_it", "typer", "rich", "httpx", "transformers")
    assert run_without((), code, " ".join(unneeded), cwd=tmp_path) == "[]"


def test_an_engine_answers_without_the_extra_retrieval(tmp_path: Path) -> None:
    code = """
from cachecraft_rag import Chunk, Engine, SamplingParams
with Engine.from_pretrained("demo", store="chunk-caches", device="cpu") as engine:
    few = SamplingParams(max_new_tokens=2)
    for _ in range(2):
        answer = engine.stream("How often?", [Chunk("Descale the kettle every 8 weeks. " * 20)], sampling=few)
        assert list(answer)
    print(answer.stats.tokens_reused > 0)
"""
    assert run_without((*RETRIEVAL, "markdown_it"), code, cwd=tmp_path) == "True"


def test_each_part_that_needs_the_extra_retrieval_names_it(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<h1>Kettle</h1><p>Descale it.</p>")
    (tmp_path / "scan.pdf").write_bytes(b"%PDF-1.4")
    (tmp_path / "book.epub").write_bytes(b"PK")
    code = """
from pathlib import Path
from cachecraft_rag import CacheCraftError, Document
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.vector_index import VectorIndex
from cachecraft_rag.retrievers.reading.chunking import split
from cachecraft_rag.retrievers.reading.documents import SourceFile
from cachecraft_rag.retrievers.reading.limited_reader import LimitedReader

def read(name):
    return LimitedReader().read(SourceFile(Path(name), name), Path(name).read_bytes())

calls = {
    "embedder": Embedder,
    "index": lambda: VectorIndex(8),
    "chunks": lambda: split(Document("a.md", "# Kettle"), count_tokens=len, limit=100),
    "html": lambda: read("page.html"),
    "pdf": lambda: read("scan.pdf"),
    "epub": lambda: read("book.epub"),
}
for name, call in calls.items():
    try:
        call()
    except CacheCraftError as error:
        assert isinstance(error, ImportError), name
        print(name, "cachecraft-rag[retrieval]" in str(error), "type: pip install" in str(error))
"""
    assert run_without((*RETRIEVAL, "markdown_it"), code, cwd=tmp_path).splitlines() == [
        f"{name} True True" for name in ("embedder", "index", "chunks", "html", "pdf", "epub")
    ]


def test_the_command_line_names_the_extra_and_exits(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Kettle\n\nDescale it.")
    code = """
from cachecraft_rag.cli import main
sys.argv = ["cachecraft", "index", "notes.md", "--store", "s"]
try:
    main()
except SystemExit as ended:
    print(ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCK.format(names=RETRIEVAL) + code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "pip install 'cachecraft-rag[retrieval]'" in done.stderr
    assert done.stdout.strip() != "0"


def test_a_server_without_vllm_names_its_extra(tmp_path: Path) -> None:
    code = """
from cachecraft_rag.cli import main
sys.argv = ["cachecraft", "serve", "demo", "--backend", "local", "--store", "s"]
try:
    main()
except SystemExit as ended:
    print(ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCK.format(names=("starlette", "uvicorn")) + code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "type: pip install 'cachecraft-rag[serve]'" in " ".join(done.stderr.split())
    assert done.stdout.strip() == "2"


def test_extras_that_retrieve_bring_retrieval_along_and_all_brings_what_applications_use() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    required = {
        requirement.split("[")[0].split(">")[0].split("=")[0]
        for requirement in PYPROJECT["project"]["dependencies"]
    }
    assert required.isdisjoint({"sentence-transformers", "faiss-cpu", "pypdf", "lxml"})
    needing = ("demo", "docx", "eval", "mcp")
    assert all("cachecraft-rag[retrieval]" in extras[name] for name in needing)
    everything = extras["all"][0]
    for name in ("langchain", "llama-index", "demo", "triton", "structured"):
        assert name in everything


@pytest.fixture
def answering(byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> dict[str, object]:
    """A server's replies, with an answer of two letters."""
    replies = answers_of(byte_tokenizer, tmp_path / "tokenizer")
    replies["/v1/chat/completions"] = (200, tokens(32, 73) + tokens(256) + "data: [DONE]\n\n")
    return replies


OWN_EMBEDDER = """
import numpy as np

class Letters:
    name, fingerprint, dim, limit = "letters", "letters@1", 26, 1000

    def count_tokens(self, text):
        return len(text)

    def encode_document(self, texts, *, progress=None):
        counts = np.array([[text.lower().count(chr(97 + at)) for at in range(26)] for text in texts], np.float32)
        return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1)

    encode_query = encode_document

    def question_parts(self, question):
        return [question]
"""
CLIENTS = {
    "CacheCraft.connect": OWN_EMBEDDER
    + """
from cachecraft_rag import CacheCraft, Document
with CacheCraft.connect(url, store="index", embeddings=Letters()) as rag:
    rag.add_documents([Document("kettle.md", "Descale the kettle every 8 weeks.")])
    answer = rag.ask("How often?")
    assert [source.metadata["source"] for source in answer.sources] == ["kettle.md"]
    print(answer.text)
""",
    "an engine": """
with HTTPEngine.connect(url) as engine:
    print("".join(engine.stream("How?", [Chunk("Descale it.")])))
""",
    "LangChain": """
from langchain_core.documents import Document
from cachecraft_rag.langchain import CacheCraftGenerator, ChatCacheCraft
with HTTPEngine.connect(url) as engine:
    chain = CacheCraftGenerator(llm=ChatCacheCraft(engine=engine))
    print(chain.invoke({"context": [Document("Descale it.")], "input": "How?"}))
""",
    "Haystack": """
from haystack import Document
from cachecraft_rag.haystack import CacheCraftGenerator
with HTTPEngine.connect(url) as engine:
    print(CacheCraftGenerator(engine=engine).run("How?", [Document(content="Descale it.")])["replies"])
""",
    "LlamaIndex": """
from llama_index.core.schema import NodeWithScore, TextNode
from cachecraft_rag.llama_index import CacheCraftSynthesizer
with HTTPEngine.connect(url) as engine:
    nodes = [NodeWithScore(node=TextNode(text="Descale it."), score=1.0)]
    print(CacheCraftSynthesizer(engine).synthesize("How?", nodes=nodes))
""",
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_answers_without_torch(
    client: str, answering: dict[str, object], tmp_path: Path
) -> None:
    code = """
from cachecraft_rag import Chunk
from cachecraft_rag.client.http import HTTPEngine
url = sys.argv[1]
"""
    with serving(answering) as url:  # type: ignore[arg-type]
        printed = run_without(("torch",), code + CLIENTS[client], url, cwd=tmp_path)
    assert printed


def test_without_torch_a_command_that_needs_it_says_what_to_install(tmp_path: Path) -> None:
    code = """
from cachecraft_rag.cli import main
sys.argv = ["cachecraft", "doctor", "--store", "s"]
try:
    main()
except SystemExit as ended:
    print(ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCK.format(names=("torch",)) + code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "2", done.stderr
    assert "type: pip install cachecraft-rag" in " ".join(done.stderr.split())


def test_without_torch_an_engine_says_what_to_install(tmp_path: Path) -> None:
    code = """
import cachecraft_rag
from cachecraft_rag import CacheCraft
for call in (lambda: cachecraft_rag.Engine, lambda: CacheCraft.from_pretrained("demo")):
    try:
        call()
    except cachecraft_rag.CacheCraftError as error:
        assert isinstance(error, ImportError)
        print(str(error).endswith("type: pip install cachecraft-rag"))
"""
    assert run_without(("torch",), code, cwd=tmp_path) == "True\nTrue"
