"""The control token of operators' calls: its configuration, its header, and the addresses that need no token."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

_SCHEME = b"bearer"


def read_token(token: str, token_file: str) -> str:
    """Returns the configured control token, or "" if none is configured.

    Args:
        token: value of the setting control_token.
        token_file: value of the setting control_token_file.

    Raises:
        ValueError: both settings are set, or the file is not readable or empty.
    """
    if not token_file:
        return token.strip()
    if token:
        raise ValueError("control_token and control_token_file are both set; set only one")
    try:
        read = Path(token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read control_token_file {token_file}: {error}") from None
    if not read:
        raise ValueError(f"control_token_file {token_file} is empty")
    return read


def require_token_beyond_loopback(setting: str, host: str, token: str) -> None:
    """Checks that other machines cannot call the control service without a token.

    Args:
        setting: name of the setting with the listen address, for the message.
        host: listen address.

    Raises:
        ValueError: the host is not a loopback address and there is no token.
    """
    if not token and not is_loopback(host):
        raise ValueError(f"{setting} {host} is not a loopback address: set control_token or control_token_file")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listen address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def authorization(token: str) -> str:
    """Returns the value of the authorization header or metadata with the token."""
    return f"Bearer {token}"


def accepts(token: str, given: bytes) -> bool:
    """Whether an authorization header has the control token, or no token is configured. The comparison takes constant time.

    Args:
        token: the configured token; "" if none is configured.
        given: value of the header.
    """
    if not token:
        return True
    scheme, _, sent = given.partition(b" ")
    equal = hmac.compare_digest(sent.strip(), token.encode())
    return equal and scheme.lower() == _SCHEME
