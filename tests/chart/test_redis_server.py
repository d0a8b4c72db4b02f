"""Tests the chart's Redis with TLS: a real server, run by the rendered command, loads changed certificates."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootstock_llm.services.local.ports import HOST, free_ports
from tests.certificates import Authority, Mounted, Pems
from tests.chart.pods import pod
from tests.chart.release import merged, render
from tests.chart.variants import VARIANTS
from tests.e2e.system import wait_until

pytestmark = [pytest.mark.needs("openssl", "redis-server")]
NAMES = ("localhost", "rootstock-redis")


class Server:
    """A Redis server that runs a pod's command on a free port, with local folders instead of the pod's paths."""

    def __init__(self, component: str, folder: Path, mounted: Mounted) -> None:
        container = pod(render(merged(VARIANTS["encrypted"], {})), component).container()
        self._folder, self._mounted = folder, mounted
        (self.port,) = free_ports(1)
        self._env = {"PATH": os.environ["PATH"], "REDISCLI_AUTH": "letters"}
        self._probe = [self._localized(word) for word in container["readinessProbe"]["exec"]["command"]]
        command = [self._localized(word) for word in [*container["command"], *container["args"]]]
        self._process = subprocess.Popen(command, env=self._env, stdout=subprocess.DEVNULL)

    def _localized(self, word: str) -> str:
        word = word.replace("/tmp/", f"{self._folder}/").replace("/etc/rootstock/mtls", str(self._mounted.folder))
        return {"6379": str(self.port), "0.0.0.0": HOST, "/data": str(self._folder), "/tmp": str(self._folder)}.get(word, word)

    def is_ready(self) -> bool:
        return subprocess.run(self._probe, env=self._env, capture_output=True, timeout=60).returncode == 0

    def server_certificate(self, by: Mounted | None = None) -> bytes:
        """Returns the certificate that the server sends to a client.

        Args:
            by: files of the client; None for the server's own files.
        """
        certificate, key, authority = (by or self._mounted).paths
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key)
        with (
            socket.create_connection((HOST, self.port), 5) as plain,
            context.wrap_socket(plain, server_hostname=NAMES[0]) as secured,
        ):
            shown = secured.getpeercert(True)
        assert shown
        return shown

    def stop(self) -> None:
        self._process.terminate()
        assert self._process.wait(60) == 0


@pytest.fixture(params=["redis", "state"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Mounted, Authority]]:
    authority = Authority(tmp_path / "authority")
    mounted = Mounted(tmp_path / "mounted", authority.signed(*NAMES), authority)
    started = Server(request.param, tmp_path, mounted)
    try:
        yield started, mounted, authority
    finally:
        started.stop()


def test_readiness_probe_makes_redis_load_new_certificates(server: tuple[Server, Mounted, Authority], tmp_path: Path) -> None:
    """Replaces the authority in three steps (trust both, new certificate, trust only the new one), then in one step.

    The server loads the files only when the readiness probe tells it to.
    """
    running, mounted, authority = server
    wait_until(running.is_ready, 30, "the server to be ready")
    first = running.server_certificate()
    assert running.is_ready() and running.server_certificate() == first
    following, last = Authority(tmp_path / "following"), Authority(tmp_path / "last")
    both = (authority, following)
    for signer, trusted in ((authority, both), (following, both), (following, (following,)), (last, (last,))):
        before = running.server_certificate()
        mounted.put(signer.signed(*NAMES), *trusted)
        assert running.is_ready()
        assert running.server_certificate() != before


def test_redis_stays_ready_with_bad_certificates(tmp_path: Path) -> None:
    """The server starts with an expired certificate and then loads a new one.

    It ignores a certificate that does not match the mounted private key.
    """
    authority = Authority(tmp_path / "authority")
    good = authority.signed(*NAMES)
    caller = Mounted(tmp_path / "caller", good, authority)
    mounted = Mounted(tmp_path / "mounted", authority.signed(*NAMES, expired=True), authority)
    running = Server("redis", tmp_path, mounted)
    try:
        wait_until(running.is_ready, 30, "the server to be ready")
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            running.server_certificate(caller)
        mounted.put(good, authority)
        assert running.is_ready()
        first = running.server_certificate(caller)
        following = authority.signed(*NAMES)
        mounted.put(Pems(following.certificate, good.key), authority)
        assert running.is_ready() and running.is_ready()
        assert running.server_certificate(caller) == first
        mounted.put(following, authority)
        assert running.is_ready()
        assert running.server_certificate(caller) != first
    finally:
        running.stop()
