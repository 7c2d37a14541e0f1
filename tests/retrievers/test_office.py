"""Word files, tables and JSON as text."""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.indexer import index_folder
from cachecraft_rag.retrievers.reading.documents import SourceFile
from cachecraft_rag.retrievers.reading.limited_reader import LimitedReader
from cachecraft_rag.retrievers.reading.office import FormatError, docx_to_markdown
from cachecraft_rag.retrievers.retriever import open_index

if TYPE_CHECKING:
    from cachecraft_rag.types.documents import Document

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
BODY = (
    '<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Kettle</w:t></w:r></w:p>'
    "<w:p><w:r><w:t>Descale it every 8 weeks.</w:t></w:r></w:p>"
    "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>Size</w:t></w:r></w:p></w:tc>"
    "<w:tc><w:p><w:r><w:t>1.7 litres</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
)


def docx_bytes(body: str = BODY, **parts: bytes) -> bytes:
    """A Word file with the three parts that every one has."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "[Content_Types].xml",
            '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
            '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            '<Override PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.'
            'wordprocessingml.document.main+xml"/></Types>',
        )
        archive.writestr(
            "_rels/.rels",
            '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="r1" '
            'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
        )
        archive.writestr(
            "word/document.xml", f"<w:document {W}><w:body>{body}</w:body></w:document>"
        )
        styles = (
            f'<w:styles {W}><w:style w:type="paragraph" w:styleId="Heading1"><w:name w:val="heading 1"/></w:style>'
            "</w:styles>"
        )
        parts.setdefault("word/styles.xml", styles.encode())
        for name, data in parts.items():
            archive.writestr(name, data)
    return made.getvalue()


def read(name: str, data: bytes | str) -> Document:
    with LimitedReader() as reader:
        data = data if isinstance(data, bytes) else data.encode()
        return reader.read(SourceFile(Path(name), name), data)


def test_a_word_file_keeps_its_headings_and_tables() -> None:
    document = read("kettle.docx", docx_bytes())
    assert document.metadata["format"] == "markdown"
    assert document.text.startswith("# Kettle\n")
    for text in ("Descale it every 8 weeks.", "Size", "1.7 litres"):
        assert text in document.text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no archive", "is of another kind than its name says"),
        (docx_bytes(body=""), "holds no text"),
        (docx_bytes(body="<w:p>" * 50_000), "cannot be read"),
    ],
)
def test_a_bad_word_file_is_a_problem_with_its_name(data: bytes, reason: str) -> None:
    with pytest.raises(DocumentError, match=reason) as raised:
        read("bad.docx", data)
    assert "bad.docx" in str(raised.value)


def test_a_word_file_that_unpacks_to_more_than_the_limit_is_not_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cachecraft_rag.retrievers.reading.office.MOST_UNPACKED", 1 << 20)
    bomb = docx_bytes(padding=b"0" * (2 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(FormatError, match="unpacks to more than 1 MiB"):
        docx_to_markdown(bomb)


@pytest.mark.parametrize(("name", "sign"), [("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")])
def test_each_row_of_a_table_names_its_columns(name: str, sign: str) -> None:
    table = "\r\n".join(
        sign.join(row)
        for row in [("name", "size", ""), ("Wren K2", '"1.7 litres"', "x"), ("Otter C6", "", "")]
    )
    assert (
        read(name, table).text == "name: Wren K2\nsize: 1.7 litres\ncolumn 3: x\n\nname: Otter C6"
    )


def test_long_names_do_not_multiply_a_text() -> None:
    name, rows = "n" * 50_000, 1000
    table = read("a.csv", f"{name},litres\n" + "K2,1.7\n" * rows).text
    assert name in table  # once
    assert len(table) < 350 * rows
    nested = (
        '{"'
        + '":{"'.join("k" * 100 for _ in range(200))
        + '":'
        + str(list(range(rows)))
        + "}" * 200
    )
    for text in (json.dumps({name: list(range(rows))}), nested):
        found = read("a.json", text).text
        assert len(found) < 350 * rows
        assert found.endswith(f": {rows - 1}")
    assert name in read("a.json", json.dumps({name: 1})).text


def test_cells_may_hold_separators_lines_and_long_texts() -> None:
    long = "word " * 50_000
    text = read("a.csv", f'name,text\n"Wren, K2","two\nlines"\nB,"{long}"\n').text
    assert text.startswith("name: Wren, K2\ntext: two lines\n\nname: B\ntext: word word")
    assert len(text) > 200_000


@pytest.mark.parametrize("depth", [900, 990, 1_400, 100_000])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_of_any_depth_is_read_or_a_problem(name: str, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    lines = f"{nested}\n{nested}" if name == "a.jsonl" else nested
    try:
        text = read(name, lines).text
    except DocumentError as error:
        text = str(error)
    assert text.endswith("a: 1") or "nested too deep" in text


def test_records_inside_an_object_are_paragraphs() -> None:
    records = [{"name": "K2", "price": 1}, {"name": "C6", "price": 2}]
    expected = "total: 2\n\nname: K2\nprice: 1\n\nname: C6\nprice: 2"
    assert read("a.json", json.dumps({"total": 2, "results": records})).text == expected
    assert read("a.json", json.dumps({"total": 2, "data": {"items": records}})).text == expected


def test_a_value_whose_name_comes_again_in_an_object_around_records_is_kept() -> None:
    around = {"id": 1, "result": {"id": 7, "items": [{"a": 1}, {"a": 2}]}}
    assert read("a.json", json.dumps(around)).text == "id: 1\nresult.id: 7\n\na: 1\n\na: 2"


@pytest.mark.parametrize(
    "text",
    [
        "sep=;\nname;litres\nWren;1,7\n",
        "Stock\nname;litres\nWren;1,7\n",
        "Stock;\nname;litres\nWren;1,7\n",
    ],
)
def test_the_row_of_column_names_is_found_below_other_lines(text: str) -> None:
    assert read("a.csv", text).text.removeprefix("Stock\n\n") == "name: Wren\nlitres: 1,7"


def test_prose_in_one_column_has_no_title_row() -> None:
    assert (
        read("a.csv", "note\nHello; world\nSo; long\n").text
        == "note: Hello; world\n\nnote: So; long"
    )


def test_equations_and_numbers_of_word_lists_are_text() -> None:
    math = "http://schemas.openxmlformats.org/officeDocument/2006/math"
    item = (
        '<w:p><w:pPr><w:numPr><w:ilvl w:val="0"/><w:numId w:val="1"/></w:numPr></w:pPr>'
        "<w:r><w:t>{}</w:t></w:r></w:p>"
    )
    equation = (
        f'<w:p xmlns:m="{math}"><m:oMath><m:f><m:num><m:r><m:t>a+b</m:t></m:r></m:num>'
        "<m:den><m:r><m:t>2</m:t></m:r></m:den></m:f></m:oMath></w:p>"
    )
    numbering = (
        f'<w:numbering {W}><w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0"><w:start w:val="1"/>'
        '<w:numFmt w:val="decimal"/></w:lvl></w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
        "</w:numbering>"
    )
    body = item.format("Close") + item.format("Wait") + equation + item.format("Open")
    data = docx_bytes(body, **{"word/numbering.xml": numbering.encode()})
    assert read("a.docx", data).text == "1. Close\n2. Wait\n\n(a+b)/2\n\n3. Open"


def test_workbooks_presentations_and_books_are_read() -> None:
    from pptx import Presentation
    from xlsxwriter import Workbook

    made = io.BytesIO()
    with Workbook(made) as workbook:
        sheet = workbook.add_worksheet("Stock")
        for row, cells in enumerate([("name", "litres"), ("Wren", 1.7), ("Otter", 2)]):
            sheet.write_row(row, 0, cells)
    assert (
        read("a.xlsx", made.getvalue()).text
        == "# Stock\n\nname: Wren\nlitres: 1.7\n\nname: Otter\nlitres: 2"
    )
    made = io.BytesIO()
    slides = Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[1])
    slide.shapes.title.text = "Care"
    slide.placeholders[1].text = "Rinse it."
    slides.save(made)
    assert read("a.pptx", made.getvalue()).text == "## Care\n\nRinse it."
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("META-INF/container.xml", '<c><rootfile full-path="O/b.opf"/></c>')
        archive.writestr(
            "O/b.opf",
            '<p><title>Kettles</title><item id="1" href="1.xhtml"/><itemref idref="1"/></p>',
        )
        archive.writestr("O/1.xhtml", "<h1>One</h1><p>Boil.</p>")
    book = read("a.epub", made.getvalue())
    assert (book.text, book.metadata["title"]) == ("# One\n\nBoil.", "Kettles")


def word_field(data: str, code: str, result: str = "") -> str:
    """A form field of Word, as it writes them since 1997."""
    mark = '<w:r><w:fldChar w:fldCharType="{}">{}</w:fldChar></w:r>'.format
    code = f"<w:r><w:instrText> {code} </w:instrText></w:r>"
    shown = f"{mark('separate', '')}<w:r><w:t>{result}</w:t></w:r>" if result else ""
    return f"{mark('begin', f'<w:ffData>{data}</w:ffData>')}{code}{shown}{mark('end', '')}"


def test_tick_boxes_choices_and_texts_of_word_forms_are_text() -> None:
    new = "http://schemas.microsoft.com/office/word/2010/wordml"

    def box(value: str, sign: str) -> str:
        return (
            f'<w:sdt><w:sdtPr><w14:checkbox xmlns:w14="{new}"><w14:checked w14:val="{value}"/></w14:checkbox></w:sdtPr>'
            f"<w:sdtContent><w:r><w:t>{sign}</w:t></w:r></w:sdtContent></w:sdt>"
        )

    def line(*parts: str) -> str:
        return f"<w:p>{''.join(parts)}</w:p>"

    def said(text: str) -> str:
        return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'

    sizes = (
        '<w:ddList><w:result w:val="1"/><w:listEntry w:val="S"/><w:listEntry w:val="M"/></w:ddList>'
    )
    ticked = '<w:checkBox><w:default w:val="0"/><w:checked/></w:checkBox>'
    plain = '<w:checkBox><w:default w:val="0"/></w:checkBox>'
    body = (
        line(box("1", "☒"), said(" Express")),
        line(box("0", "☐"), said(" Gift")),
        line(word_field(ticked, "FORMCHECKBOX"), said(" Insured")),
        line(word_field(plain, "FORMCHECKBOX"), said(" Signed")),
        line(said("Size: "), word_field(sizes, "FORMDROPDOWN")),
        line(said("Name: "), word_field("<w:textInput/>", "FORMTEXT", "Ines")),
    )
    assert read("form.docx", docx_bytes("".join(body))).text.split("\n\n") == [
        "[x] Express",
        "[ ] Gift",
        "[x] Insured",
        "[ ] Signed",
        "Size: M",
        "Name: Ines",
    ]


def hidden_bytes() -> bytes:
    """A Word file with text that is hidden directly, by its style and by that of its paragraph."""

    def run(text: str, properties: str = "") -> str:
        return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'

    styles = "".join(
        f'<w:style w:type="{kind}" w:styleId="{kind}"><w:rPr><w:vanish/></w:rPr></w:style>'
        for kind in ("character", "paragraph")
    )
    runs = [
        run("Rinse it"),
        run(" secretly", "<w:vanish/>"),
        run(" daily", '<w:rStyle w:val="character"/>'),
        run(".", '<w:vanish w:val="0"/>'),
    ]
    note = f'<w:p><w:pPr><w:pStyle w:val="paragraph"/></w:pPr>{run("A note.")}</w:p>'
    body = f"<w:p>{''.join(runs)}</w:p>{note}"
    return docx_bytes(body, **{"word/styles.xml": f"<w:styles {W}>{styles}</w:styles>".encode()})


def test_hidden_text_of_word_is_left_out() -> None:
    assert read("a.docx", hidden_bytes()).text == "Rinse it."


def chart_bytes() -> bytes:
    from pptx import Presentation
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE

    slides = Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[5])
    slide.shapes.title.text = "Sales"
    numbers = CategoryChartData()
    numbers.categories = ["March"]
    numbers.add_series("Kettles", (7,))
    slide.shapes.add_chart(XL_CHART_TYPE.PIE, 0, 0, 9999, 9999, numbers)
    made = io.BytesIO()
    slides.save(made)
    return made.getvalue()


def hidden_slide_bytes() -> bytes:
    from pptx import Presentation

    slides = Presentation()
    for text in ("Shown", "Secret"):
        slides.slides.add_slide(slides.slide_layouts[5]).shapes.title.text = text
    slides.slides[1].element.set("show", "0")
    made = io.BytesIO()
    slides.save(made)
    return made.getvalue()


def hidden_sheet_bytes() -> bytes:
    from xlsxwriter import Workbook

    made = io.BytesIO()
    with Workbook(made) as workbook:
        for name in ("Shown", "Secret"):
            workbook.add_worksheet(name).write_row(0, 0, ("a", name))
        workbook.get_worksheet_by_name("Secret").hide()
    return made.getvalue()


def test_hidden_slides_and_sheets_are_left_out() -> None:
    assert read("a.pptx", hidden_slide_bytes()).text == "## Shown"
    assert read("a.xlsx", hidden_sheet_bytes()).text == "# Shown\n\na, Shown"


def book_bytes() -> bytes:
    """A book whose second chapter is not in the file."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("META-INF/container.xml", '<c><rootfile full-path="b.opf"/></c>')
        chapters = "".join(
            f'<item id="{n}" href="{n}.xhtml"/><itemref idref="{n}"/>' for n in (1, 2)
        )
        archive.writestr("b.opf", f"<p>{chapters}</p>")
        archive.writestr("1.xhtml", "<p>Boil.</p>")
    return made.getvalue()


INCOMPLETE = {
    "slides.pptx": (chart_bytes, "was read without charts; embedded files"),
    "book.epub": (book_bytes, "was read without the chapter 2.xhtml, which is missing in the file"),
    "word.docx": (
        lambda: docx_bytes("<w:p><w:r><w:t>Rinse.</w:t></w:r></w:p><w:altChunk/>"),
        "was read without An unrecognised element was ignored: w:altChunk",
    ),
    "diagram.docx": (
        lambda: docx_bytes(**{"word/diagrams/data1.xml": b"<x/>"}),
        "was read without diagrams",
    ),
    "hidden.docx": (hidden_bytes, "was read without hidden text"),
    "hidden.pptx": (hidden_slide_bytes, "was read without the hidden slide 2"),
    "hidden.xlsx": (hidden_sheet_bytes, "was read without the hidden sheet Secret"),
    "bad.txt": (
        lambda: "Rückgabe fünf Tage".encode() + b"\xff",
        "was read without 1 characters whose bytes are no UTF-8",
    ),
}


def test_a_document_that_lacks_something_is_indexed_and_a_problem(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, (make, _) in INCOMPLETE.items():
        (folder / name).write_bytes(make())
    (folder / "whole.txt").write_text("Nothing is missing here.")
    embedder = Embedder()
    with open_index(tmp_path / "store", embedder) as index:
        report = index_folder(folder, index, embedder)
    assert len(report.added) == len(INCOMPLETE) + 1
    problems = {problem.doc_id.removeprefix("docs/"): problem for problem in report.problems}
    assert set(problems) == set(INCOMPLETE)
    for name, (_, reason) in INCOMPLETE.items():
        assert problems[name].kind == "incomplete"
        assert re.search(f"{name}: {reason}", problems[name].reason)


def test_a_line_of_json_may_hold_other_line_ends() -> None:
    assert read("a.jsonl", '{"a": "b\u2028c"}\n{"a": "d"}').text == "a: b\u2028c\n\na: d"


def test_the_line_that_is_no_json_is_named() -> None:
    with pytest.raises(DocumentError, match="line 3: "):
        read("a.jsonl", '{"a": 1}\n\n{"a": 2')
    with pytest.raises(DocumentError, match="Expecting value: line 1 column 1"):
        read("a.json", "kettle\n1\n")


def test_json_and_json_lines_are_paths_with_values() -> None:
    entries = [
        {"name": "Wren K2", "size": {"litres": 1.7, "new": True}},
        {"parts": ["lid", None, "jug"]},
    ]
    expected = "name: Wren K2\nsize.litres: 1.7\nsize.new: true\n\nparts: lid\nparts: jug"
    assert read("a.json", json.dumps(entries)).text == expected
    assert read("a.jsonl", "\n".join(map(json.dumps, entries))).text == expected
    assert read("b.json", '{"größe": "1,7 l"}').text == "größe: 1,7 l"


@pytest.mark.parametrize("text", ["{", '{"a": 1} {"b": 2}', "[" * 100_000])
def test_what_is_no_json_is_a_problem(text: str) -> None:
    with pytest.raises(DocumentError, match=r"a\.json: cannot be read"):
        read("a.json", text)


def test_without_the_extra_a_word_file_is_a_problem_and_keeps_what_was_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "kettle.docx").write_bytes(docx_bytes())
    embedder = Embedder()
    with open_index(tmp_path / "store", embedder) as index:
        assert index_folder(folder, index, embedder).added == ("docs/kettle.docx",)
        (folder / "kettle.docx").write_bytes(docx_bytes(BODY.replace("8 weeks", "9 weeks")))
        monkeypatch.setitem(sys.modules, "mammoth", None)
        report = index_folder(folder, index, embedder)
        (problem,) = report.problems
        assert problem.kind == "inaccessible"
        assert "pip install 'cachecraft-rag[docx]'" in problem.reason
        assert report.removed == ()
        assert "8 weeks" in "".join(chunk.text for chunk in index.chunks_of("docs/kettle.docx"))
