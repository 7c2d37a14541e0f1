"""Replays of traces against the real catalog, planner and eviction, without tensors: what a budget would save."""
