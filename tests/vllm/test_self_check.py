"""A model whose reuse is not exact is refused when the server starts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.self_check import self_check

PLAIN = {5: -0.5, 9: -1.5}


def checked(*, computed: Mapping[int, float], reused: Mapping[int, float], dtype: str = "float32") -> list[str]:
    def predict(ask: Ask | list[int]) -> Mapping[int, float]:
        if isinstance(ask, list):
            return PLAIN
        return reused if ask.config.reuse else computed

    return self_check("a model", predict, vocabulary=100, dtype=dtype)


def test_equal_predictions_pass() -> None:
    close = {token: logprob + 5e-4 for token, logprob in PLAIN.items()} | {7: -3.0}
    assert len(checked(computed=close, reused=PLAIN)) == 2


@pytest.mark.parametrize(
    "wrong", [{5: -0.5, 9: -1.4}, {5: -0.5}, {}, {5: -0.5, 9: float("nan")}, {5: float("nan"), 9: -1.5}]
)
def test_what_differs_is_refused(wrong: Mapping[int, float]) -> None:
    with pytest.raises(UnsupportedModelError, match="computed by our passes differ"):
        checked(computed=wrong, reused=PLAIN)
    with pytest.raises(UnsupportedModelError, match="reused from chunk-caches differ"):
        checked(computed=PLAIN, reused=wrong)


def test_half_precision_has_room_for_rounding() -> None:
    rounded = {5: -0.4, 9: -1.6}
    assert checked(computed=rounded, reused=rounded, dtype="bfloat16")
    with pytest.raises(UnsupportedModelError):
        checked(computed=rounded, reused=rounded, dtype="float16")
