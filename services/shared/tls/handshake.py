"""Test handshakes: a process's certificate against itself in memory, and a connection that finds why gRPC's handshake fails."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass

from rootstock_llm.services.shared.tls.roles import Role

LIMIT_S = 3.0  # time limit of a diagnosis
REFUSED_S = 0.5  # time in which a server refuses the client's certificate after the handshake has ended here
FLIGHTS = 8  # largest number of message flights of a handshake


@dataclass(frozen=True, slots=True)
class Named:
    """The names and the expiry of a certificate."""

    names: frozenset[str]  # DNS names
    not_after: float  # Unix time of its expiry


def shown(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> Named:
    """Performs a handshake between two contexts in memory. Returns the names in the client's certificate.

    Raises:
        ssl.SSLError: one side refuses the other's certificate, its name, or its permitted uses.
    """
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
    """Returns the names in the other side's certificate. Raises ssl.SSLError if it has shown no certificate."""
    found = secured.getpeercert()
    if not found:
        raise ssl.SSLError("no certificate was shown")
    names = frozenset(str(entry[1]) for entry in found.get("subjectAltName", ()) if entry[0] == "DNS")
    return Named(names, float(ssl.cert_time_to_seconds(str(found["notAfter"]))))


async def why_refused(target: str, client: ssl.SSLContext, role: Role) -> str:
    """Connects to a server and returns why the TLS handshake fails.

    Args:
        target: host:port.
        role: role that the server's certificate must name.

    Returns:
        A clause that says which side refuses the other's certificate; "" if the handshake succeeds or no server answers.
    """
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=client, server_hostname=role.value)
            try:
                return await _objection(reader)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except ssl.SSLCertVerificationError as error:
        return f"the server's certificate is refused: {error.verify_message}"
    except ssl.SSLError as error:
        return f"the handshake fails: {error.reason or error}"
    except (OSError, ValueError):  # includes asyncio's TimeoutError
        return ""


async def _objection(reader: asyncio.StreamReader) -> str:
    """Returns why the server refuses the client, or "". A gRPC server sends the first bytes only to clients that it accepts."""
    try:
        async with asyncio.timeout(REFUSED_S):
            said = await reader.read(1)
    except TimeoutError:
        return ""
    except ssl.SSLError as error:
        return f"the server refuses this process's certificate: {error.reason or error}"
    except ConnectionError:
        said = b""
    return "" if said else "the server closes the connection after it has received this process's certificate"
