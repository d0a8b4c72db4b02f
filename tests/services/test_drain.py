"""SIGTERM of tokenizer and detokenizer processes with work in flight."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from rootstock.v1 import detokenizer_pb2, detokenizer_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from services.local.ports import HOST, free_ports
from services.shared.rpc import CHANNEL_OPTIONS

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
WAIT_S = 30
GRACE_S = 120  # longer than the test may last: nothing here may wait it out


@contextlib.contextmanager
def process_of(service: str) -> Iterator[tuple[subprocess.Popen[bytes], grpc.Channel, int]]:
    port, metrics_port = free_ports(2)
    argv = [sys.executable, "-m", f"services.{service}", "--model", str(DEMO), "--port", str(port)]
    argv += ["--metrics-port", str(metrics_port), "--grace-s", str(GRACE_S)]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"{HOST}:{port}", options=CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(WAIT_S)
            yield process, channel, metrics_port
    finally:
        process.kill()
        process.wait()


def test_calls_in_flight_are_answered() -> None:
    words = [f"word{n}" for n in range(50_000)]
    text = " ".join(random.Random(1).choices(words, k=150_000))
    with process_of("tokenizer") as (process, channel, metrics_port):
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Encode.future(tokenizer_pb2.EncodeRequest(texts=[text]), timeout=WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while b"rootstock_tokenizer_in_flight 1.0" not in urllib.request.urlopen(f"http://{HOST}:{metrics_port}/metrics").read():
            assert time.monotonic() < deadline and not call.done(), "never seen in flight"
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        assert len(call.result(WAIT_S).prompts[0].ids) > 150_000
        assert process.wait(WAIT_S) == 0


def test_streams_end_at_once() -> None:
    with process_of("detokenizer") as (process, channel, _):
        stub = detokenizer_pb2_grpc.DetokenizerStub(channel)  # type: ignore[no-untyped-call]
        with ended_by_the_peer(stub) as answers:
            assert next(answers)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError) as raised:
                next(answers)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert process.wait(WAIT_S) == 0


@contextlib.contextmanager
def ended_by_the_peer(stub: detokenizer_pb2_grpc.DetokenizerStub) -> Iterator[Iterator[Message]]:
    """The answers of a stream whose client sends one empty batch and never ends it."""
    over = False

    def batches() -> Iterator[detokenizer_pb2.DecodeBatch]:
        yield detokenizer_pb2.DecodeBatch()
        while not over:
            time.sleep(0.01)

    try:
        yield stub.Decode(batches(), timeout=WAIT_S)
    finally:
        over = True
