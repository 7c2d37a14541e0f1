"""What all tests share: no model hub, and the demo model and handbook where a test asks for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any test module imports transformers: the hub's client reads these once, at its import. A test that needs the
# network would pass on one machine and hang on the next.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would warn at every subprocess a test starts


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model; the first test on a machine waits for its conversion (about 20 seconds)."""
    from cachecraft_rag.embedded import demo_model_folder

    return demo_model_folder()


@pytest.fixture(scope="session")
def handbook() -> Path:
    """Folder of the sample handbook."""
    from cachecraft_rag.embedded import handbook_folder

    return handbook_folder()
