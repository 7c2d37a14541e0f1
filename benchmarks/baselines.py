"""Baselines and ablations that need more than a `ReuseConfig`: they change what the store answers for one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cachecraft_rag.compute.driver import prefill_steps
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.kernels.attention_mass import attention_mass
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.kernels.visibility import Visibility
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.prompts import Prompt
from cachecraft_rag.types.variants import LoadedVariant, Variant

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import EvaluationQuestion

_VALUE_LAYER = 1  # the first layer whose values depend on other tokens


@dataclass(frozen=True)
class Changes:
    """Changes to the answers of a `BaselineStore`.

    scores    variant id → a score for each token, instead of eq. 14's
    prefixes  where given, β′ of moved variants counts as 0 (eq. 12): segment id → what stands before it now
    moved     chunk id → the number of positions by which its keys lag
    """

    scores: Mapping[str, np.ndarray] = field(default_factory=dict)
    prefixes: Mapping[str, tuple[str, ...]] | None = None
    moved: Mapping[str, int] = field(default_factory=dict)


class BaselineStore(ChunkCacheStore):
    """A store that answers as `changes` say. The engine's own; nothing that is stored changes."""

    changes = Changes()
    rope: Any = None  # positions → (cos, sin), for `Changes.moved`

    @contextmanager
    def changed(self, changes: Changes) -> Iterator[None]:
        """Answer differently while the block lasts."""
        self.changes = changes
        try:
            yield
        finally:
            self.changes = Changes()

    def find(self, *given: Any, **named: Any) -> Any:
        """See `ChunkCacheStore.find`: the overlap of an inexact capture counts for its exact share, here for none."""
        found, prefixes = super().find(*given, **named), self.changes.prefixes
        if prefixes is None:
            return found
        variants = {
            name: [
                one if one.key.origin_prefix == prefixes[name] else replace(one, exact_share=0.0)
                for one in offers
            ]
            for name, offers in found.variants.items()
        }
        return replace(found, variants=variants)

    def token_scores(self, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        """See `ChunkCacheStore.token_scores`."""
        found = super().token_scores(variant_ids)
        given = self.changes.scores
        return {
            name: TokenScores(given[name]) if name in given else scores
            for name, scores in found.items()
        }

    def open_variants(self, variants: Sequence[Variant]) -> list[Any]:
        """See `ChunkCacheStore.open_variants`: a chunk whose keys are to lag is loaded, and its keys turned back."""
        moved = self.changes.moved
        opened = super().open_variants([one for one in variants if one.key.chunk_id not in moved])
        others = iter(opened)
        return [
            self._turned_back(one, moved[one.key.chunk_id])
            if one.key.chunk_id in moved
            else next(others)
            for one in variants
        ]

    def _turned_back(self, variant: Variant, positions: int) -> Any:
        loaded = self.load(variant)
        if not isinstance(loaded, LoadedVariant):
            return loaded
        kv = loaded.kv.clone()  # [layers, 2, tokens, kv_heads, head_dim]
        cos, sin = self.rope(torch.full((kv.shape[2],), positions))
        for layer in kv:
            layer[0] = rotate(layer[0], cos.to(layer), -sin.to(layer))
        return replace(loaded, kv=kv)


def store_of(engine: Engine) -> BaselineStore:
    """The engine's store."""
    assert isinstance(engine.store, BaselineStore), "opened with kind=BaselineStore"
    return engine.store


@contextmanager
def _answering(
    engine: Engine, question: EvaluationQuestion, changes: Changes
) -> Iterator[Sequence[Chunk]]:
    with store_of(engine).changed(changes):
        yield question.passages


def no_overlap(
    engine: Engine, question: EvaluationQuestion, _: float
) -> AbstractContextManager[Sequence[Chunk]]:
    """Leave β′ out of CFO (Cache-Craft Fig. 26)."""
    names = [engine.prompts.system.segment_id, *(chunk.chunk_id for chunk in question.passages)]
    prefixes = {name: tuple(names[:place]) for place, name in enumerate(names)}
    return _answering(engine, question, Changes(prefixes=prefixes))


def no_positions(
    engine: Engine, question: EvaluationQuestion, _: float
) -> AbstractContextManager[Sequence[Chunk]]:
    """Leave the keys of reused chunks at the position right after the instruction (Cache-Craft Table 3)."""
    prompt = engine.prompts.build(question.text, question.passages, reserve=1)
    store_of(engine).rope = engine.decoder.rope
    places = zip(prompt.segments[1:-1], prompt.bounds[1:], strict=False)
    moved = {segment.segment_id: start - prompt.bounds[1] for segment, start in places}
    return _answering(engine, question, Changes(moved=moved))


class H2O:
    """PREFILL-H2O (Cache-Craft §5.1.4): the tokens first that the chunk's later tokens attended to most at capture.

    Each variant's scores are computed once, from a prefill of its origin prefix, before the time to the first token
    begins: H2O has them from the capture.

    Args:
        chunks: every chunk of the data, by id.
    """

    def __init__(self, chunks: Mapping[str, Chunk]) -> None:
        self._chunks = chunks
        self._scores: dict[str, np.ndarray] = {}

    def __call__(
        self, engine: Engine, question: EvaluationQuestion, _: float
    ) -> AbstractContextManager[Sequence[Chunk]]:
        """See `Method.prepare`."""
        for variant in variants_of(engine, question):
            if variant.variant_id not in self._scores:
                self._scores[variant.variant_id] = self._received(engine, variant)
        return _answering(engine, question, Changes(self._scores))

    @torch.inference_mode()
    def _received(self, engine: Engine, variant: Variant) -> np.ndarray:
        names = (*variant.key.origin_prefix[1:], variant.key.chunk_id)
        segments = [engine.prompts.chunk_segment(self._chunks[name]) for name in names]
        prompt = Prompt((engine.prompts.system, *segments))
        rows = Rows.of(prompt.bounds, new=range(prompt.bounds[-1]))
        job = PrefillJob(prompt.token_ids, rows, captures=range(1, len(prompt.bounds) - 1))
        result = engine.loop.run(lambda _: prefill_steps(engine.decoder, job))
        capture, settings, keys = (
            result.recorder.captures[-1],
            result.recorder.settings,
            result.buffer.kv[:, 0],
        )
        if not capture.queries:
            raise ConfigError(
                "the method h2o needs the queries of captured chunks, which are not kept on a GPU: add --device cpu"
            )
        device = capture.kv.device
        positions = torch.arange(capture.start, capture.stop, device=device)
        edges = torch.tensor([0, capture.stop], device=device)
        total = torch.zeros(capture.stop, device=device)
        for layer, use in enumerate(settings):
            visible = Visibility(positions, window=use.window)
            queries = capture.queries[layer]
            total += attention_mass(
                queries,
                keys[layer, : capture.stop],
                visible,
                edges,
                scale=use.scale,
                softcap=use.softcap,
            )[1]
        received: np.ndarray = total[capture.start :].cpu().numpy() / len(settings)
        return received


def question_alone(
    engine: Engine, question: EvaluationQuestion, _: float
) -> AbstractContextManager[Sequence[Chunk]]:
    """Choice by the question's attention alone, as in ProphetKV (all layers there) and QCFuse (one layer there)."""
    even = {
        one.variant_id: np.ones(one.tokens, np.float32) for one in variants_of(engine, question)
    }
    return _answering(engine, question, Changes(even))


class _Enough(Exception):
    """The layers that are wanted have run."""


def value_deviation(
    engine: Engine, question: EvaluationQuestion, _: float
) -> AbstractContextManager[Sequence[Chunk]]:
    """CacheBlend's choice (§4.3 there): the tokens first whose values move furthest in the first layer where they can.

    The whole prompt runs through two layers, which counts as time to the first token.
    """
    stored = {}
    for variant in variants_of(engine, question):
        loaded = engine.store.load(variant)
        if isinstance(loaded, LoadedVariant):
            stored[variant] = loaded.kv[_VALUE_LAYER, 1].float()  # [tokens, kv_heads, head_dim]

    @contextmanager
    def prepared() -> Iterator[Sequence[Chunk]]:
        prompt = engine.prompts.build(question.text, question.passages, reserve=1)
        values = first_values(engine, prompt.token_ids)
        spans = {
            segment.segment_id: slice(start, stop)
            for segment, start, stop in zip(
                prompt.segments, prompt.bounds, prompt.bounds[1:], strict=False
            )
        }
        scores = {}
        for variant, old in stored.items():
            new = values[spans[variant.key.chunk_id]].to(old)
            scores[variant.variant_id] = (new - old).square().sum((1, 2)).numpy()
        with store_of(engine).changed(Changes(scores)):
            yield question.passages

    return prepared()


def first_values(engine: Engine, token_ids: Sequence[int]) -> Tensor:
    """Values `[tokens, kv_heads, head_dim]` of the second layer, by the model's own forward, which stops after it."""
    from transformers import DynamicCache

    def stop(*_: object) -> None:
        raise _Enough

    decoder, cache = engine.decoder, DynamicCache()
    with decoder.stock() as model, torch.inference_mode():
        layers = model.get_decoder().layers
        after = min(_VALUE_LAYER, len(layers) - 1)
        hook = layers[after].register_forward_hook(stop)
        try:
            model(
                input_ids=torch.tensor([list(token_ids)], device=decoder.device),
                past_key_values=cache,
            )
        except _Enough:
            pass
        finally:
            hook.remove()
    return cache.layers[after].values[0].transpose(0, 1)


def variants_of(engine: Engine, question: EvaluationQuestion) -> list[Variant]:
    """Every stored variant of the question's passages."""
    ids = [chunk.chunk_id for chunk in question.passages]
    found = engine.store.find(engine.namespace, engine.decoder.fingerprint, ids).variants
    return [variant for variants in found.values() for variant in variants]
