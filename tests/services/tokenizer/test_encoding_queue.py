"""Tests of EncodeQueue: requests that arrive during a call share the next call, and each request gets its own ids or error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from rootstock_llm.services.tokenizer.encoding import EncodeJob, EncodeQueue


class Panic(BaseException):
    """Like the exception of the tokenizers library after a panic."""


class GatedEncoder:
    """An encoder that records its calls and waits until `open` is set. It returns one id per text: the length of the text."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], bool]] = []
        self.open = threading.Event()

    def __call__(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        self.calls.append((list(texts), add_special_tokens))
        assert self.open.wait(5)
        if "bad" in texts:
            raise ValueError("bad")
        if "panic" in texts:
            raise Panic
        return [[len(text)] for text in texts]


def queue(encoder: GatedEncoder, executor: ThreadPoolExecutor, max_texts: int = 8, max_chars: int = 100) -> EncodeQueue:
    return EncodeQueue(encoder, executor, lanes=1, max_texts=max_texts, max_chars=max_chars, observe_texts=lambda _: None)


async def ids_of(encode_queue: EncodeQueue, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
    return [list(text.ids) for text in await encode_queue.encode(EncodeJob(texts, add_special_tokens))]


@pytest.mark.parametrize(
    ("name", "jobs", "calls"),  # calls: texts of each call after the first
    [
        ("waiting requests", [(["b"], True), (["c", "d"], True)], [["b", "c", "d"]]),
        ("different flags", [(["b"], True), (["c"], False), (["d"], True)], [["b"], ["c"], ["d"]]),
        ("max_texts", [(["b"] * 5, True), (["c"] * 5, True)], [["b"] * 5, ["c"] * 5]),
        ("max_chars", [(["b" * 60], True), (["c" * 60], True)], [["b" * 60], ["c" * 60]]),
        ("long request", [(["b" * 500], True), (["c"], True)], [["b" * 500], ["c"]]),
    ],
)
def test_queue_joins_waiting_jobs_into_one_call_up_to_the_limits(
    name: str, jobs: list[tuple[list[str], bool]], calls: list[list[str]]
) -> None:
    async def run() -> None:
        encoder = GatedEncoder()
        with ThreadPoolExecutor(1) as executor:
            encode_queue = queue(encoder, executor)
            first = asyncio.create_task(ids_of(encode_queue, ["first"]))
            await asyncio.sleep(0)
            rest = [asyncio.create_task(ids_of(encode_queue, *job)) for job in jobs]
            await asyncio.sleep(0.01)
            encoder.open.set()
            assert await first == [[5]]
            assert [await task for task in rest] == [[[len(t)] for t in texts] for texts, _ in jobs], name
        assert [texts for texts, _ in encoder.calls] == [["first"], *calls], name

    asyncio.run(run())


def test_queue_fails_only_the_request_with_a_bad_text() -> None:
    async def run() -> None:
        encoder = GatedEncoder()
        with ThreadPoolExecutor(1) as executor:
            encode_queue = queue(encoder, executor)
            texts = ("first", "good", "bad", "better", "panic")
            tasks = [asyncio.create_task(ids_of(encode_queue, [text])) for text in texts]
            await asyncio.sleep(0.01)
            encoder.open.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [results[0], results[1], results[3]] == [[[5]], [[4]], [[6]]]
        assert isinstance(results[2], ValueError) and isinstance(results[4], RuntimeError)

    asyncio.run(run())


def test_queue_does_not_encode_a_cancelled_request() -> None:
    async def run() -> None:
        encoder = GatedEncoder()
        with ThreadPoolExecutor(1) as executor:
            encode_queue = queue(encoder, executor)
            tasks = [asyncio.create_task(ids_of(encode_queue, ["first"]))]
            await asyncio.sleep(0.01)
            tasks += [asyncio.create_task(ids_of(encode_queue, [text])) for text in ("cancelled", "next")]
            await asyncio.sleep(0.01)
            tasks[1].cancel()
            await asyncio.sleep(0)
            encoder.open.set()
            assert await tasks[2] == [[4]]
        assert [texts for texts, _ in encoder.calls] == [["first"], ["next"]]

    asyncio.run(run())


def test_queue_loses_no_job_that_arrives_when_an_encoding_thread_becomes_idle() -> None:
    async def client(encode_queue: EncodeQueue) -> int:
        """Sends 1500 jobs, each after the result of the previous job. Returns their number."""
        for number in range(1500):
            assert await ids_of(encode_queue, ["x" * (number % 7)]) == [[number % 7]]
        return 1500

    async def run() -> list[int]:
        encoder = GatedEncoder()
        encoder.open.set()
        with ThreadPoolExecutor(2) as executor:
            encode_queue = queue(encoder, executor)
            async with asyncio.timeout(60):
                return await asyncio.gather(*(client(encode_queue) for _ in range(3)))

    assert asyncio.run(run()) == [1500] * 3
