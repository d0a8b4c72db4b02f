"""Tests every object of every value set: it is valid, its name is unique, and its references exist."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.chart.kube_schemas import LATEST, faults
from tests.chart.laws import offences
from tests.chart.pods import PodTemplate, pods, selects
from tests.chart.release import (
    CHART,
    MINIMAL_KUBE,
    NAMESPACE,
    Object,
    Release,
    ci_names,
    lint_findings,
    render,
    render_anew,
    repeatable,
    title,
)
from tests.chart.variants import ALL, rendered, values_of

DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
IMAGE = re.compile(r"^[a-z0-9.\-/:]+?[a-z0-9](:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?$")
VERSION_LABELS = {"helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by"}
UNRENDERED = ("<no value>", "%!")  # output of Go templates for a missing value, and for a printf verb without an argument
# Value sets that need a Kubernetes newer than MINIMAL_KUBE: image volumes need 1.31, and resource.k8s.io/v1 needs 1.34.
NEEDS_NEWER = {"image-volume", "scale-from-zero", "claimed-devices", "devices-of-each-kind"}


def test_ci_files_cover_the_documented_setups() -> None:
    wanted = {"cpu-demo", "one-gpu", "eight-gpus-two-models", "scale-from-zero", "external-redis", "air-gapped"}
    assert wanted <= set(ci_names())


def test_helm_lint_has_no_findings() -> None:
    assert {name: found for name in [*ci_names(), "everything"] if (found := lint_findings(values_of(name)))} == {}


@pytest.mark.by_day(one_in=3)
@pytest.mark.parametrize("name", ["defaults", "prefetch", "everything"])
def test_two_renderings_of_the_same_values_are_equal(name: str) -> None:
    first, second = rendered(name), render_anew(values_of(name))
    assert repeatable(first.objects) == repeatable(second.objects) and first.notes == second.notes


def invalid(release: Release, version: str) -> Iterator[str]:
    for each in release.objects:
        if found := faults(each, version):
            yield f"{title(each)}: {found}"


def test_objects_are_valid_for_the_newest_kubernetes() -> None:
    assert offences(lambda _, release: invalid(release, LATEST)) == {}


def test_objects_are_valid_for_the_oldest_kubernetes() -> None:
    names = [name for name in ALL if name not in NEEDS_NEWER]
    assert offences(lambda _, release: invalid(release, MINIMAL_KUBE), names) == {}


def test_oldest_tested_kubernetes_is_the_minimum_version_of_the_chart() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"].startswith(f">={MINIMAL_KUBE}.")


def test_objects_have_unique_names() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        titles = Counter(title(each) for each in release.objects)
        yield from (each for each, count in titles.items() if count > 1)

    assert offences(law) == {}


def test_objects_are_in_the_releases_namespace() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        yield from (title(each) for each in release.objects if each["metadata"].get("namespace", NAMESPACE) != NAMESPACE)

    assert offences(law) == {}


def test_object_names_are_valid() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for each in release.objects:
            name = each["metadata"]["name"]
            if len(name) > 63 or not DNS_LABEL.match(name):
                yield title(each)
            if each["kind"] in ("StatefulSet", "LeaderWorkerSet", "Deployment") and len(name) > 52:  # labels have the pods' names
                yield f"{title(each)}: controller-revision-hash adds 11 characters"

    assert offences(law) == {}


def test_labels_are_valid() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for each in release.objects:
            for labels in (each["metadata"].get("labels") or {}, *(pod.labels for pod in pods_of(each))):
                for key, value in labels.items():
                    if not isinstance(value, str) or len(value) > 63 or not LABEL_VALUE.match(value):
                        yield f"{title(each)}: {key} = {value!r}"

    assert offences(law) == {}


def pods_of(each: Object) -> list[PodTemplate]:
    return pods(Release((each,), ""))


def test_objects_have_the_standard_labels() -> None:
    wanted = ("app.kubernetes.io/name", "app.kubernetes.io/instance", *sorted(VERSION_LABELS))

    def law(_: str, release: Release) -> Iterator[str]:
        for each in release.objects:
            labels = each["metadata"].get("labels") or {}
            yield from (f"{title(each)}: {key}" for key in wanted if not labels.get(key))

    assert offences(law) == {}


def test_workloads_select_only_their_own_pods() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for workload in release.kind("Deployment", "StatefulSet"):
            selector = workload["spec"]["selector"]
            selected = {pod.role for pod in pods(release) if selects(selector, pod.labels)}
            if selected != {title(workload)}:
                yield f"{title(workload)} selects {sorted(selected)}"
            if VERSION_LABELS & set(selector["matchLabels"]):
                yield f"{title(workload)} selects a version"

    assert offences(law) == {}


def test_services_use_only_ports_that_containers_declare() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for service in release.kind("Service"):
            selector = service["spec"]["selector"]
            selected = [pod for pod in pods(release) if selects({"matchLabels": selector}, pod.labels)]
            if not selected or VERSION_LABELS & set(selector):
                yield f"{title(service)} selects {sorted(pod.role for pod in selected)} by {sorted(selector)}"
            for port in service["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                yield from (f"{title(service)}: {pod.role} has no port {target}" for pod in selected if not listens(pod, target))

    assert offences(law) == {}


def listens(pod: PodTemplate, port: int | str) -> bool:
    return port in (pod.ports() if isinstance(port, str) else pod.ports().values())


def test_every_disruption_budget_selects_one_workload() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        budgeted: Counter[str] = Counter()
        for budget in release.kind("PodDisruptionBudget"):
            selected = {title(pod.owner) for pod in pods(release) if selects(budget["spec"]["selector"], pod.labels)}
            if len(selected) != 1:
                yield f"{title(budget)} selects {sorted(selected)}"
            budgeted.update(selected)
        yield from (f"{each}: two disruption budgets, so no pod can be evicted" for each, count in budgeted.items() if count > 1)

    assert offences(law) == {}


def test_every_network_policy_selects_a_pod() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for policy in release.kind("NetworkPolicy"):
            if not any(selects(policy["spec"]["podSelector"], pod.labels) for pod in pods(release)):
                yield title(policy)

    assert offences(law) == {}


def test_spread_constraint_of_a_pod_selects_this_pod() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for pod in pods(release):
            for constraint in pod.spec.get("topologySpreadConstraints", []):
                if not selects(constraint["labelSelector"], pod.labels):
                    yield f"{pod.role}: of others"
                if constraint["whenUnsatisfiable"] != "ScheduleAnyway":
                    yield f"{pod.role}: a required spread over zones leaves pods pending in a cluster with one zone"

    assert offences(law) == {}


def test_autoscaler_has_an_existing_target_without_fixed_replicas() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for scaler in release.kind("HorizontalPodAutoscaler", "ScaledObject"):
            target = scaler["spec"]["scaleTargetRef"]
            workload = release.get(target.get("kind", "Deployment"), target["name"])
            if workload["apiVersion"] != target.get("apiVersion", "apps/v1") or "replicas" in workload["spec"]:
                yield title(scaler)

    assert offences(law) == {}


def test_workload_has_at_most_one_autoscaler() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        scalers = release.kind("HorizontalPodAutoscaler", "ScaledObject")
        targets = Counter(each["spec"]["scaleTargetRef"]["name"] for each in scalers)
        yield from (target for target, count in targets.items() if count > 1)

    assert offences(law) == {}


def test_service_monitors_use_existing_ports() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        services = list(release.kind("Service"))
        for monitor in release.kind("ServiceMonitor"):
            found = [each for each in services if selects(monitor["spec"]["selector"], each["metadata"]["labels"])]
            named = {port["name"] for each in found for port in each["spec"]["ports"]}
            if not found or {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} - named:
                yield f"{title(monitor)} finds {sorted(named)}"

    assert offences(law) == {}


def test_pod_monitors_use_existing_ports() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for monitor in release.kind("PodMonitor"):
            found = [pod for pod in pods(release) if selects(monitor["spec"]["selector"], pod.labels)]
            named = {name for pod in found for name in pod.ports()}
            if not found or {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} - named:
                yield f"{title(monitor)} finds {sorted(named)}"

    assert offences(law) == {}


def backends(release: Release) -> Iterator[tuple[Object, str, int | str]]:
    """Yields (object, name of the Service, name or number of its port) for each backend of Ingresses and HTTPRoutes."""
    for ingress in release.kind("Ingress"):
        for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            service = path["backend"]["service"]
            yield ingress, service["name"], service["port"].get("name") or service["port"]["number"]
    for route in release.kind("HTTPRoute"):
        for backend in (backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]):
            yield route, backend["name"], backend["port"]


def test_routes_lead_to_existing_services_and_ports() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for owner, service, port in backends(release):
            ports = release.get("Service", service)["spec"]["ports"]
            if port not in [each["name"] if isinstance(port, str) else each["port"] for each in ports]:
                yield f"{title(owner)}: {service} has no port {port}"

    assert offences(law) == {}


def test_objects_that_pods_refer_to_exist_or_come_from_the_values() -> None:
    def law(name: str, release: Release) -> Iterator[str]:
        given = set(_strings(values_of(name))) | {each["spec"]["secretName"] for each in release.kind("Certificate")}
        for pod in pods(release):
            for kind, referred in _references(pod):
                if not release.has(kind, referred) and referred not in given:
                    yield f"{pod.role} needs {kind} {referred}"

    assert offences(law) == {}


def test_config_map_keys_that_pods_refer_to_exist() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for pod in pods(release):
            for variable in (variable for each in pod.containers() for variable in each.get("env", [])):
                reference = variable.get("valueFrom", {}).get("configMapKeyRef")
                if reference and reference["key"] not in release.get("ConfigMap", reference["name"])["data"]:
                    yield f"{pod.role}: {reference}"

    assert offences(law) == {}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _references(pod: PodTemplate) -> Iterator[tuple[str, str]]:
    if pod.spec.get("serviceAccountName", "default") != "default":
        yield "ServiceAccount", pod.spec["serviceAccountName"]
    for secret in pod.spec.get("imagePullSecrets", []):
        yield "Secret", secret["name"]
    for volume in pod.spec.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        for source in volume.get("projected", {}).get("sources", ()):
            yield ("Secret", source["secret"]["name"]) if "secret" in source else ("ConfigMap", source["configMap"]["name"])
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for each in pod.containers():
        for source in each.get("envFrom", []):
            yield (
                ("ConfigMap", source["configMapRef"]["name"])
                if "configMapRef" in source
                else ("Secret", source["secretRef"]["name"])
            )
        for variable in each.get("env", []):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                yield "Secret", source["secretKeyRef"]["name"]
            if "configMapKeyRef" in source:
                yield "ConfigMap", source["configMapKeyRef"]["name"]


def test_role_bindings_refer_to_existing_roles_and_accounts() -> None:
    def law(name: str, release: Release) -> Iterator[str]:
        given = set(_strings(values_of(name)))
        for binding in release.kind("RoleBinding"):
            if not release.has("Role", binding["roleRef"]["name"]):
                yield f"{title(binding)}: {binding['roleRef']}"
            for subject in binding["subjects"]:
                there = release.has("ServiceAccount", subject["name"]) or subject["name"] in given
                if (subject["kind"], subject["namespace"]) != ("ServiceAccount", NAMESPACE) or not there:
                    yield f"{title(binding)}: {subject}"

    assert offences(law) == {}


def test_chart_renders_no_cluster_wide_objects() -> None:
    kinds = ("ClusterRole", "ClusterRoleBinding", "Namespace", "CustomResourceDefinition", "PriorityClass")
    assert offences(lambda _, release: map(title, release.kind(*kinds))) == {}


def test_images_are_pinned_to_a_version() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for image in (each["image"] for pod in pods(release) for each in pod.containers()):
            if not IMAGE.match(image) or ":" not in image.rpartition("/")[2] or image.endswith(":latest"):
                yield image

    assert offences(law) == {}


def test_every_container_has_resource_requests_and_a_memory_limit() -> None:
    wanted = (("requests", "cpu"), ("requests", "memory"), ("limits", "memory"))

    def law(_: str, release: Release) -> Iterator[str]:
        for pod in pods(release):
            for each in pod.containers():
                missing = [keys for keys in wanted if not each["resources"].get(keys[0], {}).get(keys[1])]
                if missing:
                    yield f"{pod.role} {each['name']}: {missing}"

    assert offences(law) == {}


def test_pod_ports_have_unique_names() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for pod in pods(release):
            ports = [port for each in pod.containers() for port in each.get("ports", [])]
            if not len({port["name"] for port in ports}) == len(ports) == len({port["containerPort"] for port in ports}):
                yield f"{pod.role}: {ports}"

    assert offences(law) == {}


def probed(container: dict[str, Any]) -> Iterator[tuple[str, int | str]]:
    """Yields (name, port) of each probe."""
    for key in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.get(key, {})
        yield from ((key, probe[action]["port"]) for action in ("grpc", "httpGet", "tcpSocket") if action in probe)


def test_probes_use_declared_ports() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for pod in pods(release):
            for each in pod.containers():
                declared = {value for port in each.get("ports", []) for value in (port["containerPort"], port["name"])}
                yield from (f"{pod.role} {key}: {port}" for key, port in probed(each) if port not in declared)

    assert offences(law) == {}


def test_notes_after_an_installation_have_the_next_command() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        yield from (f"not there: {word}" for word in ("kubectl", NAMESPACE) if word not in release.notes)
        yield from (f"left there: {word}" for word in UNRENDERED if word in release.notes)

    assert offences(law) == {}
    for path in ("/", "/v1"):
        ingress = {"enabled": True, "hosts": [{"host": "llm.example.com", "path": path}]}
        assert "http://llm.example.com/v1\n" in render({"ingress": ingress}).notes


def test_notes_say_when_an_upgrade_replaces_all_workers_at_once() -> None:
    cold = {name: "An upgrade replaces all workers of" in rendered(name).notes for name in ALL}
    assert cold["defaults"] and cold["one-gpu"] and cold["stateful-set"] is False, (
        "a StatefulSet with two workers replaces one worker at a time"
    )
    assert not cold["operators-overlay"], "with the file's maxSurge, the new worker starts before the old one ends"
    notes = rendered("claimed-devices").notes
    assert "An upgrade replaces all workers of qwen3-8b at once" in notes, (
        "only the other model has a spare slice, by its strategy"
    )
    assert "qwen3-8b: 1 worker(s), on a GPU" in notes and "at most 60 s (gateway.queueTimeoutSeconds)" in notes
    apart = rendered("apart-in-one-of-two-models").notes
    assert "all workers of small at once" in apart, (
        "only small is replaced at once, because the large model has three decode workers"
    )


def test_rendered_objects_contain_no_placeholder_for_a_missing_value() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for each in release.objects:
            yield from (
                f"{title(each)}: {text}" for text in _strings(each) if any(word in text for word in (*UNRENDERED, "<nil>"))
            )

    assert offences(law) == {}
