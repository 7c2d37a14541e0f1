"""Audits over vLLM: chosen answers are computed again without reuse, by requests that run while the server is idle.

While an answer is decoded, vLLM reports the likeliest tokens at each place. The audit's request has the same prompt,
followed by the answer. The workers compute the prompt exactly, in slices between other requests; vLLM computes
the tokens of the answer, and so says what full prefill predicts in the place of each. Results are those of
`serving.audits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.serving.audits.audit import Audit
from cachecraft_rag.serving.audits.audit_work import AuditWork, WaitingAudit
from cachecraft_rag.serving.audits.predictions import LikeliestTokens, compare_likeliest
from cachecraft_rag.serving.audits.results import AuditResults, audit_of
from cachecraft_rag.serving.request import Request, RequestProgress
from cachecraft_rag.store.serial_worker import SerialWorker
from cachecraft_rag.vllm.calls import TokenLogprob
from cachecraft_rag.vllm.idle.threads import ThreadRunner
from cachecraft_rag.vllm.options import VLLMConfig

# Likeliest tokens whose probabilities are compared at each place; vLLM allows 20 by default.
KEPT = 16
# Tokens of an answer that are audited. vLLM computes them in one step and holds `[tokens, vocabulary]` numbers. Its own
# reserve of memory is for that many requests.
MOST_TOKENS = 256
# Longest wait for new variants before an audit. They make it cheaper.
_WAIT_FOR_VARIANTS_S = 30.0


def check_server(config: VLLMConfig) -> None:
    """Raise ConfigError if this server does not report what audits need: the model's own 16 likeliest tokens.

    That takes `logprobs_mode` "raw_logprobs", and a `max_logprobs` of at least 16, or negative for no limit.
    """
    model = config.model_config
    if model.logprobs_mode != "raw_logprobs":
        raise ConfigError(
            f"audit needs the model's own log-probabilities, and --logprobs-mode is {model.logprobs_mode}: leave that "
            "option out, or leave audit out"
        )
    if 0 <= model.max_logprobs < KEPT:
        raise ConfigError(
            f"audit needs the {KEPT} likeliest tokens, and --max-logprobs is {model.max_logprobs}: set it to {KEPT} or "
            "more, or leave audit out"
        )


def likeliest_of(logprobs: Mapping[int, TokenLogprob]) -> LikeliestTokens:
    """Return the likeliest token, of equals the smallest id as in greedy sampling, and all `logprobs`, at least one."""
    log_shares = {token: entry.logprob for token, entry in logprobs.items()}
    likeliest = min(log_shares, key=lambda token: (-log_shares[token], token))
    return LikeliestTokens(likeliest, log_shares)


@dataclass(eq=False)
class PredictedAnswer:
    """Tokens of an answer and what reuse predicted at the place of each, noted while it is decoded.

    tokens  the tokens, with the one that ended the answer; at most `MOST_TOKENS`
    places  the prediction at the place of each token
    """

    tokens: list[int] = field(default_factory=list)
    places: list[LikeliestTokens] = field(default_factory=list)

    def note(self, tokens: Sequence[int], logprobs: Sequence[Mapping[int, TokenLogprob]]) -> None:
        """Note new tokens, and the log-probabilities in the place of each, of which none may be empty.

        Tokens beyond the first 256 of an answer are left out, and so are the last tokens if `logprobs` has fewer
        entries.
        """
        for token, entries in zip(tokens, logprobs, strict=False):
            if len(self.tokens) == MOST_TOKENS:
                return
            self.tokens.append(token)
            self.places.append(likeliest_of(entries))


Waiting = WaitingAudit[PredictedAnswer]


@dataclass(frozen=True)
class FullPrediction:
    """Predictions of full prefill along an answer.

    places    one for each token of the answer
    computed  tokens that were computed
    """

    places: Sequence[LikeliestTokens]
    computed: int


class IdleAudits(AuditWork[PredictedAnswer]):
    """Audits answers in a thread, by requests to vLLM. Any thread may call any method.

    Args:
        predict: computes an answer again without reuse; returns None if it gave way to other requests.
        wait_for_variants: waits until new variants are captured, for so many seconds at most.
        layers: layers of the model.
    """

    def __init__(
        self,
        results: AuditResults,
        predict: Callable[[Request, Sequence[int]], FullPrediction | None],
        *,
        wait_for_variants: Callable[[float], object],
        layers: int,
    ) -> None:
        runner = ThreadRunner("cachecraft-audits", self._audit)
        super().__init__(runner, results, layers=layers, predictions=PredictedAnswer)
        self._predict = predict
        self._wait_for_variants = wait_for_variants
        self._writer = SerialWorker("cachecraft-audit-log")

    def ended(
        self,
        request: Request,
        progress: RequestProgress,
        predicted: PredictedAnswer | None,
        *,
        tokens: int | None = None,
    ) -> None:
        """Have the first `tokens` of an answer (None: all of `predicted`) audited by `answered`; returns at once.

        Does nothing without `predicted`, and if the report names no segments: vLLM computed the whole prompt itself.
        """
        # Without a report of its segments vLLM has computed the prompt itself: there is no reuse to audit.
        if predicted is not None and progress.reports:
            self.answered(request, progress, predicted, tokens=predicted.tokens[:tokens])

    def close(self) -> None:
        """Drop and count all audits; wait for results that are being written, but not for audits under way."""
        super().close()
        self._writer.shut_down()
        self.results.close()

    def _write(
        self, audit: Audit, namespace: str, ended: Callable[[BaseException | None], None]
    ) -> None:
        # another thread, since the caller may be the event loop of a server
        self._writer.submit(
            partial(self.results.write, audit, namespace),
            ended=lambda future: ended(future.exception()),
        )

    def _audit(self, waiting: Waiting) -> Audit | None:
        self._wait_for_variants(_WAIT_FOR_VARIANTS_S)
        full = self._predict(waiting.request, waiting.tokens)
        return None if full is None else _compared(waiting, full)


def _compared(waiting: Waiting, full: FullPrediction) -> Audit:
    places = [
        compare_likeliest(reuse, other)
        for reuse, other in zip(
            waiting.predicted.places[: len(waiting.tokens)], full.places, strict=True
        )
    ]
    return audit_of(
        waiting.request.request_id,
        waiting.facts,
        places,
        tokens=len(waiting.tokens),
        computed=full.computed,
    )
