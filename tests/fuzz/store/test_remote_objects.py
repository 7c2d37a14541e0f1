"""Objects on a remote as somebody else might have written them, with every checksum right."""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.codecs import CODECS
from cachecraft_rag.store.layout import Header, encode
from cachecraft_rag.store.remote import RemoteConfig, RemoteTuning
from cachecraft_rag.store.remote.rows import framed
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import Variant, VariantKey

KEY = "a key that only its engines know"
PATIENT = RemoteTuning(
    lookup_timeout_s=30.0, connect_timeout_s=30.0, read_timeout_s=30.0, failures=10**9
)
ODD = (
    0,
    -1,
    1,
    2,
    3,
    7,
    64,
    65,
    10**6,
    10**10,
    10**18,
    2**63,
    10**400,
    0.0,
    0.5,
    1.0,
    -0.5,
    1e9,
    1e300,
    float("nan"),
    float("inf"),
    True,
    False,
    None,
    "",
    "raw",
    "int8",
    "entropy",
    "x" * 1000,
    "\ud800",
    "../../x",
    [],
    {},
    [1.0],
)
ROW_FIELDS = (
    "variant_id",
    "tokens",
    "tokens_digest",
    "inter",
    "intra",
    "cci",
    "codec",
    "nbytes",
    "reuse_frequency",
    "created",
    "primed",
    "payload_bytes",
    "token_inter",
    "layout_version",
    "key",
    "session",
    "home",
    "payload",
    "seal",
    "unheard of",
)


class Remote:
    """A folder as a remote, and the three objects an honest engine left on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.honest = self.there()

    def there(self) -> dict[Path, bytes]:
        while True:
            with suppress(FileNotFoundError):
                return {
                    path: path.read_bytes()
                    for path in sorted(self.root.rglob("*"))
                    if path.is_file()
                }

    def restore(self) -> None:
        """Restore all objects. The engine may still be removing, in the background, what it found to be damaged."""
        while self.there() != self.honest:
            with suppress(FileNotFoundError, NotADirectoryError):
                for path in self.there().keys() - self.honest.keys():
                    path.unlink()
                for path, data in self.honest.items():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)

    def pair(self, dice: random.Random) -> tuple[Path, Path]:
        """Row and payload of one variant."""
        row = dice.choice([path for path in self.honest if path.suffix == ".row"])
        return row, row.with_name(row.name.split(".")[0] + ".cache")

    def change_row(
        self, row: Path, change: Callable[[dict[str, Any]], object], *, keep_id: bool = True
    ) -> None:
        """The row with other fields: the checksum right, and what is derived from them too, if asked."""
        data = row.read_bytes()
        fields = json.loads(data[32:].partition(b"\n")[0])
        change(fields)
        created, name = data[:16], row.name
        if not keep_id:
            names = (fields["namespace"], fields["fingerprint"], fields["chunk_id"])
            fields["variant_id"] = VariantKey(*names, tuple(fields["origin_prefix"])).variant_id
            name = fields["variant_id"] + row.name[32:]
        if type(fields.get("created")) is float:
            created = struct.pack(">d", fields["created"]).hex().encode()
        text = json.dumps(fields, separators=(",", ":")).encode()
        signature = data.partition(b"\n")[2]
        row.unlink()
        row.with_name(name).write_bytes(framed(created, text, signature))
        payload = row.with_name(row.name.split(".")[0] + ".cache")
        if name != row.name:
            payload.rename(row.with_name(name.split(".")[0] + ".cache"))

    def change_payload(self, row: Path, payload: Path, data: bytes) -> None:
        """Another payload; the row says how long it is."""
        payload.write_bytes(data)
        self.change_row(row, lambda fields: fields.update(payload_bytes=max(1, len(data))))


def headers_fields(data: bytes) -> tuple[int, dict[str, Any]]:
    length = 8 + int.from_bytes(data[:8], "little")
    return length, json.loads(json.loads(data[8:length])["__metadata__"]["fields"])


def with_fields(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A payload whose header says something else, its checksum right; what else it says stays."""
    length, fields = headers_fields(data)
    change(fields)
    whole = json.loads(data[8:length])
    text = json.dumps(fields, separators=(",", ":"))
    whole["__metadata__"] |= {
        "fields": text,
        "fields_xxh3": xxhash.xxh3_64_hexdigest(text.encode()),
    }
    packed = json.dumps(whole, separators=(",", ":")).encode()
    padded = -(-(8 + len(packed)) // 4096) * 4096
    return struct.pack("<Q", padded - 8) + packed.ljust(padded - 8) + data[length:]


def variant_in(row: Path, fields: dict[str, Any]) -> Variant:
    identity = VariantKey(
        fields["namespace"],
        fields["fingerprint"],
        fields["chunk_id"],
        tuple(fields["origin_prefix"]),
    )
    names = (
        "variant_id",
        "tokens",
        "tokens_digest",
        "inter",
        "intra",
        "cci",
        "exact_share",
        "codec",
        "nbytes",
        "reuse_frequency",
        "created",
    )
    return Variant(key=identity, session=None, **{name: fields[name] for name in names})


# -- structure: none of these may change an answer that claims to be exact --------------------------------------------


def odd_row_field(remote: Remote, dice: random.Random) -> str:
    row, _ = remote.pair(dice)
    name, value = dice.choice(ROW_FIELDS), dice.choice(ODD)
    remote.change_row(row, lambda fields: fields.update({name: value}))
    return f"{name} = {value!r}"


def near_row_field(remote: Remote, dice: random.Random) -> str:
    row, _ = remote.pair(dice)
    name, by = (
        dice.choice(("tokens", "nbytes", "payload_bytes")),
        dice.choice((-64, -2, -1, 1, 2, 64, 4096)),
    )
    remote.change_row(row, lambda fields: fields.update({name: fields[name] + by}))
    return f"{name} {by:+}"


def other_tokens_in_harmony(remote: Remote, dice: random.Random) -> str:
    """Row and payload agree on another number of tokens, byte by byte as we would write it."""
    row, payload = remote.pair(dice)
    fields = json.loads(row.read_bytes()[32:].partition(b"\n")[0])
    header = Header.decode(payload.read_bytes()[: headers_fields(payload.read_bytes())[0]])
    tokens = max(1, header.tokens + dice.choice((-5, -1, 1, 5, 500)))
    layout = header.layout
    kind = dice.choice(("tokens", "tokens", "heads", "layers", "dtype"))
    if kind == "heads":
        layout, tokens = (
            KVLayout(layout.layers, layout.kv_heads * 2, layout.head_dim // 2, layout.dtype),
            header.tokens,
        )
    elif kind == "layers":
        layout, tokens = replace(layout, layers=layout.layers + dice.choice((-1, 1))), header.tokens
    elif kind == "dtype":
        layout, tokens = replace(layout, dtype=dice.choice(("bfloat16", "float16"))), header.tokens
    codec = dice.choice(("raw", *CODECS))
    numbers = {"tokens": tokens, "nbytes": layout.nbytes(tokens), "codec": codec}
    scores = base64.b64encode(np.ones(tokens, "<f4").tobytes()).decode()
    numbers["token_inter"] = scores
    variant = variant_in(row, fields | numbers)
    encoded = encode(
        variant, layout, torch.randn(layout.shape(tokens)).to(getattr(torch, layout.dtype))
    )
    remote.change_row(row, lambda found: found.update(numbers))
    remote.change_payload(row, payload, b"".join(encoded))
    return f"{kind}: {tokens} tokens, {layout}, {codec}"


def odd_header(remote: Remote, dice: random.Random) -> str:
    row, payload = remote.pair(dice)
    name, value = (
        dice.choice(("tokens", "codec", "extent_xxh3", "block_sizes", "layout", "chunk_id")),
        dice.choice(ODD),
    )
    inner = dice.choice(("layers", "kv_heads", "head_dim", "dtype"))

    def change(fields: dict[str, Any]) -> None:
        if name == "layout":
            fields[inner] = value
        elif name == "block_sizes":
            fields["block_sizes"] = [value] * 2
        else:
            fields[name] = value

    data = with_fields(payload.read_bytes(), change)
    if dice.random() < 0.5 and isinstance(value, int) and name == "tokens":
        remote.change_row(row, lambda fields: fields.update(tokens=value))
    remote.change_payload(row, payload, data)
    return f"header: {name} {inner} = {value!r}"


def long_prefix(remote: Remote, dice: random.Random) -> str:
    row, _ = remote.pair(dice)
    many = dice.choice((2, 100, 3000, 30_000))
    ids = [row.name[:32]] * many if dice.random() < 0.5 else [f"{n:032x}" for n in range(many)]
    system = json.loads(row.read_bytes()[32:].partition(b"\n")[0])["origin_prefix"][:1]

    def change(fields: dict[str, Any]) -> None:
        fields["origin_prefix"] = [*system, *ids]
        fields["inter"] = [0.1] * (len(system) + many)

    remote.change_row(row, change, keep_id=False)
    return f"{many} ids in the prefix"


def damaged_payload(remote: Remote, dice: random.Random) -> str:
    row, payload = remote.pair(dice)
    data = bytearray(payload.read_bytes())
    kind = dice.choice(("flip", "cut", "grow", "swap", "empty", "length"))
    if kind == "flip":
        for _ in range(dice.choice((1, 10))):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        del data[dice.randrange(len(data)) :]
    elif kind == "grow":
        data += bytes(dice.choice((1, 4096, 1 << 20)))
    elif kind == "swap":
        data = bytearray(
            dice.choice([d for path, d in remote.honest.items() if path.suffix == ".cache"])
        )
        if bytes(data) == remote.honest[payload]:
            data[-1] ^= 1
    elif kind == "length":
        data[:8] = struct.pack(
            "<Q", dice.choice((0, 4088, 8184, (16 << 20) - 8, 1 << 40, 2**64 - 1))
        )
    else:
        data.clear()
    (
        remote.change_payload
        if dice.random() < 0.7
        else lambda _, place, new: place.write_bytes(new)
    )(row, payload, bytes(data))
    return f"payload: {kind}"


def bomb(remote: Remote, dice: random.Random) -> str:
    """An entropy block whose frames grow, its checksum right."""
    import zstandard

    row, payload = remote.pair(dice)
    header = Header.decode(payload.read_bytes()[: headers_fields(payload.read_bytes())[0]])
    layout = header.layout
    grown = dice.choice((1 << 16, 1 << 24, 1 << 26))
    frame = zstandard.ZstdCompressor(level=1, write_content_size=dice.random() < 0.5).compress(
        bytes(grown)
    )
    start = bytes(2 * layout.kv_heads * (4 + 2 * layout.head_dim)) + len(frame).to_bytes(
        4, "little"
    )
    block = start + frame * 2
    sums = ((xxhash.xxh3_64_intdigest(block),),) * layout.layers
    sizes = (len(block),) * layout.layers
    try:
        found = replace(header, codec="entropy", extent_sums=sums, block_sizes=sizes).encode()
    except ValueError:  # larger than any block: said only
        found = with_fields(
            payload.read_bytes(), lambda fields: fields.update(codec="entropy", block_sizes=sizes)
        )
    remote.change_row(row, lambda fields: fields.update(codec="entropy"))
    remote.change_payload(row, payload, found + block * layout.layers)
    return f"a bomb of {grown}"


def strangers(remote: Remote, dice: random.Random) -> str:
    """Objects with names that the package does not use, and too many rows."""
    row, _ = remote.pair(dice)
    base = row.name.split(".")[0]
    kind = dice.choice(("level", "names", "rows"))
    if kind == "level":
        row.with_name(
            f"{base}.{dice.choice(('3000', '9' * 200, '-1', '²', '٣', '1.2', ''))}.row"
        ).write_bytes(b"")
    elif kind == "names":
        for name in (
            "x.cache",
            ".row",
            "a.b.c.d",
            base,
            f"{base}.row",
            f"{base}.0.cache",
            "\u2603.1.row",
        ):
            row.with_name(name).write_bytes(b"x" * dice.randrange(100))
    else:
        for n in range(200):
            row.with_name(f"{n:032x}-{row.name[33:49]}.0.row").write_bytes(dice.randbytes(500))
            row.with_name(f"{n:032x}-{row.name[33:49]}.cache").write_bytes(b"")
    return f"strangers: {kind}"


def noise(remote: Remote, dice: random.Random) -> str:
    row, _ = remote.pair(dice)
    data = bytearray(row.read_bytes())
    kind = dice.choice(("random", "deep", "long", "flip"))
    text = {
        "random": dice.randbytes(dice.choice((0, 10, 1000))),
        "deep": b"[" * 100_000 + b"]" * 100_000,
        "long": b" " * (5 << 20) + b"{}",
        "flip": bytes(data[32:-10]) + dice.randbytes(10),
    }[kind]
    row.write_bytes(framed(bytes(data[:16]), text))
    return f"row: {kind}"


STRUCTURE = (
    odd_row_field,
    odd_row_field,
    near_row_field,
    other_tokens_in_harmony,
    odd_header,
    long_prefix,
    damaged_payload,
    bomb,
    strangers,
    noise,
)

# -- lies: nobody can tell without a signature; they must harm nothing but the answer ---------------------------------


def other_values(remote: Remote, dice: random.Random) -> str:
    """Keys and values that the model never gave, all checksums right."""
    row, payload = remote.pair(dice)
    fields = json.loads(row.read_bytes()[32:].partition(b"\n")[0])
    layout = Header.decode(payload.read_bytes()[: headers_fields(payload.read_bytes())[0]]).layout
    kv = torch.randn(layout.shape(fields["tokens"])) * dice.choice((1.0, 1e3, 1e8))
    kind = dice.choice(("noise", "zeros", "nan", "inf", "huge"))
    spot = dice.randrange(kv.numel())
    kv.view(-1)[spot] = {"nan": float("nan"), "inf": float("-inf"), "huge": 3e38}.get(kind, 0.0)
    encoded = encode(variant_in(row, fields | {"codec": "raw"}), layout, kv)
    remote.change_payload(row, payload, b"".join(encoded))
    return f"values: {kind}"


def other_share(remote: Remote, dice: random.Random) -> str:
    row, _ = remote.pair(dice)
    name, value = (
        dice.choice(("exact_share", "cci", "intra")),
        dice.choice((0.0, 0.3, 1.0, 5.0, float("nan"), 1e308)),
    )
    remote.change_row(row, lambda fields: fields.update({name: value}))
    return f"{name} = {value}"


def other_scores(remote: Remote, dice: random.Random) -> str:
    row, _ = remote.pair(dice)
    value = dice.choice((0.0, 1.0, -1.0, float("nan"), float("inf"), 3e38))

    def change(fields: dict[str, Any]) -> None:
        scores = np.full(fields["tokens"] + dice.choice((0, 0, 1)), value, "<f4")
        fields["token_inter"] = base64.b64encode(scores.tobytes()).decode()
        fields["inter"] = [value] * len(fields["inter"])

    remote.change_row(row, change)
    return f"scores of {value}"


LIES = (other_values, other_share, other_scores)


@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
def test_no_object_on_a_remote_breaks_or_misleads_an_engine(
    key: str | None, fuzz: Any, fuzz_decoder: Decoder, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    config = RemoteConfig(f"file://{tmp_path}/shared", key=key, tuning=PATIENT)
    with (
        ChunkCacheStore.open(tmp_path / "honest", remote=config) as store,
        Engine(fuzz_decoder, store) as engine,
    ):
        for _ in engine.stream(fuzz.question, fuzz.chunks):
            pass
        engine.write_back.close()
        assert store.flush(60)
    remote, watch = Remote(tmp_path / "shared"), fuzz.watch()
    assert len(remote.honest) == 6
    with (
        ChunkCacheStore.open(tmp_path / "victim", remote=config, host_bytes=0) as store,
        Engine(fuzz_decoder, store) as engine,
    ):
        judge = fuzz.judge(engine)
        for number in range(max(fuzz.count // 2, 1)):
            dice = random.Random(number)
            torch.manual_seed(number)
            lies = dice.random() < 0.2
            what = (number, dice.choice(LIES if lies else STRUCTURE)(remote, dice))
            with watch.item(what):
                judge.ask(what, compare=key is not None or not lies)
                if number % 4 == 0:
                    judge.turned()
                assert store.flush(60), what
                judge.ask(what, compare=key is not None or not lies)  # what is kept here
            if number % 25 == 0:
                assert store.check().findings == (), what
            engine.settle()  # a variant that is captured in idle time reads the remote, too
            assert store.flush(60), what
            store.evict(down_to_bytes=0)
            remote.restore()
        outcomes: list[str] = []
        while outcomes != ["exact", "exact"]:  # as soon as nothing is being removed any more
            remote.restore()
            outcomes = [chunk.outcome for chunk in judge.ask("honest", compare=True).stats.chunks]
        assert engine.store.stats().remote.breaker == "closed"
    print(watch, judge.outcomes)
