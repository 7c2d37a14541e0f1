"""Build `cachecraft-rag-client`: the package `cachecraft_rag` without torch among its requirements."""

import os
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("haystack", "langchain", "llama-index", "retrieval")
NEED_TORCH = ("torch", "sentence-transformers")

DESCRIPTION = """
The client of cachecraft-rag: asks a server that `cachecraft serve` started, in Python, Haystack, LangChain or
LlamaIndex. It has the modules of `cachecraft-rag` without its requirement torch; install one of the two, not both.
"""


def version() -> str:
    """Return the version of the package, from its source text."""
    lines = (ROOT / "cachecraft_rag" / "__init__.py").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("__version__"))
    return line.split('"')[1]


def folder_of(package: str, places: dict[str, str]) -> str:
    """Return the folder of a package, relative to `client`: below its nearest parent in `places`, KeyError if none."""
    parents = package.split(".")
    for length in range(len(parents), 0, -1):
        place = places.get(".".join(parents[:length]))
        if place is not None:
            return os.path.join("..", place, *parents[length:])
    raise KeyError(package)


def without_torch(requirements: list[str]) -> list[str]:
    """Return the requirements without those whose names begin as one of `NEED_TORCH`."""
    return [line for line in requirements if not line.startswith(NEED_TORCH)]


with (ROOT / "pyproject.toml").open("rb") as file:
    config = tomllib.load(file)
project = config["project"]
layout = config["tool"]["setuptools"]
names = layout["packages"]

setup(
    name="cachecraft-rag-client",
    version=version(),
    description="The client of cachecraft-rag: questions and documents to a server that reuses chunk-caches",
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    license_expression=project["license"],
    python_requires=project["requires-python"],
    install_requires=without_torch(project["dependencies"]),
    extras_require={name: without_torch(project["optional-dependencies"][name]) for name in EXTRAS},
    packages=names,
    package_dir={name: folder_of(name, layout["package-dir"]) for name in names},
    package_data=layout["package-data"],
    exclude_package_data=layout["exclude-package-data"],
    entry_points={
        "console_scripts": [f"{key} = {value}" for key, value in project["scripts"].items()]
    },
)
