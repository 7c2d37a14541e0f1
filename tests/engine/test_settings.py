"""Settings: one precedence, errors that name where, and what reaches engine and commands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cachecraft_rag.cli.app import app
from cachecraft_rag.engine.config import EngineConfig, EngineTuning
from cachecraft_rag.engine.settings import load_settings, size_of
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.store.config import StoreConfig, StoreTuning
from cachecraft_rag.store.remote import RemoteConfig, RemoteTuning

TOML = """
store = "caches"
disk_bytes = "50 GB"
max_variants = 500
variants_per_chunk = 7
top_k = 3
temperature = 0.5
stop = ["END"]

[reuse]
recompute_ratio = 0.2

[method]
drift = 0.2

[remote]
url = "redis://:secret@host/0"

[remote.tuning]
queue_bytes = "2 GiB"

[tuning]
queue_bytes = "3 GiB"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cachecraft.toml"
    path.write_text(TOML)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory without variables of ours."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("MODEL", "STORE", "SETTINGS"):
        monkeypatch.delenv(f"CACHECRAFT_{name}", raising=False)
    return folder


def test_without_any_all_is_as_the_dataclasses_say(here: Path) -> None:
    found = load_settings(environment={})
    assert found.engine_config() == EngineConfig()
    assert found.file is None
    assert {one.origin for one in found.entries.values()} == {"default"}


def test_the_environment_goes_before_the_file_and_that_before_defaults(file: Path) -> None:
    environment = {
        "CACHECRAFT_MAX_VARIANTS": "900",
        "CACHECRAFT_REUSE_RECOMPUTE_RATIO": "0.3",
        "CACHECRAFT_HOST_BYTES": "1.5 MiB",
        "CACHECRAFT_PRIVATE_SYSTEM": "yes",
        "CACHECRAFT_TUNING_DECODE_ROWS": "4",
        "CACHECRAFT_STOP": "END, STOP",
        "CACHECRAFT_NAMESPACE": "",  # not set
        "CACHECRAFT_READ_ONLY": "1",  # the app's
        "HOME": "/nowhere",
    }
    found = load_settings(file, environment=environment)
    config = found.engine_config()
    assert (config.store.disk_bytes, config.store.max_variants) == (50 * 10**9, 900)
    assert (config.store.variants_per_chunk, config.store.host_bytes) == (7, 3 << 19)
    assert config.reuse == ReuseConfig(recompute_ratio=0.3, method=ReuseMethod(drift=0.2))
    remote = RemoteConfig("redis://:secret@host/0").with_tuning(queue_bytes=2 << 30)
    assert config.store.remote == remote
    assert config.store.tuning == StoreTuning(queue_bytes=3 << 30)
    assert config.private_system
    assert config.tuning == EngineTuning(decode_rows=4)
    assert config.namespace == "default"
    assert (found.sampling().temperature, found.sampling().stop) == (0.5, ("END", "STOP"))
    assert found["store"] == str(file.parent / "caches")
    origins = {key: found.entries[key].origin for key in ("max_variants", "disk_bytes", "codec")}
    assert origins == {
        "max_variants": "CACHECRAFT_MAX_VARIANTS",
        "disk_bytes": str(file),
        "codec": "default",
    }
    assert found.entries["remote.url"].shown == "redis://***@host/0"


def test_the_working_directory_s_file_is_found_and_a_variable_may_name_another(
    here: Path, file: Path
) -> None:
    (here / "cachecraft.toml").write_text("[tuning]\nreaders = 9\n")
    assert load_settings(environment={})["tuning.readers"] == 9
    assert load_settings(environment={"CACHECRAFT_SETTINGS": str(file)})["top_k"] == 3
    assert load_settings(environment={"CACHECRAFT_SETTINGS": ""})["tuning.readers"] == 9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host_byte = 3", "Did you mean host_bytes?"),
        ("[tuning]\nreaders = 'many'", "tuning.readers"),
        ("readers = 3", "Did you mean tuning.readers?"),
        ("max_waiting = 3", "Did you mean tuning.max_waiting?"),
        ("disk_bytes = '5 stones'", "disk_bytes"),
        (f"host_bytes = '{'9' * 400} GB'", "is too large for a size"),
        ("[reuse]\nrecompute_ratio = 2.0", "reuse.recompute_ratio"),
        ("[method]\nselector = 'best'", "method.selector"),
        ("[reuse]\ndrift = 0.2", "Did you mean method.drift?"),
        (
            "[method]\nearly_termination = 'gap'",
            "must be off, probe or published, not 'gap'",
        ),
        ("[remote]\nfailures = 3\nurl = 'redis://host'", "Did you mean remote.tuning.failures?"),
        ("[remote.tuning]\nfailures = 0", "remote.tuning.failures"),
        ("[store]\nreaders = 3", "store"),
        ("readers = ", "not valid TOML"),
        ("top_k = [1]", "top_k"),
        ("[method]\nselector = [[['question']]]", "method.selector"),
        ("stop = [[1], {a = [2]}]", "stop"),
        ("top_k = " + "9" * 5000, "not valid TOML"),
        ("x = " + "[" * 20_000, "not valid TOML"),
        ("x = " + "{a = " * 20_000, "not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_file_and_key(
    text: str, says: str, file: Path
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_settings(file, environment={})
    assert str(file) in str(error.value)
    assert says in str(error.value)


def test_what_is_wrong_elsewhere_is_named_too(here: Path, file: Path) -> None:
    for environment, says in (
        ({"CACHECRAFT_TUNING_READERS": "many"}, "CACHECRAFT_TUNING_READERS: readers"),
        (
            {"CACHECRAFT_METHOD_EARLY_TERMINATION": "gap"},
            "must be off, probe or published, not 'gap'",
        ),
        ({"CACHECRAFT_HOST_BYTE": "3"}, "Did you mean CACHECRAFT_HOST_BYTES?"),
        ({"CACHECRAFT_READERS": "3"}, "Did you mean CACHECRAFT_TUNING_READERS?"),
        (
            {"CACHECRAFT_REMOTE_FAILURES": "3"},
            "Did you mean CACHECRAFT_REMOTE_TUNING_FAILURES?",
        ),
        ({"CACHECRAFT_REUSE_DRIFT": "0.3"}, "Did you mean CACHECRAFT_METHOD_DRIFT?"),
        ({"CACHECRAFT_SETTINGS": "nowhere.toml"}, "no settings file at nowhere.toml"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_settings(environment=environment)
    with pytest.raises(
        ConfigError,
        match=r"CACHECRAFT_REMOTE_TUNING_FAILURES: remote.tuning.failures needs a remote",
    ):
        load_settings(environment={"CACHECRAFT_REMOTE_TUNING_FAILURES": "3"}).engine_config()


def test_the_nearest_name_is_said_without_the_list_of_all_names(file: Path) -> None:
    file.write_text("host_byte = 3\n")
    with pytest.raises(
        ConfigError,
        match=r"host_byte: no such setting\. Did you mean host_bytes\?$",
    ):
        load_settings(file, environment={})


def test_a_name_that_is_like_no_other_of_its_table_gets_the_list(file: Path) -> None:
    file.write_text("[tuning]\nreads = 3\n")
    with pytest.raises(ConfigError, match=r"tuning\.reads: .* Did you mean tuning\.readers\?$"):
        load_settings(file, environment={})
    file.write_text("[tuning]\nhurry = 3\n")
    with pytest.raises(ConfigError, match=r"tuning\.hurry: no such setting; there are .*codec"):
        load_settings(file, environment={})


def test_a_variable_like_no_setting_gets_the_list_and_advice() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^CACHECRAFT_X: no such variable; there are .*CACHECRAFT_TOP_K.*\. Correct it, or remove it\.$",
    ):
        load_settings(environment={"CACHECRAFT_X": "3"})


def test_max_tokens_is_accepted_for_max_new_tokens(file: Path) -> None:
    file.write_text("max_tokens = 7\n")
    assert load_settings(file, environment={}).sampling().max_new_tokens == 7
    found = load_settings(file, environment={"CACHECRAFT_MAX_TOKENS": "9"})
    assert (found["max_new_tokens"], found.entries["max_new_tokens"].origin) == (
        9,
        "CACHECRAFT_MAX_TOKENS",
    )


def test_flags_go_before_everything_and_are_named_in_errors(file: Path) -> None:
    environment = {"CACHECRAFT_TOP_K": "8", "CACHECRAFT_METHOD_DRIFT": "0.1"}
    found = load_settings(
        file, environment=environment, flags={"top_k": "9", "host_bytes": "1 GB", "stop": ["a, b"]}
    )
    assert (found["top_k"], found["host_bytes"], found["stop"]) == (9, 10**9, ("a, b",))
    assert found.entries["top_k"].origin == "--top-k"
    assert found.flags() == {"top_k": 9, "host_bytes": 10**9, "stop": ("a, b",)}
    assert found.only("top_k").given() == {"top_k": 9}
    with pytest.raises(ConfigError, match=r"^--drift: drift is 7; it must be"):
        load_settings(file, environment=environment, flags={"method.drift": "7"})


def test_what_kubernetes_adds_for_a_service_is_no_setting() -> None:
    links = {
        "CACHECRAFT_SERVICE_HOST": "10.0.0.11",
        "CACHECRAFT_SERVICE_PORT": "8000",
        "CACHECRAFT_SERVICE_PORT_METRICS": "9464",
        "CACHECRAFT_PORT": "tcp://10.0.0.11:8000",
        "CACHECRAFT_PORT_8000_TCP": "tcp://10.0.0.11:8000",
        "CACHECRAFT_PORT_8000_TCP_ADDR": "10.0.0.11",
        "CACHECRAFT_REDIS_PORT_6379_TCP_PROTO": "tcp",
    }
    assert load_settings(environment=links).given() == {}
    metrics = load_settings(environment=links | {"CACHECRAFT_METRICS_PORT": "9464"})
    assert metrics.given() == {"metrics_port": 9464}


def test_every_field_of_the_configs_can_be_set() -> None:
    keys = load_settings(environment={}).entries.keys()
    assert {"disk_bytes", "max_variants", "variants_per_chunk", "eviction"} <= keys
    reuse = ReuseConfig.__dataclass_fields__.keys() - {"method"}
    assert {f"reuse.{name}" for name in reuse} <= keys
    assert {f"method.{name}" for name in ReuseMethod.__dataclass_fields__} <= keys
    remote = RemoteConfig.__dataclass_fields__.keys() - {"tuning"}
    assert {f"remote.{name}" for name in remote} <= keys
    assert {f"remote.tuning.{name}" for name in RemoteTuning.__dataclass_fields__} <= keys
    assert {f"tuning.{name}" for name in EngineTuning.__dataclass_fields__} <= keys
    assert {f"tuning.{name}" for name in StoreTuning.__dataclass_fields__} <= keys
    assert StoreConfig.__dataclass_fields__.keys() - {"device", "remote", "tuning"} <= keys


def test_at_most_45_settings_are_on_the_first_level() -> None:
    """`pytest -s -k first_level` prints them: a user meets these first, the nested ones only to tune or compare."""
    first_level = {
        kind.__name__: [setting.name for setting in fields(kind)]
        for kind in (EngineConfig, StoreConfig, RemoteConfig, ReuseConfig)
    }
    for name, settings in first_level.items():
        print(f"{len(settings):3} {name}: {', '.join(settings)}")
    count = sum(map(len, first_level.values()))
    print(f"{count:3} in all")
    assert count <= 45


# -- the command line -------------------------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_settings_are_printed_with_where_they_come_from(
    here: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHECRAFT_TOP_K", "8")
    printed = json.loads(run("--settings", str(file), "settings", "--json"))
    assert printed["top_k"] == {"value": 8, "origin": "CACHECRAFT_TOP_K"}
    assert printed["max_variants"] == {"value": 500, "origin": str(file)}
    assert printed["tuning.readers"] == {"value": 4, "origin": "default"}
    assert "secret" not in json.dumps(printed)
    assert "CACHECRAFT_TOP_K" in run("settings")


def test_a_flag_goes_before_the_environment_and_that_before_the_file(
    here: Path, tiny_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(here / "model")
    decoder.tokenizer.save_pretrained(here / "model")
    (here / "cachecraft.toml").write_text(
        'model = "model"\nstore = "caches"\nmax_variants = 11\nvariants_per_chunk = 3\nhost_bytes = "1 MB"\n'
    )
    run("trust")
    (here / "caches").mkdir()

    def limits(*flags: str) -> tuple[int, int]:
        run("doctor", "--no-check", "--json", *flags)
        printed = json.loads(run("store", "limits", "--json"))
        return printed["max_variants"], printed["variants_per_chunk"]

    assert limits() == (11, 3)
    monkeypatch.setenv("CACHECRAFT_MAX_VARIANTS", "22")
    assert limits() == (22, 3)
    printed = json.loads(run("doctor", "--no-check", "--json", "--host-bytes", "2 MB"))
    assert printed["facts"]["store"]["host_budget"] == 2_000_000
    monkeypatch.setenv("CACHECRAFT_HOST_BYTES", "3 MB")
    printed = json.loads(run("doctor", "--no-check", "--json"))
    assert printed["facts"]["store"]["host_budget"] == 3_000_000
    monkeypatch.setenv("CACHECRAFT_MODEL", "no such model")
    assert CliRunner().invoke(app, ["doctor", "--no-check"]).exit_code == 1
    assert limits("--model", "model") == (22, 3)


def test_showing_limits_sets_none(here: Path) -> None:
    (here / "caches" / "caches").mkdir(parents=True)
    (here / "cachecraft.toml").write_text(
        'store = "caches"\nmax_variants = 11\nnamespace = "acme"\n'
    )
    assert json.loads(run("store", "limits", "--json"))["max_variants"] == 100_000


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("temperature", "sampling=SamplingParams(temperature=…) with each question"),
        ("max_tokens", "sampling=SamplingParams(max_new_tokens=…) with each question"),
        ("max_new_tokens", "sampling=SamplingParams(max_new_tokens=…) with each question"),
        ("stop", "sampling=SamplingParams(stop=…) with each question"),
        ("system_prompt", "system?"),
        ("instructions", "system?"),
        ("host_byte", "host_bytes?"),
        ("recompute_ratio", "reuse=ReuseConfig(recompute_ratio=…)?"),
        ("nearest_share", "reuse=ReuseConfig(nearest_share=…)?"),
        ("max_waiting", "config=EngineConfig().with_tuning(max_waiting=…)?"),
        ("readers", "config=EngineConfig().with_tuning(readers=…)?"),
    ],
)
def test_options_of_other_libraries_are_answered_with_ours_instead_of_the_list(
    option: str, hint: str
) -> None:
    opens: list[Callable[..., object]] = [
        EngineConfig().with_options,
        partial(CacheCraft.from_pretrained, "no/model"),
    ]
    for made in opens:
        with pytest.raises(
            ConfigError,
            match=rf"{option}: no such option\. Did you mean {re.escape(hint)}\??$",
        ):
            made(**{option: 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_waiting", "tuning=EngineTuning(max_waiting=…)?"),
        ("readers", "store=StoreConfig().with_tuning(readers=…)?"),
    ],
)
def test_a_setting_that_has_moved_is_refused_with_its_place(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Did you mean {hint}")):
        EngineConfig(**{name: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tune", "name", "hint"),
    [
        (EngineTuning, "max_wait", "max_waiting"),
        (StoreConfig().with_tuning, "reader", "readers"),
        (RemoteConfig("memory://").with_tuning, "read_timeout", "read_timeout_s"),
    ],
)
def test_a_misspelt_setting_of_a_tuning_is_refused_with_the_nearest_one(
    tune: Callable[..., object], name: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: no such .* Did you mean {hint}\?"):
        tune(**{name: 3})


def test_the_papers_options_can_be_changed_one_by_one() -> None:
    config = EngineConfig.paper(host_bytes=10**6, best_last=True, dtype="float32")
    assert config.reuse == ReuseConfig.paper()
    assert (config.best_last, config.dtype, config.tuning.preload_bytes) == (True, "float32", 10**6)
    assert (config.store.eviction, config.store.host_bytes) == ("f_r", 10**6)
    assert (config.store.max_variants, config.store.variants_per_chunk) == (500, 500)
    tuning = EngineTuning(preload_bytes=7)
    assert EngineConfig.paper(tuning=tuning).tuning == tuning
    with pytest.raises(ConfigError, match="best_first"):
        EngineConfig.paper(best_first=True)


def test_text_of_audits_that_is_switched_off_is_not_kept() -> None:
    kept = EngineConfig(audit="idle", audit_text=True)
    assert kept.audit.keep_text  # type: ignore[union-attr]
    off = kept.with_options(audit_text=False)
    assert (off.audit_text, off.audit.keep_text) == (False, False)  # type: ignore[union-attr]
    assert kept.with_options(dtype="float32").audit.keep_text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "size"), [("1 TiB", 1 << 40), ("2T", 2 * 10**12), ("8 GiB", 8 << 30)]
)
def test_sizes_have_units_up_to_tebibytes(text: str, size: int) -> None:
    assert size_of(text) == size
