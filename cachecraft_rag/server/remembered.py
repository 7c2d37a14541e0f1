"""Statistics of the latest answers of a server, which clients ask for by an answer's id."""

from __future__ import annotations

from collections import OrderedDict

from cachecraft_rag.planning.candidates import Owner
from cachecraft_rag.server.wire import MOST_REMEMBERED


class Remembered:
    """The last 1,000 answers by id, each with its owner: tenant and session. To be used in one thread."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[Owner, dict[str, object]]] = OrderedDict()

    def keep(self, name: str, owner: Owner, values: dict[str, object]) -> None:
        """Keep the values of an answer, in place of earlier ones."""
        self._answers[name] = (owner, values)
        self._answers.move_to_end(name)
        while len(self._answers) > MOST_REMEMBERED:
            self._answers.popitem(last=False)

    def get(self, name: str, *, owner: Owner) -> dict[str, object] | None:
        """Return the values of an answer; None for an unknown one and for one of another owner."""
        known, values = self._answers.get(name, (None, {}))
        return values if values and known == owner else None
