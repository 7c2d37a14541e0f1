"""Outcomes of the last requests that were laid out as segments, by their ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.planner import SegmentOutcome
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.serving.request import Request, RequestProgress, SegmentReport, stats_of
from cachecraft_rag.types import Prompt
from cachecraft_rag.vllm.messages import FIELD

_REMEMBERED = 1000  # requests: a few kilobytes each

_FINISH: Mapping[str, Any] = {"stop": "end", "length": "length"}


def cached_report(prompt: Prompt, cached: int, layers: int, *, outcome: SegmentOutcome) -> dict[str, Any]:
    """Report as `filling.Filling.report` a prompt whose first `cached` tokens were in vLLM's own prefix cache.

    Args:
        outcome: of a segment that begins there: "exact" where vLLM itself has computed all that it keeps of the prompt.
    """
    segments = []
    for segment, start, end in zip(prompt.segments, prompt.bounds, prompt.bounds[1:], strict=False):
        report = SegmentReport("computed", Reason.QUESTION if segment.kind == "question" else Reason.NOT_STORED)
        if segment.kind != "question" and (cached > start or outcome == "reused"):
            report = SegmentReport(outcome, Reason.PREFIX_CACHED, not_loaded=min(max(0, end - cached), end - start))
        segments.append(report.as_dict())
    rows = (prompt.bounds[-1] - cached) * layers
    times: dict[str, Any] = {"planned_s": 0.0, "waited_s": 0.0, "focus_layer": None, "remote": None}
    return {"segments": segments, "row_layers": rows} | times


@dataclass
class RequestRecord:
    """One request of an API server, as far as it has come.

    name     see `messages.Ask`
    report   of the connector, see `filling.Filling.report`
    begun    it was handed to vLLM
    counted  its end was counted
    alone    vLLM computes it without chunk-caches
    remark   for the client, beside the statistics; "" for none
    """

    request: Request
    layers: int
    name: str = ""
    progress: RequestProgress = field(default_factory=RequestProgress)
    report: dict[str, Any] = field(default_factory=dict)
    begun: bool = False
    counted: bool = False
    alone: bool = False
    remark: str = ""

    def note(self, output: Any) -> None:
        """Note one of vLLM's outputs: new tokens, or all of them at once where the answer is not streamed."""
        progress = self.progress
        if not progress.first_token_s:
            latency = getattr(output.metrics, "first_token_latency", 0.0) if output.metrics is not None else 0.0
            progress.drew_first(at=latency or self.request.clock())
        generated = progress.generated
        for one in output.outputs:
            generated += len(one.token_ids)
            if one.finish_reason is None:
                continue
            # vLLM says "stop" for an end token, which it counts, and for a stop string, which it names.
            stopped = isinstance(one.stop_reason, str)
            progress.finished("stop" if stopped else _FINISH.get(one.finish_reason, "closed"))
            generated -= progress.finish == "end"
        progress.read(generated)
        if self.alone:
            cached = output.num_cached_tokens or 0
            self.take(self.report or cached_report(self.request.prompt, cached, self.layers, outcome="exact"))
            return
        if output.kv_transfer_params:
            self.take(output.kv_transfer_params.get(FIELD, {}))
        if "refused" not in self.report:  # vLLM's own number counts all that was filled, computed or not
            known = progress.reports is not None
            output.num_cached_tokens = self.stats().tokens_reused if known else None

    def take(self, report: Mapping[str, Any]) -> None:
        """Take the connector's report: when it is filled, and again with its last output."""
        self.report = dict(report)
        self.progress.reported(self.report)

    def end(self) -> None:
        """Note its end."""
        self.progress.end(self.request, "closed")

    def stats(self) -> RequestStats:
        """Its statistics so far."""
        return stats_of(self.request, self.progress, self.layers)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        refused = self.report.get("refused")
        return {
            "stats": self.stats().as_dict(),
            "report": None if refused is not None or not self.report else self.report,
            "refused": refused,
            "note": self.remark or None,
        }


class Records:
    """The last requests of an API server. Used in its event loop only."""

    def __init__(self, ended: Callable[[RequestRecord], None]) -> None:
        """Make empty ones; `ended` is called once for each request, when it has ended."""
        self._count_ended = ended
        self._under_way: dict[str, RequestRecord] = {}
        self._named: dict[str, RequestRecord] = {}
        self._ended: OrderedDict[str, tuple[str | None, dict[str, Any]]] = OrderedDict()

    def begin(self, name: str, record: RequestRecord) -> None:
        """Note a request that is handed to vLLM."""
        self._under_way[name] = self._named[record.name] = record

    def take(self, name: str, report: Mapping[str, Any]) -> None:
        """Take the report of a request that is filled."""
        if (record := self._named.get(name)) is not None:
            record.take(report)

    def end(self, name: str, record: RequestRecord) -> None:
        """Note its end: its prompt is forgotten, its numbers are kept."""
        record.end()
        self._named.pop(record.name, None)
        if not record.counted:
            record.counted = True
            self._count_ended(record)
        if self._under_way.get(name) is record:  # a client may give two requests one name
            del self._under_way[name]
        self._ended[name] = (record.request.session, record.as_dict())
        self._ended.move_to_end(name)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def get(self, name: str, *, session: str | None) -> dict[str, Any] | None:
        """Numbers of a request, for the session that it belongs to; None for an unknown one."""
        if (record := self._under_way.get(name)) is not None:
            owner, numbers = record.request.session, record.as_dict()
        else:
            owner, numbers = self._ended.get(name, (None, {}))
        return {"id": name} | numbers if numbers and owner == session else None


class RecordingClient:
    """vLLM's engine client for one request's handler; notes its outputs."""

    def __init__(self, client: Any, record: RequestRecord, records: Records) -> None:
        self._client, self._record, self._records = client, record, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any]:
        """Generate as vLLM's client does; the last output carries the whole record."""
        self._record.begun = True
        self._record.request = replace(self._record.request, request_id=request_id)
        return self._generate(prompt, params, request_id, **options)

    async def _generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any]:
        self._records.begin(request_id, self._record)
        try:
            async with aclosing(self._client.generate(prompt, params, request_id, **options)) as outputs:
                async for output in outputs:
                    self._record.note(output)
                    if output.finished:
                        self._record.end()
                        output.kv_transfer_params = {FIELD: self._record.as_dict()}
                        self._records.end(request_id, self._record)
                    yield output
        except Exception:  # whatever it is: it is raised again
            self._record.progress.failed()
            raise
        finally:
            self._records.end(request_id, self._record)
