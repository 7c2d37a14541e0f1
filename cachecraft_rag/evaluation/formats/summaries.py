"""CNN/DailyMail (Hermann et al., 2015) and XSum (Narayan et al., 2018): a text and its summary in each row.

As in Cache-Craft §5.1.2, a text is split into small segments, and a prompt gets a random selection of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachecraft_rag.evaluation.formats.records import Record
from cachecraft_rag.evaluation.formats.source import SEGMENT_TOKENS, Source, SourceBuilder, SourceQuestion, texts_of

SUMMARISE = "Summarise the text in a few sentences."
SUMMARISE_BRIEFLY = "Summarise the text in one sentence."  # XSum's summaries are the first sentence of an article


def recognises_cnn(record: Record) -> bool:
    """`article` beside `highlights`."""
    return {"article", "highlights"} <= record.fields.keys()


def recognises_xsum(record: Record) -> bool:
    """`document` beside `summary`."""
    return {"document", "summary"} <= record.fields.keys()


def read_cnn(records: Sequence[Record]) -> Source:
    """Summaries of a few sentences."""
    return _read(records, text="article", summary="highlights", question=SUMMARISE)


def read_xsum(records: Sequence[Record]) -> Source:
    """Summaries of one sentence."""
    return _read(records, text="document", summary="summary", question=SUMMARISE_BRIEFLY)


def _read(records: Sequence[Record], *, text: str, summary: str, question: str) -> Source:
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        if record.fields.get(text) == "":
            continue  # both published sets hold a few articles without a text
        name = record.label("id", str(number))
        place = builder.place(name, record.text(text))
        # No passages of other articles: leaving them out of the summary would be another task than the published one.
        builder.ask(
            SourceQuestion(name, question, texts_of([record.text(summary)]), needed=(), near=(place,), fill=False)
        )
    return builder.source(passage_tokens=SEGMENT_TOKENS)
