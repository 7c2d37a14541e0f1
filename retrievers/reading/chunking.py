"""Split documents into chunks at headings, paragraphs and sentences, each small enough for the embedding model.

A chunk's text begins with its heading path, a blank line, and then the text of its section, so that it can be
understood alone: `Kettle K2 > Descaling`. The path comes from the document's own headings and counts towards the limit.
Where the answering model is known, its tokens bound a chunk too (`ModelTokens`): what is one unknown token to the
embedding model may be thousands to the other.

A heading always begins a new chunk, with one exception: a section that fits into one chunk together with all of its
subsections stays whole. Rejected: filling every chunk up to the limit across headings. It makes fewer chunks, but each
covers several topics, and an edit of one section would change the chunks of its neighbours.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.chunk_bound import SMALLEST_LIMIT, ModelTokens
from cachecraft_rag.types.documents import Chunk, Document, Scalar

# raise it when a document would be split differently: indexes then split again
SPLITTER_VERSION = 3

# An English token of an embedding model has four or five characters. But text outside its vocabulary may be one token:
# to BERT a paragraph of Thai or a megabyte of base64 is *one* unknown token, while the answering model would read
# thousands.
CHARACTERS_PER_TOKEN = 12

# Characters given to the splitter at a time: it scans the rest of the text at every cut, which is quadratic.
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class _Section:
    """A heading and the text up to the next heading of any level; character offsets into the document."""

    level: int  # 0 for the text before the first heading
    title: str
    start: int  # of the heading itself
    body: int  # where the text after the heading begins
    end: int


def split(
    document: Document,
    *,
    count_tokens: Callable[[str], int],
    limit: int,
    model: ModelTokens | None = None,
) -> list[Chunk]:
    """Split a document into chunks, in order; they cover all its text, and none has more than `limit` tokens.

    Nor has any more than 12 times as many characters as `limit`. A chunk's text is the path of its headings, such as
    `Kettle K2 > Descaling`, a blank line, and a piece of the section. Headings are looked for only in a document whose
    metadata `format` is "markdown" or missing. Each chunk's metadata is the document's, and `source` (the `doc_id`),
    `heading` (the path, "" without headings), `ordinal` (from 0), `start` and `end` (character offsets in the document
    of its text without the path), and `page` (from 1) if the document's metadata has `pages`. The same document always
    gives the same chunks; a document without text, or of white space alone, gives an empty list.

    Args:
        document: the document.
        count_tokens: returns the embedding model's tokens of a text, special tokens included.
        limit: most tokens of a chunk.
        model: bounds a chunk by another model's tokens too.

    Raises ConfigError for a limit below `SMALLEST_LIMIT`. What `count_tokens` and `model.count` raise passes; neither
    is given half a surrogate pair.
    """
    if limit < SMALLEST_LIMIT:
        raise ConfigError(
            f"a chunk limit of {limit} tokens leaves no room for text; use at least {SMALLEST_LIMIT}"
        )
    # no tokenizer takes lone surrogates
    text = re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", document.text)
    markdown = document.metadata.get("format", "markdown") == "markdown"
    sections = _sections(text) if markdown else [_Section(0, "", 0, 0, len(text))]

    def size(candidate: str) -> int:
        by_length = -(-len(candidate) // CHARACTERS_PER_TOKEN)
        # At every cut the splitter measures the whole rest of a long line: counting its tokens would be quadratic.
        if by_length > limit:
            return by_length
        counted = max(count_tokens(candidate), by_length)
        return (
            counted
            if counted > limit or model is None
            else max(counted, model.share(candidate, limit))
        )

    page_ends = [match.start() for match in re.finditer("\f", text)]
    chunks: list[Chunk] = []
    for path, start, end in _parts(text, sections, size=size, limit=limit):
        for offset, piece, headings in _pieces(
            text[start:end], path, markdown=markdown, size=size, limit=limit
        ):
            first = start + offset
            metadata: dict[str, Scalar] = {
                **document.metadata,
                "source": document.doc_id,
                "heading": path,
                "ordinal": len(chunks),
                "start": first,
                "end": first + len(piece),
            }
            if "pages" in document.metadata:
                metadata["page"] = bisect.bisect_right(page_ends, first) + 1
            chunks.append(Chunk(_join(path, headings + piece.replace("\f", "\n")), metadata))
    return chunks


def _join(path: str, body: str) -> str:
    """Join a chunk's heading path and its section's text, either of which may be empty."""
    return f"{path}\n\n{body}" if path and body else path or body


def _sections(text: str) -> list[_Section]:
    """Return the sections of a Markdown text, without gaps. Headings in code, lists and quotes do not count."""
    from markdown_it import MarkdownIt

    # where each line begins
    lines = [0, *(match.end() for match in re.finditer(r"\r\n?|\n", text)), len(text)]
    front = re.match(
        r"---[ \t]*(\r\n?|\n)(.*?(\r\n?|\n))??(---|\.\.\.)[ \t]*(\r\n?|\n|$)", text, re.DOTALL
    )
    # YAML front matter, which Markdown would read as a rule and a heading
    matter = front.end() if front else 0
    blanked = re.sub(r"[^\r\n]", " ", text[:matter]) + text[matter:]
    parser = MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])  # inline markup is not needed
    tokens = parser.parse(blanked)
    sections = [_Section(0, "", 0, 0, len(text))]
    for token, inline in itertools.pairwise(tokens):
        is_heading = token.type == "heading_open" and token.level == 0
        if not is_heading or token.map is None:
            continue
        start = lines[token.map[0]]
        body = lines[min(token.map[1], len(lines) - 1)]
        title = " ".join(inline.content.split())
        # Markdown allows up to three spaces before a heading; in practice such lines are code.
        if title and not text[start].isspace():
            sections[-1] = replace(sections[-1], end=start)
            sections.append(_Section(int(token.tag[1:]), title, start, body, len(text)))
    return sections


def _parts(
    text: str, sections: list[_Section], *, size: Callable[[str], int], limit: int
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
        path, shown = _heading_path(open_sections, size=size, limit=limit)
        start = min([section.body, *(heading.start for heading in unseen if heading not in shown)])
        last = _subtree(sections, at)
        end = sections[last].end
        if not _fits(_join(path, text[start:end].strip()), size, limit):
            last = at
            end = section.end
        is_leaf = last + 1 == len(sections) or sections[last + 1].level <= section.level
        if text[section.body : end].strip() or (is_leaf and section.level):
            yield path, start, end
            unseen = []
        at = last + 1


def _subtree(sections: list[_Section], at: int) -> int:
    """Return the index of the last section within the section at `at`; text before the first heading has none."""
    last = at
    while (
        sections[at].level
        and last + 1 < len(sections)
        and sections[last + 1].level > sections[at].level
    ):
        last += 1
    return last


def _fits(candidate: str, size: Callable[[str], int], limit: int) -> bool:
    # Not counted beyond the limit: counting a whole book at each heading level would be quadratic in the depth.
    return len(candidate) <= limit * CHARACTERS_PER_TOKEN and size(candidate) <= limit


def _heading_path(
    around: list[_Section], *, size: Callable[[str], int], limit: int
) -> tuple[str, list[_Section]]:
    """Return the path as text, and its sections. Outer headings are dropped while it takes more than half the limit."""
    for skip in range(len(around)):
        path = " > ".join(section.title for section in around[skip:])
        if _fits(path, size, limit // 2):
            return path, around[skip:]
    return "", []


def _size_below(size: Callable[[str], int], path: str, headings: str, piece: str) -> int:
    """Return the size of a piece below its path and the headings of its table."""
    return size(_join(path, headings + piece))


def _is_within(size: Callable[[str], int], limit: int, piece: str) -> bool:
    return size(piece) <= limit


def _pieces(
    text: str, path: str, *, markdown: bool, size: Callable[[str], int], limit: int
) -> list[tuple[int, str, str]]:
    """Return (offset, piece, headings to repeat before it) of a part's text; never empty.

    Each piece fits the limit together with the path and the headings, which are those of a table too long for a chunk.
    """
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    # A form feed becomes a line end: the same length, so offsets stay, but perhaps another number of tokens.
    text = text.replace("\f", "\n")
    if not text.strip():
        return [(0, "", "")]
    kind = MarkdownSplitter if markdown else TextSplitter
    pieces: list[tuple[int, str, str]] = []
    is_whole = not markdown or _fits(_join(path, text), size, limit)
    for start, end, headings in [(0, len(text), "")] if is_whole else _tables(text):
        # a table is cut between its rows, and only if it or its headings are too long for one chunk
        if headings and _fits(_join(path, headings), size, limit // 2):
            splitter_type: type[TextSplitter | MarkdownSplitter] = TextSplitter
        else:
            start -= len(headings)
            headings = ""
            splitter_type = kind
        size_of = partial(_size_below, size, path, headings)
        splitter = splitter_type.from_callback(size_of, limit)
        is_first = True
        for first, last in _blocks(text[start:end]):
            for offset, piece in splitter.chunk_indices(text[start + first : start + last]):
                at = start + first + offset
                for half, part in _halves(at, piece, partial(_is_within, size_of, limit)):
                    if part.strip():
                        shown = (
                            len(headings) if is_first else 0
                        )  # the first piece holds its own headings
                        pieces.append(
                            (
                                half - shown,
                                text[half - shown : half] + part,
                                "" if is_first else headings,
                            )
                        )
                        is_first = False
    return pieces


def _tables(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, headings) of a Markdown text's tables of many rows and of the texts between, in order.

    A table starts after its headings: the two lines of column names and dashes.
    """
    done = 0
    table = r"^\|[^\n]*\n\|(?:[ :-]+\|)+[ ]*\n(?:\|[^\n]*(?:\n|\Z)){8,}"
    for match in re.finditer(table, text, re.MULTILINE):
        rows = match[0].index("\n", match[0].index("\n") + 1) + 1
        if match.start() > done:
            yield done, match.start(), ""
        yield match.start() + rows, match.end(), match[0][:rows]
        done = match.end()
    if done < len(text):
        yield done, len(text), ""


def _halves(offset: int, piece: str, fits: Callable[[str], bool]) -> Iterator[tuple[int, str]]:
    """Yield the piece, or its halves if it does not fit: the splitter makes some a little too long, as of `1.1.1.1`."""
    if len(piece) < 2 or fits(piece):
        yield offset, piece
        return
    middle = len(piece) // 2
    yield from _halves(offset, piece[:middle], fits)
    yield from _halves(offset + middle, piece[middle:], fits)


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of pieces of at most `_BLOCK` characters, cut after a paragraph, line, sentence or word."""
    start = 0
    while len(text) - start > _BLOCK:
        end = start + _BLOCK
        cuts = (text.rfind(mark, start, end) + len(mark) for mark in ("\n\n", "\n", ". ", " "))
        end = next((cut for cut in cuts if cut > start + _BLOCK // 2), end)
        yield start, end
        start = end
    yield start, len(text)
