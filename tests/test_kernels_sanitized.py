"""The tests of the compiled kernels once more, with kernels compiled for them.

With AMX emulated in C (`emulated_amx.h`), so that its kernels run on any CPU that has AVX-512 with bfloat16; then with
gcc's address sanitizer besides: a read or write outside a tensor ends the process with a report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cachecraft_rag.kernels.cpu.library import available

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/test_kernels_cpu.py", "tests/model/test_fused_layers.py")
FLAGS = ("-shared", "-fPIC", "-O1", "-g", "-Wno-psabi", f"-I{ROOT / 'kernels/cpu'}")
EMULATED = ("-include", str(ROOT / "tests/emulated_amx.h"))
WATCHED = (*EMULATED, "-fsanitize=address", "-fno-omit-frame-pointer")
RUN = """
import ctypes, sys, threading
from pathlib import Path
import pytest, torch
from cachecraft_rag.kernels.cpu import calls, library
look, kept = library.available, {}
compiled = look(Path(sys.argv[1]))
assert compiled, "the kernels cannot be loaded"
def exact(nbytes, use):  # in place of memory that is used again, and larger than needed
    kept[threading.get_ident(), use] = fresh = torch.empty(nbytes, dtype=torch.uint8)
    return fresh.data_ptr()
library.available, calls._scratch = lambda *folder: look(*folder) if folder else compiled, exact
done = pytest.main(["-q", "-s", "-p", "no:cacheprovider", *sys.argv[2:]])
if "amx" in compiled:
    counts = ctypes.CDLL(str(next(Path(sys.argv[1]).glob("native.*"))))
    assert ctypes.c_long.in_dll(counts, "emulated_configured").value == 0, "a thread still has tiles"
    print(ctypes.c_long.in_dll(counts, "emulated_products").value, "products of tiles")
sys.exit(done)
"""
needs_gcc = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="compiles the kernels with gcc"
)
needs_pairs = pytest.mark.skipif(
    "avx512_bf16" not in available(), reason="the CPU has no AVX-512 with bfloat16"
)


def sanitizer() -> str:
    """Path of the sanitizer's library; "" without gcc or without the library."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        return ""
    asked = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    return asked.stdout.strip() if Path(asked.stdout.strip()).is_file() else ""


needs_sanitizer = pytest.mark.skipif(not sanitizer(), reason="needs gcc and its address sanitizer")


def build(folder: Path, *flags: str, source: Path = ROOT / "kernels/cpu/kernels.c") -> None:
    """Compile the kernels into `folder`."""
    command = ["gcc", *FLAGS, *flags, str(source), "-o", str(folder / "native.so"), "-lm"]
    subprocess.run(command, check=True)


def run(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the kernels in `folder`."""
    command = [sys.executable, "-c", RUN, str(folder), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True
    )


def run_watched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(folder, *arguments, LD_PRELOAD=sanitizer(), ASAN_OPTIONS="detect_leaks=0")


@needs_gcc
@needs_pairs
def test_kernels_for_amx_in_emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, *EMULATED)
    done = run(tmp_path, TESTS[0], "-k", "amx")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert int(done.stdout.split(" products of tiles")[0].splitlines()[-1]) > 0
    assert list(available(tmp_path))[-1] == "amx"
    (tmp_path / "refused").mkdir()
    shutil.copy(tmp_path / "native.so", tmp_path / "refused")
    monkeypatch.setenv("EMULATED_AMX", "refused")
    assert list(available(tmp_path / "refused"))[-1] == "avx512_bf16"


@pytest.mark.slow
@needs_sanitizer
def test_no_kernel_touches_memory_that_is_not_its_own(tmp_path: Path) -> None:
    build(tmp_path, *WATCHED)
    done = run_watched(tmp_path, *TESTS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize(
    ("header", "right", "wrong", "test"),
    [
        (
            "moves.h",
            "(size_t)(row * size));",
            "(size_t)(row * size) + 64);",
            "rotated_into_its_place",
        ),
        (
            "attention.h",
            "long i = 0; i < rows * hidden;",
            "long i = 0; i <= rows * hidden;",
            "layers_are_the_models_own",
        ),
    ],
)
def test_a_kernel_that_does_is_noticed(
    tmp_path: Path, header: str, right: str, wrong: str, test: str
) -> None:
    text = (ROOT / "kernels/cpu" / header).read_text(encoding="utf-8")
    assert text.count(right) == 1
    (tmp_path / header).write_text(text.replace(right, wrong), encoding="utf-8")
    for name in ("kernels.c", "body.h"):  # a quoted include is looked for beside its file first
        shutil.copy(ROOT / "kernels/cpu" / name, tmp_path)
    build(tmp_path, *WATCHED, source=tmp_path / "kernels.c")
    done = run_watched(tmp_path, *TESTS, "-k", test)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
