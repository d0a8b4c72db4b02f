"""Runs all tests and benchmarks that need a GPU: python -m tests.gpu.check, or `make gpu-check`.

Each part is a process with its own time limit. The state and both reports are written after every part. If a check is cut off,
the next check continues after the last complete part.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.image import pins_of
from tests.gpu.parts import COMPILING, TESTS, Part, all_parts, chosen
from tests.gpu.report import write_report
from tests.gpu.results import DONE, Result, Source, State, Status, command_of, load_state
from tests.gpu.run_part import Ran, Wait, end, run_part, wait_for
from tests.gpu.source import source_of
from tests.gpu.wheels import install

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "build/gpu-cache"  # folder of compiled kernels
COMPILERS = 16  # largest number of compilers of FlashInfer's kernels in all processes; each needs a core and gigabytes of memory
NO_GPU = 2  # exit status if there is no GPU, or if the check fails before the first part
MACHINE_S = 240.0  # time limit in seconds of tests.gpu.machine, which may import torch from a cold disk
LEAST_S = 20.0  # seconds of --limit-s that must be left to start a part
KEEP_BACK_S = 15.0  # seconds of --limit-s that are reserved to end a hanging part and to write the report


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-check", description="Run the GPU tests and benchmarks and write a report.")
    parser.add_argument("--list", action="store_true", help="print the parts with their limits instead of running them")
    parser.add_argument(
        "--parts",
        default="",
        help="names of parts, or the kinds tests and benchmark; separated by commas or spaces; default: all",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/reference/gpu", help="folder of the reports")
    parser.add_argument("--work", type=Path, default=ROOT / "build/gpu-check", help="folder of the state and the logs")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, without a network")
    parser.add_argument("--limit-s", type=float, default=0.0, help="seconds for the whole check; 0 for no limit")
    parser.add_argument("--fresh", action="store_true", help="ignore the results of an earlier check")
    parser.add_argument("--from", dest="earlier", type=Path, help="JSON report or state of an earlier check to continue")
    parser.add_argument("--commit", default="", help="commit of these files, for the report; used if there is no git repository")
    parser.add_argument("--bench", default="", help="flags for the benchmarks, as in --bench='--attention triton --no-graphs'")
    parser.add_argument(
        "--at-once", type=int, default=1, help="number of test parts that run at the same time, before all benchmarks"
    )
    parser.add_argument(
        "--keep", action="store_true", help="accept results measured with other files or versions; the report marks them"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check. Returns the exit status.

    Returns:
        0 if all chosen parts are done or listed, 1 if some are not done, 2 if there is no GPU or the check fails before the first
        part.
    """
    options = arguments().parse_args(argv)
    begun = time.monotonic()
    parts = all_parts(ROOT, options.bench.split())
    try:
        wanted = chosen(parts, options.parts.replace(",", " ").split())
        if options.list:
            print("\n".join(f"{part.name:27} {part.limit_s:4} s  {part.about}" for part in wanted))
            return 0
        site = ROOT / "build/gpu-site"
        if options.wheels is not None:
            print(install(options.wheels, site))
        facts = machine_facts(environment(site))
        if not facts["device"]:
            print(f"The check found no usable GPU: {facts['reason']}.")
            return NO_GPU
        state = load_state(options.work / "state.json", today(), options.fresh, options.earlier)
    except (ValueError, subprocess.SubprocessError) as error:
        print(f"gpu-check: {error}")
        return NO_GPU
    deadline = begun + options.limit_s - KEEP_BACK_S if options.limit_s else None
    source = source_of(ROOT, options.commit)
    check = Check(options.work, options.out, facts, source, state, parts, environment(site))
    return check.run(wanted, deadline, options.keep, max(options.at_once, 1))


class Check:
    """Runs parts, and writes state and reports after each part."""

    def __init__(
        self,
        work: Path,
        out: Path,
        facts: dict[str, Any],
        source: Source,
        state: State,
        parts: Sequence[Part],
        environment: dict[str, str],
        root: Path = ROOT,
        least_s: float = LEAST_S,
        wait: Wait = wait_for,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work, self._out, self._root, self._least_s = work, out, root, least_s
        self._facts, self._source, self._state, self._parts = facts, source, state, parts
        self._environment, self._wait, self._clock = environment, wait, clock
        self._writing = threading.Lock()  # guards the state and the reports
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_ending = False
        work.mkdir(parents=True, exist_ok=True)

    def run(self, wanted: Sequence[Part], deadline: float | None, keep: bool, at_once: int = 1) -> int:
        """Runs the wanted parts and returns the exit status.

        Args:
            deadline: time on `clock` at which the check must end; None for no limit.
            keep: whether results that were measured with other files or package versions count as done.
            at_once: number of test parts that run at the same time. If it is above 1, all test parts run before the benchmarks,
                because no figure may be measured while other work runs.
        """
        report = self._report()
        turns = self._in_turn(wanted, keep)
        beside = [part for part in turns if part.kind == TESTS] if at_once > 1 else []
        self._run_beside(beside, at_once, lambda part: self._turn(part, deadline, keep))
        for part in turns:
            if part not in beside:
                self._turn(part, deadline, keep)
        print(f"report: {report}")
        return int(not all(self._state.is_done(p, self._source, self._facts, keep) for p in wanted))

    def _run_beside(self, parts: Sequence[Part], at_once: int, run: Callable[[Part], None]) -> None:
        """Runs parts in `at_once` threads. An error ends all parts."""
        if not parts:
            return
        pool = ThreadPoolExecutor(at_once)
        try:
            list(pool.map(run, parts))
        except BaseException:
            self._is_ending = True
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self._running):
                end(process)
            raise
        finally:
            pool.shutdown()

    def _waited(self, process: subprocess.Popen[bytes], limit_s: float) -> int | None:
        """Waits for a process and returns its exit status. Returns None after the limit, or if the check is ending."""
        self._running.add(process)
        try:
            return None if self._is_ending else self._wait(process, limit_s)
        finally:
            self._running.discard(process)

    def _turn(self, part: Part, deadline: float | None, keep: bool) -> None:
        if self._state.is_done(part, self._source, self._facts, keep):
            print(f"{part.label}: done in an earlier run", flush=True)
            return
        left = part.limit_s if deadline is None else min(part.limit_s, deadline - self._clock())
        if left < min(self._least_s, part.limit_s):
            print(f"{part.label}: not started, because --limit-s leaves no time; start the check again to continue", flush=True)
            return
        self._run_one(part, left)

    def _in_turn(self, wanted: Sequence[Part], keep: bool) -> list[Part]:
        """Returns the parts in the order in which they run. Benchmarks that failed but have some figures come last."""
        return sorted(wanted, key=lambda part: self._state.is_kept(part, self._source, self._facts, keep))

    def _run_one(self, part: Part, left: float) -> None:
        print(f"{part.label}: {part.about} (up to {left:.0f} s)", flush=True)
        result = self._result(part, run_part(part, self._work, self._root, left, self._environment, self._waited), left)
        with self._writing:
            kept = self._state.put(result)
            self._report()
        print(f"{part.label}: {result.status} in {result.seconds:.0f} s", flush=True)
        if kept is not result:
            print(f"{part.label}: an earlier run has more figures and stays in the report", flush=True)
        if result.status not in DONE:
            print(result.tail, flush=True)

    def _result(self, part: Part, ran: Ran, left: float) -> Result:
        status = ran.status or (Status.TIMED_OUT if left >= part.limit_s else Status.CUT_OFF)
        return Result(
            part=part.name,
            status=status,
            seconds=ran.seconds,
            source=self._source,
            device=self._facts["device"],
            ended=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            counts=ran.counts,
            tail="" if status is Status.PASSED else ran.tail,
            outcome=ran.outcome,
            command=command_of(part),
            versions=self._facts["versions"],
            flags=part.flags,
        )

    def _report(self) -> Path:
        return write_report(self._out, self._facts, self._source, self._state, self._parts, pins_of(self._root))


def exit_on_signal(number: int, _: object) -> None:
    """Handles SIGTERM by raising SystemExit, so that the running part is ended too."""
    raise SystemExit(128 + number)


def machine_facts(environment: dict[str, str]) -> dict[str, Any]:
    """Runs tests.gpu.machine and returns the facts that it prints. Raises SubprocessError if it fails."""
    command = [sys.executable, "-m", "tests.gpu.machine"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=MACHINE_S, check=True)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def environment(site: Path) -> dict[str, str]:
    """Returns the environment variables of all parts.

    Packages from wheels are on the path, Triton kernels are compiled instead of interpreted, compiled kernels go to a permanent
    folder, and downloads are disabled.
    """
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(ROOT), *([str(site)] if site.is_dir() else []), *([before] if before else [])]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    kept = {"TRITON_CACHE_DIR": str(KERNELS / "triton"), "FLASHINFER_WORKSPACE_BASE": str(KERNELS), "MAX_JOBS": compilers()}
    programs = os.pathsep.join([*([str(site / "bin")] if site.is_dir() else []), os.environ.get("PATH", os.defpath)])
    found = {**kept, **os.environ, **offline}
    return {**found, "TRITON_INTERPRET": "0", "PATH": programs, "PYTHONPATH": os.pathsep.join(paths)}


def compilers() -> str:
    """Returns the number of compilers that each of COMPILING processes may start.

    The number is at least 1. Otherwise, all processes together start at most COMPILERS, and at most one per core.
    """
    return str(max(min(COMPILERS, os.cpu_count() or 1) // COMPILING, 1))


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(main())
