"""vLLM's own processes: our lines in their log, and their end with the server's."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time

_NAMES = ("EngineCore", "VllmWorker")  # of the processes that vLLM starts
_WATCHER = "cachecraft-parent"
_GRACE_S = 5.0  # for an orderly end, which vLLM begins itself where it can


def settle_in() -> None:
    """Prepare this process, once, if vLLM has started it: otherwise an application has set up its log, and ends it."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_NAMES):
        return
    ours, vllms = logging.getLogger("cachecraft_rag"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.propagate = list(vllms.handlers), False
        ours.setLevel(vllms.getEffectiveLevel())

    def watch() -> None:
        parent.join()
        time.sleep(_GRACE_S)
        os._exit(1)  # whatever hangs; the store is safe to kill

    if all(thread.name != _WATCHER for thread in threading.enumerate()):
        threading.Thread(target=watch, name=_WATCHER, daemon=True).start()
