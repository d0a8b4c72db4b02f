"""Defines the expected and the actual state of a release, as plain data. Has no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Object = Mapping[str, Any]
COMPONENT, MODEL = "app.kubernetes.io/component", "rootstock.io/model"


@dataclass(frozen=True)
class Answer:
    """The result of an HTTP request."""

    status: int = 0  # HTTP status; 0 without a response
    body: Any = None  # parsed JSON, or text if the body is not JSON
    error: str = ""  # reason if there is no response

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def why(self) -> str:
        """Reason of a failed request."""
        message = self.body.get("message", "") if isinstance(self.body, Mapping) else ""
        return self.error or f"{self.status} {message}".strip()


UNRESOLVED = "its name does not resolve"
UNASKED = Answer(error="not requested")


@dataclass(frozen=True)
class RedisState:
    """The result of a probe of a Redis server."""

    address: str
    error: str = ""  # error of the server or of the connection; "" on success
    wrote: bool = False  # whether the server accepted a write
    policy: str = ""  # eviction policy; "" if unknown
    memory: int = 0  # maxmemory in bytes; 0: unlimited or unknown
    role: str = "master"


@dataclass(frozen=True)
class Install:
    """The expected state of a release, written by the template rootstock.diagnosis.install."""

    release: str  # prefix of the objects' names
    instance: str  # name of the release
    namespace: str
    services: Mapping[str, Mapping[str, int]]  # host → port by name
    secrets: tuple[Object, ...]  # {name, keys, value, part}; a key may be a pattern
    models: tuple[Object, ...]  # {name, slug, sleeps, gpus, runtimeClass}; sleeps: has no workers while it has no requests
    claims: tuple[Object, ...]  # {name, value}
    redis: tuple[str, ...]  # purposes of the Redis servers: index, state
    prometheus: str  # URL
    sure: bool  # whether the operator has configured Prometheus, so that an unreachable one is a fault
    unshown: str  # kinds of credentials that KEDA has and this check cannot use, such as a cloud identity; "" if it has all of them
    scrapes: bool  # whether Prometheus should have the release's series
    scaled: Object  # {engine, metric, selector, names}
    policies: bool  # whether the chart has NetworkPolicies
    headers: Mapping[str, str]  # headers for Prometheus in addition to those of a Secret

    @classmethod
    def of(cls, expected: Object) -> Install:
        lists = {name: tuple(expected[name]) for name in ("secrets", "models", "claims", "redis")}
        return cls(**{**expected, **lists})


@dataclass(frozen=True)
class Facts:
    """The actual state of a release."""

    objects: Mapping[str, Answer] = field(default_factory=dict)  # lists of the API server by plural kind
    logs: Mapping[str, str] = field(default_factory=dict)  # pod/container → last lines
    groups: Answer = UNASKED  # API groups of the cluster
    external: Answer = UNASKED  # external metric of an HPA
    names: Mapping[str, str] = field(default_factory=dict)  # host → error of the resolver; "" if it resolves
    secrets: Mapping[str, frozenset[str]] = field(default_factory=dict)  # mounted Secret → its keys
    redis: Mapping[str, RedisState] = field(default_factory=dict)  # by purpose
    readiness: Answer = UNASKED  # /readiness of the gateway
    info: Answer = UNASKED  # /server_info of the gateway
    # Model → the round trip of a text through its tokenizer and detokenizer.
    texts: Mapping[str, Object] = field(default_factory=dict)
    series: Answer = UNASKED  # running targets per component, from Prometheus

    def items(self, plural: str) -> list[Object]:
        answer = self.objects.get(plural, UNASKED)
        return list(answer.body.get("items", ())) if answer.good else []

    def warnings(self, about: str) -> Iterator[str]:
        """Returns messages of warnings about objects whose names begin with `about`, newest first."""
        return (str(each.get("message", "")) for each in self.events_about(about) if each.get("type") != "Normal")

    def events_about(self, about: str) -> list[Object]:
        """Returns events about objects whose names begin with `about`, newest first."""
        found = [each for each in self.items("events") if str(each.get("involvedObject", {}).get("name", "")).startswith(about)]
        return sorted(found, key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime") or ""), reverse=True)


def name_of(each: Object) -> str:
    return str(each["metadata"]["name"])


def labels_of(each: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = each["metadata"].get("labels") or {}
    return labels


def pods_of(facts: Facts) -> list[Object]:
    """Returns pods of services and of a running prefetch Job. Omits tests, ended pods and terminating pods."""
    return [
        each
        for each in facts.items("pods")
        if labels_of(each).get(COMPONENT) != "test"
        and "deletionTimestamp" not in each["metadata"]
        and each.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    ]


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def containers_of(pod: Object) -> Iterator[tuple[bool, Object]]:
    """Yields (whether it is an init container, its status) for each container."""
    status = pod.get("status", {})
    for is_init, key in ((True, "initContainerStatuses"), (False, "containerStatuses")):
        yield from ((is_init, each) for each in status.get(key, ()))


def logs_wanted(pods: list[Object]) -> list[tuple[str, str, bool]]:
    """Returns (pod, container, whether to read the log of its previous run) for containers that keep a pod from being ready."""
    wanted = []
    for pod in pods:
        if is_ready(pod):
            continue
        for is_init, each in containers_of(pod):
            state = each.get("state", {})
            if "waiting" in state and each.get("lastState", {}).get("terminated"):
                wanted.append((name_of(pod), str(each["name"]), True))
            elif "running" in state or state.get("terminated", {}).get("exitCode", 0):
                wanted.append((name_of(pod), str(each["name"]), False))
            elif is_init and "terminated" not in state:
                break
    return wanted
