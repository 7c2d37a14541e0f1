"""Split documents into chunks at headings, paragraphs and sentences, each small enough for the embedding model.

A chunk's text begins with its heading path, a blank line, and then the text of its section, so that it can be
understood alone: `Kettle K2 > Descaling`. A heading always begins a new chunk, but a section that fits into one chunk
together with all of its subsections stays whole. Rejected: filling every chunk up to the limit across headings. It
makes fewer chunks, but each covers several topics, and an edit of one section would change the chunks of its
neighbours.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cachecraft_rag.checks import from_extra
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.chunk_bound import SMALLEST_LIMIT, ModelTokens
from cachecraft_rag.types.documents import Chunk, Document, Scalar

# raise it when a document would be split differently: indexes then split again
SPLITTER_VERSION = 4

# An English token of an embedding model has four or five characters. But text outside its vocabulary may be one token:
# to BERT a paragraph of Thai or a megabyte of base64 is *one* unknown token, while the answering model would read
# thousands.
CHARACTERS_PER_TOKEN = 12

# Characters given to the splitter at a time: it scans the rest of the text at every cut, which is quadratic.
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class _Section:
    """A heading and the text up to the next heading, or a table; character offsets into the document."""

    level: int  # 0 for the text before the first heading, and for a table
    title: str
    start: int  # of the heading, or of the table's headings
    body: int  # where the text after them begins
    end: int


@dataclass(frozen=True, slots=True)
class _Measure:
    """Sizes of texts, in tokens, of which a chunk has at most `limit`."""

    count_tokens: Callable[[str], int]
    limit: int
    model: ModelTokens | None

    def size(self, text: str) -> int:
        """Return a text's tokens, at least a 12th of its characters, scaled if `model` allows fewer than `limit`."""
        by_length = -(-len(text) // CHARACTERS_PER_TOKEN)
        # At every cut the splitter measures the whole rest of a long line: counting its tokens would be quadratic.
        if by_length > self.limit:
            return by_length
        counted = max(self.count_tokens(text), by_length)
        if counted > self.limit or self.model is None:
            return counted
        return max(counted, self.model.share(text, self.limit))

    def fits(self, text: str, *, half: bool = False) -> bool:
        """Return True for a text that fits into a chunk, or into half of one."""
        return self.size(text) <= self.limit // (2 if half else 1)


def split(
    document: Document,
    *,
    count_tokens: Callable[[str], int],
    limit: int,
    model: ModelTokens | None = None,
) -> list[Chunk]:
    """Split a document into chunks, in order; they cover all its text (blank: []), none has more than `limit` tokens.

    Headings are looked for only in a document whose metadata `format` is "markdown" or missing. Each chunk's metadata
    is the document's, and `source` (the `doc_id`), `heading` (the path, "" without headings), `ordinal` (from 0),
    `start` and `end` (character offsets in the document of its text without the path and without headings of a table),
    and `page` (from 1) if the document's metadata has `pages`. The same document always gives the same chunks.

    Args:
        count_tokens: returns the embedding model's tokens of a text, special tokens included.
        limit: most tokens of a chunk, at least `SMALLEST_LIMIT` (16); it has at most 12 times as many characters.
        model: bounds a chunk by another model's tokens too: one unknown token here may be thousands there.
    """
    if limit < SMALLEST_LIMIT:
        raise ConfigError(
            f"a chunk limit of {limit} tokens leaves no room for text; use at least {SMALLEST_LIMIT}"
        )
    # no tokenizer takes lone surrogates; a form feed becomes a line end in chunks
    text = re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", document.text)
    page_ends = [match.start() for match in re.finditer("\f", text)]
    measure = _Measure(count_tokens, limit, model)
    is_markdown = document.metadata.get("format", "markdown") == "markdown"
    sections, tables = _outline(text, is_markdown=is_markdown)
    text = text.replace("\f", "\n")
    chunks: list[Chunk] = []
    for path, start, end in _parts(text, sections, measure):
        above = f"{path}\n\n" if path else ""
        for first, last, headings in _spans(text, start, end, above, tables, measure):
            is_prose = is_markdown and not headings
            prefix = above + headings
            for at, piece in _pieces(text, first, last, prefix, measure, is_markdown=is_prose):
                metadata: dict[str, Scalar] = {**document.metadata, "source": document.doc_id}
                metadata |= {"heading": path, "ordinal": len(chunks)}
                metadata |= {"start": at, "end": at + len(piece)}
                if "pages" in document.metadata:
                    metadata["page"] = bisect.bisect_right(page_ends, at) + 1
                chunks.append(Chunk(prefix + piece if piece else path, metadata))
    return chunks


def _outline(text: str, *, is_markdown: bool) -> tuple[list[_Section], deque[_Section]]:
    """Return the sections of a text, without gaps, and its tables; not those in code, lists and quotes."""
    with from_extra("retrieval", "Cutting documents into chunks"):
        from markdown_it import MarkdownIt
    sections = [_Section(0, "", 0, 0, len(text))]
    tables: deque[_Section] = deque()
    if not is_markdown:
        return sections, tables
    # where each line begins
    lines = [0, *(match.end() for match in re.finditer(r"\r\n?|\n", text)), len(text), len(text)]
    # YAML front matter, which Markdown would read as a rule and a heading
    matter = re.match(
        r"---[ \t]*(\r\n?|\n)(.*?(\r\n?|\n))??(---|\.\.\.)[ \t]*(\r\n?|\n|$)", text, re.DOTALL
    )
    end = matter.end() if matter else 0
    parser = MarkdownIt("commonmark").enable("table")
    parser.core.ruler.enableOnly(["normalize", "block"])  # inline markup is not needed
    tokens = parser.parse(re.sub(r"[^\r\n]", " ", text[:end]) + text[end:])
    for token, inner in itertools.pairwise(tokens):
        if token.level or token.map is None:
            continue
        start, after = (lines[line] for line in token.map)
        if token.type == "table_open" and inner.map is not None:
            tables.append(_Section(0, "", start, lines[inner.map[1] + 1], after))
        title = " ".join(inner.content.split())
        # Markdown allows up to three spaces before a heading; in practice such lines are code.
        if token.type == "heading_open" and title and not text[start].isspace():
            sections[-1] = replace(sections[-1], end=start)
            sections.append(_Section(int(token.tag[1:]), title, start, after, len(text)))
    return sections, tables


def _parts(
    text: str, sections: list[_Section], measure: _Measure
) -> Iterator[tuple[str, int, int]]:
    """Yield the parts that become one or more chunks each: (heading path, start, end of the text), in order.

    A heading without text needs no chunk if it is in the next part's path. If the path was shortened and lost it, that
    part's text begins at the heading instead.
    """
    # the enclosing sections, outermost first, then the current one
    open_sections: list[_Section] = []
    unseen: list[_Section] = []  # headings that are in no chunk yet
    at = 0
    while at < len(sections):
        section = sections[at]
        open_sections = [outer for outer in open_sections if outer.level < section.level]
        if section.level:
            open_sections.append(section)
            unseen.append(section)
        path, shown = _heading_path(open_sections, measure)
        start = min([section.body, *(heading.start for heading in unseen if heading not in shown)])
        family = _family(sections, at)
        if not measure.fits(f"{path}\n\n{text[start : family[-1].end].strip()}".lstrip()):
            family = [section]
        end = family[-1].end
        at += len(family)
        is_leaf = at == len(sections) or sections[at].level <= section.level
        if text[section.body : end].strip() or (is_leaf and section.level):
            yield path, start, end
            unseen = []


def _family(sections: list[_Section], at: int) -> list[_Section]:
    """Return the section at `at` and those within it; text before the first heading has none."""
    level = sections[at].level or 9
    following = (sections[later] for later in range(at + 1, len(sections)))
    return [sections[at], *itertools.takewhile(lambda later: later.level > level, following)]


def _heading_path(around: list[_Section], measure: _Measure) -> tuple[str, list[_Section]]:
    """Return the path as text, and its sections. Outer headings are dropped while it takes more than half the limit."""
    for skip in range(len(around)):
        path = " > ".join(section.title for section in around[skip:])
        if measure.fits(path, half=True):
            return path, around[skip:]
    return "", []


def _spans(
    text: str, start: int, end: int, above: str, tables: deque[_Section], measure: _Measure
) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, headings to repeat) of tables that are too long for a chunk, and of the text between."""
    while tables and tables[0].start < end:
        table = tables.popleft()
        headings = text[table.start : table.body]
        is_long = table.body < table.end and not measure.fits(above + text[table.start : table.end])
        if is_long and measure.fits(above + headings, half=True):
            if text[start : table.start].strip():
                yield start, table.start, ""
            yield table.body, table.end, headings
            start = table.end
            if not text[start:end].strip():
                return
    yield start, end, ""


def _pieces(
    text: str, start: int, end: int, prefix: str, measure: _Measure, *, is_markdown: bool
) -> Iterator[tuple[int, str]]:
    """Yield (offset, piece) of a span of the text, each of which fits into a chunk after the prefix."""
    with from_extra("retrieval", "Cutting documents into chunks"):
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

    def size(piece: str) -> int:
        return measure.size(prefix + piece)

    if not text[start:end].strip():
        yield start, ""
        return
    kind = MarkdownSplitter if is_markdown else TextSplitter
    splitter = kind.from_callback(size, measure.limit)
    for first, block in _halves(start, text[start:end], lambda block: len(block) <= _BLOCK):
        for offset, piece in splitter.chunk_indices(block):
            # some are too long, as of `1.1.1.1`
            for at, half in _halves(
                first + offset, piece, lambda half: size(half) <= measure.limit
            ):
                if half.strip():
                    yield at, half


def _halves(offset: int, piece: str, fits: Callable[[str], bool]) -> Iterator[tuple[int, str]]:
    """Yield the piece, or parts that fit, cut after a paragraph, line, sentence or word near the middle."""
    if len(piece) < 2 or fits(piece):
        yield offset, piece
        return
    middle = len(piece) // 2
    cuts = (
        piece.rfind(mark, middle // 2, middle) + len(mark) for mark in ("\n\n", "\n", ". ", " ")
    )
    middle = next((cut for cut in cuts if cut > middle // 2), middle)
    yield from _halves(offset, piece[:middle], fits)
    yield from _halves(offset + middle, piece[middle:], fits)
