"""What holds for every object of every set of values: valid, named once, and every reference leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.chart.kube_schemas import LATEST, faults
from tests.chart.pods import PodTemplate, pods, selects
from tests.chart.release import (
    CHART,
    MINIMAL_KUBE,
    NAMESPACE,
    Object,
    Release,
    ci_names,
    lint_findings,
    render_anew,
    title,
)
from tests.chart.variants import ALL, rendered, values_of

DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
IMAGE = re.compile(r"^[a-z0-9.\-/:]+?[a-z0-9](:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?$")
VERSION_LABELS = {"helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by"}
NEEDS_NEWER = {"image-volume", "scale-from-zero"}  # Kubernetes knows image volumes from 1.31 on


@pytest.fixture(params=ALL)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def release(name: str) -> Release:
    return rendered(name)


def test_there_is_a_values_file_for_each_way_that_the_docs_name() -> None:
    wanted = {"cpu-demo", "one-gpu", "eight-gpus-two-models", "scale-from-zero", "external-redis", "air-gapped"}
    assert wanted <= set(ci_names())


@pytest.mark.parametrize("name", [*ci_names(), "everything"])
def test_lint_has_nothing_to_say(name: str) -> None:
    assert lint_findings(values_of(name)) == []


@pytest.mark.parametrize("name", ["defaults", "prefetch", "everything"])
def test_rendering_twice_gives_the_same(name: str) -> None:
    assert render_anew(values_of(name)) == rendered(name)


def test_objects_are_valid_for_the_newest_kubernetes(release: Release) -> None:
    assert {title(each): found for each in release.objects if (found := faults(each, LATEST))} == {}


def test_objects_are_valid_for_the_oldest_kubernetes(name: str, release: Release) -> None:
    if name not in NEEDS_NEWER:
        assert {title(each): found for each in release.objects if (found := faults(each, MINIMAL_KUBE))} == {}


def test_the_oldest_kubernetes_is_the_charts() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"].startswith(f">={MINIMAL_KUBE}.")


def test_objects_have_their_own_names_and_the_releases_namespace(release: Release) -> None:
    titles = [title(each) for each in release.objects]
    assert len(set(titles)) == len(titles), sorted(titles)
    for each in release.objects:
        assert each["metadata"].get("namespace", NAMESPACE) == NAMESPACE, title(each)


def test_names_and_labels_are_ones_that_kubernetes_takes(release: Release) -> None:
    for each in release.objects:
        metadata = each["metadata"]
        assert len(metadata["name"]) <= 63 and DNS_LABEL.match(metadata["name"]), title(each)
        if each["kind"] in ("StatefulSet", "LeaderWorkerSet", "Deployment"):  # their pods' names and hashes are labels too
            assert len(metadata["name"]) <= 52, f"{title(each)}: controller-revision-hash adds 11 characters"
        for labels in (metadata.get("labels") or {}, *(pod.labels for pod in pods_of(each))):
            for key, value in labels.items():
                assert isinstance(value, str) and len(value) <= 63 and LABEL_VALUE.match(value), (title(each), key, value)


def pods_of(each: Object) -> list[PodTemplate]:
    return pods(Release((each,), ""))


def test_objects_say_whose_they_are(release: Release) -> None:
    for each in release.objects:
        labels = each["metadata"].get("labels") or {}
        for key in ("app.kubernetes.io/name", "app.kubernetes.io/instance", *VERSION_LABELS):
            assert labels.get(key), (title(each), key)


def test_workloads_select_their_own_pods_and_no_others(release: Release) -> None:
    everything = pods(release)
    for workload in release.kind("Deployment", "StatefulSet"):
        selector = workload["spec"]["selector"]
        assert {pod.role for pod in everything if selects(selector, pod.labels)} == {title(workload)}
        assert not VERSION_LABELS & set(selector["matchLabels"]), title(workload)


def test_services_lead_to_ports_that_pods_listen_on(release: Release) -> None:
    for service in release.kind("Service"):
        selected = [pod for pod in pods(release) if _selected_by(service, pod)]
        assert selected, title(service)
        assert not VERSION_LABELS & set(service["spec"]["selector"]), title(service)
        for port in service["spec"]["ports"]:
            for pod in selected:
                _assert_listens(pod, port.get("targetPort", port["port"]), title(service))


def _selected_by(service: Object, pod: PodTemplate) -> bool:
    return selects({"matchLabels": service["spec"]["selector"]}, pod.labels)


def _assert_listens(pod: PodTemplate, port: int | str, who: str) -> None:
    assert port in (pod.ports() if isinstance(port, str) else pod.ports().values()), (who, pod.role, port)


def test_disruption_budgets_are_about_one_workload(release: Release) -> None:
    budgeted: list[str] = []
    for budget in release.kind("PodDisruptionBudget"):
        selected = {title(pod.owner) for pod in pods(release) if selects(budget["spec"]["selector"], pod.labels)}
        assert len(selected) == 1, (title(budget), selected)
        budgeted += selected
    assert len(set(budgeted)) == len(budgeted), "two budgets for one pod keep it from ever being evicted"


def test_policies_select_pods(release: Release) -> None:
    for policy in release.kind("NetworkPolicy"):
        assert any(selects(policy["spec"]["podSelector"], pod.labels) for pod in pods(release)), title(policy)


def test_spread_constraints_are_about_their_own_pods(release: Release) -> None:
    for pod in pods(release):
        for constraint in pod.spec.get("topologySpreadConstraints", []):
            assert selects(constraint["labelSelector"], pod.labels), pod.role
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway", f"{pod.role}: a cluster of one zone must do"


def test_scalers_have_a_target_without_replicas(release: Release) -> None:
    for scaler in release.kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        workload = release.get(target.get("kind", "Deployment"), target["name"])
        assert workload["apiVersion"] == target.get("apiVersion", "apps/v1"), title(scaler)
        assert "replicas" not in workload["spec"], title(scaler)


def test_a_workload_has_one_scaler(release: Release) -> None:
    targets = [each["spec"]["scaleTargetRef"]["name"] for each in release.kind("HorizontalPodAutoscaler", "ScaledObject")]
    assert len(set(targets)) == len(targets)


def test_monitors_find_ports(release: Release) -> None:
    for monitor in release.kind("ServiceMonitor"):
        found = [each for each in release.kind("Service") if selects(monitor["spec"]["selector"], each["metadata"]["labels"])]
        assert found, title(monitor)
        for endpoint in monitor["spec"]["endpoints"]:
            assert any(port["name"] == endpoint["port"] for each in found for port in each["spec"]["ports"]), title(monitor)
    for monitor in release.kind("PodMonitor"):
        selected = [pod for pod in pods(release) if selects(monitor["spec"]["selector"], pod.labels)]
        assert selected, title(monitor)
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert any(endpoint["port"] in pod.ports() for pod in selected), title(monitor)


def test_routes_lead_to_services(release: Release) -> None:
    for ingress in release.kind("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                _assert_has_port(release, service["name"], service["port"].get("name") or service["port"]["number"])
    for route in release.kind("HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                _assert_has_port(release, backend["name"], backend["port"])


def _assert_has_port(release: Release, service: str, port: int | str) -> None:
    ports = release.get("Service", service)["spec"]["ports"]
    assert port in [each["name"] if isinstance(port, str) else each["port"] for each in ports], service


def test_references_exist_or_come_from_the_values(name: str, release: Release) -> None:
    given = set(_strings(values_of(name)))
    for pod in pods(release):
        for kind, referred in _references(pod):
            assert release.has(kind, referred) or referred in given, f"{pod.role} needs {kind} {referred}"


def test_keys_of_config_maps_exist(release: Release) -> None:
    for pod in pods(release):
        for each in pod.containers():
            for variable in each.get("env", []):
                reference = variable.get("valueFrom", {}).get("configMapKeyRef")
                if reference:
                    assert reference["key"] in release.get("ConfigMap", reference["name"])["data"], pod.role


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


def test_bindings_bind_what_there_is(name: str, release: Release) -> None:
    given = set(_strings(values_of(name)))
    for binding in release.kind("RoleBinding"):
        assert release.has("Role", binding["roleRef"]["name"]), title(binding)
        for subject in binding["subjects"]:
            assert subject["kind"] == "ServiceAccount" and subject["namespace"] == NAMESPACE
            assert release.has("ServiceAccount", subject["name"]) or subject["name"] in given, title(binding)


def test_nothing_is_cluster_wide(release: Release) -> None:
    assert not list(release.kind("ClusterRole", "ClusterRoleBinding", "Namespace", "CustomResourceDefinition", "PriorityClass"))


def test_images_are_pinned_and_containers_bounded(release: Release) -> None:
    for pod in pods(release):
        for each in pod.containers():
            assert IMAGE.match(each["image"]) and ":" in each["image"].rpartition("/")[2], (pod.role, each["image"])
            assert not each["image"].endswith(":latest")
            resources = each["resources"]
            assert resources["requests"]["cpu"] and resources["requests"]["memory"], (pod.role, each["name"])
            assert resources["limits"]["memory"], (pod.role, each["name"])


def test_ports_of_a_pod_are_named_once(release: Release) -> None:
    for pod in pods(release):
        ports = [port for each in pod.containers() for port in each.get("ports", [])]
        assert len({port["name"] for port in ports}) == len(ports) == len({port["containerPort"] for port in ports}), pod.role


def test_probes_are_about_ports_that_are_declared(release: Release) -> None:
    for pod in pods(release):
        for each in pod.containers():
            declared = {port["containerPort"] for port in each.get("ports", [])} | {
                port["name"] for port in each.get("ports", [])
            }
            for key in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = each.get(key, {})
                for action in ("grpc", "httpGet", "tcpSocket"):
                    if action in probe:
                        assert probe[action]["port"] in declared, (pod.role, key)


def test_notes_say_what_to_type_next(release: Release) -> None:
    assert "kubectl" in release.notes and NAMESPACE in release.notes
    assert "<no value>" not in release.notes and "%!" not in release.notes


def test_nothing_was_left_unsaid_by_a_template(release: Release) -> None:
    for each in release.objects:
        for text in _strings(each):
            assert "<no value>" not in text and "%!" not in text and "<nil>" not in text, title(each)
