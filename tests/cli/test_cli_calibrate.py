"""`cachecraft calibrate` as a user types it: a file beside the store that the next engine takes up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cachecraft_rag import Engine
from cachecraft_rag.cli import store as store_commands
from cachecraft_rag.cli.app import app
from cachecraft_rag.cli.ask import print_calibration
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.evaluation.calibrate import calibrate
from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.evaluation.calibrate import METRICS
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.calibration import load_calibration
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.types.documents import Chunk

# A chunk that was captured alone is recomputed in full from α = 2 on, so some α reaches any quality. One that was
# captured after passages of the prompt never is.
ALONE = ("--origin", "alone")

pytestmark = pytest.mark.usefixtures("as_loud_as_before")


@pytest.fixture(scope="module")
def home(tiny_decoder: Callable[..., Decoder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and questions of two articles, one file with gold answers, one without.

    The model comes in float32: in bfloat16 it is a matter of rounding, and so of the CPU, whether recomputing
    everything gives the tokens of full prefill. With this seed the quality falls below 1 wherever much is reused.
    """
    folder = tmp_path_factory.mktemp("home")
    decoder = tiny_decoder("Llama", seed=3)
    decoder.model.save_pretrained(folder / "model")
    decoder.tokenizer.save_pretrained(folder / "model")
    articles = {
        thing: [
            (town, year, f"The {thing} of {town} was built in {year} and stands beside the river.")
            for town, year in (("Arden", 1701), ("Brook", 1802), ("Corry", 1903))
        ]
        for thing in ("mill", "bridge")
    }
    squad = [
        {
            "title": thing,
            "paragraphs": [
                {
                    "context": text,
                    "qas": [
                        {
                            "id": f"{thing}{year}",
                            "question": f"When was the {thing} of {town} built?",
                            "answers": [{"text": str(year), "answer_start": text.index(str(year))}],
                        }
                    ],
                }
                for town, year, text in article
            ],
        }
        for thing, article in articles.items()
    ]
    (folder / "squad.json").write_text(
        json.dumps({"version": "1.1", "data": squad}), encoding="utf-8"
    )
    for article in squad:
        for paragraph in article["paragraphs"]:
            paragraph["qas"][0]["answers"] = []  # type: ignore[index]
    (folder / "bare.json").write_text(
        json.dumps({"version": "1.1", "data": squad}), encoding="utf-8"
    )
    return folder


def run(home: Path, *arguments: str | Path, data: str = "squad.json") -> str:
    """Output of the command. In this process: a new one takes four seconds to begin."""
    app = typer.Typer()
    app.command()(calibrate)
    given = (
        "--data",
        home / data,
        "--model",
        home / "model",
        "--threads",
        "1",
        "--answer-tokens",
        "24",
        *arguments,
    )
    done = CliRunner().invoke(
        app, [str(one) for one in given], catch_exceptions=False, env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    return done.output


def last_json(shown: str) -> Any:
    """The object on the last line."""
    return json.loads(shown.strip().splitlines()[-1])


def test_the_next_engine_uses_it(home: Path) -> None:
    store = home / "kept"
    chunks = [Chunk("One thing is written here."), Chunk("Another thing is written there.")]

    def recomputed(config: ReuseConfig) -> int:
        with Engine.from_pretrained(str(home / "model"), store=store, reuse=config) as engine:
            return engine.score_answer(
                "What?", chunks[::-1], max_new_tokens=2
            ).stats.tokens_recomputed

    with Engine.from_pretrained(str(home / "model"), store=store) as engine:
        engine.score_answer("What?", chunks, max_new_tokens=2)
        fingerprint = engine.decoder.fingerprint
    with Engine.from_pretrained(str(home / "model"), store=store) as engine:
        variants = engine.store.stats().variants
    before = recomputed(ReuseConfig(capture=False))
    report = last_json(run(home, "--store", store, "--quality", "0", "--json"))
    assert sorted(path.name for path in store.iterdir()) == ["caches", "calibration.json"]
    assert (report["alpha"], report["held"], report["pays"], report["check"]) == (
        0.1,
        True,
        True,
        None,
    )
    assert report["file"] == str(store / "calibration.json")
    found = load_calibration(store, fingerprint)
    assert found is not None
    assert (found.alpha, found.dataset, found.questions, found.metric) == (
        0.1,
        "squad",
        6,
        "rouge_l",
    )
    after = recomputed(ReuseConfig(capture=False))
    assert recomputed(ReuseConfig(capture=False, method=ReuseMethod(alpha=0.1))) == after < before
    with Engine.from_pretrained(str(home / "model"), store=store) as engine:
        assert engine.store.stats().variants == variants  # no chunk of the validation set came in


def test_answers_and_statistics_show_it(home: Path) -> None:
    store = home / "shown"
    with Engine.from_pretrained(str(home / "model"), store=store) as engine:
        fingerprint = engine.decoder.fingerprint
    run(home, "--store", store, "--quality", "0")
    line = "α = 0.1, calibrated for rouge_l ≥ 0 on 6 questions of squad"
    shown = CliRunner().invoke(store_commands.app, ["stats", "--store", str(store)]).output
    assert f"model {fingerprint[:8]}: {line}" in shown
    asked = (
        CliRunner().invoke(store_commands.app, ["stats", "--store", str(store), "--json"]).output
    )
    assert last_json(asked)["calibrations"][fingerprint]["alpha"] == 0.1
    decided = {
        ReuseConfig(): True,
        ReuseConfig(method=ReuseMethod(alpha=1.0)): False,
        ReuseConfig(recompute_ratio=0.1): False,
    }
    decided |= {
        ReuseConfig(reuse=False): False,
        ReuseConfig(method=ReuseMethod(selector="leading")): False,
    }
    for config, expected in decided.items():
        with (
            CacheCraft.from_pretrained(str(home / "model"), store=store, reuse=config) as rag,
            out.capture() as shown,
        ):
            print_calibration(rag)
        assert (line in shown.get().replace("\n", " ")) == expected, config


def test_the_table_shows_what_was_tried_and_what_is_written(home: Path) -> None:
    arguments = ("--store", home / "table", "--quality", "1", "--metric", "top1", *ALONE)
    shown, report = run(home, *arguments), last_json(run(home, *arguments, "--json"))
    for point in report["curve"]:
        line = next(
            line for line in shown.splitlines() if line.split()[:1] == [f"{point['alpha']:g}"]
        )
        quality = point["quality"]
        expected = [f"{point['recomputed']:.0%}", f"{quality['mean']:.3f}", f"{quality['low']:.3f}"]
        assert line.split()[1:4] == expected
        assert ("← chosen" in line) == (point["alpha"] == report["alpha"])
    assert len(report["curve"]) > 2
    assert (report["recomputed"], report["pays"], report["held"]) == (1.0, False, True)
    assert (
        "Reuse does not pay at this quality: 100% of chunk tokens are recomputed. Ask for less with --quality"
        in shown
    )
    assert "6 questions are few" in shown
    assert f"written to {home / 'table' / 'calibration.json'}" in shown
    assert "ReuseConfig().with_method(alpha=…) overrides it" in shown


def test_the_other_half_checks_the_promise(home: Path) -> None:
    arguments = (
        "--store",
        home / "checked",
        "--quality",
        "1",
        "--metric",
        "top1",
        "--check",
        "--seed",
        "2",
        *ALONE,
    )
    report = last_json(run(home, *arguments, "--json"))
    assert report["questions"] == 3
    assert report["check"]["held"] is True
    assert report["check"]["quality"]["mean"] == 1.0
    assert "on the other half: top1 1.000 (1.000 to 1.000), 100% recomputed: held" in run(
        home, *arguments
    )


def test_another_quality_replaces_the_first(home: Path) -> None:
    store = home / "again"
    for quality in ("0", "1"):
        report = last_json(
            run(home, "--store", store, "--quality", quality, "--metric", "top1", "--json", *ALONE)
        )
    kept = json.loads((store / "calibration.json").read_text(encoding="utf-8"))
    assert [one["alpha"] for one in kept.values()] == [report["alpha"]]
    assert report["alpha"] > 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quality", "0.9", "--metric", "bleu"), "unknown metric 'bleu'; choose one of"),
        (("--quality", "95"), "quality must lie between 0 and 1"),
        (("--quality", "0.9", "--origin", "stream"), "choose one of documents"),
        (("--quality", "0.9", "--limit", "1", "--check"), "2 questions or more: raise --limit"),
        (("--data", "missing.json"), r"missing\.json"),
    ],
)
def test_wrong_arguments_are_refused_before_a_model_is_loaded(
    home: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CacheCraftError, match=message):
        run(home, "--model", "no/such-model", *arguments, "--store", home / "refused")
    assert not (home / "refused").exists()


def test_f1_without_gold_answers_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="f1 needs gold answers, and 6 of 6 questions have none"):
        run(
            home,
            "--quality",
            "0.9",
            "--metric",
            "f1",
            "--store",
            home / "refused",
            data="bare.json",
        )


def test_a_store_that_cannot_be_written_to_is_refused(home: Path) -> None:
    (home / "taken").write_text("mine", encoding="utf-8")
    with pytest.raises(
        CacheCraftError, match="choose another folder with --out, or --store of calibrate"
    ):
        run(home, "--store", home / "taken", "--quality", "0")


def test_a_file_nested_too_deeply_is_refused(home: Path) -> None:
    (home / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(CacheCraftError, match=r"deep\.json is not JSON"):
        run(home, "--store", home / "refused", data="deep.json")


def test_a_terminated_calibration_cleans_up_and_resumes(home: Path, towns: Path) -> None:
    """Progress comes as lines; SIGTERM leaves no scratch folder; a second run begins where the first stopped."""
    store, more = home / "stopped", ("--quality", "1", "--metric", "top1")
    given = [
        "--data",
        towns,
        "--model",
        home / "model",
        "--threads",
        "1",
        "--store",
        store,
        "--limit",
        "24",
        *more,
    ]
    given += ["--dtype", "float32"]  # another process looks at the CPU itself
    command = [str(Path(sys.executable).with_name("cachecraft")), "calibrate", *map(str, given)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("expected to take 0:" in line for line in lines)
        process.terminate()
        rest = list(lines)
    assert process.returncode == 143
    assert "interrupted; finished work is kept\n" in rest
    assert [path.name for path in store.iterdir()] == [".calibrating"]
    run(home, "--store", store, "--limit", "24", "--answer-tokens", "16", *more, data=str(towns))
    assert [path.name for path in store.iterdir()] == ["calibration.json"]


@pytest.fixture(scope="module")
def towns(
    tmp_path_factory: pytest.TempPathFactory, squad_article: Callable[..., dict[str, Any]]
) -> Path:
    """Questions over eight articles of six passages."""
    articles = [
        squad_article(
            thing, {f"{town}{thing[0]}": 1700 + place for place, town in enumerate(TOWNS)}
        )
        for thing in THINGS
    ]
    path = tmp_path_factory.mktemp("towns") / "towns.json"
    path.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return path


THINGS = ("mill", "bridge", "tower", "church", "market", "harbour", "school", "theatre")
TOWNS = ("Arden", "Brook", "Corry", "Dunmore", "Elm", "Fenwick")


def test_every_metric_is_in_the_help() -> None:
    group = typer.main.get_command(app)
    command = group.commands["calibrate"]  # type: ignore[attr-defined]
    option = next(parameter for parameter in command.params if parameter.name == "metric")
    missing = [name for name in METRICS if name not in option.help]
    assert not missing, (
        f"describe them in CalibrationOptions of cli/evaluation/calibrate.py: {missing}"
    )
