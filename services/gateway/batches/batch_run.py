"""Runs one batch at the gateway that has its lease: checks the input, computes the lines, and creates the result files.

    validating ──► in_progress ──► finalizing ──► completed
        │              │  cancelled by its client: cancelling ──► cancelled
        ▼              ▼
      failed        expired          a batch that is being validated can expire too

The state of a batch is only in the store. A gateway that takes over a batch computes the lines without a stored result. So each
custom_id gets exactly one result, in the output file or in the error file.
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

from rootstock_llm.services.gateway.batches import line_results
from rootstock_llm.services.gateway.batches.input_lines import BadLine, Line, check, numbered, read_line
from rootstock_llm.services.gateway.batches.lanes import Lanes
from rootstock_llm.services.gateway.batches.line_call import LineAttempt, LineCalls
from rootstock_llm.services.gateway.batches.line_results import CANCELLED, EXPIRED, answered, not_executed
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.store.batch_record import BatchOrder, BatchRecord, BatchStatus
from rootstock_llm.services.gateway.store.batch_store import BatchStore, LineResult
from rootstock_llm.services.gateway.store.file_store import FileStore
from rootstock_llm.services.gateway.store.lease import Lease
from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.gateway.store.stored_files import ERRORS, OUTPUT, FileGone, StoredFile
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

T = TypeVar("T")
PAUSES_S = (0.5, 30.0)  # first and longest pause between two attempts of a line or of a store call, in seconds; pauses double
TRIES = 4  # the line fails after this many failures that its request may have caused
RESULTS_AT_ONCE = 100  # lines per write to the store, for lines that get an error without being executed
PURPOSE = "batch_output"


class BatchRun:
    """The work of this gateway on one batch. Belongs to one event loop; ends when run() returns or is cancelled."""

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
        """Creates a run.

        Args:
            caller: Returns the caller of the batch. Raises ApiError if the API key is no longer valid.
            lines_at_once: Largest number of lines of this batch in progress, including lines that wait for a retry.
            most_lines: Largest number of lines in an input.
        """
        self.lease = lease
        self.order = order
        self._batches, self._files = batches, files
        self._calls, self._lanes = calls, lanes
        self._caller = caller
        self._line_slots = asyncio.Semaphore(lines_at_once)
        self._most_lines = most_lines
        self._metrics = metrics
        # Done when the batch is stopped. The value is the error code that lines without a result get.
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._recording = 0  # number of results that are being written to the store
        self._all_recorded = asyncio.Event()  # set while no result is being written
        self._all_recorded.set()

    def stop(self, why: str) -> None:
        """Stops the batch: running lines are cancelled, and lines without a result get the error code `why`.

        A second call has no effect.
        """
        if not self._stopped.done():
            self._stopped.set_result(why)

    async def recorded(self) -> None:
        """Returns when the store has the results of all lines that have been computed so far."""
        await self._all_recorded.wait()

    async def run(self) -> None:
        """Runs until the batch has ended. After a cancellation, another gateway continues the batch. Raises LeaseLost."""
        record = await self._read_record()
        if record is None or not record.is_open:
            await with_store_retries(lambda: self._batches.forget(self.order.owner, self.order.id))
            return
        if record.status is BatchStatus.CANCELLING:
            self.stop(CANCELLED)
        try:
            await self._run(record)
        except FileGone:
            await self._fail((BadLine("input_file_gone", "The input file was deleted or has expired."),))

    async def _run(self, record: BatchRecord) -> None:
        if record.status is BatchStatus.VALIDATING:
            if not await self._validate():
                return
            if (known := await self._read_record()) is None:
                return
            record = known
        if record.status is BatchStatus.IN_PROGRESS and not self._stopped.done():
            await self._until_stopped()
        await self._conclude(record)

    async def _validate(self) -> bool:
        """Checks the input, and moves the batch to in_progress. Stops the batch if its client has cancelled it.

        Returns:
            False if the input has faults. The batch then has the status failed.
        """
        checked = await check(self._content(), self.order.endpoint, self._most_lines)
        if checked.errors:
            await self._fail(checked.errors)
            return False
        known: dict[str, str | int] = {"total": checked.total, "last": checked.last, "model": checked.model}
        before, after = BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS
        if not await with_store_retries(lambda: self._batches.advance(self.lease, self.order, before, after, **known)):
            self.stop(CANCELLED)
        logger.info("batch begins", extra=fields(batch=self.order.id, lines=checked.total))
        return True

    async def _fail(self, errors: Sequence[BadLine]) -> None:
        record = await self._read_record()
        if record is not None:
            await self._finish(record, BatchStatus.FAILED, orjson.dumps([error.as_dict() for error in errors]))

    async def _until_stopped(self) -> None:
        """Returns when all lines have a result or the batch is stopped."""
        executing = asyncio.create_task(self._execute())
        try:
            await asyncio.wait((executing, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if executing.done():
                executing.result()
        finally:
            executing.cancel()
            await asyncio.wait((executing,))

    async def _execute(self) -> None:
        """Computes all lines without a stored result.

        Raises:
            FileGone: The input file was deleted or has expired.
            LeaseLost: Another gateway has the lease.
            RuntimeError: A line was cancelled, and has no result. The next gateway that takes the batch computes the line.
        """
        done = await with_store_retries(lambda: self._batches.lines_with_result(self.order))
        cancelled_lines: list[int] = []

        def ended(task: asyncio.Task[None], number: int) -> None:
            self._line_slots.release()
            if task.cancelled():
                cancelled_lines.append(number)

        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._lines():
                    if line.number not in done:
                        await self._line_slots.acquire()
                        task = group.create_task(self._execute_line(line))
                        task.add_done_callback(partial(ended, number=line.number))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if cancelled_lines:  # a task group does not report cancelled tasks
            raise RuntimeError(f"line {cancelled_lines[0]} was cancelled unexpectedly")

    async def _execute_line(self, line: Line) -> None:
        """Computes a line and records its result.

        Retries temporary failures, such as a full queue, a lost worker or a limit of the API key. Releases the lane during the
        pause before the next attempt.
        """
        tries, pauses = 0, _backoff()
        while True:
            attempt = await self._lanes.run_line(lambda: self._attempt(line))
            if isinstance(attempt, LineResult):
                result = attempt
                break
            tries += _may_be_caused_by_request(attempt)
            if not _may_pass(attempt) or tries >= TRIES:
                result = answered(line, attempt.answer)
                break
            self._metrics.batch_retries.inc()
            await asyncio.sleep(max(next(pauses), attempt.retry_after_s))
        # No await lies between the release of the lane and this increment, so drain() finds each line in a lane or in _recording.
        self._recording += 1
        self._all_recorded.clear()
        try:
            await self._record_results([result], {line.number: line})
        finally:
            self._recording -= 1
            if not self._recording:
                self._all_recorded.set()

    async def _attempt(self, line: Line) -> LineAttempt | LineResult:
        """Makes one attempt to compute a line. Returns a LineResult if a retry cannot change the result."""
        if line.streams:
            refusal = bad_request("stream", "'stream' cannot be used in a batch.", "unsupported_parameter")
            return answered(line, line_results.LineResponse(refusal.status, refusal.json(), self._request_id(line)))
        try:
            return await self._calls.call(self.order.endpoint, line.body, self._caller(), self._request_id(line))
        except ApiError as error:  # self._caller() does not accept the API key
            answer = line_results.LineResponse(error.status, error.json(), self._request_id(line))
            return LineAttempt(answer, error.retry_after_s or 0, error.code or "")

    def _request_id(self, line: Line) -> str:
        """Returns the request id of the line, for the response and for the logs of all services."""
        return f"{self.order.id}.{line.number}"

    async def _conclude(self, record: BatchRecord) -> None:
        """Ends the batch: stores an error for each line without a result, and creates the result files.

        Args:
            record: The record of the batch after its validation.
        """
        if record.status is BatchStatus.FINALIZING or (not self._stopped.done() and await self._begin_finalizing()):
            end = BatchStatus.COMPLETED
        else:
            why = self._stopped.result() if self._stopped.done() else CANCELLED
            end = BatchStatus.EXPIRED if why == EXPIRED else BatchStatus.CANCELLED
            if record.total:
                await self._fail_unexecuted_lines(why)
        last = await self._read_record()
        if last is not None:
            await self._finish(last, end)

    async def _begin_finalizing(self) -> bool:
        """Moves the batch to finalizing. Returns False if a client has cancelled it."""
        before, after = BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING
        return await with_store_retries(lambda: self._batches.advance(self.lease, self.order, before, after))

    async def _fail_unexecuted_lines(self, why: str) -> None:
        done = await with_store_retries(lambda: self._batches.lines_with_result(self.order))
        lines: dict[int, Line] = {}
        async for line in self._lines():
            if line.number not in done:
                lines[line.number] = replace(line, body=b"")  # frees the body, which may have 4 MiB and is not needed here
            if len(lines) == RESULTS_AT_ONCE:
                await self._record_results([not_executed(each, why) for each in lines.values()], lines)
                lines = {}
        if lines:
            await self._record_results([not_executed(each, why) for each in lines.values()], lines)

    async def _record_results(self, results: list[LineResult], lines: dict[int, Line]) -> None:
        """Stores results of lines. If a result exceeds the owner's quota, stores the error `store_full`. Raises LeaseLost.

        Args:
            lines: The lines of the results, by number.
        """
        full = await with_store_retries(lambda: self._batches.record(self.lease, self.order, results))
        if full:
            small = [not_executed(lines[each.number], "store_full") for each in full]
            await with_store_retries(lambda: self._batches.record(self.lease, self.order, small))
        for each in results:
            self._metrics.batch_lines.labels("completed" if each.part == OUTPUT and each not in full else "failed").inc()

    async def _finish(self, record: BatchRecord, status: BatchStatus, errors: bytes = b"") -> None:
        now = int(time.time())
        expires_at = now + self.order.results_live_s
        files = [self._file(record, part, now, expires_at) for part in (OUTPUT, ERRORS)]
        created = [file for file in files if file.size]
        finish = self._batches.finish
        if await with_store_retries(lambda: finish(self.lease, record, status, created, expires_at, errors)):
            self._metrics.batches.labels(status.value).inc()
        logger.info("a batch has ended", extra=fields(batch=self.order.id, status=status.value))

    def _file(self, record: BatchRecord, part: str, now: int, expires_at: int) -> StoredFile:
        file_id, size = {
            OUTPUT: (self.order.output_id, record.output_bytes),
            ERRORS: (self.order.error_id, record.error_bytes),
        }[part]
        name = f"{self.order.id}_{part}.jsonl"
        return StoredFile(file_id, size, now, expires_at, name, PURPOSE, batch=self.order.id, part=part, lines=record.last)

    async def _read_record(self) -> BatchRecord | None:
        return await with_store_retries(lambda: self._batches.get(self.order.owner, self.order.id))

    async def _lines(self) -> AsyncIterator[Line]:
        async for number, content in numbered(self._content()):
            yield read_line(number, content, self.order.endpoint)

    async def _content(self) -> AsyncIterator[bytes]:
        """Yields the chunks of the input file. Raises FileGone."""
        owner = self.order.owner
        file = await with_store_retries(lambda: self._files.get(owner, self.order.input_file_id))
        if file is None:
            raise FileGone
        for number in range(file.chunks):
            yield await with_store_retries(partial(self._files.chunk, owner, file, number))


def _may_pass(attempt: LineAttempt) -> bool:
    """Returns whether a retry may succeed.

    A 429 without Retry-After is permanent, because the request alone exceeds the limit.
    """
    return attempt.answer.status in (500, 503) or (attempt.answer.status == 429 and attempt.retry_after_s > 0)


def _may_be_caused_by_request(attempt: LineAttempt) -> bool:
    """Returns whether the request may have caused the failure, for example by crashing a worker.

    After TRIES such failures, the request is not retried, so that a harmful request disturbs only a few workers.
    """
    return attempt.answer.status == 500 or attempt.code == "worker_lost"


def _backoff() -> Iterator[float]:
    """Yields pauses in seconds: exponential backoff with jitter, without end."""
    seconds, longest = PAUSES_S
    while True:
        yield seconds * random.uniform(0.5, 1.0)
        seconds = min(2 * seconds, longest)


async def with_store_retries(call: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of a store call. Retries without limit while the store is unreachable.

    The lease may be lost during an outage. BatchRunner then cancels the batch, or the next write raises LeaseLost.
    """
    for pause in _backoff():
        try:
            return await call()
        except StoreAway as away:
            logger.warning("a batch waits for the store: %s", away)
            await asyncio.sleep(pause)
    raise AssertionError("_backoff() never ends")
