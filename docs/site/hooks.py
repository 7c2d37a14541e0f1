"""Hooks of mkdocs: what the site takes from outside `docs/`, and where mkdocstrings finds the package."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Copy the package as it installs, because two of its folders lie beside it: docstrings are read, not imported."""
    tree = ROOT / "build" / "api"
    shutil.rmtree(tree, ignore_errors=True)
    for source, target in (("cachecraft_rag", ""), ("kernels", "kernels"), ("retrievers", "retrievers")):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / source, tree / "cachecraft_rag" / target, ignore=ignored, dirs_exist_ok=True)
    os.chdir(tree)  # griffe looks for a package in the current folder first, and in the root it would find half of it
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README and changelog as pages, and the examples that pages link to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_moved((ROOT / name).read_text("utf-8"))))
    for example in sorted((ROOT / "examples").glob("*.*")):
        files.append(File.generated(config, f"examples/{example.name}.txt", abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave `docs/` to where `on_files` has put their targets."""
    for name, target in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}")
    return re.sub(r"\]\((?:\.\./)?(examples/\w+\.\w+)\)", r"](\1.txt)", markdown)  # .txt: browsers show it


def _moved(markdown: str) -> str:
    """A page of the root folder as a page of `docs/`."""
    return markdown.replace("](docs/", "](")
