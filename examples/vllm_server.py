"""Serve the demo model with vLLM, and ask it about the sample handbook over HTTP, twice.

Run it with `make demo-vllm`, or with an environment that has vLLM: python examples/vllm_server.py
"""

import subprocess
import sys
import time
from pathlib import Path

from cachecraft_rag import CacheCraft, CacheCraftError, SamplingParams

PORT, STORE = "8765", Path("chunk-caches/demo-vllm")
COMMAND = [
    Path(sys.executable).with_name("cachecraft"),
    "serve",
    "demo",
    "--store",
    STORE,
    "--port",
    PORT,
]
QUESTIONS = (
    "How often should I descale the Wren K2 kettle?",
    "Is broken glass covered by the warranty?",
)


def connect(server: subprocess.Popen[bytes]) -> CacheCraft:
    """Wait until the server answers; vLLM takes a minute to start."""
    while server.poll() is None:
        try:
            return CacheCraft.connect(f"http://127.0.0.1:{PORT}", store=STORE / "index")
        except CacheCraftError:
            time.sleep(1)
    raise SystemExit("the server has ended; its messages are above")


with subprocess.Popen([*COMMAND, "--", "--enforce-eager"]) as vllm:
    try:
        with connect(vllm) as rag:
            rag.add_documents(Path(__file__).with_name("handbook"))
            print(f"{rag.prime()} chunk-caches computed")
            for question in QUESTIONS * 2:
                answer = rag.ask(question, top_k=4, sampling=SamplingParams(max_new_tokens=40))
                stats = answer.stats
                print(
                    f"\n{question}\n{answer.text.strip()}\nfirst token after {stats.ttft_s:.2f} s;",
                    end=" ",
                )
                print(f"{stats.tokens_reused} of {stats.tokens_prompt} prompt tokens reused")
    finally:
        vllm.terminate()
