"""The plugin that vLLM loads in each of its processes, also in a plain `vllm serve`; needs no vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOADS = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from cachecraft_rag.vllm.plugin import register
register()
register()
print(sorted(name for name in sys.modules if name.startswith("vllm.")))
"""


def load(folder: Path, version: str, registry: str) -> subprocess.CompletedProcess[str]:
    """Load the plugin in a process whose vLLM has this version and these sources."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n{registry}\n")
    # `-P` and a separate path: a real vLLM must not be found first
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{LOADS}"
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "0.3", "dev"])
def test_an_unknown_version_is_left_alone(version: str, tmp_path: Path) -> None:
    fails = "def __getattr__(name): raise RuntimeError('this version has moved ' + name)"
    done = load(tmp_path, version, fails)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    says = f"INFO vLLM {version} is unknown to this package, so nothing is registered"
    assert set(done.stderr.splitlines()) == {says}


def test_a_known_version_that_differs_is_reported_and_goes_on(tmp_path: Path) -> None:
    fails = "class ModelRegistry:\n    def register_model(*_): raise RuntimeError('changed')"
    done = load(tmp_path, "0.33.9", fails)
    assert done.returncode == 0, done.stderr
    assert "ERROR Registering with vLLM 0.33.9 failed: chunk-caches cannot be used" in done.stderr
