"""Settings from a file, the environment and flags: a flag goes before the environment, that before the file, that
before the default.

`load_settings` reads `cachecraft.toml` and variables named `CACHECRAFT_…`. A key is a field of `EngineConfig`,
`StoreConfig` or `SamplingParams`, or one of `OTHERS`; the tables `[reuse]` and `[remote]` hold those of `ReuseConfig`
and `RemoteConfig`. The variable of `disk_bytes` is `CACHECRAFT_DISK_BYTES`, that of `url` in `[remote]`
`CACHECRAFT_REMOTE_URL`. The dataclasses check the values; a library that reads settings would check them a second time.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from cachecraft_rag.checks import check_names, check_path, check_text, check_whole
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import StoreConfig
from cachecraft_rag.store.remote import RemoteConfig

FILE_NAME = "cachecraft.toml"
FILE_VARIABLE = "CACHECRAFT_SETTINGS"
PREFIX = "CACHECRAFT_"
DEFAULT = "default"
# Variables of the package that are no settings of an engine.
_ELSEWHERE = frozenset(
    {"CACHECRAFT_CACHE", "CACHECRAFT_READ_ONLY", "CACHECRAFT_REMOTE_KEY", "CACHECRAFT_REMOTE_KEY_FILE", FILE_VARIABLE}
)
# What Kubernetes adds to every pod beside a service whose name begins with "cachecraft".
_SERVICE_LINK = re.compile(r"CACHECRAFT_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_SECRET = frozenset({"remote.key"})
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)
_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """What holds for one key, and where it comes from: a file, a variable, or "default"."""

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
class _Known:
    """One key: its default, how its text in a variable is read, and what checks it alone."""

    default: Any
    read: Callable[[str], Any]
    check: Callable[[Any], object]


def _others() -> dict[str, _Known]:
    """What is set for an application besides its engine."""
    return {
        "model": _Known("demo", str, lambda value: check_text("model", value, empty=False)),
        "store": _Known("chunk-caches", str, lambda value: check_path("store", value)),
        "embeddings": _Known(None, str, lambda value: check_path("embeddings", value)),
        "top_k": _Known(5, _number, lambda value: check_whole("top_k", value, least=1)),
        "threads": _Known(None, _number, lambda value: check_whole("threads", value, least=1, most=1024)),
        "metrics_port": _Known(None, _number, lambda value: check_whole("metrics_port", value, most=65535)),
    }


def known_settings() -> dict[str, _Known]:
    """Every key with its default."""
    known = _others()
    for kind, prefix, left_out in (
        (EngineConfig, "", {"reuse", "store"}),
        (StoreConfig, "", {"device", "remote"}),
        (SamplingParams, "", set()),
        (ReuseConfig, "reuse.", set()),
        (RemoteConfig, "remote.", set()),
    ):
        for one in fields(kind):
            if one.name not in left_out:
                known[prefix + one.name] = _of_field(kind, one)
    return known


def _of_field(kind: Callable[..., Any], one: Field[Any]) -> _Known:
    default = None if one.default is MISSING else one.default
    if one.default_factory is not MISSING:
        default = one.default_factory()
    more = {"url": "memory://"} if kind is RemoteConfig and one.name != "url" else {}
    return _Known(default, _reader(str(one.type)), lambda value: kind(**more, **{one.name: value}))


def _reader(annotation: str) -> Callable[[str], Any]:
    """How the text of a variable becomes a value of this type; the dataclass checks it afterwards."""
    kind = annotation.removesuffix(" | None")
    if kind == "bool":
        return lambda text: _FLAGS.get(text.strip().lower(), text)
    if kind in ("int", "float"):
        return _number
    if kind.startswith(("tuple", "frozenset")):
        return lambda text: [part.strip() for part in text.split(",") if part.strip()]
    return str


def _number(text: str) -> Any:
    """A number, where it is one.

    >>> _number("50_000"), _number("0.5"), _number("many")
    (50000, 0.5, 'many')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def size_of(text: str) -> int | None:
    """Bytes of a size with a unit; None for what is none.

    >>> size_of("50 GB"), size_of("1.5 MiB"), size_of("100"), size_of("many")
    (50000000000, 1572864, 100, None)
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        return None
    return int(float(found[1].replace("_", "")) * _UNITS[found[2].lower()])


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds: every key, with its value and where that comes from.

    file  what was read, or None
    """

    entries: Mapping[str, Setting]
    file: Path | None = None

    def __getitem__(self, key: str) -> Any:
        """The value of a key."""
        return self.entries[key].value

    def given(self) -> dict[str, Any]:
        """The values that are not defaults."""
        return {key: one.value for key, one in self.entries.items() if one.origin != DEFAULT}

    def engine_config(self) -> EngineConfig:
        """How the engine is opened. Raises ConfigError where settings contradict each other."""
        given = self.given()
        own = {one.name for one in fields(EngineConfig)} | {one.name for one in fields(StoreConfig)}
        flat = {key: value for key, value in given.items() if key in own and key not in ("reuse", "remote", "store")}
        config = EngineConfig(reuse=ReuseConfig(**self._table("reuse"))).with_options(**flat)
        remote = self._table("remote")
        if not remote:
            return config
        if "url" not in remote:
            first = next(
                one for key, one in self.entries.items() if key.startswith("remote.") and one.origin != DEFAULT
            )
            raise ConfigError(f"{first.origin}: {first.key} needs remote.url; set it, or take {first.key} out")
        return replace(config, store=replace(config.store, remote=RemoteConfig(**remote)))

    def sampling(self) -> SamplingParams:
        """How tokens are drawn."""
        names = {one.name for one in fields(SamplingParams)}
        return SamplingParams(**{key: value for key, value in self.given().items() if key in names})

    def _table(self, name: str) -> dict[str, Any]:
        return {key.partition(".")[2]: value for key, value in self.given().items() if key.startswith(f"{name}.")}


def load_settings(
    path: str | os.PathLike[str] | None = None, *, environment: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings' file, then the environment, whose variables go first.

    Args:
        path: the file; None: that of `CACHECRAFT_SETTINGS`, or `cachecraft.toml` in the working directory, if it is
            there. Relative paths in the file are relative to its folder.
        environment: None: that of the process.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong: it names file or variable, and key.
    """
    environment = os.environ if environment is None else environment
    file = settings_file(path, environment)
    known = known_settings()
    entries = {key: Setting(key, one.default, DEFAULT) for key, one in known.items()}
    if file is not None:
        entries |= {key: _checked(known, key, value, str(file)) for key, value in _of_file(file, known).items()}
    for name in sorted(variables(environment)):
        if (key := _key_of(name, known)) is None:
            continue
        entries[key] = _checked(known, key, known[key].read(environment[name]), name)
    return Settings(entries, file)


def settings_file(path: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> Path | None:
    """The file that `load_settings` reads. Raises ConfigError when one is named and is not there."""
    named = path or environment.get(FILE_VARIABLE)
    if named is not None:
        check_path("settings", named)
        if not os.path.isfile(named):
            raise ConfigError(f"there is no settings' file at {os.fspath(named)}; name another, or make it")
        return Path(named)
    found = Path(FILE_NAME)
    return found.absolute() if os.path.isfile(found) else None


def variables(environment: Mapping[str, str]) -> list[str]:
    """The variables that are settings, by name; empty ones are not set."""
    return [name for name, text in environment.items() if name.startswith(PREFIX) and name not in _ELSEWHERE and text]


def _key_of(variable: str, known: Mapping[str, _Known]) -> str | None:
    names = {PREFIX + key.replace(".", "_").upper(): key for key in known}
    if variable not in names and _SERVICE_LINK.fullmatch(variable):
        return None
    try:
        check_names([variable], names, what="variable")
    except ConfigError as error:
        raise ConfigError(f"{error} Take it out of the environment, or correct it.") from None
    return names[variable]


def _of_file(file: Path, known: Mapping[str, _Known]) -> dict[str, Any]:
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    tables = {key.partition(".")[0] for key in known if "." in key}
    flat: dict[str, Any] = {}
    for key, value in told.items():
        if isinstance(value, dict) and key in tables:
            flat |= {f"{key}.{name}": one for name, one in value.items()}
        else:
            flat[key] = value
    try:
        check_names(flat, known, what="setting")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for key in ("store", "remote.key_file"):
        if isinstance(flat.get(key), str):
            flat[key] = str(file.parent / flat[key])
    return flat


def _checked(known: Mapping[str, _Known], key: str, value: Any, origin: str) -> Setting:
    """The setting, its value checked; sizes may have units."""
    if key.endswith(("_bytes", "_bytes_per_s")) and isinstance(value, str):
        size = size_of(value)
        value = value if size is None else size
    if key.endswith("_bytes_per_s") and value in ("inf", "none"):
        value = math.inf
    if isinstance(value, list):
        value = frozenset(value) if key == "reuse.ablate" else tuple(value)
    try:
        known[key].check(value)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {key}: {error}") from None
    except TypeError as error:  # of a kind that cannot be compared at all
        raise ConfigError(f"{origin}: {key}: {error}") from None
    return Setting(key, value, origin)
