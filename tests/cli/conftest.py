"""The `cachecraft` command in this process, and a folder with a tiny model and two indexed pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

PAGES = {
    "returns.md": "You have 30 days to return an appliance.",
    "warranty.md": "The warranty lasts 3 years.",
}
# Layer by layer, because cake rightly computes what a tiny model computes faster than the disk delivers.
TOML = 'model = "model"\nstore = "store"\n\n[method]\nloading = "layerwise"\n'


@dataclass(frozen=True)
class Done:
    """Output of a command that has ended."""

    stdout: str
    stderr: str

    @property
    def result(self) -> Any:
        """The object on the last line of stdout."""
        return json.loads(self.stdout.strip().splitlines()[-1])


Command = Callable[..., Done]


@pytest.fixture(scope="session")
def cachecraft() -> Command:
    """Runs a command as its process would, exit code included: `cachecraft("ask", "Why?", cwd=folder, code=0)`."""
    from cachecraft_rag.cli import main

    def run(*arguments: str | Path, cwd: Path, code: int = 0, typed: str = "") -> Done:
        out, err = StringIO(), StringIO()
        typing = mock.patch.object(sys, "stdin", StringIO(typed))
        command = mock.patch.object(sys, "argv", ["cachecraft", *map(str, arguments)])
        left: Any = None
        with typing, command, chdir(cwd), redirect_stdout(out), redirect_stderr(err):
            try:
                main()
            except SystemExit as leaving:
                left = leaving.code
        assert (left or 0) == code, f"{left}\n{out.getvalue()}\n{err.getvalue()}"
        return Done(out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="module")
def empty_home(
    tiny_decoder: Callable[..., Decoder],
    tmp_path_factory: pytest.TempPathFactory,
    cachecraft: Command,
) -> Path:
    """A folder with a tiny model, two pages, and trusted settings that name model and store."""
    folder = tmp_path_factory.mktemp("home")
    decoder = tiny_decoder("Llama", max_position_embeddings=8192)
    decoder.model.save_pretrained(folder / "model")
    decoder.tokenizer.save_pretrained(folder / "model")
    (folder / "cachecraft.toml").write_text(TOML)
    cachecraft("trust", cwd=folder)
    (folder / "docs").mkdir()
    for name, text in PAGES.items():
        (folder / "docs" / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def home(empty_home: Path, cachecraft: Command, as_loud_as_before: Iterator[None]) -> Path:
    """The same, indexed and primed by the command."""
    report = cachecraft("index", "docs", "--prime", "--json", cwd=empty_home).result
    assert sorted(report["added"]) == ["docs/returns.md", "docs/warranty.md"]
    assert (
        report["captured"]
        == report["estimate"]["captures"]
        == len(PAGES) + 1
        == report["chunks_embedded"] + 1
    )
    return empty_home
