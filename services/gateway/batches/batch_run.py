"""Runs one batch at the gateway that holds its lease: checks the input, computes the lines, and creates the result files.

    validating ──► in_progress ──► finalizing ──► completed
        │              │  cancelled by its client: cancelling ──► cancelled
        ▼              ▼
      failed        expired          a batch that is being validated can expire too

The state of a batch is only in the store. A gateway that takes a batch over computes the lines without a result. A line that was
computed but not recorded is computed again. So each custom_id ends with one result, in the output file or in the error file.
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
PAUSES_S = (0.5, 30.0)  # seconds between two attempts of a line or of a store call: the first pause, and the longest
TRIES = 4  # failures that a line's request may have caused, after which the line fails
RESULTS_AT_ONCE = 100  # errors of lines that are not executed, per write to the store
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
            lines_at_once: Lines of this batch that are computed at once.
            most_lines: Largest number of lines in an input.
        """
        self.lease = lease
        self.order = order
        self._batches, self._files = batches, files
        self._calls, self._lanes = calls, lanes
        self._caller = caller
        self._free = asyncio.Semaphore(lines_at_once)
        self._most_lines = most_lines
        self._metrics = metrics
        # The result is the error code of a stopped batch.
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._recording = 0  # results that are being written to the store
        self._all_recorded = asyncio.Event()
        self._all_recorded.set()

    def stop(self, why: str) -> None:
        """Stops the batch: running lines are cancelled, and lines without a result get the error code `why`.

        A second call has no effect.
        """
        if not self._over.done():
            self._over.set_result(why)

    async def recorded(self) -> None:
        """Returns when the store has the results of all lines that have been computed so far."""
        await self._all_recorded.wait()

    async def run(self) -> None:
        """Runs until the batch has ended. If cancelled, another gateway continues the batch. Raises LeaseLost."""
        record = await self._record()
        if record is None or not record.is_open:
            await patiently(lambda: self._batches.forget(self.order.owner, self.order.id))
            return
        if record.status is BatchStatus.CANCELLING:
            self.stop(CANCELLED)
        try:
            await self._run(record)
        except FileGone:
            await self._fail((BadLine("input_file_gone", "The input file was deleted or has expired."),))

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
        """Checks the input. Returns False after failing the batch. Stops the batch if a client has cancelled it."""
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
        """Returns when all lines have a result or the batch is stopped."""
        executing = asyncio.create_task(self._execute())
        try:
            await asyncio.wait((executing, self._over), return_when=asyncio.FIRST_COMPLETED)
            if executing.done():
                executing.result()
        finally:
            executing.cancel()
            await asyncio.wait((executing,))

    async def _execute(self) -> None:
        """Computes all lines without a result.

        Raises:
            FileGone: The input file does not exist any longer.
            LeaseLost: Another gateway has the batch.
            RuntimeError: A line ended without a result. The next gateway that takes the batch computes the line.
        """
        done = await patiently(lambda: self._batches.lines_with_result(self.order))
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
        if given_up:  # a task group does not report cancelled tasks
            raise RuntimeError(f"line {given_up[0]} was cancelled unexpectedly")

    async def _execute_line(self, line: Line) -> None:
        """Computes a line and records its result.

        Temporary failures, such as a full queue, a lost worker or a limit of the API key, are retried. A line that waits for
        its next attempt has no lane.
        """
        tries, pauses = 0, _backoff()
        while True:
            attempt = await self._lanes.answer(lambda: self._try(line))
            if isinstance(attempt, LineResult):
                result = attempt
                break
            tries += _may_be_caused_by_request(attempt)
            if not _may_pass(attempt) or tries >= TRIES:
                result = answered(line, attempt.answer)
                break
            self._metrics.batch_retries.inc()
            await asyncio.sleep(max(next(pauses), attempt.retry_after_s))
        self._recording += 1  # no await since the lane was released, so that drain() always counts the line
        self._all_recorded.clear()
        try:
            await self._keep([result], {line.number: line})
        finally:
            self._recording -= 1
            if not self._recording:
                self._all_recorded.set()

    async def _try(self, line: Line) -> LineAttempt | LineResult:
        """Makes one attempt. Returns a LineResult if a retry cannot change the outcome."""
        if line.streams:
            refusal = bad_request("stream", "'stream' cannot be used in a batch.", "unsupported_parameter")
            return answered(line, line_results.LineResponse(refusal.status, refusal.json(), self._name(line)))
        try:
            return await self._calls.call(self.order.endpoint, line.body, self._caller(), self._name(line))
        except ApiError as error:  # raised by self._caller(), because the API key is not accepted
            answer = line_results.LineResponse(error.status, error.json(), self._name(line))
            return LineAttempt(answer, error.retry_after_s or 0, error.code or "")

    def _name(self, line: Line) -> str:
        """Returns the line's request id, which is in the logs of all services."""
        return f"{self.order.id}.{line.number}"

    # Concluding

    async def _conclude(self, record: BatchRecord) -> None:
        """Ends the batch: gives every line without a result an error, and creates the files.

        Args:
            record: The batch after its validation.
        """
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
        """Moves the batch to finalizing. Returns False if a client has cancelled it."""
        before, after = BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING
        return await patiently(lambda: self._batches.advance(self.lease, self.order, before, after))

    async def _give_up(self, why: str) -> None:
        done = await patiently(lambda: self._batches.lines_with_result(self.order))
        lines: dict[int, Line] = {}
        async for line in self._lines():
            if line.number not in done:
                lines[line.number] = replace(line, body=b"")  # frees the body, which may have 4 MiB and is not needed
            if len(lines) == RESULTS_AT_ONCE:
                await self._keep([not_executed(each, why) for each in lines.values()], lines)
                lines = {}
        if lines:
            await self._keep([not_executed(each, why) for each in lines.values()], lines)

    async def _keep(self, results: list[LineResult], lines: dict[int, Line]) -> None:
        """Records results. A result that exceeds the owner's quota is replaced by the error `store_full`. Raises LeaseLost."""
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
        created = [file for file in files if file.size]
        finish = self._batches.finish
        if await patiently(lambda: finish(self.lease, record, status, created, expires_at, errors)):
            self._metrics.batches.labels(status.value).inc()
        logger.info("a batch has ended", extra=fields(batch=self.order.id, status=status.value))

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
        """Yields the chunks of the input file. Raises FileGone."""
        owner = self.order.owner
        file = await patiently(lambda: self._files.get(owner, self.order.input_file_id))
        if file is None:
            raise FileGone
        for number in range(file.chunks):
            yield await patiently(partial(self._files.chunk, owner, file, number))


def _may_pass(attempt: LineAttempt) -> bool:
    """Returns whether a retry may succeed.

    A 429 without Retry-After is permanent, because the request alone exceeds the limit.
    """
    return attempt.answer.status in (500, 503) or (attempt.answer.status == 429 and attempt.retry_after_s > 0)


def _may_be_caused_by_request(attempt: LineAttempt) -> bool:
    """Returns whether the request may have caused the failure. TRIES bounds how many workers such a request may disturb."""
    return attempt.answer.status == 500 or attempt.code == "worker_lost"


def _backoff() -> Iterator[float]:
    """Yields pauses in seconds: exponential backoff with jitter, without end."""
    seconds, longest = PAUSES_S
    while True:
        yield seconds * random.uniform(0.5, 1.0)
        seconds = min(2 * seconds, longest)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of a store call, retrying without limit while the store is unreachable.

    If the lease is lost during an outage, the runner cancels the batch, or the next write raises LeaseLost.
    """
    for pause in _backoff():
        try:
            return await call()
        except StoreAway as away:
            logger.warning("a batch waits for the store: %s", away)
            await asyncio.sleep(pause)
    raise AssertionError("pauses have no end")
