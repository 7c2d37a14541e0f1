"""Every published format, in tiny files written here: what is read, and what is said of files that are damaged."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.formats import FORMATS, SEGMENT_TOKENS
from benchmarks.formats import read as read_source
from benchmarks.formats import read_rows as read_records
from cachecraft_rag.errors import ConfigError, DocumentError
from cachecraft_rag.evaluation.formats import JsonRecord, QuestionFile, SourceQuestion

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Windmills",
            "paragraphs": [
                {"context": "A windmill turns wind into work.", "qas": []},
                {
                    "context": " The mill of Arden was built in 1701. ",
                    "qas": [
                        {
                            "id": "w1",
                            "question": " When was the mill of Arden built? ",
                            "answers": [
                                {"text": "1701", "answer_start": 32},
                                {"text": "1701", "answer_start": 32},
                            ],
                            "is_impossible": False,
                        },
                        {
                            "id": "w2",
                            "question": "Who built it?",
                            "answers": [],
                            "is_impossible": True,
                        },
                    ],
                },
            ],
        },
        {"title": "Bees", "paragraphs": [{"context": "Bees dance.", "qas": []}]},
    ],
}
SQUAD_ROWS = [
    {
        "id": "w1",
        "title": "Windmills",
        "context": "Built in 1701.",
        "question": "When?",
        "answers": {"text": ["1701"], "answer_start": [9]},
    },
    {
        "id": "w2",
        "title": "Windmills",
        "context": "Of oak.",
        "question": "Of what?",
        "answers": {"text": ["oak"], "answer_start": [3]},
    },
]
MUSIQUE = [
    {
        "id": "2hop__1_2",
        "paragraphs": [
            {
                "idx": 0,
                "title": "Arden",
                "paragraph_text": "Arden lies on the Lune.",
                "is_supporting": True,
            },
            {
                "idx": 1,
                "title": "Brook",
                "paragraph_text": "It has no river.",
                "is_supporting": False,
            },
            {
                "idx": 2,
                "title": "Lune",
                "paragraph_text": "It ends in the Irish Sea.",
                "is_supporting": True,
            },
        ],
        "question": "Into which sea flows Arden's river?",
        "question_decomposition": [],
        "answer": "Irish Sea",
        "answer_aliases": ["the Irish Sea", "Muir Éireann"],
        "answerable": True,
    },
    {
        "id": "2hop__1_3",
        "paragraphs": [
            {
                "idx": 0,
                "title": "Arden",
                "paragraph_text": "Arden lies on the Lune.",
                "is_supporting": True,
            },
            {
                "idx": 1,
                "title": "Arden",
                "paragraph_text": "It has a mill.",
                "is_supporting": False,
            },
        ],
        "question": "Who is mayor?",
        "answer": "nobody knows",
        "answerable": False,
    },
]
WIKI = [
    {
        "_id": "a1",
        "type": "comparison",
        "question": "Which film is older, Gust or Gale?",
        "context": [
            ["Gust (film)", ["Gust is a film of 1931.", " It is silent."]],
            ["Breeze", ["Breeze is a word."]],
            ["Gale (film)", ["Gale is a film of 1950."]],
            ["Empty", []],
        ],
        "supporting_facts": [["Gust (film)", 0], ["Gale (film)", 0]],
        "evidences": [],
        "answer": "Gust",
    }
]
CONTEXTS = [
    {
        "ctxs": [
            {"title": "", "text": "arden lies on the lune."},
            {"title": "Lune", "text": "it ends in the irish sea.", "score": "1.5"},
            {"title": "Lune", "text": "it is a river."},
        ],
        "question": "Into which sea flows Arden's river?",
        "answers": ["Irish Sea"],
    },
    {"id": "b", "ctxs": [{"title": "", "text": "arden lies on the lune."}], "question": "Where?"},
]
DROP = {
    "nfl_1": {
        "passage": "The Bears scored 3 and then 7 points on 12 May 1990.",
        "wiki_url": "",
        "qa_pairs": [
            {
                "question": "How many points in all?",
                "answer": {
                    "number": "10",
                    "date": {"day": "", "month": "", "year": ""},
                    "spans": [],
                },
                "query_id": "q1",
                "validated_answers": [{"number": "", "date": {}, "spans": ["ten"]}],
            },
            {
                "question": "Which scores?",
                "answer": {
                    "number": "",
                    "date": {"day": "", "month": "", "year": ""},
                    "spans": ["3", "7"],
                },
                "query_id": "q2",
            },
            {
                "question": "When?",
                "answer": {
                    "number": "",
                    "date": {"day": "12", "month": "May", "year": "1990"},
                    "spans": [],
                },
                "query_id": "q3",
            },
        ],
    },
    "nfl_2": {"passage": "The Lions lost.", "qa_pairs": []},
}
CNN = [
    {
        "article": "A mill burnt down.\n\nNobody was hurt.",
        "highlights": "Mill burns .\nNobody hurt .",
        "id": "c1",
    },
    {"article": "", "highlights": "Nothing .", "id": "c2"},
]
XSUM = [
    {
        "document": "The council met. It spoke of mills.",
        "summary": "Council speaks of mills.",
        "id": "77",
    }
]
OWN = [
    {
        "question": "When?",
        "passages": ["It opened in 1701.", "It is red."],
        "answers": ["1701"],
        "document": "guide",
    },
    {"question": "Which colour?", "passages": ["It is red.", "Paint is wet."], "id": 7},
]

Write = Callable[[str, Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write JSON lines, CSV, Parquet or JSON, by the name's suffix."""

    def written(name: str, content: Any) -> Path:
        path = tmp_path / name
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")
        elif path.suffix == ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                table = csv.DictWriter(file, list(content[0]))
                table.writeheader()
                table.writerows(content)
        elif path.suffix == ".parquet":
            import pyarrow as arrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(arrow.Table.from_pylist(content), path)
        else:
            path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return written


def passages(source: QuestionFile, question: SourceQuestion, kind: str = "near") -> list[str]:
    return [
        source.documents[document].passages[place] for document, place in getattr(question, kind)
    ]


def named(source: QuestionFile) -> dict[str, SourceQuestion]:
    return {question.question_id: question for question in source.questions}


def test_squad(write: Write) -> None:
    source = read_source(write("squad.json", SQUAD))
    assert [document.name for document in source.documents] == ["Windmills", "Bees"]
    asked = named(source)
    assert asked["w1"].text == "When was the mill of Arden built?"
    assert asked["w1"].answers == ("1701",)
    assert asked["w2"].answers == ()
    assert passages(source, asked["w1"], "needed") == ["The mill of Arden was built in 1701."]
    assert passages(source, asked["w1"])[0] == "A windmill turns wind into work."


def test_every_second_statement_is_false(write: Write) -> None:
    asked = named(read_source(write("squad.jsonl", SQUAD_ROWS), "true_false"))
    assert asked["w1"].text == "True or false? Question: When? Answer: 1701"
    assert asked["w2"].text == "True or false? Question: Of what? Answer: 1701"
    assert [one.answers for one in asked.values()] == [("True",), ("False",)]


def test_a_whole_article_is_one_passage(write: Write) -> None:
    source = read_source(write("squad.json", SQUAD), "articles")
    (whole,) = passages(source, named(source)["w1"])
    assert whole == "A windmill turns wind into work.\n\nThe mill of Arden was built in 1701."
    assert source.documents[1].passages == ("Bees dance.",)


@pytest.mark.parametrize("name", ["squad.jsonl", "squad.json", "squad.parquet"])
def test_squad_in_columns(write: Write, name: str) -> None:
    source = read_source(write(name, SQUAD_ROWS))
    (windmills,) = source.documents
    assert windmills.passages == ("Built in 1701.", "Of oak.")
    assert passages(source, named(source)["w2"], "needed") == ["Of oak."]
    assert named(source)["w2"].answers == ("oak",)
    assert len(named(source)["w1"].near) == 2


def test_musique(write: Write) -> None:
    source = read_source(write("musique_ans_v1.0_dev.jsonl", MUSIQUE))
    assert [document.name for document in source.documents] == ["Arden", "Brook", "Lune"]
    assert source.documents[0].passages == (
        "Arden\n\nArden lies on the Lune.",
        "Arden\n\nIt has a mill.",
    )
    first, second = source.questions
    assert first.answers == ("Irish Sea", "the Irish Sea", "Muir Éireann")
    assert [text.split()[0] for text in passages(source, first, "needed")] == ["Arden", "Lune"]
    assert len(first.near) == 3
    assert second.answers == ()


def test_retrieved_contexts_keep_their_order_and_share_passages(write: Write) -> None:
    source = read_source(write("musique_s.json", CONTEXTS))
    asked = named(source)
    assert passages(source, asked["1"]) == [
        "arden lies on the lune.",
        "Lune\n\nit ends in the irish sea.",
        "Lune\n\nit is a river.",
    ]
    assert [document.name for document in source.documents] == ["arden lies on the lune.", "Lune"]
    assert asked["1"].ordered
    assert not asked["1"].fill
    assert asked["1"].answers == ("Irish Sea",)
    assert asked["b"].answers == ()
    assert asked["b"].near == asked["1"].near[:1]


@pytest.mark.parametrize("form", ["published", "columns", "content", "text"])
def test_2wikimultihopqa_and_its_variants(write: Write, form: str) -> None:
    entry: dict[str, Any] = dict(WIKI[0])
    titles = [title for title, _ in WIKI[0]["context"]]
    sentences = [lines for _, lines in WIKI[0]["context"]]
    if form in ("columns", "content"):
        entry["context"] = {
            "title": titles,
            "sentences" if form == "columns" else "content": sentences,
        }
        entry["supporting_facts"] = {"title": ["Gust (film)", "Gale (film)"], "sent_id": [0, 0]}
    elif form == "text":
        entry = {**entry, "context": json.dumps(entry["context"])}
        entry["supporting_facts"] = json.dumps(entry["supporting_facts"])
    source = read_source(write("dev.json", [entry]))
    (asked,) = source.questions
    assert asked.question_id == "a1"
    assert asked.answers == ("Gust",)
    assert passages(source, asked)[0] == "Gust (film)\n\nGust is a film of 1931. It is silent."
    assert passages(source, asked, "needed") == [
        passages(source, asked)[0],
        passages(source, asked)[2],
    ]
    assert len(source.documents) == 3  # the empty page is none


def test_drop(write: Write) -> None:
    source = read_source(write("drop_dataset_dev.json", DROP))
    assert [question.answers for question in source.questions] == [
        ("10", "ten"),
        ("3, 7",),
        ("12 May 1990",),
    ]
    assert [question.question_id for question in source.questions] == ["q1", "q2", "q3"]
    assert all(
        passages(source, question) == [DROP["nfl_1"]["passage"]] for question in source.questions
    )
    assert [document.name for document in source.documents] == ["nfl_1", "nfl_2"]


def test_drop_in_columns(write: Write) -> None:
    row = {
        "section_id": "nfl_1",
        "query_id": "q9",
        "passage": "The Bears won.",
        "question": "Who won?",
        "answers_spans": {"spans": ["Bears", "The Bears"], "types": ["span", "span"]},
    }
    (asked,) = read_source(write("drop.jsonl", [row])).questions
    assert (asked.question_id, asked.answers) == ("q9", ("Bears", "The Bears"))


@pytest.mark.parametrize("name", ["test.csv", "test.jsonl", "test.parquet"])
def test_summaries(write: Write, name: str) -> None:
    source = read_source(write(name, CNN))
    (asked,) = source.questions  # the article without a text is passed over
    assert asked.text.startswith("Summarise")
    assert asked.answers == ("Mill burns .\nNobody hurt .",)
    assert passages(source, asked) == ["A mill burnt down.\n\nNobody was hurt."]
    assert (asked.needed, asked.fill, source.passage_tokens) == ((), False, SEGMENT_TOKENS)
    (brief,) = read_source(write(f"xsum-{name}", XSUM)).questions
    assert "one sentence" in brief.text
    assert brief.answers == ("Council speaks of mills.",)


def test_questions_of_ones_own(write: Write) -> None:
    source = read_source(write("own.jsonl", OWN))
    first, second = source.questions
    assert [document.name for document in source.documents] == [
        "guide",
        "It is red.",
        "Paint is wet.",
    ]
    assert passages(source, second) == ["It is red.", "Paint is wet."]
    assert (first.question_id, second.question_id) == ("1", "7")
    assert second.answers == ()
    assert first.ordered
    assert not first.fill


@pytest.mark.parametrize("name", ["questions.json", "questions.txt", "questions"])
def test_json_lines_under_another_suffix(write: Write, name: str) -> None:
    path = write("own.jsonl", OWN)
    assert len(read_source(path.rename(path.with_name(name))).questions) == 2


def test_a_single_line_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(
        "\ufeff" + json.dumps({**OWN[0], "question": "Line\u2028end?"}, ensure_ascii=False),
        encoding="utf-8",
    )
    assert [question.text for question in read_source(path).questions] == ["Line\u2028end?"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (SQUAD, "squad"),
        (SQUAD_ROWS, "squad"),
        (MUSIQUE, "musique"),
        (WIKI, "2wikimultihopqa"),
        (CONTEXTS, "ctxs"),
        (DROP, "drop"),
        (CNN, "cnn_dailymail"),
        (XSUM, "xsum"),
        (OWN, "jsonl"),
    ],
)
def test_exactly_one_format_recognises_a_file(write: Write, content: Any, expected: str) -> None:
    path = write("file.json", content)
    first = read_records(path)[0]
    assert [entry.name for entry in FORMATS if entry.recognises(first)] == [expected]
    assert read_source(path, expected) == read_source(path)


def damaged(lines: Sequence[Any], place: int, **changes: Any) -> list[Any]:
    return [
        {**line, **changes} if number == place else line
        for number, line in enumerate(lines, start=1)
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("own.jsonl", damaged(OWN, 2, question=None), r'own\.jsonl, line 2: "question" is missing'),
        ("own.jsonl", damaged(OWN, 2, question="  "), r'line 2: "question" is blank'),
        (
            "own.jsonl",
            damaged(OWN, 2, passages="one"),
            r'line 2: "passages" is "one"; it must be a list',
        ),
        ("own.jsonl", damaged(OWN, 1, passages=[" "]), r'line 1: "passages" is empty'),
        ("own.jsonl", damaged(OWN, 1, answers=["1701", 3]), r'line 1: "answers 2" is 3'),
        ("own.jsonl", [*OWN, [1]], r"line 3: expected an object .* not \[1\]"),
        (
            "m.jsonl",
            damaged(MUSIQUE, 2, paragraphs=[{"title": "x"}]),
            r'line 2, paragraphs 1: "paragraph_text" is mis',
        ),
        (
            "w.json",
            damaged(WIKI, 1, context=[["only a title"]]),
            r'w\.json, entry 1: "context" must be a list',
        ),
        (
            "w.json",
            damaged(WIKI, 1, context=[["Gust", "no list"]]),
            r"entry 1: the context of 'Gust' must be",
        ),
        ("w.json", damaged(WIKI, 1, context=[[3, []]]), r'entry 1: a title in "context"'),
        ("w.json", damaged(WIKI, 1, supporting_facts="{"), r'entry 1: "supporting_facts" must be'),
        ("r.json", damaged(CONTEXTS, 1, ctxs=[{"title": "x"}]), r'entry 1, ctxs 1: "text" is miss'),
        ("r.json", damaged(CONTEXTS, 2, ctxs=[]), r'entry 2: "ctxs" is empty'),
        (
            "d.json",
            {"p1": DROP["nfl_1"], "p2": {"passage": "x"}},
            r'd\.json, p2: "qa_pairs" is missing',
        ),
        ("d.json", {"p1": DROP["nfl_1"], "p2": 3}, r'd\.json: "p2" is 3; it must be an object'),
        (
            "s.json",
            {"data": [{"paragraphs": [{"context": "x", "qas": [{}]}]}]},
            r'data 1, paragraphs 1, qas 1: "que',
        ),
        ("c.csv", damaged(CNN, 1, highlights=""), r'c\.csv, line 4: "highlights" is blank'),
        ("s.json", {"data": [{"title": "x", "paragraphs": []}]}, "holds no questions"),
        ("e.json", [], "holds no records"),
    ],
)
def test_a_malformed_entry_is_named(write: Write, name: str, content: Any, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        read_source(write(name, content))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"question": "x", "passages": ["y"]}\n{"question"',
            r"a\.jsonl, line 2 is not JSON",
        ),
        ("a.json", b'{"data": [\n1,\n', r"a\.json is not JSON: .* line 3"),
        ("a.json", b"", "is empty"),
        ("a.json", b"\xff\xfe\x00", "not UTF-8"),
        ("a.csv", b'id,article,highlights\n1,a,b\n2,"unfinished', r"a\.csv, line \d is not CSV"),
        ("a.csv", b"id,article,highlights\n1,text", r'a\.csv, line 2: "highlights" is missing'),
        ("a.parquet", b"PAR1 no", "not a Parquet file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=message):
        read_source(path)


def test_a_file_of_no_known_format_gets_the_list_and_a_way_out(
    write: Write, tmp_path: Path
) -> None:
    with pytest.raises(DocumentError) as raised:
        read_source(write("other.json", [{"prompt": "x"}]))
    message = str(raised.value)
    assert all(entry.name in message for entry in FORMATS)
    assert '{"question"' in message
    with pytest.raises(DocumentError, match="No such file"):
        read_source(tmp_path / "missing.json")
    with pytest.raises(DocumentError, match="Is a directory"):
        read_source(tmp_path)
    with pytest.raises(ConfigError, match=r"'triviaqa'; choose one of: squad .* jsonl"):
        read_source(write("own.jsonl", OWN), "triviaqa")
    with pytest.raises(DocumentError, match=r'line 1: "article" is missing'):
        read_source(write("own.jsonl", OWN), "cnn_dailymail")


def test_parquet_without_pyarrow_says_what_to_type(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("test.parquet", CNN)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DocumentError, match="pip install pyarrow"):
        read_source(path)


def test_labels_take_numbers_and_nothing_else() -> None:
    record = JsonRecord("here", {"text": "a", "number": 7, "blank": " ", "list": [1]})
    assert [record.label(name, "-") for name in ("text", "number", "blank", "list", "none")] == [
        "a",
        "7",
        "-",
        "-",
        "-",
    ]
