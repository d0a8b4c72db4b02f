"""What the chart has installed, as it says itself, and what was found of it: plain data, which nobody is asked for here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Object = Mapping[str, Any]
COMPONENT, MODEL = "app.kubernetes.io/component", "rootstock.io/model"


@dataclass(frozen=True)
class Answer:
    """Of an HTTP request. status: 0 where there was none, and then `error` says why. body: JSON, or text where it is none."""

    status: int = 0
    body: Any = None
    error: str = ""

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def why(self) -> str:
        """Of one that is not good."""
        message = self.body.get("message", "") if isinstance(self.body, Mapping) else ""
        return self.error or f"{self.status} {message}".strip()


UNRESOLVED = "its name does not resolve"
UNASKED = Answer(error="not asked")


@dataclass(frozen=True)
class RedisState:
    """error: what it said or why it was not reached, empty where all went well. policy: of eviction. memory: maxmemory, bytes."""

    address: str
    error: str = ""
    wrote: bool = False
    policy: str = ""
    memory: int = 0
    role: str = "master"


@dataclass(frozen=True)
class Install:
    """From the chart's template. release: what names of its objects begin with; instance: its own name. services: host → its
    ports by name. secrets: {name, keys, value, part}; a key may be a pattern. models: {name, slug, sleeps, gpus, runtimeClass}.
    claims: {name, value}. redis: what each is for, index or state. scrapes: whether Prometheus is to have series; prometheus: its
    URL; sure: whether somebody has said that it is there; unshown: what KEDA shows it and a pod of the tests does not, a cloud's
    identity or tls, "" for nothing. scaled: {engine, metric, selector, names}; policies: whether the chart has
    NetworkPolicies. headers: that Prometheus wants beside those of a Secret."""

    release: str
    instance: str
    namespace: str
    services: Mapping[str, Mapping[str, int]]
    secrets: tuple[Object, ...]
    models: tuple[Object, ...]
    claims: tuple[Object, ...]
    redis: tuple[str, ...]
    prometheus: str
    sure: bool
    unshown: str
    scrapes: bool
    scaled: Object
    policies: bool
    headers: Mapping[str, str]

    @classmethod
    def of(cls, told: Object) -> Install:
        lists = {name: tuple(told[name]) for name in ("secrets", "models", "claims", "redis")}
        return cls(**{**told, **lists})


@dataclass(frozen=True)
class Facts:
    """objects: of the namespace by plural name, as the API server lists them. names: host → why it does not resolve, "" if it
    does. secrets: name → its keys, of those that are mounted. logs: pod/container → its last lines. groups: of APIs, by name.
    texts: model → its tokenizer's round trip."""

    objects: Mapping[str, Answer] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)
    groups: Answer = UNASKED
    external: Answer = UNASKED
    names: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, frozenset[str]] = field(default_factory=dict)
    redis: Mapping[str, RedisState] = field(default_factory=dict)
    readiness: Answer = UNASKED
    info: Answer = UNASKED
    texts: Mapping[str, Object] = field(default_factory=dict)
    series: Answer = UNASKED

    def items(self, plural: str) -> list[Object]:
        answer = self.objects.get(plural, UNASKED)
        return list(answer.body.get("items", ())) if answer.good else []

    def events(self, about: str) -> Iterator[str]:
        """Messages of warnings about objects whose names begin so, the newest first."""
        return (str(each.get("message", "")) for each in self.told(about) if each.get("type") != "Normal")

    def told(self, about: str) -> list[Object]:
        """Events about objects whose names begin so, the newest first."""
        found = [each for each in self.items("events") if str(each.get("involvedObject", {}).get("name", "")).startswith(about)]
        return sorted(found, key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime") or ""), reverse=True)


def name_of(each: Object) -> str:
    return str(each["metadata"]["name"])


def labels_of(each: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = each["metadata"].get("labels") or {}
    return labels


def pods_of(facts: Facts) -> list[Object]:
    """Those that serve, and a prefetch that is not done: no tests, and none that is on its way out."""
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
    """(whether it is an init container, its status)."""
    status = pod.get("status", {})
    for is_init, key in ((True, "initContainerStatuses"), (False, "containerStatuses")):
        yield from ((is_init, each) for each in status.get(key, ()))


def logs_wanted(pods: list[Object]) -> list[tuple[str, str, bool]]:
    """(pod, container, whether of its run before), of containers that keep a pod from being ready."""
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
