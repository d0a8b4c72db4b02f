"""Checks a Redis server over one connection with short timeouts. Uses only the standard library."""

from __future__ import annotations

import socket
import ssl
import urllib.parse
from io import BufferedRWPair

from .install import RedisState

TIMEOUT_S = 5.0
KEY, LIVES_S = "rootstock:diagnosis", "60"  # key of the test write, and its lifetime in seconds


class Refused(Exception):
    """Redis responds with an error, whose text is the message."""


def probe(url: str) -> RedisState:
    """Returns the state of a Redis server. Does not raise: failures are in the state, without the password of the URL."""
    parts = urllib.parse.urlsplit(url)
    address = f"{parts.hostname}:{parts.port or 6379}"
    state = RedisState(address)
    try:
        with _connect(parts) as connection, connection.makefile("rwb") as stream:
            if parts.password is not None:
                login = [urllib.parse.unquote(each) for each in (parts.username or "", parts.password) if each]
                _call(stream, "AUTH", *login)
            info = _info(stream)
            state = RedisState(
                address,
                policy=info.get("maxmemory_policy", ""),
                memory=int(info.get("maxmemory", "0")),
                role=info.get("role", "master"),
            )
            _call(stream, "SET", KEY, "1", "EX", LIVES_S)
            _call(stream, "DEL", KEY)
    except (OSError, ValueError, EOFError, Refused) as error:
        return RedisState(address, str(error) or repr(error), policy=state.policy, memory=state.memory, role=state.role)
    return RedisState(address, wrote=True, policy=state.policy, memory=state.memory, role=state.role)


def _connect(parts: urllib.parse.SplitResult) -> socket.socket:
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("the URL must begin with redis:// or rediss://")
    plain = socket.create_connection((parts.hostname, parts.port or 6379), TIMEOUT_S)
    if parts.scheme == "redis":
        return plain
    files = dict(urllib.parse.parse_qsl(parts.query))
    context = ssl.create_default_context(cafile=files.get("ssl_ca_certs"))
    if "ssl_certfile" in files:
        context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"))
    if "ssl_ca_certs" not in files:  # the probe tests whether it can connect and write; it does not test the certificate
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(plain, server_hostname=parts.hostname)


def _call(stream: BufferedRWPair, *words: str) -> str:
    encoded = [word.encode() for word in words]
    stream.write(b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(each), each) for each in encoded))
    stream.flush()
    line = stream.readline()
    if not line:
        raise EOFError("the server closed the connection")
    kind, text = line[:1], line[1:].strip().decode(errors="replace")
    if kind == b"-":
        raise Refused(text)
    if kind == b"$":
        return "" if int(text) < 0 else stream.read(int(text) + 2)[:-2].decode(errors="replace")
    return text


def _info(stream: BufferedRWPair) -> dict[str, str]:
    """Returns the fields of INFO; empty if this user may not call INFO."""
    try:
        return _sections(_call(stream, "INFO"))
    except Refused as refused:
        if "NOPERM" in str(refused) or "unknown command" in str(refused):
            return {}
        raise


def _sections(info: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in info.splitlines() if ":" in line)
    return {key: value.strip() for key, value in pairs}
