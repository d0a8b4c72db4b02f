"""Reports a request's path through the fleet to its client: waiting times, workers, cached and drafted tokens.

A request has a report if the playground is served and the client sends REPORT_HEADER. The dispatcher writes the report on the
event loop when it places a choice.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from services.gateway.request.request import RunningRequest
from services.gateway.request.usage import usage_of

REPORT_HEADER = b"x-rootstock-report"


def report_for(scope: Scope) -> RequestReport | None:
    """Returns an empty report, or None if the client does not ask for one."""
    return RequestReport() if (REPORT_HEADER, b"1") in scope["headers"] else None


class RequestReport:
    """The report of a request, with the same lifetime."""

    def __init__(self) -> None:
        self._workers: list[str] = []

    def placed(self, worker_id: str) -> None:
        """Records that a choice has been submitted to this worker."""
        if worker_id not in self._workers:
            self._workers.append(worker_id)

    def rendered(self, request: RunningRequest) -> dict[str, Any]:
        """Returns the report as JSON. Times are the longest of all choices, and counts are sums over all choices."""
        endings = [choice.ending for choice in request.choices if choice.ending is not None]
        return {
            "gateway_queue_s": round(request.longest_wait_s, 6),
            "worker_queue_s": max((ending.queue_ms for ending in endings), default=0) / 1000,
            "cached_tokens": usage_of(request)["prompt_tokens_details"]["cached_tokens"],
            "workers": list(self._workers),
            "retractions": sum(ending.retractions for ending in endings),
            "drafted_tokens": sum(ending.drafted_tokens for ending in endings),
            "accepted_tokens": sum(ending.accepted_tokens for ending in endings),
        }
