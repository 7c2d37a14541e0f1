"""The two papers, figure by figure: `papers.toml` beside this module says what is run and what came of it.

docs/results/papers.md holds the same in sentences; `python -m benchmarks papers --markdown` prints its sections.
Commands are those of this package and of `cachecraft`; nothing is measured here.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.table import Table

from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json
from cachecraft_rag.errors import ConfigError

Verdict = Literal[
    "holds",
    "partly",
    "does not hold",
    "not measured as defined",
    "not comparable",
    "not measurable",
    "structure",
]
_PAPERS = {"cache-craft": "Cache-Craft", "cake": "Cake"}
_PROGRAMS = {  # first word of a command → how Python runs it
    "benchmarks": ("-m", "benchmarks"),
    "benchmarks.server": ("-m", "benchmarks.server"),
    "cachecraft": ("-c", "from cachecraft_rag.cli import main; main()"),
}


@dataclass(frozen=True, slots=True)
class Command:
    """What measures one or several figures; the fields are explained in papers.toml."""

    name: str
    run: str
    minutes: float
    smoke: str | None = None
    needs: str = ""

    def arguments(self, places: Mapping[str, str]) -> list[str] | None:
        """Its words, with `{data}` and so on filled in; None where one of these is not given.

        >>> Command("simulate", "benchmarks simulate {trace}", 1).arguments({"trace": "uses of mine.jsonl"})
        ['cachecraft', 'simulate', 'uses of mine.jsonl']
        >>> Command("simulate", "benchmarks simulate {trace}", 1).arguments({})
        """
        try:
            return [word.format_map(places) for word in shlex.split(self.run)]
        except KeyError:
            return None


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure, table or algorithm of a paper; the fields are explained in papers.toml."""

    id: str
    title: str
    verdict: Verdict
    shows: str = ""
    commands: tuple[str, ...] = ()
    measured: str = ""
    setup: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        """Name as the paper prints it.

        >>> Entry("cake/fig5", "TTFT", "partly").name, Entry("cake/algorithm1", "Loading", "holds").name
        ('Figure 5', 'Algorithm 1')
        """
        label = self.id.partition("/")[2]
        kind = label.rstrip("0123456789")
        title = "Figure" if kind == "fig" else kind.capitalize()
        return f"{title} {label.removeprefix(kind)}"


@cache
def registry() -> tuple[dict[str, Command], tuple[Entry, ...]]:
    """The commands by name, and the entries in the papers' order."""
    read = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    commands = {name: Command(name, **fields) for name, fields in read["commands"].items()}
    entries = tuple(
        Entry(**{**fields, "commands": tuple(fields.get("commands", ()))})
        for fields in read["entries"]
    )
    for entry in entries:
        unknown = [name for name in entry.commands if name not in commands]
        if entry.verdict not in get_args(Verdict) or unknown:
            raise ConfigError(
                f"papers.toml, {entry.id}: unknown verdict {entry.verdict!r} or commands {unknown}"
            )
    return commands, entries


def markdown() -> str:
    """Return the sections of docs/results/papers.md: an overview and the figures of each paper."""
    parts = []
    for paper, title in _PAPERS.items():
        entries = [entry for entry in registry()[1] if entry.id.startswith(f"{paper}/")]
        measured = [entry for entry in entries if entry.verdict != "structure"]
        diagrams = ", ".join(entry.name for entry in entries if entry.verdict == "structure")
        rows = [f"| {entry.name} | {entry.title} | {entry.verdict} |" for entry in measured]
        overview = "\n".join(["| figure | subject | verdict |", "| --- | --- | --- |", *rows])
        about = f"Diagrams of what is built, with nothing to measure: {diagrams}."
        parts += [f"## {title}", overview, about, *(_section(entry, title) for entry in measured)]
    return "\n\n".join(parts) + "\n"


def _section(entry: Entry, paper: str) -> str:
    """Return a heading and a paragraph for each of: the paper's statement, our measurement, verdict, commands."""
    here = f"{entry.measured} ({entry.setup}.)" if entry.setup else entry.measured
    lines = [f"### {paper}, {entry.name}: {entry.title}", f"**The paper.** {entry.shows}"]
    if here:
        lines.append(f"**Measured here.** {here}")
    lines.append(f"**Verdict: {entry.verdict}.** {entry.reason}")
    if entry.commands:
        names = ", ".join(f"`{name}`" for name in entry.commands)
        lines.append(f"Command: {names}.")
    return "\n\n".join(lines)


def run(
    commands: Sequence[Command],
    places: Mapping[str, str],
    folder: Path,
    *,
    seconds: float = float("inf"),
) -> dict[str, str]:
    """Run the commands that fit into the time and have not run in this folder yet; the name and outcome of each.

    What a command prints goes to `folder`/NAME.txt. It gets the folder `folder`/NAME for what it keeps, and many
    commands resume from there. The estimates of papers.toml decide what fits.
    """
    outcomes: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + seconds
    for command in sorted(commands, key=lambda command: command.minutes):
        words = command.arguments({**places, "out": str(folder / command.name)})
        report = folder / f"{command.name}.txt"
        if report.exists():
            outcomes[command.name] = "done before"
        elif words is None:
            outcomes[command.name] = "left out: a file it reads is not given"
        elif time.monotonic() + 60 * command.minutes > ends:
            outcomes[command.name] = f"left out: it takes about {command.minutes:g} minutes"
        else:
            outcomes[command.name] = _run(words, report)
    return outcomes


def _run(words: Sequence[str], report: Path) -> str:
    program, *arguments = words
    unfinished = report.with_suffix(".part")
    with unfinished.open("w", encoding="utf-8") as printed:
        done = subprocess.run([sys.executable, *_PROGRAMS[program], *arguments], stdout=printed)
    if done.returncode != 0:
        return f"failed with exit code {done.returncode}; what it printed is in {unfinished}"
    unfinished.rename(report)
    return f"printed to {report}"


def chosen(names: Sequence[str]) -> list[Command]:
    """The commands of these entries or with these names; all for none.

    Raises:
        ConfigError: a name is neither, or nothing can be run for it.
    """
    commands, entries = registry()
    of = {entry.id: entry.commands for entry in entries} | {name: (name,) for name in commands}
    for name in names:
        if not of.get(name):
            why = "nothing can be run for it" if name in of else f"choose one of {', '.join(of)}"
            raise ConfigError(f"{name}: {why}")
    wanted = dict.fromkeys(command for name in names for command in of[name]) if names else commands
    return [commands[name] for name in wanted]


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Figures (cache-craft/fig12) or commands (premises) to run."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes", min=0.0, help="Run what fits into this time, the shortest first."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", "-d", help="File of questions, as for `eval`.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="File of requests, as for `python -m benchmarks simulate`."),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option("--tasks", help="File of MT-RAG's generation tasks, as for `tokens`."),
    ] = None,
    multi_hop: Annotated[
        Path | None,
        typer.Option("--multi-hop", help="File of multi-hop questions, such as MuSiQue's."),
    ] = None,
    summaries: Annotated[
        Path | None,
        typer.Option("--summaries", help="File of questions whose answers are summaries."),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder of the reports; what is there is not run again."),
    ] = Path("cachecraft-papers"),
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the sections of docs/results/papers.md.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the papers' figures with our verdicts, or run their commands."""
    if as_markdown:
        typer.echo(markdown(), nl=False)
        return
    if names or minutes is not None:
        files = {
            "data": data,
            "trace": trace,
            "tasks": tasks,
            "multi_hop": multi_hop,
            "summaries": summaries,
        }
        places = {name: str(path) for name, path in files.items() if path is not None}
        seconds = float("inf") if minutes is None else 60 * minutes
        outcomes = run(chosen(names or ()), places, folder, seconds=seconds)
        if as_json:
            print_json(outcomes)
        else:
            for name, outcome in outcomes.items():
                out.print(f"{name}: {outcome}", highlight=False)
        if any(outcome.startswith("failed") for outcome in outcomes.values()):
            raise typer.Exit(1)
        return
    commands, entries = registry()
    if as_json:
        print_json(
            {
                "commands": [asdict(command) for command in commands.values()],
                "entries": [asdict(entry) for entry in entries],
            }
        )
        return
    table = Table("figure", "subject", "verdict", "commands", "minutes")
    for entry in entries:
        minutes = sum(commands[name].minutes for name in entry.commands)
        shown = f"{minutes:g}" if minutes else ""
        table.add_row(entry.id, entry.title, entry.verdict, ", ".join(entry.commands), shown)
    out.print(table)
