"""Tests of rediss:// URLs with a real TLS server, and with files that change."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.shared.index.redis_client import TimedRedis, redis_client
from tests.certificates import Authority, Mounted
from tests.e2e.system import wait_until


async def answers(client: TimedRedis) -> bool:
    try:
        return bool(await client.ping())
    except (RedisError, OSError):
        return False


@pytest.mark.needs("openssl", "redis-server")
def test_client_reads_the_tls_files_for_each_connection(tmp_path: Path) -> None:
    """A client reconnects with the new files. It refuses a server whose authority is not in the CA file of the URL."""
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    theirs = Mounted(tmp_path / "server", ours.signed("localhost"), ours)
    client_files = Mounted(tmp_path / "client", ours.signed("rootstock-worker"), ours)
    (port,) = free_ports(1)
    files = zip(("--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file"), map(str, theirs.paths), strict=True)
    flags = [word for pair in files for word in pair]
    command = ["redis-server", "--port", "0", "--tls-port", str(port), "--save", "", "--dir", str(tmp_path), *flags]
    certificate, key, authorities = client_files.paths
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={authorities}"
    client = redis_client(f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}", 5.0)

    async def work() -> None:
        while not await answers(client):
            await asyncio.sleep(0.05)
        without_certificate = redis_client(url, 5.0)
        assert not await answers(without_certificate), "the server asks for a certificate"
        client_files.put(other.signed("rootstock-worker"), other)
        assert await answers(client), "the open connection stays"
        await client.connection_pool.disconnect()
        assert not await answers(client), "client and server refuse each other's certificate"
        client_files.put(ours.signed("rootstock-worker"), ours)
        assert await answers(client)
        await without_certificate.aclose()
        await client.aclose()

    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        asyncio.run(asyncio.wait_for(work(), 60))
    finally:
        server.terminate()
        wait_until(lambda: server.poll() is not None, 60, "the end of the server")


def test_client_refuses_unsupported_url_parameters() -> None:
    with pytest.raises(ValueError, match="ssl_ca_path"):
        redis_client("rediss://localhost:6379/0?ssl_ca_path=/etc/ssl", 1.0)
