"""vLLM's processes speak in its log, and end with the server; needs no vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import time

SCRIPT = """
import logging, multiprocessing, os, sys, time

def child(lines):
    from cachecraft_rag.vllm import processes
    processes._GRACE_S = 0.1
    vllm = logging.getLogger("vllm")
    vllm.addHandler(logging.StreamHandler(sys.stdout))
    vllm.setLevel(logging.INFO)
    processes.settle_in()
    processes.settle_in()
    logging.getLogger("cachecraft_rag.store").info("evicted: %s", multiprocessing.current_process().name)
    sys.stdout.flush()
    lines.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for name in sys.argv[1:]:
        mine, theirs = context.Pipe()
        context.Process(target=child, args=(theirs,), name=name).start()
        print("pid", mine.recv(), flush=True)
    os._exit(9)
"""


def test_they_log_and_end_with_their_parent(tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "parent.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, script, "EngineCore", "VllmWorker-0"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 9, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("evicted")] == [
        "evicted: EngineCore",
        "evicted: VllmWorker-0",
    ]
    for pid in (int(line.split()[1]) for line in lines if line.startswith("pid")):
        deadline = time.monotonic() + 120
        while alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def alive(pid: int) -> bool:
    """True for a process that runs; one that was not waited for has ended, too."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
