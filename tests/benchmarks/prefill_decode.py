"""Streams beside long prompts, prefill and decode apart and together: python -m tests.benchmarks.prefill_decode [--pairs N] ...

Two whole systems stand on this machine: one of a prefill and a decode worker with a thread each, one of a worker with two threads
that does both and cuts prompts. In turns each gets the same load: streams one after the other, and beside them prompts of many
tokens. Printed are medians of the ratio apart / together of the streams' inter-token latency (p50, p99) and of the prompts' time
to their first token, with 95 % intervals.
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
