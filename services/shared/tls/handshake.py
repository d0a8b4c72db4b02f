"""Why no TLS comes about with a peer: a connection of its own, for the words that gRPC keeps to itself."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

from services.shared.tls.roles import Role

LIMIT_S = 3.0  # of the whole
REFUSED_S = 0.5  # in which a peer has said that it does not take what it was shown, after a handshake that is over here


async def why_refused(target: str, client: ssl.SSLContext, role: Role) -> str:
    """In a sentence that says which side does not take the other's certificate; "": nobody is there, or all is well. target:
    host:port."""
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
        return f"its certificate is not taken: {error.verify_message}"
    except ssl.SSLError as error:
        return f"the handshake fails: {error.reason or error}"
    except (OSError, ValueError):  # asyncio's timeout among them
        return ""


async def _objection(reader: asyncio.StreamReader) -> str:
    """gRPC's server says nothing to who is not taken; to others it speaks first."""
    try:
        async with asyncio.timeout(REFUSED_S):
            said = await reader.read(1)
    except TimeoutError:
        return ""
    except ssl.SSLError as error:
        return f"it does not take this process's certificate: {error.reason or error}"
    except ConnectionError:
        said = b""
    return "" if said else "it ends the connection when it has seen this process's certificate"
