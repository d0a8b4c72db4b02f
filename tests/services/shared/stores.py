"""Download sources on loopback: the parts of the hub's, S3's and Google's APIs that services/shared/fetch uses.

Tests can make a source interrupt or pause a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PART = 1 << 16  # size of a part of an S3 object


@dataclass
class ReceivedRequest:
    """An HTTP request that a Server has received."""

    method: str
    path: str  # without the query
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """An HTTP response of a Server."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    size: int | None = None  # value of Content-Length if there is no body


@dataclass
class Server:
    """The state of an HTTP server."""

    answer: Callable[[ReceivedRequest], Answer]  # makes the response to a request
    received: list[ReceivedRequest] = field(default_factory=list)  # received requests
    cut: dict[str, int] = field(default_factory=dict)  # request path → bytes after which the next response is cut off
    paused: set[str] = field(default_factory=set)  # request paths; the second half of a response is sent after `resume` is set
    resume: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def got(self, path: str) -> list[ReceivedRequest]:
        return [each for each in self.received if each.path == path and each.method == "GET"]

    def wait_for(self, path: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.got(path):
            assert time.monotonic() < deadline, f"no request for {path}"
            time.sleep(0.01)


@contextmanager
def serve(answer: Callable[[ReceivedRequest], Answer], context: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Serves HTTP on a free loopback port, with TLS if there is a context."""
    served = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            at = urllib.parse.urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            received = ReceivedRequest(
                self.command, urllib.parse.unquote(at.path), dict(urllib.parse.parse_qsl(at.query)), headers, body
            )
            served.received.append(received)
            self._send(received, served.answer(received))

        do_POST = do_HEAD = do_GET

        def _send(self, received: ReceivedRequest, answer: Answer) -> None:
            body, status = answer.body, answer.status
            if (wanted := received.headers.get("range")) and status == 200:
                body, status = body[int(wanted.removeprefix("bytes=").rstrip("-")) :], 206
            self.send_response(status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if answer.size is None else answer.size))
            self.end_headers()
            if received.method == "HEAD":
                return
            if (cut := served.cut.pop(received.path, None)) is not None:
                self.wfile.write(body[:cut])
                self.close_connection = True
                return
            half = len(body) // 2 if received.path in served.paused else len(body)
            self.wfile.write(body[:half])
            self.wfile.flush()
            if half < len(body):
                served.resume.wait(20)
                self.wfile.write(body[half:])

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:  # the client was killed
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    served.url = f"http{'s' if context else ''}://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        served.resume.set()
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Hub:
    """The API of the hub."""

    commits: dict[str, tuple[str, dict[str, bytes]]]  # revision → commit and files
    token: str = ""  # token that requests must have; empty if the models are public
    redirect_url: str = ""  # URL of another server to which large files are redirected, like a CDN

    def __call__(self, received: ReceivedRequest) -> Answer:
        if self.token and received.headers.get("authorization") != f"Bearer {self.token}":
            return Answer(401, b"gated: ask for access")
        parts = received.path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            commit, files = self.commits[parts[5]]
            return Answer(body=json.dumps({"sha": commit, "siblings": [self._about(*each) for each in files.items()]}).encode())
        commit, name = parts[3], "/".join(parts[4:])
        (files,) = [files for known, files in self.commits.values() if known == commit]
        if self.redirect_url and name.endswith(".safetensors"):
            return Answer(302, headers={"Location": f"{self.redirect_url}/cdn/{name}"})
        return Answer(body=files[name])

    def _about(self, name: str, data: bytes) -> dict[str, Any]:
        about: dict[str, Any] = {"rfilename": name, "size": len(data)}
        about["blobId"] = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        if name.endswith(".safetensors"):
            about["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return about


@dataclass
class Bucket:
    """The API of S3 for one bucket. Listings have two objects per page."""

    objects: dict[str, bytes]  # by key
    parts: frozenset[str] = frozenset()  # keys of objects that were uploaded in parts
    access: str = ""  # access key that may read
    first: int = PART  # size of the first part
    reports_parts: bool = True  # whether a response has the length of a part and the number of parts

    def tag(self, key: str) -> str:
        data = self.objects[key]
        if key not in self.parts:
            return hashlib.md5(data).hexdigest()
        each = [hashlib.md5(part).digest() for part in self._parts(key)]
        return f"{hashlib.md5(b''.join(each)).hexdigest()}-{len(each)}"

    def _parts(self, key: str) -> list[bytes]:
        data = self.objects[key]
        return [data[: self.first], *(data[at : at + PART] for at in range(self.first, len(data), PART))]

    def __call__(self, received: ReceivedRequest) -> Answer:
        if f"Credential={self.access}/" not in received.headers.get("authorization", f"Credential={self.access}/"):
            return Answer(403, b"<Error><Code>InvalidAccessKeyId</Code></Error>")
        key = received.path.partition("/")[2].partition("/")[2]
        if "list-type" in received.query:
            return Answer(body=self._listed(received.query))
        if received.headers.get("if-match", f'"{self.tag(key)}"') != f'"{self.tag(key)}"':
            return Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        headers = {"ETag": f'"{self.tag(key)}"'}
        if (number := received.query.get("partNumber")) and self.reports_parts:
            parts = self._parts(key)
            return Answer(size=len(parts[int(number) - 1]), headers={**headers, "x-amz-mp-parts-count": str(len(parts))})
        return Answer(body=self.objects[key], headers=headers)

    def _listed(self, query: dict[str, str]) -> bytes:
        keys = [key for key in sorted(self.objects) if key.startswith(query["prefix"])]
        first = int(query.get("continuation-token", "0"))
        page = "".join(
            f"<Contents><Key>{key}</Key><ETag>&quot;{self.tag(key)}&quot;</ETag><Size>{len(self.objects[key])}</Size></Contents>"
            for key in keys[first : first + 2]
        )
        more = first + 2 < len(keys)
        end = f"<IsTruncated>{str(more).lower()}</IsTruncated>" + (
            f"<NextContinuationToken>{first + 2}</NextContinuationToken>" * more
        )
        return f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{page}{end}</ListBucketResult>'.encode()


@dataclass
class GoogleBucket:
    """The API of Google Cloud Storage for one bucket."""

    objects: dict[str, bytes]  # by name
    token: str  # bearer token that may read

    def __call__(self, received: ReceivedRequest) -> Answer:
        if received.headers.get("authorization") != f"Bearer {self.token}":
            return Answer(401, b"no such token")
        key = received.path.partition("/o/")[2]
        if key:
            assert received.query == {"alt": "media", "generation": "7"}
            return Answer(body=self.objects[key])
        keys = [key for key in sorted(self.objects) if key.startswith(received.query["prefix"])]
        first = int(received.query.get("pageToken", "0"))
        items = [
            {
                "name": key,
                "size": str(len(data)),
                "generation": "7",
                "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            }
            for key, data in ((key, self.objects[key]) for key in keys[first : first + 2])
        ]
        page: dict[str, Any] = {"items": items}
        if first + 2 < len(keys):
            page["nextPageToken"] = str(first + 2)
        return Answer(body=json.dumps(page).encode())
