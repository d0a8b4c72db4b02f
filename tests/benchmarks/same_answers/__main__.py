"""Compares the HTTP responses of two checkouts: python -m tests.benchmarks.same_answers OTHER [--requests N] [--seed N]

A server of each checkout gets the same random requests: first one at a time, then eight at a time with deterministic workers.
Token ids, texts, log probabilities, usage and finish reasons must be equal. Random ids and times are not compared (`RANDOM` in
answers.py). Each server also gets bodies that must be refused: status, code and param must be equal, messages may differ. Prints
each difference with its request and both responses. The exit status is 1 if there is a difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rootstock_llm.services.cli.bench.client import open_http
from tests.benchmarks.compare_transformers import BUILD
from tests.benchmarks.same_answers.answers import Answer, Difference, differences, read_answer, refusal_differences
from tests.benchmarks.same_answers.corpus import SEVERAL, Case, corpus
from tests.benchmarks.same_answers.refusals import all_refused_cases
from tests.benchmarks.server_process import ROOT, module_of, running_server

COMMAND = "{checkout}/.venv/bin/python -m {module} --model {{model}} --port {{port}} --no-demo --no-playground {flags}"
FLAGS = "--max-total-tokens 32768"
DETERMINISTIC = FLAGS + " --worker-flags=--deterministic"
AT_ONCE = 8
TIMEOUT_S = 120.0
SHOWN_CHARS = 1500
OLD, NEW = "other", "this"


@dataclass(frozen=True, slots=True)
class Round:
    title: str
    flags: str  # flags of both servers
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Part:
    """Cases with the same number of concurrent requests and the same rule of comparison."""

    title: str
    cases: Sequence[Case]
    at_once: int
    compare: Callable[[Answer, Answer], list[Difference]]


async def ask_all(url: str, cases: Sequence[Case], at_once: int) -> list[Answer]:
    """Returns the responses in the order of the cases. At most `at_once` requests are in flight at a time."""
    limit = asyncio.Semaphore(at_once)
    async with open_http(timeout_s=TIMEOUT_S) as http:

        async def ask(case: Case) -> Answer:
            async with limit, http.post(url + case.path, json=case.body) as response:
                return read_answer(response.status, response.headers.get("content-type", ""), await response.read())

        return await asyncio.gather(*(ask(case) for case in cases))


async def ask_both(urls: dict[str, str], part: Part) -> list[tuple[Answer, Answer]]:
    old, new = await asyncio.gather(*(ask_all(urls[name], part.cases, part.at_once) for name in (OLD, NEW)))
    return list(zip(old, new, strict=True))


def report(case: Case, answers: tuple[Answer, Answer], found: Sequence[Difference]) -> str:
    """Returns a text with the request, each value that differs, and both responses."""
    lines = [f"POST {case.path} ({case.feature}) {_shown(case.body)}"]
    lines += [f"  {each.path}: {each.old!r} | {each.new!r}"[:SHOWN_CHARS] for each in found[:10]]
    lines += [f"  and {len(found) - 10} more values"] if len(found) > 10 else []
    lines += [f"  {name}: {answer.status} {_shown(answer.body)}" for name, answer in zip((OLD, NEW), answers, strict=True)]
    return "\n".join(lines)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"


def run_part(urls: dict[str, str], part: Part) -> int:
    """Prints the differences and a summary line. Returns the number of cases whose responses differ or have a wrong status."""
    different, began = 0, time.perf_counter()
    pairs = asyncio.run(ask_both(urls, part))
    seconds = time.perf_counter() - began
    for case, answers in zip(part.cases, pairs, strict=True):
        if found := part.compare(*answers):
            different += 1
            print(report(case, answers, found), flush=True)
    print(f"{part.title}: {different} of {len(part.cases)} responses differ ({seconds:.0f} s)", flush=True)
    return different


def served(compare_cached: bool) -> Callable[[Answer, Answer], list[Difference]]:
    """Returns the comparison for requests that both checkouts must serve."""

    def compare(old: Answer, new: Answer) -> list[Difference]:
        refused = [] if old.status == new.status == 200 else [Difference("status", old.status, new.status)]
        return refused or differences(old, new, compare_cached)

    return compare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout, with its own .venv")
    parser.add_argument("--requests", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit from the with block stops the servers
    # Whether two outputs of one request share a step depends on timing. So only deterministic workers repeat the outputs exactly.
    single, cases = corpus(args.seed, args.requests, without=(SEVERAL,)), corpus(args.seed, args.requests)
    alone = Part(f"{len(single)} requests, one at a time", single, 1, served(compare_cached=True))
    together = Part(f"{len(cases)} requests, {AT_ONCE} at a time, deterministic", cases, AT_ONCE, served(compare_cached=False))
    refusals = Part("refused bodies", all_refused_cases(), 1, refusal_differences)
    rounds = [Round("alone", FLAGS, [alone, refusals]), Round("together", DETERMINISTIC, [together])]
    different = 0
    for each in rounds:
        with ExitStack() as servers:
            urls = {
                name: servers.enter_context(
                    running_server(
                        COMMAND.format(checkout=checkout, module=module_of(checkout, "local"), flags=each.flags),
                        ROOT / "models" / "demo",
                        BUILD / "logs" / f"same-answers-{each.title}-{name}.log",
                        checkout,
                    )
                )
                for name, checkout in ((OLD, args.other.resolve()), (NEW, ROOT))
            }
            different += sum(run_part(urls, part) for part in each.parts)
    print(f"{different} differences" if different else "all responses are equal")
    return 1 if different else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except aiohttp.ClientError as error:
        sys.exit(f"a server does not respond: {error!r}")
