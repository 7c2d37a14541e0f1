"""Ask about the same passages three times through LiteLLM's proxy, and print what each request reused.

    pip install 'litellm[proxy]'                                    # in a separate environment
    cachecraft serve demo --reuse-plain-prompts -- --enforce-eager  # in the project's one, in another terminal
    python examples/applications/litellm_proxy.py

The passages are sent twice: with the field `documents`, and as a prompt that any application could write. All numbers
arrive through the proxy.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import httpx
from served import Server, passages, table

CONFIG = Path(__file__).with_suffix(".yaml")
STARTS_WITHIN_S = 300.0
# Two sets of pages: the prompts would otherwise find what the documents have left in the store.
DOCUMENTS = ("kettle-wren-k2", "warranty", "error-codes", "descaling")
QUESTIONS = (
    "How often is the kettle descaled?",
    "What is not covered by the warranty?",
    "What does the code E2 mean?",
)
UNMARKED = ("dishwasher-lagoon-d9", "fridge-fjord-r5", "oven-hearth-o7", "blender-magpie-b3")
UNMARKED_QUESTIONS = (
    "How loud is the dishwasher?",
    "How cold should the fridge be?",
    "How long does the oven heat up?",
)
ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0))


def main() -> None:
    """Start the proxy, ask, and stop it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--server", default="http://127.0.0.1:8000", help="address of cachecraft serve"
    )
    parser.add_argument("--port", type=int, default=4000, help="port of the proxy")
    parser.add_argument("--log", type=Path, default=Path("litellm.log"), help="its messages")
    given = parser.parse_args()
    server = Server(given.server)
    litellm = Path(sys.executable).with_name("litellm")
    if not litellm.is_file():
        sys.exit(f"there is no {litellm}; install the proxy with: pip install 'litellm[proxy]'")
    variables = os.environ | {
        "CACHECRAFT_MODEL": f"hosted_vllm/{server.model}",
        "CACHECRAFT_API": f"{server.url}/v1",
        "CACHECRAFT_STATISTICS": f"{server.url}/v1/cachecraft/requests",
        "LITELLM_MASTER_KEY": f"sk-{secrets.token_hex()}",  # it does not start without one
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # downloads nothing
    }
    command = [str(litellm), "--config", str(CONFIG), "--host", "127.0.0.1"]
    command += ["--port", str(given.port)]
    with given.log.open("w") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        proxy = httpx.Client(
            base_url=f"http://127.0.0.1:{given.port}",
            headers={"Authorization": f"Bearer {variables['LITELLM_MASTER_KEY']}"},
            timeout=600,
        )
        try:
            wait_for(process, proxy, given.log)
            for title, act in (
                ("field `documents`", ask_with_documents),
                ("unmarked prompt", ask_unmarked),
            ):
                rows = []
                for turn in range(3):
                    before = server.captures()
                    rows.append(act(proxy, turn))
                    if turn == 1:  # it has seen the passages twice
                        server.wait_for_captures(before)
                table(title, rows)
        finally:
            process.terminate()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], proxy: httpx.Client, log: Path) -> None:
    """Wait until the proxy answers."""
    end = time.monotonic() + STARTS_WITHIN_S
    while process.poll() is None and time.monotonic() < end:
        try:
            if proxy.get("/health/liveliness").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    sys.exit(f"LiteLLM's proxy did not start; its messages are in {log}")


def ask_with_documents(proxy: httpx.Client, turn: int) -> dict[str, object]:
    """Send the passages in the body's field `documents`, as `extra_body` of the openai package does."""
    pages = passages(*DOCUMENTS)
    documents = [{"text": pages[place]} for place in ORDERS[turn]]
    return ask(proxy, QUESTIONS[turn], documents=documents)


def ask_unmarked(proxy: httpx.Client, turn: int) -> dict[str, object]:
    """Send the passages as part of the user's message."""
    pages = passages(*UNMARKED)
    context = "\n\n".join(pages[place] for place in ORDERS[turn])
    prompt = f"Answer from the context.\n\n{context}\n\nQuestion: {UNMARKED_QUESTIONS[turn]}"
    return ask(proxy, prompt)


def ask(proxy: httpx.Client, content: str, **fields: object) -> dict[str, object]:
    """Ask through the proxy; return what it passed on."""
    body = {"model": "handbook", "messages": [{"role": "user", "content": content}]}
    options = {"max_tokens": 16, "temperature": 0}
    reply = proxy.post("/v1/chat/completions", json=body | options | fields)
    if reply.status_code != 200:
        sys.exit(f"the proxy answered {reply.status_code}: {reply.text}")
    answer = reply.json()
    usage = answer["usage"]
    statistics = proxy.get(f"/v1/cachecraft/requests/{answer['id']}")
    if statistics.status_code != 200:
        sys.exit(f"the proxy passed no statistics on: {statistics.text}")
    stats = statistics.json()["stats"]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        "tokens_reused": stats["tokens_reused"],
        "tokens_recomputed": stats["tokens_recomputed"],
        "in the answer": "cachecraft" in str(answer.get("kv_transfer_params")),
    }


if __name__ == "__main__":
    main()
