"""What each template renders, field by field: values, an object, a path in it, what is there.

A path's parts: keys, numbers of list items, or NAME= to find the item of a list by its name. ABSENT: nothing is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.chart.release import NAME, merged, render
from tests.chart.variants import KEDA, VARIANTS, model

ABSENT = object()
FULL = f"{NAME}-rootstock"
GATEWAY = f"Deployment/{FULL}-gateway"
TOKENIZER = f"Deployment/{FULL}-tokenizer-demo"
DETOKENIZER = f"Deployment/{FULL}-detokenizer-demo"
WORKER = f"Deployment/{FULL}-worker-demo"
POD = "spec template spec "
Values = dict[str, Any]
Row = tuple[str, Values, str, str, Any]


def at(value: Any, path: str) -> Any:
    for part in path.split():
        if part.endswith("="):
            value = next((each for each in value or [] if each["name"] == part[:-1]), ABSENT)
        elif isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else ABSENT
        else:
            value = value.get(part, ABSENT) if isinstance(value, dict) else ABSENT
        if value is ABSENT:
            break
    return value


def container(name: str, path: str) -> str:
    return f"{POD}containers {name}= {path}"


FRONT = {"gateway": GATEWAY, "tokenizer": TOKENIZER, "detokenizer": DETOKENIZER}
EVERY = {**FRONT, "worker": WORKER}
HEALTH = {"gateway": 7000, "tokenizer": 7001, "detokenizer": 7002, "worker": 7003}
SCALED = VARIANTS["hpa"]
GPU: Values = {"worker": {"gpus": 2, "runtimeClassName": "nvidia"}}


def rows() -> Iterable[Row]:
    for name, title in EVERY.items():
        scaled = {name: {"autoscaling": {"enabled": True}}}
        yield f"{name}: replicas", {name: {"replicas": 5}}, title, "spec replicas", 5
        yield f"{name}: no replicas where a scaler sets them", scaled, title, "spec replicas", ABSENT
        yield f"{name}: grace", {"drainSeconds": 60}, title, POD + "terminationGracePeriodSeconds", 75
        yield f"{name}: preStop", {}, title, container(name, "lifecycle preStop exec command"), ["sleep", "5"]
        for probe, service in (("startupProbe", ABSENT), ("livenessProbe", ABSENT), ("readinessProbe", name)):
            yield f"{name}: {probe}", {}, title, container(name, f"{probe} grpc port"), HEALTH[name]
            yield f"{name}: {probe} service", {}, title, container(name, f"{probe} grpc service"), service
        yield f"{name}: service links", {}, title, POD + "enableServiceLinks", False
        yield f"{name}: node selector", {name: {"nodeSelector": {"a": "b"}}}, title, POD + "nodeSelector", {"a": "b"}
        yield f"{name}: priority", {name: {"priorityClassName": "high"}}, title, POD + "priorityClassName", "high"
        yield (
            f"{name}: tolerations",
            {name: {"tolerations": [{"key": "k", "operator": "Exists"}]}},
            title,
            POD + "tolerations 0 key",
            "k",
        )
        yield f"{name}: affinity", {name: {"affinity": {"podAffinity": {}}}}, title, POD + "affinity", {"podAffinity": {}}
        yield f"{name}: spread", {}, title, POD + "topologySpreadConstraints 0 topologyKey", "topology.kubernetes.io/zone"
        yield f"{name}: no spread", {name: {"topologySpread": False}}, title, POD + "topologySpreadConstraints", ABSENT
        yield f"{name}: labels", {name: {"podLabels": {"a": "b"}}}, title, "spec template metadata labels a", "b"
        yield f"{name}: own labels win", {name: {"podLabels": {"app.kubernetes.io/name": "x"}}}, title, (
            "spec template metadata labels app.kubernetes.io/name"
        ), "rootstock"  # fmt: skip
        yield f"{name}: annotations", {name: {"podAnnotations": {"a": "b"}}}, title, "spec template metadata annotations a", "b"
        yield (
            f"{name}: variables",
            {name: {"extraEnv": [{"name": "A", "value": "b"}]}},
            title,
            container(name, "env A= value"),
            "b",
        )
        yield f"{name}: image", {"image": {"registry": "r.example.com/m/", "tag": "1"}}, title, container(name, "image"), (
            f"r.example.com/m/rootstock/{name}:1"
        )  # fmt: skip
        yield f"{name}: image of its own", {name: {"image": {"tag": "2"}}}, title, container(name, "image"), f"rootstock/{name}:2"
        yield f"{name}: pull secret", {"image": {"pullSecrets": ["s"]}}, title, POD + "imagePullSecrets 0 name", "s"
        yield f"{name}: pull policy", {"image": {"pullPolicy": "Always"}}, title, container(name, "imagePullPolicy"), "Always"
        yield f"{name}: CPU without a limit", {}, title, container(name, "resources limits cpu"), ABSENT
        budget = title.replace("Deployment", "PodDisruptionBudget")
        yield f"{name}: budget", {}, budget, "spec maxUnavailable", 1
    for name, title in FRONT.items():
        yield f"{name}: rollout keeps all", {}, title, "spec strategy rollingUpdate", {"maxSurge": "25%", "maxUnavailable": 0}
        yield f"{name}: no token", {}, title, POD + "automountServiceAccountToken", False
        hpa = title.replace("Deployment", "HorizontalPodAutoscaler")
        yield f"{name}: CPU drives", SCALED, hpa, "spec metrics 0 resource target averageUtilization", 70
        yield f"{name}: bounds", SCALED, hpa, "spec minReplicas", 2
        yield f"{name}: up at once", SCALED, hpa, "spec behavior scaleUp stabilizationWindowSeconds", 0
    yield from gateway_rows()
    yield from worker_rows()
    yield from redis_and_models_rows()
    yield from edge_rows()


def gateway_rows() -> Iterable[Row]:
    config, hpa = f"ConfigMap/{FULL}-gateway", f"HorizontalPodAutoscaler/{FULL}-gateway"
    keys = {"auth": {"apiKeysSecret": "k", "keyWeights": [3, 1]}}
    yield "keys from their Secret", keys, GATEWAY, container("gateway", "env ROOTSTOCK_API_KEYS= valueFrom secretKeyRef"), (
        {"name": "k", "key": "api-keys"}
    )  # fmt: skip
    yield "weights", keys, config, "data ROOTSTOCK_KEY_WEIGHTS", "3,1"
    yield "no keys", {}, GATEWAY, container("gateway", "env ROOTSTOCK_API_KEYS="), ABSENT
    yield "names", {}, config, "data ROOTSTOCK_WORKERS", f"dns:///{FULL}-worker.serving.svc:7003"
    yield "watch", {"gateway": {"discovery": "k8s"}}, config, "data ROOTSTOCK_WORKERS", f"k8s:///{FULL}-worker.serving:7003"
    yield "watch needs a token", {"gateway": {"discovery": "k8s"}}, GATEWAY, POD + "automountServiceAccountToken", True
    yield "watch's rights", {"gateway": {"discovery": "k8s"}}, f"Role/{FULL}-gateway", "rules", (
        [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]
    )  # fmt: skip
    yield "names of the models", VARIANTS["two-models"], config, "data ROOTSTOCK_MODELS", "small,Org/Large.v2"
    yield "waiting", {"gateway": {"queueTimeoutSeconds": 90}}, config, "data ROOTSTOCK_QUEUE_TIMEOUT_S", "90"
    yield "a setting", {"gateway": {"settings": {"routing_policy": "random"}}}, config, "data ROOTSTOCK_ROUTING_POLICY", "random"
    yield "a switch", {"gateway": {"settings": {"enable_priority_scheduling": True}}}, config, (
        "data ROOTSTOCK_ENABLE_PRIORITY_SCHEDULING"
    ), "true"  # fmt: skip
    yield "level", {"logLevel": "debug"}, config, "data ROOTSTOCK_LOG_LEVEL", "debug"
    yield "collector", {"tracing": {"otlpEndpoint": "otel:4317"}}, config, "data ROOTSTOCK_OTLP_ENDPOINT", "otel:4317"
    yield "no collector", {}, config, "data ROOTSTOCK_OTLP_ENDPOINT", ABSENT
    service = f"Service/{FULL}-gateway"
    yield "service", {}, service, "spec ports 0", {"name": "http", "port": 80, "targetPort": "http"}
    yield "load balancer", {"gateway": {"service": {"type": "LoadBalancer"}}}, service, "spec type", "LoadBalancer"
    yield "annotations", {"gateway": {"service": {"annotations": {"a": "b"}}}}, service, "metadata annotations a", "b"
    yield "streams drive", SCALED, hpa, "spec metrics 1 pods target averageValue", "400"


def worker_rows() -> Iterable[Row]:
    config, hpa, scaled = (f"{kind}/{FULL}-worker-demo" for kind in ("ConfigMap", "HorizontalPodAutoscaler", "ScaledObject"))
    yield "no spare GPU", {}, WORKER, "spec strategy rollingUpdate", {"maxSurge": 0, "maxUnavailable": 1}
    yield "GPUs", GPU, WORKER, container("worker", "resources limits nvidia.com/gpu"), 2
    yield "no GPU", {}, WORKER, container("worker", "resources limits nvidia.com/gpu"), ABSENT
    yield "GPU nodes are tainted", GPU, WORKER, POD + "tolerations 0 key", "nvidia.com/gpu"
    yield "runtime", GPU, WORKER, POD + "runtimeClassName", "nvidia"
    yield "executor", GPU, config, "data ROOTSTOCK_EXECUTOR", "cuda"
    yield "CPU executor", {}, config, "data ROOTSTOCK_EXECUTOR", "cpu"
    yield "shared memory", {"worker": {"sharedMemory": "8Gi"}}, WORKER, POD + "volumes shm= emptyDir", (
        {"medium": "Memory", "sizeLimit": "8Gi"}
    )  # fmt: skip
    yield "loading", {"worker": {"startupSeconds": 1200}}, WORKER, container("worker", "startupProbe failureThreshold"), 240
    yield (
        "loading in fifths",
        {"worker": {"startupSeconds": 1201}},
        WORKER,
        container("worker", "startupProbe failureThreshold"),
        241,
    )
    yield "a long prefill", {}, WORKER, container("worker", "livenessProbe failureThreshold"), 6
    yield "rights", {}, f"Role/{FULL}-worker", "rules", [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "patch"]}]
    yield "token", {}, WORKER, POD + "automountServiceAccountToken", True
    yield "no rights, no token", {"worker": {"deletionCost": False}}, WORKER, POD + "automountServiceAccountToken", False
    yield "own name", {}, WORKER, container("worker", "env ROOTSTOCK_WORKER_ID= valueFrom fieldRef fieldPath"), "metadata.name"
    yield "control", {"auth": {"controlTokenSecret": "t"}}, WORKER, container("worker", "ports control= containerPort"), 7004
    yield "no control", {}, WORKER, container("worker", "ports control="), ABSENT
    yield "control's token", {"auth": {"controlTokenSecret": "t"}}, WORKER, (
        container("worker", "env ROOTSTOCK_CONTROL_TOKEN= valueFrom secretKeyRef")
    ), {"name": "t", "key": "token"}  # fmt: skip
    yield (
        "pool",
        {"inferencePool": {"enabled": True}},
        WORKER,
        "spec template metadata labels rootstock.io/inference-pool",
        "demo",
    )
    up = "spec behavior scaleUp "
    cold = merged(SCALED, {"worker": {"autoscaling": {"coldStartSeconds": 240}}})
    yield "doubling", cold, hpa, up + "policies 0", {"type": "Percent", "value": 100, "periodSeconds": 240}
    yield "one at least", cold, hpa, up + "policies 1", {"type": "Pods", "value": 1, "periodSeconds": 240}
    yield "whichever is more", cold, hpa, up + "selectPolicy", "Max"
    yield "down slowly", SCALED, hpa, "spec behavior scaleDown policies 0", {"type": "Pods", "value": 1, "periodSeconds": 300}
    yield "down after a while", SCALED, hpa, "spec behavior scaleDown stabilizationWindowSeconds", 600
    yield "bounds", SCALED, hpa, "spec maxReplicas", 6
    yield "from zero", KEDA, scaled, "spec minReplicaCount", 0
    yield "to how many", KEDA, scaled, "spec maxReplicaCount", 6
    yield "KEDA's Prometheus", KEDA, scaled, "spec triggers 0 metadata serverAddress", "http://prometheus.monitoring.svc:9090"
    yield "KEDA scales as an HPA", KEDA, scaled, (
        "spec advanced horizontalPodAutoscalerConfig behavior scaleDown stabilizationWindowSeconds"
    ), 600  # fmt: skip
    disks = f"StatefulSet/{FULL}-worker-demo"
    values = VARIANTS["local-disks"]
    yield "disk", values, disks, "spec volumeClaimTemplates 0 spec resources requests storage", "20Gi"
    yield "service of the set", values, disks, "spec serviceName", f"{FULL}-worker"
    yield "model on the disk", values, config, "data ROOTSTOCK_MODEL", "/cache/demo"
    yield "all at once", values, disks, "spec podManagementPolicy", "Parallel"
    group, many = f"LeaderWorkerSet/{FULL}-worker-demo", VARIANTS["leader-worker-set"]
    yield "hosts", many, group, "spec leaderWorkerTemplate size", 2
    yield "a group lives and dies as one", many, group, "spec leaderWorkerTemplate restartPolicy", "RecreateGroupOnPodRestart"
    yield "no spare group", many, group, "spec rolloutStrategy rollingUpdateConfiguration maxSurge", 0
    yield "members serve nobody", many, group, (
        "spec leaderWorkerTemplate workerTemplate metadata labels app.kubernetes.io/component"
    ), "worker-member"  # fmt: skip


def redis_and_models_rows() -> Iterable[Row]:
    redis, claim = f"Deployment/{FULL}-redis", f"PersistentVolumeClaim/{FULL}-models"
    elsewhere = VARIANTS["redis-elsewhere"]
    yield "one Redis", {}, redis, "spec strategy type", "Recreate"
    yield "Redis by its Service", {}, f"ConfigMap/{FULL}-worker-demo", "data ROOTSTOCK_REDIS_URL", (
        f"redis://{FULL}-redis.serving.svc:6379/0"
    )  # fmt: skip
    yield "Redis elsewhere", elsewhere, GATEWAY, container("gateway", "env ROOTSTOCK_REDIS_URL= valueFrom secretKeyRef"), (
        {"name": "llm-redis", "key": "url"}
    )  # fmt: skip
    yield "Redis elsewhere, for workers", elsewhere, WORKER, (
        container("worker", "env ROOTSTOCK_REDIS_URL= valueFrom secretKeyRef name")
    ), "llm-redis"  # fmt: skip
    yield "its URL in no ConfigMap", elsewhere, f"ConfigMap/{FULL}-worker-demo", "data ROOTSTOCK_REDIS_URL", ABSENT
    shared = VARIANTS["shared-cache"]
    yield "claim", shared, claim, "spec accessModes", ["ReadWriteMany"]
    yield "class", shared, claim, "spec storageClassName", "files"
    for name, title in (("tokenizer", TOKENIZER), ("detokenizer", DETOKENIZER), ("worker", WORKER)):
        yield f"{name} reads it", shared, title, POD + "volumes models= persistentVolumeClaim", (
            {"claimName": f"{FULL}-models", "readOnly": True}
        )  # fmt: skip
        yield f"{name} waits for it", shared, title, POD + "initContainers wait-for-model= volumeMounts models= readOnly", True
        yield f"{name} does not wait for its image", {}, title, POD + "initContainers", ABSENT
    yield (
        "claim that is there",
        VARIANTS["existing-claim"],
        WORKER,
        POD + "volumes models= persistentVolumeClaim claimName",
        "weights",
    )
    yield "folder of the node", VARIANTS["host-path-cache"], WORKER, POD + "volumes models= hostPath path", "/srv/models"
    yield "image", VARIANTS["image-volume"], WORKER, POD + "volumes models= image reference", "registry.example.com/models/demo:1"
    yield "a model's own workers", VARIANTS["two-models"], f"Deployment/{FULL}-worker-org-large-v2", "spec replicas", 3
    yield "the others' workers", VARIANTS["two-models"], f"Deployment/{FULL}-worker-small", "spec replicas", 1
    off = {"models": [model("a"), model("b", worker={"autoscaling": {"enabled": True}})]}
    yield "a model's own scaler", off, f"HorizontalPodAutoscaler/{FULL}-worker-b", "spec maxReplicas", 4
    yield "no scaler for the other", off, f"Deployment/{FULL}-worker-a", "spec replicas", 1


def edge_rows() -> Iterable[Row]:
    access = VARIANTS["access"]
    ingress, route = f"Ingress/{FULL}-gateway", f"HTTPRoute/{FULL}-gateway"
    yield "class", access, ingress, "spec ingressClassName", "nginx"
    yield "host", access, ingress, "spec rules 0 host", "llm.example.com"
    yield "TLS", access, ingress, "spec tls 0 secretName", "llm-tls"
    yield "parent", access, route, "spec parentRefs 0 name", "gateway"
    yield "hostname", access, route, "spec hostnames", ["llm.example.com"]
    yield "account", {}, f"ServiceAccount/{FULL}-worker", "automountServiceAccountToken", False
    yield "account's name", {"serviceAccount": {"create": False, "name": "x"}}, WORKER, POD + "serviceAccountName", "x"
    yield "role of an existing account", {"serviceAccount": {"create": False, "name": "x"}}, f"RoleBinding/{FULL}-worker", (
        "subjects 0 name"
    ), "x"  # fmt: skip
    peers = f"Service/{FULL}-gateway-peers"
    yield "gateways among each other", {}, peers, "spec clusterIP", "None"
    yield "gateways that drain still have requests", {}, peers, "spec publishNotReadyAddresses", True
    yield "admin port", VARIANTS["operated"], GATEWAY, container("gateway", "ports admin= containerPort"), 8001
    yield "no admin port", {}, GATEWAY, container("gateway", "ports admin="), ABSENT
    for component, port in (("tokenizer", 7001), ("detokenizer", 7002), ("worker", 7003)):
        yield f"{component}s by name", {}, f"Service/{FULL}-{component}", "spec clusterIP", "None"
        yield f"{component}s that are ready", {}, f"Service/{FULL}-{component}", "spec publishNotReadyAddresses", False
        yield f"{component}s' port", {}, f"Service/{FULL}-{component}", "spec ports 0 port", port


@pytest.mark.parametrize(("values", "title", "path", "expected"), [pytest.param(*row[1:], id=row[0]) for row in rows()])
def test_field(values: Values, title: str, path: str, expected: Any) -> None:
    found = at(render(values).get(*title.split("/")), path)
    if expected is ABSENT:
        assert found is ABSENT, found
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("values", "title"),
    [
        ({}, f"HorizontalPodAutoscaler/{FULL}-worker-demo"),
        ({}, f"ScaledObject/{FULL}-worker-demo"),
        (SCALED, f"ScaledObject/{FULL}-worker-demo"),
        (KEDA, f"HorizontalPodAutoscaler/{FULL}-worker-demo"),
        (VARIANTS["local-disks"], WORKER),
        (VARIANTS["leader-worker-set"], WORKER),
        ({}, f"Ingress/{FULL}-gateway"),
        ({}, f"HTTPRoute/{FULL}-gateway"),
        ({}, f"Role/{FULL}-gateway"),
        ({"worker": {"deletionCost": False}}, f"Role/{FULL}-worker"),
        ({"worker": {"pdb": {"enabled": False}}}, f"PodDisruptionBudget/{FULL}-worker-demo"),
        ({"gateway": {"pdb": {"enabled": False}}}, f"PodDisruptionBudget/{FULL}-gateway"),
        (VARIANTS["redis-elsewhere"], f"Deployment/{FULL}-redis"),
        (VARIANTS["redis-elsewhere"], f"Service/{FULL}-redis"),
        (VARIANTS["existing-claim"], f"PersistentVolumeClaim/{FULL}-models"),
        (VARIANTS["no-account"], f"ServiceAccount/{FULL}"),
        ({"tests": {"enabled": False}}, f"Pod/{FULL}-test-chat"),
    ],
)
def test_what_is_not_asked_for_is_not_there(values: Values, title: str) -> None:
    assert not render(values).has(*title.split("/"))


CHECKSUM = "spec template metadata annotations checksum/config"


@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        ({"gateway": {"settings": {"retry_after_s": 9}}}, {"gateway"}),
        ({"worker": {"settings": {"page_size": 32}}}, {"worker"}),
        ({"tokenizer": {"settings": {"encode_threads": 3}}}, {"tokenizer"}),
        ({"models": [model(worker={"settings": {"page_size": 32}})]}, {"worker"}),
        ({"logLevel": "debug"}, set(EVERY)),
        ({"gateway": {"replicas": 7}, "worker": {"replicas": 7}}, set()),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, set()),
    ],
)
def test_changed_settings_start_new_pods_and_no_others(change: Values, restarted: set[str]) -> None:
    before, after = render({}), render(change)
    changed = {
        name
        for name, title in EVERY.items()
        if at(before.get(*title.split("/")), CHECKSUM) != at(after.get(*title.split("/")), CHECKSUM)
    }
    assert changed == restarted
    templates = {
        name
        for name, title in EVERY.items()
        if before.get(*title.split("/"))["spec"]["template"] != after.get(*title.split("/"))["spec"]["template"]
    }
    assert templates == restarted
