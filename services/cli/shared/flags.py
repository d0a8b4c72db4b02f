"""The flags of every command that calls a gateway: URL, API key and timeout of the server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit

DEFAULT_URL = "http://127.0.0.1:8000"
URL, KEY = "ROOTSTOCK_URL", "ROOTSTOCK_API_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """The server that a command calls."""

    url: str  # without /v1 and without a trailing slash
    key: str = field(default="", repr=False)  # API key; empty for none
    timeout_s: float = 60.0  # longest wait for a connection and between two pieces of a response


def add_server_flags(parser: argparse.ArgumentParser, timeout_s: float = 60.0) -> None:
    """Adds the flags of the server. No flag takes the API key, because other users of a machine see a process's arguments."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", help=f"URL of the server, with or without /v1; default: ${URL}, else {DEFAULT_URL}")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"file with the API key; default: ${KEY}, else none")
    group.add_argument(
        "--timeout", type=_seconds, default=timeout_s, metavar="S", help="seconds to wait for the server (%(default)g)"
    )


def target_of(args: argparse.Namespace, environment: Mapping[str, str]) -> Target:
    """Returns the server that flags and environment name. Raises CommandFailed for a wrong URL or key."""
    url = (args.url or environment.get(URL) or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    if not _is_url(url):
        raise CommandFailed(Exit.USAGE, f"{url} is not the URL of a server: give one as --url {DEFAULT_URL}.")
    return Target(url, _key(args.api_key_file, environment), args.timeout)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and _is_visible_ascii(host + parts.path)
    except ValueError:  # the port is not a number, or the host's name has an empty or too long part
        return False


def _is_visible_ascii(text: str) -> bool:
    return all(32 < ord(char) < 127 for char in text)


def _key(file: Path | None, environment: Mapping[str, str]) -> str:
    """Returns the API key, or an empty string. Raises CommandFailed if the file is unreadable or the key is not visible ASCII."""
    if file is None and not environment.get(KEY):
        return ""
    try:
        key = environment[KEY].strip() if file is None else file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(Exit.USAGE, f"{file} cannot be read ({error}): name a file that contains only the API key.") from None
    if not key or not _is_visible_ascii(key):
        raise CommandFailed(Exit.USAGE, f"{file or KEY} has no valid API key: it must contain only the key, in visible ASCII.")
    return key


def json_object(text: str) -> dict[str, Any]:
    """Parses the value of a flag as a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("must be above 0 and below 1,000,000")
    return value
