"""HTTP client for JSON responses and event streams, with the standard library. Failures raise CommandFailed.

Each request has its own connection. Closing the connection cancels the request at the server.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.flags import KEY, URL, Target

MAX_LINE_BYTES = 64 << 20  # longest line of an event stream
PIECE_BYTES = 1 << 16  # largest piece of a file that is read or sent at a time
HINTS = {
    400: "change the field that the message names",
    401: f"set {KEY} or name a file with the key as --api-key-file",
    403: "use an API key with this permission",
    404: "name a model of `rootstock models`, and check the URL",
    413: "send a smaller request",
    429: "wait, or send fewer requests at a time",
    503: "`rootstock status` shows the missing services",
}


@dataclass(frozen=True, slots=True)
class Content:
    """The body of a request."""

    kind: str  # content type
    body: bytes | Iterator[bytes]
    length: int | None = None  # bytes of a body that is an iterator

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": self.kind} | ({} if self.length is None else {"content-length": str(self.length)})


class Server:
    def __init__(self, target: Target) -> None:
        self.target = target
        parts = urlsplit(target.url)
        self._secure, self._path = parts.scheme == "https", parts.path
        self._host = parts.hostname or ""
        # Never None, because HTTPConnection would look for a port in an IPv6 address.
        self._port = parts.port or (443 if self._secure else 80)

    def get(self, path: str) -> Any:
        """Sends a GET request and returns the JSON value of the response. Raises CommandFailed."""
        return self._json("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Sends a POST request with a JSON body and returns the JSON value of the response. Raises CommandFailed."""
        return self._json("POST", path, Content("application/json", json.dumps(body).encode()))

    def upload(self, path: str, content: Content) -> Any:
        """Sends a POST request with any body and returns the JSON value of the response. Raises CommandFailed."""
        return self._json("POST", path, content)

    def pieces(self, path: str) -> Generator[bytes, None, None]:
        """Yields the body of a response in pieces as they arrive. Raises CommandFailed, with CUT_OFF if the body ends early."""
        with closing(self._connection()) as connection:
            response = self._request(connection, "GET", path, None)
            while piece := self._piece(response):
                yield piece

    def _json(self, method: str, path: str, content: Content | None) -> Any:
        with closing(self._connection()) as connection:
            response = self._request(connection, method, path, content)
            try:
                return json.loads(response.read())
            except (OSError, HTTPException) as error:
                raise unreachable(self.target.url, _why(error)) from None
            except ValueError:
                raise self._not_openai(path) from None

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yields the events of a stream until [DONE] or its end. Closing the iterator closes the connection.

        Raises:
            CommandFailed: The connection fails before the stream begins (UNREACHABLE) or within the stream (CUT_OFF), or the
                server reports an error (FAILED).
        """
        with closing(self._connection()) as connection:
            content = Content("application/json", json.dumps(body | {"stream": True}).encode())
            response = self._request(connection, "POST", path, content)
            while line := self._line(response):
                payload = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if payload == b"[DONE]":
                    return
                yield self._event(payload, path)

    def _connection(self) -> HTTPConnection:
        kind = HTTPSConnection if self._secure else HTTPConnection
        return kind(self._host, self._port, timeout=self.target.timeout_s)

    def _request(self, connection: HTTPConnection, method: str, path: str, content: Content | None) -> HTTPResponse:
        headers = {"accept": "application/json, text/event-stream", "user-agent": "rootstock"}
        headers |= content.headers if content is not None else {}
        headers |= {"authorization": f"Bearer {self.target.key}"} if self.target.key else {}
        try:
            # A server may refuse a request before it has read the whole body. The response is still readable and has the reason.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._path + path, None if content is None else content.body, headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            refusal = response.read(MAX_LINE_BYTES)
        except (OSError, HTTPException) as error:
            raise unreachable(self.target.url, _why(error)) from None
        message = f"the server answered {response.status} ({_message(refusal)}): {hint_of(response.status)}."
        raise CommandFailed(Exit.FAILED, message, is_temporary=response.status in TEMPORARY)

    def _piece(self, response: HTTPResponse) -> bytes:
        """Returns the next bytes of a response, or b"" at its end. Raises CommandFailed (CUT_OFF) if it ends early."""
        try:
            piece = response.read1(PIECE_BYTES)
        except (OSError, HTTPException) as error:
            raise cut_off(_why(error)) from None
        if not piece and response.length:  # read1 does not report an early end
            raise cut_off("the connection has ended")
        return piece

    def _line(self, response: HTTPResponse) -> bytes:
        """Returns the next line of a response, or b"" at its end. Raises CommandFailed (CUT_OFF) if the connection fails."""
        try:
            line = response.readline(MAX_LINE_BYTES)
        except (OSError, HTTPException) as error:
            raise cut_off(_why(error)) from None
        if len(line) == MAX_LINE_BYTES:
            raise cut_off("an event is too large")
        return line

    def _event(self, payload: bytes, path: str) -> dict[str, Any]:
        try:
            event = json.loads(payload)
        except ValueError:
            raise self._not_openai(path) from None
        if not isinstance(event, dict):
            raise self._not_openai(path)
        if event.get("error"):
            raise CommandFailed(Exit.FAILED, f"the server ended the response ({_message(payload)}): ask again.")
        return event

    def _not_openai(self, path: str) -> CommandFailed:
        return CommandFailed(Exit.FAILED, f"the response of {self.target.url}{path} does not follow OpenAI's API: check --url.")


TEMPORARY = (429, 502, 503, 504)  # statuses of a server that is overloaded or unavailable for a while


def hint_of(status: int) -> str:
    """Returns the remedy for an HTTP status."""
    return HINTS.get(status, "see the server's log" if status >= 500 else "check --url")


def unreachable(url: str, why: str) -> CommandFailed:
    return CommandFailed(
        Exit.UNREACHABLE, f"{url} cannot be reached ({why}): start the server, or name another one by --url or {URL}."
    )


def cut_off(why: str) -> CommandFailed:
    return CommandFailed(Exit.CUT_OFF, f"the answer was cut off ({why}): the printed part is incomplete; ask again.")


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no response within --timeout"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _message(content: bytes) -> str:
    """Returns the message of an error body in OpenAI's form, or the beginning of another body."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error).rstrip(".")
    except (ValueError, LookupError, TypeError):
        return content[:200].decode(errors="replace").strip() or "without a reason"
