"""Defines cases of chart values with the expected fields of the rendered objects.

The path of a field has keys, indices of lists, and NAME= for the list item with this name, separated by spaces. ABSENT means that
the field must not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.chart.release import BACKLOG, NAME, REGISTRY, merged
from tests.chart.variants import GPU_RESOURCES, KEDA, VARIANTS, model


class Absence:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absence()
FULL = f"{NAME}-rootstock"
GATEWAY = f"Deployment/{FULL}-gateway"
TOKENIZER = f"Deployment/{FULL}-tokenizer-demo"
DETOKENIZER = f"Deployment/{FULL}-detokenizer-demo"
WORKER = f"Deployment/{FULL}-worker-demo"
PREFILL = f"Deployment/{FULL}-prefill-demo"
POD = "spec template spec "
Values = dict[str, Any]
Fields = dict[str, Any]  # expected values by path
Case = tuple[Values, dict[str, Fields]]  # chart values; expected fields by object


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


WITHOUT_MODEL = {"gateway": GATEWAY, "tokenizer": TOKENIZER, "detokenizer": DETOKENIZER}
EVERY = {**WITHOUT_MODEL, "worker": WORKER}
HEALTH = {"gateway": 7000, "tokenizer": 7001, "detokenizer": 7002, "worker": 7003}
SCALED = VARIANTS["hpa"]
GPU: Values = {"worker": {"gpus": 1, "runtimeClassName": "nvidia", "resources": GPU_RESOURCES}}


def case_per_service(values: Callable[[str], Values], fields: Callable[[str], Fields]) -> Case:
    """Returns a case whose values differ between services, so that the test detects values at the wrong service."""
    return {name: values(name) for name in EVERY}, {title: fields(name) for name, title in EVERY.items()}


def toleration(key: str, seconds: int) -> dict[str, str | int]:
    """Returns the toleration that keeps a pod for `seconds` on a node with the taint `key`."""
    return {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}


def default_fields(name: str) -> Fields:
    """Returns the expected fields of a service's pods if its values are the defaults."""
    probes = {
        container(name, f"{probe} grpc {key}"): value
        for probe, service in (("startupProbe", ABSENT), ("livenessProbe", ABSENT), ("readinessProbe", name))
        for key, value in (("port", HEALTH[name]), ("service", service))
    }
    lost_s = 60 if name == "worker" else 30
    return {
        **probes,
        container(name, "lifecycle preStop exec command"): ABSENT if name == "gateway" else ["sleep", "8"],
        container(name, "resources limits cpu"): ABSENT,
        POD + "enableServiceLinks": False,
        POD + "topologySpreadConstraints 0 topologyKey": "topology.kubernetes.io/zone",
        POD + "topologySpreadConstraints 1 matchLabelKeys": ["pod-template-hash"],
        POD + "tolerations": [toleration(f"node.kubernetes.io/{how}", lost_s) for how in ("not-ready", "unreachable")],
        POD + "initContainers": ABSENT,  # the model is in the image
    }


def default_fields_without_model(name: str) -> Fields:
    token = POD + "automountServiceAccountToken"
    return {**default_fields(name), "spec strategy rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}, token: False}


def scheduling_values(name: str) -> Values:
    return {
        "replicas": 2 + len(name),
        "nodeSelector": {"a": name},
        "priorityClassName": f"{name}-first",
        "tolerations": [{"key": name, "operator": "Exists"}, toleration("node.kubernetes.io/unreachable", 5)],
        "nodeLostSeconds": 7,
        "affinity": {"podAffinity": {"of": name}},
        "topologySpread": False,
        "podLabels": {"a": name, "app.kubernetes.io/name": "x"},
        "podAnnotations": {"a": name},
        "extraEnv": [{"name": "A", "value": name}],
        "image": {"tag": f"{name}-2"},
    }


def scheduling_fields(name: str) -> Fields:
    return {
        "spec replicas": 2 + len(name),
        POD + "nodeSelector": {"a": name},
        POD + "priorityClassName": f"{name}-first",
        POD + "tolerations 0 key": name,
        POD + "tolerations 1": toleration("node.kubernetes.io/unreachable", 5),
        POD + "tolerations 2": toleration("node.kubernetes.io/not-ready", 7),
        POD + "tolerations 3": ABSENT,
        POD + "affinity": {"podAffinity": {"of": name}},
        POD + "topologySpreadConstraints": ABSENT,
        "spec template metadata labels a": name,
        "spec template metadata labels app.kubernetes.io/name": "rootstock",  # the chart's labels override commonLabels
        "spec template metadata annotations a": name,
        container(name, "env A= value"): name,
        container(name, "image"): f"{REGISTRY}/rootstock/{name}:{name}-2",
    }


IMAGES: Values = {"registry": "r.example.com/m/", "tag": "1", "pullSecrets": ["s"], "pullPolicy": "Always"}


def image_fields(name: str) -> Fields:
    return {
        container(name, "image"): f"r.example.com/m/rootstock/{name}:1",
        container(name, "imagePullPolicy"): "Always",
        POD + "imagePullSecrets 0 name": "s",
    }


SERVICES: dict[str, Case] = {
    "defaults of every service": (
        {},
        {
            **{title: default_fields_without_model(name) for name, title in WITHOUT_MODEL.items()},
            WORKER: default_fields("worker"),
            **{each.replace("Deployment", "PodDisruptionBudget"): {"spec maxUnavailable": 1} for each in EVERY.values()},
        },
    ),
    "scheduling of every service": case_per_service(scheduling_values, scheduling_fields),
    "image of every service": ({"image": IMAGES}, {title: image_fields(name) for name, title in EVERY.items()}),
    "grace": (
        {"drainSeconds": 60},
        {
            **{title: {POD + "terminationGracePeriodSeconds": 78} for title in EVERY.values()},
            GATEWAY: {POD + "terminationGracePeriodSeconds": 100},
        },
    ),
    "no replicas with an autoscaler": case_per_service(
        lambda _: {"autoscaling": {"enabled": True}}, lambda _: {"spec replicas": ABSENT}
    ),
    "autoscalers of services without a model": (
        SCALED,
        {
            title.replace("Deployment", "HorizontalPodAutoscaler"): {
                "spec metrics 0 resource target averageUtilization": 70,
                "spec minReplicas": 2,
                "spec behavior scaleUp stabilizationWindowSeconds": 0,
            }
            for title in WITHOUT_MODEL.values()
        },
    ),
}

CONFIG = f"ConfigMap/{FULL}-gateway"
NGINX, ALB = "nginx.ingress.kubernetes.io/", "alb.ingress.kubernetes.io/"
BALANCED: Values = {
    "gateway": {
        "preStopSeconds": 45,
        "terminationGracePeriodSeconds": 300,
        "settings": {"request_timeout_s": 1800, "max_file_bytes": 1000, "keep_alive_s": 90},
    }
}


def balanced(controller: str, **over: Any) -> Values:
    ingress = {"enabled": True, "controller": controller, "hosts": [{"host": "llm.example.com"}], **over}
    return merged(BALANCED, {"ingress": ingress})


GATEWAYS: dict[str, Case] = {
    "behind nginx": (
        balanced("nginx", annotations={NGINX + "proxy-send-timeout": "9"}),
        {
            f"Ingress/{FULL}-gateway": {
                f"metadata annotations {NGINX}proxy-body-size": "67108864",  # the larger of the limits for bodies and for files
                f"metadata annotations {NGINX}proxy-buffering": "off",
                f"metadata annotations {NGINX}proxy-read-timeout": "1830",
                f"metadata annotations {NGINX}proxy-send-timeout": "9",
            },
            CONFIG: {"data ROOTSTOCK_STOP_DELAY_S": "45", "data ROOTSTOCK_KEEP_ALIVE_S": "90"},
            GATEWAY: {POD + "terminationGracePeriodSeconds": 300},
        },
    ),
    "behind ALB": (
        balanced("alb", hosts=[{"host": "llm.example.com", "path": "/v1"}]),
        {
            f"Ingress/{FULL}-gateway": {
                "spec rules 0 http paths 0 path": "/v1",
                f"metadata annotations {ALB}target-type": "ip",
                f"metadata annotations {ALB}healthcheck-path": "/ready",
                f"metadata annotations {ALB}load-balancer-attributes": "idle_timeout.timeout_seconds=1830",
            }
        },
    ),
    "behind Google's": (
        merged(balanced("gce"), {"gateway": {"tlsSecret": "llm-tls"}}),
        {
            f"Service/{FULL}-gateway": {
                "metadata annotations cloud.google.com/backend-config": f'{{"default":"{FULL}-gateway"}}',
                "metadata annotations cloud.google.com/app-protocols": '{"http":"HTTPS"}',
            },
            f"BackendConfig/{FULL}-gateway": {
                "spec timeoutSec": 1830,
                "spec healthCheck type": "HTTPS",
                "spec healthCheck requestPath": "/ready",
                "spec healthCheck port": 8000,
            },
        },
    ),
    "behind a Gateway with limits": (
        {
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}], "timeouts": {"request": "1h", "backendRequest": "30m"}},
            "gateway": {"service": {"type": "LoadBalancer", "loadBalancerClass": "a/b", "externalTrafficPolicy": "Local"}},
        },
        {
            f"HTTPRoute/{FULL}-gateway": {"spec rules 0 timeouts": {"request": "1h", "backendRequest": "30m"}},
            f"Service/{FULL}-gateway": {"spec loadBalancerClass": "a/b", "spec externalTrafficPolicy": "Local"},
        },
    ),
    "gateway defaults": (
        {},
        {
            GATEWAY: {
                POD + "volumes keys=": ABSENT,
                container("gateway", "ports admin="): ABSENT,
            },
            CONFIG: {
                "data ROOTSTOCK_WORKERS": f"dns:///{FULL}-worker.serving.svc:7003",
                "data ROOTSTOCK_OTLP_ENDPOINT": ABSENT,
                "data ROOTSTOCK_STOP_DELAY_S": "30",
                "data ROOTSTOCK_KEEP_ALIVE_S": "620",
            },
            f"Service/{FULL}-gateway": {"spec ports 0": {"name": "http", "port": 80, "targetPort": "http"}},
            f"Service/{FULL}-gateway-peers": {
                "spec clusterIP": "None",
                "spec publishNotReadyAddresses": True,  # gateways that drain still have requests
            },
        },
    ),
    "API keys from a Secret": (
        {"auth": {"apiKeysSecret": "k"}, "tests": {"keySecret": "t"}},
        {
            GATEWAY: {
                POD + "volumes keys= projected sources 0 secret": {"name": "k"},
                POD + "volumes keys= projected sources 1 secret": {
                    "name": "t",
                    "optional": True,
                    "items": [{"key": "helm-test.json", "path": "helm-test.json"}],
                },
                container("gateway", "volumeMounts keys="): {
                    "name": "keys",
                    "mountPath": "/etc/rootstock/keys",
                    "readOnly": True,
                },
            },
            CONFIG: {"data ROOTSTOCK_API_KEYS_FILE": "/etc/rootstock/keys"},
        },
    ),
    "API keys from the values, without a test key": (
        {"auth": {"apiKeys": [{"name": "a", "sha256": "0" * 64, "requests_per_minute": 1000000}]}},
        {
            f"Secret/{FULL}-gateway-keys": {
                "stringData keys.json": f'{{"keys":[{{"name":"a","requests_per_minute":1000000,"sha256":"{"0" * 64}"}}]}}'
            },
            GATEWAY: {POD + "volumes keys= projected sources": [{"secret": {"name": f"{FULL}-gateway-keys"}}]},
        },
    ),
    "discovery by EndpointSlices with its token and rights": (
        {"gateway": {"discovery": "k8s"}},
        {
            CONFIG: {"data ROOTSTOCK_WORKERS": f"k8s:///{FULL}-worker.serving:7003"},
            GATEWAY: {POD + "automountServiceAccountToken": True},
            f"Role/{FULL}-gateway": {
                "rules": [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]
            },
        },
    ),
    "names of the models": (VARIANTS["two-models"], {CONFIG: {"data ROOTSTOCK_MODELS": "small,Org/Large.v2"}}),
    "TLS": (
        {"gateway": {"tlsSecret": "certificate"}},
        {
            CONFIG: {
                "data ROOTSTOCK_TLS_CERT_FILE": "/etc/rootstock/tls/tls.crt",
                "data ROOTSTOCK_TLS_KEY_FILE": "/etc/rootstock/tls/tls.key",
            },
            GATEWAY: {
                POD + "volumes 1": {"name": "tls", "secret": {"secretName": "certificate"}},
                POD + "containers 0 volumeMounts 1": {"name": "tls", "mountPath": "/etc/rootstock/tls", "readOnly": True},
            },
        },
    ),
    "settings": (
        {
            "logLevel": "debug",
            "ipFamily": "IPv6",
            "tracing": {"otlpEndpoint": "otel:4317"},
            "gateway": {
                "queueTimeoutSeconds": 90,
                "settings": {"routing_policy": "random", "enable_priority_scheduling": True},
                "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            },
        },
        {
            CONFIG: {
                "data ROOTSTOCK_QUEUE_TIMEOUT_S": "90",
                "data ROOTSTOCK_ROUTING_POLICY": "random",
                "data ROOTSTOCK_ENABLE_PRIORITY_SCHEDULING": "true",
                "data ROOTSTOCK_LOG_LEVEL": "debug",
                "data ROOTSTOCK_HOST": "::",
                "data ROOTSTOCK_PEER_HOST": "::",
                "data ROOTSTOCK_OTLP_ENDPOINT": "otel:4317",
            },
            f"Service/{FULL}-gateway": {"spec type": "LoadBalancer", "metadata annotations a": "b"},
        },
    ),
    "autoscaling by the number of streams": (
        SCALED,
        {f"HorizontalPodAutoscaler/{FULL}-gateway": {"spec metrics 1 pods target averageValue": "400"}},
    ),
    "admin port": (VARIANTS["operated"], {GATEWAY: {container("gateway", "ports admin= containerPort"): 8001}}),
}

OF_WORKERS, WORKERS_HPA, WORKERS_KEDA = (
    f"{kind}/{FULL}-worker-demo" for kind in ("ConfigMap", "HorizontalPodAutoscaler", "ScaledObject")
)
UP, DOWN = "spec behavior scaleUp ", "spec behavior scaleDown "
KEDA_DOWN = "spec advanced horizontalPodAutoscalerConfig behavior scaleDown "
WORKERS: dict[str, Case] = {
    "KEDA with a token": (
        VARIANTS["keda-with-a-token"],
        {
            f"TriggerAuthentication/{FULL}-prometheus": {
                "spec secretTargetRef 2": {"parameter": "key", "name": "thanos", "key": "key"},
                "spec secretTargetRef 3": {"parameter": "bearerToken", "name": "thanos", "key": "bearerToken"},
                "spec podIdentity": ABSENT,
            },
            **{
                f"ScaledObject/{FULL}-{name}": {
                    f"spec triggers {number} metadata authModes": "tls,bearer",
                    f"spec triggers {number} metadata customHeaders": "X-Scope-OrgID=a",
                    f"spec triggers {number} authenticationRef name": f"{FULL}-prometheus",
                }
                for name, number in (("worker-demo", 0), ("gateway", 1))
            },
        },
    ),
    "KEDA with a cloud identity": (
        VARIANTS["keda-of-aws"],
        {
            f"TriggerAuthentication/{FULL}-prometheus": {"spec": {"podIdentity": {"provider": "aws"}}},
            f"ScaledObject/{FULL}-worker-demo": {
                "spec triggers 0 metadata awsRegion": "eu-central-1",
                "spec triggers 0 metadata authModes": ABSENT,
            },
        },
    ),
    "worker defaults": (
        {},
        {
            WORKER: {
                "spec progressDeadlineSeconds": 1620,  # seconds for loading, for draining and ten minutes more
                "spec strategy rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},  # there is no spare GPU
                container("worker", "resources limits nvidia.com/gpu"): ABSENT,
                container("worker", "livenessProbe failureThreshold"): 6,  # a long prefill may block the probe
                container("worker", "env ROOTSTOCK_WORKER_ID= valueFrom fieldRef fieldPath"): "metadata.name",
                container("worker", "ports control="): ABSENT,
                POD + "automountServiceAccountToken": False,  # the pod has no rights and needs no token
                container("worker", "env ROOTSTOCK_REDIS_URL= value"): (
                    f"redis://:$(INDEX_PASSWORD)@{FULL}-redis.serving.svc:6379/0"
                ),
            },
            OF_WORKERS: {"data ROOTSTOCK_EXECUTOR": "cpu"},
            f"ServiceAccount/{FULL}-worker": {"automountServiceAccountToken": False},
        },
    ),
    "GPUs": (
        GPU,
        {
            WORKER: {
                container("worker", "resources limits nvidia.com/gpu"): 1,
                POD + "tolerations 0 key": "nvidia.com/gpu",  # nodes with GPUs are tainted
                POD + "runtimeClassName": "nvidia",
            },
            OF_WORKERS: {"data ROOTSTOCK_EXECUTOR": "cuda"},
        },
    ),
    "a slice of a GPU": (
        {"worker": {**GPU["worker"], "gpuResource": "nvidia.com/mig-3g.40gb", "strategy": {"maxSurge": "50%"}}},
        {
            WORKER: {
                container("worker", "resources limits nvidia.com/mig-3g.40gb"): 1,
                container("worker", "resources limits nvidia.com/gpu"): ABSENT,
                container("worker", "image"): f"{REGISTRY}/rootstock/worker:0.1.0-cuda",
                POD + "tolerations 0 key": "nvidia.com/gpu",  # the taint of nodes with NVIDIA GPUs, also for a slice
                "spec strategy rollingUpdate": {"maxSurge": "50%", "maxUnavailable": 1},
            },
            OF_WORKERS: {"data ROOTSTOCK_EXECUTOR": "cuda"},
        },
    ),
    "other GPU vendor with an explicit executor and image": (
        {"worker": {**GPU["worker"], "gpuResource": "amd.com/gpu", "executor": "cpu", "image": {"tag": "rocm"}}},
        {
            WORKER: {
                container("worker", "resources limits amd.com/gpu"): 1,
                container("worker", "image"): f"{REGISTRY}/rootstock/worker:rocm",
                POD + "tolerations 0 key": "amd.com/gpu",
                container("worker", "env ROOTSTOCK_NUM_THREADS="): ABSENT,
            },
            OF_WORKERS: {"data ROOTSTOCK_EXECUTOR": "cpu"},
        },
    ),
    "devices by ResourceClaim": (
        VARIANTS["devices-of-each-kind"],
        {
            WORKER: {
                container("worker", "resources claims"): [{"name": "gpu"}, {"name": "nic"}, {"name": "shared"}],
                POD + "resourceClaims gpu= resourceClaimTemplateName": f"{FULL}-worker-demo-85141346",
                POD + "resourceClaims nic= resourceClaimTemplateName": "nics",
                POD + "resourceClaims shared=": {"name": "shared", "resourceClaimName": "one-gpu"},
                POD + "tolerations 0 key": "nvidia.com/gpu",
            },
            OF_WORKERS: {"data ROOTSTOCK_EXECUTOR": "cuda"},
            f"ResourceClaimTemplate/{FULL}-worker-demo-85141346": {
                "spec spec devices requests 0 exactly": {
                    "deviceClassName": "gpu.nvidia.com",
                    "selectors": [{"cel": {"expression": "device.attributes['gpu.nvidia.com'].mig"}}],
                }
            },
        },
    ),
    "strategies Recreate and OnDelete": (
        {
            "gateway": {"strategy": {"type": "Recreate"}},
            "worker": {"kind": "StatefulSet", "strategy": {"type": "OnDelete"}, "replicas": 2},
        },
        {
            GATEWAY: {"spec strategy": {"type": "Recreate"}},
            f"StatefulSet/{FULL}-worker-demo": {"spec updateStrategy": {"type": "OnDelete"}},
        },
    ),
    "shared memory, startup seconds and deletion cost": (
        {
            "worker": {"sharedMemory": "8Gi", "startupSeconds": 1200, "deletionCost": True},
        },
        {
            WORKER: {
                POD + "volumes shm= emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"},
                container("worker", "startupProbe failureThreshold"): 240,
                POD + "automountServiceAccountToken": True,
            },
            f"Role/{FULL}-worker": {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]},
        },
    ),
    "startup seconds that are rounded up": (
        {"worker": {"startupSeconds": 1201}},
        {WORKER: {container("worker", "startupProbe failureThreshold"): 241}},
    ),
    "control": (
        {"auth": {"controlTokenSecret": "t"}},
        {
            WORKER: {
                container("worker", "ports control= containerPort"): 7004,
                container("worker", "env ROOTSTOCK_CONTROL_TOKEN= valueFrom secretKeyRef"): {"name": "t", "key": "token"},
            }
        },
    ),
    "existing ServiceAccount": (
        {"serviceAccount": {"create": False, "name": "x"}, "worker": {"deletionCost": True}},
        {WORKER: {POD + "serviceAccountName": "x"}, f"RoleBinding/{FULL}-worker": {"subjects 0 name": "x"}},
    ),
    "autoscaled by HPA": (
        merged(SCALED, {"worker": {"autoscaling": {"coldStartSeconds": 240}}}),
        {
            WORKERS_HPA: {
                "spec maxReplicas": 6,
                UP + "policies 0": {"type": "Percent", "value": 100, "periodSeconds": 240},
                UP + "policies 1": {"type": "Pods", "value": 1, "periodSeconds": 240},
                UP + "selectPolicy": "Max",
                DOWN + "policies 0": {"type": "Pods", "value": 1, "periodSeconds": 300},
                DOWN + "stabilizationWindowSeconds": 600,
            }
        },
    ),
    "autoscaled by KEDA from zero": (
        KEDA,
        {
            WORKERS_KEDA: {
                "spec minReplicaCount": 0,
                "spec cooldownPeriod": 600,
                "spec initialCooldownPeriod": 600,
                "spec fallback": ABSENT,
                "spec maxReplicaCount": 6,
                "spec triggers 0 metadata serverAddress": "http://prometheus.monitoring.svc:9090",
                KEDA_DOWN + "stabilizationWindowSeconds": 600,
            }
        },
    ),
    "autoscaled by KEDA with another behavior": (
        merged(
            KEDA,
            {
                "worker": {
                    "autoscaling": {
                        "cooldownSeconds": 30,
                        "fallbackReplicas": 2,
                        "scaleDownSeconds": 20,
                        "scaleDownPeriodSeconds": 10,
                    }
                }
            },
        ),
        {
            WORKERS_KEDA: {
                "spec cooldownPeriod": 30,
                "spec initialCooldownPeriod": 30,
                "spec fallback": {"failureThreshold": 3, "replicas": 2},
                KEDA_DOWN + "stabilizationWindowSeconds": 20,
                KEDA_DOWN + "policies 0": {"type": "Pods", "value": 1, "periodSeconds": 10},
            }
        },
    ),
    "StatefulSet with disks": (
        VARIANTS["local-disks"],
        {
            f"StatefulSet/{FULL}-worker-demo": {
                "spec volumeClaimTemplates 0 spec resources requests storage": "20Gi",
                "spec serviceName": f"{FULL}-worker",
                "spec podManagementPolicy": "Parallel",
            },
            OF_WORKERS: {"data ROOTSTOCK_MODEL": "/cache/demo"},
        },
    ),
    "LeaderWorkerSet": (
        VARIANTS["leader-worker-set"],
        {
            f"LeaderWorkerSet/{FULL}-worker-demo": {
                "spec leaderWorkerTemplate size": 1,
                "spec leaderWorkerTemplate restartPolicy": "RecreateGroupOnPodRestart",
                "spec rolloutStrategy rollingUpdateConfiguration maxSurge": 0,  # there is no spare group
                "spec leaderWorkerTemplate workerTemplate metadata labels app.kubernetes.io/component": "worker-member",
            }
        },
    ),
    "prefill and decode": (
        merged(
            VARIANTS["apart"],
            {
                "worker": {
                    "resources": GPU_RESOURCES,
                    "gpus": 1,
                    "nodeSelector": {"a": "b"},
                    "tolerations": [{"key": "c", "operator": "Exists"}],
                    "prefill": {"podAnnotations": {"d": "e"}, "pod": {"schedulerName": "f"}, "strategy": {"maxSurge": 1}},
                }
            },
        ),
        {
            PREFILL: {
                "spec replicas": 2,
                "spec template metadata labels rootstock.io/role": "prefill",
                "spec selector matchLabels rootstock.io/role": ABSENT,
                container("worker", "ports kv= containerPort"): 7103,
                container("worker", "envFrom 0 configMapRef name"): f"{FULL}-prefill-demo",
                container("worker", "resources limits nvidia.com/gpu"): 1,
                container("worker", "resources requests memory"): "32Gi",
                POD + "nodeSelector": {"a": "b"},
                POD + "tolerations 0 key": "c",
                POD + "schedulerName": "f",
                "spec template metadata annotations d": "e",
                "spec strategy rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1},
                POD + "serviceAccountName": f"{FULL}-worker",
            },
            WORKER: {
                POD + "schedulerName": ABSENT,
                "spec strategy rollingUpdate maxSurge": 0,
                "spec replicas": 3,
                "spec template metadata labels rootstock.io/role": "decode",
                "spec selector matchLabels rootstock.io/role": ABSENT,  # the role can be switched on and off
                container("worker", "ports kv="): ABSENT,
            },
            f"ConfigMap/{FULL}-prefill-demo": {
                "data ROOTSTOCK_DISAGGREGATION_MODE": "prefill",
                "data ROOTSTOCK_DISAGGREGATION_HOST": "0.0.0.0",
                "data ROOTSTOCK_DISAGGREGATION_PORT": "7103",
                "data ROOTSTOCK_EXECUTOR": "cuda",
            },
            OF_WORKERS: {"data ROOTSTOCK_DISAGGREGATION_MODE": "decode", "data ROOTSTOCK_DISAGGREGATION_PORT": ABSENT},
            CONFIG: {
                "data ROOTSTOCK_WORKERS": ",".join(f"dns:///{FULL}-{each}.serving.svc:7003" for each in ("worker", "prefill"))
            },
            f"Service/{FULL}-prefill": {
                "spec clusterIP": "None",
                "spec publishNotReadyAddresses": False,
                "spec selector app.kubernetes.io/component": "prefill",
                "spec ports 0 port": 7003,
            },
            f"PodDisruptionBudget/{FULL}-prefill-demo": {"spec maxUnavailable": 1},
        },
    ),
    "workers without a role": (
        {},
        {
            WORKER: {"spec template metadata labels rootstock.io/role": ABSENT},
            OF_WORKERS: {"data ROOTSTOCK_DISAGGREGATION_MODE": ABSENT},
        },
    ),
    "prefill and decode with their own scheduling": (
        merged(
            VARIANTS["apart"],
            {
                "worker": {
                    "nodeSelector": {"pool": "all"},
                    "tolerations": [{"key": "a", "operator": "Exists"}],
                    "settings": {"max_running_requests": 8, "max_prefill_tokens": 4096},
                    "pod": {"volumes": [{"name": "x", "emptyDir": {}}, {"name": "y", "emptyDir": {}}]},
                    "prefill": {
                        "pod": {"volumes": [{"name": "y", "secret": {"secretName": "z"}}]},
                        "resources": {"limits": {"memory": "6Gi"}},
                        "settings": {"max_prefill_tokens": 8192},
                        "nodeSelector": {"class": "compute"},
                        "tolerations": [{"key": "b", "operator": "Exists"}],
                        "affinity": {"podAffinity": {"of": "prefill"}},
                    },
                }
            },
        ),
        {
            PREFILL: {
                POD + "nodeSelector": {"pool": "all", "class": "compute"},
                POD + "tolerations 0 key": "b",
                POD + "affinity": {"podAffinity": {"of": "prefill"}},
                POD + "volumes x= emptyDir": {},
                POD + "volumes y=": {"name": "y", "secret": {"secretName": "z"}},
                container("worker", "resources"): {
                    "limits": {"memory": "6Gi"},
                    "requests": {"cpu": "500m", "memory": "2Gi"},
                },
            },
            WORKER: {
                POD + "nodeSelector": {"pool": "all"},
                POD + "tolerations 0 key": "a",
                POD + "affinity": ABSENT,
                container("worker", "resources limits memory"): "4Gi",
            },
            f"ConfigMap/{FULL}-prefill-demo": {
                "data ROOTSTOCK_MAX_PREFILL_TOKENS": "8192",
                "data ROOTSTOCK_MAX_RUNNING_REQUESTS": "8",
            },
            OF_WORKERS: {"data ROOTSTOCK_MAX_PREFILL_TOKENS": "4096"},
        },
    ),
    "prefill and decode with discovery by EndpointSlices": (
        merged(VARIANTS["apart"], VARIANTS["discovery"]),
        {CONFIG: {"data ROOTSTOCK_WORKERS": f"k8s:///{FULL}-worker.serving:7003,k8s:///{FULL}-prefill.serving:7003"}},
    ),
    "prefill and decode with disks": (
        VARIANTS["apart-on-local-disks"],
        {
            f"StatefulSet/{FULL}-prefill-demo": {
                "spec serviceName": f"{FULL}-prefill",
                "spec replicas": 2,
                "spec volumeClaimTemplates 0 spec resources requests storage": "20Gi",
            },
            f"StatefulSet/{FULL}-worker-demo": {"spec serviceName": f"{FULL}-worker", "spec replicas": 3},
        },
    ),
    "prefill and decode autoscaled by HPA": (
        merged(
            VARIANTS["apart-by-hpa"],
            {"worker": {"prefill": {"autoscaling": {"maxReplicas": 3, "waitingTokens": 3000000, "busyShare": 0.6}}}},
        ),
        {
            f"HorizontalPodAutoscaler/{FULL}-prefill-demo": {
                "spec scaleTargetRef name": f"{FULL}-prefill-demo",
                "spec minReplicas": 1,
                "spec maxReplicas": 3,
                "spec metrics 0 pods metric name": "rootstock_busy_share",
                "spec metrics 0 pods target averageValue": "600m",
                "spec metrics 1 pods metric name": "rootstock_worker_waiting_tokens",
                "spec metrics 1 pods target averageValue": "3000000000m",
                "spec metrics 2": ABSENT,
                UP + "policies 0": {"type": "Percent", "value": 100, "periodSeconds": 180},
            },
            WORKERS_HPA: {
                "spec maxReplicas": 6,
                "spec metrics 0 external metric name": BACKLOG,
                "spec metrics 2 pods metric name": "sglang_token_usage",
            },
            PREFILL: {"spec replicas": ABSENT},
        },
    ),
    "only prefill autoscaled": (
        merged(VARIANTS["apart"], {"worker": {"autoscaling": {"enabled": True}}}),
        {PREFILL: {"spec replicas": 2}, WORKER: {"spec replicas": ABSENT}},
    ),
    "prefill and decode autoscaled by KEDA": (
        VARIANTS["apart-by-keda"],
        {
            f"ScaledObject/{FULL}-prefill-demo": {
                "spec scaleTargetRef name": f"{FULL}-prefill-demo",
                "spec minReplicaCount": 1,
                "spec maxReplicaCount": 4,
                "spec triggers 0 name": "waiting-tokens",
                "spec triggers 0 metadata threshold": "8192",
                "spec triggers 1 name": "busy",
                "spec triggers 1 metadata threshold": "0.7",
                "spec triggers 2": ABSENT,
            },
            WORKERS_KEDA: {"spec triggers 0 name": "backlog", "spec triggers 2 name": "token-usage"},
        },
    ),
    "KV tiers in host memory and an emptyDir": (
        VARIANTS["tiers-in-files"],
        {
            f"ConfigMap/{FULL}-worker-demo": {
                "data ROOTSTOCK_ENABLE_HIERARCHICAL_CACHE": "true",
                "data ROOTSTOCK_HICACHE_SIZE": "2",
                "data ROOTSTOCK_HICACHE_STORAGE_BACKEND": "file",
                "data ROOTSTOCK_HICACHE_STORAGE_DIR": "/var/lib/rootstock/kv",
                "data ROOTSTOCK_HICACHE_STORAGE_SIZE": "8",
            },
            WORKER: {
                POD + "volumes kv= emptyDir sizeLimit": "8467108864",
                container("worker", "resources requests ephemeral-storage"): "8467108864",
                container("worker", "volumeMounts kv= mountPath"): "/var/lib/rootstock/kv",
                container("worker", "env ROOTSTOCK_HICACHE_STORAGE_URL="): ABSENT,
            },
        },
    ),
    "KV tier in a claim per pod": (
        VARIANTS["tiers-in-claims"],
        {
            f"StatefulSet/{FULL}-worker-demo": {
                POD + "volumes kv=": ABSENT,
                container("worker", "resources requests ephemeral-storage"): ABSENT,
                container("worker", "volumeMounts kv= mountPath"): "/var/lib/rootstock/kv",
                "spec volumeClaimTemplates 0 metadata name": "kv",
                "spec volumeClaimTemplates 0 spec storageClassName": "nvme",
                "spec volumeClaimTemplates 0 spec resources requests storage": "10Gi",
                "spec volumeClaimTemplates 1": ABSENT,
                "spec persistentVolumeClaimRetentionPolicy whenScaled": "Retain",
            },
        },
    ),
    "a model and KV on claims": (
        merged(VARIANTS["local-disks"], VARIANTS["tiers-in-claims"]),
        {
            f"StatefulSet/{FULL}-worker-demo": {
                "spec volumeClaimTemplates 0 metadata name": "cache",
                "spec volumeClaimTemplates 1 metadata name": "kv",
                container("worker", "volumeMounts cache= mountPath"): "/cache",
            },
        },
    ),
    "KV tier in shared storage": (
        VARIANTS["tiers-shared"],
        {
            title: {
                POD + "volumes kv-storage= secret secretName": "kv",
                container("worker", "volumeMounts kv-storage= mountPath"): "/etc/rootstock/kv-storage",
                container("worker", "env ROOTSTOCK_HICACHE_STORAGE_URL= valueFrom secretKeyRef"): {"name": "kv", "key": "url"},
            }
            for title in (WORKER, PREFILL)
        }
        | {
            f"ConfigMap/{FULL}-prefill-demo": {
                "data ROOTSTOCK_HICACHE_STORAGE_BACKEND": "redis",
                "data ROOTSTOCK_HICACHE_STORAGE_SECRET_FILE": "/etc/rootstock/kv-storage/secret",
                "data ROOTSTOCK_HICACHE_STORAGE_DIR": ABSENT,
            }
        },
    ),
    "a model's own workers": (
        VARIANTS["two-models"],
        {
            f"Deployment/{FULL}-worker-org-large-v2": {"spec replicas": 3},
            f"Deployment/{FULL}-worker-small": {"spec replicas": 1},
        },
    ),
    "a model's own scaler": (
        {"models": [model("a"), model("b", worker={"autoscaling": {"enabled": True}})]},
        {
            f"HorizontalPodAutoscaler/{FULL}-worker-b": {"spec maxReplicas": 4},
            f"Deployment/{FULL}-worker-a": {"spec replicas": 1},
        },
    ),
}

MODELS = f"{FULL}-models"
VOLUME = POD + "volumes models= "
STATE = f"StatefulSet/{FULL}-state"
ENCRYPTED_INDEX = (
    f"rediss://:$(INDEX_PASSWORD)@{FULL}-redis.serving.svc:6379/0?ssl_ca_certs=/etc/rootstock/mtls/ca.crt"
    "&ssl_certfile=/etc/rootstock/mtls/tls.crt&ssl_keyfile=/etc/rootstock/mtls/tls.key"
)
STRIPPED: Values = {  # fields that the controller removes
    "className": "traefik",
    "annotations": {"traefik.ingress.kubernetes.io/router.middlewares": "serving-strip-llm@kubernetescrd"},
    "hosts": [{"host": "llm.example.com", "path": "/llm"}],
}
BESIDES: dict[str, Case] = {
    "embedded Redis with a generated password": (
        {"ipFamily": "IPv6"},
        {
            f"Deployment/{FULL}-redis": {
                "spec strategy type": "Recreate",
                container("redis", "args 3"): "*",
                container("redis", "args 4"): "-::*",
                container("redis", "env REDISCLI_AUTH= valueFrom secretKeyRef"): {"name": f"{FULL}-redis", "key": "password"},
            },
            f"Secret/{FULL}-redis": {"metadata annotations": ABSENT},
        },
    ),
    "mutual TLS with a certificate per component": (
        VARIANTS["encrypted"],
        {
            f"Certificate/{FULL}-worker-tls": {
                "spec secretName": f"{FULL}-worker-tls",
                "spec dnsNames": ["rootstock-worker"],
                "spec usages": ["digital signature", "server auth", "client auth"],
                "spec issuerRef": {"name": "llm", "kind": "Issuer", "group": "cert-manager.io"},
            },
            f"Certificate/{FULL}-redis-tls": {"spec dnsNames": ["rootstock-redis", f"{FULL}-redis.serving.svc"]},
            WORKER: {
                container("worker", "livenessProbe grpc port"): 7013,
                container("worker", "volumeMounts mtls= mountPath"): "/etc/rootstock/mtls",
                POD + "volumes mtls= projected sources 0 secret name": f"{FULL}-worker-tls",
                POD + "volumes mtls= projected sources 1 configMap name": "llm-ca",
                POD + "volumes mtls= projected sources 2 secret name": "llm-services",
                container("worker", "env ROOTSTOCK_REDIS_URL= value"): ENCRYPTED_INDEX,
            },
            OF_WORKERS: {"data ROOTSTOCK_MTLS_TOKEN_FILE": "/etc/rootstock/mtls/token", "data ROOTSTOCK_HEALTH_PORT": "7013"},
            STATE: {POD + "volumes mtls= projected sources 2": ABSENT},  # Redis does not use the token between services
        },
    ),
    "mutual TLS with one certificate, and an external Redis with another": (
        VARIANTS["encrypted-by-one-certificate"],
        {
            GATEWAY: {
                POD + "volumes mtls= projected sources 0 secret": {"name": "llm-tls"},
                POD + "volumes state-tls= secret secretName": "llm-state-tls",
                container("gateway", "volumeMounts redis-tls= mountPath"): "/etc/rootstock/redis-tls",
            },
            WORKER: {POD + "volumes state-tls=": ABSENT, POD + "volumes redis-tls= secret secretName": "llm-redis-tls"},
        },
    ),
    "external Redis with its URL in a Secret": (
        VARIANTS["redis-elsewhere"],
        {
            GATEWAY: {
                container("gateway", "env ROOTSTOCK_REDIS_URL= valueFrom secretKeyRef"): {"name": "llm-redis", "key": "url"}
            },
            WORKER: {container("worker", "env ROOTSTOCK_REDIS_URL= valueFrom secretKeyRef name"): "llm-redis"},
            OF_WORKERS: {"data ROOTSTOCK_REDIS_URL": ABSENT},
        },
    ),
    "state store with its own volume": (
        VARIANTS["kept"],
        {
            STATE: {
                "spec volumeClaimTemplates 0 spec storageClassName": "fast",
                "spec volumeClaimTemplates 0 spec resources requests storage": "5Gi",
                container("redis", "env REDISCLI_AUTH= valueFrom secretKeyRef"): {"name": f"{FULL}-state", "key": "password"},
                container("redis", "volumeMounts data= mountPath"): "/data",
                container("redis", "image"): f"{REGISTRY}/redis:7.4.2-alpine",  # no other server can read the files
            },
            GATEWAY: {
                container("gateway", "env REDISCLI_AUTH= valueFrom secretKeyRef"): {"name": f"{FULL}-state", "key": "password"},
                container("gateway", "env ROOTSTOCK_STATE_REDIS_URL= value"): (
                    f"redis://:$(REDISCLI_AUTH)@{FULL}-state.serving.svc:6379/0"
                ),
            },
            f"Secret/{FULL}-state": {"metadata annotations helm.sh/resource-policy": "keep"},
        },
    ),
    "state store with an existing volume and password": (
        VARIANTS["kept-in-a-claim"],
        {
            STATE: {
                "spec volumeClaimTemplates": ABSENT,
                POD + "volumes data= persistentVolumeClaim claimName": "llm-state",
                container("redis", "env REDISCLI_AUTH= valueFrom secretKeyRef name"): "llm-state",
            },
            GATEWAY: {container("gateway", "env REDISCLI_AUTH= valueFrom secretKeyRef name"): "llm-state"},
        },
    ),
    "state store without a volume": (
        VARIANTS["kept-for-a-trial"],
        {STATE: {"spec volumeClaimTemplates": ABSENT, POD + "volumes data= emptyDir": {}}},
    ),
    "model cache in a claim that pods wait for": (
        VARIANTS["shared-cache"],
        {
            f"PersistentVolumeClaim/{MODELS}": {"spec accessModes": ["ReadWriteMany"], "spec storageClassName": "files"},
            **{
                title: {
                    "spec progressDeadlineSeconds": (1620 if title == WORKER else 840) + 7200,  # for the download of the model
                    VOLUME + "persistentVolumeClaim": {"claimName": MODELS, "readOnly": True},
                    POD + "initContainers wait-for-model= volumeMounts models= readOnly": True,
                }
                for title in (TOKENIZER, DETOKENIZER, WORKER)
            },
        },
    ),
    "model cache in an existing claim": (
        VARIANTS["existing-claim"],
        {WORKER: {VOLUME + "persistentVolumeClaim claimName": "weights"}},
    ),
    "model cache on a disk per worker": (
        VARIANTS["fetched-by-pods"],
        {
            f"StatefulSet/{FULL}-worker-demo": {
                POD + "initContainers 0 name": "fetch-model",
                POD + "initContainers 0 image": f"{REGISTRY}/rootstock/tokenizer:0.1.0",  # a small image
                POD + "initContainers 0 command": [
                    "python",
                    "-m",
                    "rootstock_llm.services.shared.fetch",
                    "/cache/demo",
                    "org/demo",
                ],
                POD + "initContainers 0 volumeMounts cache= mountPath": "/cache",
                POD + "initContainers 0 env MODEL_FILES=": ABSENT,
                POD + "initContainers 1": ABSENT,
                VOLUME: ABSENT,
                container("worker", "env TRITON_CACHE_DIR= value"): "/cache/.cache/triton",
                container("worker", "env FLASHINFER_WORKSPACE_BASE= value"): "/cache",
            },
            OF_WORKERS: {"data ROOTSTOCK_MODEL": "/cache/demo"},
            **{
                title: {
                    POD + "initContainers 0 command": [
                        "python",
                        "-m",
                        "rootstock_llm.services.shared.fetch",
                        "/models/demo",
                        "org/demo",
                    ],
                    POD + "initContainers 0 env MODEL_FILES= value": "tokenizer",
                    POD + "initContainers 0 volumeMounts models= readOnly": ABSENT,
                    VOLUME + "emptyDir": {},
                    POD + "containers 0 volumeMounts models= readOnly": True,
                }
                for title in (TOKENIZER, DETOKENIZER)
            },
        },
    ),
    "tokenizers that download from an object store": (
        VARIANTS["tokenizers-fetched"],
        {
            TOKENIZER: {
                VOLUME + "emptyDir": {},
                POD + "initContainers 0 env AWS_ENDPOINT_URL= value": "http://minio.storage.svc:9000",
                POD + "initContainers 0 env AWS_REGION= value": "eu-1",
                POD + "initContainers 0 env AWS_SECRET_ACCESS_KEY= valueFrom secretKeyRef name": "s3",
                POD + "initContainers 0 env GCS_ENDPOINT= value": "http://gcs.storage.svc:9000",
                POD + "initContainers 0 env GCS_KEY= valueFrom secretKeyRef": {"name": "gcs", "key": "key.json"},
                POD + "initContainers 0 env HF_ENDPOINT= value": "https://hub.example.com",
                POD + "initContainers 0 env HTTPS_PROXY= value": "http://proxy.example.com:3128",
                POD + "initContainers 0 env CA_FILE= value": "/etc/rootstock/ca/ca.crt",
                POD + "volumes fetch-ca= configMap": {
                    "name": "trusted",
                    "items": [{"key": "ca-bundle.crt", "path": "ca.crt"}],
                },
            },
            WORKER: {VOLUME + "persistentVolumeClaim claimName": MODELS, POD + "initContainers 0 name": "wait-for-model"},
        },
    ),
    "model cache on the node's disk, copied from a shared volume": (
        VARIANTS["node-cache"],
        {
            WORKER: {
                POD + "volumes cache= hostPath path": "/mnt/nvme/models",
                POD + "initContainers copy-model= command": [
                    "python",
                    "-m",
                    "rootstock_llm.services.shared.fetch",
                    "/cache/demo",
                    "/models/demo",
                ],
                POD + "initContainers copy-model= env": ABSENT,  # other pods may read the folder
                container("worker", "volumeMounts cache= mountPath"): "/cache",
                container(
                    "worker", "volumeMounts models= mountPath"
                ): "/models",  # the cache may also have other models, such as a draft model
            }
        },
    ),
    "model cache copied to an ephemeral and to a claimed disk": (
        merged(
            VARIANTS["shared-cache"],
            {
                "models": [
                    model("own", path="/models/a", worker={"cacheVolume": {"ephemeral": {"volumeClaimTemplate": {}}}}),
                    model("named", path="/models/a", worker={"cacheVolume": {"persistentVolumeClaim": {"claimName": "disk"}}}),
                ]
            },
        ),
        {
            f"Deployment/{FULL}-worker-own": {POD + "initContainers copy-model= env MAKE_ROOM= value": "true"},
            f"Deployment/{FULL}-worker-named": {POD + "initContainers copy-model= env": ABSENT},
        },
    ),
    "model folder of the node": (VARIANTS["host-path-cache"], {WORKER: {VOLUME + "hostPath path": "/srv/models"}}),
    "an image": (VARIANTS["image-volume"], {WORKER: {VOLUME + "image reference": "registry.example.com/models/demo:1"}}),
    "an image that is one model": (
        merged(VARIANTS["image-volume"], {"models": [model(path="/models")]}),
        {
            WORKER: {
                VOLUME + "image reference": "registry.example.com/models/demo:1",
                container("worker", "volumeMounts models= mountPath"): "/models",
            }
        },
    ),
    "an ingress and a route": (
        merged(VARIANTS["access"], {"ingress": STRIPPED}),
        {
            f"Ingress/{FULL}-gateway": {
                "spec ingressClassName": "traefik",
                "spec rules 0 http paths 0 path": "/llm",
                "spec rules 0 host": "llm.example.com",
                "spec tls 0 secretName": "llm-tls",
            },
            f"HTTPRoute/{FULL}-gateway": {
                "spec parentRefs 0 name": "gateway",
                "spec hostnames": ["llm.example.com"],
                "spec rules 0 timeouts": {"request": "0s"},  # 0s: no timeout
            },
        },
    ),
    "discovery by DNS of ready pods": (
        {},
        {
            f"Service/{FULL}-{component}": {
                "spec clusterIP": "None",
                "spec publishNotReadyAddresses": False,
                "spec ports 0 port": HEALTH[component],
            }
            for component in ("tokenizer", "detokenizer", "worker")
        },
    ),
}
CASES = SERVICES | GATEWAYS | WORKERS | BESIDES
