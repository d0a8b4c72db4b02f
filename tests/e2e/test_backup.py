"""Runs the commands of docs/how-to/kubernetes/backup.md on a real Redis with the arguments that the chart sets."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai import OpenAI
from openai.types.responses import Response

from rootstock_llm.services.local.ports import HOST, free_ports
from tests.chart.pods import pod
from tests.chart.release import merged, render
from tests.chart.variants import VARIANTS
from tests.e2e.system import ROOT, System, wait_until

pytestmark = pytest.mark.needs("redis-server")  # its Debian package also installs redis-cli
PAGE = (ROOT / "docs/how-to/kubernetes/backup.md").read_text()
KUBECTL = Path(__file__).with_name("local_kubectl.py")
PASSWORD = "letters"
KEPT_FILES = 7
COMMAND_S = 120.0


def blocks(heading: str, language: str) -> list[str]:
    """Returns the code blocks of a section of the page, without their indentation."""
    section = re.split(r"^## ", PAGE, flags=re.M)
    (text,) = [each for each in section if each.startswith(f"{heading}\n")]
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.M | re.S)
    assert found, f"section {heading} has no {language} block"
    return [re.sub(rf"^{indent}", "", body, flags=re.M) for indent, body in found]


class Store:
    """The state store's pod as processes on this machine. run() has kubectl (local_kubectl.py) and redis-cli on its PATH."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://:{PASSWORD}@{HOST}:{self.port}/0"
        self.volume, self._folder, self.work = folder / "volume", folder, folder / "work"
        programs = folder / "bin"
        for each in (self.volume, self.work, programs, folder / "pods", folder / "scratch"):
            each.mkdir(parents=True)
        container = pod(render(merged(VARIANTS["kept"], {})), "state").container()
        words = {"6379": str(self.port), "0.0.0.0": HOST, "/data": str(self.volume)}
        content = {
            "command": [words.get(word, word) for word in [*container["command"], *container["args"]]],
            "env": {"REDISCLI_AUTH": PASSWORD},
            "paths": {"/data": str(self.volume), "/tmp/": f"{folder}/scratch/"},
        }
        (folder / "store.json").write_text(json.dumps(content))
        scripts = {
            "kubectl": f'exec {sys.executable} {KUBECTL} "$@"',
            "redis-cli": f'[ "$1 $2" != "-h rootstock-state" ] || shift 2; exec {shutil.which("redis-cli")} -p {self.port} "$@"',
        }
        for name, line in scripts.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)
        self._env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "KUBECTL_STORE": str(folder / "store.json")}

    def run(self, script: str, **env: str) -> str:
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=self.work, env={**self._env, **env}, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def scale(self, replicas: int) -> None:
        self.run(f"kubectl -n rootstock scale statefulset rootstock-state --replicas={replicas}")
        if replicas:
            self.run("kubectl -n rootstock rollout status statefulset rootstock-state --timeout=600s")

    def wipe(self) -> None:
        shutil.rmtree(self.volume)
        self.volume.mkdir()

    def end(self) -> None:
        running = self._folder / "pods" / "rootstock-state-0"
        if running.exists():
            os.kill(int(running.read_text()), signal.SIGKILL)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "cluster")
    try:
        made.scale(1)
        yield made
    finally:
        made.end()


@pytest.fixture
def client(store: Store, tmp_path: Path) -> Iterator[OpenAI]:
    flags = f"--state-redis-url {store.url}"
    with System(tmp_path / "system", state_dir="", gateway_flags=flags, log_level="warning") as system:
        yield OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60)


def answered(client: OpenAI, text: str, **more: Any) -> Response:
    response = client.responses.create(model="demo", input=text, max_output_tokens=8, **more)
    assert response.store, "the response must be stored"
    return response


def finished_batch(client: OpenAI) -> tuple[str, bytes, str]:
    """Runs a batch to its end. Returns the id and the content of its input file, and the batch's id."""
    body = {"model": "demo", "prompt": "Count from 3 on: ", "max_tokens": 4}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    content = json.dumps(line).encode() + b"\n"
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60, "the batch to end")
    return file.id, content, batch.id


def output_of(client: OpenAI, batch_id: str) -> bytes:
    output_id = client.batches.retrieve(batch_id).output_file_id
    assert output_id is not None
    return client.files.content(output_id).content


def test_documented_commands_restore_stored_objects_into_an_empty_volume(store: Store, client: OpenAI) -> None:
    first = answered(client, "The first turn.")
    second = answered(client, "The second turn.", previous_response_id=first.id)
    file_id, content, batch_id = finished_batch(client)
    output = output_of(client, batch_id)
    for commands in blocks("Back up by hand", "sh"):
        store.run(commands)
    later = answered(client, "After the backup.")

    store.scale(0)
    store.wipe()
    store.scale(1)
    (manifest,) = blocks("Restore", "yaml")
    (store.work / "state-restore.yaml").write_text(manifest)
    printed = "".join(store.run(commands) for commands in blocks("Restore", "sh"))

    assert "aof_enabled:1" in printed
    assert [path.name for path in store.volume.iterdir()] == ["appendonlydir"]
    wait_until(lambda: is_stored(client, first), 60, "the gateway to reach the store")
    found = client.responses.retrieve(second.id)
    assert (found.output_text, found.previous_response_id) == (second.output_text, first.id)
    assert client.files.content(file_id).content == content
    assert client.batches.retrieve(batch_id).status == "completed" and output_of(client, batch_id) == output
    assert not is_stored(client, later)

    third = answered(client, "The third turn.", previous_response_id=second.id)
    store.scale(0)
    store.scale(1)
    wait_until(lambda: is_stored(client, third), 60, "a record of the restored store after a restart")


def is_stored(client: OpenAI, response: Response) -> bool:
    """Whether the gateway returns the response. False if the response is unknown, or if the gateway cannot reach the store."""
    try:
        return client.responses.retrieve(response.id).output_text == response.output_text
    except (openai.NotFoundError, openai.InternalServerError):
        return False


def test_nightly_backup_writes_a_complete_file_and_keeps_seven_files(store: Store) -> None:
    (text,) = blocks("Back up every night", "yaml")
    job, *_ = yaml.safe_load_all(text)
    shell, flags, script = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (shell, flags) == ("sh", "-ec")
    store.run("redis-cli set name value", REDISCLI_AUTH=PASSWORD)
    backups = store.work / "backups"
    backups.mkdir()
    old = [backups / f"state-2020010{day}T021700Z.rdb" for day in range(1, 9)]
    for path in old:
        path.touch()
    store.run(script.replace("/backups", str(backups)), REDISCLI_AUTH=PASSWORD)
    kept = sorted(backups.iterdir())
    assert kept[:-1] == old[-(KEPT_FILES - 1) :]
    assert kept[-1].read_bytes().startswith(b"REDIS")


def test_nightly_backup_fails_when_the_store_is_unreachable(store: Store) -> None:
    (text,) = blocks("Back up every night", "yaml")
    job, *_ = yaml.safe_load_all(text)
    script = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    store.scale(0)
    backups = store.work / "backups"
    backups.mkdir()
    with pytest.raises(AssertionError):
        store.run(script.replace("/backups", str(backups)), REDISCLI_AUTH=PASSWORD)
    assert not list(backups.glob("*.rdb"))
    store.scale(1)
