"""Defines the facts of a healthy release and of broken releases, as the API server, gateway, Prometheus and Redis report them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from charts.rootstock.scripts.diagnosis.install import UNRESOLVED, Answer, Facts, Install, RedisState
from tests.chart.release import NAME, merged, render

FULL = f"{NAME}-rootstock"
Object = dict[str, Any]
VALUES: dict[str, Any] = {
    "models": [{"name": "demo", "path": "/models/demo"}],
    "auth": {"apiKeysSecret": "keys", "controlTokenSecret": "control"},
    "worker": {
        "gpus": 1,
        "runtimeClassName": "nvidia",
        "resources": {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "64Gi"}},
        "autoscaling": {"enabled": True},
    },
    "modelCache": {"type": "pvc"},
    "redis": {"embedded": False, "externalUrlSecret": "redis"},
    "monitoring": {"podMonitor": {"enabled": True}},
    "autoscaling": {"adapterRules": True, "prometheusUrl": "http://prometheus.monitoring.svc:9090"},
}


def install(values: Mapping[str, Any] | None = None) -> Install:
    """Returns the expected state from the chart's ConfigMap."""
    install = render(merged(VALUES, values or {})).get("ConfigMap", f"{FULL}-test-diagnosis")["data"]["install.json"]
    return Install.of(json.loads(install))


def container(name: str, state: Object | None = None, ready: bool = False, **more: Any) -> Object:
    return {"name": name, "ready": ready, "restartCount": 0, "state": state or {"running": {"startedAt": "2026-01-01"}}, **more}


def pod(component: str, node: str = "node-a", **status: Any) -> Object:
    """Returns a pod that is ready. `status` replaces fields of its status."""
    labels = {"app.kubernetes.io/instance": NAME, "app.kubernetes.io/component": component, "rootstock.io/model": "demo"}
    volumes = [] if component == "gateway" else [{"name": "models", "persistentVolumeClaim": {"claimName": f"{FULL}-models"}}]
    well = {
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
        "containerStatuses": [container(component, ready=True)],
    }
    name = f"{FULL}-{component}-demo-7d9f-x2x4z"
    spec = {"nodeName": node, "volumes": volumes} if node else {"volumes": volumes}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {**well, **status}}


def unready(component: str, *containers: Object, init: tuple[Object, ...] = (), why: str = "") -> Object:
    scheduled = {"type": "PodScheduled", "status": "False" if why else "True", "reason": "Unschedulable", "message": why}
    return pod(
        component,
        node="" if why else "node-a",
        conditions=[scheduled, {"type": "Ready", "status": "False"}],
        containerStatuses=list(containers),
        initContainerStatuses=list(init),
    )


def event(about: str, reason: str, message: str) -> Object:
    return {
        "metadata": {"name": f"{about}.17"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": "2026-01-01T00:00:00Z",
        "involvedObject": {"name": about},
    }


def listed(*items: Object) -> Answer:
    return Answer(200, {"kind": "List", "items": list(items)})


def service(host: str, ports: Mapping[str, int]) -> Object:
    shown = [{"name": name, "port": port} for name, port in ports.items()]
    return {"metadata": {"name": host.partition(".")[0]}, "spec": {"ports": shown}}


def claim(phase: str = "Bound", mode: str = "ReadWriteMany", storage: str = "files") -> Object:
    spec = {"accessModes": [mode], "storageClassName": storage}
    return {"metadata": {"name": f"{FULL}-models"}, "spec": spec, "status": {"phase": phase}}


def autoscaler(**condition: str) -> Object:
    conditions = [
        {"type": "AbleToScale", "status": "True", "reason": "Ready"},
        {"type": "ScalingActive", "status": "True", "reason": "ValidMetricFound"},
    ]
    return {
        "metadata": {"name": f"{FULL}-worker-demo"},
        "status": {"conditions": [*conditions, *([condition] if condition else [])]},
    }


COMPONENTS = ("gateway", "tokenizer", "detokenizer", "worker")
PODS = {each: pod(each) for each in COMPONENTS}
OBJECTS: dict[str, Answer] = {
    "pods": listed(*PODS.values()),
    "services": listed(*(service(host, ports) for host, ports in install().services.items())),
    "events": listed(),
    "persistentvolumeclaims": listed(claim()),
    "replicasets": listed({"metadata": {"name": f"{FULL}-worker-demo-7d9f"}, "spec": {"replicas": 1}, "status": {"replicas": 1}}),
    "statefulsets": listed(),
    "networkpolicies": listed(),
    "horizontalpodautoscalers": listed(autoscaler()),
    "scaledobjects": Answer(404, {"message": "the server could not find the requested resource"}),
}
GROUPS = ("apps", "autoscaling", "external.metrics.k8s.io", "custom.metrics.k8s.io")
INFO: Object = {
    "models": [{"id": "demo", "vocab_size": 1000}],
    "workers": [{"worker_id": "w", "model": "demo", "role": "both", "state": "ready"}],
    "gateway": {"workers": 1, "tokenizers": 1, "detokenizers": 1, "waiting": 0},
}
TEXT = "Zwölf Boxkämpfer jagen Viktor"


def groups(*names: str) -> Answer:
    return Answer(200, {"kind": "APIGroupList", "groups": [{"name": name} for name in names]})


def series(up: Mapping[str, int]) -> Answer:
    result = [{"metric": {"component": f"rootstock-{name}"}, "value": [1.7e9, str(count)]} for name, count in up.items()]
    return Answer(200, {"status": "success", "data": {"resultType": "vector", "result": result}})


WELL = Facts(
    objects=OBJECTS,
    groups=groups(*GROUPS),
    external=Answer(200, {"kind": "ExternalMetricValueList", "items": [{"metricName": "rootstock_backlog", "value": "0"}]}),
    names=dict.fromkeys(install().services, ""),
    secrets={"keys": frozenset({"keys.json"}), "control": frozenset({"token"}), "redis": frozenset({"url"})},
    redis={"index": RedisState("redis:6379", wrote=True, policy="noeviction")},
    readiness=Answer(200, {"ready": True, "missing": []}),
    info=Answer(200, INFO),
    texts={"demo": {"said": TEXT, "read": TEXT, "ids": [5, 900], "vocab_size": 1000}},
    series=series(dict.fromkeys(COMPONENTS, 1)),
)


@dataclass(frozen=True)
class Fault:
    """A fault of a release and its expected diagnosis."""

    check: str  # name of the check that finds the fault
    facts: Facts  # reports of the broken release
    what: str  # part of the expected finding
    mend: str  # part of the expected remedy
    values: Mapping[str, Any] = field(default_factory=dict)  # chart values that are added to VALUES
    alone: bool = True  # whether no other check may have a finding


def with_objects(**objects: Answer) -> Facts:
    return replace(WELL, objects={**OBJECTS, **objects})


def with_pods(*changed: Object, **objects: Answer) -> Facts:
    """Returns the facts of a healthy release in which these pods replace the pods of the same component."""
    of = {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in changed}
    return with_objects(pods=listed(*{**PODS, **of}.values()), **objects)


def without_workers(facts: Facts) -> Facts:
    return replace(facts, readiness=Answer(503, {"missing": ["worker"]}), info=Answer(200, {**INFO, "workers": []}))


def logging(facts: Facts, at: str, text: str) -> Facts:
    return replace(facts, logs={at: text})


def _redis(error: str, policy: str = "noeviction") -> Facts:
    return replace(WELL, redis={"index": RedisState("redis:6379", error, policy=policy)})


CERTIFICATES = {f"llm-{each}-tls": frozenset({"tls.crt", "tls.key", "ca.crt"}) for each in (*COMPONENTS, "redis")}
WORKER_POD = PODS["worker"]["metadata"]["name"]
CRASHED = container(
    "worker",
    {"waiting": {"reason": "CrashLoopBackOff"}},
    lastState={"terminated": {"exitCode": 1, "reason": "Error"}},
)
KILLED = container(
    "worker", {"waiting": {"reason": "CrashLoopBackOff"}}, lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
)
FOREIGN = {"metadata": {"name": "default-deny"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}
FAULTS: dict[str, Fault] = {
    "no scrape": Fault(
        "scrape", replace(WELL, series=series({})), "has no series of gateway, tokenizer", "must match the PodMonitor"
    ),
    "Prometheus without access": Fault(
        "scrape",
        replace(WELL, series=series({**dict.fromkeys(COMPONENTS, 1), "worker": 0})),
        "cannot scrape any",
        "must allow Prometheus",
    ),
    "Prometheus that requires a token": Fault(
        "scrape", replace(WELL, series=Answer(401, "Unauthorized")), "does not respond: 401", "prometheusAuth"
    ),
    "no adapter": Fault(
        "scaling",
        replace(WELL, groups=groups("apps", "autoscaling")),
        "no API of the cluster serves external.metrics",
        "install prometheus-adapter",
    ),
    "adapter of another release": Fault(
        "scaling", replace(WELL, external=Answer(200, {"items": []})), "does not serve rootstock_backlog", "rules"
    ),
    "autoscaler without metrics": Fault(
        "scaling",
        with_objects(
            horizontalpodautoscalers=listed(
                autoscaler(type="ScalingActive", status="False", reason="FailedGetPodsMetric", message="unable to get metric")
            )
        ),
        "FailedGetPodsMetric: unable to get metric",
        "when-it-does-not-scale",
    ),
    "no KEDA": Fault(
        "scaling",
        replace(WELL, groups=groups("apps")),
        "the cluster has no KEDA",
        "engine to hpa",
        {"autoscaling": {"engine": "keda", "adapterRules": False}},
    ),
    "DNS that does not respond": Fault(
        "dns",
        replace(
            WELL,
            names=dict.fromkeys(WELL.names, "Temporary failure in name resolution"),
            readiness=Answer(error=UNRESOLVED),
            info=Answer(error=UNRESOLVED),
            texts={},
            redis={"index": RedisState("redis:6379", UNRESOLVED)},
        ),
        "no name resolves: Temporary failure in name resolution",
        "5353",
    ),
    "Service port with another name": Fault(
        "services",
        with_objects(
            services=listed(
                *(service(host, {"web": 80} if "gateway" in host else ports) for host, ports in install().services.items())
            )
        ),
        f"Service {FULL}-gateway has the ports {{'web': 80}}",
        "undo the patch",
    ),
    "missing Secret": Fault(
        "secrets",
        replace(WELL, secrets={**WELL.secrets, "control": frozenset()}),
        "Secret control, which auth.controlTokenSecret names, does not exist or is empty",
        "create secret generic control --from-file=token=FILE",
    ),
    "service without a certificate": Fault(
        "secrets",
        replace(WELL, secrets={**WELL.secrets, **CERTIFICATES, "llm-worker-tls": frozenset()}),
        "Secret llm-worker-tls, which tls.secret names, does not exist or is empty",
        "--from-file=tls.crt=FILE --from-file=ca.crt=FILE",
        {"tls": {"secret": "llm-%s-tls"}},
    ),
    "Secret without its key": Fault(
        "secrets",
        replace(WELL, secrets={**WELL.secrets, "redis": frozenset({"URL"})}),
        "has no key url; it has URL",
        "add the key",
    ),
    "ReadWriteOnce volume on several nodes": Fault(
        "storage",
        with_pods(pod("worker", node="node-b"), persistentvolumeclaims=listed(claim(mode="ReadWriteOnce"))),
        "is ReadWriteOnce, a volume of one node, and is used by 3 pods on node-a, node-b",
        "ReadWriteMany",
    ),
    "no StorageClass": Fault(
        "storage",
        with_objects(
            persistentvolumeclaims=listed(claim(phase="Pending", storage="nope")),
            events=listed(event(f"{FULL}-models", "ProvisioningFailed", 'storageclass.storage.k8s.io "nope" not found')),
        ),
        'of nope is not bound: storageclass.storage.k8s.io "nope" not found',
        "name a StorageClass that exists",
    ),
    "Redis without memory": Fault(
        "redis", _redis("OOM command not allowed when used memory > 'maxmemory'."), "has no memory left", "raise redis.maxMemory"
    ),
    "Redis with another password": Fault(
        "redis",
        _redis("WRONGPASS invalid username-password pair or user is disabled."),
        "refuses the password",
        "into its Secret",
    ),
    "Redis that evicts": Fault(
        "redis",
        replace(WELL, redis={"index": RedisState("redis:6379", wrote=True, policy="allkeys-lru")}),
        "evicts by allkeys-lru",
        "noeviction",
    ),
    "missing RuntimeClass": Fault(
        "gpus",
        without_workers(
            with_objects(
                pods=listed(*(each for name, each in PODS.items() if name != "worker")),
                replicasets=listed(
                    {"metadata": {"name": f"{FULL}-worker-demo-7d9f"}, "spec": {"replicas": 1}, "status": {"replicas": 0}}
                ),
                events=listed(
                    event(
                        f"{FULL}-worker-demo-7d9f",
                        "FailedCreate",
                        'pods "w" is forbidden: pod rejected: RuntimeClass "nvidia" not found',
                    )
                ),
            )
        ),
        "RuntimeClass nvidia is missing",
        "kubectl get runtimeclass",
        alone=False,
    ),
    "node without a free GPU": Fault(
        "gpus",
        without_workers(with_pods(unready("worker", why="0/3 nodes are available: 3 Insufficient nvidia.com/gpu."))),
        "gets no GPU: 0/3 nodes",
        "device plugin",
        alone=False,
    ),
    "driver without a device": Fault(
        "gpus",
        logging(
            without_workers(with_pods(unready("worker", CRASHED))),
            f"{WORKER_POD}/worker",
            "NoDevice: no GPU for cuda: torch sees none",
        ),
        "no GPU for cuda: torch sees none",
        "nvidia-smi",
        alone=False,
    ),
    "model that cannot be loaded": Fault(
        "pods",
        logging(
            without_workers(with_pods(unready("worker", CRASHED))),
            f"{WORKER_POD}/worker",
            "loading\nUnsupportedModel: /models/demo has no config.json",
        ),
        "ended with status 1: UnsupportedModel: /models/demo has no config.json",
        "--previous",
        alone=False,
    ),
    "worker without memory": Fault(
        "pods",
        without_workers(with_pods(unready("worker", KILLED))),
        "worker exceeded its memory limit and was killed",
        "limits.memory",
        alone=False,
    ),
    "model folder without files": Fault(
        "pods",
        logging(
            without_workers(with_pods(unready("worker", init=(container("wait-for-model"),)))),
            f"{WORKER_POD}/wait-for-model",
            "waiting for config.json and tokenizer.json in /models/demo",
        ),
        "waiting for config.json and tokenizer.json in /models/demo",
        "models[].path",
        alone=False,
    ),
    "model that is never fetched": Fault(
        "pods",
        logging(
            without_workers(with_pods(unready("worker", init=(container("fetch-model"),)))),
            f"{WORKER_POD}/fetch-model",
            "3 %, 0.51 of 16.40 GB",
        ),
        "3 %, 0.51 of 16.40 GB",
        "models[].source",
        alone=False,
    ),
    "volume of a missing Secret": Fault(
        "pods",
        without_workers(
            with_pods(
                unready("worker", container("worker", {"waiting": {"reason": "ContainerCreating"}})),
                events=listed(event(WORKER_POD, "FailedMount", 'MountVolume.SetUp failed: secret "kv" not found')),
            )
        ),
        'gets no volume: MountVolume.SetUp failed: secret "kv" not found',
        "create the named Secret",
        alone=False,
    ),
    "missing image": Fault(
        "pods",
        without_workers(
            with_pods(
                unready("worker", container("worker", {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling"}}))
            )
        ),
        "the image of worker cannot be pulled: Back-off pulling",
        "image.pullSecrets",
        alone=False,
    ),
    "pod that Pod Security refuses": Fault(
        "pods",
        without_workers(
            with_objects(
                pods=listed(*(each for name, each in PODS.items() if name != "worker")),
                replicasets=listed(
                    {"metadata": {"name": f"{FULL}-worker-demo-7d9f"}, "spec": {"replicas": 1}, "status": {"replicas": 0}}
                ),
                events=listed(
                    event(f"{FULL}-worker-demo-7d9f", "FailedCreate", 'pods "w" is forbidden: violates PodSecurity "restricted"')
                ),
            )
        ),
        "has 0 of 1 pods: pods",
        "Pod Security refuses it",
        alone=False,
    ),
    "tokenizer of another model": Fault(
        "models",
        replace(WELL, texts={"demo": {"said": TEXT, "read": TEXT, "ids": [5, 31000], "vocab_size": 1000}}),
        "tokenizers of model demo belong to another model than its workers",
        "the same folder",
    ),
    "detokenizer of another model": Fault(
        "models",
        replace(WELL, texts={"demo": {"said": TEXT, "read": "≠ %% qq 00", "ids": [5, 9], "vocab_size": 1000}}),
        "belong to another model",
        "the same folder",
    ),
    "unreachable workers without a test key": Fault(
        "models",
        replace(without_workers(WELL), info=Answer(401, {"error": {"message": "no key"}})),
        "1 workers of model demo are ready, but the gateway reaches none of them",
        "a NetworkPolicy or the network blocks the connection",
    ),
    "unreachable tokenizers without a test key": Fault(
        "models",
        replace(WELL, readiness=Answer(503, {"missing": ["tokenizer"]}), info=Answer(401, {})),
        "1 tokenizers are ready, but the gateway reaches none of them",
        "a NetworkPolicy or the network blocks the connection",
    ),
    "gateway with an internal error": Fault(
        "models",
        replace(WELL, info=Answer(500, {"message": "Internal"})),
        "the gateway does not report its workers: 500 Internal",
        "the reason is in the gateway's log",
    ),
    "foreign NetworkPolicy": Fault(
        "models",
        without_workers(with_objects(networkpolicies=listed(FOREIGN))),
        "1 workers of model demo are ready, but the gateway reaches none of them",
        "NetworkPolicy default-deny, which is not the chart's",
    ),
    "unreachable tokenizers": Fault(
        "models",
        replace(WELL, readiness=Answer(503, {"missing": ["tokenizer"]})),
        "1 tokenizers are ready, but the gateway reaches none of them",
        "a NetworkPolicy or the network blocks the connection",
    ),
    "blocked API server": Fault(
        "api",
        replace(WELL, objects=dict.fromkeys(OBJECTS, Answer(error="timed out"))),
        "the API server does not respond: timed out",
        "networkPolicy.apiServer",
        alone=False,
    ),
}
