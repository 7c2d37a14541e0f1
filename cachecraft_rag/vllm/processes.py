"""vLLM's own processes: our log lines appear in their log, and they end when the server ends."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time

_NAMES = ("EngineCore", "VllmWorker")  # names of processes that vLLM starts begin with these
_WATCHER = "cachecraft-parent"
_GRACE_S = 5.0  # time for vLLM to shut down on its own, before the process is ended


def settle_in() -> None:
    """If vLLM started this process: log to vLLM's log, and end five seconds after the process that started it.

    Our logger takes over the handlers and the level of vLLM's logger, unless ours or the root logger has handlers. A
    thread ends this process, with exit code 1. A second call changes nothing.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_NAMES):
        return
    our_logger = logging.getLogger("cachecraft_rag")
    vllm_logger = logging.getLogger("vllm")
    if not our_logger.handlers and not logging.getLogger().handlers:
        our_logger.handlers = list(vllm_logger.handlers)
        our_logger.propagate = False
        our_logger.setLevel(vllm_logger.getEffectiveLevel())

    def watch() -> None:
        parent.join()
        time.sleep(_GRACE_S)
        os._exit(1)  # even if a thread hangs; the store survives a kill

    if all(thread.name != _WATCHER for thread in threading.enumerate()):
        threading.Thread(target=watch, name=_WATCHER, daemon=True).start()
