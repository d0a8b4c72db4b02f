"""Runs rendered pods as processes on this machine, with their commands and environment, and probes them like the kubelet.

Only references to the cluster are replaced: addresses by loopback addresses, ports by free ports, /app by this repository, and
mounted volumes by folders.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.backoff import NoBackoff
from redis.retry import Retry

from rootstock_llm.services.local.plan import redis_program
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.local.settings import LocalSettings
from tests.chart.pods import PodTemplate, pods, selects
from tests.chart.release import NAMESPACE, REPO, Release

IMAGE_ROOT = "/app/"
REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
ADDRESS = re.compile(
    r"(?:dns|k8s):///(?P<fleet>[a-z0-9.-]+):(?P<fleet_port>\d+)|(?<=//)(?P<url>[a-z0-9-]+\.[a-z0-9.-]+)(?::(?P<port>\d+))?"
)
WRITABLE = ("emptyDir", "ephemeral")

Container = Mapping[str, Any]
Secrets = Mapping[str, Mapping[str, str]]


def environment(release: Release, pod: PodTemplate, container: Container, secrets: Secrets) -> dict[str, str]:
    """Returns a container's environment variables. Variables of `env` override those of `envFrom`; $(NAME) is replaced.

    Raises:
        KeyError: a referenced ConfigMap, Secret or key does not exist.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            found |= {key: str(value) for key, value in release.get("ConfigMap", source["configMapRef"]["name"])["data"].items()}
        else:
            found |= secrets[source["secretRef"]["name"]]
    for variable in container.get("env", []):
        value = variable.get("value", "") if "valueFrom" not in variable else _from(release, pod, variable["valueFrom"], secrets)
        if value is not None:
            found[variable["name"]] = REFERENCE.sub(lambda match: found.get(match[1], match[0]), value)
    return found


def _from(release: Release, pod: PodTemplate, source: Mapping[str, Any], secrets: Secrets) -> str | None:
    if "fieldRef" in source:
        name = f"{pod.owner['metadata']['name']}-0"
        facts = {"metadata.name": name, "metadata.namespace": NAMESPACE, "status.podIP": HOST, "spec.nodeName": "node"}
        return facts[source["fieldRef"]["fieldPath"]]
    if "secretKeyRef" in source:
        reference = source["secretKeyRef"]
        missing = reference.get("optional") and reference["name"] not in secrets
        return None if missing else secrets[reference["name"]][reference["key"]]
    if "resourceFieldRef" in source:
        return _resource(pod, source["resourceFieldRef"])
    reference = source["configMapKeyRef"]
    return str(release.get("ConfigMap", reference["name"])["data"][reference["key"]])


def _resource(pod: PodTemplate, reference: Mapping[str, str]) -> str:
    """Returns a CPU quantity in whole cores, rounded up like the kubelet."""
    kind, name = reference["resource"].split(".")
    assert name == "cpu" and reference.get("divisor", "1") == "1", reference
    (container,) = (each for each in pod.containers() if each["name"] == reference["containerName"])
    asked = str(container["resources"][kind][name])
    return str(math.ceil(float(asked[:-1]) / 1000 if asked.endswith("m") else float(asked)))


@dataclass
class Machine:
    """Runs the pods of a release on this machine."""

    release: Release
    folder: Path  # parent folder of the mounted volumes
    secrets: Secrets = field(default_factory=dict)  # keys and values by name of the Secret
    ports: dict[tuple[str, int], int] = field(default_factory=dict)  # by (component, container port): port of this machine

    def __post_init__(self) -> None:
        wanted = sorted({(pod.component, port) for pod in pods(self.release) for port in pod.ports().values()})
        self.ports = dict(zip(wanted, free_ports(len(wanted)), strict=True))

    def localized(self, pod: PodTemplate, text: str) -> str:
        """Replaces the cluster's addresses, ports and folders in `text` by this machine's.

        Args:
            text: word of a command, or value of a variable.
        """
        text = text.replace("0.0.0.0", HOST)
        text = ADDRESS.sub(self._address, text)
        if mounts := self._mounts(pod):  # in one pass, so that a replaced folder is not replaced again
            paths = "|".join(map(re.escape, mounts))
            text = re.sub(rf"(?<![\w/])({paths})(?![\w])", lambda match: str(mounts[match[1]]), text)
        text = re.sub(rf"(?<![\w/]){re.escape(IMAGE_ROOT)}", f"{REPO}/", text)
        return str(self.ports.get((pod.component, int(text)), text)) if text.isdecimal() else text

    def _address(self, match: re.Match[str]) -> str:
        if match["fleet"]:
            return f"{HOST}:{self._target(match['fleet'], int(match['fleet_port']), headless=True)}"
        return f"{HOST}:{self._target(match['url'], int(match['port'] or 80), headless=False)}"

    def _target(self, host: str, port: int, headless: bool) -> int:
        """Returns this machine's port of the pods behind a Service.

        Args:
            port: port of the Service; if `headless`, port of the pods.
        """
        name, namespace = host.split(".")[:2]
        assert namespace == NAMESPACE, f"{host} is in the namespace {namespace}, not {NAMESPACE}"
        service = self.release.get("Service", name)["spec"]
        selected = [pod for pod in pods(self.release) if selects({"matchLabels": service["selector"]}, pod.labels)]
        components = {pod.component for pod in selected}
        assert len(components) == 1, f"the Service {host} must select pods of one component, not {components}"
        number: int | str = port
        if headless:
            assert service.get("clusterIP") == "None", f"{host} must resolve to pods"
        if service.get("clusterIP") != "None":
            number = next(each.get("targetPort", port) for each in service["ports"] if each["port"] == port)
        return self.ports[components.pop(), selected[0].ports()[number] if isinstance(number, str) else number]

    def _path(self) -> str:
        """Returns a PATH that contains redis-server, because the shell command of the Redis container calls it by name."""
        programs = self.folder / "bin"
        if not programs.exists():
            programs.mkdir(parents=True)
            (programs / "redis-server").symlink_to(_program("redis-server"))
        return f"{programs}:{os.environ['PATH']}"

    def _mounts(self, pod: PodTemplate) -> dict[str, Path]:
        """Returns folders by mount path, longest path first. Volumes that pods cannot write are the repository's `models`."""
        kinds = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        found: dict[str, Path] = {}
        for container in pod.containers():
            for mount in container.get("volumeMounts", []):
                writable = any(kind in kinds.get(mount["name"], {}) for kind in WRITABLE)
                found[mount["mountPath"]] = self.folder / pod.component / mount["name"] if writable else REPO / "models"
        return {path: found[path] for path in sorted(found, key=len, reverse=True)}

    def start(self, pod: PodTemplate, container: Container) -> Running:
        argv = [self.localized(pod, word) for word in [*container.get("command", []), *container.get("args", [])]]
        values = environment(self.release, pod, container, self.secrets)
        env = {name: self.localized(pod, value) for name, value in values.items()}
        mounts = {path: folder for path, folder in self._mounts(pod).items() if path in _mount_paths(container)}
        if "/tmp" in mounts:
            env["TMPDIR"] = str(mounts["/tmp"])
        writable = [path for path in mounts.values() if path.is_relative_to(self.folder)]
        for path in writable:
            path.mkdir(parents=True, exist_ok=True)
        program = _program(argv[0])
        log = self.folder / f"{pod.component}-{container['name']}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*_read_only(writable), program, *argv[1:]],
                cwd=REPO,
                env={"PATH": self._path(), **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        return Running(self, pod, container, process, log)


def _mount_paths(container: Container) -> set[str]:
    return {mount["mountPath"] for mount in container.get("volumeMounts", [])}


def _program(name: str) -> str:
    """Returns the path of this machine's program with the same name as the image's program."""
    if name in ("python", "python3"):
        return sys.executable
    if name == "redis-server":
        return redis_program(LocalSettings(_cli_parse_args=False).redis_server)  # type: ignore[call-arg]
    program = shutil.which(name)
    assert program, f"this test needs the program {name}, which is not on this machine"
    return program


def _read_only(writable: list[Path]) -> list[str]:
    """Returns a command prefix that makes the file system read-only except for these folders, as in the container.

    The prefix is empty if this process may not create mounts.
    """
    probe = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    binds = "".join(f'mount --bind "{path}" "{path}" && ' for path in writable)
    gone = "2>/dev/null || ! test -d"  # ignores file systems that other programs unmount during the loop
    locked = "".join(f"{{ mount -o remount,bind,ro {path} {gone} {path}; }} && " for path in _file_systems())
    allowed = shutil.which("unshare") and subprocess.run([*probe, "mount --bind / /mnt"], capture_output=True).returncode == 0
    return [*probe, f'{binds}{locked}exec "$@"', "sh"] if allowed else []


def _file_systems() -> list[str]:
    """Returns the mount points of this machine's file systems outside /proc, /dev, /sys and /run."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted({path for path in mounted if Path(path).is_dir() and not path.startswith(("/proc", "/dev", "/sys", "/run"))})


@dataclass
class Running:
    machine: Machine
    pod: PodTemplate
    container: Container
    process: subprocess.Popen[bytes]
    log: Path

    def passes(self, probe: Mapping[str, Any]) -> bool:
        """Returns whether one attempt of a probe succeeds within its timeout."""
        timeout = probe.get("timeoutSeconds", 1)
        if "grpc" in probe:
            return _serving(self._port(probe["grpc"]["port"]), probe["grpc"].get("service", ""), timeout)
        if "httpGet" in probe:
            return _http_status(self._port(probe["httpGet"]["port"]), probe["httpGet"].get("path", "/"), timeout) in range(
                200, 400
            )
        if "tcpSocket" in probe:
            return _connects(self._port(probe["tcpSocket"]["port"]), timeout)
        command = [self.machine.localized(self.pod, word) for word in probe["exec"]["command"]]
        env = environment(self.machine.release, self.pod, self.container, self.machine.secrets)
        if "redis-cli" in command[-1]:
            return _redis_replies(self._port(6379), env["REDISCLI_AUTH"], timeout)
        return (
            subprocess.run(command, env={"PATH": os.environ["PATH"], **env}, capture_output=True, timeout=timeout).returncode == 0
        )

    def _port(self, port: int | str) -> int:
        number = self.pod.ports()[port] if isinstance(port, str) else port
        return self.machine.ports[self.pod.component, number]

    def wait_for(self, key: str, seconds: float) -> None:
        """Waits until the container's probe `key` passes. Fails if the process ends first, or after `seconds`."""
        self.wait(lambda: self.passes(self.container[key]), f"{key} of {self.pod.role}", seconds)

    def wait(self, holds: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"the process ended while the test waited for {what}.\n{self.text()}"
            assert time.monotonic() < deadline, f"the test waited {seconds} s for {what}.\n{self.text()}"
            time.sleep(0.05)

    def status(self, port: str, path: str) -> int:
        return _http_status(self._port(port), path, 5)

    def stop(self, seconds: float) -> int:
        """Sends SIGTERM, like the kubelet, and returns the exit status. After `seconds`, kills the process and fails."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        finally:
            self.kill()

    def status_of_exit(self, seconds: float) -> int:
        """Waits for the end of the program and returns its exit status. After `seconds`, kills the program and fails."""
        try:
            return self.process.wait(seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def _serving(port: int, service: str, timeout: float) -> bool:
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _redis_replies(port: int, password: str, timeout: float) -> bool:
    """Returns whether Redis responds to PING. Replaces the probe's redis-cli, which this machine may lack."""
    with redis.Redis(HOST, port, password=password, socket_timeout=timeout, retry=Retry(NoBackoff(), 0)) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def _connects(port: int, timeout: float) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout):
            return True
    except OSError:
        return False


def _http_status(port: int, path: str, timeout: float) -> int:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=timeout) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
