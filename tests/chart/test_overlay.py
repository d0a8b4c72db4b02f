"""Tests ci/operators-overlay-values.yaml over cpu-demo-values.yaml: each value appears in the right field of the objects."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.kube_schemas import LATEST, faults
from tests.chart.pod_security import violations
from tests.chart.pods import pods
from tests.chart.release import MINIMAL_KUBE, Release, ci_values, lint_findings, merged, refusal, render, title
from tests.chart.template_fields import DETOKENIZER, FULL, GATEWAY, POD, TOKENIZER, WORKER, at, container

VALUES = merged(ci_values("cpu-demo"), ci_values("operators-overlay"))
REDIS, STATE = f"Deployment/{FULL}-redis", f"StatefulSet/{FULL}-state"
CHAT, READINESS = f"Pod/{FULL}-test-chat", f"Pod/{FULL}-test-readiness"
EVERY = (GATEWAY, TOKENIZER, DETOKENIZER, WORKER, REDIS, STATE)  # objects with a pod template
LABELS, ANNOTATIONS = "spec template metadata labels ", "spec template metadata annotations "
SHELL = "docker.io/library/redis:7.4.2-alpine"

# Key of the values file → objects, path of the field in them, expected value of the field.
SHOWN: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "commonLabels": ((GATEWAY, f"Service/{FULL}-gateway", f"NetworkPolicy/{FULL}-redis"), "metadata labels cost-center", "ml-42"),
    "image.pullPolicy": (EVERY, POD + "containers 0 imagePullPolicy", "Always"),
    "image.pullSecrets": (EVERY, POD + "imagePullSecrets 0 name", "registry-credentials"),
    "pod.labels": (EVERY, LABELS + "team", "inference"),
    "pod.annotations": (EVERY, ANNOTATIONS + "sidecar.istio.io/inject", "false"),
    "pod.env": (EVERY, POD + "containers 0 env HTTPS_PROXY= value", "http://proxy.example.com:3128"),
    "pod.volumes": (EVERY, POD + "volumes corporate-ca= configMap name", "corporate-ca"),
    "pod.volumes, replacing tmp": (EVERY, POD + "volumes tmp= emptyDir", {"sizeLimit": "2Gi"}),
    "pod.volumeMounts": (EVERY, POD + "containers 0 volumeMounts corporate-ca= mountPath", "/etc/corporate-ca"),
    "pod.nodeSelector": (EVERY, POD + "nodeSelector", {"kubernetes.io/os": "linux"}),
    "pod.tolerations": (EVERY, POD + "tolerations 0 key", "dedicated"),
    "pod.schedulerName": (EVERY, POD + "schedulerName", "default-scheduler"),
    "pod.dnsPolicy": ((GATEWAY, WORKER, REDIS), POD + "dnsPolicy", "ClusterFirst"),
    "pod.dnsConfig": (EVERY, POD + "dnsConfig options 0", {"name": "ndots", "value": "2"}),
    "pod.hostAliases": (EVERY, POD + "hostAliases 0 hostnames", ["registry.example.com"]),
    "pod.securityContext": (EVERY, POD + "securityContext supplementalGroups", [3000]),
    "pod.securityContext, a key that the chart sets too": (EVERY, POD + "securityContext fsGroupChangePolicy", "Always"),
    "pod.containerSecurityContext": (EVERY, POD + "containers 0 securityContext privileged", False),
    "pod, in hooks": ((CHAT, READINESS), "spec tolerations 0 key", "dedicated"),
    "gateway.replicas": ((GATEWAY,), "spec replicas", 2),
    "gateway.resources": ((GATEWAY,), container("gateway", "resources limits ephemeral-storage"), "2Gi"),
    "gateway.pdb": ((f"PodDisruptionBudget/{FULL}-gateway",), "spec maxUnavailable", "50%"),
    "gateway.settings": ((f"ConfigMap/{FULL}-gateway",), "data ROOTSTOCK_REQUEST_TIMEOUT_S", "900"),
    "gateway.extraEnv": ((GATEWAY,), container("gateway", "env NODE_NAME= valueFrom fieldRef fieldPath"), "spec.nodeName"),
    "gateway.podLabels": ((GATEWAY,), LABELS + "sidecar", "log-shipper"),
    "gateway.podAnnotations": ((GATEWAY,), ANNOTATIONS + "prometheus.io/scrape", "true"),
    "gateway.affinity": (
        (GATEWAY,),
        POD + "affinity podAntiAffinity preferredDuringSchedulingIgnoredDuringExecution 0 weight",
        100,
    ),
    "gateway.priorityClassName": ((GATEWAY,), POD + "priorityClassName", "serving"),
    "gateway.strategy": ((GATEWAY,), "spec strategy rollingUpdate", {"maxSurge": 1, "maxUnavailable": 0}),
    "gateway.pod.envFrom": ((GATEWAY,), container("gateway", "envFrom 0 configMapRef name"), "operators-environment"),
    "gateway.pod.volumes, added to pod.volumes": ((GATEWAY,), POD + "volumes logs= emptyDir sizeLimit", "256Mi"),
    "gateway.pod.volumeMounts": ((GATEWAY,), container("gateway", "volumeMounts logs= mountPath"), "/var/log/rootstock"),
    "gateway.pod.initContainers": ((GATEWAY,), POD + "initContainers make-log= image", SHELL),
    "gateway.pod.containers": ((GATEWAY,), container("log-shipper", "securityContext readOnlyRootFilesystem"), True),
    "gateway.pod.topologySpreadConstraints": ((GATEWAY,), POD + "topologySpreadConstraints 0 maxSkew", 2),
    "gateway.pod.terminationGracePeriodSeconds": ((GATEWAY,), POD + "terminationGracePeriodSeconds", 180),
    "gateway.service": (
        (f"Service/{FULL}-gateway",),
        "metadata annotations external-dns.alpha.kubernetes.io/hostname",
        "llm.example.com",
    ),
    "tokenizer.autoscaling": ((f"HorizontalPodAutoscaler/{FULL}-tokenizer-demo",), "spec maxReplicas", 3),
    "tokenizer.pod.dnsPolicy": ((TOKENIZER,), POD + "dnsPolicy", "Default"),
    "worker.nodeLostSeconds": ((WORKER,), POD + "tolerations 1 tolerationSeconds", 120),
    "worker.strategy": ((WORKER,), "spec strategy rollingUpdate", {"maxSurge": 1, "maxUnavailable": 0}),
    "worker.pod.containerSecurityContext": ((WORKER,), container("worker", "securityContext readOnlyRootFilesystem"), False),
    "redis.resources": ((REDIS,), container("redis", "resources requests memory"), "64Mi"),
    "redis.pod.annotations": ((REDIS,), ANNOTATIONS + "cluster-autoscaler.kubernetes.io/safe-to-evict", "true"),
    "redis.pod.containers": ((REDIS,), container("redis-exporter", "ports exporter= containerPort"), 9121),
    "state.pod.annotations": ((STATE,), ANNOTATIONS + "backup.velero.io/backup-volumes", "data"),
    "state.passwordSecret": ((STATE,), container("redis", "env REDISCLI_AUTH= valueFrom secretKeyRef name"), "state-password"),
    "tests.pod.tolerations": ((CHAT, READINESS), "spec tolerations 1 key", "tests"),
    "ingress": ((f"Ingress/{FULL}-gateway",), "metadata annotations cert-manager.io/cluster-issuer", "letsencrypt"),
    "serviceAccount.annotations": (
        (f"ServiceAccount/{FULL}", f"ServiceAccount/{FULL}-worker"),
        "metadata annotations eks.amazonaws.com/role-arn",
        "arn:aws:iam::123456789012:role/models",
    ),
    "networkPolicy.extraEgress": ((f"NetworkPolicy/{FULL}-extra",), "spec egress 0 ports 0 port", 24224),
    "networkPolicy.monitoringNamespaces": (
        tuple(f"NetworkPolicy/{FULL}-{each}" for each in ("gateway", "tokenizer", "detokenizer", "worker")),
        "spec ingress 1 from 1 namespaceSelector matchLabels",
        {"kubernetes.io/metadata.name": "openshift-user-workload-monitoring"},
    ),
    "extraObjects": (("ConfigMap/operators-environment",), "data OTEL_RESOURCE_ATTRIBUTES", "service.namespace=serving"),
}


@pytest.fixture(scope="module")
def release() -> Release:
    return render(VALUES)


def test_overlay_values_appear_in_their_objects(release: Release) -> None:
    assert len(SHOWN) >= 40
    found = {
        name: {object_title: at(release.get(*object_title.split("/")), path) for object_title in objects}
        for name, (objects, path, _) in SHOWN.items()
    }
    assert found == {name: dict.fromkeys(objects, value) for name, (objects, _, value) in SHOWN.items()}


def test_every_setting_of_the_overlay_file_has_a_test_row() -> None:
    """Each key of the file, by its first two parts, needs a row in SHOWN.

    Exempt are the blocks in `alone`, and the keys that other test files cover.
    """
    shown = {".".join(name.partition(",")[0].split(".")[:2]) for name in SHOWN}
    alone = ("commonLabels", "ingress", "extraObjects", "models")
    given = {f"{top}.{key}" for top, block in ci_values("operators-overlay").items() if isinstance(block, dict) for key in block}
    unshown = {name for name in given if name not in shown and name.partition(".")[0] not in (*alone, *shown)}
    assert unshown == {
        "worker.deletionCost",
        "worker.settings",
        "state.embedded",
        "state.volume",
        "monitoring.serviceMonitor",
    } | {"networkPolicy.apiServerPorts", "image.registry", "redis.image", "state.image"}, (
        "template_fields.py, test_network_policies.py and test_images_named.py test these settings"
    )


def test_overlay_objects_are_valid_and_meet_restricted_pod_security(release: Release) -> None:
    assert refusal(VALUES) == "" and lint_findings(VALUES) == []
    wrong = {
        title(each): found for each in release.objects for version in (MINIMAL_KUBE, LATEST) if (found := faults(each, version))
    }
    assert wrong == {}
    assert [found for pod in pods(release) for found in violations(pod.spec, pod.annotations)] == []
