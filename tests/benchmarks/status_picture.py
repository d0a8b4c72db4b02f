"""The picture of `rootstock status` for documents: python -m tests.benchmarks.status_picture

Prints the command's output just after one of three small workers was killed under load. Copy the output into
docs/pictures/status.txt and docs/tutorials/laptop.md; `make docs` copies it into docs/reference/cli.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.system import ROOT, System

ROOTSTOCK = [sys.executable, "-m", "rootstock_llm.services.cli"]
WORKERS = "--max-running-requests 8 --max-total-tokens 1600"
LOAD = ["--workload", "generated-shared-prefix", "--groups", "6", "--prompts-per-group", "200", "--concurrency", "36"]
LENGTHS = ["--system-len", "96", "--question-len", "32", "--output-len", "64"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, System(Path(folder), workers=3, worker_flags=WORKERS) as system:
        bench = [*ROOTSTOCK, "bench", *LOAD, *LENGTHS, "--ignore-eos", "--allow-errors", "--url", system.url]
        load = subprocess.Popen(bench, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(10)
            system.kill("worker-1")
            time.sleep(1)
            subprocess.run([*ROOTSTOCK, "status", "--once", "--url", system.url], cwd=ROOT, check=True)
        finally:
            load.kill()
            load.wait()


if __name__ == "__main__":
    main()
