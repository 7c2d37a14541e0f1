"""The tests of the compiled kernels once more, with kernels that gcc's address sanitizer watches.

`pytest tests/test_kernels_sanitized.py` runs them all; a read or write outside a tensor ends the process with a report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/test_kernels_cpu.py", "tests/engine/test_fused_layers.py")
FLAGS = ("-shared", "-fPIC", "-O1", "-g", "-Wno-psabi", "-fsanitize=address", "-fno-omit-frame-pointer")
RUN = """
import sys
from pathlib import Path
import pytest
from cachecraft_rag.kernels.cpu import library
look = library.available
watched = look(Path(sys.argv[1]))
assert watched, "the watched kernels cannot be loaded"
library.available = lambda *folder: look(*folder) if folder else watched
sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def sanitizer() -> str:
    """Path of the sanitizer's library; "" without gcc or without the library."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        return ""
    asked = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return asked.stdout.strip() if Path(asked.stdout.strip()).is_file() else ""


def run_watched(folder: Path, source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Compile the kernels into `folder`, and run pytest with them."""
    library = str(folder / "native.so")
    subprocess.run(["gcc", *FLAGS, f"-I{ROOT / 'kernels/cpu'}", str(source), "-o", library, "-lm"], check=True)
    settings = {"LD_PRELOAD": sanitizer(), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-c", RUN, str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(not sanitizer(), reason="needs gcc and its address sanitizer")
def test_no_kernel_touches_memory_that_is_not_its_own(tmp_path: Path) -> None:
    done = run_watched(tmp_path, ROOT / "kernels/cpu/kernels.c", *TESTS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not sanitizer(), reason="needs gcc and its address sanitizer")
def test_a_kernel_that_does_is_noticed(tmp_path: Path) -> None:
    text = (ROOT / "kernels/cpu/moves.h").read_text(encoding="utf-8")
    right = "(size_t)(row * size));"
    assert text.count(right) == 1
    (tmp_path / "moves.h").write_text(text.replace(right, "(size_t)(row * size) + 64);"), encoding="utf-8")
    for name in ("kernels.c", "body.h"):  # a quoted include is looked for beside its file first
        shutil.copy(ROOT / "kernels/cpu" / name, tmp_path)
    done = run_watched(tmp_path, tmp_path / "kernels.c", TESTS[0], "-k", "rotated_into_its_place")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
