"""Workers with different weights of one model. No response and no cached prefix mixes two versions or forms of the weights."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from rootstock_llm.protos import control_pb2, control_pb2_grpc
from rootstock_llm.services.local.ports import HOST, free_ports
from tests.e2e.system import DEMO, System, wait_until
from tests.e2e.test_faults import open_stream
from tests.night import NIGHTLY
from tests.services.redis_server import redis_server

WORKERS = ("worker-0", "worker-1")
PROMPT = [3 + at * 7 % 1200 for at in range(300)]
NUM_NEW = 400  # tokens of a response
PAGE = 16
STEP_S = 0.1  # pause between steps in seconds; a response then takes longer than the other worker's load of new weights


def control_of(system: System, name: str) -> str:
    argv = system.parts[name].command.argv
    return f"{HOST}:{argv[argv.index('--control-port') + 1]}"


def train(folder: Path) -> None:
    """Replaces the model file by one with other weights. A process that has opened the old file still reads the old weights."""
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-2] ^= 0x40
    (folder / "new").write_bytes(data)
    (folder / "new").rename(folder / "model.safetensors")


def renew(address: str) -> tuple[str, str]:
    """Makes a worker load the weights in its folder. Returns the model's revisions before and after."""
    with grpc.insecure_channel(address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        before = control.GetInternalState(control_pb2.GetInternalStateRequest(), timeout=60).revision
        control.ReleaseMemory(control_pb2.ReleaseMemoryRequest(tags=[control_pb2.MEMORY_TAG_WEIGHTS]), timeout=60)
        control.ResumeMemory(control_pb2.ResumeMemoryRequest(), timeout=60)
        return before, control.GetInternalState(control_pb2.GetInternalStateRequest(), timeout=60).revision


def test_response_ends_with_an_error_when_the_model_version_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(DEMO, folder)
    with System(tmp_path / "logs", model=str(folder), workers=2, admin_port=free_ports(1)[0]) as system:
        for name in WORKERS:
            with grpc.insecure_channel(control_of(system, name)) as channel:
                slow = control_pb2.SlowDownRequest(step_delay_s=STEP_S)
                control_pb2_grpc.ControlStub(channel).SlowDown(
                    slow, timeout=60, wait_for_ready=True
                )  # retries, because the worker may still be starting
        stream = open_stream(system, 400)
        stream.settimeout(60)
        assert stream.recv(4096)
        running = {name: system.metric(name, "sglang:num_running_reqs") for name in WORKERS}
        first, second = sorted(running, key=lambda name: -running[name])
        train(folder)
        before, after = renew(control_of(system, second))
        assert before and after and before != after
        system.kill(first)
        wait_until(lambda: system.metric("gateway", "rootstock_gateway_queue_length") == 1, 60, "the request to be queued")
        system.start(first)  # with the new weights
        data = b""
        while chunk := stream.recv(65536):
            data += chunk
            if b"weights_not_served" in data:
                break
        assert b'"code":"weights_not_served"' in data and b"[DONE]" not in data
        status, _ = system.post("/v1/completions", {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0})
        assert status == 200


class TwoWorkers(System):
    """A system with two workers of one model folder. `forms` has each worker's value of --quantization."""

    def __init__(self, log_dir: Path, forms: tuple[str, str], worker_flags: str = "") -> None:
        super().__init__(log_dir, workers=2, worker_flags=worker_flags)
        for name, form in zip(WORKERS, forms, strict=True):
            self.parts[name].command.env["ROOTSTOCK_QUANTIZATION"] = form

    def wait_ready(self) -> None:
        super().wait_ready()
        wait_until(lambda: self.num_connected == 2, 120, "both workers")

    @property
    def num_connected(self) -> float:
        return self.metric("gateway", "rootstock_gateway_connected", service="worker")

    def body(self, **body: Any) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
        return {"input_ids": PROMPT, "sampling_params": params, **body}

    def generate(self) -> dict[str, Any]:
        status, answer = self.post("/generate", self.body())
        assert status == 200, answer
        return answer

    def computing(self) -> str:
        """Returns the name of the worker that runs a request."""
        (name,) = [name for name in WORKERS if self.metric(name, "sglang:num_running_reqs")]
        return name


@pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
@pytest.mark.parametrize("forms", [("int8", "int8"), ("int4", "int4"), ("auto", "int8")], ids="-".join)
def test_stream_moves_only_to_a_worker_with_the_same_weights(tmp_path: Path, forms: tuple[str, str]) -> None:
    """The worker that computes the response is killed. If the other worker has another form, the stream waits for a restart."""
    with TwoWorkers(tmp_path, forms) as system:
        expected = system.generate()["output_ids"]
        with httpx.stream("POST", f"{system.url}/generate", json=system.body(stream=True), timeout=60) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            for _ in range(20):
                next(lines)
            first = system.computing()
            (second,) = set(WORKERS) - {first}
            before = system.metric(second, "sglang:generation_tokens_total")
            system.children[first].signal(signal.SIGKILL)
            if forms[0] != forms[1]:
                wait_until(
                    lambda: system.metric("gateway", "rootstock_gateway_queue_length") == 1, 60, "the request to be queued"
                )
                system.start(first)
            *_, last, done = lines
        assert done == "[DONE]"
        assert httpx.Response(200, text=last).json()["output_ids"] == expected
        moved = system.metric(second, "sglang:generation_tokens_total") > before
        assert moved is (forms[0] == forms[1])


@pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
@pytest.mark.parametrize("forms", [("int8", "int8"), ("auto", "int8")], ids="-".join)
def test_stored_pages_are_read_only_by_a_worker_with_the_same_weights(tmp_path: Path, forms: tuple[str, str]) -> None:
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    with redis_server() as redis:
        storage = f"--hicache-storage-url {redis.url} --hicache-storage-secret-file {tmp_path / 'secret'}"
        tiers = (
            "--enable-hierarchical-cache --hicache-size 1 --hicache-write-policy write_through --hicache-storage-backend redis"
        )
        flags = f"{tiers} {storage}"
        with TwoWorkers(tmp_path / "system", forms, flags) as system:
            system.generate()
            stored = {name: system.metric(name, "sglang:hicache_backup_tokens_total") for name in WORKERS}
            first = max(stored, key=lambda name: stored[name])
            whole = (len(PROMPT) + NUM_NEW - 1) // PAGE * PAGE
            wait_until(lambda: system.metric(first, "sglang:backuped_tokens_total") >= whole, 60, "all pages to be stored")
            system.kill(first)
            cached = system.generate()["meta_info"]["cached_tokens"]
            assert cached == ((len(PROMPT) - 1) // PAGE * PAGE if forms[0] == forms[1] else 0)
