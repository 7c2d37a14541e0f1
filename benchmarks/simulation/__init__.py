"""Replays of traces with the real planner, eviction rules and memory tier, without tensors."""
