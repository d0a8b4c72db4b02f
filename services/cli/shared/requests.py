"""Flags for the model and the sampling parameters of chat and complete."""

from __future__ import annotations

import argparse
from typing import Any

from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.flags import json_object
from rootstock_llm.services.cli.shared.server import Server

NAMES = ("max_tokens", "temperature", "top_p", "seed", "stop")


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. A field whose flag is not given is not sent, so that the server's default applies."""
    group = parser.add_argument_group("request")
    group.add_argument("--model", help="name of the model; default: the first that the server lists")
    group.add_argument("--max-tokens", type=int, metavar="N", help="largest number of tokens of the answer")
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0 takes the most likely token")
    group.add_argument("--top-p", type=float, metavar="P", help="total probability of the most likely tokens to sample from")
    group.add_argument("--seed", type=int, metavar="N", help="seed; equal requests with equal seeds sample equal tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="object with more fields of the request"
    )


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in NAMES}
    extra: dict[str, Any] = args.extra_body
    return {name: value for name, value in given.items() if value is not None} | extra


def models_of(server: Server) -> list[dict[str, Any]]:
    """Returns the entries of /v1/models. Raises CommandFailed."""
    response = server.get("/v1/models")
    found = response.get("data") if isinstance(response, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, dict) and isinstance(each.get("id"), str) for each in found):
        raise CommandFailed(Exit.FAILED, f"{server.target.url}/v1/models lists no models: check --url.")
    return found


def model_of(args: argparse.Namespace, server: Server) -> str:
    """Returns the model of --model, or else the server's first model. Raises CommandFailed if the server has no model."""
    if args.model:
        return str(args.model)
    found = models_of(server)
    if not found:
        raise CommandFailed(Exit.FAILED, "the server has no model yet: see `rootstock status`, or wait for a worker.")
    return str(found[0]["id"])
