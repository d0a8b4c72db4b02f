"""The flags that every command has: which server, with which key, for how long."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.cli.shared.exits import CommandFailed, Exit

DEFAULT_URL = "http://127.0.0.1:8000"
URL, KEY = "ROOTSTOCK_URL", "ROOTSTOCK_API_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """url: without /v1 and without a slash at its end. key: "" for none. timeout_s: of an answer, between two pieces of it."""

    url: str
    key: str = field(default="", repr=False)
    timeout_s: float = 60.0


def add_server_flags(parser: argparse.ArgumentParser, timeout_s: float = 60.0) -> None:
    """The key is no flag: other users of a machine see a process's arguments."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", help=f"the server's, with or without /v1; default: ${URL}, else {DEFAULT_URL}")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"holds the API key; default: ${KEY}, else none")
    group.add_argument(
        "--timeout", type=_seconds, default=timeout_s, metavar="S", help="seconds to wait for the server (%(default)g)"
    )


def target_of(args: argparse.Namespace, environment: Mapping[str, str]) -> Target:
    """Raises CommandFailed."""
    url = (args.url or environment.get(URL) or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    if not _is_url(url):
        raise CommandFailed(Exit.USAGE, f"{url} is no URL of a server: give one as --url {DEFAULT_URL}.")
    return Target(url, _key(args.api_key_file, environment), args.timeout)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


def _key(file: Path | None, environment: Mapping[str, str]) -> str:
    """ "" for none. Raises CommandFailed for one that no header can hold."""
    if file is None and not environment.get(KEY):
        return ""
    try:
        key = environment[KEY].strip() if file is None else file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(Exit.USAGE, f"{file} cannot be read ({error}): name a file with the key alone.") from None
    if not key or any(not 32 < ord(char) < 127 for char in key):
        raise CommandFailed(Exit.USAGE, f"{file or KEY} holds no API key: it should hold the key alone.")
    return key


def json_object(text: str) -> dict[str, Any]:
    """A flag's value."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("must be above 0")
    return value
