"""Haystack sends no statistics from tests, and writes no file into the home of the user who runs them."""

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
