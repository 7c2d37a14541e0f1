"""Serve the demo model with vLLM, and ask it about the sample handbook over HTTP, twice.

Run it with `make demo-vllm`, or with an environment that has vLLM: python examples/vllm_server.py
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from cachecraft_rag import CacheCraft, SamplingParams
from cachecraft_rag.engine.demo_model import handbook_folder, handbook_questions
from cachecraft_rag.errors import ServerError

PORT = 8765
STORE = Path("chunk-caches/demo-vllm")
SAMPLING = SamplingParams(max_new_tokens=40)


def connect(server: subprocess.Popen[bytes]) -> CacheCraft:
    """Wait until the server answers; vLLM takes a minute to start."""
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}; its messages are above")
        try:
            return CacheCraft.connect(f"http://127.0.0.1:{PORT}", store=STORE / "index")
        except ServerError:
            time.sleep(1)


def main() -> None:
    """Index, prime, ask, ask again."""
    cachecraft = str(Path(sys.executable).with_name("cachecraft"))
    command = [cachecraft, "serve", "demo", "--store", str(STORE), "--port", str(PORT), "--", "--enforce-eager"]
    server = subprocess.Popen(command)
    try:
        with connect(server) as rag:
            rag.add_documents(handbook_folder())
            print(f"{rag.prime()} chunk-caches computed")
            for again in (False, True):
                for asked in handbook_questions()[:3]:
                    answer = rag.ask(asked.question, top_k=4, sampling=SAMPLING)
                    stats = answer.stats
                    print(
                        f"\n{asked.question}{' (again)' if again else ''}\n{answer.text.strip()}\n"
                        f"{stats.tokens_prompt} prompt tokens: {stats.tokens_reused} reused, "
                        f"{stats.tokens_recomputed} recomputed, {stats.tokens_computed} computed; "
                        f"first token after {stats.ttft_s:.2f} s"
                    )
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
