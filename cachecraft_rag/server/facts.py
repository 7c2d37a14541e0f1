"""Facts that clients need of a server: its model, its settings, and the files of its tokenizer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cachecraft_rag import __version__
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.server.wire import PROTOCOL, TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def facts_of(
    engine: AnswerEngine,
    settings: EndpointSettings,
    *,
    system: str,
    end_tokens: Collection[int],
) -> dict[str, object]:
    """Return facts that a client needs, as plain JSON values by name: versions, the model and settings without keys.

    "model" is the engine's name for it, not `settings.model`; "session_header" is None for a server without sessions,
    and "end_tokens" are sorted. `system` is the instruction.
    """
    model = engine.decoder
    return {
        "protocol": PROTOCOL,
        "version": __version__,
        "model": model.name,
        "fingerprint": model.fingerprint,
        "layout": asdict(model.layout),
        "context_length": model.context_length,
        "end_tokens": sorted(end_tokens),
        "namespace": engine.namespace,
        "system": system,
        "session_header": settings.session_header,
        "reuse": asdict(engine.config),
        "client_settings": settings.client_settings,
        "plain_prompts": settings.plain_prompts,
    }


def tokenizer_files(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the files of a model's tokenizer as texts, by name: those of `TOKENIZER_FILES` that its folder has.

    The text of "chat_template.jinja" is the template in use, of several the one for prompts without tools. It need not
    be in the folder.
    """
    files: dict[str, str] = {}
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            files[name] = path.read_text(encoding="utf-8")
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        files["chat_template.jinja"] = template
    return files
