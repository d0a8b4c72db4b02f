"""Checks pods, their volumes and their devices."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .findings import Finding, broken, ok, waiting
from .install import COMPONENT, MODEL, Facts, Install, Object, containers_of, is_ready, labels_of, name_of, pods_of

OWNERS = ("replicasets", "statefulsets")
FETCHES = ("wait-for-model", "fetch-model", "copy-model")
NOT_BEGUN = ("ContainerCreating", "PodInitializing")
NO_GPU = re.compile(r"no GPU for|libcuda|CUDA driver|NVIDIA driver|no CUDA-capable device|nvidia-smi", re.I)


def storage(install: Install, facts: Facts) -> Iterator[Finding]:
    claims = {name_of(each): each for each in facts.items("persistentvolumeclaims")}
    found = []
    for wanted in install.claims:
        name = wanted["name"]
        claim = claims.get(name)
        if claim is None:
            mend = f"create it, or remove {wanted['value']}, so that the chart creates one"
            found.append(broken("storage", f"PersistentVolumeClaim {name} does not exist", mend))
            continue
        found += _unbound(name, claim, facts)
        found += _shared(name, claim, facts)
    for pod in (pod for pod in pods_of(facts) if not is_ready(pod)):
        for message in facts.warnings(name_of(pod)):
            if "Multi-Attach" in message or "volume node affinity conflict" in message:
                mend = (
                    "pods on two nodes need a volume of one node: use a StorageClass with"
                    " ReadWriteMany, or worker.kind StatefulSet with cacheSize"
                )
                found.append(broken("storage", f"pod {name_of(pod)}: {message}", mend))
                break
    yield from found or [ok("storage", f"{len(install.claims)} claims are bound")]


def _unbound(name: str, claim: Object, facts: Facts) -> Iterator[Finding]:
    if claim.get("status", {}).get("phase") == "Bound":
        return
    message = next(facts.warnings(name), "")
    storage_class = claim["spec"].get("storageClassName") or "the default StorageClass"
    if message:
        modes = ", ".join(claim["spec"].get("accessModes", ()))
        mend = f"name a StorageClass that exists and supports {modes} (kubectl get storageclass); delete the claim, because it cannot be changed"
        yield broken("storage", f"claim {name} of {storage_class} is not bound: {message}", mend)
    else:
        yield waiting(
            "storage",
            f"claim {name} of {storage_class} is not bound yet",
            "kubectl describe the claim, and check that a StorageClass exists (kubectl get storageclass)",
        )


def _shared(name: str, claim: Object, facts: Facts) -> Iterator[Finding]:
    if claim["spec"].get("accessModes") not in (["ReadWriteOnce"], ["ReadWriteOncePod"]):
        return
    users = [pod for pod in pods_of(facts) if _uses(pod, name)]
    nodes = {str(pod["spec"]["nodeName"]) for pod in users if pod["spec"].get("nodeName")}
    late = [pod for pod in users if not pod["spec"].get("nodeName")]
    if len(nodes) > 1 or (nodes and late):
        where = f"{len(users)} pods on {', '.join(sorted(nodes))}" + (f", {len(late)} of them on no node yet" if late else "")
        mend = "use a StorageClass with ReadWriteMany, put all pods with the claim on one node, or use worker.kind StatefulSet with cacheSize"
        yield broken("storage", f"claim {name} is ReadWriteOnce, a volume of one node, and is used by {where}", mend)


def _uses(pod: Object, claim: str) -> bool:
    volumes = pod["spec"].get("volumes", ())
    return any(each.get("persistentVolumeClaim", {}).get("claimName") == claim for each in volumes)


def gpus(install: Install, facts: Facts) -> Iterator[Finding]:
    wanted = {model["slug"]: model for model in install.models if model["gpus"]}
    found: list[Finding] = []
    for model in install.models:
        if model["runtimeClass"]:
            found += _runtime_class(install, model, facts)
    if not wanted:
        yield from found
        return
    for pod in pods_of(facts):
        if labels_of(pod).get(MODEL) not in wanted or labels_of(pod).get(COMPONENT) not in ("worker", "prefill"):
            continue
        if (message := _unschedulable(pod)) and "gpu" in message.lower():
            mend = "check that NVIDIA's device plugin runs (kubectl describe nodes: nvidia.com/gpu in Allocatable) and that a GPU is free"
            found.append(broken("gpus", f"pod {name_of(pod)} gets no GPU: {message}", mend))
        log = "\n".join(text for at, text in facts.logs.items() if at.startswith(f"{name_of(pod)}/"))
        if line := _last(log, NO_GPU):
            mend = (
                "the container has no device: check that the node's driver is loaded (nvidia-smi"
                " there) and that worker.runtimeClassName names NVIDIA's runtime"
            )
            found.append(broken("gpus", f"pod {name_of(pod)} logged: {line}", mend))
    yield from found or [ok("gpus", f"workers of {', '.join(wanted)} have not logged a missing device")]


def _runtime_class(install: Install, model: Object, facts: Facts) -> Iterator[Finding]:
    name = model["runtimeClass"]
    if not any(_lacks_pods(owner) for plural in OWNERS for owner in facts.items(plural)):
        return  # the warnings are outdated, because all pods exist
    for message in facts.warnings(f"{install.release}-"):
        if "RuntimeClass" in message and f'"{name}"' in message:
            mend = "name an existing class (kubectl get runtimeclass); NVIDIA's GPU operator creates nvidia. Or remove worker.runtimeClassName"
            yield broken(
                "gpus",
                (f"no pod of model {model['name']} can be created, because RuntimeClass {name} is missing: {message}"),
                mend,
            )
            return


def _unschedulable(pod: Object) -> str:
    for each in pod.get("status", {}).get("conditions", ()):
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return str(each.get("message", ""))
    return ""


def _last(text: str, pattern: re.Pattern[str]) -> str:
    found = [line.strip() for line in text.splitlines() if pattern.search(line)]
    return found[-1][:300] if found else ""


def pods(install: Install, facts: Facts) -> Iterator[Finding]:
    all_pods = pods_of(facts)
    if not facts.objects.get("pods") or not facts.objects["pods"].good:
        return
    found = [*_uncreated_pods(install, facts)]
    for pod in all_pods:
        found += _pod(pod, facts)
    ready = sum(map(is_ready, all_pods))
    yield from found or [ok("pods", f"{ready} of {len(all_pods)} pods are ready")]


def _uncreated_pods(install: Install, facts: Facts) -> Iterator[Finding]:
    """Reports pods that their owner could not create."""
    for plural in OWNERS:
        for owner in facts.items(plural):
            wanted, there = owner["spec"].get("replicas", 0), owner.get("status", {}).get("replicas", 0)
            if not _lacks_pods(owner):
                continue
            message = next(facts.warnings(name_of(owner)), "")
            if "RuntimeClass" in message or not message:
                continue  # gpus() reports a missing RuntimeClass
            yield broken("pods", f"{name_of(owner)} has {there} of {wanted} pods: {message}", _refusal_remedy(message))


def _lacks_pods(owner: Object) -> bool:
    return bool(owner.get("status", {}).get("replicas", 0) < owner["spec"].get("replicas", 0))


def _refusal_remedy(message: str) -> str:
    if "PodSecurity" in message:
        return "the namespace's Pod Security refuses it: volumes such as hostPath need another level; or choose another modelCache.type"
    if "quota" in message:
        return "raise the namespace's ResourceQuota, or lower replicas and resources"
    if "serviceaccount" in message.lower():
        return "create the account serviceAccount.name, or set serviceAccount.create to true"
    return "see the message for the component that refuses the pod"


def _pod(pod: Object, facts: Facts) -> Iterator[Finding]:
    name = name_of(pod)
    if (message := _unschedulable(pod)) and "gpu" not in message.lower():
        mend = "add a node with enough free resources, fit tolerations and nodeSelector, or lower resources.requests"
        yield broken("pods", f"pod {name} fits on no node: {message}", mend)
    containers = list(containers_of(pod))
    begun = any(each.get("state", {}).get("waiting", {}).get("reason") not in NOT_BEGUN for _, each in containers)
    if not begun and (message := _unmounted(pod, facts)):
        mend = "create the named Secret, ConfigMap or claim, or remove the value that names it"
        yield broken("pods", f"pod {name} gets no volume: {message}", mend)
    for is_init, each in containers:
        yield from _container(name, is_init, each, facts.logs.get(f"{name}/{each['name']}", ""))


def _unmounted(pod: Object, facts: Facts) -> str:
    """Returns the message of the pod's newest event if a volume could not be mounted; otherwise "".

    A later event, such as an image pull, means that all volumes are mounted. The uid excludes events of an earlier pod of the
    same name.
    """
    uid = pod["metadata"].get("uid", "")
    mine = [each for each in facts.events_about(name_of(pod)) if each["involvedObject"].get("uid", uid) == uid]
    return str(mine[0].get("message", "")) if mine and mine[0].get("reason") == "FailedMount" else ""


def _container(pod: str, is_init: bool, each: Object, log: str) -> Iterator[Finding]:
    state, name = each.get("state", {}), each["name"]
    reason = state.get("waiting", {}).get("reason", "")
    ended = state.get("terminated") or each.get("lastState", {}).get("terminated") or {}
    last = _last(log, re.compile(r"\S"))
    if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName"):
        message = state["waiting"].get("message", reason)
        yield broken(
            "pods",
            f"pod {pod}: the image of {name} cannot be pulled: {message}",
            "check image.registry, image.tag and image.pullSecrets",
        )
    elif reason == "CreateContainerConfigError":
        message = state["waiting"].get("message", "")
        yield broken("pods", f"pod {pod}: {name} cannot be created: {message}", "create the named Secret or add the named key")
    elif ended.get("reason") == "OOMKilled" and not each.get("ready"):
        yield broken(
            "pods",
            f"pod {pod}: {name} exceeded its memory limit and was killed",
            "raise resources.limits.memory (docs/how-to/kubernetes/sizing.md)",
        )
    elif ended.get("exitCode") and not each.get("ready") and not NO_GPU.search(log):
        yield broken(
            "pods",
            f"pod {pod}: {name} ended with status {ended['exitCode']}: {last or 'without a log'}",
            f"kubectl logs {pod} -c {name} --previous",
        )
    elif is_init and "running" in state and name in FETCHES:
        mend = (
            "check the download source (models[].source, modelCache.prefetch: Secrets, proxy) and that the pod can reach it"
            if name == "fetch-model"
            else "check that the prefetch Job is complete (kubectl get jobs), that models[].path"
            " names the model's folder, and that the modelCache has it"
        )
        yield waiting("pods", f"pod {pod}: {last or 'waits for its model'}", mend)
    elif not is_init and "running" in state and not each.get("ready"):
        yield waiting(
            "pods",
            f"pod {pod}: {name} runs and is not ready: {last or 'no log yet'}",
            "wait: a worker may load its model for worker.startupSeconds",
        )
