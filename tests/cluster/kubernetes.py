"""A cluster for tests: kubectl and helm with its kubeconfig, and actions on nodes and addons if the cluster is local.

A local cluster is controlled by a command (`CLUSTER`): `up --nodes N FLAGS`, `env`, `load FILE ...`, `addon NAME ...`,
`node stop|start|cut|join NAME`, `gpus NODE N`, `image NAME FILE --file HERE=THERE`, `down`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "rootstock"
WITHIN_S = 240.0  # default time limit of until()
# Addon → its namespace. These addons request half of the resources of two nodes, but use few. addon() lowers their requests.
GREEDY = {"keda": "keda", "prometheus": "monitoring"}
ASK_S = 60.0  # time limit of one request to the API server


class CommandFailed(Exception):
    """Raised if a command fails or exceeds its time limit. The message has the command and its output."""


def run(*command: str, given: str = "", env: Mapping[str, str] | None = None, limit_s: float = 600) -> str:
    """Runs a command and returns its stdout.

    Raises:
        CommandFailed: the command failed or did not end within limit_s.
    """
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{shlex.join(command)}\ndid not end within {limit_s:.0f} s: {error.stderr!r}") from None
    if done.returncode:
        raise CommandFailed(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def until(holds: Callable[[], Any], what: str, within_s: float = WITHIN_S, pause_s: float = 0.5) -> float:
    """Waits until `holds` returns a true value and returns the seconds that it took.

    A check that raises CommandFailed or an HTTP error counts as false.

    Args:
        what: the awaited state, for the message.

    Raises:
        AssertionError: the time limit was exceeded. The message names the error of the last check.
    """
    begun, fault = time.monotonic(), ""
    while True:
        try:
            if holds():
                return time.monotonic() - begun
            fault = ""
        except (CommandFailed, httpx.HTTPError) as error:
            fault = f"; the last check failed: {type(error).__name__}: {error}"
        assert time.monotonic() - begun < within_s, f"waited {within_s:.0f} s for {what}{fault}"
        time.sleep(pause_s)


@dataclass(frozen=True)
class Pod:
    name: str
    node: str
    ip: str
    ready: bool
    leaving: bool


def as_pod(found: Object) -> Pod:
    status = found["status"]
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
    return Pod(
        found["metadata"]["name"],
        found["spec"].get("nodeName", ""),
        status.get("podIP", ""),
        ready,
        "deletionTimestamp" in found["metadata"],
    )


@dataclass(frozen=True)
class Cluster:
    """A Kubernetes cluster and the environment for kubectl and helm."""

    env: Mapping[str, str]  # environment of kubectl and helm
    local: str = ""  # command that started the cluster; empty for an existing cluster
    addons: tuple[str, ...] = ()  # addons that the cluster has from its start

    def kubectl(self, *arguments: str, given: str = "") -> str:
        if arguments[0] == "get":  # commands that wait, such as rollout, have a limit of their own
            arguments = (*arguments, f"--request-timeout={ASK_S:.0f}s")
        return run("kubectl", *arguments, given=given, env=self.env)

    def helm(self, *arguments: str, given: str = "") -> str:
        return run("helm", *arguments, given=given, env=self.env)

    def get(self, *arguments: str) -> Object:
        form = () if "--raw" in arguments else ("-o", "json")
        found: Object = json.loads(self.kubectl("get", *arguments, *form))
        return found

    def nodes(self) -> list[str]:
        return sorted(each["metadata"]["name"] for each in self.get("nodes")["items"])

    def node(self, action: str, name: str) -> None:
        run(self.local, "node", action, name)

    def addon(self, *names: str) -> None:
        """Installs the given addons if the cluster does not have them yet."""
        missing = [name for name in names if name not in self.addons]
        if missing:
            run(self.local, "addon", *missing)
        for space in [GREEDY[name] for name in missing if name in GREEDY]:
            self.kubectl("set", "resources", "deployment", "--all", "-n", space, "--requests=cpu=50m,memory=64Mi")
            for name in self.kubectl("get", "deployments", "-n", space, "-o", "name").split():
                self.kubectl("rollout", "status", "-n", space, name, "--timeout=180s")


@dataclass(frozen=True)
class Release:
    """A Helm release of the chart in its own namespace."""

    cluster: Cluster
    name: str  # beginning of the names of all objects; must contain "rootstock"
    namespace: str
    base: tuple[Path, ...]  # values files
    chart: Path = CHART

    def install(self, values: Object, wait: bool = True) -> None:
        """Installs or upgrades the release with these values over the base files."""
        files = [word for path in self.base for word in ("-f", str(path))]
        waiting = ["--wait", "--timeout", "300s"] if wait else []
        arguments = ["upgrade", "--install", self.name, str(self.chart), "-n", self.namespace, *files, "-f", "-", *waiting]
        self.cluster.helm(*arguments, given=json.dumps(values))
        if wait:  # helm does not wait for pods that a rollout allows to be unavailable; a single worker is such a pod
            self.kubectl("rollout", "status", "deployment", "-l", f"app.kubernetes.io/instance={self.name}", "--timeout=300s")

    def kubectl(self, action: str, *arguments: str, given: str = "") -> str:
        return self.cluster.kubectl(action, "-n", self.namespace, *arguments, given=given)

    def get(self, *arguments: str) -> Object:
        found: Object = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def object_name(self, component: str, model: str = "") -> str:
        return "-".join(filter(None, (self.name, component, model)))

    def pods(self, component: str, model: str = "", leaving: bool = False) -> list[Pod]:
        """Returns the pods of a component; terminating pods are included only if `leaving`."""
        found = self.get("pods", "-l", f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}")
        mine = [as_pod(each) for each in found["items"]]
        prefix = self.object_name(component, model)
        return [pod for pod in mine if pod.name.startswith(prefix) and (leaving or not pod.leaving)]

    def ready(self, component: str, model: str = "") -> list[Pod]:
        return [pod for pod in self.pods(component, model) if pod.ready]

    def replicas(self, component: str, model: str = "") -> int:
        """Returns the number of replicas in the spec of the Deployment."""
        replicas: int = self.get("deployment", self.object_name(component, model))["spec"]["replicas"]
        return replicas

    def restart(self, component: str, model: str = "") -> None:
        """Restarts the pods of a component and waits for the end of the rollout."""
        name = f"deployment/{self.object_name(component, model)}"
        self.kubectl("rollout", "restart", name)
        self.kubectl("rollout", "status", name, "--timeout=300s")

    def urls(self) -> list[str]:
        """Returns the URLs of the ready gateways. This machine can reach them."""
        return [f"http://{pod.ip}:8000" for pod in self.ready("gateway")]

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", self.name, "-n", self.namespace, "--wait", "--timeout", "180s")


class BrokenNodes:
    """Stops nodes of a local cluster or cuts them off, and records for each node the action that repairs it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._remedies: dict[str, str] = {}

    def names(self) -> list[str]:
        """Returns the names of all nodes, broken or not."""
        return self._cluster.nodes()

    def take(self, action: str, node: str, remedy: str) -> None:
        self._cluster.node(action, node)
        self._remedies[node] = remedy

    def mend(self) -> None:
        """Repairs all broken nodes by the recorded actions and waits until the nodes are ready."""
        while self._remedies:
            node, remedy = self._remedies.popitem()
            self._cluster.node(remedy, node)
            until(lambda: self._is_ready(node), f"the node {node} to be ready after the action {remedy}")  # noqa: B023

    def _is_ready(self, name: str) -> bool:
        conditions = self._cluster.get("node", name)["status"]["conditions"]
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def start(command: str, nodes: int, flags: Sequence[str] = ()) -> Cluster:
    """Starts a local cluster."""
    run(command, "up", "--nodes", str(nodes), *flags)
    lines = run("sh", "-c", f'eval "$({shlex.quote(command)} env)"; echo "$KUBECONFIG"; echo "$PATH"').splitlines()
    return Cluster({"KUBECONFIG": lines[0], "PATH": lines[1]}, command)
