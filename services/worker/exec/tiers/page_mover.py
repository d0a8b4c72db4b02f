"""Moves KV pages and units between the device's pools, the host tier, the storage tier and remote workers, while steps run.

The mover has one thread for backups (copies to the host tier), one for loads (copies from the host tier), one for the storage
tier and one per remote worker. So a slow disk or remote worker does not delay the host tier, and a backup does not delay a load.
Each thread runs its jobs in order. On a CPU, the thread for backups has a lower priority than steps.

Every operation has one completion report (Fact). The fact of a load may be early, which means that it is reported before the last
layer has arrived. A fact without an operation (UNASKED) then reports the load's duration. A failed operation is logged, and its
fact has no moved page. If a load fails after its early fact, the mover calls on_lost.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.reservations import KvSource
from rootstock_llm.services.worker.core.contracts.transfers import (
    UNASKED,
    Deleted,
    Fact,
    OperationKind,
    PageOperation,
    Selection,
)
from rootstock_llm.services.worker.exec.contracts.page_store import News, PageStore
from rootstock_llm.services.worker.exec.contracts.peer_pages import PeerReader
from rootstock_llm.services.worker.exec.pools.kv_pool import Arrivals, LayerLoads
from rootstock_llm.services.worker.exec.streams.cuda_streams import LoadFailed, Mark, Streams
from rootstock_llm.services.worker.exec.tiers.block_log import BlockLog
from rootstock_llm.services.worker.exec.tiers.page_copier import PageCopier

logger = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 30.0  # seconds for which close() waits for each thread
PEER_IDLE_S = 60.0  # seconds without a job after which the thread of a remote worker ends
NEWS_S = 1.0  # seconds from the end of a query of a shared storage for changes to the next query
MORE_NEWS_S = 0.02  # seconds until the next query if a query has returned only a part of the changes
PULLED_BYTES = 16 << 20  # largest number of bytes of units in one read from a remote worker, unless a page is larger
FACT_KEYS = 8192  # largest number of keys or blocks in one fact
# Nice value of the thread for backups. On a contended core, the thread gets about a tenth of the share of a step's thread. A
# backup may be slow, because its pages are pinned.
BACK_UP_NICE = 10
URGENT = -1  # stream priority of loads, because steps wait for their layers
_STORAGE_KINDS = (OperationKind.STORE, OperationKind.FETCH)


@dataclass(frozen=True, slots=True)
class _Work:
    """A page operation."""

    operation: PageOperation
    mark: Mark  # point on the copy stream after all steps that were launched before the operation


@dataclass(frozen=True, slots=True)
class _Delete:
    """A deletion in the storage tier."""

    which: Selection  # pages to delete
    done: Future[Deleted]  # receives the result, unless the caller has cancelled it


@dataclass(frozen=True, slots=True)
class _QueryNews:
    """A query for changes of a shared storage."""


@dataclass(frozen=True, slots=True)
class _Leave:
    """The release of a remote worker's reservation."""

    source: KvSource


Job = _Work | _Delete | _QueryNews | _Leave


class PageMover:
    """The page mover of an executor."""

    def __init__(
        self,
        streams: Streams,
        copier: Callable[[], PageCopier],
        arrivals: Arrivals,
        host: Tensor,
        store: PageStore | None,
        peers: PeerReader | None = None,
        log: BlockLog | None = None,
        unpin: Callable[[], None] | None = None,
        by_layers: bool = True,
    ) -> None:
        """Starts the threads for host and storage.

        Args:
            streams: streams of the executor.
            copier: returns a copier of the present pools.
            arrivals: loads that write pages of the pools layer by layer, to which the mover adds its loads.
            host: memory of the host tier, uint8[host pages, page bytes], pinned if the device is a GPU.
            store: storage tier, None if there is none. Apart from the start and the end, only the storage thread calls it.
            peers: reader of remote workers' pages, None if there is none.
            log: log of the names of stored blocks, None for no log. Only the storage thread calls it.
            unpin: called by close() after all threads have ended; None if `host` is not pinned.
            by_layers: whether pages are loaded layer by layer, see can_load_by_layers().
        """
        self._streams, self._copier, self._host, self._store, self._peers = streams, copier, host, store, peers
        self._arrivals, self._loads, self._by_layers = arrivals, LayerLoads(streams, arrivals), by_layers
        self._log, self._unpin = log, unpin
        self._peer_jobs: dict[str, queue.SimpleQueue[Job | None]] = {}  # queues of the threads of remote workers, by address
        self._lock = threading.Lock()  # guards _peer_jobs
        self._per_thread = threading.local()  # staging memory of each thread
        self.on_fact: Callable[[], None] = lambda: None  # called on any thread when facts() has new facts
        self.on_lost: Callable[[str], None] = logger.error  # called with the reason if steps wait for pages that cannot arrive
        self._facts: queue.SimpleQueue[Fact] = queue.SimpleQueue()
        if store is not None:
            self._facts.put(Fact(UNASKED, stored=tuple(store.keys()), use=store.use()))
        if log is not None:
            blocks = log.read()
            for at in range(0, len(blocks), FACT_KEYS):
                self._facts.put(Fact(UNASKED, blocks=tuple(blocks[at : at + FACT_KEYS])))
        self._load_jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._backup_jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._storage_jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        queues = {"kv-host": self._load_jobs, "kv-backup": self._backup_jobs}
        if store is not None:
            queues["kv-storage"] = self._storage_jobs
        self._threads: list[threading.Thread] = []
        self._query_at = 0.0  # time.monotonic() of the next query of a shared storage for changes
        for name, waiting in queues.items():
            self._start(name, waiting)

    @property
    def peers(self) -> PeerReader | None:
        return self._peers

    @property
    def store(self) -> PageStore | None:
        return self._store

    def settle(self) -> None:
        """Blocks until all loads that were reported early are complete. Raises LoadFailed."""
        self._arrivals.settle()

    def begin(self, operation: PageOperation) -> None:
        """Begins an operation after all work that was launched before. Does not block. Called by the loop's thread."""
        try:
            self._streams.launch(partial(self._dispatch, operation))
        except Exception:  # the device is lost; the next step fails for the same reason
            self._log_failed(operation)
            self._report(Fact(operation.op_id))

    def facts(self) -> list[Fact]:
        found: list[Fact] = []
        while not self._facts.empty():
            found.append(self._facts.get_nowait())
        return found

    def delete_stored(self, which: Selection, done: Future[Deleted]) -> None:
        """Deletes pages of the storage tier after all earlier operations of this tier. Does not block."""
        if self._store is not None:
            self._streams.launch(partial(self._storage_jobs.put, _Delete(which, done)))
        elif done.set_running_or_notify_cancel():
            done.set_result(Deleted(0))

    def leave(self, source: KvSource) -> None:
        """Releases a remote worker's reservation. Does not block."""
        if self._peers is not None:  # the release is queued after earlier reads of the remote worker
            self._streams.launch(partial(self._enqueue_leave, source))

    def close(self) -> None:
        """Ends the threads, and closes store and log. Called when the core waits for no operation.

        If a thread does not end within CLOSE_TIMEOUT_S, store and log stay open, and the host memory stays pinned.
        """
        if self._peers is not None:
            self._peers.close()
        with self._lock:
            peers = list(self._peer_jobs.values())
        for waiting in (self._load_jobs, self._backup_jobs, self._storage_jobs, *peers):
            waiting.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        if any(thread.is_alive() for thread in self._threads):
            return
        if self._unpin is not None:
            self._unpin()
        if self._store is not None:
            self._store.close()
            if self._log is not None:
                self._log.close()

    def _enqueue_leave(self, source: KvSource) -> None:
        """Queues the release of a reservation. If no thread can be started, the reservation ends after its hold time."""
        self._enqueue(source.address, _Leave(source))

    def _dispatch(self, operation: PageOperation) -> None:
        """Queues an operation for the thread of its kind. If no thread can be started for a pull, reports it as failed."""
        self._streams.copy_after_forward()
        work = _Work(operation, self._streams.mark_copy())
        if operation.pull is not None:
            if not self._enqueue(operation.pull.source.address, work):
                self._report(Fact(operation.op_id))
        elif operation.kind is OperationKind.BACK_UP:
            self._backup_jobs.put(work)
        else:
            (self._storage_jobs if operation.kind in _STORAGE_KINDS else self._load_jobs).put(work)

    def _enqueue(self, address: str, job: Job) -> bool:
        """Queues a job on the reader thread of a remote worker, starting the thread if it is not running.

        Returns:
            False if no thread can be started.
        """
        with self._lock:
            waiting = self._peer_jobs.get(address)
            if waiting is None:
                waiting = queue.SimpleQueue()
                try:
                    self._start("kv-peer", waiting, PEER_IDLE_S, address)
                except RuntimeError:
                    logger.exception("could not start the reader thread of a remote worker", extra=fields(address=address))
                    return False
                self._peer_jobs[address] = waiting
            waiting.put(job)
            return True

    def _start(self, name: str, jobs: queue.SimpleQueue[Job | None], idle_s: float | None = None, address: str = "") -> None:
        thread = threading.Thread(target=self._serve, args=(jobs, idle_s, address), name=name, daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _next(self, jobs: queue.SimpleQueue[Job | None], idle_s: float | None, address: str) -> Job | None:
        """Waits for the next job. Returns None if the thread must end: after close(), or after `idle_s` seconds without a job."""
        if jobs is self._storage_jobs and self._store is not None and self._store.shared:
            return self._next_of_shared_storage(jobs)
        try:
            return jobs.get(timeout=idle_s)
        except queue.Empty:
            with self._lock:
                if not jobs.empty():
                    return jobs.get_nowait()
                del self._peer_jobs[address]
                return None

    def _next_of_shared_storage(self, jobs: queue.SimpleQueue[Job | None]) -> Job | None:
        """Returns the next job of the thread of a shared storage.

        A query is due NEWS_S seconds after the last one, even if other jobs are queued.
        """
        seconds = self._query_at - time.monotonic()
        with suppress(queue.Empty):  # the query is due
            if seconds > 0:
                return jobs.get(timeout=seconds)
        return _QueryNews()

    def _serve(self, jobs: queue.SimpleQueue[Job | None], idle_s: float | None, address: str) -> None:
        torch.set_num_threads(1)  # applies to the calling thread only
        if jobs is self._backup_jobs and self._streams.on_host:
            own = os.getpriority(os.PRIO_PROCESS, 0)
            with suppress(OSError):  # a sandbox may not permit priorities
                os.setpriority(os.PRIO_PROCESS, 0, max(own, BACK_UP_NICE))  # Linux sets it for this thread only
        with torch.inference_mode(), self._streams.on_spare(URGENT if jobs is self._load_jobs else 0):
            while (job := self._next(jobs, idle_s, address)) is not None:
                match job:
                    case _Work(operation) if self._by_layers and operation.kind is OperationKind.LOAD and not operation.group:
                        self._load(job)
                    case _Work():
                        self._report(self._run(job))
                    case _Leave(source) if self._peers is not None:
                        self._leave(self._peers, source)
                    case _Delete(which, done) if self._store is not None:
                        self._delete(self._store, which, done)
                    case _QueryNews() if self._store is not None:
                        self._report_news(self._store)

    def _report_news(self, store: PageStore) -> None:
        try:
            news = store.news()
        except Exception:  # an error of any type; pages that the core does not know to be stored are computed
            logger.exception("could not query the shared storage for changes")
            news = News((), ())
        # From the end of the query on. If a query takes longer than NEWS_S, other jobs still run between two queries.
        self._query_at = time.monotonic() + (MORE_NEWS_S if news.more else NEWS_S)
        if news.stored or news.dropped:
            self._report(Fact(UNASKED, stored=news.stored, dropped=news.dropped, use=store.use()))

    def _delete(self, store: PageStore, which: Selection, done: Future[Deleted]) -> None:
        """Deletes pages, and reports the changes to the core even if the caller has cancelled `done`."""
        is_wanted = done.set_running_or_notify_cancel()
        try:
            deleted = store.delete(which)
        except Exception as error:  # an error of any type; `done` passes it to the caller
            logger.exception("could not delete stored pages")
            if is_wanted:
                done.set_exception(error)
            return
        if self._log is not None:
            self._log.sweep()
        for at in range(0, len(deleted.dropped), FACT_KEYS):
            self._facts.put(Fact(UNASKED, dropped=deleted.dropped[at : at + FACT_KEYS]))
        self._report(Fact(UNASKED, use=store.use()))
        if is_wanted:
            done.set_result(deleted)

    @staticmethod
    def _leave(peers: PeerReader, source: KvSource) -> None:
        try:
            peers.leave(source)
        except Exception:  # an error of any type; the reservation ends after its hold time
            logger.exception("could not release a KV reservation", extra=fields(address=source.address))

    def _report(self, fact: Fact) -> None:
        self._facts.put(fact)
        self.on_fact()

    def _load(self, work: _Work) -> None:
        """Loads pages layer by layer.

        The fact may be reported early, before the last layer has arrived. A fact without an operation then reports the duration.
        """
        operation, count = work.operation, len(work.operation.keys)
        try:
            copier = self._copier()
            load_group = copier.group_loader(self._host, operation.host_pages, operation.pages)
            work.mark.precede()
            report = partial(self._report, Fact(operation.op_id, count, early=True))
            size = count * copier.page_bytes
            seconds, was_early = self._loads.load(load_group, operation.pages, copier.groups, size, report)
        except LoadFailed as error:
            self._log_failed(operation)
            self.on_lost(str(error))
        except Exception:  # an error of any type; the core computes the pages instead
            self._log_failed(operation)
            self._settle()
            self._report(Fact(operation.op_id))
        else:
            self._report(Fact(UNASKED, loaded=(count, seconds)) if was_early else Fact(operation.op_id, count, seconds))

    def _log_failed(self, operation: PageOperation) -> None:
        logger.exception("could not move pages", extra=fields(kind=operation.kind.name, pages=len(operation.keys)))

    def _run(self, work: _Work) -> Fact:
        operation = work.operation
        try:
            work.mark.wait()
            began = time.perf_counter()
            count, stored, dropped = self._move(operation)
            self._synchronize()
        except Exception:  # an error of any type; the pages are computed instead, or stay in their tier
            self._log_failed(operation)
            self._settle()
            return Fact(operation.op_id)
        use = self._store.use() if self._store is not None and (stored or dropped) else None
        return Fact(operation.op_id, count, time.perf_counter() - began, stored, dropped, use)

    def _settle(self) -> None:
        """Waits until this thread's copies have ended, so that no page is written after its operation is reported as failed.

        Errors are only logged, because a device that does not respond writes nothing.
        """
        try:
            self._synchronize()
        except Exception as error:  # an error of the driver, of any type
            logger.error("the device does not respond", extra=fields(error=repr(error)))

    def _move(self, operation: PageOperation) -> tuple[int, tuple[bytes, ...], tuple[bytes, ...]]:
        """Runs an operation.

        Returns the number of moved pages, the keys that are now in the storage, and the keys that are no longer in the storage.
        """
        match operation.kind:
            case OperationKind.BACK_UP:
                self._arrivals.settle()  # a load may still write these pages, or read these rows
                if operation.group:
                    units = self._copier().units[operation.group - 1]
                    units.save(units.rows_of(operation.pages), self._host_rows(operation), streamed=True)
                else:
                    self._copier().save(operation.pages, self._host_rows(operation), streamed=True)
                return len(operation.keys), (), ()
            case OperationKind.LOAD:
                self._restore(operation, self._host_rows(operation))
                return len(operation.keys), (), ()
            case OperationKind.STORE:
                return self._stored(operation)
            case OperationKind.FETCH:
                return self._fetched(operation)
            case OperationKind.PULL:
                return self._pulled(operation), (), ()

    def _pulled(self, operation: PageOperation) -> int:
        """Reads pages of a remote worker into staging memory, and copies them to the pools if the read succeeds.

        A failed read must not change the pools.
        """
        assert self._peers is not None, "a PULL needs a reader of remote workers"
        assert operation.pull is not None, "a PULL has a KV source"
        rows = self._staging(len(operation.keys))
        at_once = len(rows) if not operation.group else max(1, PULLED_BYTES // rows.shape[1])
        for at in range(0, len(rows), at_once):
            some, pull = rows[at : at + at_once], replace(operation.pull, first=operation.pull.first + at)
            out = some.numpy().reshape(-1).data
            if not self._peers.read(pull, len(some), out, operation.group):
                return 0
        self._restore(operation, rows.unbind())
        return len(rows)

    def _stored(self, operation: PageOperation) -> tuple[int, tuple[bytes, ...], tuple[bytes, ...]]:
        assert self._store is not None, "a STORE operation needs a storage tier"
        written = self._store.write(operation.keys, [row.numpy().data for row in self._host_rows(operation)])
        if self._log is not None and operation.blocks:
            stored = set(written.stored)
            self._log.append(block for block in operation.blocks if block.keys[-1] in stored)
        return len(written.stored) + written.already_stored, written.stored, written.dropped

    def _fetched(self, operation: PageOperation) -> tuple[int, tuple[bytes, ...], tuple[bytes, ...]]:
        """Reads pages of the storage and copies them to the pools. The first page that was not read is reported as lost."""
        assert self._store is not None, "a FETCH operation needs a storage tier"
        rows = self._staging(len(operation.keys))
        count = self._store.read(operation.keys, rows.numpy().data)
        self._restore(operation, rows[:count].unbind())
        missing = operation.keys[count : count + 1]
        return count, (), tuple(dict.fromkeys((*self._store.take_lost(), *missing)))

    def _restore(self, operation: PageOperation, rows: Sequence[Tensor]) -> None:
        """Copies the first rows of an operation to its pages, or to its units of which all parts are in `rows`.

        Waits for earlier loads, because they may still write to these pages.
        """
        count = len(rows) // operation.num_parts
        if not count:
            return
        self._arrivals.settle()
        if operation.group:
            self._copier().units[operation.group - 1].restore(rows[: count * operation.num_parts], operation.pages[:count])
        else:
            self._copier().restore(rows, operation.pages[:count])

    def _host_rows(self, operation: PageOperation) -> list[Tensor]:
        """Returns the operation's rows of the host tier, uint8[page bytes] each. The core pins them during the operation."""
        return [self._host[page] for page in operation.host_pages.tolist()]

    def _staging(self, pages: int) -> Tensor:
        """Returns uint8[n, page bytes] of this thread's staging memory, valid until its next operation.

        The memory is reused, because filling new memory takes several times as long. For a GPU, it is pinned, also without a host
        tier. Otherwise, the thread would wait for the copy of each page.
        """
        buffer: Tensor | None = getattr(self._per_thread, "staging", None)
        if buffer is None or len(buffer) < pages:
            buffer = self._per_thread.staging = torch.empty(
                (pages, self._host.shape[1]), dtype=torch.uint8, pin_memory=self._streams.device.type == "cuda"
            )
        return buffer[:pages]

    def _synchronize(self) -> None:
        """Waits until a GPU has done the work that this thread has launched."""
        if self._streams.device.type == "cuda":
            torch.cuda.current_stream(self._streams.device).synchronize()
