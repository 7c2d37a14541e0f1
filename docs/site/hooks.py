"""Hooks of mkdocs: what the site takes from outside `docs/`, and where mkdocstrings finds the package."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
EXAMPLES = [
    path
    for pattern in ("*.*", "applications/*.*")
    for path in sorted((ROOT / "examples").glob(pattern))
]


@event_priority(100)  # before mkdocstrings, which drops search paths that are not there yet
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Copy the package as it installs, because two of its folders lie beside it: docstrings are read, not imported."""
    tree = ROOT / "build" / "api"
    shutil.rmtree(tree, ignore_errors=True)
    for source, target in (
        ("cachecraft_rag", ""),
        ("kernels", "kernels"),
        ("retrievers", "retrievers"),
    ):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(
            ROOT / source, tree / "cachecraft_rag" / target, ignore=ignored, dirs_exist_ok=True
        )
    decisions = next(section["Decisions"] for section in config.nav or [] if "Decisions" in section)
    decisions += [f"decisions/{name}" for name in _records()]
    # griffe looks for a package in the current folder first, and in the root it would find half of it
    os.chdir(tree)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README and changelog as pages, and the examples that pages link to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_moved((ROOT / name).read_text("utf-8"))))
    files.append(File.generated(config, "reference/cli.md", content=_command_reference()))
    for example in EXAMPLES:
        files.append(
            File.generated(
                config,
                f"{example.relative_to(ROOT).as_posix()}.txt",
                abs_src_path=str(example),
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave `docs/` to the pages that `on_files` has added for their targets."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def moved(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        path = Path(os.path.normpath(folder / target))
        if (
            target.startswith("https:")
            or path.is_relative_to(ROOT / "docs")
            or not path.is_relative_to(ROOT)
        ):
            return link[0]
        name = path.relative_to(ROOT).as_posix()
        if name not in PAGES and path not in EXAMPLES:
            return link[0]
        # .txt: browsers show it instead of saving it
        inside = ROOT / "docs" / PAGES.get(name, f"{name}.txt")
        return f"]({os.path.relpath(inside, folder)}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", moved, markdown)


def _records() -> list[str]:
    """File names of the decision records, in the order in which their index links to them."""
    folder = ROOT / "docs" / "decisions"
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (folder / "index.md").read_text("utf-8"))
    present = [path.name for path in sorted(folder.glob("*.md")) if path.name != "index.md"]
    others = [name for name in present if name not in linked]
    return [name for name in dict.fromkeys(linked) if name in present] + others


def _command_reference() -> str:
    """The page that `commands.py` generates; that module is beside this file, which is no package."""
    spec = importlib.util.spec_from_file_location(
        "commands", ROOT / "docs" / "site" / "commands.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page: str = module.page()
    return page


def _moved(markdown: str) -> str:
    """A page of the root folder as a page of `docs/`."""
    return markdown.replace("](docs/", "](")
