"""The command `rootstock keys`, also `python -m rootstock_llm.services.gateway.keys`.

It makes API keys and lists those of a file.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence

import orjson

from rootstock_llm.services.gateway.keys.flags import add_flags
from rootstock_llm.services.gateway.keys.key_table import ApiKey, BadKeys, KeyFile, digest_of, parse_keys, time_of

PREFIX = "rsk-"  # prefix of every generated secret
SECRET_BYTES = 32  # random bytes of a secret
COLUMNS = ("name", "state", "expires", "models", "weight", "priority", "requests/min", "tokens/min", "concurrent")


def entry_of(name: str, secret: str, given: dict[str, object]) -> bytes:
    """Returns the JSON entry of a new API key for the list "keys" of a file. Raises BadKeys.

    Args:
        given: Values of the other fields. A field with the value None is left out.
    """
    entry: dict[str, object] = {"name": name, "sha256": [digest_of(secret.encode()).hex()]}
    entry.update({field: value for field, value in given.items() if value is not None})
    parse_keys([orjson.dumps({"keys": [entry]})])
    return orjson.dumps(entry)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status: 2 if an argument or the file is invalid, otherwise 0."""
    try:
        return _list(args) if args.action == "list" else _new(args)
    except BadKeys as error:
        print(f"rootstock keys: {str(error).removeprefix('keys[0].')}", file=sys.stderr)
        return 2


def _new(args: argparse.Namespace) -> int:
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    names = ("weight", "priority", "requests_per_minute", "tokens_per_minute", "max_concurrent", "expires")
    given = {name: getattr(args, name) for name in names}
    given["models"] = None if args.models is None else [name.strip() for name in args.models.split(",")]
    entry = entry_of(args.name, secret, given)
    print(f"API key, give it to its owner only: {secret}", file=sys.stderr)
    print(entry.decode())
    return 0


def _list(args: argparse.Namespace) -> int:
    rows = [_row(key, time.time()) for key in KeyFile(args.file).table]
    if args.json:
        for row in rows:
            print(orjson.dumps(dict(zip(COLUMNS, row, strict=True))).decode())
        return 0
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(key: ApiKey, now: float) -> tuple[str, ...]:
    """Returns the cells of COLUMNS for an API key. "-" means no limit."""
    limits = (key.priority, key.requests_per_minute, key.tokens_per_minute, key.max_concurrent)
    return (
        key.name,
        "expired" if key.has_expired(now) else "valid",
        "never" if key.expires is None else time_of(key.expires),
        "all" if key.models is None else ",".join(sorted(key.models)),
        f"{key.weight:g}",
        *("-" if limit is None else str(limit) for limit in limits),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rootstock_llm.services.gateway.keys", description="Makes and lists API keys."
    )
    add_flags(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
