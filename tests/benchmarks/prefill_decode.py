"""Effect of separate prefill and decode workers on streams: python -m tests.benchmarks.prefill_decode [--pairs N] ...

Two whole systems run on this machine: one with a prefill and a decode worker of one thread each (separate), and one with a single
worker of two threads that chunks prompts (single). Only one system at a time gets the load (streams_and_prompts.py), which has
two parts that run at the same time. Several lanes each run streams with short prompts, one after another. A separate lane sends
long prompts one at a time.

The output has median ratios, separate over single, with 95 % intervals, for the streams' inter-token latency (p50, p99) and the
prompts' time to the first token.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.benchmarks.streams_and_prompts import add_flags, compare, print_ratios
from tests.e2e.system import System


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        apart = System(Path(folder, "apart"), prefill_workers=1, decode_workers=1, log_level="info", max_total_tokens=32768)
        together = System(Path(folder, "together"), workers=1, num_threads=2, log_level="info", max_total_tokens=32768)
        with apart, together:
            ratios = compare({"apart": apart, "together": together}, args)
            pulled = apart.metric("decode-0", "rootstock_worker_pulled_tokens_total")
        print(f"tokens read by the decode worker: {pulled:.0f}")
    print_ratios(ratios, "apart / together")


if __name__ == "__main__":
    main()
