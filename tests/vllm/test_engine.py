"""The engine that runs its model in vLLM's own process, with the same class as the one that runs it here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import Chunk, Document
from cachecraft_rag.vllm.engine import VLLMEngine
from tests.vllm.conftest import TEXTS

SHORT = SamplingParams(max_new_tokens=12)
REUSE = ReuseConfig(method=ReuseMethod(alpha=0.5, probe_min_rows=0, loading="whole"))
# blocks as by default
SERVER: dict[str, Any] = {"max_model_len": 2048, "enforce_eager": True, "max_num_seqs": 4}
QUESTION = "How is the kettle descaled?"


@pytest.mark.slow
def test_the_facade_takes_either_engine(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    folder = str(model_folder("Llama"))
    document = Document("manual", "\n\n".join(text * 4 for text in TEXTS))
    made = {"reuse": REUSE, "new_variants": "off"}  # both engines are to find the same
    with CacheCraft.from_pretrained(
        folder, store=tmp_path, backend="vllm", server=SERVER, **made
    ) as rag:
        assert isinstance(rag.engine, VLLMEngine)
        assert rag.engine.store.rows() == []  # the self-check's captures
        report = rag.add_documents([document], prime=True)
        assert report.chunks_embedded >= 2
        assert {row.variant.primed for row in rag.engine.store.rows()} == {True}
        assert rag.prime() == 0  # all is stored: nothing was lost on the way back
        answer = rag.ask(QUESTION, top_k=2, sampling=SHORT)
        stats = answer.stats
        assert {chunk.outcome for chunk in stats.chunks} <= {"exact", "reused"}
        assert (
            stats.tokens_reused + stats.tokens_recomputed + stats.tokens_computed
            == stats.tokens_prompt
        )
        assert (stats.tokens_generated, stats.finish) == (12, "length")
        assert 0 < stats.ttft_s <= stats.total_s
        assert 0 < stats.recompute_share < 1
        again = rag.ask(QUESTION, top_k=2, sampling=SHORT)
        assert again.text == answer.text
        streams = [rag.stream(QUESTION, top_k=k, sampling=SHORT) for k in (1, 2, 2)]
        begun = [next(stream) for stream in streams]  # all at once
        streams[0].close()
        assert streams[0].stats.finish == "closed"
        texts = [
            first + "".join(stream) for first, stream in zip(begun[1:], streams[1:], strict=True)
        ]
        assert texts == [answer.text, answer.text]
        stored = rag.engine.store.rows()
        short = rag.ask(
            QUESTION, top_k=2, sampling=SHORT, config=replace(REUSE, min_prompt_tokens=2000)
        )
        for chunk in short.stats.chunks:
            assert (chunk.outcome, chunk.reason_code) == ("computed", "left_to_server")
            assert "reuse begins at 2000 (min_prompt_tokens)" in chunk.reason
        times = rag.engine._backend._timing().times(1024)
        assert times is not None
        assert min(times.full_s, times.reused_s) > 0
        assert rag.engine.min_prompt_tokens == 0  # measured on a GPU only
        with monkeypatch.context() as patched:
            patched.setattr("cachecraft_rag.vllm.engine._WARM_UP_S", 0.1)
            patched.setattr(type(current_platform), "is_cuda_alike", lambda _self: True)
            assert rag.engine._backend.measured_min_prompt_tokens() in (0, 1025)
        assert rag.engine.store.rows() == stored  # neither has captured anything, or it was removed
        # it may add white space
        kept = rag.ask(QUESTION, top_k=2, max_tokens=12, json_schema={"type": "boolean"})
        assert json.loads(kept.text) in (True, False)
        letter = next((one for one in answer.text[1:] if one.isprintable()), None)
        if letter is not None:
            stopped = rag.ask(
                QUESTION, top_k=2, sampling=SamplingParams(max_new_tokens=12, stop=(letter,))
            )
            assert (stopped.text, stopped.stats.finish) == (
                answer.text.partition(letter)[0],
                "stop",
            )
    with CacheCraft.from_pretrained(folder, store=tmp_path, reuse=REUSE, dtype="float32") as here:
        assert isinstance(here.engine, Engine)
        same = here.ask(QUESTION, top_k=2, sampling=SHORT)
        assert same.text == answer.text
        assert [chunk.recomputed for chunk in same.stats.chunks] == [
            chunk.recomputed for chunk in stats.chunks
        ]


@pytest.mark.slow
def test_documents_that_the_servers_context_cannot_take_are_left_out_by_rank(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    chunks = [Chunk(f"{number}. {TEXTS[0]}") for number in range(1500 // len(TEXTS[0]) + 1)]
    server = SERVER | {"max_model_len": 1024}  # the model's own is longer
    with VLLMEngine.from_pretrained(
        str(model_folder("Llama")), store=tmp_path, server=server
    ) as engine:
        answer = engine.stream(QUESTION, chunks, sampling=SHORT)
        assert "".join(answer)
        outcomes = {chunk.chunk_id: chunk.outcome for chunk in answer.stats.chunks}
        assert answer.stats.tokens_prompt + 12 <= 1024
        assert outcomes[chunks[0].chunk_id] == "computed"
        assert outcomes[chunks[-1].chunk_id] == "trimmed"


def test_what_cannot_be_set_is_said_before_anything_starts(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = str(model_folder("Llama"))
    with pytest.raises(ConfigError, match="vLLM chooses the device"):
        VLLMEngine.from_pretrained(folder, store=tmp_path, device="cpu")
    with pytest.raises(ConfigError, match="dtype cannot be set here"):
        VLLMEngine.from_pretrained(folder, store=tmp_path, server={"dtype": "half"})
    with pytest.raises(ConfigError, match="backend"):
        CacheCraft.from_pretrained(folder, store=tmp_path, backend="vlm")
    assert not list(tmp_path.rglob("*.faiss"))
