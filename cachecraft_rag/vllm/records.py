"""Statistics of the latest requests whose prompts have segments, by request id."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol, cast

from cachecraft_rag.observability.stats import Finish, RequestStats
from cachecraft_rag.observability.tracing import ServedTrace, TracedRequest, is_tracing
from cachecraft_rag.planning.candidates import Owner
from cachecraft_rag.planning.planner import SegmentOutcome
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.server.remembered import Remembered
from cachecraft_rag.serving.request import (
    Request,
    RequestProgress,
    SegmentReport,
    stats_of,
    unchanged_tokens,
)
from cachecraft_rag.types.prompts import Prompt
from cachecraft_rag.vllm.calls import EngineClient, RequestOutput
from cachecraft_rag.vllm.idle.audits import KEPT, PredictedAnswer
from cachecraft_rag.vllm.messages import FIELD, FillReport


class RequestParams(Protocol):
    """`vllm.SamplingParams` or `vllm.PoolingParams` of a request; `n` is missing in the latter."""

    logprobs: int | None
    prompt_logprobs: int | None
    max_tokens: int | None
    temperature: float
    top_p: float
    structured_outputs: object
    extra_args: dict[str, object] | None


_FINISH: Mapping[str, Finish] = {"stop": "end", "length": "length"}


def cached_report(
    prompt: Prompt,
    cached: int,
    layers: int,
    *,
    outcome: SegmentOutcome,
    refused: str = "",
    unused: Mapping[str, str] = MappingProxyType({}),
) -> FillReport:
    """Return a report like `filling.Filling.report` for a prompt served from vLLM's own prefix cache.

    A segment that begins in the prefix cache gets `outcome`, and its tokens beyond the cache count as not loaded. If
    `outcome` is "reused" and `refused` is "", all segments but the question get it. The other segments are "computed".
    An instruction gets "exact" in place of `outcome`. Rows computed are those beyond the cache, times are 0.

    Args:
        cached: number of first tokens that were in the prefix cache.
        layers: number of layers of the model.
        outcome: outcome of each segment that begins there: "exact" if vLLM itself has computed all blocks of the
            prompt in its prefix cache.
        refused: reason why vLLM computed the rest of the prompt without chunk-caches; "" if nothing prevented them.
        unused: segment id → reason why its chunk-cache was not used. Other computed segments count as not stored.
    """
    segments = []
    for segment, start, end in zip(prompt.segments, prompt.bounds, prompt.bounds[1:], strict=False):
        report = SegmentReport("computed", Reason.NOT_STORED)
        if cause := refused or unused.get(segment.segment_id, ""):
            reason = Reason.LEFT_TO_SERVER
            report = replace(report, reason=reason, detail=f"{reason.sentence}: {cause}")
        if segment.kind == "question":
            report = SegmentReport("computed", Reason.QUESTION)
        has_chunks = outcome == "reused" and segment.kind != "question" and not refused
        if cached > start or has_chunks:
            report = SegmentReport(
                "exact" if segment.kind == "system" else outcome,
                Reason.PREFIX_CACHED,
                not_loaded=min(max(0, end - cached), end - start),
            )
        segments.append(report.as_dict())
    return {
        "segments": segments,
        "row_layers": (prompt.bounds[-1] - cached) * layers,
        "planned_s": 0.0,
        "waited_s": 0.0,
        "focus_layer": None,
        "remote": None,
    }


def reused_tokens(prompt: Prompt, report: FillReport, *, counted_from: int = 0) -> int:
    """Return how many reused tokens are unchanged from position `counted_from` on; inside a segment at most."""
    progress = RequestProgress()
    progress.reported(report)
    return unchanged_tokens(prompt, progress.segment_reports(), counted_from=counted_from)


@dataclass
class RequestRecord:
    """Progress of one request in an API server.

    A report that no connector of this version makes raises KeyError, TypeError or ValueError in `note` and `take`.

    name     see `messages.Ask`
    report   report of the connector, see `filling.Filling.report`
    layers   number of layers of the model
    begun    True once it was handed to vLLM
    counted  True once its end was counted
    left_to_vllm  True if vLLM computes it without chunk-caches
    unused   see `cached_report`
    remark   note to the client, sent with the statistics; "" if there is nothing to say
    predicted  the answer's tokens with the predictions, if it is to be audited
    trace    its trace, if vLLM has a tracer provider
    error    name of the exception that ended it, or None
    """

    request: Request
    layers: int
    name: str = ""
    progress: RequestProgress = field(default_factory=RequestProgress)
    report: FillReport = field(default_factory=FillReport)
    begun: bool = False
    counted: bool = False
    left_to_vllm: bool = False
    unused: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    predicted: PredictedAnswer | None = None
    trace: ServedTrace | None = None
    error: str | None = None

    def leave(self, reason: str) -> None:
        """Note that vLLM computes the request without chunk-caches, for a reason that its statistics give; no audit."""
        segments = self.request.prompt.segments[:-1]
        self.left_to_vllm = True
        self.unused = dict.fromkeys([segment.segment_id for segment in segments], reason)
        self.remark = f"left to vLLM: {reason}"
        self.predicted = None

    def begin_trace(
        self, model: str, params: RequestParams, headers: Mapping[str, str] | None
    ) -> Mapping[str, str] | None:
        """Begin the trace of the request and set `trace`; return the headers for vLLM, which name this trace.

        Only while `is_tracing`. `headers` are the client's, and may name a parent trace; they are returned, and a
        failure is logged, if the trace cannot begin.
        """
        traced = TracedRequest(
            self.request.started, model, params.max_tokens or 0, params.temperature, params.top_p
        )
        self.trace = ServedTrace.begin(traced, headers)
        return headers if self.trace is None else self.trace.headers

    def request_predictions(self, params: RequestParams) -> None:
        """Request the log-probabilities that an audit needs, if `predicted` is set: set `params.logprobs` to 16.

        An answer with a grammar is not audited, and neither is one whose client wants log-probabilities itself:
        `predicted` then becomes None.
        """
        if self.predicted is None:
            return
        if params.structured_outputs is not None or params.logprobs is not None:
            self.predicted = None
        else:
            params.logprobs = KEPT

    def note(self, output: RequestOutput) -> None:
        """Note an output of vLLM: new tokens, or all tokens at once if the answer is not streamed.

        Takes the connector's report from the output, if it has one. A request that vLLM computes alone, or that was
        refused while some of its prompt was in vLLM's prefix cache, gets the report `cached_report` instead.

        Also corrects the output for the client. Log-probabilities that only the audit asked for are removed. If the
        prompt is filled from chunk-caches, `num_cached_tokens` becomes the number of reused tokens, or None before a
        report; otherwise it stays.
        """
        progress = self.progress
        if not progress.first_token_s:
            latency = (
                getattr(output.metrics, "first_token_latency", 0.0)
                if output.metrics is not None
                else 0.0
            )
            progress.first_token_s = latency or self.request.clock()
        generated = progress.generated
        for completion in output.outputs:
            generated += len(completion.token_ids)
            if self.predicted is not None:
                self.predicted.note(completion.token_ids, completion.logprobs or ())
                completion.logprobs = None  # the client has not asked for them
            if completion.finish_reason is None:
                continue
            # vLLM says "stop" for an end token, which it counts, and for a stop string, which it names.
            stopped = isinstance(completion.stop_reason, str)
            progress.finish = "stop" if stopped else _FINISH.get(completion.finish_reason, "closed")
            generated -= progress.finish == "end"
        progress.generated = max(progress.generated, generated)
        if self.left_to_vllm:
            cached = output.num_cached_tokens or 0
            self.take(
                self.report
                or cached_report(
                    self.request.prompt,
                    cached,
                    self.layers,
                    outcome="exact",
                    unused=self.unused,
                )
            )
            return
        if output.kv_transfer_params:
            self.take(output.kv_transfer_params.get(FIELD, {}))
        cached = output.num_cached_tokens or 0
        if (refused := self.report.get("refused")) and cached:
            # without reuse vLLM has filled none of these blocks
            outcome: SegmentOutcome = "reused" if self.request.config.reuse else "exact"
            prompt = self.request.prompt
            report = cached_report(prompt, cached, self.layers, outcome=outcome, refused=refused)
            self.take({**report, "refused": refused})
        # vLLM's own number counts all filled tokens, computed or not
        if "refused" not in self.report:
            is_reported = progress.reports is not None
            output.num_cached_tokens = self.stats().tokens_reused if is_reported else None

    def take(self, report: FillReport) -> None:
        """Take a copy of the connector's report, once the prompt is filled and again with the last output."""
        self.report = report.copy()
        self.progress.reported(self.report)

    def end(self) -> None:
        """Note the end of the request, as "closed" unless an output or an error has said otherwise; only once."""
        self.progress.end(self.request, "closed")

    def stats(self) -> RequestStats:
        """Return the statistics of the request so far, as a new object; they are final after `end`."""
        return stats_of(self.request, self.progress, self.layers)

    def as_dict(self) -> dict[str, object]:
        """Return plain values by name, for JSON.

        stats    values of `RequestStats`
        report   the connector's report, or `cached_report` with `left_to_vllm`; None before it, and if it was refused
        refused  reason why the connector left the request to vLLM; None if it did not, or before its report
        note     the remark, which has the reason with `left_to_vllm`, and `refused`; None if there is nothing to say
        """
        refused = self.report.get("refused")
        left = f"left to vLLM: {refused}" if refused else ""
        return {
            "stats": self.stats().as_dict(),
            "report": None if refused is not None or not self.report else self.report,
            "refused": refused,
            "note": "; ".join(filter(None, (self.remark, left))) or None,
        }


class Records:
    """The latest requests of an API server. To be used in its event loop only."""

    def __init__(self, ended: Callable[[RequestRecord], None], *, model: str = "") -> None:
        """Start without requests; `ended` is called once for each that has ended, `model` is named in traces."""
        self.model = model
        self._count_ended = ended
        self._under_way: dict[tuple[Owner, str], RequestRecord] = {}
        self._named: dict[str, RequestRecord] = {}
        self._ended = Remembered()

    def begin(self, name: str, record: RequestRecord) -> None:
        """Add a request that is handed to vLLM under vLLM's id `name`; it replaces its owner's with that name."""
        self._under_way[record.request.owner, name] = record
        self._named[record.name] = record

    def take(self, name: str, report: FillReport) -> None:
        """Take the report of a request whose prompt is filled, by `Ask.name`; does nothing for an unknown name."""
        if (record := self._named.get(name)) is not None:
            record.take(report)

    def end(self, name: str, record: RequestRecord) -> None:
        """Note that a request has ended: its prompt is forgotten, the statistics of the last 1,000 are kept.

        Its trace, if it has one, ends too. A further call with the same record replaces its statistics, and does not
        count it again.
        """
        record.end()
        self._named.pop(record.name, None)
        if not record.counted:
            record.counted = True
            self._count_ended(record)
            if record.trace is not None:
                record.trace.end(record.stats(), record.error)
        owner = record.request.owner
        # a client may give two requests the same name
        if self._under_way.get((owner, name)) is record:
            del self._under_way[owner, name]
        self._ended.keep(name, owner, record.as_dict())

    def get(self, name: str, *, owner: Owner) -> dict[str, object] | None:
        """Return the statistics of a request so far: `RequestRecord.as_dict`, and its name as "id".

        None if it is unknown, not among the last 1,000, or of another tenant or session, see `Request.owner`.
        """
        record = self._under_way.get((owner, name))
        numbers = self._ended.get(name, owner=owner) if record is None else record.as_dict()
        return {"id": name} | numbers if numbers else None

    def of_answer(self, answer_id: str, *, owner: Owner) -> dict[str, object] | None:
        """Return `get` of the request that an answer's id names: of a completion or a response, its first prompt."""
        # vLLM numbers the prompts of both; a response has several if the server calls tools itself
        names = (answer_id, f"{answer_id}-0", f"{answer_id}_0")
        return next(filter(None, (self.get(name, owner=owner) for name in names)), None)


class RecordingClient:
    """vLLM's engine client for the handler of one request; it notes the request's outputs."""

    def __init__(self, client: EngineClient, record: RequestRecord, records: Records) -> None:
        self._client = client
        self._record = record
        self._records = records

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def generate(
        self, prompt: object, params: RequestParams, request_id: str, **options: object
    ) -> AsyncGenerator[RequestOutput]:
        """Yield outputs as vLLM's client does; the last one carries `RequestRecord.as_dict` for the client.

        It is in `kv_transfer_params` under `messages.FIELD`. This call itself marks the record as begun, names its
        request `request_id`, begins its trace if there is a tracer provider, and may set `params.logprobs` for an
        audit, unless it has a LoRA adapter. The record is kept also if the request fails or is aborted.
        """
        self._record.begun = True
        if options.get("lora_request") is not None:
            self._record.predicted = None  # audits compute with the base model
        self._record.request_predictions(params)
        self._record.request = replace(self._record.request, request_id=request_id)
        if is_tracing():
            headers = cast("Mapping[str, str] | None", options.get("trace_headers"))
            options["trace_headers"] = self._record.begin_trace(
                self._records.model, params, headers
            )
        return self._generate(prompt, params, request_id, **options)

    async def _generate(
        self, prompt: object, params: object, request_id: str, **options: object
    ) -> AsyncGenerator[RequestOutput]:
        self._records.begin(request_id, self._record)
        try:
            async with aclosing(
                self._client.generate(prompt, params, request_id, **options)
            ) as outputs:
                async for output in outputs:
                    self._record.note(output)
                    if output.finished:
                        self._record.end()
                        output.kv_transfer_params = {FIELD: self._record.as_dict()}
                        self._records.end(request_id, self._record)
                    yield output
        except Exception as error:  # counted, then raised again
            self._record.progress.finish = "failed"
            self._record.error = type(error).__name__
            raise
        finally:
            self._records.end(request_id, self._record)
