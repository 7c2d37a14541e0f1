"""Facts that a server sends to clients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachecraft_rag.server.facts import tokenizer_files


@pytest.mark.parametrize(
    "template",
    ["{{ text }}", {"default": "{{ text }}", "tool_use": "{{ tools }}"}],
    ids=["one template", "several templates"],
)
def test_clients_get_the_template_for_prompts_without_tools_as_a_text(
    tmp_path: Path, template: object
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    tokenizer: Any = SimpleNamespace(chat_template=template)
    assert tokenizer_files(tmp_path, tokenizer) == {
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ text }}",
    }


def test_a_folder_may_hold_the_template_of_a_tokenizer_that_names_none(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ text }}")
    tokenizer: Any = SimpleNamespace(chat_template=None)
    assert tokenizer_files(tmp_path, tokenizer) == {"chat_template.jinja": "{{ text }}"}
