"""Every example in a docstring holds.

Run here, by import name: pytest's own --doctest-modules would import `kernels/` as the top-level package `kernels`.
"""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "cachecraft_rag": "cachecraft_rag",
    "kernels": "cachecraft_rag.kernels",
    "retrievers": "cachecraft_rag.retrievers",
}


def modules_with_examples() -> list[str]:
    """Import names of the modules that hold an example."""
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = path.read_text(encoding="utf-8").splitlines()
            if any(">>> " in line and "+SKIP" not in line for line in lines):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0
