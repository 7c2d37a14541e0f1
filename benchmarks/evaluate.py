"""Every method of the papers and of this package against full prefill (Cache-Craft Fig. 20, 21, 26, Table 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks import figures, formats
from benchmarks.baselines import BaselineStore
from benchmarks.compression import PUBLISHED
from benchmarks.methods import ABLATIONS, CRAFT, methods_for
from benchmarks.plotting import pyplot
from cachecraft_rag.cli import options
from cachecraft_rag.cli.evaluation.evaluate import (
    Measuring,
    Questions,
    require_packages,
    show_report,
)
from cachecraft_rag.cli.options import takes
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import paired_interval, ratio_interval
from cachecraft_rag.evaluation.measuring import METHODS, Method, Record, label, methods_named
from cachecraft_rag.evaluation.origins import OriginCondition, condition_named
from cachecraft_rag.evaluation.report import MEASURES, Columns, Estimate, Measure, summarise

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.dataset import Dataset
    from cachecraft_rag.types.documents import Chunk

# as many as `unrelated` draws at most, so that the two conditions differ in similarity alone
SIMILAR_CHUNKS = 2


class Similar:
    """The most similar chunks of the whole dataset, the most similar last (FusionRAG).

    Args:
        embed: texts → unit vectors `[texts, dim]`; None = the bundled embedding model, loaded on first use.
    """

    def __init__(self, embed: object = None) -> None:
        self._embed = embed
        self._of: Dataset | None = None

    def __call__(self, dataset: Dataset, chunk: Chunk, _: int) -> Sequence[Chunk]:
        """See `OriginCondition.origin_prefix`."""
        if self._of is not dataset:
            embed = self._embed
            if embed is None:
                from cachecraft_rag.retrievers.embeddings import Embedder

                embed = Embedder().encode_document
            self._chunks = [one for document in dataset.documents for one in document]
            self._vectors = embed([one.text for one in self._chunks])  # type: ignore[operator]
            self._of = dataset
        own = next(
            place for place, one in enumerate(self._chunks) if one.chunk_id == chunk.chunk_id
        )
        similar = (self._vectors @ self._vectors[own]).argsort(kind="stable")[::-1].tolist()
        few = [place for place in similar if place != own][:SIMILAR_CHUNKS]
        return [self._chunks[place] for place in reversed(few)]


def origin_named(name: str) -> OriginCondition:
    """One of the package's conditions, or `similar`."""
    if name == "similar":
        return OriginCondition(
            name, "after the two most similar chunks of the dataset (FusionRAG)", Similar()
        )
    return condition_named(name)


def _craft_at(found: Sequence[Record], columns: Columns) -> Sequence[Record] | None:
    """The paper's selector at the same ratio; None without one."""
    ratio = found[0].ratio
    return None if ratio is None else columns.get(label(CRAFT.name, ratio))


def _kl_ratio(records: Sequence[Record], columns: Columns) -> Estimate | None:
    craft = _craft_at(records, columns)
    if craft is None or sum(record.kl for record in craft) <= 0:
        return None
    interval = ratio_interval([record.kl for record in records], [record.kl for record in craft])
    return Estimate(interval, len(records))


def _kl_of_full_cache(records: Sequence[Record], columns: Columns) -> Estimate | None:
    naive = columns.get(METHODS["full_cache"].name)
    if naive is None or sum(record.kl for record in naive) <= 0:
        return None
    interval = ratio_interval([record.kl for record in records], [record.kl for record in naive])
    return Estimate(interval, len(records))


def _kl_difference(records: Sequence[Record], columns: Columns) -> Estimate | None:
    craft = _craft_at(records, columns)
    if craft is None:
        return None
    interval = paired_interval([record.kl for record in records], [record.kl for record in craft])
    return Estimate(interval, len(records))


VERSUS = (
    Measure(
        "kl_of_craft",
        "KL / craft",
        ".2f",
        "divided by the mean KL of craft at the same ratio.",
        _kl_ratio,
    ),
    Measure(
        "kl_minus_craft",
        "KL − craft",
        "+.4f",
        "minus the KL of craft, paired by question.",
        _kl_difference,
    ),
    Measure(
        "kl_of_full_cache",
        "KL / full_cache",
        ".2f",
        "divided by the mean KL of full_cache, which recomputes nothing.",
        _kl_of_full_cache,
    ),
)
RATIOS = "0.05,0.1,0.15,0.2,0.3"
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        help='Comma-separated, or "all", or "ablations". Compressors run only if named: mapreduce, for which the model '
        "writes every summary, and lingua2, which needs --lingua2-model.",
        show_default="all but compressors and ablations",
    ),
]
LinguaModel = Annotated[
    str | None,
    typer.Option(
        "--lingua2-model", help="LLMLingua-2 model, name or folder; adds the method lingua2."
    ),
]


def chosen(names: str | None, known: Mapping[str, Method]) -> list[Method]:
    """The methods named; without names all except compressors and ablations, plus lingua2 if its model is given.

    Raises:
        ConfigError: a name is unknown, or lingua2 is wanted without a model.
    """
    if names is None or names == "all":
        left_out = {*ABLATIONS, "mapreduce"} if names is None else set(ABLATIONS)
        return [method for name, method in known.items() if name not in left_out]
    wanted = [
        one
        for name in names.split(",")
        for one in (ABLATIONS if name.strip() == "ablations" else (name.strip(),))
    ]
    if "lingua2" in wanted and "lingua2" not in known:
        raise ConfigError(f"lingua2 needs its own model: add --lingua2-model {PUBLISHED}")
    return methods_named([*wanted, *(["lingua2"] if "lingua2" in known else [])], known)


@takes(questions=Questions, measuring=Measuring, defaults={"ratios": RATIOS})
def main(
    methods: Methods = None,
    lingua2_model: LinguaModel = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
    *,
    questions: Questions,
    measuring: Measuring,
) -> None:
    """Compare every method with full prefill, question by question.

    Reads SQuAD, MuSiQue, 2WikiMultihopQA, HotpotQA, retrieved contexts (ctxs), DROP, CNN/DailyMail, XSum and own files;
    --origin knows "similar" too. Writes report.md with figures to --out. After Ctrl-C, the same command resumes.
    """
    options.set_threads(threads)
    require_packages()
    pyplot()
    dataset = questions.load(formats.read)
    known = methods_for(dataset, lingua2_model=lingua2_model)
    described, records = measuring.run(
        dataset,
        questions,
        chosen(methods, known),
        origin=origin_named(measuring.origin),
        kind=BaselineStore,
    )
    report = summarise(records, order=list(known), measures=(*MEASURES, *VERSUS))
    drawn = figures.draw_quality(report, measuring.out)
    show_report(report, described, measuring.out, figures=drawn, as_json=as_json)
