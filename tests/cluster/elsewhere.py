"""Creates objects that the operator must provide for an installation: Secrets, and a Redis outside the chart."""

from __future__ import annotations

import json

from tests.cluster.images import redis_image
from tests.cluster.kubernetes import Object, Release


def secret(release: Release, name: str, data: dict[str, str]) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}
    release.kubectl("apply", "-f", "-", given=json.dumps(body))


def redis_elsewhere(port: int) -> Object:
    """Returns a pod that runs a Redis without a password, and its Service `elsewhere`."""
    labels = {"app": "elsewhere"}
    container = {
        "name": "redis",
        "image": redis_image(),
        "command": ["redis-server", "--port", str(port), "--save", "", "--protected-mode", "no"],
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 10002, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "elsewhere", "labels": labels},
        "spec": {"containers": [container]},
    }
    ports = [{"port": port, "targetPort": port}]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "elsewhere"},
        "spec": {"selector": labels, "ports": ports},
    }
    return {"apiVersion": "v1", "kind": "List", "items": [pod, service]}
