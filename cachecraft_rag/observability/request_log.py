"""Structured logs: one record for each request, and a formatter that writes records as lines of JSON.

Records of the package have an attribute `cachecraft`, a dict for programs. Its `event` is "request" here, and
"capture_dropped", "load_failed" or "eviction" in the store. They hold ids, codes and numbers, but no text of a
question, chunk or answer.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from datetime import UTC, datetime

from cachecraft_rag.observability.stats import RequestStats

logger = logging.getLogger("cachecraft_rag.requests")


def log_request(stats: RequestStats, *, error: str | None = None) -> None:
    """Log an ended request to `cachecraft_rag.requests` at INFO, with `request_fields` as the record's `cachecraft`.

    `error` is the name of the class of the exception that ended it.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = request_fields(stats, error=error)
    outcomes = Counter(chunk.outcome for chunk in stats.chunks)
    chunks = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "none"
    logger.info(
        "Request %s: %s after %.3f s, first token after %.3f s; chunks: %s",
        stats.request_id,
        stats.finish,
        stats.total_s,
        stats.ttft_s,
        chunks,
        extra={"cachecraft": fields},
    )


def request_fields(stats: RequestStats, *, error: str | None = None) -> dict[str, object]:
    """Return the fields of a request's log record as plain values; times in seconds.

    They are `event`, `error` if one is given (the name of its class), and the fields of `RequestStats` without
    `searched`, which holds the question's text. In the dicts of `chunks`, "reason" is the code of the `Reason`.
    """
    fields: dict[str, object] = {"event": "request"}
    if error is not None:
        fields["error"] = error
    statistics = stats.as_dict()
    del statistics["searched"]  # holds the question's text
    for chunk in statistics["chunks"]:
        chunk["reason"] = str(chunk.pop("reason_code"))
    return fields | statistics


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, and the fields of the package's records.

    >>> record = logging.makeLogRecord({"msg": "left", "cachecraft": {"event": "eviction", "reason": "budget"}})
    >>> json.loads(JsonFormatter().format(record))["reason"]
    'budget'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON, without a line end.

        The time is ISO 8601 in UTC. NaN and infinities become null, and values that JSON lacks become text. A record's
        `cachecraft` fields replace others of the same name, except "exception", an exception with its traceback.
        """
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "cachecraft", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(_plain(fields), allow_nan=False)


def _plain(value: object) -> object:
    """Return the value in types that JSON has; None for NaN and infinities."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)
