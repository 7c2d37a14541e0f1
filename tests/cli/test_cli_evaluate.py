"""`cachecraft eval` as a user types it: a report from a file of questions, killed and resumed, and clear refusals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cachecraft_rag.cli.app import app
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.errors import CacheCraftError, ConfigError

COMMANDS = (("eval",), ("calibrate",), ("eval", "early-termination"))
COMMAND = str(Path(sys.executable).with_name("cachecraft"))

pytestmark = pytest.mark.usefixtures("as_loud_as_before")


@pytest.fixture(scope="module")
def home(
    tiny_decoder: Callable[..., Decoder],
    squad_article: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with a tiny model and two articles of questions in SQuAD's published form."""
    folder = tmp_path_factory.mktemp("home")
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(folder / "model")
    decoder.tokenizer.save_pretrained(folder / "model")
    towns = {"Arden": 1701, "Brook": 1802, "Corry": 1903}
    articles = [squad_article(name, towns) for name in ("mill", "bridge")]
    (folder / "squad.json").write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return folder


def arguments_of(home: Path, *arguments: str | Path) -> list[str]:
    given = ("--data", home / "squad.json", "--model", home / "model", "--threads", "1", "--answer-tokens", "4")
    return [str(argument) for argument in (*given, *arguments)]


def run(home: Path, *arguments: str | Path) -> str:
    """What the command prints. In this process: a new one takes four seconds to begin."""
    return invoke("eval", *arguments_of(home, *arguments))


def invoke(*arguments: str) -> str:
    """What `cachecraft` prints with these arguments."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def last_json(shown: str) -> Any:
    """The object on the last line."""
    return json.loads(shown.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[str, Any]:
    """The report of an uninterrupted run with default methods."""
    found: dict[str, Any] = last_json(run(home, "--ratios", "0.15,0.3", "--out", home / "whole", "--json"))
    return found


def test_json_has_what_scripts_need(whole: dict[str, Any]) -> None:
    assert whole["questions"] == 6
    expected = {"full_recompute", "full_cache", "prefix_cache", "set_cache"}
    for name in ("default", "craft", "random", "leading", "value_deviation"):
        expected |= {f"{name}@0.15", f"{name}@0.3"}
    assert expected <= set(whole["methods"])
    assert not any(name.startswith(("mapreduce", "lingua2")) for name in whole["methods"])
    for one in whole["methods"].values():
        low, high = one["kl_ci"]
        assert low <= one["kl"] <= high
        assert {"top1", "rouge_l", "f1", "ttft_ratio", "recomputed"} <= set(one)
    assert abs(whole["methods"]["full_recompute"]["kl"]) <= 1e-6
    assert abs(whole["methods"]["prefix_cache"]["kl"]) <= 1e-5
    assert whole["methods"]["default@0.15"]["kl_vs_craft"]["ratio"] > 0


def test_the_folder_holds_page_figures_and_records(home: Path, whole: dict[str, Any]) -> None:
    folder = home / "whole"
    assert sorted(path.name for path in folder.iterdir()) == ["quality.png", "records.jsonl", "report.md", "ttft.png"]
    page = (folder / "report.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in page for name in whole["methods"])
    assert "(quality.png)" in page
    assert "(ttft.png)" in page


def test_killed_and_resumed_it_reports_the_same(home: Path, whole: dict[str, Any]) -> None:
    arguments = ("--ratios", "0.15,0.3", "--out", home / "killed", "--json")
    records = home / "killed" / "records.jsonl"
    killed = subprocess.Popen(
        [COMMAND, "eval", *arguments_of(home, *arguments)], cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with killed:
        give_up = time.monotonic() + 120
        while not (records.exists() and records.read_bytes().count(b"\n") > 5):
            assert time.monotonic() < give_up
            assert killed.poll() is None
        killed.send_signal(signal.SIGKILL)
    assert not (home / "killed" / "report.md").exists()
    left = records.read_bytes()
    resumed = last_json(run(home, *arguments))
    assert records.read_bytes().startswith(left[: left.rfind(b"\n")])
    assert untimed(resumed) == untimed(whole)
    assert not list((home / "killed").glob(".caches-*"))


def untimed(report: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from run to run."""
    methods = report["methods"].items()
    return {name: {key: one[key] for key in one if not key.startswith("ttft")} for name, one in methods}


def test_other_settings_are_refused_and_restart_begins_again(home: Path) -> None:
    out = ("--out", home / "few", "--methods", "full_cache", "--limit", "2")
    shown = run(home, *out)
    assert "full_cache" in shown
    assert "2 questions" in shown
    with pytest.raises(ConfigError, match=r"seed: 0 there, 7 now.*--restart"):
        run(home, *out, "--seed", "7")
    assert last_json(run(home, *out, "--seed", "7", "--restart", "--json"))["questions"] == 2


def test_the_stream_is_warmed_up_first(home: Path) -> None:
    arguments = ("--origin", "stream", "--methods", "full_cache", "--out", home / "stream")
    with pytest.raises(ConfigError, match="lower --warmup"):
        run(home, *arguments)
    assert last_json(run(home, *arguments, "--warmup", "4", "--json"))["questions"] == 2


def test_all_brings_mapreduce(home: Path) -> None:
    out = ("--ratios", "0.5", "--limit", "1", "--out", home / "all", "--json")
    report = last_json(run(home, "--methods", "all", *out))
    assert "mapreduce@0.5" in report["methods"]
    assert "lingua2@0.5" not in report["methods"]


def test_a_report_that_cannot_be_written_says_so(home: Path) -> None:
    (home / "taken" / "report.md").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"report\.md cannot be written"):
        run(home, "--methods", "full_cache", "--limit", "1", "--out", home / "taken")


def test_smaller_chunks_are_other_data(home: Path) -> None:
    out = ("--methods", "full_cache", "--limit", "1", "--out", home / "small")
    run(home, *out)
    with pytest.raises(ConfigError, match="data_digest"):
        run(home, *out, "--chunk-tokens", "16")
    with pytest.raises(ConfigError, match="name it with --data"):
        invoke("eval", "--chunk-tokens", "16")


def test_the_old_spelling_of_an_option_works_and_is_not_shown(home: Path) -> None:
    few = ("--methods", "full_cache", "--limit", "1", "--json")
    old = last_json(run(home, "--births", "alone", *few, "--out", home / "births"))
    assert untimed(old) == untimed(last_json(run(home, "--origin", "alone", *few, "--out", home / "origin")))
    assert json.loads((home / "births" / "records.jsonl").read_text().splitlines()[0])["settings"]["origin"] == "alone"
    assert "--births" not in invoke("eval", "--help")
    assert "--origin" in invoke("eval", "--help")


def test_early_termination_is_a_subcommand_and_has_its_old_name_too(home: Path) -> None:
    arguments = arguments_of(home, "--limit", "1", "--passages", "2", "--json")
    report = last_json(invoke("eval", "early-termination", *arguments))
    assert (report["questions"], report["passages"]) == (1, 2)
    assert {one["rule"] for one in report["rules"]} == {"printed", "gap", "share"}
    assert last_json(invoke("judge-focus", *arguments)) == report
    assert "judge-focus" not in invoke("--help")
    with pytest.raises(ConfigError, match="write options behind the subcommand: cachecraft eval early-termination"):
        invoke("eval", "--limit", "1", "early-termination", *arguments)
    with pytest.raises(ConfigError, match="change from question to question"):
        invoke("eval", "early-termination", *arguments, "--origin", "stream")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "magic"), "unknown method magic; choose among"),
        (("--methods", "lingua2"), "--lingua2-model"),
        (("--ratios", "much"), "is not a list of numbers"),
        (("--ratios", "0,0.1"), "a ratio must lie above 0"),
        (("--origin", "somehow"), "unknown origin condition"),
        (("--data", "missing.json"), r"missing\.json"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(home: Path, arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(CacheCraftError, match=message):
        run(home, *arguments, "--out", home / "refused")


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        *((command, name) for command in COMMANDS for name in ("rouge_score.rouge_scorer", "scipy.stats")),
        (("eval",), "matplotlib"),
    ],
)
def test_a_missing_package_is_said_before_a_model_is_loaded(
    home: Path, command: tuple[str, ...], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cachecraft_rag.evaluation.quality import runner

    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(runner, "open_engine", lambda *_args, **_settings: pytest.fail("a model was loaded"))
    arguments = [*command, "--data", str(home / "squad.json"), "--model", str(home / "model"), "--threads", "1"]
    with pytest.raises(ConfigError, match=r"pip install 'cachecraft-rag\[eval\]'"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.slow
def test_the_demo_model_on_the_sample_handbook(demo_model: Path, tmp_path: Path) -> None:
    methods = "full_recompute,prefix_cache,full_cache,craft"
    arguments = ("--limit", "1", "--methods", methods, "--ratios", "0.15", "--origin", "similar", "--threads", "1")
    done = subprocess.run(
        [COMMAND, "eval", *arguments, "--out", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    report = last_json(done.stdout)
    found = report["methods"]
    assert report["questions"] == 1
    assert abs(found["full_recompute"]["kl"]) <= 1e-6
    assert abs(found["prefix_cache"]["kl"]) <= 1e-5
    assert found["full_cache"]["kl"] > found["craft@0.15"]["kl"] > 0
    assert found["full_cache"]["recomputed"] == 0.0
    assert found["craft@0.15"]["recomputed"] < 0.2
    assert found["craft@0.15"]["ttft_ratio"] > 0
    assert found["craft@0.15"]["f1"] is None  # the handbook has no gold answers


def test_follow_ups_are_a_subcommand_and_need_no_answering_model() -> None:
    report = last_json(invoke("eval", "follow-ups", "--json"))
    assert report["questions"] == 40
    rates = report["hit_rate"]
    assert rates["the question alone"]["5"] <= 0.75
    assert rates["with its conversation"]["5"] >= 0.9
    assert rates["with its conversation"]["5"] >= rates["written out in full"]["5"]
    assert len(report["ranks"]["with its conversation"]) == 40
    shown = invoke("eval", "follow-ups", "--top-k", "3")
    assert re.search(r"with its conversation +0\.\d\d +0\.\d\d", shown)
    assert "hit rate at 5" not in shown


def test_follow_ups_about_your_own_documents(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "kettle.md").write_text("Descaling the kettle takes 20 minutes.", encoding="utf-8")
    record = {"conversation": ["How often is it descaled?", "Weekly."], "question": "And how long does it take?"}
    record |= {"standalone": "How long does descaling take?", "expect": "20 minutes"}
    (tmp_path / "asked.jsonl").write_text(json.dumps(record), encoding="utf-8")
    store, data = str(tmp_path / "store"), str(tmp_path / "asked.jsonl")
    invoke("index", str(tmp_path / "docs"), "--store", store)
    report = last_json(invoke("eval", "follow-ups", "--data", data, "--store", store, "--json"))
    assert report["ranks"] == {way: [1] for way in report["ranks"]}
    with pytest.raises(ConfigError, match="both --data and --store"):
        invoke("eval", "follow-ups", "--data", data)
