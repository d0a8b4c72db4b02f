"""Test handshakes: in memory, to check this process's certificate, and over a connection, to find why gRPC's handshake fails."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass

from rootstock_llm.services.shared.tls.roles import Role

LIMIT_S = 3.0  # time limit of a diagnosis
# Seconds to wait for the server's refusal of the client's certificate. In TLS 1.3, it arrives after the end of the handshake.
REFUSAL_S = 0.5
FLIGHTS = 8  # largest number of message flights of a handshake


@dataclass(frozen=True, slots=True)
class CertificateNames:
    """The names and the expiry of a certificate."""

    names: frozenset[str]  # DNS names
    not_after: float  # Unix time of its expiry


def handshake_in_memory(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> CertificateNames:
    """Performs a handshake between two contexts in memory. Returns the names and the expiry of the client's certificate.

    Raises:
        ssl.SSLError: one context refuses the other's certificate, its name, or its permitted uses.
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


def names_of(secured: ssl.SSLObject | ssl.SSLSocket) -> CertificateNames:
    """Returns the names and the expiry of the other side's certificate. Raises ssl.SSLError if that side has sent none."""
    found = secured.getpeercert()
    if not found:
        raise ssl.SSLError("the other side has sent no certificate")
    names = frozenset(str(entry[1]) for entry in found.get("subjectAltName", ()) if entry[0] == "DNS")
    return CertificateNames(names, float(ssl.cert_time_to_seconds(str(found["notAfter"]))))


async def handshake_fault(target: str, client: ssl.SSLContext, role: Role) -> str:
    """Connects to a server and returns why the TLS handshake fails.

    Args:
        target: host:port.
        role: role that the server's certificate must name.

    Returns:
        A clause with the fault, such as the side that refuses the certificate; "" if the handshake succeeds, or if there is no
        connection.
    """
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=client, server_hostname=role.value)
            try:
                return await _server_refusal(reader)
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


async def _server_refusal(reader: asyncio.StreamReader) -> str:
    """Returns why the server refuses the client, or "". A gRPC server that accepts the client sends the first bytes."""
    try:
        async with asyncio.timeout(REFUSAL_S):
            received = await reader.read(1)
    except TimeoutError:
        return ""
    except ssl.SSLError as error:
        return f"the server refuses this process's certificate: {error.reason or error}"
    except ConnectionError:
        received = b""
    return "" if received else "the server closes the connection after it has received this process's certificate"
