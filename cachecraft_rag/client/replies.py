"""Checks of what a server sent: every malformed reply is a ServerError, with a message that is safe to print.

The functions that read a reply are for use within `checked_reply`: for one that is malformed they raise LookupError,
TypeError or ValueError.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from cachecraft_rag.client.chat_template import ServedTokenizer
from cachecraft_rag.errors import ConfigError, ServerError
from cachecraft_rag.model.facts import DiskSpace
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.server.served_model import ServedModel
from cachecraft_rag.server.wire import TOKENIZER_FILES
from cachecraft_rag.store.durable import Evicted
from cachecraft_rag.types.kv_layout import DTypeName, KVLayout
from cachecraft_rag.types.variants import HeldChunk

_MAX_SHOWN = 300  # characters of a server's text in a message
_MAX_WHOLE = 2**53  # the largest whole number that every JSON reader keeps
_MAX_TOKEN = 2**31 - 1
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")


def printable(text: object) -> str:
    r"""Return a server's text, on one line, without terminal codes: at most 300 characters, and an ellipsis if cut.

    Other values than text are converted with `str`.

    >>> printable("red \x1b[31malert\x1b[0m\r\x07")
    'red alert'
    """
    plain = _ESCAPE.sub("", str(text)[: 4 * _MAX_SHOWN])
    plain = "".join(letter if letter.isprintable() else " " for letter in plain).strip()
    return plain if len(plain) <= _MAX_SHOWN else plain[:_MAX_SHOWN] + "…"


@contextmanager
def checked_reply(url: str, name: str) -> Iterator[None]:
    """Turn errors of reading a malformed reply into a ServerError that names the reply; OSError and ServerError pass.

    Args:
        url: the server's URL, for the message.
        name: what the server sent, for the message, such as "an audit".
    """
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        ConfigError,
    ) as error:
        reason = printable(f"{type(error).__name__}: {error}")
        raise ServerError(
            f"{url} sent {name} that this version cannot read ({reason}); install the same version on both sides, or "
            "ask the server's operator"
        ) from error


def parsed_json(content: bytes | str) -> object:
    """Parse JSON; raises ValueError for invalid Unicode, NaN and infinities too, RecursionError for deep nesting.

    A text in it may hold half a surrogate pair, which JSON can write as an escape; `text_of` refuses such a text.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    parsed: object = json.loads(content, parse_constant=refuse)
    return parsed


def mapping_of(value: object) -> Mapping[str, object]:
    """Return a JSON object, unchanged. Raises TypeError for any other value, None too."""
    if not isinstance(value, dict):
        raise TypeError(f"an object was expected, not {type(value).__name__}")
    return value


def list_of(value: object) -> list[object]:
    """Return a JSON list, unchanged. Raises TypeError for any other value, None too."""
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {type(value).__name__}")
    return value


def text_of(value: object) -> str:
    """Return a JSON text, unchanged. Raises TypeError for any other value, ValueError for half a surrogate pair."""
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, not {type(value).__name__}")
    value.encode()
    return value


def whole_of(value: object, *, least: int = 0, most: int = _MAX_WHOLE) -> int:
    """Return a whole number from `least` to `most`, by default 2**53, up to which every JSON reader keeps it.

    Raises TypeError for any other value, True and 1.0 too, and ValueError for a number out of the range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"a whole number was expected, not {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError("a number is out of range")
    return value


def dtype_of(value: object) -> DTypeName:
    """Return the name of a dtype: "float32", "bfloat16" or "float16". Raises ValueError for any other value."""
    for name in get_args(DTypeName):
        if value == name:
            return cast(DTypeName, name)
    raise ValueError("an unknown dtype")


def seconds_of(value: object) -> float:
    """Return a time in seconds. Raises TypeError for no number or a bool, ValueError for NaN, below 0 or above 1e9."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"a number was expected, not {type(value).__name__}")
    if not 0.0 <= value <= 1e9:
        raise ValueError("a time is out of range")
    return float(value)


@dataclass(frozen=True)
class ServerFacts:
    """Facts about a server and its model, from `/v1/cachecraft`.

    session_header  name of the header that names a session; None if the server trusts none
    reuse           the server's settings of reuse
    """

    model: str
    fingerprint: str
    layout: KVLayout
    context_length: int
    end_tokens: frozenset[int]
    namespace: str
    system: str
    session_header: str | None
    reuse: ReuseConfig

    @classmethod
    def of(cls, reply: Mapping[str, object]) -> ServerFacts:
        """Return the facts in a reply of `Link.facts`."""
        layout = mapping_of(reply["layout"])
        header = None if reply["session_header"] is None else text_of(reply["session_header"])
        if header is not None and not _HEADER.fullmatch(header):
            raise ValueError("its session_header is not a name that a header can have")
        return cls(
            model=text_of(reply["model"]),
            fingerprint=text_of(reply["fingerprint"]),
            layout=KVLayout(
                layers=whole_of(layout["layers"], least=1, most=10_000),
                kv_heads=whole_of(layout["kv_heads"], least=1, most=1 << 20),
                head_dim=whole_of(layout["head_dim"], least=1, most=1 << 20),
                dtype=dtype_of(layout["dtype"]),
            ),
            context_length=whole_of(reply["context_length"], least=1),
            end_tokens=frozenset(
                whole_of(token, most=_MAX_TOKEN) for token in list_of(reply["end_tokens"])
            ),
            namespace=text_of(reply["namespace"]),
            system=text_of(reply["system"]),
            session_header=header,
            reuse=ReuseConfig().changed_by(mapping_of(reply["reuse"])),
        )


def served_model(facts: ServerFacts, reply: object) -> ServedModel:
    """Return the model with the tokenizer in the reply of `Link.tokenizer`.

    The tokenizer's files are in a temporary folder meanwhile; unknown files are ignored, and no code in them runs.
    Raises ServerError if the tokenizer cannot be read.
    """
    from transformers import AutoTokenizer

    files = mapping_of(mapping_of(reply)["files"])
    with tempfile.TemporaryDirectory(prefix="cachecraft-") as folder:
        for name in TOKENIZER_FILES:  # other names that a server may send are ignored
            if name in files:
                (Path(folder) / name).write_text(text_of(files[name]), encoding="utf-8")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare ones for damaged files
            reason = printable(error)
            raise ServerError(
                f"the tokenizer that the server sent cannot be read: {reason}"
            ) from error
    return ServedModel(
        name=facts.model,
        folder=None,
        tokenizer=ServedTokenizer(tokenizer),
        fingerprint=facts.fingerprint,
        layout=facts.layout,
        context_length=facts.context_length,
        end_tokens=facts.end_tokens,
    )


def disk_space(reply: object) -> DiskSpace:
    """Return the "disk" of a reply: the space of the server's store, in bytes, and its codec."""
    disk = mapping_of(mapping_of(reply)["disk"])
    return DiskSpace(
        used=whole_of(disk["used"]),
        budget=whole_of(disk["budget"], most=2**63),
        free=whole_of(disk["free"], most=2**63),
        codec=text_of(disk["codec"]),
    )


def missing_variants(reply: object) -> dict[str, int]:
    """Return the "missing" of a reply: id of each variant → number of its tokens; maybe empty."""
    missing = mapping_of(mapping_of(reply)["missing"])
    return {text_of(name): whole_of(tokens) for name, tokens in missing.items()}


def evicted(reply: object) -> Evicted:
    """Return the "variants" and "nbytes" of a reply: number of evicted chunk-caches, and their bytes on disk."""
    counts = mapping_of(reply)
    return Evicted(
        variants=whole_of(counts["variants"]), nbytes=whole_of(counts["nbytes"], most=2**63)
    )


def held_chunks(reply: object, chunk_ids: Sequence[str]) -> list[HeldChunk]:
    """Return the "chunks" of a reply; ValueError unless they are those of `chunk_ids`, in this order."""
    held = []
    entries = list_of(mapping_of(reply)["chunks"])
    for chunk_id, entry in zip(chunk_ids, map(mapping_of, entries), strict=True):
        if entry["chunk_id"] != chunk_id or not isinstance(entry["in_memory"], bool):
            raise ValueError("the chunks are not those that were asked for")
        held.append(HeldChunk(chunk_id, whole_of(entry["tokens"]), entry["in_memory"]))
    return held


def removed_chunks(reply: object) -> frozenset[str]:
    """Return the "removed" of a reply: ids of the chunks that a server keeps removed."""
    return frozenset(text_of(name) for name in list_of(mapping_of(reply)["removed"]))


def new_tokens(event: Mapping[str, object]) -> list[int]:
    """Return the new token ids of an event of a streamed answer, in order; empty if it has none."""
    tokens: list[int] = []
    for choice in list_of(event.get("choices") or []):
        token_ids = list_of(mapping_of(choice).get("token_ids") or [])
        tokens += [whole_of(token, most=_MAX_TOKEN) for token in token_ids]
    return tokens


def report_of(reply: object) -> Mapping[str, object]:
    """Return the report of a request as the server sent it, for `RequestProgress.reported`; {} if the server has none.

    A request that was computed without chunk-caches has only `refused`, the reason, in a form that is safe to print.
    Unknown fields are not checked.
    """
    record = mapping_of(reply)
    if record.get("refused"):
        return {"refused": printable(text_of(record["refused"]))}
    report = mapping_of(record.get("report") or {})
    for entry in list_of(report.get("segments") or []):
        segment = mapping_of(entry)
        for name in ("recomputed", "not_loaded", "spared"):
            whole_of(segment.get(name, 0))
        for name in ("cfo", "beta_prime", "focus"):
            seconds_of(segment.get(name) or 0.0)
        if not isinstance(segment.get("in_focus"), bool | None):
            raise TypeError("in_focus must be true, false or null")
        for name in ("outcome", "reason", "detail", "variant_id", "tier"):
            text_of(segment.get(name) or "")
    whole_of(report.get("row_layers", 0))
    for name in ("planned_s", "waited_s"):
        seconds_of(report.get(name, 0.0))
    if report.get("focus_layer") is not None:
        whole_of(report["focus_layer"])
    if report.get("remote") is not None:
        text_of(report["remote"])
    return report
