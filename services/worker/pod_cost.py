"""Writes the number of this worker's requests as its pod's deletion cost: a scale-down deletes the least loaded pod first.

The cost is the annotation controller.kubernetes.io/pod-deletion-cost of the pod (KEP-2255). Writing it needs the permission to
patch pods. A separate thread writes it, because the API server may be slow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubernetes.client import Configuration

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
PERIOD_S = 10.0  # seconds between two reads of the load, and smallest time between two patches
PAUSE_S = 300.0  # seconds between a failed patch and the retry
TIMEOUT_S = 5.0  # time limit in seconds of a patch

logger = logging.getLogger(__name__)


class PatchFailed(Exception):
    """The cost could not be written; the message has the reason. PodCost retries after a pause."""


def pod_patch(namespace: str, pod: str, configuration: Configuration | None = None) -> Callable[[int], None]:
    """Returns a function that writes a cost to the pod's annotation, and raises PatchFailed if it cannot write the cost.

    Args:
        configuration: address and credentials of the Kubernetes API; None: the credentials that the cluster gives to this pod.

    Raises:
        PatchFailed: the process does not run in a cluster.
    """
    from kubernetes import client, config  # imported here because it takes a second
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
    """Writes the pod's deletion cost on its own thread, from start() to stop()."""

    def __init__(
        self,
        connect: Callable[[], Callable[[int], None]],
        load: Callable[[], int],
        period_s: float = PERIOD_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        """Stores the functions; start() starts the thread.

        Args:
            connect: returns the function that writes a cost, see pod_patch().
            load: returns the number of running and waiting requests; can be called on any thread.
            period_s: seconds between two reads of the load.
            pause_s: seconds between a failed write and the next attempt.
        """
        self._connect = connect
        self._load = load
        self._period_s, self._pause_s = period_s, pause_s
        self._patch: Callable[[int], None] | None = None
        self._written: int | None = None
        self._failing = False
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="pod-cost", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def write_if_changed(self) -> float:
        """Writes the cost if it has changed. Returns the seconds until the next call."""
        cost = self._load()
        if cost == self._written:
            return self._period_s
        try:
            self._patch = self._patch or self._connect()
            self._patch(cost)
        except PatchFailed as error:
            if not self._failing:
                logger.warning("could not write the pod's deletion cost; retrying every %.0f s: %s", self._pause_s, error)
            self._failing = True
            return self._pause_s
        if self._failing:
            logger.info("the pod's deletion cost is written again")
        self._failing = False
        self._written = cost
        return self._period_s

    def _run(self) -> None:
        while not self._stopped.wait(self.write_if_changed()):
            pass
