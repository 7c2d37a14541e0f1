"""Small files are replaced as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachecraft_rag.store.small_file import replace_file


def test_the_folder_is_made_and_the_old_content_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    replace_file(path, b"first, and longer")
    replace_file(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    replace_file(path, b"old")

    def half_written(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half_written)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
