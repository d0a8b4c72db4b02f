"""Moves pages of KV between the device, host memory, a storage and other workers, beside the steps.

Threads of their own, so that a slow disk or worker keeps no page of the host waiting, and a copy to the host none that a request
waits for: one copies to the host and one from it, one calls the storage, one reads from each worker. Each does what it was given
in order. Where steps are computed by the host's cores they have these before copies to the host. What fails is logged and moves
nothing; every operation ends in one fact.
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
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.shared.observe.log_fields import fields
from services.worker.core.contracts.reservations import KvSource
from services.worker.core.contracts.transfers import I32, UNASKED, Deleted, Fact, OperationKind, PageOperation, Selection
from services.worker.exec.contracts.page_store import PageStore
from services.worker.exec.contracts.peer_pages import PeerReader
from services.worker.exec.pools.arrivals import Arrivals
from services.worker.exec.pools.layer_loads import LayerLoads
from services.worker.exec.streams.cuda_streams import Mark, NeverCame, Streams
from services.worker.exec.tiers.block_log import BlockLog
from services.worker.exec.tiers.page_copier import PageCopier

logger = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 30.0
PEER_IDLE_S = 60.0
NEWS_S = 1.0  # between looks at what others have written to a shared storage
MORE_NEWS_S = 0.02  # while there is more than is told at once
FACT_KEYS = 8192
BACK_UP_NICE = 10  # a tenth of what a step's threads get of a core that both want: pages are kept while they are copied
URGENT = -1  # of a stream: layers that steps wait for come ahead of what else the device has to do
_OF_STORAGE = (OperationKind.STORE, OperationKind.FETCH)


@dataclass(frozen=True, slots=True)
class _Work:
    """mark: where all steps have ended that were launched before the operation was begun."""

    operation: PageOperation
    mark: Mark


@dataclass(frozen=True, slots=True)
class _Delete:
    """Pages of the storage. done: told what has come of it, unless nobody waits for that."""

    which: Selection
    done: Future[Deleted]


@dataclass(frozen=True, slots=True)
class _Ask:
    """A shared storage for news."""


@dataclass(frozen=True, slots=True)
class _Leave:
    """Nothing more is wanted of another worker's room."""

    source: KvSource


Job = _Work | _Delete | _Ask | _Leave


class PageMover:
    """copier: of the pools as they are at that time. arrivals: told of what comes into them layer by layer. host: uint8[host
    pages, page bytes], pinned where the device is a GPU. store: None where the host's memory is the last tier; called on its own
    thread alone. peers: None where nothing is read from other workers. log: of the blocks that the store's pages are of, None
    where nobody keeps them; called as the store is. unpin: called once nothing moves any more, None where nothing is pinned.
    by_layers: loads are, see brings_rightly(). on_fact: called on any thread whenever there is a fact to be taken. on_lost:
    called with a sentence where steps wait for pages that do not come."""

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
        self._streams, self._copier, self._host, self._store, self._peers = streams, copier, host, store, peers
        self._arrivals, self._loads, self._by_layers = arrivals, LayerLoads(streams, arrivals), by_layers
        self._log, self._unpin = log, unpin
        self._of_peers: dict[str, queue.SimpleQueue[Job | None]] = {}  # by address
        self._lock = threading.Lock()  # of the threads that read from other workers
        self._own = threading.local()  # memory of each thread
        self.on_fact: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str], None] = logger.error
        self._facts: queue.SimpleQueue[Fact] = queue.SimpleQueue()
        if store is not None:
            self._facts.put(Fact(UNASKED, stored=tuple(store.keys()), use=store.use()))
        if log is not None:
            blocks = log.read()
            for at in range(0, len(blocks), FACT_KEYS):
                self._facts.put(Fact(UNASKED, blocks=tuple(blocks[at : at + FACT_KEYS])))
        self._of_host: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._of_backups: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._of_storage: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        queues = {"kv-host": self._of_host, "kv-backup": self._of_backups}
        if store is not None:
            queues["kv-storage"] = self._of_storage
        self._threads: list[threading.Thread] = []
        self._ask_at = 0.0  # when a shared storage is to be asked for news
        for name, waiting in queues.items():
            self._start(name, waiting)

    @property
    def peers(self) -> PeerReader | None:
        return self._peers

    @property
    def store(self) -> PageStore | None:
        return self._store

    def settle(self) -> None:
        """Blocks until all is there that the core was told of. Raises NeverCame."""
        self._arrivals.settle()

    def begin(self, operation: PageOperation) -> None:
        """Behind what was launched on the streams by now. Called on the thread that launches steps."""
        try:
            self._streams.launch(partial(self._passed, operation))
        except Exception:  # whatever a lost device raises: steps find that out for themselves
            self._log_unmoved(operation)
            self._tell(Fact(operation.op_id))

    def facts(self) -> list[Fact]:
        found: list[Fact] = []
        while not self._facts.empty():
            found.append(self._facts.get_nowait())
        return found

    def delete_stored(self, which: Selection, done: Future[Deleted]) -> None:
        """Has pages deleted that the storage keeps, once what was begun before is done; does not wait for it."""
        if self._store is not None:
            self._streams.launch(partial(self._of_storage.put, _Delete(which, done)))
        elif done.set_running_or_notify_cancel():
            done.set_result(Deleted(0))

    def leave(self, source: KvSource) -> None:
        """Says to another worker that nothing more is wanted of its room; does not wait for it."""
        if self._peers is not None:  # behind what was begun before it
            self._streams.launch(partial(self._passed_leave, source))

    def close(self) -> None:
        """Once no operation is under way any more that anybody waits for."""
        if self._peers is not None:
            self._peers.close()
        with self._lock:
            peers = list(self._of_peers.values())
        for waiting in (self._of_host, self._of_backups, self._of_storage, *peers):
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

    def _passed_leave(self, source: KvSource) -> None:
        """Where no thread can be had its room ends by itself."""
        self._give(source.address, _Leave(source))

    def _passed(self, operation: PageOperation) -> None:
        self._streams.copy_after_forward()
        work = _Work(operation, self._streams.mark_copy())
        if operation.pull is not None:
            if not self._give(operation.pull.source.address, work):
                self._tell(Fact(operation.op_id))
        elif operation.kind is OperationKind.BACK_UP:
            self._of_backups.put(work)
        else:
            (self._of_storage if operation.kind in _OF_STORAGE else self._of_host).put(work)

    def _give(self, address: str, job: Job) -> bool:
        """To the thread that reads from that worker, which is started for it if there is none. False: there is none to be had."""
        with self._lock:
            waiting = self._of_peers.get(address)
            if waiting is None:
                waiting = queue.SimpleQueue()
                try:
                    self._start("kv-peer", waiting, PEER_IDLE_S, address)
                except RuntimeError:
                    logger.exception("nothing can be read from another worker", extra=fields(address=address))
                    return False
                self._of_peers[address] = waiting
            waiting.put(job)
            return True

    def _start(self, name: str, jobs: queue.SimpleQueue[Job | None], idle_s: float | None = None, address: str = "") -> None:
        thread = threading.Thread(target=self._serve, args=(jobs, idle_s, address), name=name, daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _next(self, jobs: queue.SimpleQueue[Job | None], idle_s: float | None, address: str) -> Job | None:
        """None: there is none to come. Of a worker that nothing was read from for so long no thread is kept."""
        if jobs is self._of_storage and self._store is not None and self._store.shared:
            return self._next_of_shared(jobs)
        try:
            return jobs.get(timeout=idle_s)
        except queue.Empty:
            with self._lock:
                if not jobs.empty():
                    return jobs.get_nowait()
                del self._of_peers[address]
                return None

    def _next_of_shared(self, jobs: queue.SimpleQueue[Job | None]) -> Job | None:
        """News come in between, however much is to be done."""
        left = self._ask_at - time.monotonic()
        with suppress(queue.Empty):  # then it is time
            if left > 0:
                return jobs.get(timeout=left)
        self._ask_at = time.monotonic() + NEWS_S
        return _Ask()

    def _serve(self, jobs: queue.SimpleQueue[Job | None], idle_s: float | None, address: str) -> None:
        torch.set_num_threads(1)  # per thread, hence here
        if jobs is self._of_backups and self._streams.on_host:
            own = os.getpriority(os.PRIO_PROCESS, 0)
            with suppress(OSError):  # a sandbox without priorities
                os.setpriority(os.PRIO_PROCESS, 0, max(own, BACK_UP_NICE))  # of this thread alone, under Linux
        with torch.inference_mode(), self._streams.beside(URGENT if jobs is self._of_host else 0):
            while (job := self._next(jobs, idle_s, address)) is not None:
                match job:
                    case _Work(operation) if self._by_layers and operation.kind is OperationKind.LOAD:
                        self._load(job)
                    case _Work():
                        self._tell(self._done(job))
                    case _Leave(source) if self._peers is not None:
                        self._leave(self._peers, source)
                    case _Delete(which, done) if self._store is not None:
                        self._delete(self._store, which, done)
                    case _Ask() if self._store is not None:
                        self._tell_news(self._store)

    def _tell_news(self, store: PageStore) -> None:
        try:
            news = store.news()
        except Exception:  # of any kind: what is not known is computed
            logger.exception("the storage has told nothing")
            return
        if news.more:
            self._ask_at = time.monotonic() + MORE_NEWS_S
        if news.stored or news.dropped:
            self._tell(Fact(UNASKED, stored=news.stored, dropped=news.dropped, use=store.use()))

    def _delete(self, store: PageStore, which: Selection, done: Future[Deleted]) -> None:
        """What was told since it was asked for is not there either."""
        is_wanted = done.set_running_or_notify_cancel()
        try:
            deleted = store.delete(which)
        except Exception as error:  # of any kind: whoever has asked is told
            logger.exception("pages were not deleted")
            if is_wanted:
                done.set_exception(error)
            return
        if self._log is not None:
            self._log.sweep()
        for at in range(0, len(deleted.dropped), FACT_KEYS):
            self._facts.put(Fact(UNASKED, dropped=deleted.dropped[at : at + FACT_KEYS]))
        self._tell(Fact(UNASKED, use=store.use()))
        if is_wanted:
            done.set_result(deleted)

    @staticmethod
    def _leave(peers: PeerReader, source: KvSource) -> None:
        try:
            peers.leave(source)
        except Exception:  # of any kind: its room ends by itself
            logger.exception("a room was not left", extra=fields(address=source.address))

    def _tell(self, fact: Fact) -> None:
        self._facts.put(fact)
        self.on_fact()

    def _load(self, work: _Work) -> None:
        """Layer by layer: told ahead of its end, and what it has taken behind that."""
        operation, count = work.operation, len(work.operation.keys)
        try:
            copier = self._copier()
            bring = copier.bringing(self._host, operation.host_pages, operation.pages)
            work.mark.precede()
            tell = partial(self._tell, Fact(operation.op_id, count, early=True))
            size = count * copier.page_bytes
            seconds, told = self._loads.load(bring, operation.pages, copier.groups, size, tell)
        except NeverCame as error:
            self._log_unmoved(operation)
            self.on_lost(str(error))
        except Exception:  # of any kind: what was to be moved is computed
            self._log_unmoved(operation)
            self._settle()
            self._tell(Fact(operation.op_id))
        else:
            self._tell(Fact(UNASKED, loaded=(count, seconds)) if told else Fact(operation.op_id, count, seconds))

    def _log_unmoved(self, operation: PageOperation) -> None:
        logger.exception("pages were not moved", extra=fields(kind=operation.kind.name, pages=len(operation.keys)))

    def _done(self, work: _Work) -> Fact:
        operation = work.operation
        try:
            work.mark.wait()
            began = time.perf_counter()
            count, stored, dropped = self._move(operation)
            self._synchronize()
        except Exception:  # of any kind: what was to be moved is computed, or stays where it is
            self._log_unmoved(operation)
            self._settle()
            return Fact(operation.op_id)
        use = self._store.use() if self._store is not None and (stored or dropped) else None
        return Fact(operation.op_id, count, time.perf_counter() - began, stored, dropped, use)

    def _settle(self) -> None:
        """Nothing that was begun writes a page after its fact. On a device that is lost nothing is written any more."""
        try:
            self._synchronize()
        except Exception as error:  # whatever the driver raises
            logger.error("the device does not answer any more", extra=fields(error=repr(error)))

    def _move(self, operation: PageOperation) -> tuple[int, tuple[bytes, ...], tuple[bytes, ...]]:
        """Pages moved, and keys that the storage has got and lost."""
        match operation.kind:
            case OperationKind.BACK_UP:
                self._arrivals.settle()  # which reads pages that may be on their way, and writes rows that may still be read
                self._copier().save(operation.pages, self._host_rows(operation), streamed=True)
                return len(operation.keys), (), ()
            case OperationKind.LOAD:
                self._restore(self._host_rows(operation), operation.pages)
                return len(operation.keys), (), ()
            case OperationKind.STORE:
                return self._stored(operation)
            case OperationKind.FETCH:
                return self._fetched(operation)
            case OperationKind.PULL:
                return self._pulled(operation), (), ()

    def _pulled(self, operation: PageOperation) -> int:
        """Into memory of its own first: pages of the device hold what counts, or what they held."""
        assert self._peers is not None, "pages are pulled where there are other workers"
        assert operation.pull is not None, "a pull says where from"
        rows = self._staging(len(operation.keys))
        count = self._peers.read(operation.pull, len(rows), rows.numpy().reshape(-1).data)
        if count:
            self._restore(rows[:count].unbind(), operation.pages[:count])
        return count

    def _stored(self, operation: PageOperation) -> tuple[int, tuple[bytes, ...], tuple[bytes, ...]]:
        assert self._store is not None, "pages are stored where there is a storage"
        written = self._store.write(operation.keys, [row.numpy().data for row in self._host_rows(operation)])
        if self._log is not None and operation.blocks:
            there = set(written.stored)
            self._log.append(block for block in operation.blocks if block.keys[-1] in there)
        return len(written.stored) + written.held, written.stored, written.dropped

    def _fetched(self, operation: PageOperation) -> tuple[int, tuple[bytes, ...], tuple[bytes, ...]]:
        """What was not found is not there, whoever believes so."""
        assert self._store is not None, "pages are fetched where there is a storage"
        rows = self._staging(len(operation.keys))
        count = self._store.read(operation.keys, rows.numpy().data)
        if count:
            self._restore(rows[:count].unbind(), operation.pages[:count])
        missing = operation.keys[count : count + 1]
        return count, (), tuple(dict.fromkeys((*self._store.take_lost(), *missing)))

    def _restore(self, rows: Sequence[Tensor], pages: I32) -> None:
        """Once what is still on its way into pages that are somebody else's by now is there."""
        self._arrivals.settle()
        self._copier().restore(rows, pages)

    def _host_rows(self, operation: PageOperation) -> list[Tensor]:
        """uint8[page bytes] each, of the host's memory itself: whoever begins an operation keeps its pages as they are."""
        return [self._host[page] for page in operation.host_pages.tolist()]

    def _staging(self, pages: int) -> Tensor:
        """uint8[n, page bytes], of this thread alone and used anew by its next operation: memory that is touched for the first
        time takes several times as long to be filled."""
        kept: Tensor | None = getattr(self._own, "staging", None)
        if kept is None or len(kept) < pages:
            kept = self._own.staging = torch.empty(
                (pages, self._host.shape[1]), dtype=torch.uint8, pin_memory=self._host.is_pinned()
            )
        return kept[:pages]

    def _synchronize(self) -> None:
        """All that this thread has put on the device is done."""
        if self._streams.device.type == "cuda":
            torch.cuda.current_stream(self._streams.device).synchronize()
