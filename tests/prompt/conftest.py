"""Fixtures of tests that run an engine."""

from tests.engines import engine, make_engine, untraced

__all__ = ["engine", "make_engine", "untraced"]
