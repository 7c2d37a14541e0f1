"""Statistics of the latest answers of a server, which clients ask for by an answer's id."""

from __future__ import annotations

from collections import OrderedDict

from cachecraft_rag.server.wire import MOST_REMEMBERED


class Remembered:
    """The last 1,000 answers by id, each with its session. To be used in one thread."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[str | None, dict[str, object]]] = OrderedDict()

    def keep(self, name: str, session: str | None, values: dict[str, object]) -> None:
        """Keep the values of an answer, in place of earlier ones; session None: for requests without a session."""
        self._answers[name] = (session, values)
        self._answers.move_to_end(name)
        while len(self._answers) > MOST_REMEMBERED:
            self._answers.popitem(last=False)

    def get(self, name: str, *, session: str | None) -> dict[str, object] | None:
        """Return the values of an answer; None for an unknown one and for one of another session."""
        owner, values = self._answers.get(name, (None, {}))
        return values if values and owner == session else None
