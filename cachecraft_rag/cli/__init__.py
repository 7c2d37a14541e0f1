"""The `cachecraft` command.

A new command is a module here and a line in `app`. A command's docstring is its help, so it names no errors: any
command may raise a CacheCraftError, which `app` prints.
"""

from cachecraft_rag.cli.app import main

__all__ = ["main"]
