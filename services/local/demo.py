"""Sends the first request to the public API (chat, completion or embedding), and builds a curl command for another request.

Standard library only.
"""

from __future__ import annotations

import http.client
import json
import shlex
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

QUESTION, OTHER_QUESTION = "What is 17 + 25?", "Count from 3 to 9."
PROMPT = "The capital of France is"  # for a model without a chat template
TIMEOUT_S = 60.0
KEY_VARIABLE = "ROOTSTOCK_API_KEY"
Kind = Literal["chat", "completion", "embedding"]
PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "embedding": "/v1/embeddings"}
Write = Callable[[str], object]


class RequestRefused(Exception):
    """The gateway refused the request, and would refuse a retry. The message has the status and the reason."""


class RequestFailed(Exception):
    """The connection ended, or a service is unavailable. A retry may succeed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a gateway for clients on this machine."""

    url: str  # scheme, host, port
    certificate: str = ""  # PEM file with the gateway's certificate; empty: no TLS
    needs_key: bool = False  # whether requests need an API key

    def connection(self, timeout: float = TIMEOUT_S) -> http.client.HTTPConnection:
        """Returns a connection that does not check the gateway's certificate, because this machine started the gateway."""
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return http.client.HTTPSConnection(str(parts.hostname), parts.port, timeout=timeout, context=context)
        return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=timeout)

    def curl_flags(self) -> list[str]:
        """Returns the flags with which curl trusts the certificate and sends the API key."""
        flags = self._trust_flags()
        return [*flags, f'-H "authorization: Bearer ${KEY_VARIABLE}"'] if self.needs_key else flags

    def _trust_flags(self) -> list[str]:
        if not self.certificate:
            return []
        parts = urlsplit(self.url)
        context = ssl.create_default_context(cafile=self.certificate)
        context.verify_flags = ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        connection = http.client.HTTPSConnection(str(parts.hostname), parts.port, timeout=TIMEOUT_S, context=context)
        try:
            connection.connect()
        except OSError:  # the certificate names another host, for example
            return ["--insecure"]
        finally:
            connection.close()
        return ["--cacert", shlex.quote(self.certificate)]


def body_of(kind: Kind, model: str, question: str) -> dict[str, Any]:
    if kind == "embedding":
        return {"model": model, "input": question}
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": question}]} if kind == "chat" else {"prompt": question}
    return {"model": model, **prompt, "temperature": 0}


def first_question(kind: Kind) -> str:
    return PROMPT if kind == "completion" else QUESTION


def curl(endpoint: Endpoint, kind: Kind, model: str) -> str:
    """Returns a curl command for a POSIX shell."""
    question = PROMPT if kind == "completion" else OTHER_QUESTION
    body = json.dumps(body_of(kind, model, question), ensure_ascii=False)
    flags = [*endpoint.curl_flags(), "-H 'content-type: application/json'", f"-d {shlex.quote(body)}"]
    return f"curl {' '.join([f'{endpoint.url}{PATHS[kind]}', *flags])}"


def ask(endpoint: Endpoint, kind: Kind, model: str, key: str, write: Write) -> str:
    """Sends the first request and writes the completion piece by piece. Returns the completion.

    Args:
        key: API key; "" if the gateway needs no key.

    Raises:
        RequestRefused: the gateway refuses the request.
        RequestFailed: the connection ends, or a service is unavailable.
    """
    body = body_of(kind, model, first_question(kind))
    if kind != "embedding":
        body |= {"stream": True, "max_tokens": 64}
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    connection = endpoint.connection()
    try:
        connection.request("POST", PATHS[kind], json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response.status, response.read())
        if kind == "embedding":
            completion = f"an embedding of {len(json.loads(response.read())['data'][0]['embedding'])} numbers"
            write(completion)
            return completion
        completion = ""
        for piece in _pieces(response):
            write(piece)
            completion += piece
        return completion
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: the body ended early
        raise RequestFailed(str(error) or type(error).__name__) from None
    finally:
        connection.close()


def _refusal(status: int, body: bytes) -> RequestRefused | RequestFailed:
    try:
        reason = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = body.decode(errors="replace")
    return (RequestFailed if status >= 500 else RequestRefused)(f"the gateway answered {status}: {reason}")


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yields the text of each event. Raises RequestFailed if the stream ends with an error or without its last event."""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RequestFailed(str(event["error"]["message"]))
        for choice in event["choices"]:
            yield choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    raise RequestFailed("the stream ended early")
