"""The queue of texts to encode: batches form only under load, and each request gets its own ids or error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from rootstock_llm.services.tokenizer.encoding import EncodeJob, EncodeQueue


class Gate:
    """An encoder that waits until `open` is set and records its calls. The only id of a text is the length of the text."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], bool]] = []
        self.open = threading.Event()

    def __call__(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        self.calls.append((list(texts), add_special_tokens))
        assert self.open.wait(5)
        if "bad" in texts:
            raise ValueError("bad")
        return [[len(text)] for text in texts]


def queue(gate: Gate, executor: ThreadPoolExecutor, max_texts: int = 8, max_chars: int = 100) -> EncodeQueue:
    return EncodeQueue(gate, executor, lanes=1, max_texts=max_texts, max_chars=max_chars, observe_texts=lambda _: None)


async def ids_of(waiting: EncodeQueue, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
    return [list(text.ids) for text in await waiting.encode(EncodeJob(texts, add_special_tokens))]


@pytest.mark.parametrize(
    ("name", "jobs", "calls"),
    [
        ("waiting requests", [(["b"], True), (["c", "d"], True)], [["b", "c", "d"]]),
        ("different flags", [(["b"], True), (["c"], False), (["d"], True)], [["b"], ["c"], ["d"]]),
        ("max_texts", [(["b"] * 5, True), (["c"] * 5, True)], [["b"] * 5, ["c"] * 5]),
        ("max_chars", [(["b" * 60], True), (["c" * 60], True)], [["b" * 60], ["c" * 60]]),
        ("long request", [(["b" * 500], True), (["c"], True)], [["b" * 500], ["c"]]),
    ],
)
def test_queue_forms_batches_within_limits(name: str, jobs: list[tuple[list[str], bool]], calls: list[list[str]]) -> None:
    async def run() -> None:
        gate = Gate()
        with ThreadPoolExecutor(1) as executor:
            waiting = queue(gate, executor)
            first = asyncio.create_task(ids_of(waiting, ["first"]))
            await asyncio.sleep(0)
            rest = [asyncio.create_task(ids_of(waiting, *job)) for job in jobs]
            await asyncio.sleep(0.01)
            gate.open.set()
            assert await first == [[5]]
            assert [await task for task in rest] == [[[len(t)] for t in texts] for texts, _ in jobs], name
        assert [texts for texts, _ in gate.calls] == [["first"], *calls], name

    asyncio.run(run())


def test_bad_text_fails_only_one_request() -> None:
    async def run() -> None:
        gate = Gate()
        with ThreadPoolExecutor(1) as executor:
            waiting = queue(gate, executor)
            tasks = [asyncio.create_task(ids_of(waiting, [text])) for text in ("first", "good", "bad", "better")]
            await asyncio.sleep(0.01)
            gate.open.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [results[0], results[1], results[3]] == [[[5]], [[4]], [[6]]]
        assert isinstance(results[2], ValueError)

    asyncio.run(run())


def test_queue_does_not_encode_a_cancelled_request() -> None:
    async def run() -> None:
        gate = Gate()
        with ThreadPoolExecutor(1) as executor:
            waiting = queue(gate, executor)
            tasks = [asyncio.create_task(ids_of(waiting, ["first"]))]
            await asyncio.sleep(0.01)
            tasks += [asyncio.create_task(ids_of(waiting, [text])) for text in ("gone", "here")]
            await asyncio.sleep(0.01)
            tasks[1].cancel()
            await asyncio.sleep(0)
            gate.open.set()
            assert await tasks[2] == [[4]]
        assert [texts for texts, _ in gate.calls] == [["first"], ["here"]]

    asyncio.run(run())


def test_queue_encodes_a_job_that_arrives_when_a_lane_ends() -> None:
    async def client(waiting: EncodeQueue) -> int:
        for number in range(1500):
            assert await ids_of(waiting, ["x" * (number % 7)]) == [[number % 7]]
        return 1500

    async def run() -> list[int]:
        gate = Gate()
        gate.open.set()
        with ThreadPoolExecutor(2) as executor:
            waiting = queue(gate, executor)
            async with asyncio.timeout(60):
                return await asyncio.gather(*(client(waiting) for _ in range(3)))

    assert asyncio.run(run()) == [1500] * 3
