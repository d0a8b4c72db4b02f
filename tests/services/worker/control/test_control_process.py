"""Tests of operations on a worker process with the demo model on the CPU: memory, completions, profiles and exit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from rootstock_llm.protos import common_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from rootstock_llm.protos import control_pb2 as pb
from rootstock_llm.services.local.ports import HOST, free_ports
from tests.night import NIGHTLY
from tests.services.worker.control.demo_prompt import DEMO, counting

PAGES, PAGE_SIZE = 4096, 16
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers * (keys, values) * heads * head size * bytes of a float32
# PROMPTS: number of prompts of 2,000 tokens. WRITTEN_MIB: least KV in MiB that these prompts write.
PROMPTS, WRITTEN_MIB = (4, 30) if NIGHTLY else (2, 15)
GUARD_S = 180.0


@dataclass(frozen=True)
class Process:
    process: subprocess.Popen[str]  # the worker process
    worker: worker_pb2_grpc.WorkerStub  # stub of the worker's gRPC port
    control: control_pb2_grpc.ControlStub  # stub of its control port

    def greedy_tokens(self, prompt: list[int], count: int = 24) -> list[int]:
        """Returns `count` greedy tokens for the prompt."""
        sampling = common_pb2.SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
        submit = worker_pb2.Submit(handle=1, request_id="r", prompt_ids=prompt, sampling=sampling)
        tokens: list[int] = []
        ended = threading.Event()

        def requests() -> Iterator[worker_pb2.GenerateRequest]:
            yield worker_pb2.GenerateRequest(submits=[submit])
            ended.wait(GUARD_S)  # closing the stream would abort its requests

        for message in self.worker.Generate(requests(), timeout=GUARD_S):
            tokens += message.step.token_ids
            if message.step.finishes:
                ended.set()
                assert message.step.finishes[0].reason == common_pb2.FINISH_REASON_LENGTH, message
        return tokens

    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    port, metrics_port, control_port = free_ports(3)
    folder = tmp_path_factory.mktemp("profiles")
    flags = ["--port", port, "--metrics-port", metrics_port, "--control-port", control_port, "--profile-dir", folder]
    flags += ["--model", DEMO, "--dtype", "float32", "--num-threads", 1, "--worker-id", "w"]
    flags += ["--max-total-tokens", PAGES * PAGE_SIZE, "--page-size", PAGE_SIZE]
    argv = [sys.executable, "-m", "rootstock_llm.services.worker", *map(str, flags)]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        with grpc.insecure_channel(f"{HOST}:{port}") as worker, grpc.insecure_channel(f"{HOST}:{control_port}") as control:
            for channel in (worker, control):
                grpc.channel_ready_future(channel).result(GUARD_S)
            yield Process(process, worker_pb2_grpc.WorkerStub(worker), control_pb2_grpc.ControlStub(control))
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=GUARD_S)[1]
        assert process.returncode == 0 and "Traceback" not in errors, errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("tags", [[pb.MEMORY_TAG_KV_CACHE], [pb.MEMORY_TAG_WEIGHTS], []])
def test_completion_is_unchanged_after_memory_is_released_and_resumed(worker: Process, tags: list[pb.MemoryTag]) -> None:
    prompt = counting()
    before = worker.greedy_tokens(prompt)
    assert len(set(before)) > 3
    worker.control.ReleaseMemory(pb.ReleaseMemoryRequest(tags=tags), timeout=GUARD_S)
    state = worker.control.GetInternalState(pb.GetInternalStateRequest(), timeout=GUARD_S)
    assert state.paused and list(state.released) == (tags or [pb.MEMORY_TAG_KV_CACHE, pb.MEMORY_TAG_WEIGHTS])
    worker.control.ResumeMemory(pb.ResumeMemoryRequest(), timeout=GUARD_S)
    assert not worker.control.GetInternalState(pb.GetInternalStateRequest(), timeout=GUARD_S).paused
    assert worker.greedy_tokens(prompt) == before


def test_release_of_the_kv_cache_returns_memory_to_the_operating_system(worker: Process) -> None:
    for start in range(PROMPTS):
        worker.greedy_tokens([start + 3 + (i * 7 + start) % 900 for i in range(2000)], 2)
    used = worker.control.GetInternalState(pb.GetInternalStateRequest(), timeout=GUARD_S).stats["pages_cached"].whole
    written = used * PAGE_SIZE * TOKEN_BYTES
    assert written > WRITTEN_MIB << 20
    before = worker.rss()
    worker.control.ReleaseMemory(pb.ReleaseMemoryRequest(tags=[pb.MEMORY_TAG_KV_CACHE]), timeout=GUARD_S)
    assert before - worker.rss() > 0.9 * written
    worker.control.ResumeMemory(pb.ResumeMemoryRequest(), timeout=GUARD_S)
    assert len(worker.greedy_tokens([3, 4, 5])) == 24


def test_profile_is_written_to_the_profile_folder(worker: Process) -> None:
    path = worker.control.StartProfile(pb.StartProfileRequest(name="steps"), timeout=GUARD_S).path
    worker.greedy_tokens([3, 4, 5], 6)
    assert worker.control.StopProfile(pb.StopProfileRequest(), timeout=GUARD_S).path == path
    assert path.endswith("/steps-w.trace.json")
    names = {event.get("name", "") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert any(name.startswith("forward ") for name in names)


def test_freeze_gc_call_reports_the_number_of_frozen_objects(worker: Process) -> None:
    assert worker.control.FreezeGc(pb.FreezeGcRequest(), timeout=GUARD_S).objects > 10_000
    assert len(worker.greedy_tokens([3, 4, 5])) == 24
