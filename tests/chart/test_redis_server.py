"""The chart's Redis with TLS, by its commands as they are rendered: a real server, which takes certificates as they change."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.local.ports import HOST, free_ports
from tests.certificates import Authority, Mounted
from tests.chart.pods import pod
from tests.chart.release import merged, render
from tests.chart.variants import VARIANTS
from tests.e2e.system import wait_until

pytestmark = [pytest.mark.needs("openssl", "redis-server")]
NAMES = ("localhost", "rootstock-redis")


class Server:
    """Of a component's pod, with the Secret of its certificate mounted elsewhere, and another port."""

    def __init__(self, component: str, folder: Path, mounted: Mounted) -> None:
        container = pod(render(merged(VARIANTS["encrypted"], {})), component).container()
        self._folder, self._mounted = folder, mounted
        (self.port,) = free_ports(1)
        self._env = {"PATH": os.environ["PATH"], "REDISCLI_AUTH": "letters"}
        self._probe = [self._here(word) for word in container["readinessProbe"]["exec"]["command"]]
        self._probe[-1] = self._probe[-1].replace("--tls ", f"--tls -p {self.port} ")
        command = [self._here(word) for word in [*container["command"], *container["args"]]]
        self._process = subprocess.Popen(command, env=self._env, stdout=subprocess.DEVNULL)

    def _here(self, word: str) -> str:
        word = word.replace("/tmp/", f"{self._folder}/").replace("/etc/rootstock/mtls", str(self._mounted.folder))
        return {"6379": str(self.port), "0.0.0.0": HOST, "/data": str(self._folder), "/tmp": str(self._folder)}.get(word, word)

    def is_ready(self) -> bool:
        return subprocess.run(self._probe, env=self._env, capture_output=True, timeout=20).returncode == 0

    def shown(self) -> bytes:
        """Its certificate, as it is shown to who shows one."""
        context = ssl.create_default_context(cafile=self._mounted.paths[2])
        context.load_cert_chain(*self._mounted.paths[:2])
        with (
            socket.create_connection((HOST, self.port), 5) as plain,
            context.wrap_socket(plain, server_hostname=NAMES[0]) as secured,
        ):
            certificate = secured.getpeercert(True)
        assert certificate
        return certificate

    def stop(self) -> None:
        self._process.terminate()
        assert self._process.wait(10) == 0


@pytest.fixture(params=["redis", "state"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Mounted, Authority]]:
    authority = Authority(tmp_path / "authority")
    mounted = Mounted(tmp_path / "mounted", authority.signed(*NAMES), authority)
    started = Server(request.param, tmp_path, mounted)
    try:
        yield started, mounted, authority
    finally:
        started.stop()


def test_a_server_with_tls_takes_new_certificates(server: tuple[Server, Mounted, Authority], tmp_path: Path) -> None:
    """Through a change of the authority, with nothing but its readiness probe."""
    running, mounted, authority = server
    wait_until(running.is_ready, 30, "the server")
    first = running.shown()
    assert running.is_ready() and running.shown() == first
    following = Authority(tmp_path / "following")
    for signer, trusted in ((authority, (authority, following)), (following, (authority, following)), (following, (following,))):
        before = running.shown()
        mounted.put(signer.signed(*NAMES), *trusted)
        assert running.is_ready()
        assert running.shown() != before
