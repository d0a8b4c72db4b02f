"""Encodes the texts of several requests in one call of the tokenizer.

A request that finds a free lane is encoded at once. Requests that arrive while all lanes are busy are encoded together by the
first free lane. Batches therefore form only under load, and no request waits for a batch to fill.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

Encode = Callable[[Sequence[str], bool], list[list[int]]]  # (texts, add_special_tokens) → ids of each text


@dataclass(frozen=True)
class _Job:
    """The texts of one waiting request."""

    texts: Sequence[str]
    add_special_tokens: bool
    chars: int  # in all texts
    done: asyncio.Future[list[list[int]]]  # ids of each text


class EncodeQueue:
    """The waiting requests and the lanes that encode them in the executor's threads. Belongs to one event loop."""

    def __init__(
        self,
        encode: Encode,
        executor: Executor,
        *,
        lanes: int,
        max_texts: int,
        max_chars: int,
        observe_texts: Callable[[float], None],
    ) -> None:
        self._encode = encode
        self._executor = executor
        self._lanes = lanes
        self._max_texts = max_texts
        self._max_chars = max_chars
        self._observe_texts = observe_texts
        self._waiting: deque[_Job] = deque()
        self._working = 0  # lanes that will read the queue again before they end
        self._tasks: set[asyncio.Task[None]] = set()  # keeps running lanes from being garbage-collected

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Returns one list of ids per text. Raises the tokenizer's exception if it fails."""
        done: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(texts, add_special_tokens, sum(map(len, texts)), done))
        if self._working < self._lanes:
            self._working += 1
            lane = asyncio.create_task(self._work())
            self._tasks.add(lane)
            lane.add_done_callback(self._tasks.discard)
        return await done

    async def _work(self) -> None:
        # The lane ends in the loop iteration in which it finds the queue empty, so a later job starts a new lane.
        try:
            await self._drain()
        finally:
            self._working -= 1

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._take():
            texts = [text for job in batch for text in job.texts]
            self._observe_texts(len(texts))
            try:
                ids = await loop.run_in_executor(self._executor, self._encode, texts, batch[0].add_special_tokens)
            except Exception as error:
                await self._fail(batch, error)
                continue
            _hand_out(batch, ids)

    def _take(self) -> list[_Job]:
        """Removes and returns the longest run of waiting jobs that fits in one call, at least one. Drops cancelled jobs."""
        batch: list[_Job] = []
        texts = chars = 0
        while self._waiting:
            job = self._waiting[0]
            texts, chars = texts + len(job.texts), chars + job.chars
            alike = not batch or job.add_special_tokens == batch[0].add_special_tokens
            if batch and not (alike and texts <= self._max_texts and chars <= self._max_chars):
                break
            self._waiting.popleft()
            if job.done.cancelled():
                texts, chars = texts - len(job.texts), chars - job.chars
            else:
                batch.append(job)
        return batch

    async def _fail(self, batch: list[_Job], error: Exception) -> None:
        """Reports the error to a single job. Encodes the jobs of a larger batch again one by one, so that only one job fails."""
        if len(batch) == 1:
            if not batch[0].done.done():
                batch[0].done.set_exception(error)
            return
        loop = asyncio.get_running_loop()
        for job in batch:
            try:
                ids = await loop.run_in_executor(self._executor, self._encode, job.texts, job.add_special_tokens)
            except Exception as own:
                await self._fail([job], own)
            else:
                _hand_out([job], ids)


def _hand_out(batch: list[_Job], ids: list[list[int]]) -> None:
    at = 0
    for job in batch:
        if not job.done.done():
            job.done.set_result(ids[at : at + len(job.texts)])
        at += len(job.texts)
