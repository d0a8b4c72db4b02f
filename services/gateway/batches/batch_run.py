"""One batch, by the gateway that has its lease: its input is checked, its lines are answered, its files are made.

    validating ──► in_progress ──► finalizing ──► completed
        │              │  cancelled by its client: cancelling ──► cancelled
        ▼              ▼
      failed        expired          where its time is over: also out of validating

Where it stands is in the store alone. Who takes over, after a crash, goes on with the lines that have no result; a line that was
computed and not recorded is computed again. So each custom_id has one result in the end, in one file or the other.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import orjson

from services.gateway.batches import line_results
from services.gateway.batches.input_lines import BadLine, Line, check, numbered, read_line
from services.gateway.batches.lanes import Lanes
from services.gateway.batches.line_call import LineCalls, Told
from services.gateway.batches.line_results import CANCELLED, EXPIRED, answered, not_executed
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.caller import Caller
from services.gateway.request.errors import ApiError, bad_request
from services.gateway.state.batch_record import BatchOrder, BatchRecord, BatchStatus
from services.gateway.state.batch_store import BatchStore, LineResult
from services.gateway.state.file_store import FileStore
from services.gateway.state.lease import Lease
from services.gateway.state.state_store import StoreAway
from services.gateway.state.stored_files import ERRORS, OUTPUT, FileGone, StoredFile
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

T = TypeVar("T")
PAUSES_S = (0.5, 30.0)  # between two tries of a line, or of a call of the store: the first, and the longest
TRIES = 4  # of what may be the line's own fault: a worker that is lost with it, a fault
RESULTS_AT_ONCE = 100  # of lines that are not executed any more
PURPOSE = "batch_output"


class BatchRun:
    """caller: whose batch it is; raises ApiError where nobody is it any more. lines_at_once: of this batch."""

    def __init__(
        self,
        lease: Lease,
        order: BatchOrder,
        batches: BatchStore,
        files: FileStore,
        calls: LineCalls,
        lanes: Lanes,
        caller: Callable[[], Caller],
        lines_at_once: int,
        most_lines: int,
        metrics: GatewayMetrics,
    ) -> None:
        self.lease = lease
        self.order = order
        self._batches, self._files = batches, files
        self._calls, self._lanes = calls, lanes
        self._caller = caller
        self._free = asyncio.Semaphore(lines_at_once)
        self._most_lines = most_lines
        self._metrics = metrics
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._recording = 0  # answers that are on their way to the store
        self._all_recorded = asyncio.Event()
        self._all_recorded.set()

    def stop(self, why: str) -> None:
        """No more lines are executed, those that are being executed end. why: the code of lines without an answer. Again: no
        effect."""
        if not self._over.done():
            self._over.set_result(why)

    async def recorded(self) -> None:
        """Returns once the store has what has been answered by now."""
        await self._all_recorded.wait()

    async def run(self) -> None:
        """Until the batch is over. Raises LeaseLost; cancelled, it goes on elsewhere."""
        record = await self._record()
        if record is None or not record.is_open:
            await patiently(lambda: self._batches.forget(self.order.owner, self.order.id))
            return
        if record.status is BatchStatus.CANCELLING:
            self.stop(CANCELLED)
        try:
            await self._run(record)
        except FileGone:
            await self._fail((BadLine("input_file_gone", "The input file is not there any more."),))

    async def _run(self, record: BatchRecord) -> None:
        if record.status is BatchStatus.VALIDATING:
            if not await self._validated():
                return
            if (known := await self._record()) is None:
                return
            record = known
        if record.status is BatchStatus.IN_PROGRESS and not self._over.done():
            await self._until_stopped()
        await self._conclude(record)

    # Checking

    async def _validated(self) -> bool:
        """Whether its input is right. It is cancelled where it is not what it was."""
        checked = await check(self._content(), self.order.endpoint, self._most_lines)
        if checked.errors:
            await self._fail(checked.errors)
            return False
        known: dict[str, str | int] = {"total": checked.total, "last": checked.last, "model": checked.model}
        before, after = BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS
        if not await patiently(lambda: self._batches.advance(self.lease, self.order, before, after, **known)):
            self.stop(CANCELLED)
        logger.info("batch begins", extra=fields(batch=self.order.id, lines=checked.total))
        return True

    async def _fail(self, errors: Sequence[BadLine]) -> None:
        record = await self._record()
        if record is not None:
            await self._finish(record, BatchStatus.FAILED, orjson.dumps([error.as_dict() for error in errors]))

    # Executing

    async def _until_stopped(self) -> None:
        """All lines have their result, or the batch is stopped."""
        executing = asyncio.create_task(self._execute())
        try:
            await asyncio.wait((executing, self._over), return_when=asyncio.FIRST_COMPLETED)
            if executing.done():
                executing.result()
        finally:
            executing.cancel()
            await asyncio.wait((executing,))

    async def _execute(self) -> None:
        """Raises FileGone, LeaseLost, and RuntimeError where a line ended without a result: it is for the next try."""
        done = await patiently(lambda: self._batches.done(self.order))
        given_up: list[int] = []

        def ended(task: asyncio.Task[None], number: int) -> None:
            self._free.release()
            if task.cancelled():
                given_up.append(number)

        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._lines():
                    if line.number not in done:
                        await self._free.acquire()
                        task = group.create_task(self._execute_line(line))
                        task.add_done_callback(partial(ended, number=line.number))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if given_up:  # which a group does not tell of
            raise RuntimeError(f"line {given_up[0]} was cancelled, and nobody had asked for it")

    async def _execute_line(self, line: Line) -> None:
        """Waits out whatever passes: no room, no worker, limits of the key. While it does, others have its lane."""
        tries, pauses = 0, _rising()
        while True:
            told = await self._lanes.answer(lambda: self._tried(line))
            if isinstance(told, LineResult):
                break
            tries += _may_be_its_own(told)
            if not _passes(told) or tries >= TRIES:
                told = answered(line, told.answer)
                break
            self._metrics.batch_retries.inc()
            await asyncio.sleep(max(next(pauses), told.retry_after_s))
        self._recording += 1  # in the moment in which the lane is given back: whoever waits for both misses nothing
        self._all_recorded.clear()
        try:
            await self._keep([told], {line.number: line})
        finally:
            self._recording -= 1
            if not self._recording:
                self._all_recorded.set()

    async def _tried(self, line: Line) -> Told | LineResult:
        """A result: that it stays, whenever it is tried."""
        if line.streams:
            refusal = bad_request("stream", "'stream' cannot be used in a batch.", "unsupported_parameter")
            return answered(line, line_results.Answer(refusal.status, refusal.json(), self._name(line)))
        try:
            return await self._calls.call(self.order.endpoint, line.body, self._caller(), self._name(line))
        except ApiError as error:  # whose batch it is
            answer = line_results.Answer(error.status, error.json(), self._name(line))
            return Told(answer, error.retry_after_s or 0, error.code or "")

    def _name(self, line: Line) -> str:
        """What logs of all services call its request."""
        return f"{self.order.id}.{line.number}"

    # Concluding

    async def _conclude(self, record: BatchRecord) -> None:
        """Every line that has no result gets one that says why, and the files are made. record: as it was checked."""
        if record.status is BatchStatus.FINALIZING or (not self._over.done() and await self._finalizing()):
            end = BatchStatus.COMPLETED
        else:
            why = self._over.result() if self._over.done() else CANCELLED
            end = BatchStatus.EXPIRED if why == EXPIRED else BatchStatus.CANCELLED
            if record.total:
                await self._give_up(why)
        last = await self._record()
        if last is not None:
            await self._finish(last, end)

    async def _finalizing(self) -> bool:
        """False: it has been cancelled meanwhile."""
        before, after = BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING
        return await patiently(lambda: self._batches.advance(self.lease, self.order, before, after))

    async def _give_up(self, why: str) -> None:
        done = await patiently(lambda: self._batches.done(self.order))
        lines: dict[int, Line] = {}
        async for line in self._lines():
            if line.number not in done:
                lines[line.number] = replace(line, body=b"")  # which a result says nothing of, and may have 4 MiB
            if len(lines) == RESULTS_AT_ONCE:
                await self._keep([not_executed(each, why) for each in lines.values()], lines)
                lines = {}
        if lines:
            await self._keep([not_executed(each, why) for each in lines.values()], lines)

    async def _keep(self, results: list[LineResult], lines: dict[int, Line]) -> None:
        """Where the quota has no room for an answer, the line's result says so. Raises LeaseLost."""
        full = await patiently(lambda: self._batches.record(self.lease, self.order, results))
        if full:
            small = [not_executed(lines[each.number], "store_full") for each in full]
            await patiently(lambda: self._batches.record(self.lease, self.order, small))
        for each in results:
            self._metrics.batch_lines.labels("completed" if each.part == OUTPUT and each not in full else "failed").inc()

    async def _finish(self, record: BatchRecord, status: BatchStatus, errors: bytes = b"") -> None:
        now = int(time.time())
        expires_at = now + self.order.results_live_s
        files = [self._file(record, part, now, expires_at) for part in (OUTPUT, ERRORS)]
        there = [file for file in files if file.size]
        finish = self._batches.finish
        if await patiently(lambda: finish(self.lease, record, status, there, expires_at, errors)):
            self._metrics.batches.labels(status.value).inc()
        logger.info("batch is over", extra=fields(batch=self.order.id, status=status.value))

    def _file(self, record: BatchRecord, part: str, now: int, expires_at: int) -> StoredFile:
        file_id, size = {
            OUTPUT: (self.order.output_id, record.output_bytes),
            ERRORS: (self.order.error_id, record.error_bytes),
        }[part]
        name = f"{self.order.id}_{part}.jsonl"
        return StoredFile(file_id, size, now, expires_at, name, PURPOSE, batch=self.order.id, part=part, lines=record.last)

    # The store

    async def _record(self) -> BatchRecord | None:
        return await patiently(lambda: self._batches.get(self.order.owner, self.order.id))

    async def _lines(self) -> AsyncIterator[Line]:
        async for number, content in numbered(self._content()):
            yield read_line(number, content, self.order.endpoint)

    async def _content(self) -> AsyncIterator[bytes]:
        """Raises FileGone."""
        owner = self.order.owner
        file = await patiently(lambda: self._files.get(owner, self.order.input_file_id))
        if file is None:
            raise FileGone
        for number in range(file.chunks):
            yield await patiently(partial(self._files.chunk, owner, file, number))


def _passes(told: Told) -> bool:
    """A limit that does not say when is less than the request asks for."""
    return told.answer.status in (500, 503) or (told.answer.status == 429 and told.retry_after_s > 0)


def _may_be_its_own(told: Told) -> bool:
    """A request that takes its workers with it must not do so until its batch expires."""
    return told.answer.status == 500 or told.code == "worker_lost"


def _rising() -> Iterator[float]:
    """Seconds, each longer than the one before, and not the same for all who wait."""
    seconds, longest = PAUSES_S
    while True:
        yield seconds * random.uniform(0.5, 1.0)
        seconds = min(2 * seconds, longest)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What the store says, once it is there. Who loses the lease meanwhile is cancelled, or is told by the first write."""
    for pause in _rising():
        try:
            return await call()
        except StoreAway as away:
            logger.warning("a batch waits for the store: %s", away)
            await asyncio.sleep(pause)
    raise AssertionError("pauses have no end")
