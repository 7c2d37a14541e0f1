"""`cachecraft calibrate` without a quality: fit a learned correction on your documents, and say what it brings."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import out, print_json, progress_bar, waiting

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.formats.dataset import Dataset
    from cachecraft_rag.evaluation.quality.correction import Documents, FitSettings, Gain, GainInAnswers


@dataclass(frozen=True)
class Fitted:
    """What was fitted: the gain, that in answers where there are questions, and the file."""

    gain: Gain
    answers: GainInAnswers | None
    path: Path


def fit_correction(
    documents: Documents,
    dataset: Dataset | None,
    settings: FitSettings,
    store: Path,
    *,
    answer_tokens: int,
    model: str,
    dtype: str,
    device: str,
) -> Fitted:
    """Fit on one half of the documents, save the result, and measure it on the other half."""
    from cachecraft_rag.compute.correction import correction_path
    from cachecraft_rag.evaluation.quality import correction as fitting
    from cachecraft_rag.evaluation.quality.runner import open_engine

    options.quiet_libraries()
    answers = None
    with ExitStack() as opened:
        with waiting("Loading the model"):
            engine = opened.enter_context(open_engine(model, store, dtype=dtype, device=device))
        with progress_bar("Fitting", remaining=True) as show:
            found, gain = fitting.fit_correction(engine, documents, settings, progress=show)
        path = correction_path(store, engine.decoder.fingerprint)
        found.write(path)
        if dataset is not None and (asked := fitting.unseen_questions(dataset, seed=settings.seed)):
            with progress_bar("Measuring", remaining=True) as show:
                answers = fitting.gain_in_answers(
                    engine, found, dataset, asked, answer_tokens=answer_tokens, progress=show
                )
    return Fitted(gain, answers, path)


def documents_of_index(store: Path, embeddings: str | None) -> Documents:
    """The documents of the retrieval index in a store folder.

    Raises:
        ConfigError: it has none.
    """
    from cachecraft_rag.errors import ConfigError
    from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER, Embedder
    from cachecraft_rag.retrievers.retriever import INDEX_FOLDER, open_index

    if not (store / INDEX_FOLDER).is_dir():
        raise ConfigError(
            f"{store} has no documents to fit a correction on; add some with `cachecraft index DIR`, or name a file of "
            "questions with --data"
        )
    index = open_index(store, Embedder(embeddings or BUNDLED_EMBEDDER))
    try:
        return [index.chunks_of(document.doc_id) for document in index.documents()]
    finally:
        index.close()


def report(fitted: Fitted, *, as_json: bool) -> None:
    """Print what was found."""
    if as_json:
        print_json(_plain(fitted))
        return
    gain, answers = fitted.gain, fitted.answers
    _say(
        f"on documents it did not see ({gain.tokens:,} tokens) it takes away {gain.keys:.0%} of the squared error of "
        f"keys and {gain.values:.0%} of that of values"
    )
    if answers is not None:
        difference = answers.difference
        _say(
            f"KL to full prefill on {answers.questions} questions about them, captured alone: {answers.off:.4f} "
            f"without, {answers.learned:.4f} with it; difference {difference.mean:+.4f} [{difference.low:+.4f}, "
            f"{difference.high:+.4f}]"
        )
    _say(f"written to {fitted.path}: every engine opened on this store with this model corrects chunks captured alone")
    _say('ReuseConfig(correction="off") switches it off; delete the file to undo it')


def _plain(fitted: Fitted) -> dict[str, Any]:
    answers = None if fitted.answers is None else asdict(fitted.answers)
    return {"gain": asdict(fitted.gain), "answers": answers, "file": str(fitted.path)}


def _say(line: str) -> None:
    out.print(line, highlight=False, soft_wrap=True)
