"""Strategies for broken bytes of a body or a request head: hostile values, invalid JSON and invalid HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

RAW = "\x00raw:"  # prefix of a string whose rest becomes part of the JSON text without quotes
HOSTILE = (
    *(None, True, False, 0, -1, 1 << 31, 1 << 63, 1 << 64, -(1 << 63) - 1, 1e308, 5e-324, -0.0, 0.5, float("nan"), float("inf")),
    *("", " ", "\x00", "\ud800", "\udfff\ud800", "e\u0301", "\U0001f468\u200d\U0001f469", "\u202e", "x" * 3000, "s0", "$$ANY$$"),
    *([], {}, [[]], [None], [{}], {"": None}, [0] * 300, ["a", 1], {"a": {"b": {"c": []}}}, {"type": "object"}),
    *(
        RAW + text
        for text in ("1e999", "-1e999", "1" * 400, "0." + "3" * 400, "[" * 900 + "]" * 900, '{"a":' * 500 + "1" + "}" * 500)
    ),
    *(
        RAW + text
        for text in ("[" * 3000 + "]" * 3000, '{"a":1,"a":2}', "'a'", "01", "+1", ".5", "nul", '"\\x"', '"\t"', "/**/1")
    ),
)


def raw_heads() -> st.SearchStrategy[bytes]:
    """Generates bytes that mostly begin like an HTTP request."""
    lines = st.sampled_from(
        [
            *(
                b"Host: a",
                b"Host: a\r\nHost: b",
                b"Content-Length: 5",
                b"Content-Length: -1",
                b"Content-Length: 99999999999999999999",
            ),
            *(
                b"Content-Length: 5, 5",
                b"Transfer-Encoding: chunked",
                b"Transfer-Encoding: gzip, chunked",
                b"Expect: 100-continue",
            ),
            *(
                b"Connection: upgrade\r\nUpgrade: h2c",
                b"Connection: upgrade\r\nUpgrade: websocket",
                b" folded",
                b"no colon",
                b":",
                b"a:\x00",
            ),
            *(b"X: " + b"y" * 9000, b"\xff: \xff", b"Connection: close", b"Connection: keep-alive", b"Trailer: a"),
        ]
    )
    targets = [
        b"/health",
        b"/v1/models",
        b"/generate",
        b"*",
        b"http://a/health",
        b"",
        b"/\xff",
        b"/%",
        b"/%00",
        b"/" + b"a" * 9000,
        b"/../..",
    ]
    first = st.builds(
        b"%b %b %b\r\n".__mod__,
        st.tuples(
            st.sampled_from([b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"\x16\x03\x01", b""]),
            st.sampled_from(targets),
            st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP", b""]),
        ),
    )
    tails = [
        b"{}",
        b"hello",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhel",
        b"FFFFFFFFFFFFFFFFF\r\n",
        b"-1\r\n",
        b"0\r\nX: y\r\n\r\n",
        b"",
    ]
    plain = st.sampled_from([b"POST /generate HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n", b"PUT /encode HTTP/1.0\r\n"])
    one = st.builds(
        lambda line, headers, end, tail: line + b"".join(header + b"\r\n" for header in headers) + end + tail,
        st.one_of(plain, first),
        st.lists(lines, max_size=4),
        st.sampled_from([b"\r\n", b"\r\n", b"\n", b""]),
        st.one_of(st.sampled_from(tails), st.binary(max_size=60)),
    )
    return st.one_of(st.lists(one, min_size=1, max_size=3).map(b"".join), st.binary(max_size=200))


def dumped(body: Any) -> bytes:
    """Returns the body as JSON text, which is invalid if the body has infinities, lone surrogates or RAW strings."""
    text = json.dumps(body)
    begin, end = '"' + json.dumps(RAW)[1:-1], '"'
    while (at := text.find(begin)) >= 0:
        stop = at + len(begin)
        while text[stop] != end or text[stop - 1] == "\\":
            stop += 1
        text = text[:at] + json.loads(text[at : stop + 1])[len(RAW) :] + text[stop + 1 :]
    return text.encode()


def spoil(body: dict[str, Any], wounds: list[tuple[int, Any]]) -> Any:
    """Returns a copy of the body with a few changed or added values.

    Args:
        wounds: (index of a value, new value) per change. The body itself has index 0; the last index adds a member.
    """
    copy = json.loads(json.dumps(body))
    for number, value in wounds:
        places: list[Callable[[Any], None]] = []
        _collect(copy, places)
        places.append(lambda other: copy.update({"unheard_of": other}))
        places[number % len(places)](deepcopy(value))
    return copy


def _collect(value: Any, places: list[Callable[[Any], None]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:20]:
        places.append(lambda other, key=key: value.__setitem__(key, other))  # type: ignore[misc]
        _collect(inner, places)


def cut_or_spoilt(body: bytes) -> st.SearchStrategy[bytes]:
    at = st.integers(0, len(body))
    return st.one_of(
        at.map(lambda end: body[:end]),
        st.builds(lambda i, junk: body[:i] + junk + body[i:], at, st.binary(min_size=1, max_size=4)),
    )


def broken(body: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(
        cut_or_spoilt(body),
        st.sampled_from([b"\xef\xbb\xbf" + body, body + body, body + b" x", body.decode().encode("utf-16"), b"[" + body + b"]"]),
        st.sampled_from([body[:-1] + b',"model":7}', b'{"stream":true,"stream":false,' + body[1:], b"", b"null", b'"a"', b"1"]),
    )
