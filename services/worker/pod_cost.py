"""Tells Kubernetes what deleting this worker's pod would cost: its requests, so that a scale-down takes the idlest pod first.

Annotation controller.kubernetes.io/pod-deletion-cost of the own pod (KEP-2255); needs the right to patch pods. On a thread of its
own: a slow API server holds up nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubernetes.client import Configuration

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
PERIOD_S = 10.0  # between two patches, at least
PAUSE_S = 300.0  # after one that failed
TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class PatchFailed(Exception):
    """The message says why, for the log."""


def pod_patch(namespace: str, pod: str, configuration: Configuration | None = None) -> Callable[[int], None]:
    """A function that writes a cost. configuration: of the API, None for the cluster that this process runs in.

    Raises PatchFailed, and so does the function.
    """
    from kubernetes import client, config  # imported only where it is wanted: it takes a second
    from urllib3.exceptions import HTTPError

    if configuration is None:
        configuration = client.Configuration()
        try:
            config.load_incluster_config(configuration)
        except (config.ConfigException, OSError) as error:
            raise PatchFailed(str(error)) from None
    connection = client.ApiClient(configuration)
    connection.set_default_header("Content-Type", "application/merge-patch+json")
    api = client.CoreV1Api(connection)

    def patch(cost: int) -> None:
        body = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
        try:
            api.patch_namespaced_pod(pod, namespace, body, _request_timeout=TIMEOUT_S)
        except client.ApiException as error:
            raise PatchFailed(f"{error.status} {error.reason}") from None
        except (HTTPError, OSError, ValueError) as error:
            raise PatchFailed(type(error).__name__) from None

    return patch


class PodCost:
    """connect: gives the function that writes a cost, see pod_patch. load: requests that run or wait, from any thread."""

    def __init__(
        self,
        connect: Callable[[], Callable[[int], None]],
        load: Callable[[], int],
        period_s: float = PERIOD_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._connect = connect
        self._load = load
        self._period_s, self._pause_s = period_s, pause_s
        self._patch: Callable[[int], None] | None = None
        self._told: int | None = None
        self._failing = False
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="pod-cost", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def tell(self) -> float:
        """Writes the cost if it has changed. Returns seconds until the next look."""
        cost = self._load()
        if cost == self._told:
            return self._period_s
        try:
            self._patch = self._patch or self._connect()
            self._patch(cost)
        except PatchFailed as error:
            if not self._failing:
                logger.warning("the pod's deletion cost cannot be written, trying again every %.0f s: %s", self._pause_s, error)
            self._failing = True
            return self._pause_s
        if self._failing:
            logger.info("the pod's deletion cost is written again")
        self._failing = False
        self._told = cost
        return self._period_s

    def _run(self) -> None:
        while not self._stopped.wait(self.tell()):
            pass
