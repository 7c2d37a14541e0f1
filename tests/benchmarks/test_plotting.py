"""Figures: what is missing or cannot be written is said with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.plotting import pyplot, save
from cachecraft_rag.errors import ConfigError


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'cachecraft-rag\[bench\]'"):
        pyplot()


def test_a_figure_is_written_and_closed(tmp_path: Path) -> None:
    plots = pyplot()
    figure, _ = plots.subplots()
    save(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert figure.number not in plots.get_fignums()


@pytest.mark.parametrize("name", ["missing/figure.png", "figure.of-no-format"])
def test_a_figure_that_cannot_be_written_is_refused_and_closed(tmp_path: Path, name: str) -> None:
    plots = pyplot()
    figure, _ = plots.subplots()
    with pytest.raises(ConfigError, match="cannot be written"):
        save(figure, tmp_path / name)
    assert figure.number not in plots.get_fignums()
