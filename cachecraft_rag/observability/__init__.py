"""Numbers about an engine, for its operator, while it runs.

Import from here: `stats` (statistics of an answer), `request_counts` (totals by outcome), `request_log` (one record for
each request), `metrics` (all of it for Prometheus) and `tracing` (spans for OpenTelemetry). Imports planning and store.

Never here: anything that changes how a request is answered. These modules read counters; they do not decide.
"""
