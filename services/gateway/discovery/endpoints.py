"""The endpoints of a service, as a map of address to ready. An address is "host:port", with an IPv6 host in brackets.

An endpoint that is not ready gets no new work, and its running work continues. An endpoint that is absent is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Endpoints = Mapping[str, bool]


def join(host: str, port: int) -> str:
    """Returns "host:port". `host` may be a name, an IPv4 address or an IPv6 address without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def merge(parts: Iterable[Endpoints]) -> dict[str, bool]:
    """Merges endpoints. An address is ready if it is ready in any part."""
    merged: dict[str, bool] = {}
    for part in parts:
        for address, ready in part.items():
            merged[address] = merged.get(address, False) or ready
    return merged
