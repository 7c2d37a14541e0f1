"""Statistics of the latest answers of a server, which clients ask for by an answer's id."""

from __future__ import annotations

from collections import OrderedDict

from cachecraft_rag.planning.candidates import Owner
from cachecraft_rag.server.wire import MOST_REMEMBERED


class Remembered:
    """The last 1,000 answers of all owners, by id; an owner is (tenant, session). To be used in one thread."""

    def __init__(self) -> None:
        # over vLLM a client may choose the id of its answer
        self._answers: OrderedDict[tuple[Owner, str], dict[str, object]] = OrderedDict()

    def keep(self, name: str, owner: Owner, values: dict[str, object]) -> None:
        """Keep the values of an answer; another one of this owner with the same id is replaced."""
        self._answers[owner, name] = values
        self._answers.move_to_end((owner, name))
        while len(self._answers) > MOST_REMEMBERED:
            self._answers.popitem(last=False)

    def get(self, name: str, *, owner: Owner) -> dict[str, object] | None:
        """Return the values of an answer; None for an unknown one and for one of another owner."""
        return self._answers.get((owner, name)) or None
