"""Tests of TLS at the HTTP port, with certificate files that are replaced while the server runs."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from starlette.responses import PlainTextResponse

from rootstock_llm.services.gateway.http import http_server
from rootstock_llm.services.gateway.http.http_server import HttpOptions
from rootstock_llm.services.gateway.http.tls import TlsFiles

HOST = "127.0.0.1"
GET = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"


def make_pair(folder: Path, name: str) -> None:
    """Replaces cert.pem and key.pem with a certificate for this common name and its key."""
    made = ["-keyout", str(folder / "new.key"), "-out", str(folder / "new.cert")]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run(["openssl", "req", "-x509", *kind, *made], check=True, capture_output=True)
    (folder / "new.key").replace(folder / "key.pem")
    (folder / "new.cert").replace(folder / "cert.pem")


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """Connects by TLS. Returns the reader, the writer and the server's certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return reader, writer, certificate


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(GET)
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(5)
    return head.split(b"\r\n")[0]


def serving(files: TlsFiles, use: Callable[[int], object], head_s: float = 20.0) -> None:
    async def run() -> None:
        listener = http_server.bind(HOST, 0)
        options = HttpOptions(first_request_s=0.05, head_s=head_s, tls=files.context)
        server = http_server.build(PlainTextResponse("hello"), options)
        task = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(30):
            await use(listener.getsockname()[1])  # type: ignore[misc]
        server.stop()
        await task

    uvloop.run(run())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH")
    make_pair(tmp_path, "first")
    return tmp_path


def test_new_certificate_is_used_only_for_new_connections(folder: Path) -> None:
    files = TlsFiles(folder / "cert.pem", folder / "key.pem")

    async def use(port: int) -> None:
        reader, writer, first = await connect(port)
        assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
        make_pair(folder, "second")
        files.reload_if_changed()
        _, other, second = await connect(port)
        assert first != second
        assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
        writer.close()
        other.close()

    serving(files, use)


@pytest.mark.parametrize("fault", ["key of another certificate", "no certificate", "missing file"])
def test_invalid_certificate_leaves_the_old_one_in_use(folder: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    files = TlsFiles(folder / "cert.pem", folder / "key.pem")
    certificate = (folder / "cert.pem").read_bytes()
    if fault == "key of another certificate":
        make_pair(folder, "second")
        (folder / "cert.pem").write_bytes(certificate)
    elif fault == "no certificate":
        (folder / "cert.pem").write_bytes(b"nothing")
    else:
        (folder / "cert.pem").unlink()
    files.reload_if_changed()
    assert len(caplog.records) == 1

    async def use(port: int) -> None:
        reader, writer, _ = await connect(port)
        assert await ask(reader, writer) == b"HTTP/1.1 200 OK"
        writer.close()

    serving(files, use)


def test_tls_handshake_is_cut_off_after_the_head_timeout(folder: Path) -> None:
    async def use(port: int) -> None:
        with socket.create_connection((HOST, port)) as silent:
            silent.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(silent, 100) == b""

    serving(TlsFiles(folder / "cert.pem", folder / "key.pem"), use, head_s=0.3)
