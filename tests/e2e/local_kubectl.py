#!/usr/bin/env python3
"""Imitates kubectl for one state store on this machine: only the commands in docs/how-to/kubernetes/backup.md.

These are `exec`, `scale`, `wait`, `apply`, `delete` and `rollout`; any other command fails.

KUBECTL_STORE names a JSON file with `command` and `env` of the store's container, and with `paths`, a map from paths in the
container to paths on this machine. Each pod is a file in the folder `pods` next to the JSON file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import yaml

STORE_POD, STATEFUL_SET = "rootstock-state-0", "rootstock-state"
STORE_FILE = Path(os.environ["KUBECTL_STORE"])
STORE = json.loads(STORE_FILE.read_text())
PODS = STORE_FILE.parent / "pods"
ENV = {**os.environ, **STORE["env"]}
WITHIN_S = 60.0


def main(words: list[str]) -> None:
    namespace, verb, *rest = words[1:]
    assert (words[0], namespace) == ("-n", "rootstock"), words
    match verb, *rest:
        case "exec", "-i", pod, "--", *command:
            run_in(pod, command)
        case "exec", pod, "--", *command:
            run_in(pod, command)
        case "scale", "statefulset", name, replicas if name == STATEFUL_SET:
            {"--replicas=0": stop, "--replicas=1": start}[replicas]()
        case "wait", "--for=delete", pod, _:
            assert not pod_file(pod.removeprefix("pod/")).exists()
        case "wait", "--for=condition=Ready", pod, _:
            assert pod_file(pod.removeprefix("pod/")).exists()
        case "apply", "-f", path:
            made = yaml.safe_load(Path(path).read_text())
            assert made["kind"] == "Pod" and not pod_file(STORE_POD).exists(), "only one pod may use the volume"
            pod_file(made["metadata"]["name"]).touch()
        case "delete", "pod", pod:
            pod_file(pod).unlink()
        case "rollout", "status", "statefulset", name, _ if name == STATEFUL_SET:
            wait_until_ready()
        case _:
            sys.exit(f"unexpected: kubectl {words}")


def pod_file(name: str) -> Path:
    return PODS / name


def here(word: str) -> str:
    """Replaces the container's paths in a word by paths on this machine."""
    return re.sub("|".join(map(re.escape, STORE["paths"])), lambda match: STORE["paths"][match[0]], word)


def run_in(pod: str, command: list[str]) -> NoReturn:
    assert pod_file(pod).exists(), f"the pod {pod} does not run"
    os.execvpe(command[0], [here(word) for word in command], ENV)


def start() -> None:
    assert not list(PODS.iterdir()), "only one pod may use the volume"
    with (STORE_FILE.parent / "store.log").open("ab") as log:
        process = subprocess.Popen(STORE["command"], env=ENV, stdout=log, stderr=log, start_new_session=True)
    pod_file(STORE_POD).write_text(str(process.pid))


def stop() -> None:
    pid = int(pod_file(STORE_POD).read_text())
    os.kill(pid, 15)
    deadline = time.monotonic() + WITHIN_S
    while Path(f"/proc/{pid}").exists() and "\tZ" not in Path(f"/proc/{pid}/status").read_text().replace(" ", "\t"):
        assert time.monotonic() < deadline, "the store must end after SIGTERM"
        time.sleep(0.02)
    pod_file(STORE_POD).unlink()


def wait_until_ready() -> None:
    deadline = time.monotonic() + WITHIN_S
    while subprocess.run(["redis-cli", "ping"], env=ENV, capture_output=True, check=False).stdout != b"PONG\n":
        assert time.monotonic() < deadline, "the store must respond to PING"
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
