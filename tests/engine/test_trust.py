"""A settings file in the working directory may be a stranger's: what it may set before and after it is trusted."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cachecraft_rag.cli.app import app
from cachecraft_rag.engine.settings import known_settings, load_settings
from cachecraft_rag.engine.trust import needs_trust
from cachecraft_rag.errors import ModelNotFoundError
from cachecraft_rag.model.checkpoint import config_of
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.retrievers.embeddings import Embedder

STRANGERS = """
model = "their-model"
embeddings = "their-embeddings"
store = "caches"
namespace = "theirs"
metrics_port = 9464
top_k = 3
audit_text = true

[method]
drift = 0.2

[remote]
url = "redis://:secret@theirs.example/0"
"""
GUARDED = ["model", "embeddings", "namespace", "metrics_port", "audit_text", "remote.url"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own config folder, empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "cachecraft-rag"


@pytest.fixture
def folder(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's folder, as the working directory."""
    place = tmp_path / "strangers"
    place.mkdir()
    (place / "cachecraft.toml").write_text(STRANGERS)
    monkeypatch.chdir(place)
    return place


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def printed(*arguments: str) -> Any:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_strangers_file_neither_loads_models_nor_sends_data(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = load_settings(environment={})
    assert {key: found.entries[key].origin for key in GUARDED} == dict.fromkeys(GUARDED, "default")
    assert found.remote() is None
    assert (found["top_k"], found["method.drift"]) == (3, 0.2)  # harmless ones count
    assert found["store"] == str(folder / "caches")
    assert [setting.key for setting in found.ignored] == GUARDED

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert all(key in message for key in GUARDED)
    assert "remote.url (sends chunk-caches away)" in message
    assert f"cachecraft trust {folder}" in message
    assert "secret" not in message


def test_the_user_reads_once_on_stderr_what_is_ignored(folder: Path) -> None:
    done = run("settings")
    assert done.exit_code == 0
    assert "".join(done.stderr.split()).count("isnottrusted") == 1
    assert "remote.url" in done.stdout
    assert "trusted" in done.stdout  # the table may break lines between words
    assert "secret" not in done.output

    shown = printed("settings", "--json")
    assert shown["model"]["value"] == "demo"
    assert shown["model"]["ignored"] == {
        "value": "their-model",
        "origin": str(folder / "cachecraft.toml"),
    }
    assert "ignored" not in shown["top_k"]


def test_a_trusted_file_counts_until_it_changes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ordered = [key for key in known_settings() if key in GUARDED]
    assert printed("trust", "--json") == {"file": str(folder / "cachecraft.toml"), "keys": ordered}
    assert load_settings(environment={})["model"] == "their-model"
    assert printed("trust", "--list", "--json") == [
        {"file": str(folder / "cachecraft.toml"), "state": "trusted"}
    ]
    assert not caplog.records

    (folder / "cachecraft.toml").write_text(STRANGERS.replace("theirs.example", "other.example"))
    assert load_settings(environment={}).remote() is None
    assert printed("trust", "--list", "--json")[0]["state"] == "changed"
    assert run("trust", str(folder)).exit_code == 0
    assert load_settings(environment={}).remote() is not None

    assert printed("trust", "--remove", "--json")["removed"]
    assert load_settings(environment={}).remote() is None
    assert printed("trust", "--list", "--json") == []
    assert not printed("trust", "--remove", "--json")["removed"]


def test_trust_in_a_folder_that_was_deleted_can_be_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    file = str(folder / "cachecraft.toml")
    assert run("trust", str(folder)).exit_code == 0
    shutil.rmtree(folder)
    removed = printed("trust", str(folder), "--remove", "--json")
    assert removed == {"file": file, "removed": True}
    assert not printed("trust", file, "--remove", "--json")["removed"]


def test_trust_in_one_folder_is_none_in_a_copy_or_through_a_link(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed("trust", "--json")
    other = tmp_path / "other"
    other.mkdir()
    (other / "cachecraft.toml").symlink_to(folder / "cachecraft.toml")
    monkeypatch.chdir(other)
    assert load_settings(environment={})["model"] == "demo"
    # the same folder under another name
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path / "link")
    assert load_settings(environment={})["model"] == "their-model"


def test_a_file_the_user_names_needs_no_trust(folder: Path) -> None:
    file = folder / "cachecraft.toml"
    assert load_settings(file, environment={})["model"] == "their-model"
    named = load_settings(environment={"CACHECRAFT_SETTINGS": str(file)})
    assert named["model"] == "their-model"
    assert not named.ignored


def test_the_users_own_file_counts_everywhere_after_the_folders(folder: Path, own: Path) -> None:
    own.mkdir(parents=True)
    (own / "cachecraft.toml").write_text(
        'model = "mine"\ntop_k = 9\nmax_variants = 5\n[remote]\nurl = "redis://mine.example/0"\n'
    )
    found = load_settings(environment={"CACHECRAFT_EMBEDDINGS": "chosen"})
    assert (found["model"], found["top_k"], found["max_variants"]) == ("mine", 3, 5)
    assert found["embeddings"] == "chosen"
    remote = found.remote()
    assert remote is not None
    assert remote.url == "redis://mine.example/0"
    # what a variable decides anyway is no loss to report
    assert "embeddings" not in [setting.key for setting in found.ignored]
    assert "remote.url" in [setting.key for setting in found.ignored]


@pytest.mark.parametrize("store", ["../elsewhere", "/elsewhere", "link", "link/below"])
def test_a_strangers_store_stays_in_its_folder(folder: Path, tmp_path: Path, store: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "cachecraft.toml").write_text(f'store = "{store}"\n')
    found = load_settings(environment={})
    assert found["store"] == "chunk-caches"
    assert [setting.key for setting in found.ignored] == ["store"]


def test_every_key_of_a_remote_and_every_path_needs_trust(tmp_path: Path) -> None:
    free = {
        key for key in known_settings() if needs_trust(key, str(tmp_path / "x"), tmp_path) is None
    }
    assert not {key for key in free if key.startswith("remote.")}
    assert not free & {"model", "embeddings", "namespace", "private_system", "metrics_port"}


def test_an_invalid_or_missing_file_cannot_be_trusted(folder: Path, tmp_path: Path) -> None:
    (folder / "cachecraft.toml").write_text("modle = 3\n")
    assert run("trust").exit_code != 0
    assert run("trust", str(tmp_path / "nowhere")).exit_code != 0
    assert printed("trust", "--list", "--json") == []


def test_a_damaged_record_of_trust_is_none(folder: Path, own: Path) -> None:
    printed("trust", "--json")
    (record,) = (own / "trusted").iterdir()
    record.write_text("[")
    assert load_settings(environment={})["model"] == "demo"


# -- code in the folder of a model ------------------------------------------------------------------------------------


def test_code_beside_an_embedding_model_is_not_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "theirs.Module"}])
    )
    (model / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Module: ...\n")
    with pytest.raises(ModelNotFoundError, match="needs Python code from its own folder"):
        Embedder(model)
    assert not (tmp_path / "ran").exists()


def test_versions_of_sentence_transformers_that_run_a_folders_code_are_not_allowed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert any(
        requirement.startswith("sentence-transformers>=6")
        for requirement in project["project"]["optional-dependencies"]["retrieval"]
    )


def test_code_beside_a_model_is_not_run_even_if_a_terminal_says_yes(
    tmp_path: Path, tiny_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(model)
    decoder.tokenizer.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "theirs.py").write_text(
        "from transformers import PretrainedConfig\n"
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "class Config(PretrainedConfig):\n    model_type = 'theirs'\n"
    )
    monkeypatch.setattr("builtins.input", lambda _="": "y")
    with pytest.raises(ModelNotFoundError, match="needs Python code from its own folder"):
        config_of(os.fspath(model))
    assert not (tmp_path / "ran").exists()
