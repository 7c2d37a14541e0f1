"""The `cachecraft` command."""

from cachecraft_rag.cli.app import main

__all__ = ["main"]
