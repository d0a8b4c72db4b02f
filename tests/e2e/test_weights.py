"""One worker after another loads new weights while responses are generated. No response mixes two model versions."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc

from rootstock_llm.protos import control_pb2, control_pb2_grpc
from rootstock_llm.services.local.ports import HOST, free_ports
from tests.e2e.system import DEMO, System, wait_until
from tests.e2e.test_faults import open_stream

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
        for name in ("worker-0", "worker-1"):
            with grpc.insecure_channel(control_of(system, name)) as channel:
                slow = control_pb2.SlowDownRequest(step_delay_s=STEP_S)
                control_pb2_grpc.ControlStub(channel).SlowDown(
                    slow, timeout=60, wait_for_ready=True
                )  # retries, because the worker may still be starting
        stream = open_stream(system, 400)
        stream.settimeout(60)
        assert stream.recv(4096)
        running = {name: system.metric(name, "sglang:num_running_reqs") for name in ("worker-0", "worker-1")}
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
