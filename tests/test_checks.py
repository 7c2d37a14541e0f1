"""Whatever value is given for whatever option: it is taken, or refused with a ConfigError that says what to do."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachecraft_rag.checks import check_choice, check_names, check_number, check_whole, shown
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import CacheCraftError, ConfigError, ModelNotFoundError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, RowFilter, StoreConfig
from cachecraft_rag.store.config import StoreTuning
from cachecraft_rag.store.remote import RemoteConfig
from cachecraft_rag.types.documents import Chunk

COMMAND = str(Path(sys.executable).with_name("cachecraft"))
ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63 - 1,
    2**63,
    2**70,
    -(2**70),
    10**4000,
    0.0,
    -0.0,
    0.5,
    1.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "2GB",
    "\udc80",
    "\0",
    "x" * 5000,
    b"bytes",
    [],
    (),
    {},
    [1],
    ["a"],
    ("a", 1),
    {"a": 1},
    {1: "a"},
    {"overlap"},
    frozenset(),
    object(),
    int,
    len,
    np.int64(3),
    np.float32(0.5),
    np.zeros(3),
    Path("x"),
    Path("\0"),
    ReuseConfig(),
    SamplingParams(),
    Chunk("text"),
    1j,
    range(3),
    iter([]),
    Ellipsis,
]
GARBAGE = st.one_of(
    st.sampled_from(ODD),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None)),
    st.binary(),
    st.recursive(
        st.none() | st.text(max_size=4) | st.integers(),
        lambda inner: st.lists(inner) | st.tuples(inner),
    ),
)
PROPERTY = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def assert_taken_or_refused(call: Callable[[], Any]) -> None:
    """Whatever a call makes is closed again; it may raise nothing but what the package raises on purpose."""
    try:
        made = call()
    except CacheCraftError as error:
        str(error).encode()  # a message can be printed
        return
    if hasattr(made, "close"):
        made.close()


# -- settings ---------------------------------------------------------------------------------------------------------

CONFIGS = [ReuseConfig, SamplingParams, StoreConfig, RemoteConfig, RowFilter]
FIELDS = [(kind, field.name) for kind in CONFIGS for field in fields(kind)]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
@given(value=GARBAGE)
@settings(deadline=None, max_examples=100)
def test_any_value_of_any_field(kind: Any, name: str, value: Any) -> None:
    given_url = {"url": "memory://"} if kind is RemoteConfig else {}
    assert_taken_or_refused(lambda: kind(**(given_url | {name: value})))


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        (SamplingParams, {"max_new_tokens": 4.0}, "whole number"),
        (SamplingParams, {"max_new_tokens": True}, "is True"),
        (SamplingParams, {"seed": 99999999999999999999999}, "below 2"),
        (SamplingParams, {"temperature": "hot"}, "number"),
        (SamplingParams, {"stop": (b"x",)}, "decode"),
        (StoreConfig, {"host_bytes": "2GB"}, "'2GB'"),
        (StoreConfig, {"disk_bytes": 2**70}, "below 2"),
        (StoreTuning, {"readers": 2.5}, "whole number"),
        (StoreTuning, {"busy_timeout_s": math.inf}, "at most 1e"),
        (ReuseConfig, {"reuse": 0}, "True or False"),
        (
            ReuseMethod,
            {"early_termination": True},
            "must be off, probe or published, not True",
        ),
        (SamplingParams, {"stop": 1}, "must be a list"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_what_to_do(
    kind: Any, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        kind(**wrong)
    assert says in str(caught.value)


def test_lists_become_tuples() -> None:
    assert SamplingParams(stop=["a"]).stop == ("a",)  # type: ignore[arg-type]


class SeveralLines:
    def __repr__(self) -> str:
        return "first\nsecond\x1b[0m ä"


@given(GARBAGE)
def test_any_value_can_be_shown(value: Any) -> None:
    assert shown(value).isprintable()
    assert len(shown(value)) < 200


def test_a_value_of_several_lines_is_shown_on_one() -> None:
    assert shown(SeveralLines()) == r"first\nsecond\x1b[0m ä"


def test_a_bool_is_no_number_and_nan_is_in_no_range() -> None:
    for check in (check_whole, check_number):
        for value in (True, math.nan, "1", None, 2**64):
            with pytest.raises(ConfigError):
                check("it", value)
        check("it", None, optional=True)


def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(
        ConfigError, match=r"^similarty_top_k: no such option\. Did you mean similarity_top_k\?$"
    ):
        check_names(["similarty_top_k"], ["similarity_top_k", "filters"])


def test_all_names_are_listed_if_one_of_several_has_no_suggestion() -> None:
    message = r"^sedd, x: no such option\. Did you mean seed\? There are seed, stop\.$"
    with pytest.raises(ConfigError, match=message):
        check_names(["x", "sedd"], ["seed", "stop"])


def test_where_no_names_are_taken_the_message_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^k: no such option; there are none\.$"):
        check_names(["k"], ())


# -- the doors --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_decoder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with (
        ChunkCacheStore.open(tmp_path_factory.mktemp("checks") / "caches") as store,
        Engine(tiny_decoder("Llama"), store, namespace="default") as made,
    ):
        yield made


ENGINE_OPTIONS = [
    "dtype",
    "device",
    "namespace",
    "reuse",
    "system",
    "device_bytes",
    "host_bytes",
    "disk_bytes",
]


@pytest.mark.parametrize("name", [*ENGINE_OPTIONS, "codec", "remote", "store", "model", "nosuch"])
@PROPERTY
@given(value=GARBAGE)
def test_any_option_of_an_engine_before_a_model_is_loaded(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise ModelNotFoundError("the options were taken")

    monkeypatch.chdir(tmp_path)
    if name not in ("model", "dtype", "device"):
        monkeypatch.setattr(Decoder, "load", refuse)
    arguments: dict[str, Any] = {"model": "no-such/model", "store": tmp_path} | {name: value}
    with pytest.raises(CacheCraftError):
        Engine.from_pretrained(**arguments)
    with pytest.raises(CacheCraftError):
        CacheCraft.from_pretrained(**arguments)


@pytest.mark.parametrize(
    "name", ["decoder", "store", "namespace", "config", "system", "private_system", "best_last"]
)
@PROPERTY
@given(value=GARBAGE)
def test_any_argument_of_the_engine_itself(engine: Engine, name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"decoder": engine.decoder, "store": engine.store} | {name: value}
    assert_taken_or_refused(lambda: Engine(**arguments))


@pytest.mark.parametrize("name", ["question", "chunks", "history", "session", "sampling", "config"])
@PROPERTY
@given(value=GARBAGE)
def test_any_argument_of_a_question(engine: Engine, name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"question": "Why?", "chunks": [Chunk("text")]} | {name: value}
    assert_taken_or_refused(lambda: engine.stream(**arguments))


@pytest.mark.parametrize("name", ["question", "target", "max_new_tokens", "config"])
@PROPERTY
@given(value=GARBAGE.filter(lambda value: value is not None))
def test_any_argument_of_an_examination(engine: Engine, name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"question": "Why?", "chunks": [], "max_new_tokens": 2} | {
        name: value
    }
    assert_taken_or_refused(lambda: engine.score_answer(**arguments))


def test_bytes_are_no_question_and_false_no_config(engine: Engine) -> None:
    for wrong in (b"Why?", None, 5):
        with pytest.raises(ConfigError, match="question"):
            engine.stream(wrong, [])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ReuseConfig\(reuse=False\)"):
        Engine(engine.decoder, engine.store, config=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="valid Unicode"):
        Engine(engine.decoder, engine.store, namespace="\udc80")
    with pytest.raises(ConfigError, match=r"Chunk\(text\)"):
        engine.stream("Why?", [Chunk(b"text")])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["root", "config", *StoreConfig.__dataclass_fields__])
@PROPERTY
@given(value=GARBAGE)
def test_any_argument_of_opening_a_store(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"root": tmp_path / "caches"} | {name: value}
    assert_taken_or_refused(lambda: ChunkCacheStore.open(**arguments))


@pytest.mark.parametrize(
    "door", ["namespace", "session", "offset", "limit", "chosen", "down", "timeout", "capture"]
)
@PROPERTY
@given(value=GARBAGE)
def test_any_argument_of_a_store(engine: Engine, door: str, value: Any) -> None:
    store = engine.store
    doors: dict[str, Callable[[], Any]] = {
        "namespace": lambda: store.find(value, "model", ["chunk"]),
        "session": lambda: store.find("ns", "model", ["chunk"], session=value),
        "offset": lambda: store.rows(offset=value),
        "limit": lambda: store.rows(limit=value),
        "chosen": lambda: store.rows(value),
        "down": lambda: store.evict(down_to_bytes=value),
        "timeout": lambda: store.flush(value),
        "capture": lambda: store.put(value),
    }
    assert_taken_or_refused(doors[door])


@pytest.mark.parametrize("name", ["folder", "k", "where"])
@PROPERTY
@given(value=GARBAGE)
def test_any_argument_of_an_index(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "folder":
        assert_taken_or_refused(lambda: FaissStore.open(value, dim=2, embedder_fingerprint="x@1"))
        return
    with FaissStore.open(tmp_path / "index", dim=2, embedder_fingerprint="x@1") as index:
        index.upsert("one", [Chunk("text", {"source": "a"})], np.eye(2)[:1])
        arguments: dict[str, Any] = {"k": 1} | {name: value}
        if not callable(value):
            assert_taken_or_refused(lambda: index.search([1.0, 0.0], **arguments))


@pytest.mark.parametrize("name", ["model", "device", "local_files_only", "batch_size"])
@PROPERTY
@given(
    value=GARBAGE.filter(
        lambda value: value not in (None, True) if isinstance(value, bool | None) else True
    )
)
def test_any_argument_of_an_embedder(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"model": "no-such/model"} | {name: value}
    with pytest.raises(CacheCraftError):
        Embedder(**arguments)


def test_a_name_that_the_hub_cannot_be_asked_for_fails_without_retries(tmp_path: Path) -> None:
    """With a hub that refuses every connection: its libraries would try each file six times."""
    script = (
        "import sys\n"
        "from cachecraft_rag.errors import ModelNotFoundError\n"
        "from cachecraft_rag.model.decoder import Decoder\n"
        "from cachecraft_rag.retrievers.embeddings import Embedder\n"
        "for load in (Embedder, Decoder.load):\n"
        "    try:\n"
        "        load('no-such/model')\n"
        "    except ModelNotFoundError as error:\n"
        "        print(str(error).splitlines()[0])\n"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if "HF_" not in name and "proxy" not in name.lower()
    }
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.count("cannot be reached") == 2, done.stdout + done.stderr
    assert "Retry" not in done.stdout + done.stderr


# -- the command line -------------------------------------------------------------------------------------------------

HUGE, DAMAGED = str(10**22), os.fsdecode(b"\xff")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask", "q", "--seed", HUGE],
        ["ask", "q", "--namespace", DAMAGED],
        ["ask", "q", "--temperature", "nan"],
        ["ask", "q", "--max-new-tokens", HUGE],
        ["ask", "q", "--top-k", HUGE],
        ["ask", "q", "--threads", HUGE],
        ["chat", "--seed", HUGE],
        ["store", "ls", "--limit", HUGE],
        ["store", "ls", "--offset", HUGE],
        ["store", "ls", "--chunk", f"abcd{DAMAGED}"],
        ["store", "evict", "--namespace", DAMAGED],
        ["store", "evict", "--fingerprint", DAMAGED],
        ["store", "evict", "--down-to-mb", "nan"],
        ["store", "evict", "--older-than-days", "nan"],
        ["store", "stats", "--remote", DAMAGED],
        ["bench", "ttft", "--seed", HUGE],
        ["bench", "ttft", "--tokens", "nan"],
        ["eval", "--seed", HUGE],
        ["eval", "--ratios", "nan"],
        ["calibrate", "--data", "no.json", "--quality", "nan"],
    ],
    ids=" ".join,
)
def test_the_command_refuses_what_cannot_be(arguments: list[str], tmp_path: Path) -> None:
    ChunkCacheStore.open(tmp_path / "chunk-caches" / "caches").close()
    (tmp_path / "chunk-caches" / "index").mkdir()
    done = subprocess.run(
        [COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("choices", "says"), [(("a",), "must be a,"), (("a", "b", "c"), "must be a, b or c,")]
)
def test_the_choices_are_listed(choices: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_choice("letter", "x", choices)
    assert says in str(refused.value)
