"""Speed-up by draft tokens on a CPU: python -m tests.benchmarks.speculation [--drafter oracle|eagle3|mtp] [--streams N] ...

Streams run on random bf16 weights in the shape of Qwen3-0.6B, in two executors of one process, without and with draft tokens.
Draft tokens are the true continuation with random errors, so that a step outputs --accept-length tokens on average. With
--drafter eagle3 (a vocabulary of 32,000) or mtp, a random draft head also computes draft tokens. Its time counts, and its tokens
are ignored. All other work is real: each draft token is computed, sampled and verified, and the controller chooses their number,
at most --drafts. A second measurement has only wrong draft tokens, and a third has none; --only selects one of the three. Prints
the ratio of the time without drafting to the time with drafting: its median and 95 % interval.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from rootstock_llm.services.worker.core.contracts.plan import SamplingParams, SlotParams
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.drafter import Computed, Drafter
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from tests.benchmarks.cpu_decode import PAGE_SIZE, build_model
from tests.benchmarks.intervals import interval
from tests.benchmarks.make_model import DEFAULT_SHAPE, SHAPES
from tests.exec.draft_folders import add_mtp, write_eagle3
from tests.exec.guesses import Guesses
from tests.exec.random_contexts import Answer, Asked, Turned, World

CONTEXT = 512
VOCAB = SHAPES[DEFAULT_SHAPE].vocab


def error_rate(accept_length: float, drafts: int) -> float:
    """Returns the rate of wrong draft tokens for which a step outputs `accept_length` tokens on average.

    With p = 1 - rate, a step outputs 1 + p + .. + p^drafts tokens.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        right = (low + high) / 2
        low, high = (right, high) if sum(right**place for place in range(drafts + 1)) < accept_length else (low, right)
    return 1 - low


class Forced(Guesses):
    """A drafter that proposes the true continuation with random errors. It also runs a real drafter, only for its cost."""

    def __init__(self, working: Drafter, sequences: Sequence[Sequence[int]], errors: float, seed: int) -> None:
        super().__init__(sequences, errors, VOCAB, seed)
        self._working = working

    def begin(self) -> None:
        self._working.begin()

    def admit(self, slot: SlotParams) -> None:
        self._working.admit(slot)
        super().admit(slot)

    def set_tokens(self, slot: int, start: int, ids: Sequence[int]) -> None:
        self._working.set_tokens(slot, start, ids)
        super().set_tokens(slot, start, ids)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        self._working.propose(wanted)
        return super().propose(wanted)

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        self._working.sampled(slot, tokens)
        super().sampled(slot, tokens)

    def computed(self, rows: Sequence[Computed]) -> None:
        self._working.computed(rows)


class Side:
    """An executor and its scheduler.

    Args:
        settles: whether all runs use one scheduler, so that it keeps the learned acceptance rates.
    """

    def __init__(self, world: World, executor: DeviceExecutor, settles: bool) -> None:
        self.executor, self._world, self._settles = executor, world, settles
        self._turned = self._new_loop()
        self._answers: list[Answer] = []
        self.seconds = 0.0

    def begin(self, asked: Sequence[Asked]) -> None:
        if not self._settles:
            self._turned = self._new_loop()
        self._answers = [self._turned.submit(one) for one in asked]
        self.seconds = 0.0

    def advance(self, turns: int) -> bool:
        """Runs iterations of the scheduler loop and returns whether requests are unfinished.

        Waits for the step in flight, so that its time does not count for the other side.
        """
        begun = time.perf_counter()
        for _ in range(turns):
            if not self._turned.idle:
                self._turned.turn()
        self._turned.wait()
        self.seconds += time.perf_counter() - begun
        return not self._turned.idle

    @property
    def texts(self) -> list[list[int]]:
        return [answer.tokens for answer in self._answers]

    def _new_loop(self) -> Turned:
        return Turned(self._world.config(enable_radix_cache=False), self.executor, overlap=True)


def run(sides: Sequence[Side], asked: Sequence[Asked], turns: int) -> None:
    """Runs the same requests on each side. The sides alternate every few iterations, so other load affects both equally."""
    for side in sides:
        side.begin(asked)
    more = True
    while more:
        more = max([side.advance(turns) for side in sides])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--fixed", action="store_true", help="always use --drafts draft tokens per step, without the controller")
    parser.add_argument("--accept-length", type=float, default=2.5)
    parser.add_argument("--drafter", choices=["oracle", "eagle3", "mtp"], default="oracle")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--settled", type=int, default=0, help="unmeasured runs on the same scheduler before the first pair")
    parser.add_argument(
        "--turns", type=int, default=16, help="iterations of the scheduler loop on one side before the other side runs as many"
    )
    parser.add_argument("--only", choices=["guesses", "wrong guesses", "no guesses"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pages = options.streams * CONTEXT // PAGE_SIZE
    sizes = {
        "page_size": PAGE_SIZE,
        "vocab_size": VOCAB,
        "context_len": CONTEXT,
        "max_slots": options.streams,
        "num_pages": pages,
    }
    choosing = {"adapts_drafts": not options.fixed, "drafts_by_model": options.drafter != "oracle"}
    worlds = {drafts: World(**sizes, max_drafts=drafts, **choosing) for drafts in (0, options.drafts)}
    executors = {}
    with tempfile.TemporaryDirectory() as name:
        folder, draft = Path(name) / "target", Path(name) / "draft"
        build_model().save_pretrained(folder)
        if options.drafter == "eagle3":
            write_eagle3(draft, folder, draft_vocab=32_000)
        elif options.drafter == "mtp":
            add_mtp(folder, deepseek=False)
        for drafts in worlds:
            made = DeviceOptions(device="cpu", num_threads=options.threads, max_tokens=CONTEXT, max_drafts=drafts)
            if drafts and options.drafter != "oracle":
                path = str(draft) if options.drafter == "eagle3" else ""
                made = replace(made, speculative_algorithm=options.drafter, draft_model=path)
            built = build_device_executor(str(folder), "auto", PAGE_SIZE, options.streams, pages, 0.5, CONTEXT, made, print)
            executors[drafts] = built[0]
    working = executors[options.drafts]._steps._drafter  # type: ignore[attr-defined]
    rng = random.Random(3)
    asked = []
    for seed in range(options.streams):
        params = SamplingParams(max_new_tokens=options.new_tokens, temperature=1.0, seed=seed, ignore_eos=True)
        asked.append(Asked(tuple(rng.randrange(VOCAB) for _ in range(options.prompt_tokens)), params))
    alone = Side(worlds[0], executors[0], settles=False)
    run([alone], asked, options.turns)
    texts = alone.texts
    sequences = [[*one.prompt, *text] for one, text in zip(asked, texts, strict=True)]
    errors_of = {"guesses": error_rate(options.accept_length, options.drafts), "wrong guesses": 1.0, "no guesses": 1.0}
    for name in [options.only] if options.only else errors_of:
        plain, guessing = (Side(worlds[drafts], executors[drafts], options.settled > 0) for drafts in (0, options.drafts))
        ratios, lengths = [], []
        for number in range(-options.settled, options.pairs):
            drafter = Forced(working, [] if name == "no guesses" else sequences, errors_of[name], seed=number)
            guessing.executor._steps._drafter = drafter  # type: ignore[attr-defined]
            if number < 0:
                run([guessing], asked, options.turns)
                continue
            run((plain, guessing) if number % 2 else (guessing, plain), asked, options.turns)
            same = sum(text == other for text, other in zip(guessing.texts, texts, strict=True))
            ratios.append(plain.seconds / guessing.seconds)
            tokens = options.new_tokens * options.streams
            lengths.append(tokens / (tokens - drafter.accepted))
            pair = f"{name}: {ratios[-1]:.3f}, {drafter.drafted} draft tokens, {plain.seconds:.1f} s without"
            print(pair, file=sys.stderr, flush=True)
        low, high = interval(ratios)
        summary = f"{median(lengths):.2f} tokens a step, {same} of {options.streams} texts equal in the last pair"
        print(f"{name}: {summary}, {median(ratios):.2f} x ({low:.2f} to {high:.2f})", flush=True)
    for executor in executors.values():
        executor.close()


if __name__ == "__main__":
    main()
