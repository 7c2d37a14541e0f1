"""What became of requests with documents, by their ids, for as long as a server remembers it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from cachecraft_rag.engine.request import Request, SegmentReport, stats_of
from cachecraft_rag.engine.stats import RequestStats
from cachecraft_rag.vllm.messages import FIELD

REMEMBERED = 1000  # requests: a few kilobytes each

_FINISH: Mapping[str, Any] = {"stop": "end", "length": "length"}


def take_report(request: Request, told: Mapping[str, Any]) -> None:
    """The connector's report, or why the request was computed as any other."""
    if "segments" not in told:
        request.reports = ()
        return
    request.reports = tuple(SegmentReport.from_dict(one) for one in told["segments"])
    request.row_layers, request.focus_layer = told["row_layers"], told["focus_layer"]
    request.planned_s, request.waited_s, request.remote = told["planned_s"], told["waited_s"], told["remote"]


@dataclass
class Record:
    """One request of an API server, as far as it has come.

    told  what the connector said at its end, see `working.Filling.report`
    begun, counted  it was handed to vLLM; its end is told
    """

    request: Request
    layers: int
    told: dict[str, Any] = field(default_factory=dict)
    begun: bool = False
    counted: bool = False

    def note(self, output: Any) -> None:
        """One of vLLM's outputs: new tokens, or all of them at once where the answer is not streamed."""
        request = self.request
        if not request.first_token_s:
            latency = getattr(output.metrics, "first_token_latency", 0.0) if output.metrics is not None else 0.0
            request.first_token_s = latency or request.clock()
        for one in output.outputs:
            request.generated += len(one.token_ids)
            if one.finish_reason is None:
                continue
            # vLLM says "stop" for an end token, which it counts, and for a stop string, which it names.
            stopped = isinstance(one.stop_reason, str)
            request.finish = "stop" if stopped else _FINISH.get(one.finish_reason, "closed")
            request.generated -= request.finish == "end"
        if output.kv_transfer_params:
            self.told = dict(output.kv_transfer_params.get(FIELD, {}))
            take_report(request, self.told)

    def end(self) -> None:
        """No more will come."""
        self.request.finish = self.request.finish or "closed"
        self.request.ended_s = self.request.ended_s or self.request.clock()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        refused = self.told.get("refused")
        return {
            "stats": stats_of(self.request, self.layers).as_dict(),
            "report": None if refused is not None or not self.told else self.told,
            "refused": refused,
        }


class Records:
    """The last requests of an API server. Used in its event loop only."""

    def __init__(self, ended: Callable[[RequestStats], None], most: int = REMEMBERED) -> None:
        """`ended` is told of each request once, when it has ended."""
        self._most, self._told_ended = most, ended
        self._under_way: dict[str, Record] = {}
        self._ended: OrderedDict[str, tuple[str | None, dict[str, Any]]] = OrderedDict()

    def begin(self, name: str, record: Record) -> None:
        """A request has been handed to vLLM."""
        self._under_way[name] = record

    def end(self, name: str, record: Record) -> None:
        """It has ended; its prompt is forgotten, its numbers are kept."""
        record.end()
        if not record.counted:
            record.counted = True
            self._told_ended(stats_of(record.request, record.layers))
        if self._under_way.get(name) is record:  # a client may give two requests one name
            del self._under_way[name]
        self._ended[name] = (record.request.session, record.as_dict())
        self._ended.move_to_end(name)
        while len(self._ended) > self._most:
            self._ended.popitem(last=False)

    def get(self, name: str, *, session: str | None) -> dict[str, Any] | None:
        """What is known of a request, for the session it belongs to; None where nothing is."""
        if (record := self._under_way.get(name)) is not None:
            owner, told = record.request.session, record.as_dict()
        else:
            owner, told = self._ended.get(name, (None, {}))
        return {"id": name} | told if told and owner == session else None


class RecordingClient:
    """vLLM's engine client as one request's handler sees it: what it generates is noted."""

    def __init__(self, client: Any, record: Record, records: Records) -> None:
        self._client, self._record, self._records = client, record, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any]:
        """As vLLM's; the last output carries the whole record."""
        self._record.begun = True
        self._record.request.request_id = request_id
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
            self._record.request.finish = "failed"
            raise
        finally:
            self._records.end(request_id, self._record)
