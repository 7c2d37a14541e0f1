"""`/v1/embeddings` of a sentence-transformers model, which is loaded with the first request."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cachecraft_rag.checks import check_choice, check_names, check_text
from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from cachecraft_rag.retrievers.embeddings import Embedder

_FIELDS = ("model", "input", "encoding_format", "dimensions", "user")
_MOST_TEXTS = 2048  # as OpenAI's


class Embeddings:
    """Vectors of texts as an embedding model, named as in `Embedder`, indexes them. Thread-safe."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._loading = threading.Lock()
        self._embedder: Embedder | None = None

    @property
    def available(self) -> bool:
        """True if the library for embedding models is installed; the model itself may still be missing."""
        return find_spec("sentence_transformers") is not None

    def reply(self, body: Mapping[str, Any]) -> dict[str, object]:
        """Return the vectors of the texts in a request's body, each as a document's, in order, in OpenAI's form.

        ConfigError for more than 2,048 texts, empty ones, token ids, and `dimensions` other than the model's.
        """
        check_names(body, _FIELDS, what="field")
        texts = _texts(body.get("input"))
        encoding = body.get("encoding_format") or "float"
        check_choice("encoding_format", encoding, ("float", "base64"))
        embedder = self._loaded()
        dimensions = body.get("dimensions")
        if dimensions not in (None, embedder.dim):
            raise ConfigError(
                f"dimensions cannot be chosen: vectors of {embedder.name} have {embedder.dim}"
            )
        tokens = sum(embedder.count_tokens(text) for text in texts)
        vectors = embedder.encode_document(texts)
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": vector.tolist()
                if encoding == "float"
                else base64.b64encode(vector.astype("<f4").tobytes()).decode(),
            }
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _loaded(self) -> Embedder:
        from cachecraft_rag.retrievers.embeddings import Embedder

        with self._loading:
            if self._embedder is None:
                self._embedder = Embedder(self.model)
            return self._embedder


def _texts(given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise ConfigError('input must be a text or a list of texts: write "input": ["…"]')
    if len(texts) > _MOST_TEXTS:
        raise ConfigError(f"input has {len(texts)} texts; send at most {_MOST_TEXTS} at once")
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError("input must hold texts: token ids of other models mean nothing here")
        check_text("each text of input", text, empty=False)
    return texts
