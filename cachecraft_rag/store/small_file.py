"""Small files that are replaced as a whole."""

from __future__ import annotations

import uuid
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader sees the old content or the new, and of two writers one wins.

    Creates its folder if it is missing. The content is not synced, so a power cut may lose it. After an error the old
    content stays, and no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
