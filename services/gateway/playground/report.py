"""What became of a request on its way, for a client that asks by header where the playground is served.

Written on the event loop by whoever places its choices; nobody else's request has one.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from services.gateway.request.request import RunningRequest
from services.gateway.request.usage import usage_of

REPORT_HEADER = b"x-rootstock-report"


def report_for(scope: Scope) -> Report | None:
    """None: it does not ask for one."""
    return Report() if (REPORT_HEADER, b"1") in scope["headers"] else None


class Report:
    def __init__(self) -> None:
        self._workers: list[str] = []

    def placed(self, worker_id: str) -> None:
        if worker_id not in self._workers:
            self._workers.append(worker_id)

    def told(self, request: RunningRequest) -> dict[str, Any]:
        """Of all that it says, times are those of the choice that waited longest, and counts are those of all together."""
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
