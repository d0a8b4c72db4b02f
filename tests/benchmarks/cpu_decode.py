"""Speed of the executor on a CPU, compared with transformers: python -m tests.benchmarks.cpu_decode [--threads N].

The model has random bf16 weights in a shape of make_model. For each batch, the output has prefill tokens per second, the time of
a decode step, and output tokens per second (prefill and decode). A second line has the seconds of our run (prefill and decode)
per kernel group and between kernels. A third line has the bytes of weights that a decode step reads, with only those experts that
have rows, and the time of a step as a multiple of the time in which the same threads read as many bytes. For this, `--pairs`
further steps and reads alternate. If --quantization has several forms and --rounds is above 1, the last lines have the median
ratios of each form to the first one over all rounds, with 95 % intervals.

With --contexts, decode steps of one request alternate between contexts, and between our executor and transformers. The output has
the medians of the rounds' ratios with 95 % intervals. No time is checked.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import rootstock_llm.services.worker.exec.kernel_set as kernel_set
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from tests.benchmarks.intervals import interval
from tests.benchmarks.make_model import DEFAULT_SHAPE, SHAPES, random_model
from tests.exec.driver import Driver, Sequence

PAGE_SIZE = 16
READ_BYTES = 1 << 28  # size of the memory whose reading is timed, larger than the caches
GROUPS = {
    "linear": "linear",
    "gated_linear": "linear",
    "paged_attention": "attention",
    "route": "experts",
    "experts": "experts",
}


class TimedKernels:
    """Forwards kernel calls, times each of them by group (GROUPS), and records the weights that they read. For one thread."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.seconds: dict[str, float] = defaultdict(float)
        self._read: list[tuple[Any, torch.Tensor | None]] = []  # packed weights, and the ids of experts that have rows

    def forget_reads(self) -> None:
        self._read.clear()

    def read_bytes(self) -> int:
        """Returns the bytes of weights that the calls since forget_reads() have read."""
        total = 0
        for packed, ids in self._read:
            if ids is None:
                total += sum(tensor.nbytes for tensor in packed.tensors)
            else:
                each = sum(tensor.nbytes for part in (packed.gate_up, packed.down) for tensor in part.tensors)
                total += each * len(ids.unique()) // packed.num_experts
        return total

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            result = function(*arguments, **named)
            self.seconds[GROUPS.get(name, "rest")] += time.perf_counter() - begun
            if name in ("linear", "gated_linear"):
                self._read.append((arguments[2], None))
            elif name == "experts":
                self._read.append((arguments[4], arguments[2].clone()))
            return result

        return timed


@dataclass
class Timing:
    prefill_s: float
    decode_s: float  # seconds of all decode steps together
    batch: int  # number of requests
    num_in: int  # prompt tokens per request
    num_out: int  # output tokens per request
    sequences: list[Sequence] = field(default_factory=list)  # the requests, which may be decoded further

    @property
    def step_s(self) -> float:
        """Seconds of a decode step."""
        return self.decode_s / (self.num_out - 1)

    def line(self, name: str) -> str:
        total = self.batch * self.num_out / (self.prefill_s + self.decode_s)
        prefill = self.batch * self.num_in / self.prefill_s
        speeds = f"prefill {prefill:7.0f} tok/s, decode step {self.step_s * 1e3:7.1f} ms, output {total:6.1f} tok/s"
        return f"{name:>14} batch {self.batch:3}: {speeds}"


def prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 1000, (batch, length), generator=torch.Generator().manual_seed(batch))


def seconds_to_read(memory: torch.Tensor, num_bytes: int) -> float:
    """Returns the seconds in which torch's threads sum float32 numbers of this many bytes."""
    begun, whole, rest = time.perf_counter(), num_bytes // memory.nbytes, num_bytes % memory.nbytes
    for _ in range(whole):
        memory.sum()
    memory[: rest // 4].sum()
    return time.perf_counter() - begun


def run_ours(driver: Driver, texts: list[list[int]], num_out: int, chunk_tokens: int) -> Timing:
    """Computes prompts of equal length, one or as many as chunk_tokens allows per step, and then decodes all of them together."""
    driver.next_page = 0
    params = SamplingParams(max_new_tokens=num_out, temperature=0.0)
    sequences = [Sequence(text, slot, params) for slot, text in enumerate(texts)]
    batch, num_in = len(texts), len(texts[0])
    at_once = max(1, chunk_tokens // num_in)
    begun = time.perf_counter()
    for first in range(0, batch, at_once):
        driver.prefill(sequences[first : first + at_once])
    middle = time.perf_counter()
    driver.decode(sequences, num_out)
    return Timing(middle - begun, time.perf_counter() - middle, batch, num_in, num_out, sequences)


def run_transformers(model: Any, batch: int, num_in: int, num_out: int) -> Timing:
    ids, seconds = prompts(batch, num_in), {}
    for count in (1, num_out):
        begun = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
                           pad_token_id=0)  # fmt: skip
        seconds[count] = time.perf_counter() - begun
    return Timing(seconds[1], seconds[num_out] - seconds[1], batch, num_in, num_out)


class Run:
    """An executor whose weights have one form, with its timers."""

    def __init__(self, folder: str, form: str, options: argparse.Namespace) -> None:
        """Loads the model.

        Args:
            form: value of the setting quantization, followed by "+head" if the vocabulary projection has 8 bits.
        """
        self._form, self._options = form, options
        scheme, _, head = form.partition("+")
        made = DeviceOptions(
            device="cpu",
            num_threads=options.threads,
            max_tokens=options.chunk_tokens + 64,
            quantization=scheme,
            quantize_head=head == "head",
        )
        timers = []

        def timed_kernels(num_threads: int, dtype: torch.dtype, deterministic: bool) -> Any:
            timers.append(TimedKernels(load(num_threads, dtype, deterministic)))
            return timers[0]

        load, kernel_set.load_kernels = kernel_set.load_kernels, timed_kernels
        lengths = [context + options.rounds * options.steps for context in options.contexts]
        lengths = lengths or [options.num_in + options.num_out + options.pairs] * max(options.batches)
        pages = sum(-(-length // PAGE_SIZE) + 1 for length in lengths)
        try:
            self.executor, info = build_device_executor(folder, "auto", PAGE_SIZE, 64, pages, 0.5, None, made, print)
        finally:
            kernel_set.load_kernels = load
        print(info)
        self._driver, self._timer = Driver(self.executor, PAGE_SIZE), timers[0]
        self._memory = torch.ones(READ_BYTES // 4)
        run_ours(self._driver, prompts(1, 32).tolist(), 4, options.chunk_tokens)

    def batch(self, batch: int) -> Timing:
        """Runs one batch, and prints its speeds and its seconds per kernel group."""
        options, timer = self._options, self._timer
        timer.seconds.clear()
        timer.forget_reads()
        texts = prompts(batch, options.num_in).tolist()
        ours = run_ours(self._driver, texts, options.num_out, options.chunk_tokens)
        print(ours.line(self._form), flush=True)
        spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in sorted(timer.seconds.items()))
        other = ours.prefill_s + ours.decode_s - sum(timer.seconds.values())
        print(f"{'':14} {spent}, between kernels {other:.2f} s", flush=True)
        if options.pairs:
            self._compare_with_reading(ours)
        return ours

    def prefilled(self, texts: list[torch.Tensor], num_new: int) -> list[Sequence]:
        """Computes each prompt, [1, tokens], in its own steps. Returns the sequences, which may decode num_new steps."""
        self._driver.next_page = 0
        params = SamplingParams(max_new_tokens=1 + num_new, temperature=0.0)
        sequences = [Sequence(text[0].tolist(), slot, params) for slot, text in enumerate(texts)]
        for sequence in sequences:
            self._driver.prefill([sequence], self._options.chunk_tokens)
        return sequences

    def decode(self, sequences: list[Sequence], num_out: int) -> None:
        """Decodes until each sequence has num_out output tokens."""
        self._driver.decode(sequences, num_out)

    def _compare_with_reading(self, ours: Timing) -> None:
        """Alternates decode steps with reads of the same number of bytes. Prints medians and ratios."""
        steps, reads, sizes = [], [], []
        for number in range(1, self._options.pairs + 1):
            self._timer.forget_reads()
            begun = time.perf_counter()
            self._driver.decode(ours.sequences, ours.num_out + number)
            steps.append(time.perf_counter() - begun)
            sizes.append(self._timer.read_bytes())
            reads.append(seconds_to_read(self._memory, sizes[-1]))
        ratio = median(step / read for step, read in zip(steps, reads, strict=True))
        rate = median(size / read for size, read in zip(sizes, reads, strict=True)) / 1e9
        weights = f"{median(sizes) / 1e6:.0f} MB of weights per step, read at {rate:.1f} GB/s in {median(reads) * 1e3:.1f} ms"
        relative = f"{ratio:.2f} x as long (best: {min(steps) / min(reads):.2f})"
        print(f"{'':14} {weights}; a step takes {median(steps) * 1e3:.1f} ms, {relative}", flush=True)


def build_model(shape: str = DEFAULT_SHAPE) -> Any:
    """Returns transformers' model with random weights. It has no end token."""
    model: Any = random_model(SHAPES[shape], 0)
    rotary = model.model.rotary_emb
    rotary.__init__(model.config)  # the buffers of a random model are undefined
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model.eval()


class CachedText:
    """A prompt in transformers' cache. Each step decodes one token."""

    def __init__(self, model: Any, prompt: torch.Tensor) -> None:
        """Computes the prompt, [1, tokens], in chunks, because transformers' attention needs memory for all scores of a chunk."""
        self._model, self._cache = model, None
        for chunk in prompt.split(512, dim=1):
            self._token = self._computed(chunk)

    def _computed(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        return output.logits[:, -1].argmax(-1, keepdim=True)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._token = self._computed(self._token)


def compare_contexts(run: Run, model: Any, options: argparse.Namespace) -> None:
    """Prints the seconds of a decode step at each context, with ratios. `model` is transformers' model, or None to skip it."""
    contexts, steps = options.contexts, options.steps
    texts = [prompts(1, context) for context in contexts]
    ours = run.prefilled(texts, options.rounds * steps)
    theirs = [] if model is None else [CachedText(model, text) for text in texts]
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    def measure(name: str, context: int, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        seconds[name, context].append((time.perf_counter() - begun) / steps)

    for number in range(options.rounds):
        for context, own in zip(contexts, ours, strict=True):
            measure("ours", context, lambda own=own, number=number: run.decode([own], 1 + (number + 1) * steps))
        for context, text in zip(contexts, theirs, strict=False):
            measure("transformers", context, lambda text=text: text.decode(steps))
    first = seconds["ours", contexts[0]]
    for context in contexts:
        own = seconds["ours", context]
        print(f"{context:6} tokens: {median(own) * 1e3:.1f} ms, {ratio_text(own, first)} times the step at {contexts[0]}")
        if theirs:
            other = seconds["transformers", context]
            print(f"{'':14} transformers {median(other) * 1e3:.1f} ms, {ratio_text(other, own)} times ours", flush=True)


def ratio_text(values: list[float], others: list[float]) -> str:
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    least, most = interval(ratios)
    return f"{median(ratios):.2f} [{least:.2f}, {most:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-in", type=int, default=256)
    parser.add_argument("--num-out", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="largest number of prompt tokens per step")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument(
        "--quantization", nargs="+", default=["auto"], help="forms of the weights: auto, int8, int4, int8+head, ..."
    )
    parser.add_argument("--pairs", type=int, default=9, help="further decode steps that alternate with reads of memory; 0: none")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds; each round runs all forms")
    parser.add_argument("--shape", choices=list(SHAPES), default=DEFAULT_SHAPE, help="see make_model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[], help="prompt tokens of the requests whose steps alternate")
    parser.add_argument("--steps", type=int, default=8, help="with --contexts, number of successive steps at one context")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build_model(options.shape)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        runs = {form: Run(folder, form, options) for form in options.quantization}
    if options.contexts:
        for form, run in runs.items():
            print(f"{form}:")
            compare_contexts(run, None if options.skip_transformers else model, options)
            run.executor.close()
        return
    timings: dict[tuple[str, int], list[Timing]] = defaultdict(list)
    for _ in range(options.rounds):
        for batch in options.batches:
            for form, run in runs.items():
                timings[form, batch].append(run.batch(batch))
            if not options.skip_transformers:
                print(run_transformers(model, batch, options.num_in, options.num_out).line("transformers"), flush=True)
    base = options.quantization[0]
    for (form, batch), found in timings.items() if options.rounds > 1 else ():
        first = timings[base, batch]
        decode = ratio_text([each.decode_s for each in first], [each.decode_s for each in found])
        prefill = ratio_text([each.prefill_s for each in first], [each.prefill_s for each in found])
        print(f"{form:>14} batch {batch:3}: speed relative to {base}: decode {decode}, prefill {prefill}")
    for run in runs.values():
        run.executor.close()


if __name__ == "__main__":
    main()
