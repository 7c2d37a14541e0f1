"""HTTP requests to one server, with limits of time and size."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

import httpx

from cachecraft_rag.client.replies import (
    checked_reply,
    mapping_of,
    parsed_json,
    printable,
    report_of,
)
from cachecraft_rag.errors import CacheCraftError, ConfigError, ContextLengthError, ServerError
from cachecraft_rag.server.wire import (
    ADMIN_HEADER,
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    CHAT,
    CONTEXT_LENGTH_CODE,
    FACTS,
    PROTOCOL,
    REQUESTS,
    TOKENIZER,
)
from cachecraft_rag.serving.audits.audit import Audit

logger = logging.getLogger("cachecraft_rag.client")

_START = "start one with `cachecraft serve MODEL`"
_MAX_REPLY = 8 << 20  # bytes of a JSON reply
_MAX_TOKENIZER = 64 << 20  # bytes; the largest tokenizers have some 40 MB
_MAX_ANSWER = 64 << 20  # bytes of all events of a streamed answer
_MAX_ERROR = 64 << 10  # bytes of an error's message
_MAX_LINE = 1 << 20  # bytes of one event of a streamed answer


class _Deadline:
    """Ends a request at a time, whatever it waits for, by shutting its connection down.

    httpx limits the silence between two reads only, so a server that sends a byte now and then would never end.
    """

    def __init__(self, seconds: float | None) -> None:
        self.passed = False
        self._ended = False
        self._stream: Any = None  # httpcore's, once the request is connected
        self._guard = threading.Lock()
        self._timer = None if seconds is None else threading.Timer(seconds, self._pass)
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def trace(self, event: str, info: Mapping[str, object]) -> None:
        """Note the connection: an extension of httpx that is called for each event of a request."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._guard:
                self._stream = info.get("return_value")
                if self.passed:
                    self._shut_down()

    def end(self) -> None:
        """Stop watching: the request has ended."""
        if self._timer is not None:
            self._timer.cancel()
        with self._guard:
            self._ended = True
            self._stream = None

    def _pass(self) -> None:
        with self._guard:
            if not self._ended:
                self.passed = True
                self._shut_down()

    def _shut_down(self) -> None:
        if self._stream is None:
            return
        connection = self._stream.get_extra_info("socket")
        if connection is not None:
            with suppress(OSError, ValueError):
                # Not SSLSocket's own method, which would change the object while another thread reads from it.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Link:
    """HTTP requests to one server; thread-safe. Every request raises ServerError after `close`.

    A reply with status 400 is a ConfigError, or a ContextLengthError if its code is "context_length_exceeded" or its
    message names a context. Every other failure of the server is a ServerError.

    Args:
        url: of the server; a "/v1" at its end is left out.
        api_key, admin_key: see `HTTPEngine.connect`.
        timeout_s: longest silence of the server.
        total_timeout_s: longest time of a request with its reply; None = no limit.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        timeout_s: float,
        total_timeout_s: float | None = None,
        admin_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._total_timeout_s = total_timeout_s
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}; write for example http://127.0.0.1:8000")

        headers = {"Accept-Encoding": "identity"}  # a few compressed bytes could become gigabytes
        if api_key is not None:
            check_header("api_key", api_key)
            headers["Authorization"] = f"Bearer {api_key}"
        if admin_key is not None:
            check_header("admin_key", admin_key)
            headers[ADMIN_HEADER] = admin_key
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout_s,
                # each request knows its connection, see `_Deadline`
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"url is {url!r} ({error}); write for example http://127.0.0.1:8000"
            ) from error
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                "the environment names certificates or a proxy that cannot be used; check SSL_CERT_FILE, SSL_CERT_DIR, "
                f"HTTP_PROXY, HTTPS_PROXY and ALL_PROXY: {error}"
            ) from error

    def close(self) -> None:
        """Close the connections; requests under way fail with ServerError."""
        self._client.close()

    def facts(self) -> Mapping[str, object]:
        """Return facts about the server, as it sent them: JSON values, for `ServerFacts.of`.

        Raises ServerError also for another kind of server, and for another version's protocol.
        """
        facts = self.call(FACTS)
        if not isinstance(facts, dict) or "protocol" not in facts:
            raise ServerError(self._not_ours())
        if facts["protocol"] != PROTOCOL:
            version = printable(facts.get("version"))
            raise ServerError(
                f"{self.url} runs version {version} of this package, which speaks another protocol; install the same "
                "version on both sides"
            )
        return facts

    def tokenizer(self) -> object:
        """Return the files of the server's tokenizer, at most 64 MiB, as JSON values; for `replies.served_model`."""
        return self.call(TOKENIZER, limit=_MAX_TOKENIZER)

    def call(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        patient: bool = False,
        limit: int | None = None,
    ) -> object:
        """Send a request with `headers` besides the link's, and return the JSON reply, whose form is unchecked.

        Args:
            body: sent with POST, as JSON; None: the request is a GET.
            patient: wait without limit, because the server computes for long.
            limit: most bytes of the reply; None = the limit of ordinary replies, 8 MiB.
        """
        with self._replied(path, body, headers=headers, patient=patient) as reply:
            most = _MAX_REPLY if limit is None else limit
            content = b"".join(_bounded(reply, most))
        try:
            return parsed_json(content)
        except (ValueError, RecursionError) as error:
            raise ServerError(self._not_ours()) from error

    def report(self, name: str, *, headers: Mapping[str, str]) -> Mapping[str, object]:
        """Return the report of a request, see `replies.report_of`; empty if the server has none.

        After a failure it is empty, with a warning in the log, because the answer itself is complete.

        Args:
            name: the id of the request in the server.
            headers: the headers that the request was sent with.
        """
        try:
            reply = self.call(f"{REQUESTS}/{quote(name, safe='')}", headers=headers)
            with checked_reply(self.url, "statistics"):
                return report_of(reply)
        except CacheCraftError as error:  # the answer itself is complete
            logger.warning(
                "The statistics of request %s did not arrive: %s", printable(name), error
            )
            return {}

    def audit(self, name: str, *, headers: Mapping[str, str]) -> Audit | None:
        """Return the audit of a request's answer; None if the server has none, or not yet.

        `name` is its id in the server, `headers` are those it was sent with. ServerError if the server forgot it.
        """
        reply = self.call(f"{REQUESTS}/{quote(name, safe='')}", headers=headers)
        with checked_reply(self.url, "an audit"):
            audit = mapping_of(reply).get("audit")
            return None if audit is None else Audit.from_dict(mapping_of(audit))

    def events(
        self, body: Mapping[str, object], *, headers: Mapping[str, str]
    ) -> Generator[Mapping[str, object]]:
        """Yield the events of a streamed chat completion, as JSON objects, up to its end.

        `body` must have `"stream": true`; `headers` are sent besides those of the link. The request is sent when the
        first event is asked for; closing the generator ends it. Raises ServerError also for an event longer than 1 MiB,
        and for an answer that ends early or is longer than 64 MiB.
        """
        with self._replied(CHAT, body, headers=headers) as reply:
            for line in _lines(reply):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                with checked_reply(self.url, "an answer"):
                    event = mapping_of(parsed_json(data))
                if "error" in event:
                    raise ServerError(f"{self.url}: {_message_of(event['error'])}")
                yield event
        raise ServerError(f"{self.url} ended the answer halfway; see its log, and ask again")

    @contextmanager
    def _replied(
        self,
        path: str,
        body: Mapping[str, object] | None,
        *,
        headers: Mapping[str, str] | None = None,
        patient: bool = False,
    ) -> Iterator[httpx.Response]:
        """Send a request and open the reply; ServerError or ConfigError for other statuses, or after `close`."""
        if self._client.is_closed:
            raise self._closed()
        deadline = _Deadline(None if patient else self._total_timeout_s)
        has_body = body is not None
        try:
            with self._client.stream(
                "POST" if has_body else "GET",
                path,
                json=body,
                headers=headers,
                timeout=None if patient else httpx.USE_CLIENT_DEFAULT,
                extensions={"trace": deadline.trace},
            ) as reply:
                encoding = reply.headers.get("content-encoding", "identity")
                if encoding.lower() != "identity":
                    raise ServerError(
                        f"{self.url} sent a compressed reply ({printable(encoding)}), which is refused"
                    )
                if reply.status_code != 200:
                    raise self._error(reply, b"".join(_truncated(reply, _MAX_ERROR)))
                yield reply
            if deadline.passed:  # a body of unknown length ends where its connection does
                raise self._too_slow()
        except _TooLarge as error:
            raise ServerError(
                f"{self.url} sent a reply of more than {error.limit >> 10} KiB, which is refused"
            ) from None
        except (httpx.HTTPError, httpx.StreamError, OSError, ssl.SSLError) as error:
            if deadline.passed:
                raise self._too_slow() from error
            raise self._unreachable(error) from error
        # of httpx, if another thread closed its client since the check above; any other is a bug and passes
        except RuntimeError as error:
            if self._client.is_closed:
                raise self._closed() from error
            raise
        finally:
            deadline.end()

    def _error(self, reply: httpx.Response, content: bytes) -> CacheCraftError:
        code: object = None
        try:
            error = mapping_of(parsed_json(content))["error"]
            message = _message_of(error)
            code = error.get("code") if isinstance(error, dict) else None
        except (LookupError, TypeError, ValueError, RecursionError):  # not in vLLM's form
            message = printable(content[:400].decode(errors="replace"))
        status = reply.status_code
        if status == 403 and ADMIN_HEADER in message:
            return ServerError(
                f"{self.url}: {message}: set {ADMIN_KEY_VARIABLE} for a command, in Python connect(…, admin_key=…)"
            )
        if status == 403 and "--admin-key-file" in message:
            return ServerError(f"{self.url}: {message}")
        if status in (401, 403):
            return ServerError(
                f"{self.url} asks for a key: set {API_KEY_VARIABLE} for a command, in Python connect(…, api_key=…)"
            )
        if status == 404 and reply.url.path.endswith(FACTS):
            return ServerError(self._not_ours())
        if status == 400:
            is_too_long = code == CONTEXT_LENGTH_CODE or "context" in message
            return ContextLengthError(message) if is_too_long else ConfigError(message)
        return ServerError(f"{self.url} answered {status}: {message}")

    def _closed(self) -> ServerError:
        return ServerError(f"the connection to {self.url} was closed; connect again")

    def _too_slow(self) -> ServerError:
        return ServerError(
            f"{self.url}: the reply did not end in {self._total_timeout_s:g} s; ask for a shorter answer, or raise "
            "total_timeout_s"
        )

    def _unreachable(self, error: Exception) -> ServerError:
        return ServerError(
            f"{self.url} does not answer ({type(error).__name__}: {printable(error)}); {_START}"
        )

    def _not_ours(self) -> str:
        return (
            f"{self.url} answers, but is not a server of this package (an ordinary vLLM?); {_START}"
        )


def check_header(name: str, value: str) -> None:
    """Raise ConfigError for text that is not printable ASCII or has spaces at its ends; "" is allowed.

    The message names the header and does not show the text: it may be a secret.
    """
    if not (value.isascii() and value.isprintable() and value == value.strip()):
        raise ConfigError(
            f"{name} travels in an HTTP header: it must be printable ASCII text, without spaces at its ends"
        )


class _TooLarge(Exception):
    """A reply is larger than a limit in bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


def _bounded(reply: httpx.Response, limit: int) -> Iterator[bytes]:
    """Yield the body. Raises _TooLarge once it exceeds the limit."""
    size = 0
    for part in reply.iter_raw():
        size += len(part)
        if size > limit:
            raise _TooLarge(limit)
        yield part


def _truncated(reply: httpx.Response, limit: int) -> Iterator[bytes]:
    """Yield the beginning of the body."""
    size = 0
    for part in reply.iter_raw():
        yield part
        size += len(part)
        if size > limit:
            return


def _lines(reply: httpx.Response) -> Iterator[bytes]:
    """Yield the lines of a streamed body. Raises _TooLarge for a line, or a body, that exceeds its limit."""
    rest = b""
    for part in _bounded(reply, _MAX_ANSWER):
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
        if len(rest) > _MAX_LINE:
            raise _TooLarge(_MAX_LINE)
    if rest:
        yield rest


def _message_of(error: object) -> str:
    """Return the message of an error in vLLM's form, or the error as text."""
    if isinstance(error, dict) and "message" in error:
        return printable(error["message"])
    return printable(error)
