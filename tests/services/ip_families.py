"""Addresses of this machine, which may lack IPv6."""

from __future__ import annotations

from pathlib import Path

_INTERFACES = Path("/proc/net/if_inet6")  # absent or empty without IPv6
_HAS_IPV6 = _INTERFACES.exists() and bool(_INTERFACES.read_text())
EVERYWHERE = "::" if _HAS_IPV6 else "0.0.0.0"
LOOPBACKS = ("127.0.0.1", "[::1]") if _HAS_IPV6 else ("127.0.0.1",)
