"""A warning for documents that come as prompt text: of such text nothing is reused."""

from __future__ import annotations

import logging
from collections.abc import Iterable

LONG_PROMPT = 400  # characters, about 100 tokens: few questions are as long, and most retrieved passages are longer


class LongPromptWarning:
    """Log one warning for the first long text that a model gets without documents.

    logger  of the framework's classes
    advice  the way to pass documents there
    """

    def __init__(self, logger: logging.Logger, advice: str) -> None:
        self._logger, self._advice = logger, advice
        self._given = False

    def check(self, texts: Iterable[str]) -> None:
        """Warn if one of a prompt's texts, the assistant's left out, probably holds documents."""
        longest = max(map(len, texts), default=0)
        if longest >= LONG_PROMPT and not self._given:
            self._given = True
            self._logger.warning(
                "a prompt of %d characters came as one text, so nothing of it is reused; if it holds retrieved "
                "documents, %s",
                longest,
                self._advice,
            )
