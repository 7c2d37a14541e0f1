"""Texts and keys that HTTP or JSON cannot carry: the client mends them as other engines do, or refuses them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cachecraft_rag.client.http import HTTPEngine
from cachecraft_rag.client.link import Link
from cachecraft_rag.errors import ConfigError, ServerError
from cachecraft_rag.types.documents import Chunk, chunk_id_of
from tests.vllm.test_client import answers_of, serving, tokens

CHAT = "/v1/chat/completions"
PRIME = "/v1/cachecraft/prime"
HALF = "half \ud83e a pair"
MENDED = "half ? a pair"


@pytest.fixture
def bodies() -> dict[str, Any]:
    return {}


@pytest.fixture
def url(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Any, bodies: dict[str, Any]
) -> Iterator[str]:
    def keep(path: str, status: int, reply: object) -> Any:
        def answer(body: object) -> tuple[int, object]:
            bodies[path] = body
            return status, reply

        return answer

    sent = answers_of(byte_tokenizer, tmp_path / "t") | {
        CHAT: keep(CHAT, 200, tokens(40, 256) + "data: [DONE]\n\n"),
        PRIME: keep(PRIME, 200, {"captured": 1, "missing": {}}),
    }
    with serving(sent) as url:
        yield url


def test_half_a_surrogate_pair_is_sent_as_a_question_mark(url: str, bodies: dict[str, Any]) -> None:
    history = [("user", HALF), ("assistant", "yes")]
    with HTTPEngine.connect(url) as engine:
        assert "".join(engine.stream(HALF, [Chunk(HALF), Chunk("whole")], history=history))
        assert engine.primer().prime([Chunk(HALF)]) == 1
    texts = [message["content"] for message in bodies[CHAT]["messages"]]
    assert texts == [MENDED, "yes", MENDED]
    mended = {"text": MENDED, "id": chunk_id_of(MENDED)}
    assert bodies[CHAT]["documents"] == [mended, {"text": "whole", "id": chunk_id_of("whole")}]
    assert bodies[PRIME]["documents"] == [mended]


def test_an_instruction_that_cannot_be_used_is_the_callers_error(url: str) -> None:
    with pytest.raises(ConfigError, match="a mark that this package uses"):
        HTTPEngine.connect(url, system="\u27e6cachecraft-context\u27e7")


def test_a_text_in_place_of_a_chunk_is_not_sent(url: str, bodies: dict[str, Any]) -> None:
    with HTTPEngine.connect(url) as engine:
        primer = engine.primer()
        with pytest.raises(ConfigError, match=r"write Chunk\(text\)"):
            primer.prime(["a text"])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match=r"write Chunk\(text\)"):
            primer.missing(["a text"])  # type: ignore[list-item]
    assert PRIME not in bodies


@pytest.mark.parametrize(
    ("variable", "value"), [("SSL_CERT_FILE", "/nowhere.pem"), ("HTTP_PROXY", "gopher://proxy")]
)
def test_an_environment_that_cannot_be_used_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"check .*{variable}"):
        HTTPEngine.connect("https://127.0.0.1:1")


@pytest.mark.parametrize("session", ["Zoë", "two\nlines", " ada"])
def test_a_session_that_no_header_holds_is_refused(url: str, session: str) -> None:
    with HTTPEngine.connect(url) as engine, pytest.raises(ConfigError, match="session travels in"):
        engine.stream("How?", [Chunk("vinegar")], session=session)


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
@pytest.mark.parametrize("key", ["schlüssel", "secret\n"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(url: str, name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} travels in an HTTP header") as caught:
        HTTPEngine.connect(url, **{name: key})
    assert key.strip() not in str(caught.value)


class ClosesItsLink(dict[str, object]):
    """A body during whose encoding the link is closed, as another thread may at any time."""

    def __init__(self, link: Link) -> None:
        super().__init__(documents=[])
        self._link = link

    def items(self) -> ItemsView[str, object]:
        self._link.close()
        return super().items()


def test_a_link_that_is_closed_while_a_request_begins_says_so(url: str) -> None:
    link = Link(url, api_key=None, timeout_s=10.0)
    with pytest.raises(ServerError, match="was closed; connect again"):
        link.call(PRIME, ClosesItsLink(link))
