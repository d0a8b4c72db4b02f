"""Prometheus metrics of workers and of the prefix index. Their values are read at each scrape."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from rootstock_llm.services.gateway.dispatch.fleet import Fleet
from rootstock_llm.services.gateway.index.mirror import IndexMirror
from rootstock_llm.services.gateway.observe.metrics import PREFIX
from rootstock_llm.services.gateway.routing.breaker import BreakerState
from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex
from rootstock_llm.services.shared.observe.readings import Reading, Readings, Value

INDEX = f"{PREFIX}index_"


def _workers(fleet: Fleet) -> Value:
    out: dict[tuple[str, ...], float] = {(name, state): 0 for name in fleet.expected for state in ("usable", "unusable")}
    for name, pool in fleet.pools.items():
        usable = len(pool.usable())
        out[name, "usable"], out[name, "unusable"] = usable, len(pool.links) - usable
    return out


def _breakers(fleet: Fleet) -> Value:
    states = Count(link.breaker.state for link in fleet.links.values())
    return {(state.value,): states[state] for state in BreakerState}


def _index(read: Callable[[PrefixIndex], float]) -> Callable[[Fleet], Value]:
    """Returns a function that reads a value of a fleet's prefix index. The value is None if the fleet has no index."""
    return lambda fleet: None if fleet.index is None else read(fleet.index)


def _mirror(read: Callable[[IndexMirror], float]) -> Callable[[Fleet], Value]:
    """Returns a function that reads a value of a fleet's mirror of Redis. The value is None if the fleet has no mirror."""
    return lambda fleet: None if fleet.mirror is None else read(fleet.mirror)


class FleetCollector(Readings[Fleet]):
    """Metrics of one Fleet."""

    rows = (
        Reading(Gauge, f"{PREFIX}workers", "Workers by model and state.", _workers, ("model", "state")),
        Reading(Gauge, f"{PREFIX}breakers", "Workers by the state of their circuit breaker.", _breakers, ("state",)),
        Reading(Gauge, INDEX + "blocks", "Blocks in this copy of the prefix index.", _index(lambda index: index.num_blocks)),
        Reading(
            Gauge,
            INDEX + "speculative_blocks",
            "Blocks of recent requests that their worker has not announced yet.",
            _index(lambda index: index.num_speculative),
        ),
        Reading(
            Gauge,
            INDEX + "up",
            "1 if Redis responds, else 0. While it does not respond, routing uses the last copy of the prefix index.",
            _mirror(lambda index: index.available),
        ),
        Reading(
            Gauge, INDEX + "lag_seconds", "Seconds since this copy was last equal to Redis.", _mirror(lambda index: index.lag_s)
        ),
        Reading(Counter, INDEX + "events", "Event batches read from Redis.", _mirror(lambda index: index.counts.events)),
        Reading(
            Counter,
            INDEX + "bad_events",
            "Entries in Redis that are not valid event batches.",
            _mirror(lambda index: index.counts.bad_events),
        ),
        Reading(
            Counter,
            INDEX + "loads",
            "Full reloads of a worker's blocks.",
            _mirror(lambda index: index.counts.loads),
        ),
        Reading(
            Counter,
            INDEX + "gaps",
            "Times that event batches were missed. The blocks of one worker, or of all workers, are then reloaded.",
            _mirror(lambda index: index.counts.gaps),
        ),
    )
