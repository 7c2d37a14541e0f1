"""Options that several of these commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.planning.config import ReuseConfig

NearestShare = Annotated[float, options.option_of("reuse.nearest_share", min=0.0, max=1.0)]
NEAREST_SHARE = ReuseConfig().nearest_share
Pairs = Annotated[int, typer.Option("--pairs", min=1, help="Runs of each side, alternating.")]
