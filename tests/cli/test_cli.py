"""The `cachecraft` command as a user types it: most of it in this process, the demo model and signals in a real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.cli.app import COMMANDS, LazyCommands
from cachecraft_rag.cli.ask import Primed, load, outcome_of, print_index_report, print_stream
from cachecraft_rag.engine.settings import load_settings
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.observability.stats import ChunkStats
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.retrievers.folders import Problem
from cachecraft_rag.retrievers.indexer import IndexReport

COMMAND = str(Path(sys.executable).with_name("cachecraft"))
QUESTION = "How many days do I have to return an appliance?"
Command = Callable[..., Any]  # of the fixture `cachecraft`

pytestmark = pytest.mark.usefixtures("as_loud_as_before")


def process(*arguments: str | Path, cwd: Path, columns: int | None = 200) -> str:
    """Stdout of the command in a separate process, which must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {
        "TERM": "dumb"
    }
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    done = subprocess.run(
        [COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# -- processes --------------------------------------------------------------------------------------------------------


def test_help_and_version_come_without_torch(tmp_path: Path) -> None:
    assert "index" in process("--help", cwd=tmp_path)
    assert process("--version", cwd=tmp_path).startswith("cachecraft ")


LIGHT = [
    ("--help",),
    ("settings",),
    ("store", "stats"),
    ("store", "ls"),
    ("store", "limits", "--max-variants", "50"),
    ("store", "evict", "--all"),
    ("documents", "ls"),
    ("documents", "remove", "docs/returns.md"),
    ("ask", ""),
    ("ask", "What?", "--store", "nowhere"),
]


def test_what_needs_no_model_imports_no_torch(home: Path) -> None:
    """One process for all: imports stay, so the last command tells of all before."""
    copy = home / "light"
    shutil.copytree(home / "store", copy / "store")
    shutil.copy(home / "cachecraft.toml", copy)
    code = (
        "import json, sys\n"
        "from cachecraft_rag import CacheCraft\n"
        "from cachecraft_rag.cli import main\n"
        "codes = []\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['cachecraft', *arguments]\n"
        "    try: codes.append(main())\n"
        "    except SystemExit as leaving: codes.append(leaving.code)\n"
        "    heavy = {'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)\n"
        "    assert not heavy, (arguments, heavy)\n"
        "print(json.dumps(codes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(LIGHT)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert [code or 0 for code in codes] == [0] * (len(LIGHT) - 2) + [2, 2]


def test_ctrl_c_stops_an_answer_and_then_the_conversation(home: Path, demo_model: Path) -> None:
    command = [
        COMMAND,
        "chat",
        "--model",
        "demo",
        "--max-new-tokens",
        "4000",
        "--temperature",
        "2",
        "--seed",
        "1",
    ]
    chat = subprocess.Popen(
        command,
        cwd=home,
        text=True,
        errors="replace",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests that run in the background may have SIGINT ignored, and a child inherits that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    watchdog = threading.Timer(240, chat.kill)  # a test that waits for ever says nothing
    watchdog.daemon = True
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


def test_help_describes_options_as_their_dataclasses_do(tmp_path: Path) -> None:
    shown = process("ask", "--help", cwd=tmp_path)
    for said in (
        "--disk-bytes",
        "SIZE",
        "Limit of all files together, kept with the store.",
        "--reuse",
        "--no-reuse",
    ):
        assert said in shown
    shown = process("eval", "--help", cwd=tmp_path)
    for said in ("--answer-tokens", "Longest answer.", "[default: 16]", "lookalikes:confirm"):
        assert said in shown


def test_the_summaries_are_the_first_sentences_of_the_commands_own_help() -> None:
    commands = LazyCommands()
    for name, entry in COMMANDS.items():
        text = " ".join((commands[name].help or "").split())
        assert text.startswith(entry.summary), name


def test_options_are_listed_in_groups_and_flags_have_no_type(tmp_path: Path) -> None:
    shown = process("ask", "--help", cwd=tmp_path, columns=100)
    for panel in (
        "─ Model ─",
        "─ Store ─",
        "─ Retrieval ─",
        "─ Answer ─",
        "─ Reuse ─",
        "─ Remote ─",
    ):
        assert panel in shown
    compare = next(line for line in shown.splitlines() if "--compare" in line)
    assert "<bool>" not in compare


def test_output_that_cannot_be_written_is_an_error_without_a_traceback(home: Path) -> None:
    for command in (["documents", "ls"], ["store", "ls", "--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [COMMAND, *command], cwd=home, stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert done.returncode == 2
        assert done.stderr.strip() == "error: the output cannot be written: No space left on device"


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


def test_a_table_fits_the_terminal_and_is_whole_in_a_pipe(home: Path) -> None:
    shown = process("store", "ls", cwd=home, columns=80)
    assert all(len(line) <= 80 for line in shown.splitlines())
    shown = process("settings", cwd=home, columns=None)
    assert (
        "You answer questions about the given context. Be brief and use only the context." in shown
    )
    assert "…" not in shown


@pytest.mark.slow
def test_the_demo_compares_with_full_prefill_and_starts_from_the_disk_the_second_time(
    demo_model: Path, tmp_path: Path, cachecraft: Command
) -> None:
    settings = tmp_path / "cachecraft.toml"
    settings.write_text('dtype = "float32"')
    first = cachecraft("demo", "--questions", "1", "--top-k", "3", cwd=tmp_path)
    assert "chunk-caches computed" in first.stderr
    assert "the model runs in float32" in first.stderr
    assert "times faster to the first token" in first.stdout
    assert "1 identical word for word, 1 reused exactly" in first.stdout
    (second,) = json.loads(
        process("demo", "--questions", "1", "--top-k", "3", "--json", cwd=tmp_path).splitlines()[-1]
    )
    stats = second["answer"]["stats"]
    assert {chunk["tier"] for chunk in stats["chunks"]} <= {"disk", "host"}
    assert stats["tokens_reused"] > 0.5 * stats["tokens_prompt"]
    assert second["own_prefill_s"] > 0
    assert stats["ttft_s"] > 0
    # It was asked before.
    assert {chunk["outcome"] for chunk in stats["chunks"]} == {"exact"}
    assert second["answer"]["text"] == second["again"]["text"] == second["full_text"]
    assert second["speedup_again"] > 0


# -- documents and questions ------------------------------------------------------------------------------------------


def test_ask_json_has_what_scripts_need(home: Path, cachecraft: Command) -> None:
    answer = cachecraft(
        "ask", QUESTION, "--max-tokens", "12", "--seed", "1", "--json", cwd=home
    ).result
    assert set(answer) == {"text", "sources", "stats"}
    stats = answer["stats"]
    assert stats["tokens_reused"] > 0
    assert (
        stats["tokens_reused"] + stats["tokens_recomputed"] + stats["tokens_computed"]
        == stats["tokens_prompt"]
    )
    assert 0 < stats["ttft_s"] <= stats["total_s"]
    for chunk in stats["chunks"]:
        assert {"chunk_id", "outcome", "reason", "cfo", "tier"} <= set(chunk)
        assert (chunk["outcome"], chunk["tier"]) in {("exact", "disk"), ("reused", "disk")}
    assert {source["chunk_id"] for source in answer["sources"]} == {
        chunk["chunk_id"] for chunk in stats["chunks"]
    }


def test_ask_prints_answer_sources_and_numbers(home: Path, cachecraft: Command) -> None:
    shown = cachecraft("ask", QUESTION, "--max-new-tokens", "12", cwd=home).stdout
    assert "docs/returns.md" in shown
    assert "first token after" in shown


def test_no_reuse_computes_everything(home: Path, cachecraft: Command) -> None:
    answer = cachecraft(
        "ask", QUESTION, "--max-new-tokens", "2", "--no-reuse", "--json", cwd=home
    ).result
    assert answer["stats"]["tokens_reused"] == 0
    assert {chunk["reason"] for chunk in answer["stats"]["chunks"]} == {"reuse is off"}


def test_ask_compares_with_full_prefill_and_captures_nothing(
    home: Path, cachecraft: Command
) -> None:
    stored = cachecraft("store", "stats", "--json", cwd=home).result["variants"]
    asked = ("ask", QUESTION, "--max-new-tokens", "8", "--compare")
    comparison = cachecraft(*asked, "--json", cwd=home).result
    assert comparison["reused"]["stats"]["tokens_reused"] > 0
    assert {chunk["reason"] for chunk in comparison["full"]["stats"]["chunks"]} == {"reuse is off"}
    assert 0 <= comparison["agreement"] <= 1
    assert cachecraft("store", "stats", "--json", cwd=home).result["variants"] == stored
    shown = cachecraft(*asked, cwd=home).stdout
    assert "with full prefill:" in shown
    assert "times as fast with reuse" in shown


def test_a_filter_that_matches_nothing_is_said_instead_of_answered(
    home: Path, cachecraft: Command
) -> None:
    for command in (["ask", QUESTION], ["chat"]):
        done = cachecraft(
            *command, "--where", "source=docs/none.md", "--model", "no/such-model", cwd=home, code=2
        )
        assert "no chunk matches --where" in done.stderr  # said before the model is loaded


class Pieces:
    """An answer that goes on after its first sentence."""

    def __init__(self, *pieces: str) -> None:
        self.text = ""
        self.is_closed = False
        self._pieces = pieces

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self.text += piece
            yield piece

    def close(self) -> None:
        self.is_closed = True


def test_a_brief_answer_ends_after_its_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    stream: Any = Pieces("You have", " 30 days", ". Y", "ou may also call.")
    assert print_stream(stream, brief=True) == "You have 30 days."
    assert stream.is_closed
    assert capsys.readouterr().out == "You have 30 days.\n"
    whole: Any = Pieces("One. ", "Two.")
    assert print_stream(whole, brief=False) == "One. Two."


def test_a_chunk_that_was_loaded_in_part_is_not_called_reused_and_computed() -> None:
    reason = Reason.COMPUTED_FASTER
    part = ChunkStats("id", "reused", reason.sentence, reason_code=reason)
    assert outcome_of(part).startswith("reused in part: computing the rest was expected to be")
    computed = ChunkStats("id", "computed", reason.sentence, reason_code=reason)
    assert outcome_of(computed) == f"computed: {reason.sentence}"


def test_over_a_server_only_its_own_options_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(CacheCraft, "connect", lambda url, **options: given.append(options))
    settings = load_settings(environment={})
    load(settings, server="http://127.0.0.1:9", system="Be brief.")
    assert given[0]["system"] == "Be brief."
    with pytest.raises(ConfigError, match="new_variants: no such option over a server"):
        load(settings, server="http://127.0.0.1:9", new_variants="off")


def test_an_empty_question_is_refused_before_a_model_is_loaded(
    tmp_path: Path, cachecraft: Command
) -> None:
    for question in ("", "  "):
        done = cachecraft("ask", question, "--model", "no/such-model", cwd=tmp_path, code=2)
        assert "the question is empty" in done.stderr


def test_index_goes_on_past_what_it_cannot_use_and_says_so(
    empty_home: Path, cachecraft: Command
) -> None:
    docs = empty_home / "odd"
    docs.mkdir()
    (docs / "glyphs.md").write_text("# Glyphs\n\n" + "\U00013000" * 3000, encoding="utf-8")
    (docs / "page.html").write_text(
        '<meta charset="undefined"><p>Rinse it.</p><![x[', encoding="utf-8"
    )
    (docs / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    (empty_home / "private.md").write_text("A diary.", encoding="utf-8")
    (docs / "linked.md").symlink_to("../private.md")
    with open(os.fsencode(docs) + b"/\xff.png", "wb"):
        pass
    done = cachecraft("index", "odd", "--prime", "-s", "odd store", cwd=empty_home)
    assert "2 documents added" in done.stdout
    for said in ("broken.pdf", "linked.md: a link that leads out of the folder", "\\xff.png"):
        assert said in done.stderr
    report = cachecraft(
        "index", "odd", "--follow-links", "-s", "odd store", "--json", cwd=empty_home
    ).result
    assert report["added"] == ["odd/linked.md"]
    assert {problem["kind"] for problem in report["problems"]} == {"unreadable", "unsupported"}


def test_index_says_what_it_left_out_and_when_it_found_nothing(
    tmp_path: Path, cachecraft: Command
) -> None:
    (tmp_path / "docs").mkdir()
    done = cachecraft("index", "docs", cwd=tmp_path)
    assert "nothing was found to index; files end in .txt, .md" in done.stderr
    (tmp_path / "docs" / "table.xls").write_text("a")
    (tmp_path / "docs" / "page.md").write_text("Descale it.")
    done = cachecraft("index", "docs", cwd=tmp_path)
    assert done.stderr.count("table.xls") == 1
    assert "nothing was found" not in done.stderr
    assert "1 document added" in done.stdout
    assert "1 chunk embedded" in done.stdout


def test_a_file_that_lacks_something_is_not_called_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problems = (
        Problem("docs/hidden.docx", "incomplete", "docs/hidden.docx: was read without hidden text"),
        Problem("docs/logo.png", "unsupported", "docs/logo.png: not a kind of file"),
    )
    print_index_report(
        IndexReport(("docs/hidden.docx",), (), (), (), 1, 0, (), problems, 0.1), Primed()
    )
    assert capsys.readouterr().err.splitlines() == [
        "docs/hidden.docx: was read without hidden text",
        "left out docs/logo.png: not a kind of file",
    ]


def test_an_unchanged_folder_is_left_alone(home: Path, cachecraft: Command) -> None:
    report = cachecraft("index", "docs", "--json", cwd=home).result
    assert (report["chunks_embedded"], len(report["unchanged"]), report["captured"]) == (0, 2, None)


def test_indexing_a_folder_that_is_not_there_leaves_no_files(
    tmp_path: Path, cachecraft: Command
) -> None:
    cachecraft("index", "nowhere", "--embeddings", "no/such-model", cwd=tmp_path, code=2)
    assert not list(tmp_path.iterdir())


def test_a_question_before_the_first_document_loads_no_model_and_makes_no_folder(
    tmp_path: Path, cachecraft: Command
) -> None:
    for command in (["ask", "What?"], ["chat"]):
        done = cachecraft(
            *command, "--store", "typo", "--model", "no/such-model", cwd=tmp_path, code=2
        )
        assert "cachecraft index DIR --store typo" in done.stderr
    assert not list(tmp_path.iterdir())


# -- conversations ----------------------------------------------------------------------------------------------------


def test_chat_keeps_the_conversation_and_leaves_at_the_end_of_input(
    home: Path, cachecraft: Command
) -> None:
    typed = f"{QUESTION}\nAnd then?\n/sources\n/new\nAnd the warranty?\n"
    done = cachecraft("chat", "--max-new-tokens", "8", cwd=home, typed=typed)
    assert done.stdout.count("first token after") == 3
    # of the follow-up, and not of the first questions
    assert done.stdout.count("searched for it, and for:") == 1
    assert "docs/returns.md" in done.stdout


def test_chat_knows_its_commands_and_survives_what_does_not_fit(
    home: Path, cachecraft: Command
) -> None:
    typed = f"/sources\n/help\n{'why ' * 9000}\n{QUESTION}\n/quit\n"
    done = cachecraft("chat", "--max-new-tokens", "8", cwd=home, typed=typed)
    assert "nothing has been answered yet" in done.stderr
    # at the start and for the command it does not know
    assert done.stderr.count("/sources, /new, /quit") == 2
    assert "/new forgets the conversation" in done.stderr
    assert done.stdout.count("first token after") == 1


# -- the store --------------------------------------------------------------------------------------------------------


def test_store_commands(home: Path, cachecraft: Command) -> None:
    run = partial(cachecraft, cwd=home)
    rows = run("store", "ls", "--json").result
    assert rows
    assert run("store", "stats", "--json").result["variants"] == len(rows)
    assert run("store", "check", "--json").result["findings"] == []
    assert "all sound" in run("store", "check").stdout
    copy = home / "copy"
    shutil.copytree(home / "store", copy)
    limits = (
        "--max-variants",
        "500",
        "--variants-per-chunk",
        "7",
        "--eviction",
        "f_r",
        "--disk-bytes",
        "1 GB",
    )
    kept = run("store", "limits", *limits, "--store", copy, "--json").result
    assert (kept["max_variants"], kept["variants_per_chunk"], kept["eviction"]) == (500, 7, "f_r")
    assert kept["disk_bytes"] == 10**9
    assert run("store", "limits", "--store", copy, "--json").result == kept
    victim = next(iter(sorted(copy.rglob("*.safetensors"))))
    victim.write_bytes(victim.read_bytes()[:-100])
    assert "damaged file" in run("store", "check", "--store", copy, code=1).stdout
    run("store", "check", "--repair", "--store", copy)
    assert "all sound" in run("store", "check", "--store", copy).stdout
    foreign = next(Path(copy).rglob("variants")) / "notes.txt"
    foreign.write_text("not of this store")
    assert "left alone" in run("store", "check", "--repair", "--store", copy, code=1).stdout
    assert (
        "0 variants removed" in run("store", "evict", "--down-to-mb", "inf", "--store", copy).stdout
    )
    assert (
        run("store", "evict", "--all", "--json", "--store", copy).result["variants"]
        == len(rows) - 1
    )
    assert "0 variants" in run("store", "stats", "--store", copy).stdout


def test_a_chunk_is_shown_and_evicted_by_how_its_id_begins(home: Path, cachecraft: Command) -> None:
    run = partial(cachecraft, cwd=home)
    copy = home / "short ids"
    shutil.copytree(home / "store", copy)
    chunk = run("store", "ls", "--json", "--store", copy).result[0]["variant"]["key"]["chunk_id"]
    assert run("store", "ls", "--store", copy).stdout.count(chunk[:8]) == 1
    assert "at least 4" in run("store", "evict", "--chunk", "", "--store", copy, code=2).stderr
    assert (
        run("store", "evict", "--chunk", chunk[:8], "--json", "--store", copy).result["variants"]
        == 1
    )
    assert not run("store", "ls", "--chunk", chunk, "--json", "--store", copy).result


def test_a_store_of_an_engine_of_one_s_own_can_be_looked_after(
    home: Path, cachecraft: Command
) -> None:
    whole = cachecraft("store", "stats", "--json", cwd=home).result
    assert (
        cachecraft("store", "stats", "--json", "--store", "store/caches", cwd=home).result == whole
    )


def test_a_remote_is_shown_and_a_wrong_one_is_an_error(home: Path, cachecraft: Command) -> None:
    run = partial(cachecraft, cwd=home)
    (home / "shared").mkdir(exist_ok=True)
    url = f"file://{home}/shared"
    assert (
        f"remote {url}: 0 variants, 0.0 MB of 21.5 GB"
        in run("store", "stats", "--remote", url).stdout
    )
    assert run("store", "stats", "--remote", url, "--json").result["remote"]["breaker"] == "closed"
    dead = run("store", "stats", "--remote", "redis://:secret@127.0.0.1:1/0")
    assert "remote redis://***@127.0.0.1:1/0: does not answer" in dead.stdout
    for command in (["store", "stats"], ["ask", QUESTION], ["chat"]):
        wrong = run(*command, "--remote", "http://me:secret@host", code=2)
        assert "write one such as redis://" in wrong.stderr
        assert "secret" not in wrong.stderr


def test_a_key_of_a_remote_comes_from_a_file_and_is_not_shown(
    home: Path, cachecraft: Command
) -> None:
    run = partial(cachecraft, cwd=home)
    (home / "signed").mkdir()
    (home / "short.key").write_text("hunter2")
    (home / "remote.key").write_text("a key of enough characters")
    remote = ("--remote", f"file://{home}/signed")
    wrong = run("store", "stats", *remote, "--remote-key-file", "short.key", code=2)
    assert "at least 16 characters" in wrong.stderr
    assert "hunter2" not in wrong.stderr
    assert "needs a remote" in run("ask", "?", "--remote-key-file", "remote.key", code=2).stderr
    shown = run("store", "stats", *remote, "--remote-key-file", "remote.key", "--json").stdout
    assert "enough characters" not in shown


def test_another_folder_is_served_through_a_remote(home: Path, cachecraft: Command) -> None:
    run = partial(cachecraft, cwd=home)
    (home / "shared").mkdir(exist_ok=True)
    url = f"file://{home}/shared"
    assert (
        run("index", "docs", "-s", "first", "--prime", "--remote", url, "--json").result["captured"]
        > 0
    )
    run("index", "docs", "-s", "second")
    answer = run(
        "ask", QUESTION, "-s", "second", "--remote", url, "--max-new-tokens", "2", "--json"
    ).result
    assert {chunk["tier"] for chunk in answer["stats"]["chunks"]} == {"remote"}


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["store", "ls"], "holds no chunk-caches"),
        (["store", "evict"], "say what to evict"),
        (["store", "evict", "--all", "--down-to-mb", "5"], "--all removes everything"),
        (["index", ".", "--alone"], "--alone has no effect without --prime"),
        (["sizes", "--tokens", "5", "--documents", "."], "give --tokens or --documents"),
        # too long stands for out of reach
        (["store", "check", "--store", "x" * 300], "holds no chunk-caches"),
        (["ask", "What?", "--store", "x" * 300], "holds no documents yet"),
        (["index", "nowhere"], "nowhere"),
        (["ask", "What?", "--codec", "sharp"], "--codec: codec unknown: 'sharp'. Choose one of"),
        (
            ["ask", "What?", "--disk-bytes", "5 stones"],
            'write bytes, or a number with a unit such as "50 GB"',
        ),
    ],
    ids=lambda value: value[-1][:20] if isinstance(value, list) else "",
)
def test_errors_say_what_to_do_and_leave_with_2(
    arguments: list[str], says: str, tmp_path: Path, cachecraft: Command
) -> None:
    done = cachecraft(*arguments, cwd=tmp_path, code=2)
    assert "error:" in done.stderr
    assert says in done.stderr
