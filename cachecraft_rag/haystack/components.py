"""Haystack's components over an engine: documents and a question in, an answer out; and priming."""

from __future__ import annotations

from typing import Any, Self

from haystack import Document, component, default_from_dict, default_to_dict

from cachecraft_rag.checks import check_kind, check_names
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.engine.documents import chunks_of
from cachecraft_rag.engine.loading import engine_loader
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.serving.sampling import SamplingOptions, sampling_from


class _OverEngine:
    """A component's engine, which is passed in, or opened by `warm_up` from settings that a pipeline's file can hold.

    Arguments as of `CacheCraftPrimer`.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        store: str = "chunk-caches",
        engine_options: dict[str, Any] | None = None,
        engine: AnswerEngine | None = None,
    ) -> None:
        check_kind("engine", engine, AnswerEngine, optional=True)
        self._settings: dict[str, Any] = {
            "model": model,
            "store": store,
            "engine_options": engine_options,
        }
        self._is_shared = engine is not None
        self._engine = engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> AnswerEngine:
        """The engine; it is opened by the first use."""
        self.warm_up()
        assert self._engine is not None
        return self._engine

    def warm_up(self) -> None:
        """Load the model and open the store; nothing if that was done, or an engine was passed in."""
        if self._engine is None:
            options = self._settings["engine_options"] or {}
            load = engine_loader()
            self._engine = load(self._settings["model"], store=self._settings["store"], **options)

    def close(self) -> None:
        """Close the engine that this component opened, for good; nothing if it opened none or was closed."""
        if self._engine is not None and not self._is_shared:
            self._engine.close()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as Haystack's `default_to_dict` does. Raises ConfigError if an engine was passed in."""
        if self._is_shared:
            raise ConfigError(
                "a component over an open engine cannot be written to a file: give it model and store instead of engine"
            )
        return default_to_dict(self, **self._settings)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return a component with the settings that `to_dict` returned; no engine is open yet."""
        made: Self = default_from_dict(cls, data)
        return made


@component
class CacheCraftGenerator(_OverEngine):
    """Answers a question from documents, best first, whose chunk-caches are reused. Close it at the end.

    Args:
        model, store, engine_options, engine: as of `CacheCraftPrimer`.
        generation_kwargs: fields of `SamplingParams` by name, such as {"max_tokens": 64, "temperature": 0.7}.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        store: str = "chunk-caches",
        engine_options: dict[str, Any] | None = None,
        engine: AnswerEngine | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> None:
        # Haystack's decorator replaces this class, so `super()` without arguments would fail
        _OverEngine.__init__(self, model, store=store, engine_options=engine_options, engine=engine)
        self._sampling = dict(generation_kwargs or {})
        # before a model is loaded
        check_names(self._sampling, SamplingOptions.__annotations__, what="generation_kwarg")
        sampling_from(self._sampling)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, as Haystack's `default_to_dict` does. Raises ConfigError if an engine was passed in."""
        data = _OverEngine.to_dict(self)
        data["init_parameters"]["generation_kwargs"] = self._sampling
        return data

    @component.output_types(replies=list[str], meta=list[dict[str, Any]])
    def run(self, question: str, documents: list[Document]) -> dict[str, Any]:
        """Return the answer in `replies`, its `RequestStats.as_dict()` in `meta`, lists of one; documents may be []."""
        answer = self.engine.stream(question, chunks_of(documents), **sampling_from(self._sampling))
        text = "".join(answer)
        return {"replies": [text], "meta": [answer.stats.as_dict()]}


@component
class CacheCraftPrimer(_OverEngine):
    """Captures documents before the first question, and passes them on. Put it before a DocumentWriter.

    `warm_up` or the first run loads the model; `close` it at the end, or use a `with` block.

    Args:
        model: Hugging Face name or folder, or "demo".
        store: folder of the chunk-caches.
        engine_options: options of `EngineConfig` by name, such as {"system": "Be brief."}. Primer and generator need
            the same ones, otherwise answers cannot reuse what was primed.
        engine: an open engine instead, which several components may share; the caller closes it. Such a component
            cannot be written to a file.
    """

    @component.output_types(documents=list[Document], captured=int)
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Return the documents unchanged, and the number of new chunk-caches, as `AnswerEngine.prime` counts them."""
        return {"documents": documents, "captured": self.engine.prime(documents)}
