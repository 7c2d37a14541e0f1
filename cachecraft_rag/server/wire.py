"""Names, limits and versions of the messages between clients and servers of this package. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping

PROTOCOL = 1  # version of the messages between `client.HTTPEngine` and a server
# field of a request's body: fields of `ReuseConfig` for this request, `STRICT_IDS` and `PRIVATE_SYSTEM`. Field of
# `kv_transfer_params` in a reply: statistics
FIELD = "cachecraft"
STRICT_IDS = "strict_ids"  # true: refuse a document whose `id` is not the id of its text
PRIVATE_SYSTEM = "private_system"  # true: the instruction or the tools hold one user's text
ADMIN_HEADER = "X-CacheCraft-Admin-Key"
# environment variables with the keys that commands send to a server; `cachecraft serve` reads the first one, too
API_KEY_VARIABLE = "CACHECRAFT_API_KEY"
ADMIN_KEY_VARIABLE = "CACHECRAFT_ADMIN_KEY"
CONTEXT_LENGTH_CODE = "context_length_exceeded"  # code of an error, as in OpenAI's

MOST_DOCUMENTS = 1000
MOST_PRIMED = 4 << 20  # characters per request to prime: a book of a thousand pages
MOST_BODY = 6 * MOST_PRIMED  # bytes: JSON may write a character as \uXXXX
MOST_REMEMBERED = 1000  # answers whose statistics a server keeps
LONGEST_SESSION = 256  # characters
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # hosts that only this computer reaches

CHAT = "/v1/chat/completions"
FACTS = "/v1/cachecraft"
TOKENIZER = "/v1/cachecraft/tokenizer"
REQUESTS = "/v1/cachecraft/requests"  # "/" and the answer's id follow
PRIME = "/v1/cachecraft/prime"
EVICT = "/v1/cachecraft/evict"
READMIT = "/v1/cachecraft/readmit"
HOLDS = "/v1/cachecraft/holds"

# Files of a model's folder that a server sends to clients.
TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

Message = Mapping[str, object]  # a chat message as JSON
