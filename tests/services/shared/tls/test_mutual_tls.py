"""Tests of mutual TLS over real connections: accepted certificates and tokens, and changes of their files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootstock_llm.protos import detokenizer_pb2, detokenizer_pb2_grpc
from rootstock_llm.services.gateway.remote.connection import keep_connected
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.shared.rpc.dialer import Dialer, LongLivedChannel
from rootstock_llm.services.shared.rpc.grpc_server import PortGuard
from rootstock_llm.services.shared.settings import of_values
from rootstock_llm.services.shared.tls import certificate_files, token_file
from rootstock_llm.services.shared.tls.certificate_files import BadTls, CertificateFiles
from rootstock_llm.services.shared.tls.mutual_tls import MutualTls, mutual_tls
from rootstock_llm.services.shared.tls.roles import Role
from rootstock_llm.services.shared.tls.token_file import TokenFile
from rootstock_llm.services.tokenizer.settings import TokenizerSettings
from tests.certificates import Authority, Mounted

pytestmark = [pytest.mark.needs("openssl")]
HOST = "127.0.0.1"
WORKER, GATEWAY = Role.WORKER, Role.GATEWAY
Check = health_pb2.HealthCheckRequest


def logged(caplog: pytest.LogCaptureFixture, by: str) -> list[str]:
    """Returns the messages of one logger, because gRPC's poller may also log errors about the event loop of an earlier test."""
    return [record.getMessage() for record in caplog.records if record.name == by]


@pytest.fixture(autouse=True)
def reread_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificate_files, token_file):
        monkeypatch.setattr(module, "CHECK_S", 0.0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@dataclass
class Pki:
    """An authority, and the folder in which it writes files for services."""

    folder: Path
    authority: Authority

    def mounted(self, *names: str, by: Authority | None = None, expired: bool = False) -> Mounted:
        signer = by or self.authority
        at = self.folder / f"mounted-{len(list(self.folder.iterdir()))}"
        return Mounted(at, signer.signed(*names, expired=expired), signer)

    def tls(self, role: Role, mounted: Mounted | None = None, token: str = "") -> MutualTls:
        tokens = None
        if token:
            path = self.folder / f"token-{len(list(self.folder.iterdir()))}"
            path.write_text(token)
            tokens = TokenFile(path)
        return MutualTls(CertificateFiles(*(mounted or self.mounted(role)).paths, role), role, tokens)


@pytest.fixture
def pki(tmp_path: Path, authority: Authority) -> Pki:
    return Pki(tmp_path, authority)


@asynccontextmanager
async def served(tls: MutualTls, *callers: Role, port: int = 0) -> AsyncIterator[str]:
    """Runs a server of the health service with TLS. Yields its address."""
    health = grpc_server.HealthService("worker")
    guard = PortGuard(tls, *(callers or (GATEWAY,)))
    server = grpc.aio.server(interceptors=(guard,), options=grpc_server.SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    port = grpc_server.open_port(server, HOST, port, guard)
    await health.start()
    await server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(0)


async def ask(channel: grpc.aio.Channel) -> str:
    """Returns SERVING, or the status and details of the error."""
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(Check(), timeout=60)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def ask_through(dialer: Dialer, target: str, role: Role = WORKER) -> str:
    async with dialer.channel(target, role) as channel:
        return await ask(channel)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


def test_server_accepts_only_gateway_certificates(pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    foreign = pki.mounted(GATEWAY, by=Authority(tmp_path / "foreign"))
    expired = pki.mounted(GATEWAY, expired=True)
    worker = pki.tls(WORKER, token="letters-and-digits")

    async def work() -> None:
        async with served(worker) as target:
            assert await ask_through(Dialer(pki.tls(GATEWAY, token="letters-and-digits")), target) == "SERVING"
            async with grpc_server.channel(target) as plain:
                assert (await ask(plain)).startswith("UNAVAILABLE")
            no_certificate = grpc.ssl_channel_credentials(pki.authority.pem)
            named = [("grpc.ssl_target_name_override", WORKER.value)]
            async with grpc.aio.secure_channel(target, no_certificate, options=named) as anonymous:
                assert (await ask(anonymous)).startswith("UNAVAILABLE")
            for mounted in (foreign, expired):  # neither certificate is accepted
                certificate, key, _ = (path.read_bytes() for path in mounted.paths)
                refused = grpc.ssl_channel_credentials(pki.authority.pem, key, certificate)
                async with grpc.aio.secure_channel(target, refused, options=named) as channel:
                    assert (await ask(channel)).startswith("UNAVAILABLE")
            assert worker.refused == {"certificate": 0, "token": 0}
            for token in ("", "letters-and-digit", "another-token-of-letters"):
                assert (await ask_through(Dialer(pki.tls(GATEWAY, token=token)), target)).startswith("UNAUTHENTICATED")
            for _ in range(3):
                said = await ask_through(Dialer(pki.tls(WORKER, token="letters-and-digits")), target)
                wanted = "the caller's certificate must name rootstock-gateway, but it names rootstock-worker"
                assert said == f"PERMISSION_DENIED: {wanted}"
            assert worker.refused == {"certificate": 3, "token": 3}

    with caplog.at_level(logging.WARNING, grpc_server.__name__):
        run(work)
    assert len(logged(caplog, grpc_server.__name__)) == 1, "refusals are logged once per address"


def test_client_refuses_a_certificate_of_another_role(pki: Pki) -> None:
    """A client that connects to a worker refuses a tokenizer's certificate of the same authority."""

    async def work() -> None:
        async with served(pki.tls(Role.TOKENIZER)) as target:
            gateway = Dialer(pki.tls(GATEWAY))
            assert (await ask_through(gateway, target, WORKER)).startswith("UNAVAILABLE")
            assert await ask_through(gateway, target, Role.TOKENIZER) == "SERVING"

    run(work)


def test_new_connections_use_the_new_tls_files_on_both_sides(pki: Pki, tmp_path: Path) -> None:
    """Replaces the authority step by step. An open call continues, and new connections use the current files."""
    following = Authority(tmp_path / "following")
    own_files, theirs = pki.mounted(GATEWAY), pki.mounted(WORKER)

    async def work() -> None:
        dialer = Dialer(pki.tls(GATEWAY, own_files))
        async with served(pki.tls(WORKER, theirs)) as target:
            kept = dialer.long_lived_channel(target, WORKER)
            watched = health_pb2_grpc.HealthStub(kept.now()).Watch(Check())
            assert await watched.read()
            first = kept.now()
            for mounted, role in ((own_files, GATEWAY), (theirs, WORKER)):
                mounted.put(pki.authority.signed(role), pki.authority, following)
            assert await ask(kept.now()) == "SERVING" and kept.now() is not first
            for mounted, role in ((theirs, WORKER), (own_files, GATEWAY)):
                mounted.put(following.signed(role), pki.authority, following)
                assert await ask(kept.now()) == "SERVING"
            for mounted, role in ((own_files, GATEWAY), (theirs, WORKER)):
                mounted.put(following.signed(role), following)
            assert await ask(kept.now()) == "SERVING"
            old = pki.mounted(GATEWAY)
            certificate, key, _ = (path.read_bytes() for path in old.paths)
            credentials = grpc.ssl_channel_credentials(following.pem, key, certificate)
            named = [("grpc.ssl_target_name_override", WORKER.value)]
            async with grpc.aio.secure_channel(target, credentials, options=named) as channel:
                assert (await ask(channel)).startswith("UNAVAILABLE"), "the old authority is not trusted any more"
            assert not watched.done(), "the open stream continues"
            watched.cancel()
            await kept.close()

    run(work)


def test_waiting_stream_connects_when_the_tls_files_become_valid(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that waits because its TLS files are refused is logged and counted once. It connects when the files are valid."""
    own_files = pki.mounted(GATEWAY, expired=True)
    failed: list[str] = []
    connected = asyncio.Event()

    async def session(kept: LongLivedChannel) -> None:
        stub = detokenizer_pb2_grpc.DetokenizerStub(kept.now())
        call = stub.Decode(wait_for_ready=True)
        try:
            async with kept.opening():
                await call.write(detokenizer_pb2.DecodeBatch())  # a stream to a worker waits in read()
            connected.set()
            await asyncio.Event().wait()
        finally:
            call.cancel()

    async def work() -> None:
        async with served(pki.tls(WORKER)) as target:
            kept = Dialer(pki.tls(GATEWAY, own_files), failed.append).long_lived_channel(target, WORKER)
            keeping = asyncio.create_task(keep_connected("worker", target, lambda: session(kept)))
            while not failed:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            assert not connected.is_set()
            own_files.put(pki.authority.signed(GATEWAY), pki.authority)
            await connected.wait()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await kept.close()

    with caplog.at_level(logging.ERROR):
        run(work)
    assert failed == ["worker"]
    (line,) = [each.getMessage() for each in caplog.records if "TLS handshake failed" in each.getMessage()]
    assert "the server closes the connection after it has received this process's certificate" in line


DIALER = "rootstock_llm.services.shared.rpc.dialer"
REASONS = {
    "foreign authority": "the server's certificate is refused: unable to get local issuer certificate",
    "another service": "the server's certificate is refused: Hostname mismatch",
    "expired": "the server's certificate is refused: certificate has expired",
}


@pytest.mark.parametrize("kind", REASONS)
def test_client_logs_the_reason_of_a_failed_handshake(
    kind: str, pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    role, signer = (Role.TOKENIZER if kind == "another service" else WORKER), pki.authority
    if kind == "foreign authority":
        signer = Authority(tmp_path / "foreign")
    theirs = pki.tls(role, pki.mounted(role, by=signer, expired=kind == "expired"))

    async def follow(kept: LongLivedChannel) -> None:
        while True:
            await kept.state_changed(kept.now().get_state(try_to_connect=True))

    async def work() -> None:
        async with served(theirs) as target:
            kept = Dialer(pki.tls(GATEWAY)).long_lived_channel(target, WORKER)
            following = asyncio.create_task(follow(kept))
            while not logged(caplog, DIALER):
                await asyncio.sleep(0.02)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await kept.close()

    caplog.clear()
    with caplog.at_level(logging.ERROR, DIALER):
        run(work)
    assert REASONS[kind] in logged(caplog, DIALER)[0]


def test_tokens_can_be_replaced_without_a_refused_call(pki: Pki) -> None:
    """Replaces the token files in three steps: old and new token, new and old token, only the new token.

    In each step, a service that still has the previous file is accepted.
    """
    old, new = "the-token-of-before", "the-token-of-today"
    worker, gateway = pki.tls(WORKER, token=old), pki.tls(GATEWAY, token=old)
    paths = [path for path in pki.folder.iterdir() if path.name.startswith("token")]

    async def work() -> None:
        async with served(worker) as target:
            for text in (f"{old}\n{new}\n", f"{new}\n{old}\n", f"{new}\n"):
                for path in paths:
                    path.write_text(text)
                    assert await ask_through(Dialer(gateway), target) == "SERVING"
            paths[0].write_text("\n")
            assert await ask_through(Dialer(gateway), target) == "SERVING", "a file without a token is ignored"

    run(work)
    assert worker.refused["token"] == 0


INCOMPLETE = {
    "only a key": ({"mtls_key_file": "k"}, "must all be set if one of them"),
    "only a token": ({"mtls_token_file": "t"}, "or mtls_token_file is set; missing: mtls_cert_file"),
    "no authority": ({"mtls_cert_file": "c", "mtls_key_file": "k"}, "is set; missing: mtls_ca_file"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_settings_refuse_an_incomplete_set_of_tls_files(case: str) -> None:
    values, said = INCOMPLETE[case]
    with pytest.raises(ValueError, match=said):
        of_values(TokenizerSettings, {"model": Path("m"), **values})


def test_invalid_tls_files_are_refused_at_the_start_and_ignored_later(pki: Pki, tmp_path: Path) -> None:
    """At the start, an error names the fault. Later, the last valid files stay in use until the new files are valid."""
    names = ("mtls_cert_file", "mtls_key_file", "mtls_ca_file")
    foreign = Authority(tmp_path / "foreign")

    def started(mounted: Mounted) -> MutualTls | None:
        values = dict(zip(names, map(str, mounted.paths), strict=True))
        return mutual_tls(of_values(TokenizerSettings, {"model": Path("m"), **values}), Role.TOKENIZER)

    with pytest.raises(BadTls, match="Hostname mismatch"):
        started(pki.mounted(WORKER))
    with pytest.raises(BadTls, match="local issuer"):
        started(Mounted(tmp_path / "unsigned", pki.authority.signed(Role.TOKENIZER), foreign))
    one, another = pki.authority.signed(Role.TOKENIZER), pki.authority.signed(Role.TOKENIZER)
    mixed = type(one)(one.certificate, another.key)
    with pytest.raises(BadTls, match="MISMATCH"):
        started(Mounted(tmp_path / "mixed", mixed, pki.authority))
    mounted = pki.mounted(Role.TOKENIZER)
    tls = started(mounted)
    assert tls is not None and tls.version == 0 and tls.files.valid
    mounted.put(mixed, pki.authority)
    assert tls.version == 0 and not tls.files.valid
    mounted.put(one, pki.authority)
    assert tls.version == 1 and tls.files.valid and tls.files.now().certificate == one.certificate
