"""The `cachecraft` command as a user types it: in a process of its own, on real files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).with_name("cachecraft"))
QUESTION = "How many days do I have to return an appliance?"


def run(
    *arguments: str | Path, cwd: Path, code: int = 0, typed: str = "", columns: int | None = 200
) -> subprocess.CompletedProcess[str]:
    """Run the command and check its exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "dumb"}
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    done = subprocess.run(
        [COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def last_json(done: subprocess.CompletedProcess[str]) -> Any:
    """The object on the last line of stdout."""
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def home(handbook: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two pages, indexed and primed by the command itself."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "docs").mkdir()
    for page in ("returns.md", "warranty.md"):
        shutil.copy(handbook / page, folder / "docs")
    report = last_json(run("index", "docs", "--prime", "--threads", "2", "--json", cwd=folder))
    assert sorted(report["added"]) == ["docs/returns.md", "docs/warranty.md"]
    assert report["captured"] == report["chunks_embedded"] + 1
    return folder


def test_help_and_version_come_at_once_and_without_torch(tmp_path: Path) -> None:
    assert "index" in run("--help", cwd=tmp_path).stdout
    assert run("--version", cwd=tmp_path).stdout.startswith("cachecraft ")
    code = "import sys; from cachecraft_rag.cli import main; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_ask_json_has_what_scripts_need(home: Path) -> None:
    answer = last_json(
        run("ask", QUESTION, "--max-new-tokens", "12", "--seed", "1", "--threads", "2", "--json", cwd=home)
    )
    assert set(answer) == {"text", "sources", "stats"}
    stats = answer["stats"]
    assert stats["tokens_reused"] > 0
    assert stats["tokens_reused"] + stats["tokens_recomputed"] + stats["tokens_computed"] == stats["tokens_prompt"]
    assert 0 < stats["ttft_s"] <= stats["total_s"]
    for chunk in stats["chunks"]:
        assert {"chunk_id", "outcome", "reason", "cfo", "tier"} <= set(chunk)
        assert (chunk["outcome"], chunk["tier"]) in {("exact", "disk"), ("reused", "disk")}
    assert {source["chunk_id"] for source in answer["sources"]} == {chunk["chunk_id"] for chunk in stats["chunks"]}


def test_index_goes_on_past_what_it_cannot_use_and_says_so(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "glyphs.md").write_text("# Glyphs\n\n" + "\U00013000" * 3000, encoding="utf-8")
    (docs / "page.html").write_text('<meta charset="undefined"><p>Rinse it.</p><![x[', encoding="utf-8")
    (docs / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    (tmp_path / "private.md").write_text("A diary.", encoding="utf-8")
    (docs / "linked.md").symlink_to("../private.md")
    with open(os.fsencode(docs) + b"/\xff.png", "wb"):
        pass
    done = run("index", "docs", "--prime", "--threads", "2", cwd=tmp_path)
    assert "2 documents added" in done.stdout
    for said in ("broken.pdf", "linked.md: a link that leads out of the folder", "\\xff.png"):
        assert said in done.stderr
    report = last_json(run("index", "docs", "--follow-links", "--json", cwd=tmp_path))
    assert report["added"] == ["docs/linked.md"]
    assert {problem["kind"] for problem in report["problems"]} == {"unreadable", "unsupported"}


def test_ask_prints_answer_sources_and_numbers(home: Path) -> None:
    shown = run("ask", QUESTION, "--max-new-tokens", "12", cwd=home).stdout
    assert "docs/returns.md" in shown
    assert "first token after" in shown


def test_no_reuse_computes_everything(home: Path) -> None:
    answer = last_json(run("ask", QUESTION, "--max-new-tokens", "2", "--no-reuse", "--json", cwd=home))
    assert answer["stats"]["tokens_reused"] == 0
    assert {chunk["reason"] for chunk in answer["stats"]["chunks"]} == {"reuse is off"}


def test_chat_keeps_the_conversation_and_leaves_at_the_end_of_input(home: Path) -> None:
    typed = f"{QUESTION}\nAnd then?\n/sources\n/new\nAnd the warranty?\n"
    done = run("chat", "--max-new-tokens", "8", cwd=home, typed=typed)
    assert done.stdout.count("first token after") == 3
    assert done.stdout.count("searched for it, and for:") == 1  # of the follow-up, and not of the first questions
    assert "docs/returns.md" in done.stdout


def test_chat_knows_its_commands_and_survives_what_does_not_fit(home: Path) -> None:
    done = run(
        "chat", "--max-new-tokens", "8", cwd=home, typed=f"/sources\n/help\n{'why ' * 9000}\n{QUESTION}\n/quit\n"
    )
    assert "nothing has been answered yet" in done.stderr
    assert done.stderr.count("/sources, /new, /quit") == 2  # at the start and for the command it does not know
    assert "/new forgets the conversation" in done.stderr
    assert done.stdout.count("first token after") == 1


def test_ctrl_c_stops_an_answer_and_then_the_conversation(home: Path) -> None:
    command = [COMMAND, "chat", "--max-new-tokens", "4000", "--temperature", "2", "--seed", "1"]
    chat = subprocess.Popen(
        command,
        cwd=home,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whoever runs the tests in the background may have SIGINT ignored, and a child inherits that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    watchdog = threading.Timer(240, chat.kill)  # a test that waits for ever says nothing
    watchdog.start()
    assert chat.stdin is not None
    assert chat.stdout is not None
    assert chat.stderr is not None
    with chat:
        chat.stdin.write(f"{QUESTION}\n")
        chat.stdin.flush()
        chat.stdout.read(40)  # the prompt, and the answer has begun
        chat.send_signal(signal.SIGINT)
        while "stopped" not in chat.stderr.readline():
            assert chat.poll() is None
        # A signal between Python's last look at its signals and the read that waits for a line is seen at the next one.
        for _ in range(4):
            chat.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                chat.wait(50)
                break
        assert "interrupted" in chat.stderr.read()
    watchdog.cancel()
    assert chat.returncode == 130


def test_a_library_s_warning_is_printed_once() -> None:
    code = (
        "import logging, sys\n"
        "from cachecraft_rag.cli import main\n"
        "logging.getLogger('library').addHandler(logging.StreamHandler())\n"
        "sys.argv = ['cachecraft', 'store', 'stats', '--store', 'nowhere']\n"
        "try: main()\n"
        "except SystemExit: logging.getLogger('library').warning('take care')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("take care") == 1


def test_a_question_before_the_first_document_loads_no_model_and_makes_no_folder(tmp_path: Path) -> None:
    for command in (["ask", "What?"], ["chat"]):
        done = run(*command, "--store", "typo", "--model", "no/such-model", cwd=tmp_path, code=2)
        assert "cachecraft index DIR --store typo" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_unchanged_folder_is_left_alone(home: Path) -> None:
    report = last_json(run("index", "docs", "--json", cwd=home))
    assert (report["chunks_embedded"], len(report["unchanged"]), report["captured"]) == (0, 2, None)


def test_store_commands(home: Path) -> None:
    rows = last_json(run("store", "ls", "--json", cwd=home))
    assert rows
    assert last_json(run("store", "stats", "--json", cwd=home))["variants"] == len(rows)
    assert last_json(run("store", "check", "--json", cwd=home))["findings"] == []
    assert "all sound" in run("store", "check", cwd=home).stdout
    copy = home / "copy"
    shutil.copytree(home / "chunk-caches", copy)
    told = ("--max-variants", "500", "--variants-per-chunk", "7", "--eviction", "f_r")
    kept = last_json(run("store", "limits", *told, "--store", copy, "--json", cwd=home))
    assert (kept["max_variants"], kept["variants_per_chunk"], kept["eviction"]) == (500, 7, "f_r")
    assert last_json(run("store", "limits", "--store", copy, "--json", cwd=home)) == kept
    victim = next(iter(sorted(copy.rglob("*.safetensors"))))
    victim.write_bytes(victim.read_bytes()[:-100])
    assert "damaged file" in run("store", "check", "--store", copy, cwd=home, code=1).stdout
    run("store", "check", "--repair", "--store", copy, cwd=home)
    assert "all sound" in run("store", "check", "--store", copy, cwd=home).stdout
    assert "0 variants removed" in run("store", "evict", "--down-to-mb", "inf", "--store", copy, cwd=home).stdout
    assert last_json(run("store", "evict", "--all", "--json", "--store", copy, cwd=home))["variants"] == len(rows) - 1
    assert "0 variants" in run("store", "stats", "--store", copy, cwd=home).stdout


def test_a_chunk_is_shown_and_evicted_by_how_its_id_begins(home: Path) -> None:
    copy = home / "short ids"
    shutil.copytree(home / "chunk-caches", copy)
    before = last_json(run("store", "ls", "--json", "--store", copy, cwd=home))
    chunk = before[0]["variant"]["key"]["chunk_id"]
    shown = run("store", "ls", "--store", copy, cwd=home, columns=80).stdout
    assert shown.count(chunk[:8]) == 1
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "at least 4" in run("store", "evict", "--chunk", "", "--store", copy, cwd=home, code=2).stderr
    gone = last_json(run("store", "evict", "--chunk", chunk[:8], "--json", "--store", copy, cwd=home))
    assert gone["variants"] == 1
    assert not last_json(run("store", "ls", "--chunk", chunk, "--json", "--store", copy, cwd=home))


def test_a_table_that_goes_to_a_pipe_is_whole(home: Path) -> None:
    shown = run("ask", QUESTION, "--max-new-tokens", "1", cwd=home, columns=None).stdout
    assert "docs/returns.md" in shown
    assert "…" not in shown


def test_a_remote_is_shown_and_a_wrong_one_is_an_error(home: Path) -> None:
    (home / "shared").mkdir(exist_ok=True)
    url = f"file://{home}/shared"
    shown = run("store", "stats", "--remote", url, cwd=home).stdout
    assert f"remote {url}: 0 variants, 0.0 MB of " in shown
    assert last_json(run("store", "stats", "--remote", url, "--json", cwd=home))["remote"]["breaker"] == "closed"
    dead = run("store", "stats", "--remote", "redis://:secret@127.0.0.1:1/0", cwd=home)
    assert "remote redis://***@127.0.0.1:1/0: does not answer" in dead.stdout
    for command in (["store", "stats"], ["ask", QUESTION], ["chat"]):
        wrong = run(*command, "--remote", "http://me:secret@host", cwd=home, code=2)
        assert "write one such as redis://" in wrong.stderr
        assert "secret" not in wrong.stderr


@pytest.mark.slow
def test_a_key_of_a_remote_comes_from_a_file_and_is_not_shown(home: Path) -> None:
    (home / "signed").mkdir()
    (home / "short.key").write_text("hunter2")
    (home / "remote.key").write_text("a key of enough characters")
    remote = ("--remote", f"file://{home}/signed")
    wrong = run("store", "stats", *remote, "--remote-key-file", "short.key", cwd=home, code=2)
    assert "at least 16 characters" in wrong.stderr
    assert "hunter2" not in wrong.stderr
    assert "needs --remote" in run("ask", "?", "--remote-key-file", "remote.key", cwd=home, code=2).stderr
    told = run("store", "stats", *remote, "--remote-key-file", "remote.key", "--json", cwd=home).stdout
    assert "enough characters" not in told


def test_another_folder_is_served_through_a_remote(home: Path) -> None:
    (home / "shared").mkdir(exist_ok=True)
    url = f"file://{home}/shared"
    first = run("index", "docs", "-s", "first", "--prime", "--remote", url, "--threads", "2", "--json", cwd=home)
    assert last_json(first)["captured"] > 0
    run("index", "docs", "-s", "second", cwd=home)
    answer = last_json(
        run("ask", QUESTION, "-s", "second", "--remote", url, "--max-new-tokens", "2", "--json", cwd=home)
    )
    assert {chunk["tier"] for chunk in answer["stats"]["chunks"]} == {"remote"}


def test_a_store_of_an_engine_of_one_s_own_can_be_looked_after(home: Path) -> None:
    whole = last_json(run("store", "stats", "--json", cwd=home))
    assert last_json(run("store", "stats", "--json", "--store", "chunk-caches/caches", cwd=home)) == whole


def test_index_says_what_it_left_out_and_when_it_found_nothing(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    done = run("index", "docs", cwd=tmp_path)
    assert "nothing was found to index; files end in .txt, .md" in done.stderr
    (tmp_path / "docs" / "table.xlsx").write_text("a")
    (tmp_path / "docs" / "page.md").write_text("Descale it.")
    done = run("index", "docs", cwd=tmp_path)
    assert done.stderr.count("table.xlsx") == 1
    assert "nothing was found" not in done.stderr
    assert "1 chunks embedded" in done.stderr
    assert "1 documents added" in done.stdout


def test_a_folder_that_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    run("index", "nowhere", "--embeddings", "no/such-model", cwd=tmp_path, code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["store", "ls"], "holds no chunk-caches"),
        (["store", "evict"], "say what to evict"),
        (["store", "check", "--store", "x" * 300], "holds no chunk-caches"),  # too long stands for out of reach
        (["ask", "What?", "--store", "x" * 300], "holds no documents yet"),
        (["index", "nowhere"], "nowhere"),
        (["ask", "What?", "--early-termination", "sharp"], "early_termination must be off"),
        (["ask", "What?", "--focus", "sharp"], "early_termination must be off"),  # the option's old name,
        (["bench", "ttft", "--model", "./no-such-model"], "cannot load the model"),
        (["bench", "cake", "--bandwidths", "fast"], "not a list of numbers"),
        (["bench", "cake", "--tokens", "100"], "at least 256 tokens"),
        (
            ["bench", "ttft", "--chunks", "25", "--dtype", "float32"],
            "do not fit the model's context of 8192; choose fewer",
        ),
    ],
    ids=lambda value: value[-1][:20] if isinstance(value, list) else "",
)
def test_errors_say_what_to_do_and_leave_with_2(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path, code=2)
    assert "error:" in done.stderr
    assert says in done.stderr


def test_bench_ttft_ends_in_one_json_line(demo_model: Path, tmp_path: Path) -> None:
    done = run(
        "bench",
        "ttft",
        "--pairs",
        "1",
        "--chunks",
        "2",
        "--chunk-tokens",
        "64",
        "--dtype",
        "float32",
        "--profile",
        "--json",
        cwd=tmp_path,
    )
    report = last_json(done)
    assert {"ratio_host", "ratio_disk", "ratio_all_recomputed", "token_ratio"} <= set(report)
    assert 0.15 < report["token_ratio"] < 0.5
    assert all(report[name] > 0 for name in ("ratio_host", "ratio_disk", "ratio_all_recomputed"))
    assert report["lengths"] == [{name: value for name, value in report.items() if name != "lengths"}]
    reused, full = report["parts"], report["parts_all_recomputed"]
    assert reused.keys() == full.keys()
    ran = {part for part, seconds in reused.items() if seconds > 0}
    assert {"planning", "placing", "drift", "attention", "layers", "logits", "other"} <= ran
    assert full["drift"] == full["probe"] == 0


def test_bench_ttft_of_several_lengths(demo_model: Path, tmp_path: Path) -> None:
    short = ("--pairs", "1", "--tokens", "150,300", "--chunk-tokens", "80", "--dtype", "float32")
    report = last_json(run("bench", "ttft", *short, "--json", cwd=tmp_path))
    assert [
        (one["chunks"], abs(one["prompt_tokens"] - tokens) < 20)
        for one, tokens in zip(report["lengths"], (150, 300), strict=True)
    ] == [(2, True), (4, True)]
    assert report.keys() == {"lengths"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is told by Linux")
def test_bench_memory(demo_model: Path, tmp_path: Path) -> None:
    report = last_json(run("bench", "memory", "--tokens", "200", "--loading", "cake", "--json", cwd=tmp_path))
    assert report["merged_kv_bytes"] == report["prompt_tokens"] * 46_080
    assert report["weights_bytes"] > 500e6
    # What loading has freed may serve the request again, but there is never a second copy of the weights.
    assert 0 <= report["request_bytes"] < report["weights_bytes"]
    assert 0.8 < report["peak_over_floor"] < 1.5


@pytest.mark.slow
def test_bench_cake_ends_in_one_json_line_and_draws_a_figure(demo_model: Path, tmp_path: Path) -> None:
    grid = ["--tokens", "512", "--bandwidths", "0.5,2", "--shares", "1", "--codecs", "raw", "--dtype", "float32"]
    done = run("bench", "cake", *grid, "--plot", "cake.png", "--json", cwd=tmp_path)
    cells = last_json(done)["cells"]
    assert [(cell["tokens"], cell["bandwidth_ratio"]) for cell in cells] == [(512, 0.5), (512, 2.0)]
    for cell in cells:
        assert cell["exact"]
        assert cell["best_split_s"] < min(cell["compute_only_s"], cell["load_only_s"])
        assert cell["cake_s"] < cell["compute_only_s"] + cell["load_only_s"]  # a test may share its cores
        better = min(cell["compute_only_s"], cell["load_only_s"])
        assert cell["of_better"] == pytest.approx(cell["cake_s"] / better)
        assert cell["of_better_lowest"] == pytest.approx(cell["of_better_highest"]) == pytest.approx(cell["of_better"])
        assert (cell["dtype"], cell["threads"] > 0, bool(cell["cpu"])) == ("float32", True, True)
    assert (tmp_path / "cake.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_bench_load_ends_in_one_json_line(demo_model: Path, tmp_path: Path) -> None:
    small = ["--chunks", "3", "--chunk-tokens", "200", "--pairs", "2", "--mb-per-s", "100", "--dtype", "float32"]
    report = last_json(run("bench", "load", *small, "--json", cwd=tmp_path))
    assert report["whole_s"] > report["load_s"] > 0.1  # 27 MB at 100 MB/s
    assert report["disk_fraction_of_raw"] == pytest.approx(report["disk_mb_s"] / report["raw_mb_s"])
    hideable = min(report["load_s"], (report["whole_s"] - report["load_s"]) * 29 / 30)  # the model has 30 layers
    assert report["layerwise_hidden"] * hideable == pytest.approx(report["whole_s"] - report["layerwise_s"])


@pytest.mark.slow
def test_the_demo_compares_with_full_prefill_and_starts_from_the_disk_the_second_time(
    demo_model: Path, tmp_path: Path
) -> None:
    first = run("demo", "--questions", "1", "--top-k", "3", "--threads", "2", cwd=tmp_path)
    assert "chunk-caches computed" in first.stderr
    assert "times faster to the first token" in first.stdout
    (second,) = last_json(run("demo", "--questions", "1", "--top-k", "3", "--json", cwd=tmp_path))
    stats = second["answer"]["stats"]
    assert {chunk["tier"] for chunk in stats["chunks"]} <= {"disk", "host"}
    assert stats["tokens_reused"] > 0.5 * stats["tokens_prompt"]
    assert second["own_prefill_s"] > 0
    assert stats["ttft_s"] > 0
