"""Serves an HTML file of this folder with a Content-Security-Policy, which allows the page to send requests only to its gateway.

The policy lists the hashes of the file's script and style. A browser therefore runs no other script, even if one is injected.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from starlette.responses import Response

PLAYGROUND, REFERENCE = "playground.html", "reference.html"
_FOLDER = Path(__file__).parent
_PAGE_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache"}


def static_page(name: str) -> Response:
    """Returns the response with the page. The same response can be sent to several clients.

    Raises:
        ValueError: The file does not have exactly one script and one style.
    """
    text = (_FOLDER / name).read_text()
    return Response(text, headers={"content-security-policy": _policy(text), **_PAGE_HEADERS}, media_type="text/html")


def _policy(text: str) -> str:
    rules = {
        "default-src": "'none'",
        "script-src": _hash_of("script", text),
        "style-src": _hash_of("style", text),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash_of(tag: str, text: str) -> str:
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    if len(bodies) != 1:
        raise ValueError(f"the page must have exactly one <{tag}> element, but it has {len(bodies)}")
    return f"'sha256-{b64encode(sha256(bodies[0].encode()).digest()).decode()}'"
