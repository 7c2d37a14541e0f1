"""Haystack's components in real pipelines: documents are primed, answers reuse them, and a pipeline is a file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.components.writers import DocumentWriter
from haystack.document_stores.in_memory import InMemoryDocumentStore

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.haystack import CacheCraftGenerator, CacheCraftPrimer
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.store import ChunkCacheStore

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

TEXTS = [f"Part {number} of the kettle is cleaned every {number + 2} weeks." for number in range(4)]
DOCUMENTS = [Document(content=text, meta={"source_id": "kettle"}) for text in TEXTS]


@pytest.fixture
def engine(tiny_decoder: Callable[..., Decoder], store: ChunkCacheStore) -> Iterator[Engine]:
    config = ReuseConfig(method=ReuseMethod(loading="layerwise"))
    with Engine(tiny_decoder("Llama"), store, config=config, new_variants="off") as opened:
        yield opened


@pytest.fixture(scope="module")
def model_folder(
    tiny_decoder: Callable[..., Decoder], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("model")
    decoder = tiny_decoder("Llama", max_position_embeddings=8192)
    decoder.model.save_pretrained(folder)
    decoder.tokenizer.save_pretrained(folder)
    return folder


def asking(documents: InMemoryDocumentStore, generator: Any) -> Pipeline:
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(documents, top_k=3))
    pipeline.add_component("generator", generator)
    pipeline.connect("retriever.documents", "generator.documents")
    return pipeline


def test_a_first_question_reuses_documents_that_a_pipeline_has_primed(engine: Engine) -> None:
    documents = InMemoryDocumentStore()
    indexing = Pipeline()
    indexing.add_component("primer", CacheCraftPrimer(engine=engine))
    indexing.add_component("writer", DocumentWriter(documents))
    indexing.connect("primer.documents", "writer.documents")
    done = indexing.run({"primer": {"documents": DOCUMENTS}}, include_outputs_from={"primer"})
    assert done["primer"]["captured"] == 6  # the instruction, and the first one twice

    generator = CacheCraftGenerator(engine=engine, generation_kwargs={"max_tokens": 4})
    question = "How often is part 2 cleaned?"
    given = {"retriever": {"query": question}, "generator": {"question": question}}
    answer = asking(documents, generator).run(given)["generator"]
    assert len(answer["replies"]) == 1
    (meta,) = answer["meta"]
    assert len(meta["chunks"]) == 3
    assert {chunk["outcome"] for chunk in meta["chunks"]} <= {"exact", "reused"}
    assert meta["tokens_generated"] <= 4


def test_a_pipeline_is_written_to_a_file_and_read_again(model_folder: Path, tmp_path: Path) -> None:
    generator = CacheCraftGenerator(
        str(model_folder),
        store=str(tmp_path / "store"),
        engine_options={"system": "Be brief."},
        generation_kwargs={"max_tokens": 4},
    )
    pipeline = Pipeline()
    pipeline.add_component("generator", generator)
    pipeline.add_component("primer", CacheCraftPrimer(str(model_folder), store="elsewhere"))
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=["cachecraft_rag.haystack.components"])
    assert again.dumps() == pipeline.dumps()
    read: Any = again.get_component("generator")
    with read:
        (reply,) = read.run("How often?", DOCUMENTS)["replies"]
        assert isinstance(reply, str)
        assert len(read.engine.prompts.system.token_ids) > 0
    read.close()


def test_a_component_loads_its_model_where_assertions_are_off(tmp_path: Path) -> None:
    program = "from cachecraft_rag.haystack import CacheCraftPrimer; CacheCraftPrimer('no/model').warm_up()"
    done = subprocess.run(
        [sys.executable, "-O", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert "ModelNotFoundError" in done.stderr


def test_a_component_over_an_open_engine_is_not_written(engine: Engine) -> None:
    for made in (CacheCraftGenerator(engine=engine), CacheCraftPrimer(engine=engine)):
        with pytest.raises(ConfigError, match="model and store"):
            made.to_dict()


def test_wrong_settings_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="max_token"):
        CacheCraftGenerator(generation_kwargs={"max_token": 4})
    with pytest.raises(ConfigError, match="engine"):
        CacheCraftPrimer(engine="demo")  # type: ignore[arg-type]


def test_a_document_without_text_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="with a text"):
        CacheCraftPrimer(engine=engine).run([Document(meta={"page": 3})])
