"""Mutual TLS between all processes and to both Redis servers: connections without it fail, and certificates can be replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.shared.tls.certificate_files import CHECK_S
from tests.certificates import Authority, Mounted
from tests.e2e.secured import REDIS, SecuredSystem, role_of
from tests.e2e.system import START_S, wait_until

pytestmark = [pytest.mark.needs("openssl", "redis-server")]
STREAMS = 12
WORKERS, GATEWAYS = ("prefill-0", "decode-0"), ("gateway-0", "gateway-1")
PARTS = ("tokenizer", "detokenizer", *WORKERS, *GATEWAYS)


@pytest.fixture
def system(tmp_path: Path) -> Iterator[SecuredSystem]:
    """A system with every kind of connection: two gateways, a prefill and a decode worker, and control services."""
    (admin_port,) = free_ports(1)
    flags = {"gateway_flags": "--disaggregation-min-tokens 24", "admin_port": admin_port, "max_total_tokens": 8192}
    roles = {"prefill_workers": 1, "decode_workers": 1, "gateways": 2}
    with SecuredSystem(tmp_path, Authority(tmp_path / "authority"), **roles, **flags) as started:
        yield started


class Streams:
    """Clients of one gateway: STREAMS threads that each send one request after another until exit.

    `failed` has the faults of requests.
    """

    def __init__(self, system: SecuredSystem) -> None:
        self._system = system
        self._over = threading.Event()
        self.failed: list[str] = []
        self.ended = 0
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(STREAMS)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()

    def wait_for_more(self, count: int, what: str) -> None:
        """Waits until `count` more requests have completed. `what` describes the state, for the message."""
        enough = self.ended + count
        wait_until(lambda: self.ended >= enough or bool(self.failed), 90, f"{count} more completed requests {what}")
        assert not self.failed, self.failed[:3]

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            text = f"{number}.{turn} " + "count from 3 to 9, " * 40  # long enough that the gateway uses the prefill worker
            asked = {"model": "demo", "prompt": text, "max_tokens": 40, "stream": True, "ignore_eos": True}
            request = urllib.request.Request(
                f"{self._system.url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=80) as response:
                    stream = response.read().decode()
            except OSError as error:
                self.failed.append(repr(error))
                continue
            if "data: [DONE]" in stream and '"error"' not in stream:
                self.ended += 1
            else:
                self.failed.append(stream[-300:])


def listening(system: SecuredSystem, name: str) -> set[int]:
    """Returns the TCP ports on which a process listens."""
    found = psutil.Process(system.children[name].pid).net_connections("inet")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def code_of(channel: grpc.Channel) -> grpc.StatusCode:
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def plain(port: int) -> grpc.StatusCode:
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        return code_of(channel)


def with_files(port: int, mounted: Mounted, role: str, authorities: bytes) -> grpc.StatusCode:
    certificate, key, _ = (path.read_bytes() for path in mounted.paths)
    credentials = grpc.ssl_channel_credentials(authorities, key, certificate)
    options = [("grpc.ssl_target_name_override", f"rootstock-{role}")]
    with grpc.secure_channel(f"{HOST}:{port}", credentials, options=options) as channel:
        return code_of(channel)


def port_of(system: SecuredSystem, name: str, flag: str = "--port") -> int:
    argv = system.parts[name].command.argv
    return int(argv[argv.index(flag) + 1])


def served_over_tls(system: SecuredSystem) -> dict[str, tuple[int, str]]:
    """Returns (port, certificate role) of each gRPC server that uses TLS."""
    ports = {name: (port_of(system, name), role_of(name)) for name in PARTS if role_of(name) != "gateway"}
    ports |= {f"{name}'s peers": (port_of(system, name, "--peer-port"), "gateway") for name in GATEWAYS}
    return ports | {f"{name}'s control": (port_of(system, name, "--control-port"), "worker") for name in WORKERS}


def test_connections_without_a_certificate_or_without_a_token_are_refused(system: SecuredSystem, tmp_path: Path) -> None:
    wait_until(lambda: connected(system), 60, "both gateways to be connected")
    code, _ = system.post("/v1/completions", {"model": "demo", "prompt": "3 4 5", "max_tokens": 4})
    assert code == 200
    tls, health = served_over_tls(system), set(system.health_ports.values())
    answering = {port for name in PARTS for port in listening(system, name) if plain(port) is grpc.StatusCode.OK}
    assert answering == health, "only the ports of health probes may serve gRPC without TLS"
    for port in health:
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            generate = channel.stream_stream("/rootstock.v1.Worker/Generate", worker_pb2.GenerateRequest.SerializeToString, bytes)
            with pytest.raises(grpc.RpcError) as refused:
                list(generate(iter(())))
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    authorities = system.mounted["gateway"].paths[2].read_bytes()
    foreign = Authority(tmp_path / "foreign")
    stranger = Mounted(tmp_path / "stranger", foreign.signed("rootstock-gateway"), foreign)
    for name, (port, role) in tls.items():
        assert with_files(port, stranger, role, authorities) is grpc.StatusCode.UNAVAILABLE, name
        nobody = grpc.ssl_channel_credentials(authorities)
        with grpc.secure_channel(f"{HOST}:{port}", nobody, [("grpc.ssl_target_name_override", f"rootstock-{role}")]) as channel:
            assert code_of(channel) is grpc.StatusCode.UNAVAILABLE, name
        assert with_files(port, system.mounted["gateway"], role, authorities) is grpc.StatusCode.UNAUTHENTICATED, name
    assert system.metric("tokenizer", "rootstock_tls_refused_calls_total", reason="token") == 1
    trusting = {"ssl": True, "ssl_ca_certs": str(system.mounted["redis"].paths[2])}
    for name in REDIS:
        for how in ({}, trusting):
            with redis.Redis("localhost", port_of(system, name, "--tls-port"), **how) as client, pytest.raises(redis.RedisError):
                client.ping()
    pulled_before = system.metric("decode-0", "rootstock_worker_pulled_tokens_total")
    code, _ = system.post("/v1/completions", {"model": "demo", "prompt": "5 6 7 8 9 " * 60, "max_tokens": 4})
    assert code == 200 and system.metric("decode-0", "rootstock_worker_pulled_tokens_total") > pulled_before
    assert operated(system, "operator").returncode == 0 and operated(system, "tokenizer").returncode != 0
    assert system.metric("gateway-0", "rootstock_gateway_index_up") == 1


def operated(system: SecuredSystem, role: str) -> subprocess.CompletedProcess[str]:
    """Runs an operation of the control CLI with the certificate of this role."""
    words = ["--address", f"{HOST}:{port_of(system, 'prefill-0', '--control-port')}", "GetInternalState"]
    env = dict(os.environ, ROOTSTOCK_MTLS_TOKEN_FILE=str(system.token))
    for name, path in zip(("CERT", "KEY", "CA"), system.mounted[role].paths, strict=True):
        env[f"ROOTSTOCK_MTLS_{name}_FILE"] = str(path)
    command = [sys.executable, "-m", "rootstock_llm.services.worker.control", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def connected(system: SecuredSystem) -> bool:
    """Whether both gateways are connected to all tokenizers, detokenizers and workers."""
    wanted = {"tokenizer": 1, "detokenizer": 1, "worker": 2}
    return all(
        system.metric(name, "rootstock_gateway_connected", service=service) == count
        for name in GATEWAYS
        for service, count in wanted.items()
    )


def test_certificates_and_authority_are_replaced_while_requests_run(system: SecuredSystem, tmp_path: Path) -> None:
    """Replaces all certificates and the authority step by step. Then restarts processes, so that others must reconnect.

    No request may fail.
    """
    new = Authority(tmp_path / "new")
    wait_until(lambda: connected(system), 60, "both gateways to be connected")
    with Streams(system) as streams:
        streams.wait_for_more(STREAMS, "with the first certificates")
        for signer, trusted in ((system.authority, (system.authority, new)), (new, (system.authority, new)), (new, (new,))):
            system.renew(signer, *trusted)
            time.sleep(CHECK_S + 0.2)
            streams.wait_for_more(STREAMS, "after the renewal of certificates")
        for name in ("redis", "tokenizer", "detokenizer", "prefill-0"):
            system.kill(name)
            system.start(name)
            wait_until(lambda: connected(system), START_S, f"both gateways to be connected again after the restart of {name}")
            streams.wait_for_more(STREAMS, f"after a restart of {name}")
        wait_until(
            lambda: system.metric("gateway-0", "rootstock_gateway_index_up") == 1, 60, "gateway-0 to be connected to the index"
        )
    assert not streams.failed, streams.failed[:3]
    for name in PARTS:
        assert "TLS handshake failed" not in system.log(name) and "cannot be used" not in system.log(name), name
        assert system.metric(name, "rootstock_tls_refused_calls_total") == 0
