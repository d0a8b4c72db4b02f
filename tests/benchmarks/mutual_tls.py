"""python -m tests.benchmarks.mutual_tls: cost of TLS between services, in requests/s of whole systems.

Two systems on this machine are measured in turns. One has no TLS. The other has mutual TLS with a token between services, and TLS
to both Redis servers. openssl and Debian's redis-server are needed. Workers compute nothing, so that only the work of the
services is measured. Responses are streamed. Prints the requests/s of each turn. For each pair of turns, computes the ratio
of the requests/s with TLS to those without, and prints the mean and the range of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from tests.certificates import Authority
from tests.e2e.secured import SecuredSystem
from tests.e2e.system import System

FAKE = "--executor fake"


def rate(system: System, clients: int, tokens: int, seconds: float) -> float:
    """Returns the requests/s. Raises OSError if a request fails."""
    over, ended = threading.Event(), [0] * clients
    faults: list[Exception] = []

    def ask(number: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            body = {"model": "demo", "prompt": f"{number} {turn} count", "max_tokens": tokens, "stream": True, "ignore_eos": True}
            request = urllib.request.Request(
                f"{system.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    if b"data: [DONE]" not in answer.read():
                        raise OSError("a stream ended without [DONE]")
            except OSError as error:
                faults.append(error)
                return
            ended[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)  # unmeasured time, in which connections open and lazy code is compiled
    begun, before = time.monotonic(), sum(ended)
    time.sleep(seconds)
    took, count = time.monotonic() - begun, sum(ended) - before
    over.set()
    for thread in threads:
        thread.join()
    for fault in faults:
        raise fault
    return count / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16, help="number of concurrent requests")
    parser.add_argument("--tokens", type=int, default=16, help="output tokens per response")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of a turn")
    parser.add_argument("--pairs", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        settings = {"worker_flags": FAKE, "log_level": "warning"}
        plain = System(folder / "plain", **settings)
        secured = SecuredSystem(folder / "secured", Authority(folder / "authority"), **settings)
        ratios = []
        with plain, secured:
            for _ in range(asked.pairs):
                clear, tls = (rate(system, asked.clients, asked.tokens, asked.seconds) for system in (plain, secured))
                ratios.append(tls / clear)
                print(f"without TLS {clear:7.1f} requests/s   with TLS {tls:7.1f}   × {ratios[-1]:.3f}", flush=True)
        print(f"with TLS × {statistics.mean(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}] of {len(ratios)} pairs")


if __name__ == "__main__":
    main()
