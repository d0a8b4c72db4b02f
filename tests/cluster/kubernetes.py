"""A cluster as tests see it: kubectl and helm by its kubeconfig, and what a local one can do besides.

A local one is started by a command of its own (`CLUSTER`): `up --nodes N FLAGS`, `env`, `load FILE ...`, `addon NAME ...`,
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
WITHIN_S = 240.0
GREEDY = {"keda": "keda", "prometheus": "monitoring"}  # namespaces of addons that ask for half of two nodes, and use little
ASK_S = 60.0  # for one question to an API server


class CommandFailed(Exception):
    """A program ended with another status than 0, or not in time."""


def run(*command: str, given: str = "", env: Mapping[str, str] | None = None, limit_s: float = 600) -> str:
    """What it writes to stdout. Raises CommandFailed with what it said."""
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{shlex.join(command)}\nhas not ended in {limit_s:.0f} s: {error.stderr!r}") from None
    if done.returncode:
        raise CommandFailed(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def until(holds: Callable[[], Any], what: str, within_s: float = WITHIN_S, pause_s: float = 0.5) -> float:
    """Seconds that it took. A look that fails is one that sees nothing; the last such fault is told at the end of the wait."""
    begun, fault = time.monotonic(), ""
    while True:
        try:
            if holds():
                return time.monotonic() - begun
            fault = ""
        except (CommandFailed, httpx.HTTPError) as error:
            fault = f"; the last look failed: {type(error).__name__}: {error}"
        assert time.monotonic() - begun < within_s, f"waited {within_s:.0f} s in vain for {what}{fault}"
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
    """local: the command that started it; empty for one that was there before. env: of kubectl and helm. addons: that it has from
    its begin on."""

    env: Mapping[str, str]
    local: str = ""
    addons: tuple[str, ...] = ()

    def kubectl(self, *arguments: str, given: str = "") -> str:
        if arguments[0] == "get":  # what waits for something says for how long itself
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
        """Those that it has not."""
        missing = [name for name in names if name not in self.addons]
        if missing:
            run(self.local, "addon", *missing)
        for space in [GREEDY[name] for name in missing if name in GREEDY]:
            self.kubectl("set", "resources", "deployment", "--all", "-n", space, "--requests=cpu=50m,memory=64Mi")
            for name in self.kubectl("get", "deployments", "-n", space, "-o", "name").split():
                self.kubectl("rollout", "status", "-n", space, name, "--timeout=180s")


@dataclass(frozen=True)
class Release:
    """One installation of the chart in a namespace of its own. name: one that the names of its objects begin with as it is."""

    cluster: Cluster
    name: str
    namespace: str
    base: tuple[Path, ...]
    chart: Path = CHART

    def install(self, values: Object, wait: bool = True) -> None:
        """Or upgrade. values: all beside the base."""
        files = [word for path in self.base for word in ("-f", str(path))]
        waiting = ["--wait", "--timeout", "300s"] if wait else []
        arguments = ["upgrade", "--install", self.name, str(self.chart), "-n", self.namespace, *files, "-f", "-", *waiting]
        self.cluster.helm(*arguments, given=json.dumps(values))
        if wait:  # helm has seen enough once no more pods are missing than a rollout may do without: of one worker, none is there
            self.kubectl("rollout", "status", "deployment", "-l", f"app.kubernetes.io/instance={self.name}", "--timeout=300s")

    def kubectl(self, action: str, *arguments: str, given: str = "") -> str:
        return self.cluster.kubectl(action, "-n", self.namespace, *arguments, given=given)

    def get(self, *arguments: str) -> Object:
        found: Object = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def object_name(self, component: str, model: str = "") -> str:
        return "-".join(filter(None, (self.name, component, model)))

    def pods(self, component: str, model: str = "", leaving: bool = False) -> list[Pod]:
        """leaving: also those that are on their way out."""
        found = self.get("pods", "-l", f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}")
        mine = [as_pod(each) for each in found["items"]]
        prefix = self.object_name(component, model)
        return [pod for pod in mine if pod.name.startswith(prefix) and (leaving or not pod.leaving)]

    def ready(self, component: str, model: str = "") -> list[Pod]:
        return [pod for pod in self.pods(component, model) if pod.ready]

    def replicas(self, component: str, model: str = "") -> int:
        """That its Deployment asks for."""
        replicas: int = self.get("deployment", self.object_name(component, model))["spec"]["replicas"]
        return replicas

    def restart(self, component: str, model: str = "") -> None:
        """A rollout, to its end."""
        name = f"deployment/{self.object_name(component, model)}"
        self.kubectl("rollout", "restart", name)
        self.kubectl("rollout", "status", name, "--timeout=300s")

    def urls(self) -> list[str]:
        """Of its ready gateways, from this machine."""
        return [f"http://{pod.ip}:8000" for pod in self.ready("gateway")]

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", self.name, "-n", self.namespace, "--wait", "--timeout", "180s")


class BrokenNodes:
    """Nodes of a local cluster that something was done to, and what undoes it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._remedies: dict[str, str] = {}

    def names(self) -> list[str]:
        """Of all nodes."""
        return self._cluster.nodes()

    def take(self, action: str, node: str, remedy: str) -> None:
        self._cluster.node(action, node)
        self._remedies[node] = remedy

    def mend(self) -> None:
        """All of them, until they are ready."""
        while self._remedies:
            node, remedy = self._remedies.popitem()
            self._cluster.node(remedy, node)
            until(lambda: self._is_ready(node), f"{node} again, which was asked to {remedy}")  # noqa: B023

    def _is_ready(self, name: str) -> bool:
        conditions = self._cluster.get("node", name)["status"]["conditions"]
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def start(command: str, nodes: int, flags: Sequence[str] = ()) -> Cluster:
    """A local one."""
    run(command, "up", "--nodes", str(nodes), *flags)
    said = run("sh", "-c", f'eval "$({shlex.quote(command)} env)"; echo "$KUBECONFIG"; echo "$PATH"').splitlines()
    return Cluster({"KUBECONFIG": said[0], "PATH": said[1]}, command)
