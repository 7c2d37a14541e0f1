"""`cachecraft quality` prints what the audits of a store say."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachecraft_rag.cli.options import counted
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.serving.audits.audit import Audit, AuditText
from cachecraft_rag.serving.audits.audit_log import AuditLog
from cachecraft_rag.serving.config import Audits
from cachecraft_rag.store.config import CACHE_FOLDER

if TYPE_CHECKING:
    from tests.cli.conftest import Command

QUESTIONS = ("How long may I return it?", "How long is the warranty?", "What lasts 3 years?")


@pytest.fixture(scope="module")
def audited(home: Path) -> Path:
    """The home folder, after three audited answers of which some differ from full prefill's."""
    reuse = ReuseConfig(
        recompute_ratio=0.0,
        nearest_share=0.0,
        capture=False,
        method=ReuseMethod(drift=0.0, loading="layerwise"),
    )
    with (
        chdir(home),
        CacheCraft.from_settings(audit=Audits(1.0, keep_text=True), reuse=reuse) as rag,
    ):
        for question in QUESTIONS:
            rag.ask(question, max_tokens=12)
        assert rag.engine.settle(120)  # type: ignore[attr-defined]
    return home


def test_a_store_without_audits_says_how_to_get_them(home: Path, cachecraft: Command) -> None:
    done = cachecraft("quality", "--namespace", "nobody", cwd=home)
    assert "No audited answers in " in done.stdout
    assert "--audit idle" in done.stdout
    assert "--store names another folder" in done.stdout
    nothing = cachecraft("quality", "--namespace", "nobody", "--json", cwd=home).result
    assert (nothing["answers"], nothing["overall"], nothing["worst"]) == (0, None, [])


def test_a_folder_without_chunk_caches_is_an_error(
    home: Path, tmp_path: Path, cachecraft: Command
) -> None:
    done = cachecraft("quality", "--store", tmp_path / "empty", cwd=home, code=2)
    assert "name the folder with --store" in done.stderr
    assert not (tmp_path / "empty").exists()


def test_the_page_and_the_json_show_the_same_numbers(audited: Path, cachecraft: Command) -> None:
    result = cachecraft("quality", "--json", cwd=audited).result
    assert result["answers"] == result["overall"]["answers"]
    assert result["answers"] + result["exact"] == len(QUESTIONS)
    assert {group["name"] for group in result["by_origin"]} <= {"primed", "mixed"}
    assert result["computed_tokens"] > 0

    page = cachecraft("quality", cwd=audited).stdout
    assert counted(result["answers"], "answer") + " compared" in page
    assert f"{result['overall']['same']['mean']:.1%}" in page
    assert f"{result['overall']['agreement']['mean']:.1%}" in page
    assert f"{result['computed_tokens']:,} tokens" in page
    for answer in result["worst"]:
        assert answer["request_id"][:8] in page
        assert not answer["is_same"]
    rows = [line.split() for line in page.splitlines()]
    for answer in result["worst"]:
        row = next(row for row in rows if row and row[0] == answer["request_id"][:8])
        assert row[3:5] == [str(answer["tokens"]), str(answer["first_difference"])]


def test_another_tenant_is_not_taken_for_an_empty_store(
    tmp_path: Path, cachecraft: Command
) -> None:
    log = AuditLog(tmp_path / "store" / CACHE_FOLDER, kept=10)
    log.add("mine", "model", Audit("a" * 32, 1e9, 5, (), 0, 0.5, 40, "question", 0.1, "primed", {}))
    log.close()
    ask = ("quality", "--store", tmp_path / "store", "--namespace")
    assert "but of others" in cachecraft(*ask, "nobody", cwd=tmp_path).stdout
    assert "1 answer compared" in cachecraft(*ask, "mine", cwd=tmp_path).stdout
    nothing = cachecraft(*ask, "nobody", "--json", cwd=tmp_path).result
    assert (nothing["answers"], nothing["overall"], nothing["worst"]) == (0, None, [])


def test_the_worst_answers_show_the_text_that_was_kept(tmp_path: Path, cachecraft: Command) -> None:
    folder = tmp_path / "store" / CACHE_FOLDER
    log = AuditLog(folder, kept=10)
    text = AuditText("How long?", same="It lasts ", reuse="30 days.", full="3 years.")
    for name, differences in (("a", (2, 3)), ("b", (4,)), ("c", ())):
        log.add(
            "default",
            "model",
            Audit(
                name * 32,
                1e9,
                5,
                differences,
                0,
                0.5,
                40,
                "question",
                0.1,
                "primed",
                {"reused": 2},
                text=text,
            ),
        )
    log.close()
    page = cachecraft("quality", "--store", tmp_path / "store", cwd=tmp_path).stdout
    assert page.index("aaaaaaaa") < page.index("bbbbbbbb")
    assert "cccccccc" not in page
    assert page.count("full prefill: 3 years.") == page.count("reuse:        30 days.") == 2
    shorter = cachecraft(
        "quality", "--store", tmp_path / "store", "--worst", "1", cwd=tmp_path
    ).stdout
    assert shorter.count("full prefill: ") == 1


def test_no_model_is_loaded(
    audited: Path, cachecraft: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cachecraft_rag.model.decoder import Decoder

    monkeypatch.setattr(Decoder, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert "compared with full prefill" in cachecraft("quality", cwd=audited).stdout


def test_the_setting_is_checked_before_a_model_is_loaded(home: Path, cachecraft: Command) -> None:
    done = cachecraft("chat", "--audit", "sometimes", cwd=home, code=2)
    assert '"off", "idle" or a share from 0 to 1' in done.stderr
