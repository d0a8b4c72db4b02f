"""Flags of `rootstock bench`. This module imports no library, so that `--help` works without aiohttp and numpy."""

from __future__ import annotations

import argparse
from pathlib import Path

from rootstock_llm.services.cli.bench.spec import WORKLOADS, Spec
from rootstock_llm.services.cli.shared.flags import add_server_flags, json_object

DEFAULT_CONCURRENCY = 16
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser, timeout_s=3600.0)
    add_request_flags(parser.add_argument_group("requests"))
    add_workload_flags(parser.add_argument_group("workload"))
    add_load_flags(parser.add_argument_group("load and results"))


def add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--endpoint", choices=sorted(PATHS), default="completions", help="endpoint that gets the requests")
    group.add_argument("--model", help="name of the model; default: the first of /v1/models")
    group.add_argument("--temperature", type=float, default=0.0, help="sampling temperature")
    group.add_argument("--ignore-eos", action="store_true", help="generate exactly the output length")
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="object whose fields are added to every request"
    )


def add_workload_flags(group: argparse._ArgumentGroup) -> None:
    spec = Spec("random")
    group.add_argument("--workload", choices=list(WORKLOADS), default="random", help="kind of the generated requests")
    group.add_argument("--seed", type=int, default=0, help="seed of the requests and of the Poisson arrivals")
    group.add_argument(
        "--num-requests", type=int, help="number of requests; default: 100 for random, the whole workload for the others"
    )
    group.add_argument(
        "--input-len", type=int, default=spec.input_len, help="length of a prompt or turn in words; in tokens with --token-ids"
    )
    group.add_argument("--output-len", type=int, default=spec.output_len, help="max_tokens of a request")
    group.add_argument(
        "--range-ratio", type=float, default=1.0, help="shortest length as a fraction of the longest; 1: equal lengths"
    )
    group.add_argument("--token-ids", action="store_true", help="send prompts as token ids (completions only)")
    group.add_argument("--id-min", type=int, default=spec.id_min, help="smallest random token id")
    group.add_argument(
        "--id-max",
        type=int,
        default=spec.id_max,
        help="end of the random token ids (exclusive); choose it below the special tokens",
    )
    group.add_argument(
        "--groups",
        type=int,
        default=spec.groups,
        help="generated-shared-prefix: number of groups; the prompts of a group share a prefix",
    )
    group.add_argument(
        "--prompts-per-group", type=int, default=spec.prompts_per_group, help="generated-shared-prefix: prompts of a group"
    )
    group.add_argument(
        "--system-len", type=int, default=spec.system_len, help="generated-shared-prefix: length of a group's prefix"
    )
    group.add_argument(
        "--question-len",
        type=int,
        default=spec.question_len,
        help="generated-shared-prefix: length of the question",
    )
    group.add_argument("--conversations", type=int, default=spec.conversations, help="multi-turn: number of conversations")
    group.add_argument("--turns", type=int, default=spec.turns, help="multi-turn: turns of each conversation")


def add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--concurrency", type=int, help=f"sessions in flight; default {DEFAULT_CONCURRENCY} in a closed loop")
    group.add_argument("--request-rate", type=float, help="sessions per second, with Poisson arrivals; default: a closed loop")
    group.add_argument("--warmup", type=int, default=1, help="requests before the measured ones, with other contents")
    group.add_argument("--json", action="store_true", help="print the summary as one line of JSON")
    group.add_argument("--output-file", type=Path, help="file to which results are appended as JSON lines")
    group.add_argument("--output-details", action="store_true", help="add a line for each request to --output-file")
    group.add_argument("--allow-errors", action="store_true", help="exit with 0 even if requests failed")


def settle(args: argparse.Namespace) -> str:
    """Sets the default of --concurrency if --request-rate is not given. Returns the fault of the flags, or an empty string."""
    if args.request_rate is None and args.concurrency is None:
        args.concurrency = DEFAULT_CONCURRENCY
    if args.token_ids and args.endpoint == "chat":
        return "--token-ids needs --endpoint completions"
    if min(x for x in (args.concurrency, args.request_rate) if x is not None) <= 0 or args.warmup < 0:
        return "--concurrency and --request-rate must be above 0, and --warmup at least 0"
    if args.output_details and args.output_file is None:
        return "--output-details needs --output-file"
    return ""
