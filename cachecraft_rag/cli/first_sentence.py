"""The end of an answer's first sentence: small models answer in it and then go on to invent."""

from __future__ import annotations

import re

_END = re.compile(r"(\S*)[.!?…][\"'”’)\]]*(?=\s+[^a-z\s])|\n")
_NO_END = re.compile(
    r"(?:^|.*[\s(])(?:e\.g|i\.e|cf|vs|ca|approx|nos?|fig|dr|mrs?|ms|prof|st|[A-Z])|\W*\d{1,3}", re.I
)


def first_sentence(text: str) -> str | None:
    """Return the text up to the end of its first sentence; None if the text holds no end of a sentence yet.

    A sentence ends with ".", "!", "?" or "…", and quotes or brackets directly after it, once white space and a
    character other than a small letter follow. It also ends with its line, but not after ":", "," or ";". The number of
    a list, an initial and an abbreviation end no sentence.

    >>> first_sentence("1. 29 days"), first_sentence("1. 29 days. Then"), first_sentence("Ask Dr. Moll. Then")
    (None, '1. 29 days.', 'Ask Dr. Moll.')
    >>> first_sentence("The steps are:\\n\\n1. Rinse it.\\n2. Dry it.")
    'The steps are:\\n\\n1. Rinse it.'
    """
    for end in _END.finditer(text):
        line = text[: end.start() + len(end[1] or "")].rpartition("\n")[2].strip()
        if line and not line.endswith((":", ",", ";")) and not _NO_END.fullmatch(line):
            return text[: end.end()].rstrip()
    return None
