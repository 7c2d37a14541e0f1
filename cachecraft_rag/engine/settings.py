"""Settings of a command. Precedence: flag, environment, file, the user's own file, default.

A setting is a field of a dataclass that checks it: `Application`, `EngineConfig`, `StoreConfig`, `SamplingParams`, or
one of `_TABLES`, such as `ReuseConfig` in the table `[reuse]`. The field gives key, flag, default and help, so a new
setting is a field with its check and its line in the class's docstring, a name in `_PANELS` of `cli/options.py`, and
another value in `OTHERS` of `tests/vllm/test_settings.py`. The variable of `disk_bytes` is
`CACHECRAFT_DISK_BYTES`, that of `url` in `[remote]` `CACHECRAFT_REMOTE_URL`.

Rejected: pydantic-settings. It would check every value a second time, it records neither the origin of a value nor
which other variables the environment may hold, and it takes 0.3 s to import, half of what a command such as
`store stats` may take.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from cachecraft_rag.checks import check_names, check_path, check_text, check_whole, shown
from cachecraft_rag.engine.config import EngineConfig, EngineTuning
from cachecraft_rag.engine.trust import FILE_NAME, config_folder, is_trusted, needs_trust
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store.config import StoreConfig, StoreTuning
from cachecraft_rag.store.remote.config import RemoteConfig, RemoteTuning

logger = logging.getLogger("cachecraft_rag.settings")

FILE_VARIABLE = "CACHECRAFT_SETTINGS"
PREFIX = "CACHECRAFT_"
DEFAULT = "default"
# Variables of the package that are not settings of an engine.
_ELSEWHERE = {
    PREFIX + name
    for name in (
        "ADMIN_KEY",
        "API_KEY",
        "CACHE",
        "CPU_KERNELS",
        "READ_ONLY",
        "REMOTE_KEY",
        "REMOTE_KEY_FILE",
        "SEAL_KEY",
    )
}
# Added by Kubernetes to every pod beside a service whose name begins with "cachecraft".
_SERVICE_LINK = re.compile(
    r"CACHECRAFT_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
_TABLES: Mapping[type, str] = {
    ReuseConfig: "reuse",
    ReuseMethod: "method",
    EngineTuning: "tuning",
    StoreTuning: "tuning",
    RemoteConfig: "remote",
    RemoteTuning: "remote.tuning",
}
_SECRET = frozenset({"remote.key"})
# keys that were in another table before
_MOVED = {
    f"{table}{field.name}": f"{_TABLES[kind]}.{field.name}"
    for kind, table in (
        (ReuseMethod, "reuse."),
        (EngineTuning, ""),
        (StoreTuning, ""),
        (RemoteTuning, "remote."),
    )
    for field in fields(kind)
}
_ALIASES = {"max_tokens": "max_new_tokens"}
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)
_BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True, slots=True)
class Application:
    """Settings of an application besides those of its engine.

    model         Hugging Face name or folder, or "demo" for the bundled SmolLM2-135M-Instruct
    store         folder of the retrieval index and the chunk-caches
    embeddings    sentence-transformers model for retrieval; None = the bundled one
    top_k         chunks to retrieve
    threads       CPU threads; None = torch's choice
    metrics_port  port of this machine that serves Prometheus metrics; None = no metrics
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
    value: object
    origin: str

    @property
    def shown(self) -> object:
        """The value in a form that people and logs may see: no key and no credentials; a frozenset as a list."""
        if self.key in _SECRET and self.value is not None:
            return "***"
        if self.key == "remote.url" and isinstance(self.value, str):
            return RemoteConfig(self.value).shown
        return sorted(self.value) if isinstance(self.value, frozenset) else self.value


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key: the field of a dataclass.

    key      its name: that of the field, after the table, as in "remote.tuning.failures"
    kind     annotation of the field without "| None", such as "bool" or "tuple[str, ...]"
    default  default of the field; None also for `remote.url`, which has none
    help     first clause of its description in the dataclass's docstring
    check    makes the dataclass with this value and drops it; raises ConfigError
    """

    key: str
    kind: str
    default: object
    help: str
    check: Callable[[object], object]

    @property
    def is_size(self) -> bool:
        """True if the value is a number of bytes, or of bytes per second; its text may have a unit."""
        return self.key.endswith(("_bytes", "_bytes_per_s"))

    @property
    def is_list(self) -> bool:
        """True if several values are allowed."""
        return self.kind.startswith(("tuple", "frozenset"))

    def read(self, text: str) -> object:
        """Return the value of the text of a variable or a flag, unchecked: `checked` refuses a wrong one.

        true, yes, on and 1 mean True, and false, no, off and 0 mean False, in any case. Several values are divided by
        commas, and returned as a list. Text that cannot be read, and a size (`is_size`), is returned unchanged.
        """
        if self.kind == "bool":
            return _BOOLEANS.get(text.strip().lower(), text)
        if self.kind in ("int", "float") and not self.is_size:
            return _number(text)
        if self.is_list:
            return [part.strip() for part in text.split(",") if part.strip()]
        return text

    def checked(self, value: object) -> object:
        """Return the value in the type of its dataclass: a size as bytes, and a list as a tuple or a frozenset.

        A size may be a text (`size_of`), for bytes per second also "inf" or "none", for no limit. ConfigError for a
        wrong value, and for None where the field has no default of None.
        """
        if self.is_size and isinstance(value, str):
            value = math.inf if value in ("inf", "none") else size_of(value)
        if isinstance(value, list):
            value = tuple(value)
        self.check(value)
        if self.kind.startswith("frozenset"):
            assert isinstance(value, Iterable)  # or the check would have failed
            return frozenset(value)
        return value


def _number(text: str) -> float | str:
    """Return the number of a text, or the text if it is not a number.

    >>> _number("50_000"), _number("0.5"), _number("many")
    (50000, 0.5, 'many')
    """
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def size_of(text: str) -> int:
    """Return the bytes of a size with a unit, rounded down.

    Units are k, M, G and T (powers of 1,000) and Ki, Mi, Gi and Ti (powers of 1,024), in any case and with or without
    "B"; without a unit, bytes. ConfigError for any other text, also for a negative number.

    >>> size_of("50 GB"), size_of("1.5 MiB"), size_of("100")
    (50000000000, 1572864, 100)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f'{shown(text)} is no size; write bytes, or a number with a unit such as "50 GB" or "8 GiB"'
        )
    size = float(match[1].replace("_", "")) * _UNITS[match[2].lower()]
    if math.isinf(size):
        raise ConfigError(f"{shown(text)} is too large for a size; write a smaller one")
    return int(size)


def descriptions(kind: type) -> dict[str, str]:
    """Return field → description of a dataclass, from lines of its docstring such as "name  text" (two spaces or more).

    Indented lines that follow continue the text. Fields without a line are left out.

    >>> descriptions(Application)["top_k"]
    'chunks to retrieve'
    """
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(kind) or "").splitlines():
        match = re.fullmatch(r"(\w+(?:, \w+)*) {2,}(\S.*)", line)
        if match is not None:
            names = match[1].split(", ")
            texts |= dict.fromkeys(names, match[2])
        elif line.startswith(" "):
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
        else:
            names = []
    return texts


def _check(config: Callable[..., object], name: str, value: object) -> None:
    """Make the dataclass with this value; raises ConfigError."""
    required = {"url": "memory://"} if config is RemoteConfig else {}
    config(**(required | {name: value}))


@cache
def known_settings() -> dict[str, KnownKey]:
    """Return every key of a settings file → its `KnownKey`: `model`, or with its table `reuse.recompute_ratio`.

    In the order of the dataclasses; one dict for all callers.
    """
    known = {}
    left_out = {
        EngineConfig: {"reuse", "store", "tuning"},
        StoreConfig: {"device", "remote", "tuning"},
        ReuseConfig: {"method"},
        RemoteConfig: {"tuning"},
    }
    for config in (
        Application,
        EngineConfig,
        StoreConfig,
        SamplingParams,
        *_TABLES,
    ):
        texts = descriptions(config)
        for setting in fields(config):
            if setting.name in left_out.get(config, ()):
                continue
            default = setting.default
            if setting.default_factory is not MISSING:
                default = setting.default_factory()
            first_clause = re.split(r"[;.](?= |$)", texts.get(setting.name, ""), maxsplit=1)[0]
            key = f"{_TABLES[config]}." if config in _TABLES else ""
            key += setting.name
            known[key] = KnownKey(
                key,
                kind=str(setting.type).removesuffix(" | None"),
                default=None if default is MISSING else default,
                help=first_clause.replace("`", ""),
                check=partial(_check, config, setting.name),
            )
    return known


@dataclass(frozen=True, slots=True)
class Settings:
    """Every key with its value and origin.

    entries  key → setting
    file     file that was read, besides the user's own; None without one
    ignored  settings of a file that the user has not trusted, which would have had an effect
    """

    entries: Mapping[str, Setting]
    file: Path | None = None
    ignored: tuple[Setting, ...] = ()

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key. Raises KeyError for an unknown key."""
        return self.entries[key].value

    def given(self) -> dict[str, object]:
        """Return key → value of all settings from a flag, a variable or a file, also where they equal the default."""
        return {
            key: setting.value for key, setting in self.entries.items() if setting.origin != DEFAULT
        }

    def flags(self) -> dict[str, object]:
        """Return key → value of the settings that were given by flags; empty if there are none."""
        return {
            key: setting.value
            for key, setting in self.entries.items()
            if setting.origin.startswith("--")
        }

    def only(self, *keys: str) -> Settings:
        """Return a copy in which every key that begins with none of these has its dataclass's default."""
        known = known_settings()
        kept = {}
        for key, setting in self.entries.items():
            kept[key] = (
                setting if key.startswith(keys) else Setting(key, known[key].default, DEFAULT)
            )
        return Settings(kept, self.file, self.ignored)

    def engine_config(self, **options: object) -> EngineConfig:
        """Return the engine's configuration: the settings in `given`, overridden by options as of `with_options`.

        Defaults of a command have no effect. The key file of a remote is read, and its keys are checked.
        """
        names = EngineConfig.option_names() - {"reuse", "remote", "tuning"}
        flat = {key: value for key, value in self.given().items() if key in names}
        method = ReuseMethod(**self._table("method"))
        reuse = ReuseConfig(**self._table("reuse"), method=method)
        config = EngineConfig(reuse=reuse).with_options(**flat).with_tuning(**self._table("tuning"))
        store = replace(config.store, remote=self.remote())
        return replace(config, store=store).with_options(**options)

    def remote(self) -> RemoteConfig | None:
        """Return the configuration of the remote, or None if no setting of it is in `given`.

        Its keys are checked too, and a key file is read. ConfigError for settings of a remote without a URL.
        """
        given = [key for key in self.given() if key.startswith("remote.")]
        if not given:
            return None
        if "remote.url" not in given:
            first = self.entries[given[0]]
            change = f"set remote.url (--remote), or remove {first.key}"
            raise ConfigError(f"{first.origin}: {first.key} needs a remote; {change}")
        tuning = RemoteTuning(**self._table("remote.tuning"))
        config = RemoteConfig(**self._table("remote"), tuning=tuning)
        config.keys()
        return config

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of these settings, defaults of a command included."""
        return SamplingParams(
            **{setting.name: self[setting.name] for setting in fields(SamplingParams)}
        )

    def _table(self, name: str) -> dict[str, Any]:
        return {
            key.rpartition(".")[2]: value
            for key, value in self.given().items()
            if key.rpartition(".")[0] == name
        }


def load_settings(
    path: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Settings:
    """Read the user's own file, the settings file, the environment, then flags; later values override earlier ones.

    Ignored are empty variables, and those that Kubernetes adds for a service whose name begins with "cachecraft".
    Values that are valid alone but do not fit each other are not noticed here.

    A file that was found in the working directory, and not named, may be a stranger's. Until it is trusted
    (`cachecraft trust`), its keys that load a model, send data, open a port or decide who shares chunk-caches
    (`trust.needs_trust`) have no effect: they are in `ignored`, and one warning is logged.

    Args:
        path: the file; None: see `settings_file`. A relative `store` or `remote.key_file` in it is relative to its
            folder; folders named by `model` and `embeddings` are relative to the working directory.
        environment: variables; None: those of the process.
        flags: keys with the values of a command's flags; leave out flags that were not given, because None counts as a
            value. A text is read as that of a variable. An unknown key is a KeyError.
        defaults: defaults of a command in place of those of the dataclasses. Neither keys nor values are checked.
    """
    environment = os.environ if environment is None else environment
    file = settings_file(path, environment)
    is_named = bool(path or environment.get(FILE_VARIABLE))
    known = known_settings()
    entries = {key: Setting(key, setting.default, DEFAULT) for key, setting in known.items()}
    entries |= {key: Setting(key, value, DEFAULT) for key, value in (defaults or {}).items()}

    given: list[_Given] = []
    own_file = _own_file()
    if own_file is not None:
        given += _of_file(own_file, known, is_own=True)
    if file is not None and not (own_file is not None and os.path.samefile(file, own_file)):
        given += _of_file(file, known, is_own=is_named)
    given += _of_environment(environment, known)
    for key, value in (flags or {}).items():
        read = known[key].read(value) if isinstance(value, str) else value
        given.append(_Given(key, read, origin=flag_of(key), place=flag_of(key)))

    ignored: dict[str, tuple[Setting, str]] = {}
    for source in given:
        try:
            checked = known[source.key].checked(source.value)
        except ConfigError as error:
            raise ConfigError(f"{source.place}: {error}") from None
        setting = Setting(source.key, checked, source.origin)
        if source.needs_trust is not None:
            if checked != entries[source.key].value:
                ignored[source.key] = (setting, source.needs_trust)
            continue
        entries[source.key] = setting
        ignored.pop(source.key, None)
    if ignored:
        assert file is not None  # only such a file needs trust
        logger.warning("%s", _ignored_text(file, ignored))
    return Settings(entries, file, tuple(setting for setting, _ in ignored.values()))


def _ignored_text(file: Path, ignored: Mapping[str, tuple[Setting, str]]) -> str:
    """Return which keys of an untrusted file are ignored, why, and what to do."""
    keys = ", ".join(f"{key} ({reason})" for key, (_, reason) in ignored.items())
    return (
        f"{file} is not trusted, or has changed since. Ignored: {keys}. Read the file, and if you trust it, type: "
        f"cachecraft trust {shlex.quote(str(file.parent))}. Or set these keys by a flag, a variable, or in "
        f"{config_folder() / FILE_NAME}."
    )


class _Given(NamedTuple):
    """A value of a key; `place` names its origin in an error message.

    `needs_trust` is why the value is ignored unless the user trusts its file; None: it counts.
    """

    key: str
    value: object
    origin: str
    place: str
    needs_trust: str | None = None


def _of_environment(
    environment: Mapping[str, str], known: Mapping[str, KnownKey]
) -> Iterator[_Given]:
    """Yield the settings of the environment. Raises ConfigError for an unknown variable."""
    for name, text in sorted(environment.items()):
        is_setting = name.startswith(PREFIX) and name not in _ELSEWHERE and name != FILE_VARIABLE
        if not is_setting or not text:
            continue
        key = _key_of(name, known)
        if key is not None:
            yield _Given(key, known[key].read(text), origin=name, place=name)


def flag_of(key: str) -> str:
    """Return the flag of a key, such as "--disk-bytes". Raises nothing for an unknown key.

    >>> [flag_of(key) for key in ("disk_bytes", "method.drift", "remote.url", "remote.key_file")]
    ['--disk-bytes', '--drift', '--remote', '--remote-key-file']
    >>> [flag_of(key) for key in ("tuning.max_waiting", "remote.tuning.failures")]
    ['--max-waiting', '--remote-failures']
    """
    if key == "remote.url":
        return "--remote"
    name = key.removeprefix("reuse.").removeprefix("method.").replace("tuning.", "")
    return "--" + name.replace("_", "-").replace(".", "-")


def settings_file(
    path: str | os.PathLike[str] | None, environment: Mapping[str, str]
) -> Path | None:
    """Return the named file, that of `CACHECRAFT_SETTINGS`, or `cachecraft.toml` in the working directory.

    None if none is named and the last is missing. ConfigError for a named file that does not exist.
    """
    named = path or environment.get(FILE_VARIABLE) or None
    if named is not None:
        check_path("settings", named)
        if not os.path.isfile(named):
            raise ConfigError(
                f"there is no settings file at {os.fspath(named)}; correct the path, or make the file"
            )
        return Path(named)
    default = Path(FILE_NAME)
    return default.absolute() if os.path.isfile(default) else None


def _key_of(variable: str, known: Mapping[str, KnownKey]) -> str | None:
    """Return the key of a variable; None for variables that Kubernetes adds."""
    names = {_variable_of(key): key for key in (*known, *_ALIASES)}
    if variable not in names and _SERVICE_LINK.fullmatch(variable):
        return None
    moved = {_variable_of(old): _variable_of(new) for old, new in _MOVED.items()}
    advice = "Correct it, or remove it."
    check_names([variable], names, what="variable", advice=advice, hints=moved, prefix=PREFIX)
    return _ALIASES.get(names[variable], names[variable])


def _variable_of(key: str) -> str:
    return PREFIX + key.replace(".", "_").upper()


def _own_file() -> Path | None:
    """Return the path of the user's own settings file; None if the file does not exist."""
    file = config_folder() / FILE_NAME
    return file if os.path.isfile(file) else None


def _of_file(file: Path, known: Mapping[str, KnownKey], *, is_own: bool) -> list[_Given]:
    """Return the settings of a file, which needs trust unless the user wrote or named it (`is_own`)."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    flat = _flat_settings(file, content)
    try:
        check_names(flat, known, what="setting", hints=_MOVED)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for key in ("store", "remote.key_file"):
        path = flat.get(key)
        if isinstance(path, str):
            flat[key] = str(file.parent / path)
    counts = is_own or is_trusted(file, content)
    return [
        _Given(
            key,
            value,
            origin=str(file),
            place=f"{file}: {key}",
            needs_trust=None if counts else needs_trust(key, value, file.parent),
        )
        for key, value in flat.items()
    ]


def _flat_settings(file: Path, content: bytes) -> dict[str, object]:
    """Return key → value of a file's text, with dots after tables."""
    try:
        tables = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    # ValueError: a number of more digits than Python reads
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    return {_ALIASES.get(key, key): value for key, value in _flattened(tables)}


def _flattened(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield key and value of each setting in a table and in its known tables."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key in _TABLES.values():
            yield from _flattened(value, f"{key}.")
        else:
            yield key, value
