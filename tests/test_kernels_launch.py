"""Every launcher sets the device of its tensors; read from the sources, because it takes two GPUs to see it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cachecraft_rag.kernels as kernels
from cachecraft_rag.kernels.gpu.launch import device_of

FOLDER = Path(kernels.__file__).parent / "gpu"


def launches(tree: ast.AST) -> list[ast.Call]:
    """Calls of the form `kernel[grid](…)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Subscript)]


@pytest.mark.parametrize("name", ["attention", "combine", "drift", "place", "received", "rope"])
def test_kernels_are_launched_on_the_device_of_their_tensors(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    guarded: list[ast.Call] = []
    for block in ast.walk(tree):
        if isinstance(block, ast.With) and ast.unparse(block.items[0].context_expr).startswith(
            "device_of("
        ):
            guarded += launches(block)
    assert launches(tree)
    assert {id(call) for call in launches(tree)} == {id(call) for call in guarded}


def test_a_tensor_on_a_gpu_gives_its_device() -> None:
    there: Any = SimpleNamespace(device=torch.device("cuda:1"))
    chosen = device_of(there)
    assert isinstance(chosen, torch.cuda.device)
    assert chosen.idx == 1
    with device_of(torch.zeros(1)) as nothing:
        assert nothing is None
