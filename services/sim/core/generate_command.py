"""python -m rootstock_llm.services.sim.core generate KIND OUT: writes a trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rootstock_llm.services.sim.core.trace import workloads
from rootstock_llm.services.sim.core.trace.trace import Trace, write_trace


def main(argv: Sequence[str]) -> None:
    """Writes the trace and prints its size. Raises ValueError or OSError."""
    args = build_parser().parse_args(argv)
    trace = _make(args)
    if not trace.requests:
        raise ValueError("the trace would have no request; all counts must be at least 1")
    write_trace(args.out, trace)
    prompts = sum(request.input_len for request in trace.requests)
    print(
        f"{args.out}: {len(trace.requests):,} requests, {prompts:,} prompt tokens, {trace.unique_block_tokens:,} of them unique, "
        f"arrivals over {max(request.arrival for request in trace.requests):,.1f} s"
    )


def _make(args: argparse.Namespace) -> Trace:
    given = {name: value for name, value in vars(args).items() if name not in ("kind", "out")}
    match args.kind:
        case "shared-prefix":
            return workloads.shared_prefix(**given)
        case "hot-prefix":
            return workloads.hot_prefix(**given)
        case "random":
            return workloads.random_lengths(**given)
        case "multi-turn":
            return workloads.multi_turn(**given)
        case "scores":
            return workloads.scores(**given)
        case "grammars":
            return workloads.grammars(**given)
        case _:
            return workloads.storm(**given)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rootstock sim generate", description="Writes a trace.")
    kinds = parser.add_subparsers(dest="kind", required=True)

    shared = _kind(kinds, "shared-prefix", "Groups of requests with a common prefix, in random order.")
    shared.add_argument("--adjacent", action="store_true", help="Send the requests of each group one after another.")
    _ints(shared, groups=64, per_group=16, prefix=2048, suffix=128, output=256)

    hot = _kind(kinds, "hot-prefix", "Requests of which a share begins with one prefix; the others have no common tokens.")
    _ints(hot, requests=1024, prefix=2048, suffix=128, output=256)
    hot.add_argument("--share", type=float, default=0.6, help="Share of the requests that begin with the prefix (default 0.6).")

    random = _kind(kinds, "random", "Requests without common tokens.")
    _ints(random, requests=1000, input_len=512, output=64)
    random.add_argument("--spread", type=float, default=0.0, help="Lengths are within mean * (1 +- SPREAD) (default 0).")
    random.add_argument(
        "--priorities", type=int, default=1, metavar="N", help="Priorities are drawn from 0 to N - 1 (default 1)."
    )

    turns = _kind(kinds, "multi-turn", "Conversations with the same system prompt.")
    _ints(turns, sessions=100, turns=5, system=512, user=128, output=128)
    turns.add_argument("--think-s", type=float, default=5.0, help="Seconds from a completion to the next turn (default 5).")

    scored = _kind(kinds, "scores", "Requests of /v1/score: a query followed by an item, without output.")
    _ints(scored, queries=64, items=16, query=512, item=32)

    storm = _kind(
        kinds,
        "storm",
        "Requests whose outputs are FACTOR times as long for a while, so that the scheduler expects too short outputs.",
    )
    _ints(storm, requests=4000, input_len=512, output=64, factor=10)
    storm.add_argument(
        "--begin", type=float, default=0.4, help="Share of the requests that arrive before the storm begins (default 0.4)."
    )
    storm.add_argument(
        "--end", type=float, default=0.5, help="Share of the requests that arrive before the storm ends (default 0.5)."
    )

    constrained = _kind(kinds, "grammars", "Requests of which a share has a grammar that forces runs of output tokens.")
    _ints(constrained, requests=1000, input_len=512, output=256, between=8)
    constrained.add_argument("--share", type=float, default=0.5, help="Share of the requests with a grammar (default 0.5).")
    lengths = "Lengths of the forced runs, drawn at random (default 2,4,8,16)."
    constrained.add_argument("--runs", type=_lengths, default=(2, 4, 8, 16), metavar="A,B,…", help=lengths)
    return parser


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _kind(kinds: argparse._SubParsersAction[argparse.ArgumentParser], name: str, about: str) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=about, description=about)
    parser.add_argument("out", type=Path, help="File to write.")
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="Arrivals per second; 0 (default): all requests arrive at once, for runs with --concurrency.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of all random choices (default 0).")
    return parser


def _ints(parser: argparse.ArgumentParser, **defaults: int) -> None:
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"Default {default}.")
