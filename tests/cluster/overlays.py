"""Overlays that make the values files of ci/ installable on this machine. They replace only values that do not fit the machine.

tests/chart/test_cluster_values.py checks that no installation waits for something that nodes of a local cluster lack.
"""

from __future__ import annotations

from typing import Any

import yaml

from tests.cluster.images import REGISTRY
from tests.cluster.kubernetes import CHART, Object

CI = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}
DEMO = "/app/models/demo"
SMALL: Object = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}
FEW: Object = {"max_total_tokens": 16384, "max_running_requests": 8, "grammar_workers": 1}
LOADED: Object = {  # images that are loaded into the nodes, with the names of tests/cluster/images.py
    "image": {"registry": REGISTRY},
    "redis": {"image": {"registry": "docker.io"}},
    "state": {"image": {"registry": "docker.io"}},
}
OF_A_GPU = ("gpus", "gpuMemoryGB", "gpuResource", "resourceClaims")
OWN: dict[str, Object] = {  # additional overlays of single files, whose images, models, volumes or limits do not fit this machine
    "air-gapped": {"image": {"pullSecrets": []}, "worker": {"affinity": None}},
    "eight-gpus-two-models": {
        "gateway": {"replicas": 1, "autoscaling": {"minReplicas": 1}, "settings": {"max_concurrent_requests": 64}},
        "worker": {"priorityClassName": ""},
        "networkPolicy": {"clients": [], "apiServer": []},  # the tests call gateways directly, not by an ingress
        "tracing": {"otlpEndpoint": ""},
    },
    "kv-in-tiers": {"worker": {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "4Gi"}}}},
    "operators-overlay": {  # the priority class, the image mirror and the API server's port of the file do not exist here
        "image": {"pullPolicy": "IfNotPresent", "pullSecrets": []},
        "gateway": {"priorityClassName": ""},
        "networkPolicy": {"apiServerPorts": [443, 6443]},
    },
    "scale-from-zero": {
        "gateway": {"autoscaling": {"minReplicas": 1}},
        "autoscaling": {"prometheusUrl": "http://prometheus-server.monitoring.svc:80"},
    },
}
TIERS: Object = {  # sizes for a small pool on the local disk, without an external Redis
    "hostGB": 1,
    "files": {"sizeGB": 1, "claimSize": 0, "storageClass": ""},
    "shared": {"secret": "", "peers": []},
}


def installed(name: str) -> Object:
    """Returns the values of a file of ci/, merged with its overlay."""
    values: Object = yaml.safe_load(CI[name].read_text())
    return merged(values, _overlay(name, values))


def merged(values: Object, over: Object) -> Object:
    """Merges values as helm does: maps are merged by key, other values are replaced, and None removes a key."""
    return _without_none(_merge_keeping_none(values, over))


def _without_none(values: Object) -> Object:
    return {key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items() if value is not None}


def _overlay(name: str, values: Object) -> Object:
    few: Object = dict.fromkeys(values["worker"].get("settings", {}))  # removes the file's settings, which are for a GPU
    tiers = {"kvTiers": TIERS} if "kvTiers" in values["worker"] else {}
    worker = {
        "gpus": 0,
        "gpuMemoryGB": 0,
        "runtimeClassName": "",
        "nodeSelector": None,
        "resources": SMALL,
        "sharedMemory": "64Mi",
        "replicas": 1,
        "cacheSize": 0,
        **tiers,
    }
    common: Object = {
        **LOADED,
        "models": [_model(each) for each in values["models"]],
        "modelCache": {"type": "none", "prefetch": {"enabled": False, "tokenSecret": ""}},
        "worker": {**worker, "settings": {**few, **FEW}},
        "gateway": {"resources": SMALL, "replicas": 1},
        "tokenizer": {"resources": SMALL, "replicas": 1, "autoscaling": {"enabled": False}},
        "detokenizer": {"resources": SMALL, "replicas": 1},
        "drainSeconds": 10,
    }
    return _merge_keeping_none(common, OWN.get(name, {}))


def _merge_keeping_none(values: Object, over: Object) -> Object:
    """Merges two overlays. Unlike in merged(), None stays in the result."""
    out = dict(values)
    for key, value in over.items():
        mine = out.get(key)
        out[key] = _merge_keeping_none(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return out


def _model(entry: Object) -> Object:
    """Returns an overlay of an entry of `models` that uses the demo model and no GPU."""
    own: dict[str, Any] = {key: value for key, value in entry.get("worker", {}).items() if key not in OF_A_GPU}
    for part in filter(None, (own, own.get("prefill"))):
        if scaled := part.get("autoscaling"):
            part["autoscaling"] = {**scaled, "minReplicas": 1, "maxReplicas": 2}
    if prefill := own.get("prefill"):
        own["prefill"] = {**prefill, "nodeSelector": {}, "resources": {"limits": SMALL["limits"]}}
    if "kvTiers" in own:
        own["kvTiers"] = _merge_keeping_none(own["kvTiers"], TIERS)
    worker = {**own, "settings": FEW, "replicas": 1, "cacheSize": 0, "cacheStorageClass": ""}
    return {"name": entry["name"], "path": DEMO, "worker": worker, "tokenizer": {"replicas": 1}}
