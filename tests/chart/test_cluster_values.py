"""Tests that releases of tests/cluster can start on a local cluster.

The nodes must have the resources that the pods need, and the images must have the programs that the pods run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart.pods import pods
from tests.chart.release import REPO, Release, Values, ci_values, merged, refusal, render, title
from tests.cluster import images, overlays, test_diagnosis, test_mtls, test_scaling
from tests.cluster.conftest import BASE
from tests.cluster.values import FAKE, MONITORED, TWO

CLUSTER, PAGE = REPO / "tests" / "cluster", REPO / "docs" / "how-to" / "kubernetes" / "cluster-tests.md"
NODE_LABELS = {"kubernetes.io/os": "linux"}
VOLUMES = {"emptyDir", "configMap", "secret", "projected", "downwardAPI"}
PROBES = ("readinessProbe", "livenessProbe", "startupProbe")
CORES = 4.0 - 0.2  # cores of both nodes, without the requests of add-ons
BUILT_IN = {
    "command",
    "exec",
    "trap",
    "exit",
    "wait",
    "if",
    "then",
    "fi",
    "while",
    "do",
    "done",
    "read",
    "echo",
    "test",
    "[",
    "set",
    "kill",
}


def based(*more: Values) -> Values:
    """Merges values in the order of the fixture `install`."""
    values: Values = {}
    for each in (*(yaml.safe_load(path.read_text()) for path in BASE), *more):
        values = merged(values, each)
    return values


INSTALLED: dict[str, Values] = {
    **{f"ci {name}": overlays.installed(name) for name in overlays.CI if name != "cpu-demo"},
    **{f"broken: {name}": based(test_diagnosis.ONE, fault.values) for name, fault in test_diagnosis.BROKEN.items()},
    "cpu-demo": ci_values("cpu-demo"),
    "defaults": overlays.LOADED,
    "two of each": based(TWO, {"drainSeconds": 20}),
    "the fake executor, monitored": based({"worker": {"replicas": 3, "settings": FAKE}, "monitoring": MONITORED}),
    "mTLS": based(test_mtls.VALUES, test_mtls.TLS),
    "KEDA": based(test_scaling.keda(), {"worker": {"settings": test_scaling.SLOW, "resources": test_scaling.LITTLE}}),
    "KEDA, two models": based(test_scaling.keda(), {"models": test_scaling.two_models()}),
}
WAITING = {  # releases whose pods must wait, or whose test creates the claimed object
    f"broken: {name}" for name in ("claim that is not bound", "missing RuntimeClass", "RWO shared over nodes")
}


def unmet_requirements(release: Release) -> Iterator[str]:
    """Yields the requirements of pods that no node fulfils."""
    if any(each.get("spec", {}).get("volumeClaimTemplates") for each in release.objects):
        yield "a volume claim"
    for pod in pods(release):
        spec = pod.spec
        wanted = set(spec.get("nodeSelector", {}).items()) - set(NODE_LABELS.items())
        affinity = spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
        classes = {key: spec[key] for key in ("priorityClassName", "runtimeClassName", "resourceClaims") if spec.get(key)}
        volumes = [each["name"] for each in spec.get("volumes", ()) if not VOLUMES & set(each)]
        devices = [
            name
            for each in spec["containers"]
            for name in each.get("resources", {}).get("limits", {})
            if "/" in name or name == "claims"
        ]
        found = {"labels": wanted, "affinity": affinity, "classes": classes, "volumes": volumes, "devices": devices}
        yield from (f"{title(pod.owner)}: {key} {value}" for key, value in found.items() if value)


def cores(release: Release) -> float:
    """Returns the CPU cores that the long-lived pods request."""
    total = 0.0
    for each in release.kind("Deployment", "StatefulSet"):
        containers = each["spec"]["template"]["spec"]["containers"]
        asked = [str(part.get("resources", {}).get("requests", {}).get("cpu", 0)) for part in containers]
        alone = sum(float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu) for cpu in asked)
        total += alone * each["spec"].get("replicas", 1)
    return total


@pytest.fixture(scope="module")
def releases() -> dict[str, Release]:
    refused = {name: message for name, values in INSTALLED.items() if (message := refusal(values, "rootstock"))}
    assert refused == {}
    return {name: render(values, name="rootstock") for name, values in INSTALLED.items()}


def test_releases_of_the_cluster_tests_request_only_existing_resources(releases: dict[str, Release]) -> None:
    waits = {name: found for name, release in releases.items() if (found := list(unmet_requirements(release)))}
    assert waits.keys() == WAITING, waits
    assert {name: asked for name, release in releases.items() if (asked := cores(release)) > CORES / 2} == {}


def test_images_of_the_cluster_tests_exist_and_have_the_programs_that_pods_run(releases: dict[str, Release]) -> None:
    """Includes the Redis image of the tests, which has a shell and few other programs."""
    ours = {f"{images.REGISTRY}/rootstock/{service}:{images.release()}" for service in images.SERVICES}
    redis = {images.redis_image(), images.redis_image("state")}
    given = {*images.REDIS_PROGRAMS, *BUILT_IN}
    absent: set[str] = set()
    missing: dict[str, set[str]] = {}
    for name, release in releases.items():
        for pod in pods(release):
            for each in pod.containers():
                image = each["image"]
                bare = image.removeprefix("docker.io/")
                whole = f"docker.io/{'' if '/' in bare else 'library/'}{bare}"
                if image not in ours and whole not in redis:
                    absent.add(f"{name}: {image}")
                if whole in redis and (unknown := called(each) - given):
                    missing[f"{name}: {title(pod.owner)} {each['name']}"] = unknown
    assert (absent, missing) == (set(), {})


def called(container: dict[str, Any]) -> set[str]:
    """Returns the programs that the container calls, also in scripts and probes."""
    parts = [container.get("command", []), *(container.get(probe, {}).get("exec", {}).get("command", []) for probe in PROBES)]
    out = {str(part[0]).rpartition("/")[2] for part in parts if part}
    scripts = [part[part.index("-c") + 1] for part in parts if "-c" in part]
    for script in scripts:
        bare = re.sub(r"<<END.*?^END$", "", str(script), flags=re.M | re.S)
        plain = re.sub(r"'[^']*'|\"[^\"]*\"", "''", bare)
        commands = re.split(r"&&|\|\||[;|&\n]|\$\(|\bthen\b|\bdo\b|\belse\b|\bif\b|\bwhile\b|!", plain)
        words = (re.sub(r"^(?:\w+=\S*\s+)+", "", each.strip()).split() for each in commands)
        out |= {each[0].rpartition("/")[2] for each in words if each and re.fullmatch(r"[\w./\[-]+", each[0])}
    return out


def test_cluster_tests_page_lists_exactly_the_existing_tests() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text))
    there = {
        (str(path.relative_to(REPO)), name)
        for path in {*CLUSTER.glob("test_*.py"), *(REPO / file for file, _ in named)}
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(), re.M)
    }
    assert named - there == set()
    assert {(file, name) for file, name in there if file.startswith("tests/cluster/")} - named == set()
