"""The site of `make docs`: it builds without a warning, explains every public name, and loads nothing from outside."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag import EngineConfig, ReuseConfig, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = ("cachecraft_rag", "cachecraft_rag.llama_index", "cachecraft_rag.langchain")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", target]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return target


@pytest.mark.slow
def test_every_public_name_is_explained(site: Path) -> None:
    pages = [page.read_text() for page in (site / "reference").rglob("*.html")]
    explained = {
        anchor.split(".")[-1]
        for page in pages
        for anchor in re.findall(r'id="(cachecraft_rag\.[\w.]+)"', page)
    }
    for package in PUBLIC:
        names = importlib.import_module(package).__all__
        missing = [name for name in names if name not in explained]
        assert not missing, f"name them on a page of docs/reference/: {missing}"


@pytest.mark.slow
def test_fields_and_examples_are_readable(site: Path) -> None:
    settings = (site / "reference" / "settings.html").read_text()
    for config in (ReuseConfig, EngineConfig, SamplingParams):
        for field in dataclasses.fields(config):
            names = rf"(?:<code>\w+</code>, )*<code>{field.name}</code>(?:, <code>\w+</code>)*"
            description = re.search(rf"<li>\s*(?:<p>)?{names}: \S[^<]{{5,}}", settings)
            assert description, (
                f"{config.__name__}.{field.name} has no description in the list of fields"
            )
    assert "&gt;&gt;&gt;" in settings
    assert "<blockquote>" not in settings  # what Markdown makes of >>>


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 25
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=\"?([^\s\">]+)", text)
        loaded += re.findall(r"<link\b[^>]*?\bhref=\"?([^\s\">]+)", text)
        assert loaded
        assert 'class="mermaid"' not in text, (
            "the theme would load the drawing program from elsewhere"
        )
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style.name


def script(name: str) -> Any:
    """A script of `docs/site`, imported; that folder is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_page_of_errors_is_that_of_the_source() -> None:
    errors = script("errors")
    assert doctest.testmod(errors) == (0, 1)
    source = errors.SOURCE.read_text(encoding="utf-8")
    assert errors.PAGE.read_text(encoding="utf-8") == errors.page(source)
    assert "## WaitTimeoutError" in errors.page(source)


def test_an_outdated_page_of_errors_fails_the_lint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = script("errors")
    monkeypatch.setattr(errors, "PAGE", tmp_path / "errors.md")
    monkeypatch.setattr(sys, "argv", ["errors.py", "--check"])
    assert errors.main() == 1
    assert "run python docs/site/errors.py" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["errors.py"])
    assert errors.main() == 0
    monkeypatch.setattr(sys, "argv", ["errors.py", "--check"])
    assert errors.main() == 0


def test_a_long_docstring_line_that_occurs_twice_is_reported() -> None:
    repeated_lines = script("repeated_lines")
    assert doctest.testmod(repeated_lines).failed == 0
    line = "Raises StoreError if the catalog cannot be read, as all of these do."
    counts = repeated_lines.Docstrings()
    counts.add(f'class A:\n    """A class.\n\n    {line}\n    """\n', "a.py")
    assert counts.repeated() == {}
    counts.add(f'def f():\n    """{line}"""\n    return 1\n', "b.py")
    assert counts.repeated() == {line: ["a.py:4", "b.py:2"]}


def test_an_interface_without_a_body_may_have_a_long_docstring() -> None:
    counts = script("repeated_lines").Docstrings()
    counts.add('def f():\n    """First.\n\n    Second.\n    """\n', "a.py")
    assert counts.longer == 0


def test_the_extension_for_docstrings() -> None:
    module = script("docstrings")
    assert doctest.testmod(module) == (0, 1)
    assert module.as_markdown(">>> 1 + 1\n2") == "```pycon\n>>> 1 + 1\n2\n```"
    shared = "Args:\n    model, store: what `open`\n        takes.\n    k: how many."
    assert module.as_markdown(shared) == (
        "Args:\n    model: what `open`\n        takes.\n    store: what `open`\n        takes.\n    k: how many."
    )
