"""Anonymous memory of a model on a CPU: python -m tests.benchmarks.load_memory [--quantization auto int8 int8+head int4+head]

For each form of the weights, a new process loads the model with a KV pool of one page. The output has, in MiB:

- the bytes of the weights;
- the growth of the process's anonymous memory (RssAnon), which does not count the mapped checkpoint, after loading;
- the largest growth while loading, sampled every SAMPLE_S seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from pathlib import Path

from tests.benchmarks.compare_transformers import BUILD, ensure_model
from tests.benchmarks.make_model import DEFAULT_SHAPE
from tests.benchmarks.server_process import ROOT

SAMPLE_S = 0.002
FORMS = ("auto", "int8", "int8+head", "int4+head")
PAGE_SIZE = 16


def anonymous_bytes() -> int:
    """Returns the anonymous resident memory of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Peak:
    """The largest anonymous memory of this process while the context is active."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.num_bytes = max(self.num_bytes, anonymous_bytes())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def measure(model: str, form: str, threads: int) -> dict[str, int]:
    """Loads the model in this process. Returns bytes: the weights, and the growth of anonymous memory after and while loading."""
    from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor

    scheme, _, head = form.partition("+")
    options = DeviceOptions(device="cpu", num_threads=threads, quantization=scheme, quantize_head=head == "head")
    before = anonymous_bytes()
    with Peak() as peak:
        executor, info = build_device_executor(model, "bfloat16", PAGE_SIZE, 2, 1, 0.5, PAGE_SIZE, options, lambda _: None)
    after = anonymous_bytes()
    executor.close()
    return {"weights": info.weight_bytes, "after": after - before, "peak": peak.num_bytes - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=DEFAULT_SHAPE, help="see make_model")
    parser.add_argument("--quantization", nargs="+", default=FORMS, help="forms of the weights: auto, int8, int4, int8+head, ...")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "FORM"), help="measure in this process; output as JSON")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child, options.threads)))
        return
    model = BUILD / options.shape
    ensure_model(model, options.shape)
    for form in options.quantization:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.load_memory",
            "--threads",
            str(options.threads),
            "--child",
            str(model),
            form,
        ]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found = {name: value / 2**20 for name, value in json.loads(done.stdout.splitlines()[-1]).items()}
        share = found["after"] / found["weights"]
        print(
            f"{form:>10}: weights {found['weights']:.0f} MiB, anonymous memory {found['after']:.0f} MiB ({share:.3f} times),"
            f" while loading at most {found['peak']:.0f} MiB ({found['peak'] - found['weights']:+.0f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
