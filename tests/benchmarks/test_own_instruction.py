"""Pairs of requests to a server with chunk-caches and to vLLM alone, over stand-ins for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.own_instruction import ORDERS, SETTINGS, measured, summary


class StandIn:
    """A server that notes what it is asked and when."""

    def __init__(self, name: str, log: list[tuple[str, dict[str, Any]]], seconds: float) -> None:
        self._name = name
        self._log = log
        self._seconds = seconds

    def ask(self, body: Mapping[str, object]) -> tuple[float, float, dict[str, Any]]:
        self._log.append((self._name, dict(body)))
        chunks = [
            {"tokens": 100, "computed": 0, "recomputed": 20},
            {"tokens": 100, "computed": 10, "recomputed": 0},
        ]
        details = {"stats": {"chunks": chunks}, "note": None}
        return self._seconds, 128.0, {"kv_transfer_params": {"cachecraft": details}}


def test_both_servers_get_the_same_texts_in_turn() -> None:
    log: list[tuple[str, dict[str, Any]]] = []
    ours, plain = StandIn("ours", log, 1.0), StandIn("plain", log, 2.0)
    found = measured(ours, plain, pairs=4, sentences=3)  # type: ignore[arg-type]

    assert found.keys() == SETTINGS.keys()
    assert [len(pairs) for orders in found.values() for pairs in orders] == [4] * 8
    assert len(log) == 2 * 5 * len(SETTINGS) * len(ORDERS), "with a first round to warm up"
    is_first = [name == "ours" for name, _ in log[::2]]
    assert sum(is_first) == len(is_first) / 2
    for place in range(0, len(log), 2):
        asked = dict(log[place : place + 2])
        texts = [document["text"] for document in asked["ours"]["documents"]]
        question = asked["ours"]["messages"][1]["content"]
        system, user = asked["plain"]["messages"]
        assert system == asked["ours"]["messages"][0]
        assert user["content"] == "\n\n".join([*reversed(texts), question])
    settings = [body.get("cachecraft", {}) for name, body in log if name == "ours"]
    assert settings[:8] == [{}] * 5 + [SETTINGS["recompute_ratio=0.15"]] * 3

    figures = summary(found["default"][1])
    assert figures["ratio"] == pytest.approx({"median": 0.5, "low": 0.5, "high": 0.5})
    assert figures["reused_share"] == pytest.approx(0.85)
    assert figures["notes"] == []


def test_what_was_measured_before_a_stop_is_kept() -> None:
    class Stopped(StandIn):
        def ask(self, body: Mapping[str, object]) -> tuple[float, float, dict[str, Any]]:
            if len(self._log) >= 2 * len(SETTINGS) * len(ORDERS) + 4:  # two pairs after the warm-up
                raise KeyboardInterrupt
            return super().ask(body)

    log: list[tuple[str, dict[str, Any]]] = []
    ours, plain = Stopped("ours", log, 1.0), Stopped("plain", log, 2.0)
    found = measured(ours, plain, pairs=4, sentences=3)  # type: ignore[arg-type]
    assert [len(pairs) for orders in found.values() for pairs in orders] == [1, 1] + [0] * 6
