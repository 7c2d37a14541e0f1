"""The choice of an attention path by measuring, and the file it is kept in."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cachecraft_rag.kernels.attention_paths import PATHS, AttentionPath, AttentionPaths, paths_for
from cachecraft_rag.model import attention_choice
from cachecraft_rag.model.attention_choice import FILE_NAME, machine_key, measured_paths

HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 8}


class SlowPaths:
    """A clock that moves by what each path is said to take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.now, self.runs = 0.0, 0
        run = attention_choice.attend

        def attend(*args: object, **named: object) -> object:
            (path,) = (one for one in args if isinstance(one, AttentionPath))
            (name,) = (name for name, one in PATHS.items() if one is path)
            self.now += seconds.get(name, 10.0)
            self.runs += 1
            return run(*args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(attention_choice, "attend", attend)

    def __call__(self) -> float:
        return self.now


def choose(
    folder: Path, clock: Callable[[], float], dtype: torch.dtype = torch.float32
) -> AttentionPaths:
    return measured_paths(dtype, **HEADS, folder=folder, clock=clock)


def test_the_fastest_is_taken_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowPaths(monkeypatch, {"folded blocks of 288": 1.0})
    found = choose(tmp_path, clock)
    assert set(found.names.values()) == {"folded blocks of 288"}
    runs = clock.runs
    assert choose(tmp_path, clock) == found
    assert clock.runs == runs  # nothing is measured again
    choose(tmp_path, clock, torch.bfloat16)
    assert clock.runs == 2 * runs
    assert len(json.loads((tmp_path / FILE_NAME).read_text())) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / FILE_NAME]


def test_a_path_that_is_hardly_faster_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = choose(tmp_path, SlowPaths(monkeypatch, {"folded blocks of 288": 9.6}))
    assert found.names == {shape: paths_for(shape)[0] for shape in ("few", "some", "front")}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"KEY": {"few": "blocks"}}', '{"KEY": 3}', "[" * 100_000],
    ids=lambda content: content[:30],
)
def test_a_damaged_file_is_measured_again(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = machine_key(torch.float32, **HEADS)
    (tmp_path / FILE_NAME).write_text(content.replace("KEY", key))
    clock = SlowPaths(monkeypatch, {"products": 1.0})
    assert choose(tmp_path, clock).names["some"] == "products"
    assert json.loads((tmp_path / FILE_NAME).read_text())[key]["some"] == "products"


def test_a_path_unknown_to_this_version_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = machine_key(torch.float32, **HEADS)
    kept = {"few": "blocks", "some": "a newer one", "front": "causal"}
    (tmp_path / FILE_NAME).write_text(json.dumps({key: kept}))
    assert choose(tmp_path, SlowPaths(monkeypatch, {})).names["some"] == "blocks"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    clock = itertools.count()
    assert choose(tmp_path / "file" / "folder", lambda: float(next(clock))).names["front"] in PATHS


def test_a_choice_holds_for_one_machine_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [machine_key(torch.float32, **HEADS), machine_key(torch.bfloat16, **HEADS)]
    keys.append(machine_key(torch.float32, **(HEADS | {"head_dim": 16})))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    keys.append(machine_key(torch.float32, **HEADS))
    assert len(set(keys)) == len(keys)
