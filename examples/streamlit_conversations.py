"""Conversations of `streamlit_app.py` that survive a reload, and where an answer's first sentence ends.

A page's address holds a random key (`?c=…`) of its conversation, which the server keeps in memory. So a reload, a
bookmark or a second tab shows it again; after a restart of the server it is gone.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import OrderedDict

from streamlit_picture import Turn

MOST_CONVERSATIONS = 200  # the longest unused goes first
_ENDS = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s+(\S))|\n")
_LABEL = re.compile(r"\s*(?:[-*•#>]+|\(?(?:\d{1,3}|[A-Za-z])[.)]?|step \d+[.:]?)\s*", re.IGNORECASE)
_ABBREVIATED = re.compile(
    r"(?:^|[\s(])(?:e\.g|i\.e|cf|vs|ca|approx|no|nos|fig|dr|mr|mrs|ms|prof|st|[A-Z])$", re.IGNORECASE
)


class Conversations:
    """The turns of each conversation by its key; a key that this object has not made leads nowhere.

    An owner (the name of a visitor who has logged in, or "") sees only conversations of that owner.
    """

    def __init__(self, most: int = MOST_CONVERSATIONS) -> None:
        self._most = most
        self._turns: OrderedDict[tuple[str, str], list[Turn]] = OrderedDict()
        self._lock = threading.Lock()

    def new(self, owner: str = "") -> str:
        """The key of a new, empty conversation."""
        key = uuid.uuid4().hex
        with self._lock:
            self._turns[owner, key] = []
            while len(self._turns) > self._most:
                self._turns.popitem(last=False)
        return key

    def find(self, key: str, owner: str = "") -> list[Turn] | None:
        """The turns of a conversation, to be appended to; None if there is none with this key."""
        with self._lock:
            if (owner, key) not in self._turns:
                return None
            self._turns.move_to_end((owner, key))
            return self._turns[owner, key]


def first_sentence(text: str) -> str | None:
    """The text up to the end of its first sentence; None while that is still to come.

    The number of a list, an initial and an abbreviation end no sentence, and neither does a line that announces a list.
    A full stop counts once the next word has begun, with a letter that is not a small one.

    >>> first_sentence("1. 29 days"), first_sentence("1. 29 days. Then")
    (None, '1. 29 days.')
    >>> first_sentence("It takes approx. 5 minutes, e.g. 4. Then it"), first_sentence("It holds 1.7 litres")
    ('It takes approx. 5 minutes, e.g. 4.', None)
    >>> first_sentence("The steps are:\\n\\n1. Rinse it.\\n2. Dry it.")
    'The steps are:\\n\\n1. Rinse it.'
    """
    for end in _ENDS.finditer(text):
        line = text[: end.start()].rpartition("\n")[2]
        if not line.strip() or _LABEL.fullmatch(line) or line.rstrip().endswith((":", ",", ";")):
            continue
        if end[1] is not None and (end[1].islower() or _ABBREVIATED.search(line)):
            continue
        return text[: end.end()].rstrip()
    return None
