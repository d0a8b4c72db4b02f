"""python -m services.gateway.keys new NAME: a fresh API key, shown once, and the entry that makes the file of keys accept it."""

from __future__ import annotations

import argparse
import secrets
import sys

import orjson

from services.gateway.keys.key_table import BadKeys, digest_of, parse_keys

PREFIX = "rsk-"
SECRET_BYTES = 32


def entry_of(name: str, secret: str, limits: dict[str, float | int | None]) -> bytes:
    """As it stands in the list "keys" of the file. Raises BadKeys."""
    given = {field: value for field, value in limits.items() if value is not None}
    entry = {"name": name, "sha256": [digest_of(secret.encode()).hex()], **given}
    parse_keys([orjson.dumps({"keys": [entry]})])
    return orjson.dumps(entry)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.gateway.keys", description="API keys (docs/keys.md).")
    new = parser.add_subparsers(required=True, metavar="COMMAND").add_parser("new", help="make a key and the entry for it")
    new.add_argument("name", metavar="NAME", help="of the key's owner: A-Z, a-z, 0-9, '.', '_' and '-'")
    new.add_argument("--weight", type=float, help="share while requests wait; 1 if not given")
    new.add_argument("--priority", type=int, help="of requests that give none, and the most urgent that may be asked for")
    new.add_argument("--requests-per-minute", type=int)
    new.add_argument("--tokens-per-minute", type=int, help="of prompts and answers")
    new.add_argument("--max-concurrent", type=int, help="requests at once")
    given = vars(parser.parse_args(argv))
    name, secret = given.pop("name"), PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    try:
        entry = entry_of(name, secret, given)
    except BadKeys as error:
        print(f"{parser.prog}: {str(error).removeprefix('keys[0].')}", file=sys.stderr)
        return 2
    print(f"key, for its owner alone: {secret}", file=sys.stderr)
    print(entry.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
