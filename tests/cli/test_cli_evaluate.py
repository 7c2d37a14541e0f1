"""`cachecraft eval` as a user types it: a report from a file of questions, killed and resumed, and clear refusals."""

from __future__ import annotations

import json
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
from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.model.decoder import Decoder

COMMANDS = (("eval",), ("calibrate",))
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
    (folder / "squad.json").write_text(
        json.dumps({"version": "1.1", "data": articles}), encoding="utf-8"
    )
    return folder


def arguments_of(home: Path, *arguments: str | Path) -> list[str]:
    given = (
        "--data",
        home / "squad.json",
        "--model",
        home / "model",
        "--threads",
        "1",
        "--answer-tokens",
        "4",
    )
    return [str(argument) for argument in (*given, *arguments)]


def run(home: Path, *arguments: str | Path) -> str:
    """Output of the command. In this process: a new one takes four seconds to begin."""
    return invoke("eval", *arguments_of(home, *arguments))


def invoke(*arguments: str) -> str:
    """Output of `cachecraft` with these arguments."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def last_json(shown: str) -> Any:
    """The object on the last line."""
    return json.loads(shown.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[str, Any]:
    """The report of an uninterrupted run with default methods."""
    found: dict[str, Any] = last_json(
        run(home, "--ratios", "0.15,0.3", "--out", home / "whole", "--json")
    )
    return found


def test_json_has_what_scripts_need(whole: dict[str, Any]) -> None:
    assert whole["questions"] == 6
    assert set(whole["methods"]) == {
        "full_recompute",
        "full_cache",
        "prefix_cache",
        "default@0.15",
        "default@0.3",
    }
    for one in whole["methods"].values():
        low, high = one["kl_ci"]
        assert low <= one["kl"] <= high
        assert {"top1", "rouge_l", "f1", "ttft_ratio", "recomputed"} <= set(one)
    assert abs(whole["methods"]["full_recompute"]["kl"]) <= 1e-6
    assert abs(whole["methods"]["prefix_cache"]["kl"]) <= 1e-5


def test_the_folder_holds_page_and_records(home: Path, whole: dict[str, Any]) -> None:
    folder = home / "whole"
    assert sorted(path.name for path in folder.iterdir()) == ["records.jsonl", "report.md"]
    page = (folder / "report.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in page for name in whole["methods"])


def test_killed_and_resumed_it_reports_the_same(home: Path, whole: dict[str, Any]) -> None:
    arguments = ("--ratios", "0.15,0.3", "--out", home / "killed", "--json")
    records = home / "killed" / "records.jsonl"
    killed = subprocess.Popen(
        [COMMAND, "eval", *arguments_of(home, *arguments)],
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
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
    return {
        name: {key: one[key] for key in one if not key.startswith("ttft")} for name, one in methods
    }


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


def test_a_report_that_cannot_be_written_says_so(home: Path) -> None:
    (home / "taken" / "report.md").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"report\.md cannot be written"):
        run(home, "--methods", "full_cache", "--limit", "1", "--out", home / "taken")


def test_lookalikes_are_a_named_test_set(home: Path) -> None:
    named = (
        "eval",
        "--data",
        "lookalikes:confirm",
        "--model",
        str(home / "model"),
        "--threads",
        "1",
    )
    short = (
        "--limit",
        "2",
        "--passages",
        "2",
        "--answer-tokens",
        "4",
        "--methods",
        "default",
        "--ratios",
        "0.15",
    )
    out = ("--out", str(home / "lookalikes"), "--json")
    report = last_json(invoke(*named, *short, *out))
    assert (report["questions"], report["full_right_n"]) == (2, 2)
    default = report["methods"]["default@0.15"]
    assert default["right_n"] == 2
    assert default["lost_net_n"] + default["won_n"] == 2
    with pytest.raises(ConfigError, match="lookalikes has no half 'all'"):
        invoke("eval", "--data", "lookalikes:all")
    with pytest.raises(ConfigError, match="apply to a file of questions"):
        invoke("eval", "--data", "lookalikes", "--chunk-tokens", "16")


def test_smaller_chunks_are_other_data(home: Path) -> None:
    out = ("--methods", "full_cache", "--limit", "1", "--out", home / "small")
    run(home, *out)
    with pytest.raises(ConfigError, match="data_digest"):
        run(home, *out, "--chunk-tokens", "16")
    with pytest.raises(ConfigError, match="name it with --data"):
        invoke("eval", "--chunk-tokens", "16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "magic"), "magic: no such method; there are"),
        (("--ratios", "much"), "is not a list of numbers"),
        (("--ratios", "0,0.1"), "a ratio must lie above 0"),
        (("--origin", "somehow"), "unknown origin condition"),
        (("--data", "missing.json"), r"missing\.json"),
    ],
)
def test_wrong_arguments_are_refused_with_advice(
    home: Path, arguments: tuple[str, str], message: str
) -> None:
    with pytest.raises(CacheCraftError, match=message):
        run(home, *arguments, "--out", home / "refused")


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_a_file_nested_too_deeply_is_refused(home: Path, name: str) -> None:
    (home / name).write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(CacheCraftError, match=rf"{name}.* is not JSON"):
        run(home, "--data", home / name, "--out", home / "refused")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_package_is_reported_before_a_model_is_loaded(
    home: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cachecraft_rag.evaluation import runner

    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    monkeypatch.setattr(
        runner, "open_engine", lambda *_args, **_settings: pytest.fail("a model was loaded")
    )
    arguments = [
        *command,
        "--data",
        str(home / "squad.json"),
        "--model",
        str(home / "model"),
        "--threads",
        "1",
    ]
    with pytest.raises(ConfigError, match=r"pip install 'cachecraft-rag\[eval\]'"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.slow
def test_the_demo_model_on_the_sample_handbook(demo_model: Path, tmp_path: Path) -> None:
    methods = "full_recompute,prefix_cache,full_cache,default"
    arguments = ("--limit", "1", "--methods", methods, "--ratios", "0.15", "--threads", "1")
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
    assert found["full_cache"]["kl"] > found["default@0.15"]["kl"] > 0
    assert found["full_cache"]["recomputed"] == 0.0
    # The last chunk before the question, at most 35 % of the tokens, is recomputed in full, and less than
    # a fifth of the others.
    assert found["default@0.15"]["recomputed"] < 0.35 + 0.65 * 0.2
    assert found["default@0.15"]["ttft_ratio"] > 0
    assert found["default@0.15"]["f1"] is None  # the handbook has no gold answers
