"""Defines value sets for cases that the values files of charts/rootstock/ci do not cover.

A value set has the values of one release. Each of these value sets renders objects that no other value set renders.
"""

from __future__ import annotations

from typing import Any

from tests.chart.release import Release, ci_names, ci_values, merged, render

Values = dict[str, Any]


def model(name: str = "demo", **over: Any) -> Values:
    return {"name": name, "path": "/app/models/demo", **over}


SHARED_CACHE: Values = {
    "modelCache": {"type": "pvc", "pvc": {"storageClass": "files", "accessMode": "ReadWriteMany", "size": "50Gi"}}
}
FRONT_SCALED: Values = {"autoscaling": {"enabled": True}}
MONITORING: Values = {
    "monitoring": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    },
    "autoscaling": {"adapterRules": {"enabled": True}},
}
ACCESS: Values = {
    "auth": {"apiKeysSecret": "llm-api-keys", "controlTokenSecret": "llm-control"},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "hosts": [{"host": "llm.example.com", "path": "/"}],
        "tls": [{"secretName": "llm-tls", "hosts": ["llm.example.com"]}],
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway", "namespace": "infra"}], "hostnames": ["llm.example.com"]},
}
OPERATED: Values = {
    "auth": {"apiKeysSecret": "llm-api-keys", "controlTokenSecret": "llm-control"},
    "gateway": {"settings": {"admin_port": 8001}},
}
TUNED: Values = {
    "logLevel": "debug",
    "ipFamily": "IPv6",
    "tracing": {"otlpEndpoint": "otel.observability.svc:4317", "sampleRatio": 0.1},
    "gateway": {
        "settings": {"max_body_bytes": 33554432, "max_speculative_blocks": 1000000, "routing_policy": "round_robin"},
        "extraEnv": [{"name": "GRPC_VERBOSITY", "value": "ERROR"}],
        "podLabels": {"team": "ml"},
        "podAnnotations": {"example.com/note": "yes"},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "priorityClassName": "high",
    },
    "worker": {"settings": {"max_total_tokens": 2000000, "mem_fraction_static": 0.85, "enable_mixed_chunk": True}},
}
TWO_MODELS: Values = {"models": [model("small"), model("Org/Large.v2", worker={"replicas": 3, "settings": {"page_size": 32}})]}
HPA: Values = {
    "worker": {"autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 6}},
    "gateway": FRONT_SCALED,
    "tokenizer": FRONT_SCALED,
    "detokenizer": FRONT_SCALED,
}
GPU_RESOURCES: Values = {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "64Gi"}}
KEDA: Values = merged(
    HPA,
    {
        "autoscaling": {"engine": "keda", "prometheusUrl": "http://prometheus.monitoring.svc:9090"},
        "worker": {"autoscaling": {"minReplicas": 0}},
        "gateway": {"queueTimeoutSeconds": 300},
    },
)

APART: Values = {"worker": {"replicas": 3, "prefill": {"replicas": 2}}}
BOTH_SCALED: Values = {"worker": {"prefill": {"autoscaling": {"enabled": True}}}}

OBJECT_LABELS: Values = {
    "app.kubernetes.io/name": "rootstock",
    "app.kubernetes.io/instance": "{{ .Release.Name }}",
    "app.kubernetes.io/version": "{{ .Chart.AppVersion }}",
    "app.kubernetes.io/managed-by": "{{ .Release.Service }}",
    "helm.sh/chart": "{{ .Chart.Name }}-{{ .Chart.Version }}",
}
ROUTE: Values = {
    "apiVersion": "route.openshift.io/v1",
    "kind": "Route",
    "metadata": {
        "name": "{{ .Release.Name }}",
        "labels": OBJECT_LABELS,
        "annotations": {"haproxy.router.openshift.io/timeout": "20m"},
    },
    "spec": {
        "to": {"kind": "Service", "name": '{{ include "rootstock.fullname" . }}-gateway'},
        "port": {"targetPort": "http"},
        "tls": {"termination": "edge", "insecureEdgeTerminationPolicy": "Redirect"},
    },
}

TIERS_MEMORY: Values = {"requests": {"memory": "4Gi"}, "limits": {"memory": "8Gi"}}
IN_CLAIMS: Values = {"hostGB": 2, "files": {"sizeGB": 8, "claimSize": "10Gi", "storageClass": "nvme"}}
VARIANTS: dict[str, Values] = {
    "two-models": TWO_MODELS,
    "stateful-set": {"worker": {"kind": "StatefulSet", "replicas": 2}},
    "local-disks": merged(
        SHARED_CACHE,
        {"worker": {"kind": "StatefulSet", "cacheSize": "20Gi", "replicas": 2}, "models": [model(path="/models/demo")]},
    ),
    "tiers-in-files": {"worker": {"kvTiers": {"hostGB": 2, "files": {"sizeGB": 8}}, "resources": TIERS_MEMORY}},
    "tiers-in-claims": {"worker": {"kind": "StatefulSet", "kvTiers": IN_CLAIMS, "resources": TIERS_MEMORY}},
    "tiers-shared": merged(
        APART, {"worker": {"kvTiers": {"hostGB": 2, "shared": {"secret": "kv", "port": 6380}}, "resources": TIERS_MEMORY}}
    ),
    "leader-worker-set": {
        "worker": {"kind": "LeaderWorkerSet", "hosts": 1, "gpus": 1, "resources": GPU_RESOURCES, "runtimeClassName": "nvidia"}
    },
    "shared-cache": merged(SHARED_CACHE, {"models": [model(path="/models/demo")]}),
    "existing-claim": {
        "modelCache": {"type": "pvc", "pvc": {"existingClaim": "weights"}},
        "models": [model(path="/models/demo")],
    },
    "prefetch": merged(
        SHARED_CACHE,
        {
            "modelCache": {"prefetch": {"enabled": True, "tokenSecret": "hub-token"}},
            "models": [model("a", path="/models/a", source="org/a"), model("b", path="/models/b", source="org/b")],
        },
    ),
    "host-path-cache": {"modelCache": {"type": "hostPath", "hostPath": "/srv/models"}, "models": [model(path="/models/demo")]},
    "image-volume": {
        "modelCache": {"type": "image", "image": {"reference": "registry.example.com/models/demo:1"}},
        "models": [model(path="/models/demo")],
    },
    "hpa": HPA,
    "keda": KEDA,
    "keda-with-a-token": merged(
        KEDA,
        {"autoscaling": {"prometheusAuth": {"modes": ["tls", "bearer"], "secret": "thanos", "headers": {"X-Scope-OrgID": "a"}}}},
    ),
    "keda-of-aws": merged(
        KEDA, {"autoscaling": {"prometheusAuth": {"podIdentity": "aws", "metadata": {"awsRegion": "eu-central-1"}}}}
    ),
    "apart": APART,
    "apart-on-local-disks": merged(
        merged(SHARED_CACHE, APART),
        {"worker": {"kind": "StatefulSet", "cacheSize": "20Gi"}, "models": [model(path="/models/demo")]},
    ),
    "apart-by-hpa": merged(merged(HPA, BOTH_SCALED), MONITORING),
    "apart-by-keda": merged(merged(KEDA, BOTH_SCALED), {"worker": {"autoscaling": {"minReplicas": 1}}}),
    "apart-in-one-of-two-models": {"models": [model("small"), model("large", worker=APART["worker"])]},
    "access": ACCESS,
    "tuned": TUNED,
    "behind-google": {"ingress": {**ACCESS["ingress"], "controller": "gce"}},
    "behind-alb": {"ingress": {**ACCESS["ingress"], "className": "alb", "controller": "alb"}},
    "behind-nginx": {"ingress": {**ACCESS["ingress"], "controller": "nginx"}},
    "operated": OPERATED,
    "discovery": {"gateway": {"discovery": "k8s"}},
    "monitoring": MONITORING,
    "redis-elsewhere": {
        "redis": {"embedded": False, "externalUrlSecret": "llm-redis"},
        "state": {"externalUrlSecret": "llm-state", "externalPort": 6380},
    },
    "kept": {"state": {"embedded": True, "volume": {"storageClass": "fast", "size": "5Gi"}}},
    "kept-in-a-claim": {
        "state": {
            "embedded": True,
            "volume": {"existingClaim": "llm-state"},
            "passwordSecret": "llm-state",
            "appendfsync": "always",
        }
    },
    "kept-for-a-trial": {"state": {"embedded": True, "volume": {"type": "emptyDir"}}},
    "encrypted": {
        "tls": {
            "certManager": {"enabled": True, "issuerRef": {"name": "llm"}},
            "caConfigMap": "llm-ca",
            "tokenSecret": "llm-services",
        },
        "state": {"embedded": True},
        **APART,
    },
    "encrypted-by-one-certificate": {
        "tls": {"secret": "llm-tls"},
        "redis": {"embedded": False, "externalUrlSecret": "llm-redis", "externalTlsSecret": "llm-redis-tls"},
        "state": {"externalUrlSecret": "llm-state", "externalTlsSecret": "llm-state-tls"},
    },
    "told-deletion-cost": {"worker": {"deletionCost": True}},
    "no-account": {"serviceAccount": {"create": False, "name": "existing"}},
    "open-network": {"networkPolicy": {"enabled": False}},
    "named": {"nameOverride": "inference", "fullnameOverride": "acme-llm", "image": {"registry": "registry.example.com/mirror"}},
    "long-names": {
        "models": [model("an-organisation-with-a-name/a-model-whose-name-is-longer-than-any-label-may-be-v2.5-instruct-awq")]
    },
    "fetched-by-pods": {
        "modelCache": {"type": "pod"},
        "models": [model(path="/models/demo", source="org/demo")],
        "worker": {"kind": "StatefulSet", "cacheSize": "20Gi", "gpus": 1, "resources": GPU_RESOURCES},
    },
    "tokenizers-fetched": merged(
        SHARED_CACHE,
        {
            "modelCache": {
                "pvc": {"accessMode": "ReadWriteOnce"},
                "fetchTokenizers": True,
                "prefetch": {
                    "enabled": True,
                    "hubEndpoint": "https://hub.example.com",
                    "s3": {"endpoint": "http://minio.storage.svc:9000", "region": "eu-1", "secret": "s3"},
                    "gcs": {"endpoint": "http://gcs.storage.svc:9000", "secret": "gcs"},
                    "proxy": "http://proxy.example.com:3128",
                    "ca": {"configMap": "trusted", "key": "ca-bundle.crt"},
                    "pod": {"nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
                },
            },
            "models": [model(path="/models/demo", source="s3://models/demo")],
        },
    ),
    "node-cache": merged(
        SHARED_CACHE,
        {
            "models": [model(path="/models/demo")],
            "worker": {"cacheVolume": {"hostPath": {"path": "/mnt/nvme/models"}}, "gpus": 1, "resources": GPU_RESOURCES},
        },
    ),
    "openshift": {
        "pod": {"securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
        "extraObjects": [ROUTE],
    },
    "devices-of-each-kind": {
        "worker": {
            "resources": GPU_RESOURCES,
            "resourceClaims": [
                {"name": "gpu", "deviceClassName": "gpu.nvidia.com", "selectors": ["device.attributes['gpu.nvidia.com'].mig"]},
                {"name": "nic", "resourceClaimTemplateName": "nics"},
                {"name": "shared", "resourceClaimName": "one-gpu"},
            ],
        }
    },
    "everything": merged(merged(merged(merged(TWO_MODELS, HPA), MONITORING), ACCESS), TUNED),
}
ALL = [*ci_names(), *VARIANTS]
assert len(set(ALL)) == len(ALL), "the names of value sets and ci files must differ"


def values_of(name: str) -> Values:
    """Returns the values of a value set in ALL by its name."""
    return VARIANTS[name] if name in VARIANTS else ci_values(name)


def rendered(name: str) -> Release:
    return render(values_of(name))
