"""`cachecraft settings`."""

from __future__ import annotations

from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import print_json, print_table, takes
from cachecraft_rag.engine.settings import Settings


@takes("store")
def settings(as_json: options.Json = False, *, settings: Settings) -> None:
    """Print the settings of index, ask, chat, serve and doctor, and the origin of each: a file, a variable, a default.

    A flag of a command goes before the environment, that before the file, that before the default.
    """
    settings.engine_config()  # reports what does not go together
    if as_json:
        print_json({one.key: {"value": one.shown, "origin": one.origin} for one in settings.entries.values()})
        return
    shown = {key: one.shown if isinstance(one.shown, str) else repr(one.shown) for key, one in settings.entries.items()}
    rows = [(one.key, shown[key], one.origin) for key, one in settings.entries.items()]
    print_table(("setting", "value", "from"), rows)
