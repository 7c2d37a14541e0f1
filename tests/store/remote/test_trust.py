"""Attacks by a writer to the remote with every checksum right, and protection by a key."""

from __future__ import annotations

import json
import logging
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, StoreConfig
from cachecraft_rag.store.codecs import CODECS
from cachecraft_rag.store.layout import (
    Header,
    encode,
    longest_header,
    longest_payload,
    size_of,
)
from cachecraft_rag.store.remote import RemoteConfig, RemoteTier, RemoteTuning
from cachecraft_rag.store.remote.config import hidden, shown_url
from cachecraft_rag.store.remote.rows import decode_row, framed, unframed
from cachecraft_rag.store.remote.signing import SLICE_BYTES, Signer
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import Variant, VariantKey

CHUNKS = [
    Chunk("Empty the kettle before you descale it. " * 2),
    Chunk("The crumb tray is on the left. " * 2),
]
PATIENT = RemoteTuning(lookup_timeout_s=30.0, connect_timeout_s=30.0, read_timeout_s=30.0)
KEY, OTHER_KEY = "the key of all our engines", "the key of somebody else"
Change = Callable[[dict[str, Any]], object]


class Shared:
    """A folder as a remote, and engines that use it."""

    def __init__(self, folder: Path, decoder: Decoder) -> None:
        self.folder, self.decoder = folder, decoder
        self.url = f"file://{folder}/shared"
        (folder / "shared").mkdir()
        self.engines: list[Engine] = []

    def engine(self, **settings: Any) -> Engine:
        remote = RemoteConfig(self.url, **({"tuning": PATIENT} | settings))
        store = ChunkCacheStore.open(
            self.folder / f"store {len(self.engines)}", remote=remote, host_bytes=0
        )
        self.engines.append(
            Engine(
                self.decoder,
                store,
                config=ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise")),
            )
        )
        return self.engines[-1]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
            engine.store.close()

    def paths(self, ending: str) -> list[Path]:
        return sorted((self.folder / "shared").rglob(f"*{ending}"))

    def change_rows(self, change: Change) -> None:
        """Every row says something else, its checksum right; the signature is what it was."""
        for path in self.paths(".row"):
            created, text, signature = unframed(path.read_bytes())
            fields = json.loads(text)
            change(fields)
            path.write_bytes(
                framed(created, json.dumps(fields, separators=(",", ":")).encode(), signature)
            )

    def rewrite(
        self, change: Callable[[dict[str, Any], KVLayout], tuple[dict[str, Any], KVLayout]]
    ) -> None:
        """Every row and its payload say something else, in harmony, as we would write it."""
        for path in self.paths(".row"):
            payload = path.with_name(path.name.split(".")[0] + ".cache")
            data = payload.read_bytes()
            layout = Header.decode(data[: 8 + int.from_bytes(data[:8], "little")]).layout
            created, text, signature = unframed(path.read_bytes())
            fields = json.loads(text)
            numbers, layout = change(fields, layout)
            fields |= numbers
            kv = torch.randn(layout.shape(fields["tokens"])).to(getattr(torch, layout.dtype))
            encoded = encode(variant_of(fields), layout, kv)
            fields |= {"payload_bytes": size_of(encoded), "nbytes": layout.nbytes(fields["tokens"])}
            payload.write_bytes(b"".join(encoded))
            path.write_bytes(
                framed(created, json.dumps(fields, separators=(",", ":")).encode(), signature)
            )


def variant_of(fields: dict[str, Any]) -> Variant:
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


def ask(engine: Engine, **how: Any) -> Generation:
    answer = engine.stream("How?", CHUNKS, sampling=SamplingParams(max_new_tokens=6), **how)
    for _ in answer:
        pass
    engine.write_back.wait_for(
        [chunk.chunk_id for chunk in CHUNKS] + [engine.prompts.system.segment_id]
    )
    assert engine.store.flush(60)
    return answer


def outcomes(answer: Generation) -> list[str]:
    return [chunk.outcome for chunk in answer.stats.chunks]


@pytest.fixture
def shared(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Iterator[Shared]:
    made = Shared(tmp_path, tiny_decoder("Llama"))
    yield made
    made.close()


# -- what is written there with right checksums -----------------------------------------------------------------------


def other_tokens(by: int) -> Any:
    def change(fields: dict[str, Any], layout: KVLayout) -> tuple[dict[str, Any], KVLayout]:
        return {"tokens": fields["tokens"] + by, "token_inter": None}, layout

    return change


HARMONY = {
    "more tokens": other_tokens(5),
    "fewer tokens": other_tokens(-5),
    "other heads": lambda fields, layout: (
        {},
        replace(layout, kv_heads=4, head_dim=layout.head_dim // 2),
    ),
    "more heads": lambda fields, layout: ({}, replace(layout, kv_heads=4)),
    "fewer layers": lambda fields, layout: ({}, replace(layout, layers=layout.layers - 1)),
    "other dtype": lambda fields, layout: ({}, replace(layout, dtype="bfloat16")),
}


@pytest.mark.parametrize("lie", list(HARMONY))
def test_entries_that_the_model_never_wrote_are_misses_and_stay_off_the_disk(
    lie: str, shared: Shared
) -> None:
    captured = ask(shared.engine())
    shared.rewrite(HARMONY[lie])
    victim = shared.engine()
    answer = ask(victim)
    assert answer.text == captured.text
    assert outcomes(answer) == ["computed"] * 2
    assert all(
        "damaged" in chunk.reason or "contradicts" in chunk.reason for chunk in answer.stats.chunks
    )
    again = ask(victim)
    assert (again.text, outcomes(again)) == (captured.text, ["exact"] * 2)  # of its own captures
    assert victim.store.check().findings == ()


def test_token_scores_of_the_wrong_kind_and_a_huge_share_are_no_rows(shared: Shared) -> None:
    captured = ask(shared.engine())
    for wrong in (
        {"exact_share": 1e308},
        {"exact_share": 1.5},
        {"cci": -1.0},
        {"intra": 1e9},
        {"inter": [1e9]},
        {"session": None},
        {"home": "disk"},
        {"unheard of": 1},
    ):
        kept = {path: path.read_bytes() for path in shared.paths(".row")}
        shared.change_rows(lambda fields, wrong=wrong: fields.update(wrong))
        answer = ask(
            shared.engine(),
            config=ReuseConfig(capture=False, method=ReuseMethod(loading="layerwise")),
        )
        assert (answer.text, outcomes(answer)) == (captured.text, ["computed"] * 2), wrong
        for path, data in kept.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def test_a_row_says_nothing_of_its_use_here(shared: Shared) -> None:
    ask(shared.engine())
    shared.change_rows(lambda fields: fields.update(reuse_frequency=1e9))
    victim = shared.engine()
    ask(victim)
    assert all(row.variant.reuse_frequency < 1e6 for row in victim.store.rows())


@pytest.mark.parametrize("many", [300, 30_000])
@pytest.mark.parametrize("same", [True, False])
def test_a_long_origin_prefix_stalls_nothing(many: int, same: bool, shared: Shared) -> None:
    captured = ask(shared.engine())

    def change(fields: dict[str, Any]) -> None:
        fields["origin_prefix"] = fields["origin_prefix"][:1] + [
            CHUNKS[0].chunk_id if same else f"{n:032x}" for n in range(many)
        ]
        fields["inter"] = [0.1] * len(fields["origin_prefix"])
        fields["variant_id"] = variant_of(fields).key.variant_id

    shared.change_rows(change)
    for row in shared.paths(".row"):
        name = json.loads(unframed(row.read_bytes())[1])["variant_id"] + row.name[32:]
        payload = row.with_name(row.name.split(".")[0] + ".cache")
        payload.rename(row.with_name(name.split(".")[0] + ".cache"))
        row.rename(row.with_name(name))
    victim = shared.engine()
    answer = ask(victim)
    assert answer.text == captured.text
    assert all(len(row.variant.key.origin_prefix) < 10 for row in victim.store.rows())
    if same or many > shared.decoder.context_length:
        assert outcomes(answer) == ["computed"] * 2


@pytest.mark.parametrize("field", ["tokens", "layers", "kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [10**10, 10**18])
def test_a_header_of_billions_allocates_nothing(field: str, value: int, shared: Shared) -> None:
    ask(shared.engine())
    for path in shared.paths(".cache"):
        data = path.read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        header = Header.decode(data[:length])
        wrong = (
            replace(header, tokens=value)
            if field == "tokens"
            else replace(header, layout=replace(header.layout, **{field: value}))
        )
        with pytest.raises(ValueError, match=r"checksums|block sizes|counts|header damaged"):
            Header.decode(raw_header(header, wrong))
        path.write_bytes(raw_header(header, wrong) + data[length:])
    assert outcomes(ask(shared.engine())) == ["computed"] * 2


def raw_header(honest: Header, wrong: Header) -> bytes:
    """The bytes of a header that claims what `wrong` says; only its fields, which are what a reader builds from."""
    text = json.dumps(wrong._fields(), separators=(",", ":"))
    claim = {"fields": text, "fields_xxh3": xxhash.xxh3_64_hexdigest(text.encode())}
    metadata = json.dumps({"__metadata__": claim}, separators=(",", ":")).encode()
    length = len(honest.encode())
    assert 8 + len(metadata) <= length
    return struct.pack("<Q", length - 8) + metadata.ljust(length - 8)


def test_a_key_of_another_kind_spoils_no_look_up_of_others(make_redis: Any) -> None:
    layout = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16")
    url = f"redis://127.0.0.1:{make_redis().port}/0"
    with RemoteTier(RemoteConfig(url, tuning=PATIENT)) as tier, redis.Redis.from_url(url) as server:
        for number in range(3):
            key = VariantKey("ns", "model", f"chunk {number}", ("system",))
            numbers = (
                10,
                "tokens",
                (0.5,),
                0.3,
                0.6,
                1.0,
                None,
                "raw",
                layout.nbytes(10),
                0.0,
                1e9,
            )
            variant = Variant(key, key.variant_id, *numbers)
            assert tier.put(
                variant,
                encode(variant, layout, torch.randn(layout.shape(10)).bfloat16()),
                TokenScores(),
            )
        assert tier.flush(30)
        rows, data = (
            sorted(name for name in server.scan_iter() if part in name)
            for part in (b"rows/", b"data/")
        )
        server.delete(rows[0], data[1])
        server.set(rows[0], "no hash")
        server.hset(data[1], "no", "text")
        server.hset(rows[2], "\u2603", "a name of nobody's")
        found = tier.find("ns", "model", [f"chunk {number}" for number in range(3)]).variants
        assert sorted(len(offers) for offers in found.values()) == [0, 1, 1]
        opened = [tier.open(offers[0]) for offers in found.values() if offers]
        ends = []
        for stream in opened:
            with stream:  # type: ignore[union-attr]
                try:
                    stream.read_into(memoryview(bytearray(10)))  # type: ignore[union-attr]
                    ends.append("read")
                except FileNotFoundError:
                    ends.append("gone")
        assert set(ends) <= {"read", "gone"}
        assert "read" in ends
        assert tier.stats().breaker == "closed"


def test_bounds_hold_for_what_is_written(shared: Shared) -> None:
    layout = KVLayout(layers=5, kv_heads=3, head_dim=7, dtype="float32")
    for codec in CODECS:
        for tokens in (1, 63, 64, 65, 300):
            key = VariantKey("ns ☃", "model", "chunk", ("system", "ü" * 100))
            numbers = (
                tokens,
                "tokens",
                (0.5, 0.1),
                0.3,
                0.6,
                1.0,
                None,
                codec,
                layout.nbytes(tokens),
                0.0,
                1e9,
            )
            variant = Variant(key, key.variant_id, *numbers)
            for kv in (torch.randn(layout.shape(tokens)), torch.rand(layout.shape(tokens)) * 1e6):
                encoded = encode(variant, layout, kv)
                assert encoded[0].nbytes <= longest_header(variant, layout)
                assert size_of(encoded) <= longest_payload(variant, layout)


def test_a_remote_opens_from_the_variant_alone(shared: Shared) -> None:
    """Look up in one process and load in another, as scheduler and worker do."""
    first = shared.engine(key=KEY)
    ask(first)
    found = first.store.find  # the victim's own look-up, with what its model expects
    engine = shared.engine(key=KEY)
    prompt = engine.prompts.build("How?", CHUNKS)
    variants = [offers[0] for offers in engine.look_up(prompt.segments[:-1]).variants.values()]
    assert {variant.home for variant in variants} == {"remote"}
    assert found is not None
    worker = shared.engine(key=KEY)
    for variant in variants:
        loaded = worker.store.load(variant)
        assert tuple(loaded.kv.shape) == shared.decoder.layout.shape(variant.tokens)  # type: ignore[union-attr]


# -- signed remotes ---------------------------------------------------------------------------------------------------


def test_engines_with_one_key_share_and_others_read_what_is_signed(shared: Shared) -> None:
    captured = ask(shared.engine(key=KEY))
    for settings_ in ({"key": KEY}, {}):
        served = ask(shared.engine(**settings_))
        assert [(chunk.outcome, chunk.tier) for chunk in served.stats.chunks] == [
            ("exact", "remote")
        ] * 2
        assert served.text == captured.text


@pytest.mark.parametrize("writer", [None, OTHER_KEY])
def test_an_unsigned_entry_is_a_miss_and_gives_way_to_a_signed_one(
    writer: str | None, shared: Shared
) -> None:
    captured = ask(shared.engine(key=writer))
    victim = shared.engine(key=KEY)
    answer = ask(victim)
    assert (answer.text, outcomes(answer)) == (captured.text, ["computed"] * 2)
    assert {chunk.reason for chunk in answer.stats.chunks} == {
        "what the remote has of it is not signed with our key"
    }
    third = ask(shared.engine(key=KEY))
    assert [(chunk.outcome, chunk.tier) for chunk in third.stats.chunks] == [
        ("exact", "remote")
    ] * 2


def change_values(shared: Shared) -> None:
    shared.rewrite(lambda fields, layout: ({}, layout))


def change_share(shared: Shared) -> None:
    shared.change_rows(lambda fields: fields.update(exact_share=0.5))


def swap_seals(shared: Shared) -> None:
    seals = [json.loads(unframed(path.read_bytes())[1])["seal"] for path in shared.paths(".row")]
    shared.change_rows(lambda fields: fields.update(seal=seals[seals.index(fields["seal"]) - 1]))


def strip_signatures(shared: Shared) -> None:
    for path in shared.paths(".row"):
        created, text, _ = unframed(path.read_bytes())
        path.write_bytes(framed(created, text))


def change_payload_only(shared: Shared) -> None:
    rows = {path: path.read_bytes() for path in shared.paths(".row")}
    change_values(shared)
    for path, data in rows.items():
        path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [change_values, change_share, swap_seals, strip_signatures, change_payload_only],
    ids=lambda c: c.__name__,
)
def test_nothing_that_was_changed_is_believed_with_a_key(
    change: Callable[[Shared], None], shared: Shared
) -> None:
    captured = ask(shared.engine(key=KEY))
    change(shared)
    victim = shared.engine(key=KEY)
    answer = ask(victim, config=ReuseConfig(capture=False, method=ReuseMethod(loading="layerwise")))
    assert (answer.text, outcomes(answer)) == (captured.text, ["computed"] * 2)
    assert all("signed" in chunk.reason for chunk in answer.stats.chunks)
    assert victim.store.stats().variants == 0  # nothing of it is kept


def test_a_seal_holds_every_slice_in_its_place() -> None:
    signer = Signer([KEY.encode()])
    data = random.Random(0).randbytes(2 * SLICE_BYTES + 1000)
    parts = (
        memoryview(data)[:100],
        memoryview(data)[100 : SLICE_BYTES + 5],
        memoryview(data)[SLICE_BYTES + 5 :],
    )
    seal = signer.seal(parts)
    assert seal == signer.seal([memoryview(data)])
    slices = [data[start : start + SLICE_BYTES] for start in range(0, len(data), SLICE_BYTES)]
    assert [signer.confirms(seal, number, one) for number, one in enumerate(slices)] == [True] * 3
    assert not signer.confirms(seal, 1, slices[0])
    assert not signer.confirms(seal, 3, b"")
    assert not signer.confirms(seal, 2, slices[2][:-1])
    assert not Signer([OTHER_KEY.encode()]).confirms(seal, 0, slices[0])


def test_a_key_is_changed_one_engine_at_a_time(shared: Shared, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{OTHER_KEY}\n{KEY}\n")
    ask(shared.engine(key=KEY))
    served = ask(shared.engine(key_file=keys))  # signs with the new one, believes both
    assert outcomes(served) == ["exact"] * 2


def test_keys_come_from_the_setting_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"\n {KEY} \n{OTHER_KEY}\n")
    for name in ("CACHECRAFT_REMOTE_KEY", "CACHECRAFT_REMOTE_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert RemoteConfig("memory://").keys() == ()
    assert RemoteConfig("memory://", key=KEY).keys() == (KEY.encode(),)
    assert RemoteConfig("memory://", key_file=keys).keys() == (KEY.encode(), OTHER_KEY.encode())
    keys.write_bytes(b"\xef\xbb\xbf" + keys.read_bytes())  # as editors on Windows begin a file
    assert RemoteConfig("memory://", key_file=keys).keys() == (KEY.encode(), OTHER_KEY.encode())
    monkeypatch.setenv("CACHECRAFT_REMOTE_KEY_FILE", str(keys))
    assert RemoteConfig("memory://").keys() == (KEY.encode(), OTHER_KEY.encode())
    monkeypatch.setenv("CACHECRAFT_REMOTE_KEY", OTHER_KEY)
    assert RemoteConfig("memory://").keys() == (OTHER_KEY.encode(),)
    assert KEY not in repr(RemoteConfig("memory://", key=KEY)) + repr(
        StoreConfig(remote=RemoteConfig("memory://", key=KEY))
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"key": "hunter2"}, "at least 16 characters"),
        ({"key_file": "nowhere"}, "cannot be read"),
        ({"key_file": os.devnull}, "holds no key"),
        ({"key_file": "/dev/zero"}, "too long"),
        ({"key": ""}, "the remote's key is empty"),
        ({"key_file": ""}, "key_file must be a path"),
        ({"key": " " * 20}, "at least 16 characters"),
        ({"key": "hunter2" + "\0" * 20}, "that can be printed"),
    ],
)
def test_a_key_that_cannot_be_used_is_named_but_not_shown(
    setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        RemoteTier(RemoteConfig("memory://", **setting))
    assert "hunter2" not in chain(refused.value)


def test_a_key_file_that_is_too_long_in_bytes_is_not_cut_off(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text((f"ä{KEY}\n" * 5_000)[:65_000], encoding="utf-8")
    assert len(keys.read_text(encoding="utf-8")) <= 65_536 < keys.stat().st_size
    with pytest.raises(ConfigError, match="too long"):
        RemoteConfig("memory://", key_file=keys).keys()


@pytest.mark.parametrize("name", ["CACHECRAFT_REMOTE_KEY", "CACHECRAFT_REMOTE_KEY_FILE"])
def test_an_empty_variable_does_not_mean_unsigned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match="unset its variable"):
        RemoteTier(RemoteConfig("memory://"))
    assert RemoteConfig("memory://", key=KEY).keys() == (KEY.encode(),)


def test_an_empty_key_file_variable_beside_a_key_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CACHECRAFT_REMOTE_KEY", KEY)
    monkeypatch.setenv("CACHECRAFT_REMOTE_KEY_FILE", "")
    assert RemoteConfig("memory://").keys() == (KEY.encode(),)


# -- secrets in URLs --------------------------------------------------------------------------------------------------

SECRET = "hunter2SECRET"
AROUND = st.text(alphabet="ab'\" \t\n\\/@:?#%&=[]()<>{}|^`~!$*,;é\u2603", max_size=3)


@st.composite
def urls(draw: st.DrawFn) -> str:
    """URLs, and typos of them, that hold the secret where a password may stand."""
    secret = draw(AROUND) + SECRET + draw(AROUND)
    scheme = draw(
        st.sampled_from(
            [
                "redis",
                "rediss",
                "unix",
                "s3",
                "gs",
                "az",
                "file",
                "memory",
                "http",
                "rdis",
                "",
                "Redis",
            ]
        )
    )
    slashes = draw(st.sampled_from(["://", ":/", ":", "//", ":///", "", "::/"]))
    host = draw(
        st.sampled_from(
            ["host", "127.0.0.1:1", "localhost:99999999", "[::1]", "ho st", "bucket/path", ""]
        )
    )
    shape = draw(st.sampled_from(["user", "password", "query", "fragment", "port"]))
    return {
        "user": f"{scheme}{slashes}{secret}@{host}",
        "password": f"{scheme}{slashes}me:{secret}@{host}/0",
        "query": f"{scheme}{slashes}{host}/0?password={secret}",
        "fragment": f"{scheme}{slashes}{host}/0#{secret}",
        "port": f"{scheme}{slashes}{host}:{secret}",
    }[shape]


def chain(error: BaseException | None) -> str:
    """All text of an exception and of its causes."""
    shown_text = []
    while error is not None:
        shown_text += [str(error), repr(error), repr(error.__dict__)]
        error = error.__cause__ or error.__context__
    return "".join(shown_text)


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(urls())
def test_no_secret_of_a_url_is_shown_anywhere(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, url: str
) -> None:
    caplog.set_level(logging.DEBUG)
    quick = RemoteTuning(
        lookup_timeout_s=0.05, connect_timeout_s=0.05, close_timeout_s=0.05, failures=1
    )
    shown_text = shown_url(url)
    try:
        config = RemoteConfig(url, tuning=quick)
        shown_text += repr(config) + config.shown + repr(StoreConfig(remote=config))
        # those would be made, or looked for, far away
        if not url.startswith(("file", "s3", "gs", "az")):
            with RemoteTier(config) as tier:
                tier.find("ns", "model", ["chunk"])
                shown_text += repr(tier.stats()) + repr(tier)
    except CacheCraftError as error:
        shown_text += chain(error)
    with suppress(CacheCraftError):
        shown_text += hidden(f"oh no: {url!r}, {json.dumps(url)}, {SECRET}: refused", url)
    shown = capfd.readouterr()
    assert SECRET not in shown_text + caplog.text + shown.out + shown.err
    caplog.clear()


def test_a_password_that_begins_with_an_at_sign_is_not_shown_as_the_host() -> None:
    assert shown_url("redis://host:@secret") == "redis:***"
    assert shown_url("s3://me:@secret/path") == "s3:***"


def test_typos_of_every_kind_are_refused_without_the_password() -> None:
    for url in (
        "redis:/:secret@host",
        "redis//:secret@host",
        "redis://:sec'ret secret@host:x",
        "redis:secret@host",
    ):
        with pytest.raises(ConfigError) as refused:
            RemoteTier(RemoteConfig(url))
        assert "secret" not in chain(refused.value)


def test_a_row_read_back_is_the_row_that_was_signed() -> None:
    signer = Signer([KEY.encode(), OTHER_KEY.encode()])
    raw = framed(b"0" * 16, b"{}")
    signed = signer.sign(raw)
    assert signer.is_signed(signed)
    assert not Signer([OTHER_KEY.encode()]).is_signed(signed)
    assert not signer.is_signed(raw)
    with pytest.raises(ValueError, match="checksum"):
        signer.is_signed(signed[:-1] + b"x")
    with pytest.raises(ValueError, match="row damaged"):
        decode_row(signed, namespace="ns", fingerprint="model", chunk_id="chunk")
