"""What a certificate says to others: learnt by a handshake of a process with itself, in memory, before anybody else is met."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

FLIGHTS = 8  # of a handshake, at most


@dataclass(frozen=True, slots=True)
class Named:
    """names: DNS names of the certificate. not_after: when it expires, in seconds of Unix time."""

    names: frozenset[str]
    not_after: float


def shown(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> Named:
    """What each side of these sees of the other. Raises ssl.SSLError where one does not take the other, for that name or for
    what its certificate may be used for."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    calling = client.wrap_bio(to_client, to_server, server_hostname=name)
    waiting = [calling, serving]
    for _ in range(FLIGHTS):
        for side in tuple(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
    return names_of(serving)


def names_of(secured: ssl.SSLObject | ssl.SSLSocket) -> Named:
    """Of the other side's certificate, which was asked for. Raises ssl.SSLError where it has shown none."""
    found = secured.getpeercert()
    if not found:
        raise ssl.SSLError("no certificate was shown")
    names = frozenset(str(entry[1]) for entry in found.get("subjectAltName", ()) if entry[0] == "DNS")
    return Named(names, float(ssl.cert_time_to_seconds(str(found["notAfter"]))))
