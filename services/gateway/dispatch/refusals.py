"""What is turned away with a 503 for want of a worker, counted by why."""

from __future__ import annotations

from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.errors import ApiError, unavailable


class Refusals:
    """Each method counts one, and makes its error."""

    def __init__(self, retry_after_s: int, metrics: GatewayMetrics) -> None:
        self._retry_after_s = retry_after_s
        self._counter = metrics.refusals

    def full(self) -> ApiError:
        return self._refused("Too many requests wait for a worker.", "queue_full")

    def refusing(self) -> ApiError:
        return self._refused(
            "Every worker of this model refuses new requests: an operator has set 'max_queued_requests' to 0. Retry later.",
            "queue_full",
        )

    def busy(self) -> ApiError:
        return self._refused("All workers are busy.", "queue_timeout")

    def no_worker(self) -> ApiError:
        return self._refused("No worker is connected.", "no_worker")

    def no_scores(self) -> ApiError:
        return self._refused("Every worker of this model is of a version that serves no scores. Retry later.", "no_worker")

    def weights_gone(self) -> ApiError:
        return self._refused("The weights that the answer was begun with are not served any more.", "weights_not_served")

    def paused(self) -> ApiError:
        return self._refused("All workers that could serve this are paused.", "paused")

    def _refused(self, message: str, reason: str) -> ApiError:
        self._counter.labels(reason).inc()
        return unavailable(message, self._retry_after_s, reason)
