"""A model whose reuse is not exact is refused when the server starts, and a check that compared nothing is none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import pytest

from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.types.prompts import Prompt
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.self_check import Predicted, check_prompt, self_check

PLAIN = {5: -0.5, 9: -1.5}
BLOCK = 128


@pytest.fixture
def prompt() -> Prompt:
    made = check_prompt(100, block_size=BLOCK, context_length=2048)
    assert made is not None
    return made


Check = Callable[..., bool]


@pytest.fixture
def check(prompt: Prompt) -> Check:
    """The self-check of a server that predicts this."""

    def checked(
        computed: Mapping[int, float] = PLAIN,
        reused: Mapping[int, float] = PLAIN,
        *,
        dtype: str = "float32",
        cache_dtype: str = "",
        computed_refused: str = "",
        reused_refused: str = "",
        lost: int = 0,
        kept: bool = True,
        is_second: bool = False,
    ) -> bool:
        def predict(ask: Ask | list[int]) -> Predicted:
            if isinstance(ask, list):
                return Predicted(PLAIN)
            if not ask.config.reuse:
                return Predicted(computed, refused=computed_refused)
            return Predicted(
                reused, 0 if reused_refused else prompt.bounds[-2] - lost, reused_refused
            )

        return self_check(
            "a model",
            prompt,
            predict,
            kept=lambda: kept,
            dtype=dtype,
            cache_dtype=cache_dtype,
            is_second=is_second,
        )

    return checked


def test_equal_predictions_pass(check: Check) -> None:
    assert check({token: logprob + 5e-4 for token, logprob in PLAIN.items()} | {7: -3.0})


@pytest.mark.parametrize(
    "wrong",
    [{5: -0.5, 9: -1.4}, {5: -0.5}, {}, {5: -0.5, 9: float("nan")}, {5: float("nan"), 9: -1.5}],
)
def test_what_differs_is_refused(wrong: Mapping[int, float], check: Check) -> None:
    with pytest.raises(UnsupportedModelError, match="computed by our passes differ"):
        check(wrong)
    with pytest.raises(UnsupportedModelError, match="reused from chunk-caches differ"):
        check(reused=wrong)


def test_half_precision_has_room_for_rounding(check: Check) -> None:
    rounded = {5: -0.4, 9: -1.6}
    assert check(rounded, rounded, dtype="bfloat16")
    with pytest.raises(UnsupportedModelError):
        check(rounded, rounded, dtype="float16")


def test_caches_in_fp8_have_room_for_rounding_and_reuse_must_be_close_to_our_passes(
    check: Check,
) -> None:
    rounded = {5: -0.2, 9: -1.8}
    assert check(rounded, rounded, cache_dtype="fp8_e4m3")
    assert check({5: -0.2, 8: -1.9}, rounded, cache_dtype="fp8_e4m3"), "9 may be the third"
    with pytest.raises(UnsupportedModelError, match="computed by our passes differ"):
        check({5: -0.5, 9: -2.2}, rounded, cache_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedModelError, match="computed by our passes differ"):
        check({5: -0.5, 8: -2.2}, rounded, cache_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedModelError, match="reused from chunk-caches differ"):
        check(rounded, PLAIN, cache_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("wrong", "cache_dtype", "says"),
    [
        ({5: -0.9, 9: -1.5}, "", "reused from chunk-caches differ from vLLM's own by up to 0.4;"),
        ({5: -0.9, 9: -1.5}, "fp8_e4m3", "differ from those computed by our passes by up to 0.4;"),
        ({5: -0.5}, "", "differ from vLLM's own: a token that is likely there is not among the"),
        ({}, "fp8_e4m3", "computed by our passes: a token that is likely there is not among the"),
        ({5: float("nan")}, "fp8_e4m3", "computed by our passes: some are not a number;"),
    ],
)
def test_the_reason_names_what_was_compared_and_gives_no_infinite_number(
    wrong: Mapping[int, float], cache_dtype: str, says: str, check: Check
) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        check(reused=wrong, cache_dtype=cache_dtype)
    assert says in str(refused.value)
    assert "inf" not in str(refused.value)
    assert "nan" not in str(refused.value)


def test_predictions_of_nan_are_refused_whatever_their_tokens(check: Check) -> None:
    nan = {7: float("nan"), 8: float("nan")}
    with pytest.raises(UnsupportedModelError, match="computed by our passes differ"):
        check(nan, cache_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedModelError, match="reused from chunk-caches differ"):
        check(reused=nan, cache_dtype="fp8_e4m3")


def test_a_check_that_compares_nothing_ends_with_the_reason(check: Check) -> None:
    """All predictions are equal in these: vLLM has computed them."""
    with pytest.raises(
        UnsupportedModelError, match="nothing was computed by our passes: not today"
    ):
        check(computed_refused="not today")
    with pytest.raises(
        UnsupportedModelError, match="nothing was reused from chunk-caches: nothing of it is stored"
    ):
        check(reused_refused="nothing of it is stored")
    with pytest.raises(UnsupportedModelError, match="257 of 258 tokens came from chunk-caches"):
        check(lost=1)


def test_a_store_that_keeps_nothing_is_no_reason_to_end(
    check: Check, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not check(reused_refused="nothing of it is stored", kept=False)
    assert "Reuse is unchecked" in caplog.text
    with pytest.raises(UnsupportedModelError, match="computed by our passes differ"):
        check({}, kept=False)


@pytest.mark.parametrize(
    ("block", "context", "length"),
    [(16, 2048, 24), (128, 2048, 129), (128, 388, 129), (128, 300, 99), (16, 25, 8)],
)
def test_segments_are_longer_than_a_block_where_they_fit(
    block: int, context: int, length: int
) -> None:
    made = check_prompt(100, block_size=block, context_length=context)
    assert made is not None
    assert [len(segment.token_ids) for segment in made.segments] == [length] * 3
    assert made.bounds[-1] < context  # one token is answered


@pytest.mark.parametrize("window", [128, 512, 1023, 4096])
def test_a_prompt_with_windows_has_rows_of_every_segment_but_the_first_beyond_them(
    window: int,
) -> None:
    made = check_prompt(100, block_size=16, context_length=8192, window=window)
    assert made is not None
    _, _, question, end = made.bounds
    assert question > window, "the chunk's last rows do not see the first tokens"
    assert end - window < question, "the question sees a part of the chunk"
    assert end < 8192


@pytest.mark.parametrize(("window", "context"), [(512, 840), (6000, 1 << 20)])
def test_windows_that_no_prompt_of_the_check_can_cross_have_none(window: int, context: int) -> None:
    assert check_prompt(100, block_size=16, context_length=context, window=window) is None
    assert check_prompt(100, block_size=16, context_length=context) is not None


def test_a_second_prompt_may_be_too_long_for_chunk_caches(
    check: Check, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not check(computed_refused="it is too long", is_second=True)
    assert "387 tokens is unchecked" in caplog.text
    assert "it is too long" in caplog.text
    with pytest.raises(UnsupportedModelError, match="computed by our passes differ"):
        check({}, is_second=True)


def test_each_start_has_names_of_its_own() -> None:
    first, second = (check_prompt(100, block_size=16, context_length=2048) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.token_ids == second.token_ids
    assert {one.segment_id for one in first.segments}.isdisjoint(
        one.segment_id for one in second.segments
    )
    assert check_prompt(100, block_size=16, context_length=24) is None
