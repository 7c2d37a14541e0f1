import codecs
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pypdf import PdfWriter
from pypdf.generic import (
    ArrayObject,
    DecodedStreamObject,
    DictionaryObject,
    NameObject,
    NumberObject,
    TextStringObject,
)

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.retrievers.folders import list_files
from cachecraft_rag.retrievers.reading.documents import SUFFIXES, SourceFile, parsing, read_text
from cachecraft_rag.retrievers.reading.limited_reader import LimitedReader
from cachecraft_rag.types.documents import Document


def pdf_bytes(*pages: str, password: str | None = None, algorithm: str = "RC4-128") -> bytes:
    """A PDF with one line of text on each page."""
    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(width=600, height=800)
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = writer._add_object(stream)
    if password is not None:
        writer.encrypt(password, algorithm=algorithm)
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


READER = LimitedReader()


@pytest.fixture(scope="module", autouse=True)
def one_reading_process() -> Iterator[None]:
    with READER:
        yield


def read_document(path: Path) -> Document:
    return READER.read(SourceFile(path, path.name), path.read_bytes())


def doc_ids(path: Path) -> list[str]:
    return [file.doc_id for file in list_files(path).files]


def text_of_html(folder: Path, body: str) -> str:
    return read_document(written(folder, "page.html", f"<html><body>{body}</body></html>")).text


# --- folders ---


def test_a_folder_is_read_in_order_and_named_by_posix_paths(tmp_path: Path):
    for name in ("b.md", "a/z.txt", "a/b/c.rst", "A.HTML", "d.markdown"):
        written(tmp_path, name, "text")
    assert doc_ids(tmp_path) == ["A.HTML", "a/b/c.rst", "a/z.txt", "b.md", "d.markdown"]
    assert list_files(tmp_path).problems == ()


def test_a_single_file_is_named_by_itself(tmp_path: Path):
    path = written(tmp_path, "deep/down/kettle.md", "text")
    assert doc_ids(path) == ["kettle.md"]


def test_hidden_files_and_folders_are_passed_over(tmp_path: Path):
    written(tmp_path, ".git/readme.md", "no")
    written(tmp_path, ".hidden.md", "no")
    written(tmp_path, "seen.md", "yes")
    assert doc_ids(tmp_path) == ["seen.md"]
    assert list_files(tmp_path).problems == ()


def test_a_hidden_folder_is_read_when_it_is_named(tmp_path: Path):
    written(tmp_path, ".notes/a.md", "yes")
    assert doc_ids(tmp_path / ".notes") == ["a.md"]


def test_other_kinds_of_file_are_problems_and_do_not_lose_the_rest(tmp_path: Path):
    for name in ("a.md", "photo.png", "z.md"):
        written(tmp_path, name, "text")
    listing = list_files(tmp_path)
    assert doc_ids(tmp_path) == ["a.md", "z.md"]
    assert [(problem.doc_id, problem.kind) for problem in listing.problems] == [
        ("photo.png", "unsupported")
    ]
    assert str(tmp_path / "photo.png") in listing.problems[0].reason


def test_links_are_followed_once_and_loops_end(tmp_path: Path):
    root = tmp_path / "root"
    written(root, "a/one.md", "one")
    written(tmp_path, "outside/two.md", "two")
    (root / "a/loop").symlink_to(root)
    (root / "0-link-to-a").symlink_to(root / "a")
    (root / "up").symlink_to(tmp_path)
    (root / "self").symlink_to(root / "self")
    (root / "elsewhere").symlink_to(tmp_path / "outside")
    (root / "linked.md").symlink_to(tmp_path / "outside/two.md")
    listing = list_files(root, follow_links=True)
    assert [file.doc_id for file in listing.files] == ["a/one.md", "elsewhere/two.md", "linked.md"]
    assert [(problem.doc_id, problem.kind) for problem in listing.problems] == [
        ("self", "inaccessible")
    ]


def test_a_link_that_leads_nowhere_is_a_problem(tmp_path: Path):
    (tmp_path / "gone.md").symlink_to(tmp_path / "never-was.md")
    listing = list_files(tmp_path)
    assert listing.files == ()
    assert "leads nowhere" in listing.problems[0].reason


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.txt")
    listing = list_files(tmp_path)
    assert listing.files == ()
    assert [(problem.doc_id, problem.kind) for problem in listing.problems] == [
        ("pipe.txt", "unsupported")
    ]
    with pytest.raises(DocumentError, match=r"pipe\.txt: is a pipe"):
        list_files(tmp_path / "pipe.txt")


def test_a_link_out_of_the_folder_is_a_problem_unless_asked_for(tmp_path: Path):
    root = tmp_path / "root"
    written(root, "a/one.md", "one")
    written(tmp_path, "outside/two.md", "secret")
    (root / "twin.md").symlink_to("a/one.md")
    (root / "elsewhere").symlink_to(tmp_path / "outside")
    (root / "linked.md").symlink_to("../outside/two.md")
    (root / "up").symlink_to(tmp_path)
    (root / "a/deeper.md").symlink_to(root / "linked.md")
    (root / "device.txt").symlink_to("/dev/zero")
    listing = list_files(root)
    assert [file.doc_id for file in listing.files] == ["a/one.md", "twin.md"]
    outside = ["a/deeper.md", "device.txt", "elsewhere", "linked.md", "up"]
    assert [(problem.doc_id, problem.kind) for problem in listing.problems] == [
        (name, "outside") for name in outside
    ]
    assert all("--follow-links" in problem.reason for problem in listing.problems)
    followed = list_files(root, follow_links=True)
    assert [file.doc_id for file in followed.files] == [
        "a/deeper.md",
        "a/one.md",
        "elsewhere/two.md",
        "linked.md",
        "twin.md",
    ]
    assert [(problem.doc_id, problem.kind) for problem in followed.problems] == [
        ("device.txt", "unsupported")
    ]


def test_a_folder_that_is_itself_a_link_is_read(tmp_path: Path):
    written(tmp_path, "release-2/a.md", "text")
    (tmp_path / "docs").symlink_to("release-2")
    assert doc_ids(tmp_path / "docs") == ["a.md"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_opened_is_inaccessible(tmp_path: Path):
    written(tmp_path, "locked/a.md", "text")
    (tmp_path / "locked").chmod(0)
    problems = list_files(tmp_path).problems
    (tmp_path / "locked").chmod(0o700)
    assert [(problem.doc_id, problem.kind) for problem in problems] == [("locked", "inaccessible")]


def test_a_name_that_is_not_unicode_becomes_one_that_a_database_takes(tmp_path: Path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.md"
    try:
        with open(path, "wb") as file:
            file.write(b"text")
    except OSError:
        pytest.skip("this file system takes only Unicode names")
    assert doc_ids(tmp_path) == ["caf\\xe9.md"]
    written(tmp_path, "caf\\xe9.md", "spelled as the other one is written")
    assert doc_ids(tmp_path) == ["caf\\xe9.md"]
    os.symlink("/etc/hostname", os.fsencode(tmp_path) + b"/\xff.md")
    problems = list_files(tmp_path).problems
    assert [(problem.doc_id, problem.kind) for problem in problems] == [
        ("\\xff.md", "outside"),
        ("caf\\xe9.md", "unsupported"),
    ]
    for problem in problems:
        assert problem.reason.encode("utf-8")


def test_a_path_where_nothing_is_names_itself(tmp_path: Path):
    with pytest.raises(DocumentError, match=r"nowhere: there is no such file or folder"):
        list_files(tmp_path / "nowhere")


def test_a_path_out_of_reach_says_why(tmp_path: Path):
    with pytest.raises(DocumentError, match=r"cannot be opened \(File name too long\); check"):
        # stands for a folder that may not be entered, which a test run by root can
        list_files(tmp_path / ("x" * 300))


def test_an_unknown_kind_of_file_lists_those_that_are_known(tmp_path: Path):
    path = written(tmp_path, "table.xls", "")
    for call in (list_files, read_document):
        with pytest.raises(DocumentError, match=r"table\.xls:.*\.pdf") as caught:
            call(path)
        assert all(suffix in str(caught.value) for suffix in SUFFIXES)


# --- text ---


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        ("Wärme €".encode(), "Wärme €", None),
        (codecs.BOM_UTF8 + "Wärme".encode(), "Wärme", None),
        (codecs.BOM_UTF16_LE + "Wärme".encode("utf-16-le"), "Wärme", "utf-16-le"),
        (codecs.BOM_UTF16_BE + "Wärme".encode("utf-16-be"), "Wärme", "utf-16-be"),
        (codecs.BOM_UTF32_LE + "Wärme".encode("utf-32-le"), "Wärme", "utf-32-le"),
        ("Wärme – „heiß“".encode("cp1252"), "Wärme – „heiß“", "cp1252"),
    ],
)
def test_encodings(tmp_path: Path, data: bytes, text: str, encoding: str | None):
    document = read_document(written(tmp_path, "a.txt", data))
    assert document.text == text
    assert document.metadata.get("encoding") == encoding


def test_one_bad_byte_is_one_replacement_character(tmp_path: Path):
    data = "Rückgabe fünf Tage".encode() + b"\xff" + " später".encode()
    assert read_document(written(tmp_path, "a.txt", data)).text == "Rückgabe fünf Tage\ufffd später"


def test_ligatures_and_hyphens_at_line_ends_become_plain_words(tmp_path: Path):
    text = "Rinse the \ufb01lter of the o\ufb03ce ma-\nchine. Self-service is a self-\nservice, pre-\nand post."
    expected = (
        "Rinse the filter of the office machine.\nSelf-service is a self-service,\npre-\nand post."
    )
    found = read_document(written(tmp_path, "a.txt", text)).text
    assert found.replace("\n", " ") == expected.replace("\n", " ")


def test_pdf_encrypted_with_aes_that_opens_without_a_password_is_read(tmp_path: Path):
    data = pdf_bytes("Open", password="", algorithm="AES-256")
    assert read_document(written(tmp_path, "a.pdf", data)).text == "Open"


def test_line_ends_of_all_systems_give_the_same_text(tmp_path: Path):
    texts = {
        read_document(written(tmp_path, "a.md", f"one{end}two{end}")).text
        for end in ("\n", "\r\n", "\r")
    }
    assert texts == {"one\ntwo\n"}


def test_a_binary_file_is_refused(tmp_path: Path):
    with pytest.raises(DocumentError, match=r"a\.txt: is not text.*save it as UTF-8"):
        read_document(written(tmp_path, "a.txt", b"ELF\0\1\2"))


@pytest.mark.parametrize("content", ["", " \n\t", "\ufeff"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: str):
    with pytest.raises(DocumentError, match=r"a\.md: holds no text"):
        read_document(written(tmp_path, "a.md", content))


def test_formats_tell_the_splitter_where_headings_can_be(tmp_path: Path):
    formats = {
        name: read_document(written(tmp_path, name, "text")).metadata["format"]
        for name in ("a.txt", "a.md", "a.markdown", "a.rst", "a.html", "a.htm")
    }
    assert formats.pop("a.txt") == "text"
    assert set(formats.values()) == {"markdown"}


def test_a_long_title_is_not_copied_to_each_chunk(tmp_path: Path):
    document = read_document(written(tmp_path, "a.html", f"<title>{'t' * 50_000}</title><p>Rinse"))
    assert document.metadata["title"] == "t" * 200


# --- reStructuredText ---


def test_rst_titles_become_headings_by_order_of_style(tmp_path: Path):
    text = (
        "======\n Kettle\n======\n\nCare\n----\nRinse.\n\nParts\n---\n\nLid\n~~~\n\nA paragraph\nbefore\n------\n\n"
        "Scale\n-----\n\n::\n\n   code: x\n   ---\n"
    )
    document = read_document(written(tmp_path, "a.rst", text))
    assert [line for line in document.text.split("\n") if line.startswith("#")] == [
        "# Kettle",
        "## Care",
        "### Lid",
        "## Scale",
    ]
    assert "Parts\n---" in document.text  # the underline is too short for a title
    assert "before\n------" in document.text  # and this one is in the middle of a paragraph


def test_rst_text_is_not_taken_for_markdown_headings(tmp_path: Path):
    text = read_document(
        written(tmp_path, "a.rst", "# a comment\n\nLast line of a paragraph\nsecond\n---\n")
    ).text
    assert text.startswith("\\# a comment")
    assert "second\n---" in text


# --- HTML ---


def test_html_keeps_visible_text_and_headings(tmp_path: Path):
    page = """<?xml version="1.0"?><!DOCTYPE html><html><head><title> The
      Kettle </title><style>p {}</style><script>var x = "<p>no</p>";</script></head><body>
      <nav><a href="/">Home</a></nav><div role="navigation">Menu</div><!-- no -->
      <h1>Kettle <em>K2</em></h1><p>Boils   water,<br>fast &amp; <b>safe</b>ly.</p>
      <p hidden>no</p><p style="display: none">no</p><p aria-hidden="true">no</p>
      <h2>Care</h2><ul><li>Rinse.</li><li><p>Dry.</p><ul><li>Lid</li></ul></li></ul>
      <table><tr><th>Part</th><th>No.</th></tr><tr><td>Lid</td><td>7</td></tr></table>
      <pre>  a = 1\n\n\n\n  # comment</pre></body></html>"""
    document = read_document(written(tmp_path, "page.html", page))
    assert document.metadata == {"format": "markdown", "title": "The Kettle"}
    assert document.text == (
        "# Kettle K2\n\nBoils water,\nfast & safely.\n\n## Care\n\n- Rinse.\n- Dry.\n  - Lid\n\n"
        "| Part | No. |\n| --- | --- |\n| Lid | 7 |\n\n"
        "```\n  a = 1\n\n\n\n  # comment\n```"
    )


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>45<sup>1</sup> euros, 10<sup>6</sup>", "45^1 euros, 10^6"),
        ("<p>2<sup>3</sup>4, log<sub>2</sub>8, the 1<sup>st</sup>", "2^3 4, log_2 8, the 1st"),
        ("<math><msup><mn>10</mn><mn>6</mn></msup></math>", "10^6"),
        ("<p>The fee is <del>30</del> <ins>40</ins>", "The fee is ~~30~~ 40"),
        ('<p><span style="text-decoration:line-through">30</span> 40', "~~30~~ 40"),
        ("<ol start=3><li>Hold.<li>Wait.<li value=9>Open.</ol>", "3. Hold.\n4. Wait.\n9. Open."),
        ("<ol reversed start=2><li>b<li>a</ol>", "2. b\n1. a"),
        ("<ol><li>a<ul><li>x</ul><li>b</ol>", "1. a\n  - x\n2. b"),
        (
            "<p><input type=checkbox checked> Express <input type=checkbox> Slow",
            "[x] Express [ ] Slow",
        ),
        ("<p>Size: <select><option>S<option selected>M</select>", "Size: M"),
        ("<p>Name: <input value=Ines>", "Name: Ines"),
    ],
)
def test_html_keeps_what_changes_the_meaning_of_a_text(tmp_path: Path, html: str, text: str):
    assert text_of_html(tmp_path, html) == text


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ("<tr><td><p>Norway<td><p>9<p>days", ["| Norway | 9 days |"]),
        ("<tr><th><th>2023<tr><td>Sales<td>5", ["|  | 2023 |", "| Sales | 5 |"]),
        (
            "<tr><td rowspan=2>Norway<td>Oslo<td>yes<tr><td>Bergen<td>no<tr><td>Peru<td>Lima<td>no",
            ["| Norway | Oslo | yes |", "| Norway | Bergen | no |", "| Peru | Lima | no |"],
        ),
        (
            "<tr><td colspan=2>Sales<td>x<tr><td>1<td>2<td>3",
            ["| Sales | Sales | x |", "| 1 | 2 | 3 |"],
        ),
        ("<tr><td><h1>Care</h1><p>Rinse.<td>Menu", ["# Care", "Rinse.", "Menu"]),
    ],
)
def test_cells_of_html_tables_keep_their_row_and_column(
    tmp_path: Path, rows: str, lines: list[str]
):
    text = text_of_html(tmp_path, f"<table>{rows}</table>").replace("\n\n", "\n")
    assert [line for line in text.split("\n") if "---" not in line] == lines


@pytest.mark.parametrize(
    "row",
    [
        "<tr><td rowspan=9999>" + "x" * 500 + "<td>y",
        "<tr><td colspan=1000>" + "x" * 50,
        "<td>y" * 190,
    ],
)
def test_spans_and_short_rows_do_not_multiply_a_table(tmp_path: Path, row: str):
    html = f"<table>{row * 3}" + "<tr><td>1" * 20_000
    assert len(text_of_html(tmp_path, html)) < 8 * len(html)


def test_html_text_that_looks_like_markdown_is_escaped(tmp_path: Path):
    assert (
        text_of_html(tmp_path, "<p># 5 on the list</p><p>```</p>") == "\\# 5 on the list\n\n\\```"
    )


def test_html_nested_deeper_than_python_recurses(tmp_path: Path):
    assert text_of_html(tmp_path, "<div>" * 3000 + "deep" + "</div>" * 3000) == "deep"


def test_html_without_a_tag_is_text(tmp_path: Path):
    assert (
        read_document(written(tmp_path, "page.html", "https://example.com/a.html")).text
        == "https://example.com/a.html"
    )


def test_html_says_its_encoding(tmp_path: Path):
    html = '<html><head><meta charset="iso-8859-2"></head><body>Łódź</body></html>'
    document = read_document(written(tmp_path, "page.html", html.encode("iso-8859-2")))
    assert (document.text, document.metadata["encoding"]) == ("Łódź", "iso-8859-2")


def test_html_with_a_wrong_declaration_is_read_as_utf8(tmp_path: Path):
    html = '<meta charset="x-no-such-set"><p>Łódź</p>'
    assert read_document(written(tmp_path, "page.html", html)).text == "Łódź"


@pytest.mark.parametrize(
    "label",
    [
        "undefined",
        "punycode",
        "idna",
        "utf-16",
        "UTF-16LE",
        "utf-32",
        "utf-7",
        "unicode_escape",
        "base64",
        "rot13",
        "\\",
    ],
)
def test_html_with_a_declaration_that_is_none_is_read_as_utf8(tmp_path: Path, label: str):
    for declaration in (f'<meta charset="{label}">', f'<?xml version="1.0" encoding="{label}"?>'):
        page = written(tmp_path, "page.html", f"{declaration}<p>Łódź, \\u0041 and +AGE-</p>")
        document = read_document(page)
        assert (document.text, document.metadata) == (
            "Łódź, \\u0041 and +AGE-",
            {"format": "markdown"},
        )


def test_html_in_latin_1_is_windows_1252_as_browsers_have_it(tmp_path: Path):
    page = '<meta http-equiv="content-type" content="text/html; charset=ISO-8859-1"><p>„heiß“</p>'
    document = read_document(written(tmp_path, "page.html", page.encode("cp1252")))
    assert (document.text, document.metadata["encoding"]) == ("„heiß“", "iso-8859-1")


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>Rinse</p><![x[", "Rinse"),
        ("<p>Rinse &#" + "1" * 4400 + ";</p>", "Rinse \ufffd"),
        ("<p>Rinse &#xD800; &#0; &#x110000;</p>", "Rinse \ufffd \ufffd \ufffd"),
        ("<p>Rinse &lbrace;it&rbrace; &notit; &nosuch;</p>", "Rinse {it} ¬it; &nosuch;"),
        ("<p>Rinse</p><!-- never ended <p>no", "Rinse"),
        ("<p>Rinse</p></", "Rinse\n\n</"),
        ("<?php echo 1 ?><p>Rinse</p>", "Rinse"),
        ("<p>Rinse</p><script>var x = '<p>'", "Rinse"),
        ("Rinse <b>it<p>now</b> and then", "Rinse it\n\nnow and then"),
        ("<div hidden><p>no</div><p>Rinse</p></div></p></b>", "Rinse"),
        ("<svg><title>no</title></svg><title>Care</title><p>Rinse</p>", "Rinse"),
        ("<p>Rinse<o:p></o:p> it</p><1:2>now", "Rinse it\n\n<1:2>now"),
        ("<p style='\x01'>Rinse\x1b\x0cit&#1;&#xFFFE;now</p>", "Rinse it now"),
        ("<input value='a\x01b' \x02c=d>", "a b"),
    ],
)
def test_html_that_is_damaged_is_read_as_far_as_it_goes(tmp_path: Path, html: str, text: str):
    assert read_document(written(tmp_path, "page.html", html)).text == text


# Each of these took a parser of quadratic time from seconds to hours: the size is such that only that would be noticed.
@pytest.mark.parametrize(
    "html",
    [
        "<a " * 200_000,
        '<a ="' * 100_000,
        "<!--" * 200_000,
        "</" * 200_000,
        "<![CDATA[" * 100_000,
        "<?" * 200_000,
        "<p>x" + "<a " * 200_000 + ">",
        "<ul><li>x" * 20_000,
        "<b>" * 100_000,
        "<table><td>" * 50_000,
        "<a " + " ".join(f"a{n}" for n in range(100_000)) + ">",
    ],
    ids=lambda html: html[:12],
)
def test_html_of_any_shape_takes_linear_time(tmp_path: Path, html: str):
    document = read_document(written(tmp_path, "page.html", f"<p>Rinse</p>{html}"))
    assert document.text.startswith("Rinse")
    assert len(document.text) < 8 * len(html)


ELEMENTS = (
    "td",
    "th",
    "tr",
    "table",
    "ul",
    "ol",
    "li",
    "div",
    "span",
    "p",
    "b",
    "a",
    "pre",
    "code",
    "blockquote",
    "dl",
    "dt",
    "dd",
    "h1",
    "br",
    "option",
)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("form", ["<{0}>x", "<{0}>x</{0}>"], ids=["open", "closed"])
def test_html_of_a_repeated_element_takes_linear_time(tmp_path: Path, name: str, form: str):
    def cpu_seconds(count: int) -> float:
        page = "<table><tr>" + form.format(name) * count
        began = time.process_time()
        read_text(Path("page.html"), page.encode())
        return time.process_time() - began

    # Four times the input: linear code takes 4 times as long, quadratic code 16 times. The best of several tries.
    assert any(cpu_seconds(8000) < 9 * cpu_seconds(2000) for _ in range(8))


def test_html_that_closes_too_many_tags_too_deep_is_refused(tmp_path: Path):
    with pytest.raises(
        DocumentError, match=r"page\.html: cannot be read: its tags are nested more than \d+ deep"
    ):
        text_of_html(tmp_path, "<div>" * 100_000 + "</b>" * 100_000)


def test_html_of_scripts_alone_holds_no_text(tmp_path: Path):
    with pytest.raises(DocumentError, match="holds no text"):
        text_of_html(tmp_path, "<script>render()</script>")


# --- PDF ---


def test_pdf_pages_are_parted_by_form_feeds(tmp_path: Path):
    document = read_document(
        written(tmp_path, "a.pdf", pdf_bytes("The first page", "The second page"))
    )
    assert document.text.split("\f") == ["The first page", "The second page"]
    assert document.metadata == {"format": "text", "pages": 2}


def form_bytes() -> bytes:
    """A PDF with a form: labels in the page's text, and fields that hold values beside them."""
    writer = PdfWriter(clone_from=io.BytesIO(pdf_bytes("Order form")))
    page = writer.pages[0]
    labels = {"Customer:": (72, 650), "Size:": (72, 600), "Express": (100, 550), "Gift": (100, 500)}
    drawn = "".join(f"BT /F1 12 Tf {x} {y} Td ({text}) Tj ET " for text, (x, y) in labels.items())
    page["/Contents"].get_object().set_data(page["/Contents"].get_data() + b" " + drawn.encode())
    sizes = ArrayObject([TextStringObject("M"), TextStringObject("L")])
    fields = [
        ("/Tx", "Text1", (150, 645, 300, 665), {"/V": TextStringObject("Ines Toledo")}),
        ("/Tx", "Text2", (350, 645, 400, 665), {}),
        ("/Ch", "List1", (150, 595, 300, 615), {"/V": sizes}),
        ("/Btn", "Check1", (72, 548, 84, 560), {"/AS": NameObject("/Yes")}),
        ("/Btn", "Check2", (72, 498, 84, 510), {"/AS": NameObject("/Off")}),
        ("/Btn", "Send", (72, 100, 150, 120), {"/Ff": NumberObject(1 << 16)}),
        ("/Tx", "Telephone", (150, 300, 300, 320), {"/V": TextStringObject("555")}),
    ]
    widgets = ArrayObject()
    for kind, name, place, more in fields:
        field = {"/Type": NameObject("/Annot"), "/Subtype": NameObject("/Widget")}
        field |= {"/FT": NameObject(kind), "/T": TextStringObject(name), **more}
        field["/Rect"] = ArrayObject(NumberObject(edge) for edge in place)
        named = DictionaryObject({NameObject(key): value for key, value in field.items()})
        widgets.append(writer._add_object(named))
    page[NameObject("/Annots")] = widgets
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def test_values_of_a_pdf_form_are_beside_their_labels(tmp_path: Path):
    text = read_document(written(tmp_path, "form.pdf", form_bytes())).text
    lines = text.split("\n")
    assert lines[0] == "Order form"
    assert lines[-5:] == [
        "Customer: Ines Toledo",
        "Size: M, L",
        "[x] Express",
        "[ ] Gift",
        "Telephone: 555",
    ]


def test_pdf_that_opens_without_a_password_is_read(tmp_path: Path):
    assert read_document(written(tmp_path, "a.pdf", pdf_bytes("Open", password=""))).text == "Open"


def test_pdf_with_a_password_is_refused(tmp_path: Path):
    with pytest.raises(
        DocumentError, match=r"a\.pdf: is locked with a password; save a copy without"
    ):
        read_document(written(tmp_path, "a.pdf", pdf_bytes("Secret", password="x")))


def test_pages_of_a_pdf_without_text_are_named(tmp_path: Path):
    path = written(tmp_path, "a.pdf", pdf_bytes("Some text", "", "More", ""))
    lacking: list[str] = []
    with LimitedReader() as reader:
        reader.read(SourceFile(path, path.name), path.read_bytes(), left_out=lacking.append)
    (sentence,) = lacking
    assert "was read without pages without text, which may be scans (2, 4): run OCR" in sentence


def test_pdf_without_text_asks_for_ocr(tmp_path: Path):
    with pytest.raises(DocumentError, match="OCR"):
        read_document(written(tmp_path, "a.pdf", pdf_bytes("", "")))


def test_whatever_a_parser_raises_names_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for provoke, name in (
        (lambda: repr(deep), "RecursionError"),
        (lambda: bytearray(1 << 60), "MemoryError"),
        (lambda: {}["x"], "KeyError"),
        (lambda: next(iter([])), r"StopIteration\)"),
    ):
        with (
            pytest.raises(DocumentError, match=rf"a\.html: cannot be read \({name}"),
            parsing("a.html"),
        ):
            provoke()
    with pytest.raises(KeyboardInterrupt), parsing("a.html"):
        raise KeyboardInterrupt


def test_a_file_larger_than_any_that_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cachecraft_rag.retrievers.reading.documents.LARGEST_FILE", 1 << 20)
    with pytest.raises(DocumentError, match=r"a\.txt: is larger than 1 MiB; split it"):
        read_document(written(tmp_path, "a.txt", "x" * ((1 << 20) + 1)))


@pytest.mark.parametrize("keep", [0, 9, 200, 600])
def test_pdf_that_was_cut_off_is_refused_or_read(tmp_path: Path, keep: int):
    path = written(tmp_path, "a.pdf", pdf_bytes("Some text")[:keep])
    with pytest.raises(DocumentError, match=r"a\.pdf: (cannot be read|holds no text)"):
        read_document(path)
