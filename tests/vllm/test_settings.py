"""Each setting of a server acts, or is refused with a reason; needs no vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cachecraft_rag.cli.app import app
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.settings import known_settings
from cachecraft_rag.errors import ConfigError, MissingPackageError, UnsupportedModelError
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.server.documents import Asked, plain_config, uncaptured_note
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.serving.config import Audits, NewVariants
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, StoreConfig
from cachecraft_rag.store.config import StoreTuning
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.beside import check_beside
from cachecraft_rag.vllm.engine import VLLMEngine
from cachecraft_rag.vllm.plugin import register
from cachecraft_rag.vllm.records import RequestRecord
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.server import launch as server
from cachecraft_rag.vllm.server.server_engine import ServerEngine
from cachecraft_rag.vllm.settings import ConnectorSettings, check_config, check_tenants
from cachecraft_rag.vllm.versions import require_installed, require_vllm

# What a client says with each question, or does itself before it asks.
OF_CLIENTS = {"embeddings", "top_k", *(one.name for one in fields(SamplingParams))}
OTHERS: dict[str, Any] = {  # a value of each setting that is not its default
    "embeddings": "other",
    "top_k": 7,
    "max_new_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 3,
    "stop": "x",
    "json_schema": "{}",
    "store": "elsewhere",
    "threads": 2,
    "metrics_port": 9464,
    "dtype": "bfloat16",
    "device": "cuda",
    "namespace": "acme",
    "system": "Be brief.",
    "private_system": True,
    "best_last": False,
    "new_variants": "always",
    "tuning.decode_rows": 3,
    "audit": "idle",
    "audit_text": True,
    "quality_target": 0.9,
    "min_ratio": 0.1,
    "max_ratio": 0.5,
    "tuning.max_waiting": 7,
    "tuning.preload_bytes": 10**7,
    "tuning.wait_timeout_s": 3.0,
    "disk_bytes": 10**9,
    "variants_per_chunk": 9,
    "max_variants": 99,
    "eviction": "f_r",
    "host_bytes": 10**8,
    "device_bytes": 10**8,
    "tuning.queue_bytes": 10**8,
    "tuning.readers": 2,
    "tuning.read_bytes_per_s": 1e6,
    "codec": "int8",
    "tuning.busy_timeout_s": 2.0,
    "reuse.reuse": False,
    "reuse.capture": False,
    "method.scope": "prefix",
    "method.alpha": 0.7,
    "reuse.recompute_ratio": 0.3,
    "method.scoring": "published",
    "method.selector": "cache_craft",
    "method.probe_min_rows": 5,
    "method.budget_scope": "chunk",
    "reuse.nearest_share": 0.55,
    "method.drift": 0.1,
    "reuse.plain_prompts": "off",
    "method.early_termination": "probe",
    "method.early_termination_window": 2,
    "method.loading": "whole",
    "reuse.min_prompt_tokens": 700,
}
REFUSED = {
    "threads",
    "metrics_port",
    "audit_text",
    "device",
    "new_variants",
    "tuning.decode_rows",
    "tuning.max_waiting",
    "tuning.preload_bytes",
    "tuning.wait_timeout_s",
    "device_bytes",
}


@pytest.fixture
def started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., ConnectorSettings | str]:
    """`cachecraft serve` up to vLLM's own start: the settings that it would get, or the error."""
    found: list[ConnectorSettings] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cachecraft_rag.vllm.versions.find_spec", lambda _name: object())
    monkeypatch.setattr(server, "require_vllm", lambda: None)
    monkeypatch.setattr(
        server, "_run", lambda _served, _model, settings, _arguments: found.append(settings)
    )

    def load(_name: str, *, dtype: str, options: Any) -> Any:
        return SimpleNamespace(identity=dtype)

    monkeypatch.setattr(VLLMModel, "load", load)

    def start(*flags: str, **environment: str) -> ConnectorSettings | str:
        found.clear()
        done = CliRunner().invoke(
            app, ["serve", "demo", "--backend", "vllm", *flags], env=environment
        )
        return found[0] if found else " ".join(f"{done.output} {done.exception}".split())

    return start


SETTINGS = known_settings().keys() - {"model"}  # the model is an argument


@pytest.mark.parametrize("key", sorted(key for key in SETTINGS if not key.startswith("remote.")))
def test_each_setting_acts_or_is_refused(
    key: str, started: Callable[..., ConnectorSettings | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the environment, as from a file; the settings of reuse are flags, too."""
    given, warned = OTHERS[key], list[str]()
    monkeypatch.setattr("cachecraft_rag.cli.serve.warn", warned.append)
    text = str(given).lower() if isinstance(given, bool) else str(given)
    needed = {}
    if key in ("quality_target", "min_ratio", "max_ratio"):
        needed = {"CACHECRAFT_AUDIT": "idle", "CACHECRAFT_QUALITY_TARGET": "0.9"}
    found = started(**(needed | {f"CACHECRAFT_{key.replace('.', '_').upper()}": text}))
    if key in REFUSED:
        assert isinstance(found, str)
        assert f"{key} has no effect" in found
        return
    assert isinstance(found, ConnectorSettings), found
    assert bool(warned) == (key in OF_CLIENTS)
    if key in OF_CLIENTS:
        assert f"{key} has no effect here: clients decide it" in warned[0]
        return
    if key == "reuse.plain_prompts":  # a separate flag, off by default
        assert (found.endpoint.plain_prompts, found.config.reuse.plain_prompts) == ("off", "off")
        flag, variable = (
            started("--reuse-plain-prompts"),
            started(CACHECRAFT_REUSE_PLAIN_PROMPTS="reuse"),
        )
        for asked_for in (flag, variable):
            assert isinstance(asked_for, ConnectorSettings), asked_for
            assert (asked_for.endpoint.plain_prompts, asked_for.config.reuse.plain_prompts) == (
                "reuse",
                "off",
            )
    elif key.startswith(("reuse.", "method.")):
        table, _, name = key.partition(".")
        flag = f"--no-{name}" if given is False else f"--{name.replace('_', '-')}"
        again = started(flag) if given is False else started(flag, text)
        assert isinstance(again, ConnectorSettings), again
        assert again.config == found.config
        reuse = found.config.reuse
        assert getattr(reuse if table == "reuse" else reuse.method, name) == given
    elif key == "store":
        assert Path(found.store).parts[-2:] == ("elsewhere", "caches")
    elif key == "audit":
        assert found.config.audit == Audits(1.0)
    elif key == "dtype":
        assert found.identity == given  # type: ignore[comparison-overlap]
    else:
        of_store = hasattr(StoreConfig, key) or hasattr(StoreTuning, key.removeprefix("tuning."))
        owner = found.config.store if of_store else found.config
        assert attrgetter(key)(owner) == given


def test_remotes_and_keys(started: Callable[..., ConnectorSettings | str], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("the only key of all remotes")
    table: dict[str, Any] = {
        "url": "file:///elsewhere",
        "budget_bytes": 10**9,
        "tuning.variants_per_chunk": 5,
        "tuning.ask_below": 3,
        "tuning.lookup_timeout_s": 3,
        "tuning.connect_timeout_s": 2,
        "tuning.read_timeout_s": 4,
        "tuning.put_timeout_s": 5,
        "tuning.close_timeout_s": 6,
        "tuning.queue_bytes": 10**8,
        "tuning.failures": 9,
        "tuning.cool_down_s": 7,
    }
    # from the environment they are read where the remote is opened
    keys = {"remote.key", "remote.key_file"}
    assert {f"remote.{name}" for name in table} | keys == {
        key for key in SETTINGS if key.startswith("remote.")
    }
    found = started(
        **{
            f"CACHECRAFT_REMOTE_{name.replace('.', '_').upper()}": str(value)
            for name, value in table.items()
        }
    )
    assert isinstance(found, ConnectorSettings), found
    remote: Any = found.config.store.remote
    assert {name: attrgetter(name)(remote) for name in table} == table
    found = started("--remote", "file:///elsewhere", "--remote-key-file", "key")
    assert isinstance(found, ConnectorSettings), found
    assert found.config.store.remote.keys() == (b"the only key of all remotes",)  # type: ignore[union-attr]
    assert (found.endpoint.client_settings, found.endpoint.admin_keys) == ("safe", None)
    for reached_by_others in (
        ("--host", "0.0.0.0"),
        ("--session-header", "X-Session"),
        ("--tenant-header", "X-Tenant"),
        ("--", "--host=0.0.0.0"),
    ):
        found = started(*reached_by_others)
        assert isinstance(found, ConnectorSettings), found
        assert found.endpoint.admin_keys == (), reached_by_others
    (tmp_path / "keys").write_text("the first key of all\nand the second\n")
    found = started("--admin-key-file", "keys", "--client-settings", "none")
    assert isinstance(found, ConnectorSettings), found
    assert found.endpoint.admin_keys == ("the first key of all", "and the second")
    assert "first key" not in repr(found)
    assert found.endpoint.client_settings == "none"
    assert "client_settings" in str(started("--client-settings", "some"))


def test_system_messages_are_searched_where_prompts_are(
    started: Callable[..., ConnectorSettings | str],
) -> None:
    found = started("--reuse-plain-prompts", "--search-system")
    assert isinstance(found, ConnectorSettings), found
    assert found.endpoint.search_system
    assert "add --reuse-plain-prompts" in str(started("--search-system"))


def test_the_log_begins_with_the_settings(
    started: Callable[..., ConnectorSettings | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH", raising=False)
    command = ["serve", "demo", "--backend", "vllm", "--session-header", "X-Mine"]
    written = CliRunner().invoke(app, command).stderr
    (line,) = [line for line in "".join(written.split()).split("INFO") if "Settings:" in line]
    assert "namespacedefault,codecraw,recomputeratio0.2,plainpromptsoff" in line
    assert "sessionheaderX-Mine" in line
    assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ


def test_json_logs_cover_vllm_and_requests(
    started: Callable[..., ConnectorSettings | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads this configuration in each of its processes, and uvicorn in that of the server."""
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "")
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH")
    lines = (
        CliRunner()
        .invoke(app, ["--log-json", "serve", "demo", "--backend", "vllm"])
        .stderr.splitlines()
    )
    begins = [json.loads(line)["message"].split()[0] for line in lines]
    assert begins == ["Settings:"]
    path = os.environ["VLLM_LOGGING_CONFIG_PATH"]
    code = (
        "import json, logging.config, sys\n"
        "logging.config.dictConfig(json.load(open(sys.argv[1])))\n"
        "for name in ('vllm.engine', 'uvicorn.error', 'uvicorn.access', 'cachecraft_rag.vllm'):\n"
        "    logging.getLogger(name).info('%s says so', name)\n"
        "logging.getLogger('httpx').info('left out')\n"
        "logging.getLogger('httpx').warning('of a library')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], check=True, capture_output=True, text=True
    )
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == [
        "vllm.engine says so",
        "uvicorn.error says so",
        "uvicorn.access says so",
        "cachecraft_rag.vllm says so",
        "of a library",
    ]


def test_what_vllm_decides_is_refused_in_python() -> None:
    for option in (
        {"device": "cuda:1"},
        {"device_bytes": 0},
        {"new_variants": "always"},
        {"new_variants": NewVariants("always", share=2.0)},
    ):
        (name,) = option
        with pytest.raises(ConfigError, match=f"^{name} has no effect over vLLM: "):
            VLLMEngine.from_pretrained("demo", **option)  # type: ignore[arg-type]
    for name in ("decode_rows", "max_waiting", "preload_bytes", "wait_timeout_s"):
        with pytest.raises(ConfigError, match=rf"^tuning\.{name} has no effect over vLLM: "):
            VLLMEngine.from_pretrained("demo", config=EngineConfig().with_tuning(**{name: 3}))
    with pytest.raises(ConfigError, match=r"^store\.device has no effect over vLLM: "):
        check_config(EngineConfig(store=StoreConfig(device="cuda:1")))
    assert check_config(EngineConfig(new_variants="off")).reuse.plain_prompts == "off"


def test_the_server_answers_by_its_own_settings(
    tiny_decoder: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    decoder = tiny_decoder("Llama")
    model = VLLMModel(
        "tiny",
        None,
        byte_tokenizer,
        decoder.fingerprint,
        decoder.layout,
        decoder.context_length,
        frozenset(),
    )
    reuse = ReuseConfig(recompute_ratio=0.3, plain_prompts="off")
    config = EngineConfig(
        namespace="acme", system="Be brief.", private_system=True, best_last=False, reuse=reuse
    )
    settings = ConnectorSettings(
        str(tmp_path), model.identity, config, endpoint=EndpointSettings(root=str(tmp_path))
    )
    calls: Any = SimpleNamespace(close=lambda: None)
    with ChunkCacheStore.open(tmp_path) as store:
        engine = ServerEngine(model, store, settings, calls=calls)
        plain = asked("How?", None)
        request, ask = engine.prepare(plain, session="ida")
        texts = [byte_tokenizer.decode(segment.token_ids) for segment in request.prompt.segments]
        assert "Be brief." in texts[0]
        assert request.prompt.segments[0].private
        assert ["best" in text for text in texts[1:3]] == [True, False]
        assert (ask.config, engine.namespace) == (reuse, "acme")
        other = engine.prepare(replace(plain, system="At length."), session="ida")[0]
        assert "best" in byte_tokenizer.decode(other.prompt.segments[1].token_ids)
        edited = Chunk("the best", known_id="another")  # as sent with a document over HTTP
        laid_out = engine.prepare(replace(plain, chunks=(edited,)), session="ida")[0].prompt
        assert laid_out.stale_ids == ((Chunk("the best").chunk_id, "another"),)
        assert laid_out.segments[1].segment_id == Chunk("the best").chunk_id
        record = RequestRecord(
            request, decoder.layout.layers, report={"segments": [], "fixed": [[1, 3], [2, 1]]}
        )
        engine.ended(record)
        assert engine.new_variants.settle(60)
        # nothing is stored of it any more
        assert engine.new_variants.stats.dropped == {"removed": 1}
        engine.new_variants.close()
        facts = engine.facts()
        assert (facts["reuse"]["recompute_ratio"], facts["reuse"]["plain_prompts"]) == (0.3, "off")


def test_a_version_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, fine in (
        ("0.32.0", True),
        ("0.33.1rc1+cpu", True),
        ("0.40.0", False),
        ("0.3", False),
        ("dev", False),
    ):
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))  # type: ignore[misc]
        if fine:
            require_vllm()
        else:
            with pytest.raises(
                ConfigError, match=f"vLLM {version} is installed, and this needs 0.32 or 0.33"
            ):
                require_vllm()


@pytest.mark.parametrize("require", [require_installed, require_vllm])
def test_without_vllm_the_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, require: Callable[[], None]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    with pytest.raises(MissingPackageError, match=r"cachecraft-rag\[vllm\]"):
        require()


def test_a_vllm_that_cannot_be_imported_is_named_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(MissingPackageError, match=r"imported here \(libcudart.so.13 is missing\)"):
        require_vllm()


def test_the_plugin_registers_nothing_in_an_unknown_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM lets a plugin's exception end the server, plain `vllm serve` too."""
    registered = []
    monkeypatch.setattr("cachecraft_rag.vllm.plugin._register", lambda: registered.append(True))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.40.0"))  # type: ignore[misc]
    register()
    assert registered == []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0"))  # type: ignore[misc]
    register()
    assert registered == [True]


def test_the_plugin_leaves_a_vllm_alone_where_its_registry_has_moved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moved = SimpleNamespace(__version__="0.33.0")
    monkeypatch.setitem(sys.modules, "vllm", moved)  # type: ignore[misc]
    with caplog.at_level("ERROR", logger="cachecraft_rag.vllm"):
        register()
    assert "chunk-caches cannot be used" in caplog.text


def test_heads_that_ranks_cannot_divide(
    tiny_decoder: Callable[..., Any], byte_tokenizer: Any
) -> None:
    layout = replace(tiny_decoder("Llama").layout, kv_heads=6)
    model = VLLMModel("tiny", None, byte_tokenizer, "", layout, 64, frozenset())
    model.require_ranks(3)
    with pytest.raises(
        UnsupportedModelError, match="which 4 ranks cannot divide; possible are 1, 2, 3, 6"
    ):
        model.require_ranks(4)
    for wrong in (0, "2", None):
        with pytest.raises(ConfigError, match="tensor_parallel_size is"):
            model.require_ranks(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reuse", "client_settings"),
    [(ReuseConfig(), "safe"), (ReuseConfig(recompute_ratio=1.0), "none")],
)
def test_our_own_connector_is_not_named_a_second_time(
    reuse: ReuseConfig, client_settings: Any
) -> None:
    with pytest.raises(ConfigError, match="CacheCraftConnector is there already"):
        check_beside([{"kv_connector": "CacheCraftConnector"}], reuse, client_settings)


def test_a_server_with_tenants_stores_no_responses() -> None:
    tenants = EndpointSettings(tenant_header="X-Tenant")
    with pytest.raises(ConfigError, match="VLLM_ENABLE_RESPONSES_API_STORE"):
        check_tenants(tenants, stores_responses=True)
    check_tenants(tenants, stores_responses=False)
    check_tenants(EndpointSettings(), stores_responses=True)


@pytest.mark.parametrize("keys", ["secret", ("",), ["secret"], (1,)])
def test_admin_keys_are_a_tuple_of_texts(keys: Any) -> None:
    """A single text would make each of its letters a key."""
    with pytest.raises(ConfigError, match="admin_keys"):
        EndpointSettings(admin_keys=keys)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "x"),
        ("--kv_connector=x",),
        ("-asc", "2"),
        ("--api-server-count=2",),
        ("--headless",),
    ],
)
def test_arguments_that_the_command_sets_itself_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        server.check_arguments(["--port", "8000", *arguments])


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("request_says", [False, True])
@pytest.mark.parametrize("session", [None, "ida"])
def test_an_instruction_of_a_client_is_shared_unless_operator_or_request_call_it_private(
    tiny_decoder: Callable[..., Any],
    byte_tokenizer: Any,
    tmp_path: Path,
    operator: bool,
    request_says: bool,
    session: str | None,
) -> None:
    decoder = tiny_decoder("Llama")
    facts = (decoder.fingerprint, decoder.layout, decoder.context_length, frozenset())
    model = VLLMModel("tiny", None, byte_tokenizer, *facts)
    config = EngineConfig(private_system=operator)
    settings = ConnectorSettings(str(tmp_path), model.identity, config)
    calls: Any = SimpleNamespace(close=lambda: None)
    own = replace(asked("How?", None), system="You answer for Acme.", private_system=request_says)
    with ChunkCacheStore.open(tmp_path) as store:
        engine = ServerEngine(model, store, settings, calls=calls)
        request, ask = engine.prepare(own, session=session)
        again = engine.prepare(own, session=session)[0]
        other = engine.prepare(replace(own, system="You answer for Bolt."), session=session)[0]
        engine.close()
    system = request.prompt.segments[0]
    assert system.private == (operator or request_says)
    assert system.segment_id == again.prompt.segments[0].segment_id
    assert system.segment_id != other.prompt.segments[0].segment_id
    is_served = not system.private or session is not None
    assert (ask.config.reuse, ask.config.capture) == (is_served, is_served)
    assert ("it has no session" in ask.left_to_server) is not is_served


def asked(question: str, config: ReuseConfig | None) -> Asked:
    return Asked(question, (Chunk("the best"), Chunk("another")), (), None, config, 4, "")


def test_a_request_may_bring_what_the_operator_allows() -> None:
    default = ReuseConfig(plain_prompts="off", method=ReuseMethod(alpha=0.5))

    def read(given: Any, allowed: Any) -> ReuseConfig | None:
        request: Any = SimpleNamespace(
            messages=[{"role": "user", "content": "How?"}],
            documents=[{"text": "x"}],
            tools=None,
            tool_choice=None,
            max_tokens=1,
            max_completion_tokens=None,
            cache_salt=None,
            model_extra={"cachecraft": given},
        )
        return Asked.read(request, default, context_length=100, allowed=allowed).config

    for allowed in ("none", "safe", "all"):
        assert read({}, allowed) == default
        assert read({"method": {"alpha": 0.5}, "plain_prompts": "reuse"}, allowed) == default
    assert read({"method": {"drift": 0.1}}, "all") == default.with_method(drift=0.1)
    for key, other in OTHERS.items():
        table, _, name = key.partition(".")
        if table not in ("reuse", "method") or name == "plain_prompts":
            continue
        shown = name if table == "reuse" else key
        given = {name: other} if table == "reuse" else {"method": {name: other}}
        with pytest.raises(ConfigError, match=f"this server sets {shown} itself"):
            read(given, "none")
        if shown in ("reuse", "capture", "method.loading", "min_prompt_tokens"):
            assert read(given, "safe") == default.changed_by(given)
        else:
            uncaptured = default.changed_by(given | {"capture": False})
            assert read(given, "safe") == read({**given, "capture": False}, "safe") == uncaptured
            assert f"{shown} would shape chunk-caches that serve others" in uncaptured_note(
                uncaptured, default
            )


def test_a_request_that_captures_as_usual_has_no_note() -> None:
    default = ReuseConfig()
    for config in (None, default, replace(default, capture=False), replace(default, reuse=False)):
        assert uncaptured_note(config, default) == ""


def test_settings_of_requests_without_documents() -> None:
    default = ReuseConfig(plain_prompts="off", method=ReuseMethod(alpha=0.5))

    def read(given: Any, allowed: Any) -> ReuseConfig | None:
        return plain_config(SimpleNamespace(model_extra={"cachecraft": given}), default, allowed)

    for allowed in ("none", "safe", "all"):
        assert read(None, allowed) == read({}, allowed) == default
        assert read({"plain_prompts": "off"}, allowed) is None
        with pytest.raises(ConfigError, match="must be an object"):
            read("off", allowed)
    for allowed in ("safe", "all"):  # what it captures is shaped by the server's own settings
        assert read({"recompute_ratio": 0.3}, allowed) == replace(default, recompute_ratio=0.3)
        assert read({"capture": False}, allowed) == replace(default, capture=False)
        assert read({"reuse": False}, allowed) is None
    with pytest.raises(ConfigError, match="this server sets recompute_ratio itself"):
        read({"recompute_ratio": 0.3}, "none")
