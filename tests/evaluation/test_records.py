"""The file of measurements: what is in it stays, a torn line goes, and other settings are refused by name."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.measuring import Record
from cachecraft_rag.evaluation.records import FILE, VERSION, RecordLog

SETTINGS = {"seed": 1, "origin": "alone", "methods": {"craft@0.15": {"alpha": 0.25}}}
ONE = Record(
    question_id="q1",
    method="craft",
    ratio=0.15,
    kl=0.02,
    top1=0.9,
    rouge_l=0.8,
    f1=None,
    reference_f1=None,
    ttft_s=0.1,
    reference_ttft_s=0.4,
    recomputed=0.15,
    text='a "quoted"\nanswer · \ud83d',
)
TWO = replace(ONE, question_id="q2", f1=0.5, text="plain")


# The fields of `Record` in this version of the file. If they change, raise VERSION and extend this.
FIELDS_OF_VERSION = (
    5,
    (
        "question_id",
        "method",
        "ratio",
        "kl",
        "top1",
        "rouge_l",
        "f1",
        "reference_f1",
        "ttft_s",
        "reference_ttft_s",
        "recomputed",
        "text",
        "right",
        "reference_right",
        "margin",
    ),
)


def lines(folder: Path) -> list[str]:
    return (folder / FILE).read_text(encoding="utf-8").splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds two records."""
    with RecordLog(tmp_path / "out", SETTINGS) as log:
        log.append(replace(ONE, text="plain"))
        log.append(TWO)
    return tmp_path / "out"


def test_other_fields_of_a_record_raise_the_version() -> None:
    assert (VERSION, tuple(field.name for field in fields(Record))) == FIELDS_OF_VERSION


def test_appended_records_are_read_again(folder: Path) -> None:
    with RecordLog(folder, SETTINGS) as log:
        assert log.records == [replace(ONE, text="plain"), TWO]
    assert len(lines(folder)) == 3


def test_any_text_is_one_line(tmp_path: Path) -> None:
    with RecordLog(tmp_path, SETTINGS) as log:
        log.append(ONE)
    with RecordLog(tmp_path, SETTINGS) as log:
        assert log.records[0].text == 'a "quoted"\nanswer · ?'


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_torn_last_line_is_dropped_and_writing_goes_on(folder: Path, cut: int) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:-cut])
    with RecordLog(folder, SETTINGS) as log:
        assert [record.question_id for record in log.records] == ["q1"]
        log.append(TWO)
    assert [json.loads(line).get("question_id") for line in lines(folder)] == [None, "q1", "q2"]


def test_a_torn_first_line_is_no_evaluation_yet(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"settings": {"se', encoding="utf-8")
    with RecordLog(tmp_path, SETTINGS) as log:
        assert log.records == []
    assert json.loads(lines(tmp_path)[0]) == {"version": VERSION, "settings": SETTINGS}


def test_other_settings_are_named_with_what_to_do(folder: Path) -> None:
    before = lines(folder)
    other = {
        "seed": 2,
        "origin": "alone",
        "methods": {"craft@0.15": {"alpha": 0.5}, "random@0.15": {}},
    }
    with pytest.raises(ConfigError) as refused:
        RecordLog(folder, other)
    message = str(refused.value)
    assert "seed: 1 there, 2 now" in message
    assert "methods.craft@0.15.alpha: 0.25 there, 0.5 now" in message
    assert "methods.random@0.15: none there, some now" in message
    assert "--out" in message
    assert "--restart" in message
    assert lines(folder) == before


def test_an_evaluation_of_an_older_version_is_refused_and_kept(folder: Path) -> None:
    path = folder / FILE
    old = {
        "settings": {
            "seed": 1,
            "births": "alone",
            "methods": {"craft@0.15": {"births": False, "sharing": "chunk"}},
        }
    }
    path.write_text("\n".join([json.dumps(old), *lines(folder)[1:]]) + "\n", encoding="utf-8")
    before = lines(folder)
    with pytest.raises(ConfigError, match=r"another version of this package.*--out.*--restart"):
        RecordLog(folder, SETTINGS)
    assert lines(folder) == before
    with RecordLog(folder, SETTINGS, restart=True) as log:
        assert log.records == []


def test_of_many_differences_the_first_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="and 2 more"):
        RecordLog(folder, {"seed": 2, "origin": "x" * 100, "new": 1, "newer": 2})


def test_as_long_as_nothing_is_measured_the_settings_may_change(tmp_path: Path) -> None:
    RecordLog(tmp_path, SETTINGS).close()
    RecordLog(tmp_path, {"seed": 2}).close()
    assert [json.loads(line) for line in lines(tmp_path)] == [
        {"version": VERSION, "settings": {"seed": 2}}
    ]


def test_restart_discards_measurements(folder: Path) -> None:
    with RecordLog(folder, {"seed": 2}, restart=True) as log:
        assert log.records == []
    assert len(lines(folder)) == 1


@pytest.mark.parametrize("damage", ["no json", '{"question_id": "q3"}', "[]"])
def test_a_damaged_file_is_refused_and_kept(folder: Path, damage: str) -> None:
    path = folder / FILE
    path.write_text(path.read_text(encoding="utf-8") + damage + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"damaged.*--restart"):
        RecordLog(folder, SETTINGS)
    assert lines(folder)[-1] == damage


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="choose another folder with --out"):
        RecordLog(tmp_path / "out", SETTINGS)
