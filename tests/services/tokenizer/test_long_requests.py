"""Tests of prompts far beyond the context: token limits, budgets and memory. Nightly tests use larger prompts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from rootstock_llm.protos import tokenizer_pb2 as pb
from rootstock_llm.protos import tokenizer_pb2_grpc as pb_grpc
from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.shared.index.prefix_index import HASH_BYTES, block_hashes
from rootstock_llm.services.shared.rpc import grpc_server
from tests.night import NIGHTLY
from tests.services.tokenizer.model_folders import byte_level
from tests.services.tokenizer.serving import serving

CALLS, CHARS, PEAK_MIB = (6, 15_000_000, 350) if NIGHTLY else (4, 3_000_000, 150)  # the nightly messages need 270 MiB
LASTING_MIB = 50  # MiB of memory that may stay allocated after the requests
CONTEXT = 131_072
WORDS = "the quick brown fox jumps over the lazy dog "
LONG = WORDS * 20_000


def chat(text: str) -> bytes:
    return json.dumps([{"role": "user", "content": text}]).encode()


def test_short_and_long_texts_get_at_most_max_tokens_ids(folders: dict[str, Path]) -> None:
    root = b"r" * HASH_BYTES

    async def run() -> None:
        async with serving(folders["byte_fallback"], max_batch_chars=1000) as service:
            texts = [WORDS * 2, WORDS * 2000, "hello"]
            whole = [list(prompt.ids) for prompt in (await service.stub.Encode(pb.EncodeRequest(texts=texts))).prompts]
            for count in (len(texts), 1):
                request = pb.EncodeRequest(texts=texts[:count], max_tokens=40, cuts=True, hash_root=root)
                for prompt, ids in zip((await service.stub.Encode(request)).prompts, whole, strict=False):
                    assert list(prompt.ids) == ids[:40] and prompt.block_hashes == block_hashes(root, ids[:40])
                    assert prompt.at_least == 0 if len(ids) <= 40 else 40 < prompt.at_least <= len(ids)
            (refused,) = (await service.stub.Encode(pb.EncodeRequest(texts=texts[1:2], max_tokens=40))).prompts
            assert not refused.ids and refused.at_least > 40
            (fits,) = (await service.stub.Encode(pb.EncodeRequest(texts=texts[1:2], max_tokens=len(whole[1])))).prompts
            assert (list(fits.ids), fits.at_least) == (whole[1], 0)

    asyncio.run(run())


def test_short_request_does_not_wait_for_long_requests(folders: dict[str, Path]) -> None:
    async def run() -> None:
        async with serving(folders["byte_level"], max_encoding_bytes=1000, max_batch_chars=500, encoding_wait_s=60.0) as service:
            long = [service.stub.Encode(pb.EncodeRequest(texts=[LONG])) for _ in range(3)]
            small = pb.EncodeRequest(texts=["hello"])
            assert (await service.stub.Encode(small)).prompts[0].ids
            assert not any(call.done() for call in long)
            await asyncio.gather(*long)

    asyncio.run(run())


def test_long_request_is_refused_when_the_budget_stays_full(folders: dict[str, Path]) -> None:
    async def run() -> None:
        async with serving(folders["byte_level"], max_encoding_bytes=1000, max_batch_chars=500, encoding_wait_s=0.01) as service:
            calls = [service.stub.EncodeChat(pb.EncodeChatRequest(messages_json=chat(LONG))) for _ in range(3)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            codes = [one.code() for one in found if isinstance(one, grpc.aio.AioRpcError)]
            assert codes == [grpc.StatusCode.ABORTED] * 2
            assert (await service.stub.Encode(pb.EncodeRequest(texts=["hello"]))).prompts[0].ids

    asyncio.run(run())


def resident_mib(pid: int) -> float:
    """Returns the proportional set size of a process and its children, which counts shared pages once."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(_proportional_kib(Path(f"/proc/{one}/smaps_rollup")) for one in (str(pid), *children)) / 1024


def _proportional_kib(rollup: Path) -> int:
    try:
        return sum(int(line.split()[1]) for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
    except (FileNotFoundError, ProcessLookupError):  # a rendering process has just ended
        return 0


@contextmanager
def process(folder: Path, port: int, metrics_port: int) -> Iterator[int]:
    ports = ["--port", str(port), "--metrics-port", str(metrics_port)]
    command = [sys.executable, "-m", "rootstock_llm.services.tokenizer", "--model", str(folder), *ports, "--log-level", "warning"]
    child = subprocess.Popen(command)
    try:
        yield child.pid
    finally:
        child.terminate()
        child.wait()


class Peak:
    """The largest memory of a process and its children while watch() runs."""

    def __init__(self, pid: int) -> None:
        self.mib = 0.0
        self._pid = pid

    async def watch(self) -> None:
        while True:
            self.mib = max(self.mib, await asyncio.to_thread(resident_mib, self._pid))
            await asyncio.sleep(0.05)


def test_process_frees_the_memory_of_long_requests(tmp_path: Path) -> None:
    text = WORDS * (CHARS // len(WORDS))
    calls: list[Any] = [
        pb.EncodeRequest(texts=[text], max_tokens=CONTEXT),
        pb.EncodeRequest(texts=[text], max_tokens=CONTEXT, cuts=True),
        pb.EncodeRequest(texts=["a" * CHARS], max_tokens=CONTEXT),
        pb.EncodeChatRequest(messages_json=chat(text), max_tokens=CONTEXT),
    ]

    async def run(pid: int, port: int) -> None:
        async with grpc_server.channel(f"127.0.0.1:{port}") as channel:
            stub: Any = pb_grpc.TokenizerStub(channel)  # type: ignore[no-untyped-call]
            await stub.EncodeChat(pb.EncodeChatRequest(messages_json=chat("hello")), wait_for_ready=True)
            idle, peak = resident_mib(pid), Peak(pid)
            watching = asyncio.create_task(peak.watch())
            for request in calls:
                method = stub.EncodeChat if isinstance(request, pb.EncodeChatRequest) else stub.Encode
                for answer in await asyncio.gather(*(method(request) for _ in range(CALLS))):
                    assert answer.prompts[0].at_least > CONTEXT
            watching.cancel()
            assert peak.mib - idle <= PEAK_MIB
            async with asyncio.timeout(120):
                while resident_mib(pid) - idle > LASTING_MIB:
                    await asyncio.sleep(0.1)

    port, metrics_port = free_ports(2)
    with process(byte_level(tmp_path / "m"), port, metrics_port) as pid:
        asyncio.run(run(pid, port))
