"""What a gateway tells of itself and its workers, made into rows: shares of totals, and rates between two looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from services.cli.shared.exits import CommandFailed, Exit

GONE, GONE_FOR_S = "gone", 60.0
RESTED_S = 5.0  # without a newer word, a rate says nothing any more


@dataclass(frozen=True, slots=True)
class Worker:
    """Shares are 0 to 1. None: not known. tokens_per_second: generated, since the look before."""

    name: str
    model: str
    role: str
    state: str
    running: int | None = None
    max_running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    hit_rate: float | None = None
    tokens_per_second: float | None = None
    retractions: int | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the gateway stands on, as it sees it. index: whether the index's Redis answers; limits: whether keys' limits are
    shared in it; kept: whether the store of what clients have kept answers. unresolved: services whose name cannot be looked up.
    scraped_s_ago: since its metrics were asked for. None: there is no such thing, it was never, or the gateway does not say."""

    index: bool | None = None
    limits: bool | None = None
    kept: bool | None = None
    key_file_valid: bool | None = None
    tls_files_valid: bool | None = None
    certificate_ends_in_s: float | None = None
    unresolved: tuple[str, ...] = ()
    scraped_s_ago: float | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Surroundings:
        flat = {**told, **told.get("redis", {}), "unresolved": tuple(map(str, told.get("unresolved", ())))}
        return cls(**{each.name: flat[each.name] for each in fields(cls) if each.name in flat})


@dataclass(frozen=True, slots=True)
class Standing:
    """At one look. at: seconds on the clock of whoever looks."""

    at: float
    models: tuple[str, ...]
    workers: tuple[Worker, ...]
    waiting: int
    tokenizers: int
    detokenizers: int
    surroundings: Surroundings = Surroundings()

    def as_json(self) -> dict[str, Any]:
        told = asdict(self)
        del told["at"]
        return told


@dataclass(frozen=True, slots=True)
class _Count:
    """at: when its worker told it."""

    at: float
    tokens: int
    rate: float | None = None


class Observer:
    """Keeps of one look what the next one needs. A worker that is not named any more stays for a minute, as gone."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}
        self._seen: dict[str, tuple[float, Worker]] = {}

    def look(self, info: Mapping[str, Any], now: float) -> Standing:
        """info: what /server_info answers. Raises CommandFailed for the answer of another kind of server."""
        try:
            workers = [self._worker(each, now) for each in info["workers"]]
            gateway = info["gateway"]
            return Standing(
                now,
                tuple(str(model["id"]) for model in info["models"]),
                (*workers, *self._gone(workers, now)),
                int(gateway["waiting"]),
                int(gateway["tokenizers"]),
                int(gateway["detokenizers"]),
                Surroundings.of(gateway.get("surroundings", {})),
            )
        except (LookupError, TypeError, ValueError, AttributeError):
            message = "the server does not tell how its workers stand: is it a Rootstock gateway of this version? Check --url."
            raise CommandFailed(Exit.FAILED, message) from None

    def _worker(self, told: Mapping[str, Any], now: float) -> Worker:
        name = str(told["worker_id"] or "-")
        return Worker(
            name,
            str(told["model"] or "-"),
            str(told["role"] or "-"),
            str(told["state"]),
            told["num_running"],
            told["max_running"],
            told["num_waiting"],
            _share(told["kv_used_tokens"], told["kv_tokens"]),
            _share(told["cached_prompt_tokens"], told["prompt_tokens"]),
            self._rate(name, told, now),
            told["retractions"],
        )

    def _rate(self, name: str, told: Mapping[str, Any], now: float) -> float | None:
        """A worker tells its count now and then: the time between two tellings counts, not that between two looks."""
        if told["told_s_ago"] is None:
            self._counts.pop(name, None)
            return None
        count, before = _Count(now - told["told_s_ago"], told["generated_tokens"]), self._counts.get(name)
        if before is None or count.tokens < before.tokens:  # a counter that fell is another process's
            self._counts[name] = count
            return None
        if count.tokens == before.tokens and count.at - before.at < 0.05:  # the same telling, within what a network delays
            return before.rate if now - before.at < RESTED_S else None
        rate = (count.tokens - before.tokens) / max(count.at - before.at, 0.05)
        self._counts[name] = _Count(count.at, count.tokens, rate)
        return rate

    def _gone(self, workers: Sequence[Worker], now: float) -> list[Worker]:
        self._seen |= {worker.name: (now, worker) for worker in workers if worker.name != "-"}
        self._seen = {name: (at, worker) for name, (at, worker) in self._seen.items() if now - at < GONE_FOR_S}
        return [Worker(name, old.model, old.role, GONE) for name, (at, old) in self._seen.items() if at < now]


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or whole is None or not whole else part / whole
