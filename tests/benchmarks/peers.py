"""Speed of reading KV pages from another worker on this machine: python -m tests.benchmarks.peers [--pages N] ...

Server and reader are processes without a device, connected by loopback. A page has the shape of Qwen3-0.6B in bfloat16, 16 tokens
in 1,835,008 bytes. The pages are in host memory, and the server copies them before it sends them. The output is over
all rounds except the first one, which is a warm-up.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np

from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource, OpenReservation, proof
from rootstock_llm.services.worker.core.contracts.transfers import I32, Pull
from rootstock_llm.services.worker.exec.remote_kv.kv_server import TcpKvServer
from rootstock_llm.services.worker.exec.remote_kv.nixl_process import Carrier
from rootstock_llm.services.worker.exec.remote_kv.peer_reader import TcpPeerReader
from rootstock_llm.services.worker.exec.remote_kv.socket_folder import SocketFolder
from rootstock_llm.services.worker.exec.remote_kv.tls import PeerTls

LAYOUT, PAGE_SIZE, PAGE_BYTES = b"Qwen3-0.6B, bfloat16", 16, 28 * 2 * 8 * 128 * 2 * 16
POOL_PAGES = 64
PAGES = np.arange(POOL_PAGES, dtype=np.int32)[::-1]
TOKENS = np.arange(POOL_PAGES * PAGE_SIZE, dtype=np.int32).tobytes()
RESERVATION = KvReservation(1, 1, bytes(range(16)))
GB = 1e9


def identity(folder: str) -> PeerTls | None:
    """Returns the TLS settings with the certificate, key and authority in `folder`; None if `folder` is empty."""
    return PeerTls(*(Path(folder, name) for name in ("tls.crt", "tls.key", "ca.crt"))) if folder else None


def serve(tls: PeerTls | None, folder: SocketFolder | None, carrier: Carrier | None) -> None:
    """Serves page reads until stdin ends. Prints the port first."""
    pool = np.random.default_rng(0).standard_normal((POOL_PAGES, PAGE_BYTES // 4), np.float32)

    def read_pages(pages: I32, out: memoryview, group: int = 0) -> None:
        np.take(pool, pages, 0, np.frombuffer(out, np.float32).reshape(len(pages), -1), mode="clip")

    server = TcpKvServer(
        "127.0.0.1", 0, LAYOUT, PAGE_SIZE, PAGE_BYTES, read_pages, lambda left: None, tls=tls, folder=folder, carrier=carrier
    )
    server.open(OpenReservation(RESERVATION, "", TOKENS, PAGES))
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()


def measure(address: str, asked: argparse.Namespace, folder: SocketFolder | None) -> tuple[float, float]:
    """Returns the GB per second, summed over all readers, and the median seconds of a read. Readers share no connection."""
    source, tls = KvSource(RESERVATION, address, POOL_PAGES), identity(asked.tls)
    readers, reads, at_once = asked.readers, asked.reads, asked.pages
    taken: list[float] = []
    carriers = [Carrier() if asked.nixl else None for _ in range(readers)]

    def read_all() -> None:
        reader = TcpPeerReader(LAYOUT, PAGE_SIZE, PAGE_BYTES, tls=tls, folder=folder, carrier=carriers.pop())
        out = memoryview(bytearray(at_once * PAGE_BYTES))
        for number in range(reads):
            first = number * at_once % (POOL_PAGES - at_once + 1)
            proven = proof(RESERVATION.secret, "", TOKENS[: (first + at_once) * PAGE_SIZE * 4])
            begun = time.perf_counter()
            assert reader.read(Pull(source, first, proven), at_once, out) == at_once, "the read must return all pages"
            taken.append(time.perf_counter() - begun)
        assert not asked.nixl or set(reader.read_bytes()) == {"nixl"}, "pages were read by another transport than NIXL"
        reader.close()

    threads = [threading.Thread(target=read_all) for _ in range(readers)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    assert len(taken) == readers * reads, "every reader must complete its reads"
    return readers * reads * at_once * PAGE_BYTES / seconds / GB, median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        nargs="?",
        choices=["read", "serve"],
        default="read",
        help="read: start a server and measure; serve: run only this server",
    )
    parser.add_argument("--pages", type=int, default=8, help="pages per read")
    parser.add_argument("--reads", type=int, default=100, help="reads per reader and round")
    parser.add_argument("--readers", type=int, default=1, help="number of concurrent readers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tls", default="", metavar="FOLDER", help="folder of tls.crt, tls.key and ca.crt; empty: no TLS")
    parser.add_argument("--shm", default="", metavar="FOLDER", help="folder of the socket for reads by shared memory; empty: TCP")
    parser.add_argument("--nixl", action="store_true", help="read through NIXL, which must be installed")
    args = parser.parse_args()
    folder = SocketFolder(Path(args.shm)) if args.shm else None
    if args.what == "serve":
        serve(identity(args.tls), folder, Carrier() if args.nixl else None)
        return
    if not 0 < args.pages <= POOL_PAGES:
        parser.error(f"--pages is {args.pages}; it must be from 1 to {POOL_PAGES}")
    command = [sys.executable, "-m", "tests.benchmarks.peers", "serve", "--tls", args.tls, "--shm", args.shm]
    command += ["--nixl"] if args.nixl else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        address = f"127.0.0.1:{int(child.stdout.readline())}"
        rounds = [measure(address, args, folder) for _ in range(args.rounds + 1)][1:]
        child.stdin.close()
    rates = sorted(rate for rate, _ in rounds)
    size = args.pages * PAGE_BYTES
    print(
        f"{args.readers} readers, {args.pages} pages ({size} bytes) a read: {median(rates):.2f} GB/s"
        f" [{rates[0]:.2f}, {rates[-1]:.2f}] over {args.rounds} rounds of {args.readers * args.reads} reads;"
        f" {1e3 * median(taken for _, taken in rounds):.1f} ms a read"
    )


if __name__ == "__main__":
    main()
