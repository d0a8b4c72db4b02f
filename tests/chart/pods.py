"""Lists the pod templates of a release's objects, and evaluates label selectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.chart.release import Object, Release, title

WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Job", "Pod")
COMPONENT = "app.kubernetes.io/component"
MODEL = "rootstock.io/model"
LWS_NAME = "leaderworkerset.sigs.k8s.io/name"


@dataclass(frozen=True)
class PodTemplate:
    """A pod template of a workload."""

    owner: Object  # the workload
    role: str  # name of the workload; followed by the template's name if the workload has several templates
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: dict[str, Any]

    @property
    def component(self) -> str:
        return self.labels.get(COMPONENT, "")

    @property
    def service(self) -> str:
        """Service that the pods run. Prefill and decode workers are two components, and both run the worker."""
        return str(self.container()["name"])

    @property
    def model(self) -> str:
        return self.labels.get(MODEL, "")

    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def container(self) -> dict[str, Any]:
        """Returns the service's container: the first container that is no init container."""
        return dict(self.spec["containers"][0])

    def ports(self) -> dict[str, int]:
        """Returns the ports of the service's container by name."""
        return {port["name"]: port["containerPort"] for port in self.container().get("ports", [])}


def pods(release: Release) -> list[PodTemplate]:
    return [pod for each in release.kind(*WORKLOADS) for pod in _templates(each)]


def pod(release: Release, component: str, model: str = "") -> PodTemplate:
    """Returns the pod template of a component and, if given, a model. There must be exactly one."""
    found = [each for each in pods(release) if each.component == component and (not model or each.model == model)]
    assert len(found) == 1, f"{component} {model} must have one pod template; found {[each.role for each in found]}"
    return found[0]


def workload(release: Release, component: str, model: str = "") -> Object:
    return pod(release, component, model).owner


def _templates(owner: Object) -> Iterator[PodTemplate]:
    spec = owner["spec"]
    if owner["kind"] == "Pod":
        yield _template(owner, "", owner)
    elif owner["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        for key in ("leaderTemplate", "workerTemplate"):
            if key in group:
                each = _template(owner, f" {key}", group[key])
                yield replace(each, labels={**each.labels, LWS_NAME: owner["metadata"]["name"]})  # the controller adds this label
    else:
        yield _template(owner, "", spec["template"])


def _template(owner: Object, role: str, template: dict[str, Any]) -> PodTemplate:
    metadata = template.get("metadata", {})
    return PodTemplate(
        owner, title(owner) + role, metadata.get("labels") or {}, metadata.get("annotations") or {}, template["spec"]
    )


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a Kubernetes LabelSelector matches these labels. An empty selector matches all labels, None matches none."""
    if selector is None:
        return False
    exact = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return exact and all(_holds(each, labels) for each in selector.get("matchExpressions") or [])


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, operator, values = expression["key"], expression["operator"], expression.get("values") or []
    match operator:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(f"unknown operator of a LabelSelector: {operator}")
