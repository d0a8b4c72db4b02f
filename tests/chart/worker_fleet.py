"""Models workers as queues, in time steps of one second.

Each worker runs up to SLOTS requests. A request takes SERVICE_S on average, whatever the batch size. A new worker serves after
COLD_START_S, and a removed worker completes its requests. Requests queue at a worker, up to a quarter of its slots, and otherwise
in the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SERVICE_S = 20.0
COLD_START_S = 180
SLOTS = 64
MAX_PER_WORKER = 80  # largest number of requests that gateways send to one worker at a time
USAGE = 0.0125  # share of the KV pool that a running request uses


@dataclass
class Worker:
    number: int
    ready_at: int  # second from which it serves
    running: int = 0  # running requests
    waiting: int = 0  # queued requests
    ended: int = 0  # completed requests since its start
    draining: bool = False  # removed: it gets no new requests

    def serves(self, now: int) -> bool:
        return now >= self.ready_at


class WorkerFleet:
    """A fleet that starts with `workers` serving workers."""

    def __init__(self, workers: int, seed: int = 1) -> None:
        self._random = np.random.default_rng(seed)
        self.workers = [Worker(number, 0) for number in range(workers)]
        self._made = workers
        self.queue = 0
        self.now = 0

    @property
    def replicas(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.draining]

    def scale(self, replicas: int) -> None:
        """Starts or removes workers. The worker with the fewest requests is removed first; of several, the newest one."""
        for _ in range(replicas - len(self.replicas)):
            self.workers.append(Worker(self._made, self.now + COLD_START_S))
            self._made += 1
        surplus = len(self.replicas) - replicas
        for worker in sorted(self.replicas, key=lambda each: (each.running + each.waiting, -each.number))[: max(surplus, 0)]:
            worker.draining = True

    def second(self, arrivals_per_s: float) -> None:
        self.now += 1
        self.queue += int(self._random.poisson(arrivals_per_s))
        serving = [worker for worker in self.replicas if worker.serves(self.now)]
        for worker in self.workers:
            ended = int(self._random.binomial(worker.running, 1 / SERVICE_S))
            worker.running -= ended
            worker.ended += ended
        while self.queue and serving:
            idlest = min(serving, key=lambda each: each.running + each.waiting)
            if idlest.running + idlest.waiting >= MAX_PER_WORKER:
                break
            idlest.waiting += 1
            self.queue -= 1
            self._admit(idlest)
        for worker in self.workers:
            self._admit(worker)
        self.workers = [worker for worker in self.workers if not worker.draining or worker.running + worker.waiting]

    @staticmethod
    def _admit(worker: Worker) -> None:
        admitted = min(worker.waiting, SLOTS - worker.running)
        worker.waiting -= admitted
        worker.running += admitted
