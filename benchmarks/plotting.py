"""Shared by all figures: colours, loading matplotlib, and saving to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cachecraft_rag.errors import ConfigError

# RED is for our own method
GREY, BLUE, BLACK, RED, YELLOW = "#9a9a9a", "#5b8dc9", "#222222", "#c8553d", "#e3a857"
GREEN, VIOLET, BROWN, TEAL, PINK = "#6a9a5b", "#8e6bb0", "#8a6d4f", "#3f9c9c", "#d184ad"


def pyplot() -> Any:
    """matplotlib's pyplot for drawing to files. If it is missing, the ConfigError names the extra to install."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as found
    except ImportError as error:
        raise ConfigError(
            "The plot needs matplotlib: pip install 'cachecraft-rag[bench]'."
        ) from error
    return found


def save(figure: Any, path: Path) -> None:
    """Write the figure in the format of the suffix of `path`, and close it. Raises ConfigError if that fails."""
    from matplotlib import pyplot as found

    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        found.close(figure)
