"""The state of a gateway and its workers, from responses of the gateway's /server_info. Rates come from successive responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit

GONE = "gone"  # state of a worker that the gateway has stopped listing
GONE_FOR_S = 60.0  # seconds for which a gone worker is shown
RATE_VALID_S = 5.0  # seconds without a newer report after which a rate is unknown


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker, as a row of the table shows it. None means unknown."""

    name: str
    model: str
    role: str
    state: str
    running: int | None = None  # running requests
    max_running: int | None = None
    waiting: int | None = None  # requests in the worker's queue
    kv_use: float | None = None  # used share of the KV pool, 0 to 1
    hit_rate: float | None = None  # cached share of prompt tokens, 0 to 1
    tokens_per_second: float | None = None  # generated tokens per second between the last two reports
    retractions: int | None = None  # since the start of the worker


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The services and files that a gateway depends on. None: not configured, or not reported yet."""

    index: bool | None = None  # whether the Redis of the prefix index responds
    limits: bool | None = None  # whether the limits of API keys are shared through Redis
    kept: bool | None = None  # whether the state store responds
    key_file_valid: bool | None = None
    tls_files_valid: bool | None = None
    certificate_ends_in_s: float | None = None  # seconds until the certificate for other services expires
    unresolved: tuple[str, ...] = ()  # services whose DNS names do not resolve
    scraped_s_ago: float | None = None  # seconds since the last scrape of the metrics

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Surroundings:
        flat = {**report, **report.get("redis", {}), "unresolved": tuple(map(str, report.get("unresolved", ())))}
        return cls(**{each.name: flat[each.name] for each in fields(cls) if each.name in flat})


@dataclass(frozen=True, slots=True)
class GatewayState:
    """The state of a gateway and its workers at one moment."""

    at: float  # seconds on the client's monotonic clock
    models: tuple[str, ...]
    workers: tuple[Worker, ...]
    waiting: int  # requests in the gateway's queue
    tokenizers: int  # connected tokenizers
    detokenizers: int  # connected detokenizers
    surroundings: Surroundings = Surroundings()

    def as_json(self) -> dict[str, Any]:
        report = asdict(self)
        del report["at"]
        return report


@dataclass(frozen=True, slots=True)
class _Count:
    """The value of a worker's counter of generated tokens in one report."""

    at: float  # time of the report on the client's monotonic clock
    tokens: int
    rate: float | None = None  # tokens per second since the previous report; None for the first one


class Observer:
    """Compares successive responses of /server_info. A worker that a response lacks is listed as gone for a minute."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}
        self._last: dict[str, tuple[float, Worker]] = {}  # time of the last response that lists the worker, and its row

    def state(self, info: Mapping[str, Any], now: float) -> GatewayState:
        """Returns the state in a response of /server_info. Raises CommandFailed if the response has another format."""
        try:
            workers = [self._worker(each, now) for each in info["workers"]]
            gateway = info["gateway"]
            return GatewayState(
                now,
                tuple(str(model["id"]) for model in info["models"]),
                (*workers, *self._gone(workers, now)),
                int(gateway["waiting"]),
                int(gateway["tokenizers"]),
                int(gateway["detokenizers"]),
                Surroundings.of(gateway.get("surroundings", {})),
            )
        except (LookupError, TypeError, ValueError, AttributeError):
            message = "/server_info lacks the state of the workers: check that --url names a Rootstock gateway of this version."
            raise CommandFailed(Exit.FAILED, message) from None

    def _worker(self, report: Mapping[str, Any], now: float) -> Worker:
        name = str(report["worker_id"] or "-")
        return Worker(
            name,
            str(report["model"] or "-"),
            str(report["role"] or "-"),
            str(report["state"]),
            report["num_running"],
            report["max_running"],
            report["num_waiting"],
            _share(report["kv_used_tokens"], report["kv_tokens"]),
            _share(report["cached_prompt_tokens"], report["prompt_tokens"]),
            self._rate(name, report, now),
            report["retractions"],
        )

    def _rate(self, name: str, report: Mapping[str, Any], now: float) -> float | None:
        """Returns generated tokens per second between the worker's last two reports.

        If a response repeats a report, the rate stays the same for RATE_VALID_S.
        """
        if report["told_s_ago"] is None:
            self._counts.pop(name, None)
            return None
        count, before = _Count(now - report["told_s_ago"], report["generated_tokens"]), self._counts.get(name)
        if before is None or count.tokens < before.tokens:  # a smaller counter belongs to a restarted worker
            self._counts[name] = count
            return None
        # This response repeats the report of the previous response. Network delays shift the report's time by less than 50 ms.
        if count.tokens == before.tokens and count.at - before.at < 0.05:
            return before.rate if now - before.at < RATE_VALID_S else None
        rate = (count.tokens - before.tokens) / max(count.at - before.at, 0.05)
        self._counts[name] = _Count(count.at, count.tokens, rate)
        return rate

    def _gone(self, workers: Sequence[Worker], now: float) -> list[Worker]:
        self._last |= {worker.name: (now, worker) for worker in workers if worker.name != "-"}
        self._last = {name: (at, worker) for name, (at, worker) in self._last.items() if now - at < GONE_FOR_S}
        return [Worker(name, last.model, last.role, GONE) for name, (at, last) in self._last.items() if at < now]


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or whole is None or not whole else part / whole
