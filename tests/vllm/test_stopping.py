"""A server that is asked to end while it answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm")

from tests.vllm.conftest import TEXTS
from tests.vllm.http_server import ServerProcess

REQUESTS = 6


@pytest.mark.slow
def test_a_server_ends_with_requests_under_way(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM may kill its engine before the ends of these requests are reported: their connections never end."""
    server = ServerProcess(
        model_folder("Llama"), tmp_path / "store", tmp_path / "log", "--max-model-len", "4096"
    )

    def ask(number: int) -> None:
        """Ask again and again: on a busy machine the first answer may be complete before the last one has begun."""
        documents = [{"text": f"{number} {text * 4}"} for text in TEXTS]
        try:
            while True:
                answer = server.chat(documents, max_tokens=3000, ignore_eos=True)
                if answer.status_code != 200:
                    return
        except httpx.HTTPError:  # it has ended
            return

    with ThreadPoolExecutor(REQUESTS) as clients:
        for number in range(REQUESTS):
            clients.submit(ask, number)
        while (
            server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting{")
            < REQUESTS
        ):
            assert server.alive()
        assert server.ends_when_asked()
