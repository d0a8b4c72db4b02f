"""Tests that the chart refuses wrong values before the installation, with a message that names the remedy."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from typing import Any

import pytest
import yaml

from rootstock_llm.services.gateway.keys.key_table import FIELDS, BadKeys, parse_keys
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.exec.tiers.make_tiers import MOST_FREE, NotEnoughHostMemory, host_pages
from tests.chart.release import CHART, merged, refusal, render, title
from tests.chart.variants import ALL, GPU_RESOURCES, KEDA, SHARED_CACHE, TIERS_MEMORY, model, values_of

Values = dict[str, Any]


def worker(**over: Any) -> Values:
    return {"worker": over}


def tiers(host_gb: int, **over: Any) -> Values:
    """Returns values with KV tiers and a memory limit that suffices for a host tier of 2 GB."""
    parts = {key: over.pop(key) for key in ("files", "shared") if key in over}
    return worker(**{"resources": TIERS_MEMORY, "kvTiers": {"hostGB": host_gb, **parts}, **over})


def sized(gpu_memory_gb: float, source: str, **settings: Any) -> Values:
    """Returns values with a model of known size on a GPU of known memory."""
    over = {"gpus": 1, "gpuMemoryGB": gpu_memory_gb, "resources": GPU_RESOURCES, "settings": settings}
    fetched = {"modelCache": {"type": "pod"}, "models": [model(path="/models/a", source=source)]}
    return {**fetched, **worker(**over, cacheVolume={"emptyDir": {}})}


def gateway(**over: Any) -> Values:
    return {"gateway": over}


def cache(**over: Any) -> Values:
    return {"modelCache": over}


CACHED = [model(path="/models/demo")]
PREFILL = {"replicas": 1}
DIGEST = f"sha256:{'ab' * 32}"
CLASSED = {"loadBalancerClass": "service.k8s.aws/nlb"}

# One case per kind of rule in the schema. tests/contracts/test_chart_schema.py compares the schema's fields.
# Name of the case → values, parts of the refusal. The schema's messages name a key as a path: /models/0/path.
SCHEMA: dict[str, tuple[Values, tuple[str, ...]]] = {
    "unknown key": ({"gatewy": {}}, ("additional properties 'gatewy' not allowed",)),
    "unknown setting of one model": (
        {"models": [model(worker={"settings": {"nope": 1}})]},
        ("/models/0/worker/settings", "additional properties 'nope' not allowed"),
    ),
    "setting of another service": (
        {"tokenizer": {"settings": {"page_size": 16}}},
        ("/tokenizer/settings", "additional properties 'page_size' not allowed"),
    ),
    "setting of a wrong type": (worker(settings={"page_size": "16 tokens"}), ("/worker/settings/page_size", "want integer")),
    "setting outside its enumeration": (
        worker(settings={"schedule_policy": "newest"}),
        ("/worker/settings/schedule_policy", "value must be one of 'fcfs'"),
    ),
    "setting that the chart decides": (gateway(settings={"host": "127.0.0.1"}), ("/gateway/settings", "'host' not allowed")),
    "variable that the chart decides, from a Secret": (
        worker(extraEnv=[{"name": "ROOTSTOCK_CONTROL_TOKEN_FILE", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]),
        ("/worker/extraEnv/0/name",),
    ),
    "role as a setting": (
        worker(settings={"disaggregation_mode": "prefill"}),
        ("/worker/settings", "additional properties 'disaggregation_mode' not allowed"),
    ),
    "prefill workers scaled from zero": (
        worker(prefill={"autoscaling": {"enabled": True, "minReplicas": 0}}),
        ("/worker/prefill/autoscaling/minReplicas", "minimum: got 0, want 1"),
    ),
    "prefill workers scaled by zero tokens": (
        worker(prefill={"autoscaling": {"enabled": True, "waitingTokens": 0}}),
        ("/worker/prefill/autoscaling/waitingTokens", "minimum: got 0, want 1"),
    ),
    "prefill workers scaled by the backlog": (
        worker(prefill={"autoscaling": {"enabled": True, "backlogPerReplica": 2}}),
        ("/worker/prefill/autoscaling", "additional properties 'backlogPerReplica' not allowed"),
    ),
    "key that both kinds of workers share": (
        worker(prefill={"kind": "StatefulSet"}),
        ("/worker/prefill", "additional properties 'kind' not allowed"),
    ),
    "secret as a setting": (gateway(settings={"api_keys_file": "/keys"}), ("/gateway/settings", "'api_keys_file' not allowed")),
    "no replica": ({"tokenizer": {"replicas": 0}}, ("/tokenizer/replicas", "minimum: got 0, want 1")),
    "source with an unknown scheme": ({"models": [model(source="ftp://a/b")]}, ("/models/0/source", "does not match pattern")),
    "no model": ({"models": []}, ("/models", "minItems: got 0, want 1")),
    "model without a path": ({"models": [{"name": "a"}]}, ("/models/0", "missing property 'path'")),
    "model's name with a comma": ({"models": [model("a,b")]}, ("/models/0/name", "does not match pattern")),
    "relative path": ({"models": [model(path="models/demo")]}, ("/models/0/path", "does not match pattern")),
    "sampling above one": ({"tracing": {"sampleRatio": 2}}, ("/tracing/sampleRatio", "maximum: got 2, want 1")),
    "collector without a port": ({"tracing": {"otlpEndpoint": "collector"}}, ("/tracing/otlpEndpoint", "does not match pattern")),
    "disruption budget without an allowed eviction": (gateway(pdb={"maxUnavailable": 0}), ("/gateway/pdb/maxUnavailable",)),
    "memory in words": (
        worker(resources={"limits": {"memory": "sixty-four gigs"}}),
        ("/worker/resources/limits/memory", "does not match pattern"),
    ),
    "variables under pod instead of extraEnv": (
        gateway(pod={"env": []}),
        ("/gateway/pod", "additional properties 'env' not allowed"),
    ),
    "digest without an algorithm": (gateway(image={"digest": "9f86d081"}), ("/gateway/image/digest", "does not match pattern")),
    "registry with a scheme": ({"image": {"registry": "https://mirror"}}, ("/image/registry", "does not match pattern")),
    "invalid label value": (worker(podLabels={"team": "a b"}), ("/worker/podLabels/team", "does not match pattern")),
    "scale to zero of a service without a model": (
        gateway(autoscaling={"enabled": True, "minReplicas": 0}),
        ("/gateway/autoscaling/minReplicas", "minimum: got 0, want 1"),
    ),
    "name with a dot": ({"fullnameOverride": "acme.llm"}, ("/fullnameOverride", "does not match pattern")),
    "name that begins with a digit": ({"fullnameOverride": "8-ball"}, ("/fullnameOverride", "does not match pattern")),
    "API key instead of a Secret's name": (
        {"auth": {"apiKeysSecret": "sk-KEY one"}},
        ("/auth/apiKeysSecret", "does not match pattern"),
    ),
}

SENTENCES: dict[str, tuple[Values, str]] = {
    "two models with one name": (
        {"models": [model("a"), model("a")]},
        'models: two entries have the name "a". Names must differ: clients choose a model by its name.',
    ),
    "two models whose objects would have one name": (
        {"models": [model("Org/a"), model("org-a")]},
        'models: the names "Org/a" and "org-a" both become "org-a" in the names of objects. Rename one model.',
    ),
    "two sources with one path": (
        {
            **cache(type="pvc", prefetch={"enabled": True}),
            "models": [model(name, path="/models/x", source=f"org/{name}") for name in ("a", "b")],
        },
        "model b: the prefetch Job would replace org/a by org/b, because another model with that source has the same path",
    ),
    "several hosts": (worker(kind="LeaderWorkerSet", hosts=2), "worker.hosts is 2, and a worker of this version runs on one GPU"),
    "several GPUs": (worker(gpus=8), "worker.gpus is 8, and a worker of this version runs on one GPU of one host. Set it to 1"),
    "a key of another chart": ({"replicaCount": 2}, "replicaCount is not a key of this chart: use replicas of a component"),
    "a block of another chart": (
        {"servingEngineSpec": {"raySpec": {}}},
        "servingEngineSpec is not a key of this chart: use worker, models[] and modelCache.",
    ),
    "images without a registry": (
        {"image": {"registry": ""}},
        'has no registry, because image.registry is "". Build the images and set image.registry to the host that has them'
        " (docs/how-to/kubernetes/images.md#registry)",
    ),
    "a GPU in resources instead of gpus": (
        worker(resources={"limits": {"nvidia.com/gpu": 1}}),
        "worker.resources.limits has nvidia.com/gpu, and worker.gpus is 0: image, executor and tolerations of a GPU follow"
        " only from worker.gpus. Remove it and set worker.gpus to 1, with worker.gpuResource nvidia.com/gpu.",
    ),
    "weights beyond the GPU": (
        sized(24, "Qwen/Qwen3-32B"),
        "no page of KV fits on a GPU of 24 GB (gpuMemoryGB): the weights take 65.5 GB",
    ),
    "a pool beyond the GPU": (
        sized(80, "Qwen/Qwen3-32B", max_total_tokens=20000),
        "worker.settings.max_total_tokens is 20000, and a GPU of 80 GB (gpuMemoryGB) has memory for 13344 tokens of KV",
    ),
    "a context beyond the pool": (
        sized(80, "Qwen/Qwen3-32B", context_len=16384),
        "worker.settings.context_len is 16384, and the KV pool of a GPU of 80 GB (gpuMemoryGB) has 13344 tokens",
    ),
    "a GPU with the demo's memory": (worker(gpus=1), "worker.resources are those of the demo model on a CPU"),
    "one digest for CPU and GPU images": (
        {"models": [model("a"), model("b", worker={"gpus": 1, "resources": GPU_RESOURCES})], **worker(image={"digest": DIGEST})},
        "model b: worker.image.digest would also apply to workers on the other kind of device, and GPUs have another image.",
    ),
    "disk of a Deployment": (worker(cacheSize="10Gi"), "which only worker.kind StatefulSet has; it is Deployment."),
    "disk without a source": (
        worker(kind="StatefulSet", cacheSize="10Gi"),
        "worker.cacheSize or cacheVolume needs a model in the model cache to copy. Set modelCache.type and the model",
    ),
    "two caches": (
        worker(kind="StatefulSet", cacheSize="10Gi", cacheVolume={"emptyDir": {}}),
        "worker.cacheSize and worker.cacheVolume are both set: a worker has one cache volume.",
    ),
    "download by each worker without a disk": (
        {"modelCache": {"type": "pod"}, "models": [model(path="/models/a", source="org/a")]},
        "modelCache.type pod has each worker fetch its model, which needs a source, a path below /models, and a disk",
    ),
    "a draft model that is not downloaded": (
        merged(
            {"modelCache": {"type": "pod"}, "models": [model(path="/models/a", source="org/a")]},
            worker(cacheVolume={"emptyDir": {}}, settings={"speculative_draft_model_path": "/models/draft"}),
        ),
        "is /models/draft, and with modelCache.type pod a worker fetches only its model.",
    ),
    "a store with a memory limit below maxMemory": (
        {"state": {"embedded": True, "maxMemory": "3gb"}},
        "state.maxMemory is 3gb, and state.resources.limits.memory is 3Gi: the server would exceed its memory limit",
    ),
    "a certificate that is renewed before it is made": (
        {"tls": {"certManager": {"enabled": True, "issuerRef": {"name": "a"}, "duration": "72h"}}},
        "tls.certManager.renewBefore (720h) must be less than its duration (72h)",
    ),
    "tokenizers without a download source": (
        merged(SHARED_CACHE, {**cache(fetchTokenizers=True), "models": CACHED}),
        "modelCache.fetchTokenizers is true, but the model has no download source. Set models[].source,",
    ),
    "KV files without a host tier": (tiers(0, files={"sizeGB": 8}), "which needs a host tier. Set hostGB to 1 or more."),
    "KV in files and in shared storage": (
        tiers(2, files={"sizeGB": 8}, shared={"secret": "kv"}),
        "files.sizeGB and shared.secret are both set: a worker has one storage.",
    ),
    "a volume for KV files of size zero": (
        tiers(2, files={"volume": {"emptyDir": {}}}),
        "kvTiers.files has a volume, and sizeGB is 0",
    ),
    "two volumes for KV files": (
        tiers(2, kind="StatefulSet", files={"sizeGB": 8, "claimSize": "20Gi", "volume": {"emptyDir": {}}}),
        "kvTiers.files.claimSize and volume are both set: the files have one volume.",
    ),
    "KV files in a claim of a Deployment": (
        tiers(2, files={"sizeGB": 8, "volume": {"hostPath": {"path": "/mnt/nvme/kv"}}}),
        "with worker.kind Deployment no later pod has that name, and the files are never deleted. Set kind to StatefulSet",
    ),
    "a claim that is too small": (
        tiers(2, kind="StatefulSet", files={"sizeGB": 8, "claimSize": "7.5Gi"}),
        "claimSize is 7.5Gi, and sizeGB is 8: the files with their metadata take up to 8467108864 bytes.",
    ),
    "a memory limit below the host tier": (
        tiers(2, resources={"requests": {"memory": "4G"}, "limits": {"memory": 4000000000}}),
        "hostGB is 2, and resources.limits.memory is 4000000000: hostGB, the worker itself and, in a limit, sharedMemory (1Gi)"
        " need at least 4433Mi.",
    ),
    "tiers in settings too": (
        tiers(2, settings={"hicache_size": 4}),
        "worker.kvTiers and worker.settings.hicache_size both configure tiers.",
    ),
    "KV tiers without the radix cache": (
        tiers(2, settings={"enable_radix_cache": False}),
        "worker.kvTiers needs the radix cache, and worker.settings.enable_radix_cache is false.",
    ),
    "prefill workers of a LeaderWorkerSet": (
        worker(kind="LeaderWorkerSet", prefill=PREFILL),
        "model demo: worker.prefill needs workers of one pod each, and worker.kind is LeaderWorkerSet. Set kind to Deployment",
    ),
    "prefill workers without decode workers": (
        worker(replicas=0, prefill=PREFILL),
        "needs at least one decode worker, and worker.replicas is 0. Raise it, or set prefill.replicas to 0.",
    ),
    "prefill workers with another page size": (
        worker(settings={"page_size": 16}, prefill={**PREFILL, "settings": {"page_size": 32}}),
        "model demo: worker.prefill.settings.page_size differs from worker.settings",
    ),
    "prefill workers without the radix cache": (
        worker(settings={"enable_radix_cache": False}, prefill=PREFILL),
        "worker.prefill moves cached KV from worker to worker, and settings.enable_radix_cache is false.",
    ),
    "setting as a variable": (
        worker(extraEnv=[{"name": "ROOTSTOCK_PAGE_SIZE", "value": "32"}]),
        "extraEnv sets ROOTSTOCK_PAGE_SIZE. Settings of the services belong under `settings` (page_size)",
    ),
    "variable of the chart": (
        gateway(extraEnv=[{"name": "HOME", "value": "/root"}]),
        "extraEnv sets HOME, which the chart sets",
    ),
    "a volume with the name of a chart volume": (
        worker(pod={"volumes": [{"name": "shm", "emptyDir": {}}]}),
        "worker of model demo: pod.volumes has a volume named shm, and the chart has a volume with this name.",
    ),
    "a mount without a volume": (
        {"pod": {"volumeMounts": [{"name": "ca", "mountPath": "/ca"}]}},
        "pod.volumeMounts mounts ca, and the pod has no such volume. Add it to pod.volumes.",
    ),
    "mount over the code": (
        gateway(pod={"volumes": [{"name": "v", "emptyDir": {}}], "volumeMounts": [{"name": "v", "mountPath": "/app/"}]}),
        "gateway: pod.volumeMounts mounts v at /app/, where the chart or the image has files.",
    ),
    "sidecar with the name of a service": (
        {"tokenizer": {"pod": {"containers": [{"name": "tokenizer", "image": "a:1"}]}}},
        "tokenizer of model demo: pod.containers or pod.initContainers has a container named tokenizer, and another",
    ),
    "sidecar on a service's port": (
        gateway(pod={"containers": [{"name": "proxy", "image": "a:1", "ports": [{"containerPort": 8000}]}]}),
        "gateway: container proxy has port 8000 (no name), which is one of the chart's: Services would lead to it.",
    ),
    "CPU target with a sidecar without a CPU request": (
        gateway(autoscaling={"enabled": True}, pod={"containers": [{"name": "proxy", "image": "a:1"}]}),
        "gateway: autoscaling.targetCPUPercent is a share of the CPU requests of all containers, and container proxy has no",
    ),
    "grace period shorter than the drain": (
        {"pod": {"terminationGracePeriodSeconds": 60}},
        "pod.terminationGracePeriodSeconds is 60, and its drain needs 138: the pod would be killed while requests run.",
    ),
    "resource claim without a device class": (
        worker(resources=GPU_RESOURCES, resourceClaims=[{"name": "gpu"}]),
        "worker of model demo: resourceClaims: gpu needs exactly one of deviceClassName, resourceClaimTemplateName and",
    ),
    "two executors": (
        worker(executor="cpu", settings={"executor": "fake"}),
        "worker of model demo: executor is cpu, and settings.executor is fake. Remove the latter.",
    ),
    "strategy that a StatefulSet does not have": (
        worker(kind="StatefulSet", strategy={"type": "Recreate"}),
        "worker of model demo: strategy.type is Recreate, which a StatefulSet does not have. Set it to RollingUpdate.",
    ),
    "a rollout that cannot begin": (
        {"tokenizer": {"strategy": {"maxSurge": "0%"}}},
        "tokenizer of model demo: strategy.maxSurge and maxUnavailable are both 0, so no pod could be replaced.",
    ),
    "queue timeout above the request timeout": (
        gateway(queueTimeoutSeconds=600),
        "gateway.queueTimeoutSeconds (600) must be less than gateway.settings.request_timeout_s (600)",
    ),
    "gateway's grace period shorter than its drain": (
        gateway(terminationGracePeriodSeconds=100),
        "gateway.terminationGracePeriodSeconds (100) is less than a gateway takes to stop: preStopSeconds (30)",
    ),
    "keys twice": (
        {"auth": {"apiKeysSecret": "k", "apiKeys": [{"name": "a", "key": "b"}]}},
        "auth.apiKeys and auth.apiKeysSecret are both set, and only one can have the accepted keys.",
    ),
    "admin API without a control token": (
        gateway(settings={"admin_port": 9000}),
        "Set auth.controlTokenSecret, or remove admin_port.",
    ),
    "zero workers under an HPA": (
        worker(autoscaling={"enabled": True, "minReplicas": 0}),
        "minReplicas 0 needs autoscaling.engine keda; a HorizontalPodAutoscaler cannot scale from zero.",
    ),
    "cold start longer than the queue timeout": (
        merged(KEDA, gateway(queueTimeoutSeconds=60)),
        "180 s, but gateway.queueTimeoutSeconds is 60. Raise queueTimeoutSeconds above coldStartSeconds",
    ),
    "zero workers and no queue": (
        merged(KEDA, gateway(settings={"max_waiting_requests": 0})),
        "gateway.settings.max_waiting_requests is 0. Raise it, or set minReplicas to 1.",
    ),
    "token mode without a Secret": (
        {"autoscaling": {"prometheusAuth": {"modes": ["bearer"]}}},
        "autoscaling.prometheusAuth.modes is bearer, but prometheusAuth.secret is empty.",
    ),
    "adapter and KEDA": (
        {"autoscaling": {"engine": "keda", "adapterRules": True}},
        "two autoscalers must not drive the same workers. Set adapterRules.enabled to false, or engine to hpa.",
    ),
    "minReplicas above maxReplicas of workers": (
        worker(autoscaling={"enabled": True, "minReplicas": 9}),
        "worker of model demo: autoscaling.minReplicas (9) is above maxReplicas (4).",
    ),
    "minReplicas above maxReplicas of gateways": (
        gateway(autoscaling={"enabled": True, "minReplicas": 9}),
        "gateway: autoscaling.minReplicas (9)",
    ),
    "CPU target without a CPU request": (
        {"tokenizer": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}},
        "targetCPUPercent is a share of resources.requests.cpu, which is not set.",
    ),
    "hostPath cache without a path": (cache(type="hostPath"), "modelCache.type hostPath needs modelCache.hostPath"),
    "image cache without a reference": (cache(type="image"), "modelCache.type image needs modelCache.image.reference"),
    "prefetch without a volume": (
        cache(prefetch={"enabled": True}),
        "modelCache.type is none. Set type to pvc, or prefetch.enabled to false.",
    ),
    "prefetch without a source": (
        merged(SHARED_CACHE, cache(prefetch={"enabled": True})),
        "no entry of models has a source to download. Set models[].source to a hub id",
    ),
    "download outside the volume": (
        merged(SHARED_CACHE, {**cache(prefetch={"enabled": True}), "models": [model(source="org/a")]}),
        "which is not below modelCache.mountPath (/models). Change the path.",
    ),
    "volume of one node for several replicas": (
        merged(SHARED_CACHE, {**cache(pvc={"accessMode": "ReadWriteOnce"}), "models": CACHED}),
        "ReadWriteOnce is a volume of one node, but tokenizer has several replicas. Set accessMode to ReadWriteMany",
    ),
    "a source without a download": (
        merged(SHARED_CACHE, {"models": [model(path="/models/a", source="org/a")]}),
        "model demo: its source org/a would not be downloaded. Set modelCache.type to pod, or to pvc with",
    ),
    "a cache without a model": (
        cache(type="image", image={"reference": "models/qwen:1"}),
        "modelCache.type is image, but no model has a path in the cache. Set models[].path below modelCache.mountPath (/models)",
    ),
    "a cache volume that no pod may write": (
        merged(SHARED_CACHE, cache(pvc={"accessMode": "ReadOnlyMany"})),
        "modelCache.pvc.accessMode ReadOnlyMany: no pod could write the models.",
    ),
    "no Redis": ({"redis": {"embedded": False}}, "Name a Secret whose key `url` holds redis://…, or set embedded to true."),
    "two Redises": (
        {"redis": {"externalUrlSecret": "r"}},
        "only one Redis is used. Set embedded to false, or remove externalUrlSecret.",
    ),
    "two stores": (
        {"state": {"embedded": True, "externalUrlSecret": "s"}},
        "state.embedded and state.externalUrlSecret are both set: only one Redis is used. Set embedded to false",
    ),
    "an existing claim for an emptyDir": (
        {"state": {"embedded": True, "volume": {"type": "emptyDir", "existingClaim": "c"}}},
        "state.volume.type is not pvc. Set type to pvc, or remove existingClaim.",
    ),
    "certificates from a Secret and from cert-manager": (
        {"tls": {"secret": "s", "certManager": {"enabled": True, "issuerRef": {"name": "i"}}}},
        "only one can issue the certificates. Remove secret, or set enabled to false.",
    ),
    "certificates without an issuer": (
        {"tls": {"certManager": {"enabled": True}}},
        "tls.certManager.issuerRef.name is empty. Name an Issuer or a ClusterIssuer",
    ),
    "a token without TLS": ({"tls": {"tokenSecret": "t"}}, "TLS between services, which is off. Set tls.secret or"),
    "certificates for a missing external Redis": (
        {"state": {"externalTlsSecret": "t"}},
        "needs state.externalUrlSecret, which is empty. Set externalUrlSecret, or remove externalTlsSecret.",
    ),
    "ingress without a host": (
        {"ingress": {"enabled": True}},
        "ingress.hosts is empty. Add an entry like {host: llm.example.com, path: /}",
    ),
    "ingress with an unserved path": (
        {"ingress": {"enabled": True, "hosts": [{"host": "llm.example.com", "path": "/llm"}]}},
        "ingress.hosts: the path /llm of llm.example.com would reach the gateway unchanged",
    ),
    "traffic policy of a ClusterIP Service": (
        gateway(service={"externalTrafficPolicy": "Local"}),
        "gateway.service.externalTrafficPolicy applies to Services of type LoadBalancer or NodePort, and gateway.service.type is",
    ),
    "route without a Gateway": ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs is empty. Add the Gateway"),
    "rights for the default account": (
        {"serviceAccount": {"create": False}},
        "the namespace's default account would get the chart's rights. Name an account, or set create to true.",
    ),
}


@pytest.mark.by_day(one_in=3, seed=3)
@pytest.mark.parametrize("case", SCHEMA)
def test_schema_refuses_wrong_values(case: str) -> None:
    values, words = SCHEMA[case]
    message = refusal(values)
    assert message, "the schema must refuse these values"
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("first", range(16))
def test_templates_refuse_wrong_values(first: int) -> None:
    for case in [*SENTENCES][first::16]:
        values, sentence = SENTENCES[case]
        assert sentence in refusal(values), case


def test_each_check_of_the_templates_has_a_test_case() -> None:
    """Compares the number of checks in templates/_validate*.tpl with the number of cases in SENTENCES."""
    checks = sum(each.read_text().count("{{- fail ") for each in (CHART / "templates").glob("_validate*.tpl"))
    # Two checks have two cases each, and the check of the release name has its own test.
    assert len(SENTENCES) == checks + 1, "each check of the templates needs a case in SENTENCES"


def test_chart_accepts_the_cache_root_as_model_path_only_when_the_operator_fills_the_cache() -> None:
    whole = {"models": [model(path="/models")]}  # the mount path of the cache
    claim = merged(SHARED_CACHE, {**cache(pvc={"existingClaim": "weights"}), **whole})
    assert refusal(claim) == refusal({**cache(type="hostPath", hostPath="/srv/qwen"), **whole}) == ""
    for own in (merged(SHARED_CACHE, whole), merged(claim, cache(fetchTokenizers=True))):
        assert "but no model has a path in the cache" in refusal(own)
    sourced = merged(SHARED_CACHE, {"models": [model("a", path="/app/models/a", source="org/a"), *CACHED]})
    assert "its source org/a would not be downloaded" in refusal(sourced)
    assert "its source org/a would not be downloaded" in refusal({"models": [model(source="org/a")]})


def test_prefill_workers_are_checked_like_workers() -> None:
    apart = {"prefill": {"autoscaling": {"enabled": True, "minReplicas": 9}}}
    assert "worker.prefill of model demo: autoscaling.minReplicas (9) is above maxReplicas (4)." in refusal(worker(**apart))
    one_node = merged(SHARED_CACHE, {**cache(pvc={"accessMode": "ReadWriteOnce"}), "models": CACHED})
    one_node = merged(one_node, {"tokenizer": {"replicas": 1}, "detokenizer": {"replicas": 1}})
    assert refusal(one_node) == ""
    assert "ReadWriteOnce is a volume of one node, but worker has several" in refusal(merged(one_node, worker(prefill=PREFILL)))
    from_zero = merged(KEDA, worker(prefill=PREFILL))
    assert "needs at least one decode worker, and worker.autoscaling.minReplicas is 0." in refusal(from_zero)
    assert refusal(merged(from_zero, worker(autoscaling={"minReplicas": 1}))) == ""
    # The chart refuses 0 replicas and one-host LeaderWorkerSets only if prefill workers are on.
    assert refusal(worker(replicas=0)) == refusal(worker(kind="LeaderWorkerSet", hosts=1)) == ""


def test_memory_limit_that_the_chart_accepts_suffices_for_the_workers_host_tier() -> None:
    host, beside = 2_000_000_000, 2 << 30  # bytes: the host tier; sharedMemory and the worker itself
    least = math.ceil(host / MOST_FREE) + beside
    options = TierOptions(0.0, host, None, b"")
    for limit, fits in ((least, True), (least - 1, False)):
        resources = {"requests": {"memory": "4Gi"}, "limits": {"memory": limit}}
        assert (refusal(tiers(2, resources=resources)) == "") is fits
        with nullcontext() if fits else pytest.raises(NotEnoughHostMemory):
            assert host_pages(options, 0, 1, limit - beside) == host


def test_chart_accepts_the_fields_of_the_key_file_in_api_keys() -> None:
    secret = {"sha256": ["0" * 64], "weight": 2.5, "priority": -1, "requests_per_minute": 600, "tokens_per_minute": 100_000}
    entry = {"name": "team-a", "max_concurrent": 64, "models": ["org/demo"], "expires": "2027-01-31T00:00:00Z", **secret}
    assert entry.keys() | {"key"} == FIELDS
    values = {"auth": {"apiKeys": [entry]}}
    assert refusal(values) == ""
    written = render(values).get("Secret", "llm-rootstock-gateway-keys")["stringData"]["keys.json"]
    assert json.loads(written) == {"keys": [entry]}
    (known,) = parse_keys([written.encode()])
    assert known.models == frozenset({"org/demo"})


WRONG_KEYS: dict[str, Values] = {
    "no key": {},
    "expiry without a zone": {"key": "k", "expires": "2027-01-31T00:00:00"},
    "empty list of models": {"key": "k", "models": []},
    "limit of zero": {"key": "k", "max_concurrent": 0},
    "weight beyond the limit": {"key": "k", "weight": 1e7},
    "nine hashes": {"sha256": [f"{number:064x}" for number in range(9)]},
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_schema_refuses_api_keys_that_a_gateway_refuses(case: str) -> None:
    entry = {"name": "team-a", **WRONG_KEYS[case]}
    with pytest.raises(BadKeys):
        parse_keys([json.dumps({"keys": [entry]}).encode()])
    assert "/auth/apiKeys/0" in refusal({"auth": {"apiKeys": [entry]}})


def test_chart_refuses_a_release_name_that_services_cannot_have() -> None:
    assert 'objects would be named "8-ball-rootstock", and a Service\'s name begins with a letter.' in refusal({}, "8-ball")
    assert refusal({"fullnameOverride": "eight-ball"}, "8-ball") == ""


def test_long_release_names_give_unique_object_names() -> None:
    long = "a-release-whose-name-has-fifty-letters-or-a-few-mo"
    names = [{title(each) for each in render({}, name=long + end).objects} for end in ("", "b")]
    assert all(len(each.partition("/")[2]) <= 63 for each in names[0] | names[1])
    assert not names[0] & names[1]


def test_chart_accepts_valid_values() -> None:
    assert {name: why for name in ALL if (why := refusal(values_of(name)))} == {}
    by_type = {
        kind: [not refusal(gateway(service={"type": kind, **each})) for each in ({"externalTrafficPolicy": "Cluster"}, CLASSED)]
        for kind in ("ClusterIP", "NodePort", "LoadBalancer")
    }
    assert by_type == {"ClusterIP": [False, False], "NodePort": [True, False], "LoadBalancer": [True, True]}


def test_values_file_stays_short() -> None:
    """The file has at most 364 lines of at most 140 characters."""
    text = (CHART / "values.yaml").read_text().splitlines()
    assert len(text) < 365 and max(map(len, text)) <= 140


def test_components_have_the_same_keys_in_the_same_order() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    shared = list(values["tokenizer"])
    for component in ("gateway", "detokenizer", "worker"):
        assert list(values[component])[: len(shared)] == shared, component
