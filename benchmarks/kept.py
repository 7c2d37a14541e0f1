"""Measured parts that a stopped experiment does not measure again: one JSON line each, written at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachecraft_rag.errors import ConfigError


@dataclass
class Kept:
    """Parts by name in a file whose first line says what they depend on.

    Raises:
        ConfigError: the file was written with other settings.
    """

    path: Path
    settings: Mapping[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text("utf-8") if self.path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be incomplete
        if lines and json.loads(lines[0]) != json.loads(json.dumps(self.settings)):
            raise ConfigError(
                f"{self.path} was measured with other settings; choose another folder with --out"
            )
        self.parts = dict(json.loads(line) for line in lines[1:])
        whole = lines or [json.dumps(self.settings)]
        self.path.write_text("".join(f"{line}\n" for line in whole), "utf-8")

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """The part of this name, made if it is not there; plain values."""
        if name not in self.parts:
            self.parts[name] = make()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, self.parts[name]]) + "\n")
        return self.parts[name]
