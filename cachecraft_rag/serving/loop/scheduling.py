"""Scheduling of prefills: which passes run their next layer as one forward.

The first request in the order of asking always runs. Others join it if they save more than they cost it: a forward
has a fixed part (reading the weights), which those who join save, and a part for each row, which all wait for. The
fixed part takes as long as `fixed_rows` rows. Large passes therefore run one after the other: joining them would only
delay the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingPass:
    """A pass before its next layer.

    layer   its next layer
    rows    its size, see `ComputeSpeed.rows`
    joined  whether it runs together with the first pass already
    """

    layer: int
    rows: float
    joined: bool = False


def pays_to_join(
    layer: int, rows: float, *, at: int, others: int, layers: int, fixed_rows: float
) -> bool:
    """Return True if a pass before `layer` saves more than it costs the `others`, `at` a later layer or the same.

    It runs alone up to their layer, while they wait, and from there on as one forward with them, to the last of the
    model's `layers`. False if it is past their layer, and if it saves just as much as it costs. `fixed_rows` take as
    long as the fixed part of a forward.

    >>> pays_to_join(0, 20.0, at=0, others=1, layers=4, fixed_rows=30.0)
    True
    >>> pays_to_join(0, 20.0, at=0, others=2, layers=4, fixed_rows=30.0)
    False
    >>> pays_to_join(0, 20.0, at=2, others=1, layers=4, fixed_rows=30.0)
    False
    """
    layers_together = layers - at
    layers_alone = at - layer
    if layers_alone < 0:
        return False
    saved = layers_together * fixed_rows
    delay = layers_alone * (fixed_rows + rows) + layers_together * rows
    return saved > others * delay


def next_group(
    passes: Sequence[WaitingPass], *, layers: int, fixed_rows: float
) -> tuple[list[int], set[int]]:
    """Choose among one or more passes, in the order of asking, those that run their next layer now, as one forward.

    Returns their indices, ascending; and the indices of all that run together with the first pass, the first itself and
    those that wait at a later layer included. If the first pass is `joined`, all passes that are `joined` stay among
    them. `fixed_rows` take as long as the fixed part of a forward; 0 if nothing may be computed jointly.

    >>> next_group([WaitingPass(0, 20.0), WaitingPass(0, 9.0), WaitingPass(0, 500.0)], layers=4, fixed_rows=30.0)
    ([0, 1], {0, 1})
    >>> next_group([WaitingPass(1, 20.0), WaitingPass(0, 2.0)], layers=8, fixed_rows=30.0)
    ([1], {0, 1})
    """
    joined = {0}
    if passes[0].joined:
        joined |= {number for number, waiting in enumerate(passes) if waiting.joined}

    for number, waiting in enumerate(passes):
        if number in joined:
            continue
        furthest = max(passes[other].layer for other in joined)
        if pays_to_join(
            waiting.layer,
            waiting.rows,
            at=furthest,
            others=len(joined),
            layers=layers,
            fixed_rows=fixed_rows,
        ):
            joined.add(number)

    lowest = min(passes[number].layer for number in joined)
    running = [number for number in sorted(joined) if passes[number].layer == lowest]
    return running, joined
