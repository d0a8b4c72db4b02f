"""A worker of the fleet: the worker's loop as events on the fleet's clock. It turns while it has something to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from services.shared.index.block_hash import block_hash, root_hash
from services.sim.core.run.executor import SimRun
from services.sim.core.run.worker import STUCK_WAIT_S, SimWorker
from services.sim.core.trace.script import Script
from services.sim.fleet.config import FleetConfig
from services.sim.fleet.event_queue import EventQueue
from services.worker.core.contracts.messages import PeerOutput, Submit
from services.worker.core.kv.cache_events import CacheEventLog, CacheEvents

MODEL = "simulated"
Teller = Callable[["FleetWorker", PeerOutput], None]


def namespace_root(namespace: str) -> bytes:
    """What the first block of a prompt is chained to, at workers and gateways alike."""
    return root_hash(MODEL, "", MODEL, namespace)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """open_by_peer: requests without their terminal output, by gateway. used_tokens: KV that could not be freed."""

    open_by_peer: Counter[int]
    used_tokens: int

    @property
    def num_open(self) -> int:
        return self.open_by_peer.total()


class FleetWorker:
    """row: its number in the fleet. generation: a new one after every start. tell: takes (worker, output), one for each
    gateway that a step has news for."""

    def __init__(self, row: int, generation: int, config: FleetConfig, script: Script, clock: EventQueue, tell: Teller) -> None:
        self.row, self.generation = row, generation
        self.alive = True
        events = CacheEventLog(config.scheduler.page_size, block_hash, namespace_root)
        self._sim = SimWorker(config.scheduler, script, config.time_model, config.host, events)
        self._page_size, self._overlap = config.scheduler.page_size, config.overlap
        self._clock, self._tell = clock, tell
        self._inbox: list[Submit] = []
        self._open: Counter[int] = Counter()
        self._flight: SimRun | None = None
        self._asleep = True
        self.steps = 0

    @property
    def name(self) -> str:
        return f"worker-{self.row}"

    def deliver(self, message: Submit) -> None:
        """Lost if the worker is dead."""
        if not self.alive:
            return
        self._inbox.append(message)
        self._open[message.peer] += 1
        if self._asleep:
            self._asleep = False
            self._clock.after(0.0, self._turn)

    def kill(self) -> None:
        """All that it has is gone."""
        self.alive = False
        self._open.clear()
        self._inbox.clear()

    def load(self) -> WorkerLoad:
        if not self.alive:
            return WorkerLoad(Counter(), 0)
        stats = self._sim.core.stats()
        pages = stats.pages_used
        return WorkerLoad(self._open.copy(), pages * self._page_size)

    def take_cache_events(self) -> CacheEvents | None:
        """What the prefix index is to be told since the last call."""
        return self._sim.core.take_cache_events()

    def self_check(self) -> list[str]:
        """What breaks an invariant of the core."""
        return self._sim.core.self_check()

    def _turn(self) -> None:
        """As the worker's loop turns: messages, then plan and commit; without overlap, messages, then commit and plan."""
        if not self.alive:
            return
        self._sim.clock.pass_until(self._clock.now)
        for message in self._inbox:
            self._sim.submit(message)
        self._inbox.clear()
        if self._overlap or self._flight is None:
            self._launch()
        else:
            self._clock.at(self._sim.commit_ends(self._flight), self._commit, self._flight)

    def _launch(self) -> None:
        run = self._sim.launch()
        self._tell_all()
        before, self._flight = self._flight, run
        if before is not None:
            self._clock.at(self._sim.commit_ends(before), self._commit, before)
        elif run is not None:
            self._clock.at(self._sim.clock.now, self._turn)
        elif self._sim.core.idle:
            self._asleep = True
        else:
            self._clock.after(STUCK_WAIT_S, self._turn)

    def _commit(self, run: SimRun) -> None:
        if not self.alive:
            return
        self._sim.commit(run)
        self.steps += 1
        self._tell_all()
        if self._overlap:
            self._turn()
        else:
            self._flight = None
            self._launch()

    def _tell_all(self) -> None:
        output = self._sim.core.take_output()
        for peer in output.peers if output else ():
            self._open[peer.peer] -= len(peer.finishes)
            self._tell(self, peer)
