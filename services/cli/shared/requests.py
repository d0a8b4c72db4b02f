"""What chat and complete ask with: the model, and how to sample."""

from __future__ import annotations

import argparse
from typing import Any

from services.cli.shared.exits import CommandFailed, Exit
from services.cli.shared.flags import json_object
from services.cli.shared.server import Server

NAMES = ("max_tokens", "temperature", "top_p", "seed", "stop")


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """What is not given is left to the server."""
    group = parser.add_argument_group("request")
    group.add_argument("--model", help="default: the first that the server names")
    group.add_argument("--max-tokens", type=int, metavar="N", help="of the answer")
    group.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest token each time")
    group.add_argument("--top-p", type=float, metavar="P", help="share of the likeliest tokens that are drawn from")
    group.add_argument("--seed", type=int, metavar="N", help="equal requests with it draw equally")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given again")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields, as an object")


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in NAMES}
    extra: dict[str, Any] = args.extra_body
    return {name: value for name, value in given.items() if value is not None} | extra


def models_of(server: Server) -> list[dict[str, Any]]:
    """As /v1/models lists them. Raises CommandFailed."""
    answer = server.get("/v1/models")
    found = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, dict) and isinstance(each.get("id"), str) for each in found):
        raise CommandFailed(Exit.FAILED, f"{server.target.url}/v1/models lists no models: check --url.")
    return found


def model_of(args: argparse.Namespace, server: Server) -> str:
    """The one that is asked for, else the first. Raises CommandFailed."""
    if args.model:
        return str(args.model)
    found = models_of(server)
    if not found:
        raise CommandFailed(Exit.FAILED, "the server has no model yet: see `rootstock status`, or wait for a worker.")
    return str(found[0]["id"])
