"""One application over one database in several processes: one indexes and primes, two others answer with reuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.langchain import SyncedVectorStore

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

# Chroma's folder, unlike embedded Qdrant's, may be open in several processes.
ANSWER = """
import json, sys
from langchain_chroma import Chroma
from langchain_core.embeddings import DeterministicFakeEmbedding
from cachecraft_rag import ReuseConfig
from cachecraft_rag.langchain import CacheCraftGenerator
# cake rightly computes what a tiny model computes faster than the disk delivers
reuse = ReuseConfig().with_method(loading="layerwise")
model, store, database = sys.argv[1:]
found = Chroma(embedding_function=DeterministicFakeEmbedding(size=8), persist_directory=database)
with CacheCraftGenerator.from_pretrained(
    model, store=store, dtype="float32", reuse=reuse, max_tokens=4
) as generator:
    print("ready", flush=True)
    for question in sys.stdin:
        documents = found.similarity_search(question, k=9)
        chain = generator.with_context()
        context = chain.invoke({"input": question, "context": documents})["context"]
        print(json.dumps({one.page_content: one.metadata["cachecraft_outcome"] for one in context}), flush=True)
"""
PARTS = [f"Part {number} of the kettle is cleaned every {number + 2} weeks." for number in range(4)]
IDS = [str(number) for number in range(4)]


def ask(process: subprocess.Popen[str]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("How often?\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def test_two_processes_answer_over_what_a_third_has_indexed_and_primed(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    chroma = pytest.importorskip("langchain_chroma")
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    database = chroma.Chroma(
        embedding_function=DeterministicFakeEmbedding(size=8),
        persist_directory=str(tmp_path / "database"),
    )
    with Engine.from_pretrained(
        str(tmp_path / "model"), store=tmp_path / "store", dtype="float32"
    ) as engine:
        writing = SyncedVectorStore(database, engine)
        writing.add_documents([Document(text, metadata={"page": 1}) for text in PARTS], ids=IDS)
        engine.prime(PARTS)
        arguments = [sys.executable, "-c", ANSWER, "model", "store", "database"]
        processes = [
            subprocess.Popen(
                arguments, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                answer = ask(process)
                assert answer.keys() == set(PARTS)
                assert set(answer.values()) <= {"exact", "reused"}
            writing.delete(IDS[:1])
            for process in processes:
                assert ask(process).keys() == set(PARTS[1:])
        finally:
            for process in processes:
                process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
