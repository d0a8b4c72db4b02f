"""Endpoints of a service: address → ready. An address is "host:port", IPv6 hosts in brackets.

Not ready: new work goes elsewhere; what runs there goes on. Absent: gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Endpoints = Mapping[str, bool]


def join(host: str, port: int) -> str:
    """ "host:port". `host` may be a name, an IPv4 or a bare IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def merge(parts: Iterable[Endpoints]) -> dict[str, bool]:
    """An address is ready where any part says so."""
    merged: dict[str, bool] = {}
    for part in parts:
        for address, ready in part.items():
            merged[address] = merged.get(address, False) or ready
    return merged
