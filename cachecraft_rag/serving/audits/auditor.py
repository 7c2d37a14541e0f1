"""Audits in idle time: full prefill of a prompt that was answered, and one pass over the answer's tokens.

The prompt is computed exactly. What is stored after the very same prefix is taken from the store, because it is equal
to the bit; everything else is computed. New variants are captured first: they are those chunk-caches. The prediction
with reuse is noted while the answer is decoded, so reuse is not computed a second time. Answers to the same prompt that
wait one after another share its full prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import Call, Until, Work
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.resolve import resolve
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.candidates import Owner
from cachecraft_rag.serving.answer_text import AnswerText
from cachecraft_rag.serving.audits.audit import Audit, AuditText
from cachecraft_rag.serving.audits.audit_work import AuditWork, WaitingAudit
from cachecraft_rag.serving.audits.predictions import ComparedPlace, Predictions, compare
from cachecraft_rag.serving.audits.results import AuditResults, audit_of
from cachecraft_rag.serving.idle.loop_runner import LoopRunner
from cachecraft_rag.serving.loop.step_loop import StepLoop
from cachecraft_rag.serving.loop.task import LoopTask, Priority
from cachecraft_rag.serving.new_variants import EXACT, LookUp, exact_only
from cachecraft_rag.serving.request import Request
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.types.prompts import Prompt

_AT_ONCE = 8  # answer tokens in one step: less work than one layer of a prompt
_EXACT_WITHOUT_CAPTURE = replace(EXACT, capture=False)

Waiting = WaitingAudit[Predictions]


@dataclass(eq=False)
class FullPrefill:
    """The prompt of an audit, computed exactly.

    owner     tenant and session of its request, see `Request.owner`
    prompt    the prompt
    logits    `[vocabulary]` of its last token
    buffer    its keys and values, with room for the answer
    room      most tokens of an answer that fit
    computed  tokens that were computed
    """

    owner: Owner
    prompt: Prompt
    logits: Tensor
    buffer: KVBuffer
    room: int
    computed: int


class Auditor(AuditWork[Predictions]):
    """Audits answers by the engine in this process. For the loop's thread; `results` is for any thread.

    Args:
        decoder, store, loader: of the engine.
        look_up: looks up what is stored.
        loop: runs the audits while it is idle.
        captures_pending: returns True while captures or new variants are still to be stored; audits wait for them.
        results: takes the results.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: ChunkCacheStore,
        loader: Loader,
        look_up: LookUp,
        loop: StepLoop,
        *,
        captures_pending: Callable[[], bool],
        results: AuditResults,
    ) -> None:
        layers = decoder.layout.layers
        runner = LoopRunner(loop, self._audit)
        super().__init__(runner, results, layers=layers, predictions=Predictions)
        self.captures_pending = captures_pending
        self._decoder = decoder
        self._store = store
        self._loader = loader
        self._look_up = look_up
        self._loop = loop
        # of the audit before, if the next one has the same prompt
        self._shared: FullPrefill | None = None

    def forget(self, chunk_ids: Collection[str], namespace: str | None = None) -> None:
        """Drop audits of prompts with these chunks of a tenant (None: all), as `IdleWork.forget`; results stay."""
        self._shared = None
        super().forget(chunk_ids, namespace)

    def close(self) -> None:
        """Drop all audits; `busy` is False once the one under way has ended and results are written. Does not wait."""
        self._shared = None
        super().close()

    def _write(
        self, audit: Audit, namespace: str, ended: Callable[[BaseException | None], None]
    ) -> None:
        def steps() -> Work[None]:
            yield self._loop.aside(self.results.write, audit, namespace)

        self._loop.start(
            LoopTask(lambda _: steps(), lambda _none, error: ended(error), Priority.JOB)
        )

    # -- one audit ----------------------------------------------------------------------------------------------------

    def _audit(self, waiting: Waiting) -> Work[Audit]:
        """Compare an answer with full prefill."""
        # their chunk-caches make the audit cheaper
        yield Until(lambda: not self.captures_pending())
        full = self._shared
        self._shared = None
        if full is None or not _fits(waiting, full):
            full = yield from self._full_prefill(waiting)

        places = yield from self._compare(waiting, full)
        full.computed += len(waiting.tokens) - 1
        text = None
        if self.config.keep_text:
            text = yield from self._text(waiting, full, places)
        if self._waiting and _fits(self._waiting[0], full):
            # The answer's keys and values in the buffer are written over.
            self._shared = replace(full, computed=0)
        return audit_of(
            waiting.request.request_id,
            waiting.facts,
            places,
            tokens=len(waiting.tokens),
            computed=full.computed,
            text=text,
        )

    def _full_prefill(self, waiting: Waiting) -> Work[FullPrefill]:
        yield Call(lambda: None)  # puts the look-up off until the loop is idle
        request = waiting.request
        most_tokens = _most_tokens(waiting)
        job, loads = yield self._loop.aside(self._plan, request, most_tokens)
        try:
            # waits for turns would distort the engine's speed
            speed = ComputeSpeed(self._decoder.keys_per_row)
            result: PrefillResult = yield from OverlappedPrefill(
                self._decoder, job, loads, speed
            ).steps()
        finally:
            self._loader.end(loads)
        logits = self._decoder.next_logits(result.hidden)
        computed = result.row_layers // self._decoder.layout.layers
        return FullPrefill(
            request.owner, request.prompt, logits, result.buffer, most_tokens, computed
        )

    def _plan(self, request: Request, answer_tokens: int) -> tuple[PrefillJob, PendingLoads]:
        """Plan an exact prefill, and begin to load what is stored after the same prefix."""
        segments = [segment for segment in request.prompt.segments if segment.kind != "question"]
        lookup = self._look_up(segments, session=request.session, namespace=request.namespace)
        offered = exact_only(lookup)
        job = resolve(
            Prompt(request.prompt.segments),
            offered,
            _EXACT_WITHOUT_CAPTURE,
            store=self._store,
            ranks=self._decoder.ranks,
            answer_tokens=answer_tokens,
        )
        return job, self._loader.begin(job.to_load)

    def _compare(self, waiting: Waiting, full: FullPrefill) -> Work[list[ComparedPlace]]:
        """Compute the answer's tokens after the prompt, and compare the predictions at each place."""
        places = compare(waiting.predicted, full.logits[None], begin=0)
        position = waiting.request.prompt.bounds[-1]
        inputs = waiting.tokens[:-1]
        for begin in range(0, len(inputs), _AT_ONCE):
            piece = inputs[begin : begin + _AT_ONCE]

            def computed(piece: Sequence[int] = piece, begin: int = begin) -> list[ComparedPlace]:
                hidden = extend(self._decoder, full.buffer, piece, position + begin)
                return compare(waiting.predicted, self._decoder.logits(hidden), begin=begin + 1)

            places += yield Call(computed)
        return places

    def _text(
        self, waiting: Waiting, full: FullPrefill, places: Sequence[ComparedPlace]
    ) -> Work[AuditText]:
        """Return the text of an answer, and full prefill's text from the first difference on."""
        first = next((number for number, place in enumerate(places) if place.differs), None)
        if first is None:
            return self._exact_text(waiting)

        position = waiting.request.prompt.bounds[-1]
        answer = self._answer_text(waiting)
        text = "".join(answer.take(token) for token in waiting.tokens[:first])
        token = places[first].likeliest
        count = first
        while True:
            text += answer.take(token)
            count += 1
            if answer.finish is not None:
                break
            token = yield Call(partial(self._next_token, full.buffer, token, position + count - 1))
            full.computed += 1
        given = self._given_text(waiting)
        same = _common_beginning(given, text)
        return AuditText(
            self._question(waiting), same, given.removeprefix(same), text.removeprefix(same)
        )

    def _exact_text(self, waiting: Waiting) -> AuditText:
        """Return the text of an answer without a difference."""
        return AuditText(self._question(waiting), same=self._given_text(waiting), reuse="", full="")

    def _given_text(self, waiting: Waiting) -> str:
        """Return the text of the audited tokens, as the reader got it."""
        answer = self._answer_text(waiting)
        text = "".join(answer.take(token) for token in waiting.tokens)
        return text if answer.finish is not None else text + answer.rest()

    def _answer_text(self, waiting: Waiting) -> AnswerText:
        return AnswerText(
            waiting.request.sampling, self._decoder.tokenizer, self._decoder.end_tokens
        )

    def _question(self, waiting: Waiting) -> str:
        """Return the text of the prompt after its chunks, without the template's last tokens."""
        segment = waiting.request.prompt.segments[-1]
        tokens = segment.token_ids[: len(segment.token_ids) - segment.closing]
        decode = self._decoder.tokenizer.decode
        return str(
            decode(tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _next_token(self, buffer: KVBuffer, token: int, position: int) -> int:
        """Compute one token, and return the likeliest next one."""
        hidden = extend(self._decoder, buffer, [token], position)
        return int(self._decoder.logits(hidden)[0].argmax())


def _common_beginning(text: str, other_text: str) -> str:
    """Return the longest beginning that two texts share.

    >>> _common_beginning("It lasts 3 years.", "It lasts 30 days.")
    'It lasts 3'
    """
    places = (
        place
        for place, letters in enumerate(zip(text, other_text, strict=False))
        if letters[0] != letters[1]
    )
    return text[: next(places, min(len(text), len(other_text)))]


def _fits(waiting: Waiting, full: FullPrefill) -> bool:
    """Return True if this is the full prefill of an answer's prompt, with enough room for the answer.

    The owner must be the same, too: an audit's `computed_tokens` would say that another one asked the same.
    """
    request = waiting.request
    is_same = _digests(request.prompt) == _digests(full.prompt)
    return request.owner == full.owner and is_same and _most_tokens(waiting) <= full.room


def _most_tokens(waiting: Waiting) -> int:
    return max(len(waiting.tokens), waiting.request.sampling.max_new_tokens)


def _digests(prompt: Prompt) -> list[str]:
    return [segment.tokens_digest for segment in prompt.segments]
