"""The check of the model hub, with its replies in place of the network."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from cachecraft_rag.model.hub_check import require_hub


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[HfHubHTTPError]], list[str]]:
    """Make the hub answer with this error; returns the addresses that it is asked for."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def set_answer(kind: type[HfHubHTTPError]) -> list[str]:
        asked: list[str] = []
        response = httpx.Response(401, request=httpx.Request("HEAD", "https://hub/config.json"))

        def ask(url: str, **_options: object) -> None:
            asked.append(url)
            raise kind("refused", response=response)

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
        return asked

    return set_answer


@pytest.mark.parametrize("kind", [GatedRepoError, HfHubHTTPError])
def test_a_model_that_requires_a_login_is_left_to_its_loader(
    answer: Callable[[type[HfHubHTTPError]], list[str]], kind: type[HfHubHTTPError]
) -> None:
    asked = answer(kind)
    require_hub(["owner/gated"])
    assert len(asked) == 1
    assert "owner/gated" in asked[0]


def test_a_model_that_the_hub_does_not_have_is_named(
    answer: Callable[[type[HfHubHTTPError]], list[str]],
) -> None:
    answer(RepositoryNotFoundError)
    with pytest.raises(FileNotFoundError, match="no model owner/none"):
        require_hub(["owner/none"])
