"""The Kubernetes API as far as endpoints need it: list and watch a Service's EndpointSlices. Blocking: for a thread of its own.

JSON is read as it comes: the client's models refuse slices that the API server sends ("endpoints": null).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config

from services.gateway.discovery.endpoint_slices import SERVICE_LABEL

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_NAMESPACE = "default"
CONNECT_S = 5.0
LIST_S = 20.0  # without a byte
# The server ends a watch after so long, and the next one goes on from there. One that has vanished is noticed a little later.
WATCH_S = 60.0
SLACK_S = 10.0
MAX_LINE_BYTES = 16 << 20
GONE = 410


class KubernetesApiError(Exception):
    """The API server refuses. status: HTTP's, or that of an ERROR event."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}".strip())
        self.status = status


def load_client() -> client.ApiClient:
    """A client for the cluster of this pod, else for that of the kubeconfig file. Raises ConfigException."""
    configuration = client.Configuration()
    configuration.retries = False  # whoever lists and watches waits between attempts
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        config.load_kube_config(client_configuration=configuration)
    return client.ApiClient(configuration)


def own_namespace(file: Path = NAMESPACE_FILE) -> str:
    """Of this pod; outside of a cluster, "default"."""
    try:
        return file.read_text().strip() or DEFAULT_NAMESPACE
    except FileNotFoundError:
        return DEFAULT_NAMESPACE


class SliceApi:
    """The EndpointSlices of one Service. One thread; stop() may come from another one."""

    def __init__(self, api: client.ApiClient, namespace: str, service: str, watch_s: float = WATCH_S) -> None:
        self._api = client.DiscoveryV1Api(api)
        self._namespace = namespace
        self._selector = f"{SERVICE_LABEL}={service}"
        self._watch_s = watch_s
        self._response: urllib3.HTTPResponse | None = None  # of the watch that is open
        self._stopped = False

    def list(self) -> tuple[list[dict[str, Any]], str]:
        """All slices, and the version to watch from. Raises KubernetesApiError, urllib3.exceptions.HTTPError or ValueError."""
        response = self._get(timeout_s=LIST_S)
        try:
            listed = _object(response.data)
        finally:
            response.release_conn()
        return list(listed.get("items") or ()), str(listed["metadata"]["resourceVersion"])

    def watch(self, version: str) -> Iterator[dict[str, Any]]:
        """Events after `version` as they come, bookmarks too, until the server ends the watch. Raises as list() does."""
        seconds = max(1, round(self._watch_s * random.uniform(0.75, 1.25)))
        response = self._get(
            timeout_s=seconds + SLACK_S,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=seconds,
        )
        self._response = response
        try:
            if self._stopped:
                return
            for line in _lines(response):
                event = _object(line)
                if event.get("type") == "ERROR":
                    status = event.get("object") or {}
                    raise KubernetesApiError(int(status.get("code") or 0), str(status.get("message") or ""))
                yield event
        finally:
            self._response = None
            response.close()

    def stop(self) -> None:
        """Ends a watch that waits."""
        self._stopped = True
        response = self._response
        if response is not None:
            try:
                response.shutdown()
            except (ValueError, RuntimeError, OSError):
                return  # it has ended meanwhile

    def _get(self, timeout_s: float, **query: Any) -> urllib3.HTTPResponse:
        try:
            answer: Any = self._api.list_namespaced_endpoint_slice(
                self._namespace,
                label_selector=self._selector,
                _preload_content=False,
                _request_timeout=(CONNECT_S, timeout_s),
                **query,
            )
        except client.ApiException as error:
            raise KubernetesApiError(int(error.status or 0), _message(error.body) or str(error.reason or "")) from None
        response: urllib3.HTTPResponse = answer  # as it comes, for _preload_content=False
        if response.status != 200:  # older clients leave it to the caller
            try:
                raise KubernetesApiError(response.status, _message(response.data))
            finally:
                response.release_conn()
        return response


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _message(body: str | bytes | None) -> str:
    """Of a Status object; "" where it is none."""
    try:
        status = json.loads(body or b"")
    except ValueError:
        return ""
    return str(status.get("message", "")) if isinstance(status, dict) else ""


def _lines(response: urllib3.HTTPResponse) -> Iterator[bytes]:
    """Each as soon as it is there. What is cut off at the end is no line."""
    rest = b""
    for piece in response.stream(amt=None, decode_content=True):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line for line in whole if line.strip())
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError("a watch event without an end")
