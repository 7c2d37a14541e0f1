"""Settings from flags, the environment and a file: a flag goes before the environment, that before the file, that
before the default.

A setting is a field of a dataclass that checks it: `Application`, `EngineConfig`, `StoreConfig`, `SamplingParams`, or,
in the tables `[reuse]` and `[remote]`, `ReuseConfig` and `RemoteConfig`. Key, flag, default and help come from there.
The variable of `disk_bytes` is `CACHECRAFT_DISK_BYTES`, that of `url` in `[remote]` `CACHECRAFT_REMOTE_URL`.

Rejected: pydantic-settings. It would check every value a second time, knows neither where a value came from nor what
may be in the environment besides, and takes 0.3 s to import, half of what a command such as `store stats` may take.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from cachecraft_rag.checks import check_names, check_path, check_text, check_whole, shown
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store.config import StoreConfig
from cachecraft_rag.store.remote.config import RemoteConfig

FILE_NAME = "cachecraft.toml"
FILE_VARIABLE = "CACHECRAFT_SETTINGS"
PREFIX = "CACHECRAFT_"
DEFAULT = "default"
# Variables of the package that are no settings of an engine.
_ELSEWHERE = {PREFIX + name for name in ("CACHE", "CPU_KERNELS", "READ_ONLY", "REMOTE_KEY", "REMOTE_KEY_FILE")}
# Added by Kubernetes to every pod beside a service whose name begins with "cachecraft".
_SERVICE_LINK = re.compile(r"CACHECRAFT_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_SECRET = frozenset({"remote.key"})
_ALIASES = {"max_tokens": "max_new_tokens"}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Application:
    """Settings of an application besides those of its engine.

    model         Hugging Face name or folder, or "demo" for the bundled SmolLM2-135M-Instruct
    store         folder of the retrieval index and the chunk-caches
    embeddings    sentence-transformers model for retrieval; None = the bundled one
    top_k         chunks to retrieve
    threads       CPU threads; None = torch's choice
    metrics_port  port of this machine that serves Prometheus metrics; None = none
    """

    model: str = "demo"
    store: str = "chunk-caches"
    embeddings: str | None = None
    top_k: int = 5
    threads: int | None = None
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        check_text("model", self.model, empty=False)
        check_path("store", self.store)
        if self.embeddings is not None:
            check_path("embeddings", self.embeddings)
        check_whole("top_k", self.top_k, least=1)
        check_whole("threads", self.threads, least=1, most=1024, optional=True)
        check_whole("metrics_port", self.metrics_port, most=65535, optional=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one key and its origin: a flag, a variable, a file, or "default"."""

    key: str
    value: Any
    origin: str

    @property
    def shown(self) -> Any:
        """The value as people and logs may see it."""
        if self.key in _SECRET and self.value is not None:
            return "***"
        if self.key == "remote.url" and self.value is not None:
            return RemoteConfig(self.value).shown
        return sorted(self.value) if isinstance(self.value, frozenset) else self.value


@dataclass(frozen=True, slots=True)
class Known:
    """One key: the field of a dataclass.

    kind   the annotation of the field without "| None", such as "bool" or "tuple[str, ...]"
    help   first clause of its description in the dataclass's docstring
    check  makes the dataclass with this value; raises ConfigError
    """

    key: str
    kind: str
    default: Any
    help: str
    check: Callable[[Any], object]

    @property
    def is_size(self) -> bool:
        """True for bytes, which may come with a unit."""
        return self.key.endswith(("_bytes", "_bytes_per_s"))

    @property
    def is_list(self) -> bool:
        """True where several values are taken."""
        return self.kind.startswith(("tuple", "frozenset"))

    def read(self, text: str) -> Any:
        """The value that the text of a variable or a flag stands for, unchecked."""
        if self.kind == "bool":
            return _BOOLEANS.get(text.strip().lower(), text)
        if self.kind in ("int", "float") and not self.is_size:
            return _number(text)
        return [part.strip() for part in text.split(",") if part.strip()] if self.is_list else text

    def checked(self, value: Any) -> Any:
        """The value as its dataclass wants it. Raises ConfigError."""
        if self.is_size and isinstance(value, str):
            value = math.inf if value in ("inf", "none") else size_of(value)
        value = tuple(value) if isinstance(value, list) else value
        self.check(value)
        return frozenset(value) if self.kind.startswith("frozenset") else value


def _number(text: str) -> Any:
    """A number, where it is one.

    >>> _number("50_000"), _number("0.5"), _number("many")
    (50000, 0.5, 'many')
    """
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def size_of(text: str) -> int:
    """Bytes of a size with a unit. Raises ConfigError for anything else.

    >>> size_of("50 GB"), size_of("1.5 MiB"), size_of("100")
    (50000000000, 1572864, 100)
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(f'{shown(text)} is no size; write bytes, or a number with a unit such as "50 GB" or "8 GiB"')
    return int(float(found[1].replace("_", "")) * _UNITS[found[2].lower()])


def descriptions(kind: type) -> dict[str, str]:
    """The descriptions of a dataclass's fields in its docstring: lines such as "name  text", continued below the text.

    >>> descriptions(Application)["top_k"]
    'chunks to retrieve'
    """
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(kind) or "").splitlines():
        if begins := re.fullmatch(r"(\w+(?:, \w+)*) {2,}(\S.*)", line):
            names = begins[1].split(", ")
            found |= dict.fromkeys(names, begins[2])
        elif line.startswith(" "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found


def _check(config: Callable[..., object], name: str, value: Any) -> None:
    """Make the dataclass with one value; raises ConfigError."""
    rest = {"url": "memory://"} if config is RemoteConfig else {}
    config(**(rest | {name: value}))


@cache
def known_settings() -> dict[str, Known]:
    """Every key."""
    known = {}
    left_out = {EngineConfig: {"reuse", "store"}, StoreConfig: {"device", "remote"}}
    tables = {ReuseConfig: "reuse.", RemoteConfig: "remote."}
    for config in (Application, EngineConfig, StoreConfig, SamplingParams, ReuseConfig, RemoteConfig):
        texts = descriptions(config)
        for one in fields(config):
            if one.name in left_out.get(config, ()):
                continue
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            key = tables.get(config, "") + one.name
            known[key] = Known(
                key,
                str(one.type).removesuffix(" | None"),
                None if default is MISSING else default,
                re.split(r"[;.](?= |$)", texts.get(one.name, ""), maxsplit=1)[0].replace("`", ""),
                partial(_check, config, one.name),
            )
    return known


@dataclass(frozen=True, slots=True)
class Settings:
    """Every key with its value and origin.

    file  read for them, or None
    """

    entries: Mapping[str, Setting]
    file: Path | None = None

    def __getitem__(self, key: str) -> Any:
        """The value of a key."""
        return self.entries[key].value

    def given(self) -> dict[str, Any]:
        """The values that are not defaults."""
        return {key: one.value for key, one in self.entries.items() if one.origin != DEFAULT}

    def flags(self) -> dict[str, Any]:
        """The values that flags gave."""
        return {key: one.value for key, one in self.entries.items() if one.origin.startswith("--")}

    def only(self, *keys: str) -> Settings:
        """The same with the defaults of all other keys; "remote." stands for the whole table."""
        known = known_settings()
        kept = {
            key: one if key.startswith(keys) else Setting(key, known[key].default, DEFAULT)
            for key, one in self.entries.items()
        }
        return Settings(kept, self.file)

    def engine_config(self, **options: Any) -> EngineConfig:
        """Configuration of the engine; `options` of `EngineConfig` go before it. Raises ConfigError."""
        given = self.given()
        own = EngineConfig.option_names() - {"reuse", "remote"}
        flat = {key: value for key, value in given.items() if key in own}
        config = EngineConfig(reuse=ReuseConfig(**self._table("reuse"))).with_options(**flat)
        return replace(config, store=replace(config.store, remote=self.remote())).with_options(**options)

    def remote(self) -> RemoteConfig | None:
        """Configuration of the remote, None without one; a bad key file is reported here. Raises ConfigError."""
        table = self._table("remote")
        if not table:
            return None
        if "url" not in table:
            first = self.entries[f"remote.{next(iter(table))}"]
            change = f"set remote.url (--remote), or take {first.key} out"
            raise ConfigError(f"{first.origin}: {first.key} needs a remote; {change}")
        config = RemoteConfig(**table)
        config.keys()
        return config

    def sampling(self) -> SamplingParams:
        """Parameters of drawing tokens."""
        return SamplingParams(**{one.name: self[one.name] for one in fields(SamplingParams)})

    def _table(self, name: str) -> dict[str, Any]:
        return {key.partition(".")[2]: value for key, value in self.given().items() if key.startswith(f"{name}.")}


def load_settings(
    path: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """Read the settings file, then the environment, then flags; the last one that sets a key wins.

    Args:
        path: the file; None: that of `CACHECRAFT_SETTINGS`, or `cachecraft.toml` in the working directory, if it is
            there. Relative paths in the file are relative to its folder.
        environment: None: that of the process.
        flags: keys of `known_settings` with the values that a command was given.
        defaults: of a command, in place of the dataclasses' own.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong: it names file, variable or flag, and key.
    """
    environment = os.environ if environment is None else environment
    file = settings_file(path, environment)
    known = known_settings()
    entries = {key: Setting(key, one.default, DEFAULT) for key, one in known.items()}
    entries |= {key: Setting(key, value, DEFAULT) for key, value in (defaults or {}).items()}
    sources: list[tuple[str, str, Any]] = []
    if file is not None:
        sources += [(key, f"{file}: {key}", value) for key, value in _of_file(file, known).items()]
    for name, text in sorted(environment.items()):
        if (
            name.startswith(PREFIX)
            and name not in _ELSEWHERE | {FILE_VARIABLE}
            and text
            and (key := _key_of(name, known)) is not None
        ):
            sources.append((key, name, known[key].read(text)))
    for key, value in (flags or {}).items():
        sources.append((key, flag_of(key), known[key].read(value) if isinstance(value, str) else value))
    for key, place, value in sources:
        try:
            checked = known[key].checked(value)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        entries[key] = Setting(key, checked, str(file) if place == f"{file}: {key}" else place)
    return Settings(entries, file)


def flag_of(key: str) -> str:
    """The flag of a key.

    >>> [flag_of(key) for key in ("disk_bytes", "reuse.drift", "remote.url", "remote.key_file")]
    ['--disk-bytes', '--drift', '--remote', '--remote-key-file']
    """
    if key == "remote.url":
        return "--remote"
    return "--" + key.removeprefix("reuse.").replace("_", "-").replace(".", "-")


def settings_file(path: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> Path | None:
    """The file that `load_settings` reads. Raises ConfigError when one is named and is not there."""
    named = path or environment.get(FILE_VARIABLE)
    if named is not None:
        check_path("settings", named)
        if not os.path.isfile(named):
            raise ConfigError(f"there is no settings file at {os.fspath(named)}; name another, or make it")
        return Path(named)
    found = Path(FILE_NAME)
    return found.absolute() if os.path.isfile(found) else None


def _key_of(variable: str, known: Mapping[str, Known]) -> str | None:
    """The key of a variable; None for what Kubernetes adds. Raises ConfigError."""
    names = {PREFIX + key.replace(".", "_").upper(): key for key in (*known, *_ALIASES)}
    if variable not in names and _SERVICE_LINK.fullmatch(variable):
        return None
    check_names([variable], names, what="variable", advice="Correct it, or take it out. ")
    return _ALIASES.get(names[variable], names[variable])


def _of_file(file: Path, known: Mapping[str, Known]) -> dict[str, Any]:
    """The keys and values of a file. Raises ConfigError."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, dict) and key in ("reuse", "remote"):
            flat |= {f"{key}.{name}": one for name, one in value.items()}
        else:
            flat[_ALIASES.get(key, key)] = value
    try:
        check_names(flat, known, what="setting")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for key in ("store", "remote.key_file"):
        if isinstance(flat.get(key), str):
            flat[key] = str(file.parent / flat[key])
    return flat
