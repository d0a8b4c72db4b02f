"""The flags of `rootstock keys`. This module imports only the standard library, because the light `rootstock` client loads it."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    below = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = below.add_parser("new", help="make an API key and its entry for the file of API keys", allow_abbrev=False)
    new.add_argument("name", metavar="NAME", help="name of the API key: A-Z, a-z, 0-9, '.', '_' and '-'")
    new.add_argument("--weight", type=float, help="weight of the API key's share of the workers while requests wait; default 1")
    new.add_argument(
        "--priority", type=int, help="default priority of the API key's requests; they cannot have a more urgent one"
    )
    new.add_argument("--requests-per-minute", type=int, help="requests that may begin within a minute; default no limit")
    new.add_argument("--tokens-per-minute", type=int, help="tokens of prompts and completions within a minute; default no limit")
    new.add_argument("--max-concurrent", type=int, help="requests that may run at once; default no limit")
    new.add_argument("--models", help="names of the models that the API key may use, comma separated; default all")
    new.add_argument(
        "--expires", metavar="TIME", help="time from which the API key is refused: 2027-01-31T00:00:00Z; default never"
    )
    listed = below.add_parser("list", help="list the API keys of a file, or of a folder of *.json", allow_abbrev=False)
    listed.add_argument("file", metavar="FILE", help="file or folder of API keys, as in the gateway's flag --api-keys-file")
    listed.add_argument("--json", action="store_true", help="print one JSON object per API key")
