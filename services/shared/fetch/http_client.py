"""An HTTP client that retries, trusts the certificates in CA_FILE, and after a redirect sends no token to another host."""

from __future__ import annotations

import functools
import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

TIMEOUT_S = 60.0  # seconds without a byte from the server after which a request fails
Headers = Mapping[str, str]
T = TypeVar("T")


def patience_s() -> float:
    """Returns the seconds without progress after which retry() raises the last error."""
    return float(os.environ.get("FETCH_PATIENCE_S", "300"))


class SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects. Of the caller's headers, only Range is sent to another scheme or host."""

    def redirect_request(self, request: Any, fp: Any, code: Any, msg: Any, headers: Any, url: str) -> Any:
        redirected = super().redirect_request(request, fp, code, msg, headers, url)
        if redirected is not None and urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(request.full_url)[:2]:
            for name, value in request.unredirected_hdrs.items():
                redirected.add_unredirected_header(name, value)
        return redirected


@functools.cache
def opener() -> urllib.request.OpenerDirector:
    context = ssl.create_default_context()
    if os.environ.get("CA_FILE"):
        context.load_verify_locations(os.environ["CA_FILE"])
    return urllib.request.build_opener(SameHost, urllib.request.HTTPSHandler(context=context))


def open_url(url: str, headers: Headers, body: bytes | None = None, method: str | None = None) -> Any:
    """Sends a request to an http:, https: or file: URL and returns the response.

    Raises:
        OSError, HTTPException: the request fails. The message of an HTTPError includes the start of the server's response.
    """
    request = urllib.request.Request(url, data=body, method=method)
    for name, value in headers.items():
        if name.lower() == "range":
            request.add_header(name, value)
        else:
            request.add_unredirected_header(name, value)
    try:
        return opener().open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.msg = f"{error.msg} from {urllib.parse.urlsplit(url).netloc}: {error.read(500).decode(errors='replace')}"
        raise


def retry(action: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """Repeats an action after each OSError or HTTPException, with growing pauses of 1 to 30 s.

    Args:
        progress: returns a number that changes if there was progress, e.g. the downloaded bytes.

    Raises:
        OSError, HTTPException: the last error, after patience_s() without progress. An HTTPError is raised immediately if its
            status is not 408, 429, 500, 502, 503 or 504.
    """
    pause, since, before = 1.0, time.monotonic(), progress()
    while True:
        try:
            return action()
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code not in (408, 429, 500, 502, 503, 504):
                raise
            if progress() != before:
                pause, since, before = 1.0, time.monotonic(), progress()
            if time.monotonic() - since > patience_s():
                raise
            print(f"retrying in {pause:.0f} s: {error}", flush=True)
            time.sleep(min(pause, patience_s()))
            pause = min(pause * 2, 30)


def fetch_json(url: str, headers: Headers, body: bytes | None = None) -> Any:
    """Sends a request, with retries, and returns the JSON value of the response. Raises OSError or HTTPException."""

    def once() -> Any:
        with open_url(url, headers, body) as response:
            return json.load(response)

    return retry(once)


def encoded(query: Mapping[str, str]) -> str:
    return urllib.parse.urlencode(sorted(query.items()), quote_via=urllib.parse.quote, safe="-_.~")
