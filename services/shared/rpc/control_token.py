"""The token of operators' calls: where it comes from, how it travels, and which addresses may do without one."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

_SCHEME = b"bearer"


def read_token(token: str, token_file: str) -> str:
    """The configured token, "" for none. Raises ValueError if both are set, or the file cannot be read or holds none."""
    if not token_file:
        return token.strip()
    if token:
        raise ValueError("control_token and control_token_file are both set; one is enough")
    try:
        read = Path(token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read control_token_file {token_file}: {error}") from None
    if not read:
        raise ValueError(f"control_token_file {token_file} is empty")
    return read


def require_token_beyond_loopback(setting: str, host: str, token: str) -> None:
    """Raises ValueError if others than this machine could operate the service without a token. setting: the host's name."""
    if not token and not is_loopback(host):
        raise ValueError(f"{setting} {host} is no loopback address: set control_token or control_token_file")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def authorization(token: str) -> str:
    """The value of the authorization header or metadata that carries the token."""
    return f"Bearer {token}"


def accepts(token: str, given: bytes) -> bool:
    """Whether an authorization value carries the token; True where there is none to carry. Takes the same time for any guess."""
    if not token:
        return True
    scheme, _, guess = given.partition(b" ")
    equal = hmac.compare_digest(guess.strip(), token.encode())
    return equal and scheme.lower() == _SCHEME
