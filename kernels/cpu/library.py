"""The compiled kernels: loaded, chosen by the CPU's instructions, and checked against float64 before the first use.

They are built when the package is installed, if there is a compiler (`kernels/cpu/kernels.c`). Without them, or with
`CACHECRAFT_CPU_KERNELS=torch`, torch computes the same. The variable may also name one set of instructions, to measure
it.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("cachecraft_rag")

SETTING = "CACHECRAFT_CPU_KERNELS"
# in the order of the bits of `cachecraft_runs`
INSTRUCTIONS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
_DTYPES = frozenset({torch.float32, torch.bfloat16})
_FUNCTIONS = ("rotate", "place", "drift", "attend", "mass", "norm", "gated", "linear", "layer")


@dataclass(frozen=True)
class Kernels:
    """The functions of one set of instructions, by the names in `body.h`."""

    instructions: str
    functions: dict[str, ctypes._NamedFuncPointer]

    def __call__(self, name: str, *args: object) -> None:
        """Run a function by name; other Python threads run meanwhile. Raises KeyError for an unknown name."""
        self.functions[name](*args)


def kernels() -> Kernels | None:
    """Return the kernels that this process uses, loaded and checked at the first call; None = torch's."""
    return _chosen(os.environ.get(SETTING, ""))[0]


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """Return the kernels if they support these tensors, else None.

    Supported are CPU tensors of one dtype, float32 or bfloat16, with a contiguous last dimension.
    """
    first = tensors[0]
    if first.dtype not in _DTYPES or not first.is_cpu:
        return None
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.stride(-1) != 1 or not tensor.is_cpu:
            return None
    return kernels()


def description() -> str:
    """Return the name of the kernels in use: one of `INSTRUCTIONS`, or "torch". Loads them first, as `kernels` does."""
    chosen = kernels()
    return chosen.instructions if chosen is not None else "torch"


def reason() -> str:
    """Return why torch's kernels are used, in a few words; "" if the compiled ones are. Loads them first, too."""
    return _chosen(os.environ.get(SETTING, ""))[1]


@cache
def available(folder: Path = Path(__file__).parent) -> dict[str, Kernels]:
    """Return the compiled kernels that this CPU can run, by instructions, the fastest last; empty if there are none.

    They are those of the first library in `folder` that can be loaded. The result is kept for the process, so do not
    change it.
    """
    for path in sorted(
        [*folder.glob("native*.so"), *folder.glob("native*.pyd"), *folder.glob("native*.dylib")]
    ):
        try:
            library = ctypes.CDLL(str(path))
            library.cachecraft_start(_parallel())
            library.cachecraft_runs.restype = ctypes.c_long
            runs = library.cachecraft_runs()
            names = [name for bit, name in enumerate(INSTRUCTIONS) if runs >> bit & 1]
            return {
                name: Kernels(name, {part: library[f"{part}_{name}"] for part in _FUNCTIONS})
                for name in names
            }
        except (OSError, AttributeError) as error:  # built for a different machine or version
            logger.debug("%s cannot be used: %s", path, error)
    return {}


def _parallel() -> ctypes.c_void_p:
    """Return the entry point of torch's OpenMP threads; 0 if torch has others, then the kernels run on one thread."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except (AttributeError, OSError, TypeError):
        return ctypes.c_void_p(0)


@cache
def _chosen(setting: str) -> tuple[Kernels | None, str]:
    """Return the kernels for a value of the setting, or None with the reason."""
    if setting == "torch":
        return None, f"{SETTING}=torch"
    built = available()
    if not built:
        return None, "not compiled when the package was installed"
    if setting and setting not in built:
        logger.warning("%s=%s is not among %s", SETTING, setting, ", ".join(["torch", *built]))
    chosen = built.get(setting) or list(built.values())[-1]
    from cachecraft_rag.kernels.cpu.calls import differs

    difference = differs(chosen)
    if difference:
        logger.warning(
            "The compiled kernels (%s) are not used: %s", chosen.instructions, difference
        )
        return None, difference
    return chosen, ""
