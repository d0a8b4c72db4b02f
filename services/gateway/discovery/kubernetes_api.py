"""Lists and watches the EndpointSlices of a Service through the Kubernetes API, and converts them to endpoints.

The calls of the API block, so they need their own thread. Responses are read as JSON, because the API server sends slices with
"endpoints": null, which the client's model classes refuse.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config

from rootstock_llm.services.gateway.discovery.endpoints import join_address

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_NAMESPACE = "default"
CONNECT_S = 5.0  # longest time to connect, in seconds
LIST_S = 20.0  # longest time without a byte of a list, in seconds
WATCH_S = 60.0  # mean duration of a watch in seconds; the server then ends it, and the next watch continues
SLACK_S = 10.0  # seconds; a watch is lost if no byte has arrived for its duration plus this time
MAX_LINE_BYTES = 16 << 20  # largest event of a watch, in bytes
GONE = 410  # status of a resource version that the server no longer has
SERVICE_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"

# A pod of a dual-stack Service is in one slice of each address family. The pod's address of the first family below is used.
_FAMILIES = ("IPv4", "IPv6", "FQDN")

Slice = Mapping[str, Any]


def endpoints_of(slices: Iterable[Slice], port: int | str) -> dict[str, bool]:
    """Returns the endpoints of all slices. An endpoint is ready if its pod is ready and not terminating.

    Args:
        port: Port number of the pods, or a port name. Slices without a port of this name are ignored.
    """
    found: dict[str, bool] = {}
    family_of: dict[str, str] = {}  # address family of each pod
    for slice_ in sorted(slices, key=_family_rank):
        number = port if isinstance(port, int) else _port_named(slice_, port)
        if number is None:
            continue
        family = str(slice_.get("addressType", ""))
        for endpoint in slice_.get("endpoints") or ():
            addresses = endpoint.get("addresses")
            if not addresses:
                continue
            pod = (endpoint.get("targetRef") or {}).get("uid") or addresses[0]
            if family_of.setdefault(pod, family) != family:
                continue
            # All addresses of an endpoint belong to the same pod. While an endpoint moves between slices, both slices have it.
            address = join_address(addresses[0], number)
            found[address] = found.get(address, False) or _is_ready(endpoint.get("conditions") or {})
    return found


def is_headless(slices: Iterable[Slice]) -> bool:
    """Returns whether the Service of the slices is headless. Its DNS name then has the addresses of all ready pods."""
    labels = [slice_.get("metadata", {}).get("labels") or {} for slice_ in slices]
    return bool(labels) and all(HEADLESS_LABEL in each for each in labels)


def number_of(slices: Iterable[Slice], port: int | str) -> int | None:
    """Returns the number of a port. None if no slice has a port with this name, or slices have different numbers for it."""
    if isinstance(port, int):
        return port
    numbers = {_port_named(slice_, port) for slice_ in slices} - {None}
    return numbers.pop() if len(numbers) == 1 else None


def _is_ready(conditions: Mapping[str, Any]) -> bool:
    """Returns whether an endpoint may get new work. An unset `ready` means true.

    `serving` is ignored, because a terminating pod gets no new work.
    """
    return conditions.get("ready") is not False and not conditions.get("terminating")


def _family_rank(slice_: Slice) -> tuple[int, str]:
    family = slice_.get("addressType")
    rank = _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)
    return rank, str(slice_.get("metadata", {}).get("name", ""))


def _port_named(slice_: Slice, name: str) -> int | None:
    for port in slice_.get("ports") or ():
        if (port.get("name") or "") == name and port.get("port"):
            return int(port["port"])
    return None


class KubernetesApiError(Exception):
    """The API server has refused a call, or has ended a watch with an ERROR event."""

    def __init__(self, status: int, message: str) -> None:
        """Makes the error. `status` is the HTTP status, or the code of the ERROR event."""
        super().__init__(f"{status} {message}".strip())
        self.status = status


def load_client() -> client.ApiClient:
    """Returns a client for this pod's cluster; outside a pod, for the cluster in the kubeconfig file. Raises ConfigException."""
    configuration = client.Configuration()
    configuration.retries = False  # KubernetesWatch retries, with pauses
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        config.load_kube_config(client_configuration=configuration)
    return client.ApiClient(configuration)


def own_namespace(file: Path = NAMESPACE_FILE) -> str:
    """Returns the namespace of this pod; "default" outside of a cluster."""
    try:
        return file.read_text().strip() or DEFAULT_NAMESPACE
    except FileNotFoundError:
        return DEFAULT_NAMESPACE


class SliceApi:
    """The EndpointSlices of one Service. It is used by one thread, except for stop()."""

    def __init__(self, api: client.ApiClient, namespace: str, service: str, watch_s: float = WATCH_S) -> None:
        self._api = client.DiscoveryV1Api(api)
        self._namespace = namespace
        self._selector = f"{SERVICE_LABEL}={service}"
        self._watch_s = watch_s
        self._response: urllib3.HTTPResponse | None = None  # response of the open watch
        self._stopped = False

    def list(self) -> tuple[list[dict[str, Any]], str]:
        """Returns all slices, and the resource version from which to watch.

        Raises:
            KubernetesApiError: The API server has refused the call.
            urllib3.exceptions.HTTPError: The API server cannot be reached.
            ValueError: The response is invalid.
        """
        response = self._get(timeout_s=LIST_S)
        try:
            listed = _object(response.data)
        finally:
            response.release_conn()
        return list(listed.get("items") or ()), str(listed["metadata"]["resourceVersion"])

    def watch(self, version: str) -> Iterator[dict[str, Any]]:
        """Yields events after a resource version, including bookmarks, until the server ends the watch. Raises as list() does."""
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
        """Ends a waiting watch. May be called from another thread."""
        self._stopped = True
        response = self._response
        if response is not None:
            try:
                response.shutdown()
            except (ValueError, RuntimeError, OSError):
                return  # the watch has ended at the same time

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
        response: urllib3.HTTPResponse = answer  # a raw response, because of _preload_content=False
        if response.status != 200:  # older versions of the client do not raise ApiException
            try:
                raise KubernetesApiError(response.status, _message(response.data))
            finally:
                response.release_conn()
        return response


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("the response of the Kubernetes API is not a JSON object")
    return value


def _message(body: str | bytes | None) -> str:
    """Returns the message of a Status object; "" if the body is no Status object."""
    try:
        status = json.loads(body or b"")
    except ValueError:
        return ""
    return str(status.get("message", "")) if isinstance(status, dict) else ""


def _lines(response: urllib3.HTTPResponse) -> Iterator[bytes]:
    """Yields each line as soon as it has arrived. An incomplete last line is ignored."""
    rest = b""
    for piece in response.stream(amt=None, decode_content=True):
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line for line in lines if line.strip())
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"an event of a watch is larger than {MAX_LINE_BYTES} bytes")
