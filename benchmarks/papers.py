"""The two papers, figure by figure: `papers.toml` beside this module says what is run and what came of it.

docs/results/papers.md holds the same in sentences. Commands are those of this package and of `cachecraft`; nothing is
measured here.
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
from cachecraft_rag.cli.options import out, print_json
from cachecraft_rag.errors import ConfigError

Verdict = Literal["holds", "partly", "does not", "not measurable", "structure", "not measured"]
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

        >>> Command("simulate", "cachecraft simulate {trace}", 1).arguments({"trace": "uses of mine.jsonl"})
        ['cachecraft', 'simulate', 'uses of mine.jsonl']
        >>> Command("simulate", "cachecraft simulate {trace}", 1).arguments({})
        """
        try:
            return [word.format_map(places) for word in shlex.split(self.run)]
        except KeyError:
            return None


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure, table or algorithm of a paper; the fields are explained in papers.toml."""

    id: str
    shows: str
    verdict: Verdict
    command: str = ""
    ours: str = ""
    n: str = ""
    when: str = ""


@cache
def registry() -> tuple[dict[str, Command], tuple[Entry, ...]]:
    """The commands by name, and the entries in the papers' order."""
    read = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    commands = {name: Command(name, **fields) for name, fields in read["commands"].items()}
    entries = tuple(Entry(**fields) for fields in read["entries"])
    for one in entries:
        if one.verdict not in get_args(Verdict) or one.command not in ("", *commands):
            raise ConfigError(f"papers.toml, {one.id}: unknown verdict {one.verdict!r} or command {one.command!r}")
    return commands, entries


def markdown() -> str:
    """The tables of docs/results/papers.md, one for each paper; diagrams of what is built share a row."""
    parts = []
    for paper, title in (("cache-craft", "Cache-Craft"), ("cake", "Cake")):
        entries = [one for one in registry()[1] if one.id.startswith(f"{paper}/")]
        rows = [f"## {title}\n", "| | shows | here | verdict |", "| --- | --- | --- | --- |"]
        for one in entries:
            if one.verdict != "structure":
                seen = "; ".join(part for part in (one.n, one.when) if part)
                here = f"{one.ours} ({seen})" if seen else one.ours
                rows.append(f"| {_place(one)} | {one.shows} | {here} | {one.verdict} |")
        structure = ", ".join(_place(one) for one in entries if one.verdict == "structure")
        parts.append("\n".join([*rows, f"| {structure} | diagrams | | built so |"]))
    return "\n\n".join(parts) + "\n"


def _place(one: Entry) -> str:
    return one.id.partition("/")[2]


def run(
    commands: Sequence[Command], places: Mapping[str, str], folder: Path, *, seconds: float = float("inf")
) -> dict[str, str]:
    """Run the commands that fit into the time and have not run in this folder yet; the name and outcome of each.

    What a command prints goes to `folder`/NAME.txt. It gets the folder `folder`/NAME for what it keeps, and many
    commands resume from there. The estimates of papers.toml decide what fits.
    """
    outcomes: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + seconds
    for one in sorted(commands, key=lambda one: one.minutes):
        words = one.arguments({**places, "out": str(folder / one.name)})
        report = folder / f"{one.name}.txt"
        if report.exists():
            outcomes[one.name] = "done before"
        elif words is None:
            outcomes[one.name] = "left out: a file it reads is not given"
        elif time.monotonic() + 60 * one.minutes > ends:
            outcomes[one.name] = f"left out: it takes about {one.minutes:g} minutes"
        else:
            outcomes[one.name] = _run(words, report)
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
    of = {one.id: one.command for one in entries} | {name: name for name in commands}
    for name in names:
        if not of.get(name):
            why = "nothing can be run for it" if name in of else f"choose one of {', '.join(of)}"
            raise ConfigError(f"{name}: {why}")
    wanted = dict.fromkeys(of[name] for name in names) if names else commands
    return [commands[name] for name in wanted]


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Figures (cache-craft/fig12) or commands (premises) to run.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.0, help="Run what fits into this time, the shortest first.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", "-d", help="File of questions, as for `eval`.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="File of requests, as for `cachecraft simulate`.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the reports; what is there is not run again.")
    ] = Path("cachecraft-papers"),
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/results/papers.md.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the papers' figures with our verdicts, or run their commands."""
    if as_markdown:
        typer.echo(markdown(), nl=False)
        return
    if names or minutes is not None:
        places = {name: str(path) for name, path in (("data", data), ("trace", trace)) if path is not None}
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
            {"commands": [asdict(one) for one in commands.values()], "entries": [asdict(one) for one in entries]}
        )
        return
    table = Table("figure", "shows", "verdict", "command", "minutes")
    for one in entries:
        ran = commands.get(one.command)
        table.add_row(one.id, one.shows, one.verdict, one.command, f"{ran.minutes:g}" if ran else "")
    out.print(table)
