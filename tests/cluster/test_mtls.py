"""TLS between all pods of a release: refused connections, and certificates that are replaced while requests run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.certificates import ROLES, Authority
from tests.cluster.conftest import Install
from tests.cluster.elsewhere import secret
from tests.cluster.kubernetes import Object, Release, until
from tests.cluster.load import Load, load_on
from tests.cluster.test_strangers import stranger

pytestmark = [pytest.mark.needs("openssl")]
STREAMS = 24
MOUNT = "/etc/rootstock/mtls"
TWO = {name: {"replicas": 2} for name in ("gateway", "tokenizer", "detokenizer")}
# A worker's resources, small so that the nodes also have space for Prometheus, metrics-server and KEDA.
LITTLE: Object = {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
VALUES: Object = {
    **TWO,
    "worker": {"replicas": 2, "prefill": {"replicas": 1}, "resources": LITTLE},
    "gateway": {"replicas": 2, "settings": {"disaggregation_min_tokens": 16}},
    "state": {"embedded": True, "volume": {"type": "emptyDir"}},
    "networkPolicy": {"enabled": False},  # so that only certificates protect the ports
}
TLS: Object = {"tls": {"secret": "llm-%s-tls", "tokenSecret": "llm-services"}}
COMPONENTS = (*(role for role in ROLES if role != "operator"), "redis", "state")

# Runs in a pod without certificate and token. Prints three results for each port: of a call without TLS, of a call with TLS but
# without a certificate, and of a TLS handshake. The third result is the TLS version, "" if the port does not use TLS, or
# "refused in TLS" if the port uses TLS and refuses the handshake.
ASK = """
import grpc, json, socket, ssl, sys
from grpc_health.v1 import health_pb2, health_pb2_grpc

def call(channel):
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=4)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"

def ping(host, port, context):
    try:
        with socket.create_connection((host, port), 4) as plain:
            with context.wrap_socket(plain) if context else plain as used:
                used.sendall(b"PING\\r\\n")
                return "OK" if used.recv(5).startswith(b"+PONG") else "REFUSED"
    except OSError:
        return "REFUSED"

def speaks_tls(host, port, context):
    try:
        with socket.create_connection((host, port), 4) as plain, context.wrap_socket(plain) as secured:
            return secured.version()
    except OSError as error:
        return "" if "WRONG_VERSION" in str(error) or isinstance(error, ConnectionError) else "refused in TLS"

trusting = ssl.create_default_context()
trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
trusting.set_alpn_protocols(["h2"])
results = {}
for name, host, port in json.loads(sys.argv[1]):
    tls = speaks_tls(host, port, trusting)
    if name.split()[0] in ("redis", "state"):
        results[name] = [ping(host, port, None), ping(host, port, trusting), tls]
        continue
    with grpc.insecure_channel(f"{host}:{port}") as plain:
        clear = call(plain)
    named = [("grpc.ssl_target_name_override", "rootstock-" + name.split()[0].replace("prefill", "worker"))]
    with grpc.secure_channel(f"{host}:{port}", grpc.ssl_channel_credentials(sys.argv[2].encode()), named) as secured:
        results[name] = [clear, call(secured), tls]
print(json.dumps(results))
"""


def sign(release: Release, signer: Authority, *trusted: Authority) -> None:
    """Writes a Secret for each component, in cert-manager's format."""
    trust = b"".join(authority.pem for authority in trusted).decode()
    for component in COMPONENTS:
        names = [f"rootstock-{component}"]
        if component in ("redis", "state"):
            names.append(f"{release.object_name(component)}.{release.namespace}.svc")
        made = signer.signed(*names)
        data = {"tls.crt": made.certificate.decode(), "tls.key": made.key.decode(), "ca.crt": trust}
        secret(release, f"llm-{component}-tls", data)


def pods_with_tls(release: Release) -> list[str]:
    found = release.get("pods", "-l", f"app.kubernetes.io/instance={release.name}")["items"]
    labelled = [each for each in found if "deletionTimestamp" not in each["metadata"]]
    return [each["metadata"]["name"] for each in labelled if "volumes" in each["spec"] and _has_mount(each)]


def _has_mount(pod: Object) -> bool:
    return any(volume["name"] == "mtls" for volume in pod["spec"]["volumes"])


def are_mounted(release: Release, trust: str) -> bool:
    """Whether the mounted CA file of each pod with TLS equals `trust`. The kubelet updates mounted files within 90 seconds."""
    read = 'while read -r line; do echo "$line"; done < '  # instead of cat, which an image may lack
    return all(
        release.kubectl("exec", name, "--", "sh", "-c", f"{read}{MOUNT}/ca.crt") == trust for name in pods_with_tls(release)
    )


def redis_has_loaded(release: Release) -> bool:
    """Whether each Redis has loaded its current files. The readiness probe loads the files and then updates a marker file."""
    newer = " || ".join(f"[ {MOUNT}/{file} -nt /tmp/tls-taken ]" for file in ("tls.crt", "ca.crt"))
    looks = f"if {newer}; then echo old; else echo new; fi"
    servers = [pod.name for component in ("redis", "state") for pod in release.ready(component)]
    return len(servers) == 2 and all("new" in release.kubectl("exec", name, "--", "sh", "-c", looks) for name in servers)


def rotate(release: Release, signer: Authority, *trusted: Authority) -> None:
    sign(release, signer, *trusted)
    trust = b"".join(authority.pem for authority in trusted).decode()
    until(lambda: are_mounted(release, trust), "the new files in all pods", within_s=240)
    until(lambda: redis_has_loaded(release), "each Redis to load the new files by its readiness probe", within_s=90)


def grpc_ports(release: Release) -> list[tuple[str, str, int]]:
    """Returns (component and port name, address, port) of the ports that pods use to communicate with each other.

    Ports of metrics, HTTP and probes are not included.
    """
    wanted = ("grpc", "peer", "kv", "redis", "control")
    out = []
    for pod in release.get("pods", "-l", f"app.kubernetes.io/instance={release.name}")["items"]:
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                if port["name"] in wanted:
                    out.append((f"{component} {port['name']}", pod["status"]["podIP"], port["containerPort"]))
    return out


def test_pod_without_certificate_is_refused_at_every_port(
    install: Install, tmp_path: Path, proved: Callable[[str], None]
) -> None:
    authority = Authority(tmp_path / "authority")
    release = prepared(install, tmp_path, authority)
    with load_on(release, 4) as load:
        until(lambda: load.ended >= 8, "completed requests of pods with certificates")
    load.check()
    targets = grpc_ports(release)
    (gateway,) = release.get("deployment", release.object_name("gateway"))["spec"]["template"]["spec"]["containers"]
    pod = stranger(gateway["image"], targets)
    pod["spec"]["containers"][0]["command"] = ["python", "-c", ASK, json.dumps(targets), authority.pem.decode()]
    release.kubectl("apply", "-f", "-", given=json.dumps(pod))

    def ended() -> bool:
        phase: str = release.get("pod", "stranger")["status"]["phase"]
        return phase in ("Succeeded", "Failed")

    until(ended, "the pod without a certificate to end")
    lines = release.kubectl("logs", "stranger").splitlines()
    results: dict[str, list[str]] = json.loads(next(line for line in lines if line.startswith("{")))
    assert len(results) >= 7, results
    for name, (clear, without, tls) in results.items():
        assert clear != "OK" and without != "OK" and tls, (name, results[name])
    proved(f"a pod without a certificate is refused at all {len(results)} kinds of port between pods, and each port uses TLS")


def test_certificates_and_authority_are_replaced_while_requests_run(
    install: Install, tmp_path: Path, proved: Callable[[str], None]
) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    release = prepared(install, tmp_path, old)
    with load_on(release, STREAMS) as load:
        until(lambda: load.ended >= STREAMS, "the first completed requests")
        for signer, trusted in ((old, (old, new)), (new, (old, new)), (new, (new,))):
            rotate(release, signer, *trusted)
            _wait_for_more(load, "meanwhile")
        for component in ("tokenizer", "detokenizer", "worker"):
            release.restart(component, "demo")  # new pods have only the new certificates
        _wait_for_more(load, "over new connections")
    proved(f"an authority and all certificates replaced under {STREAMS} streams, then new pods: {load.check()}")


def _wait_for_more(load: Load, what: str) -> None:
    before = load.ended
    until(lambda: load.ended >= before + STREAMS, f"more completed requests {what}")


def prepared(install: Install, folder: Path, authority: Authority | None = None) -> Release:
    """Installs a release with TLS. The first installation does not wait for pods, which need Secrets that are written later."""
    release = install({**VALUES, **TLS}, False)
    signer = authority or Authority(folder / "authority")
    secret(release, "llm-services", {"token": "a token of the tests, thirty-two long".replace(" ", "-")})
    sign(release, signer, signer)
    release.install({**VALUES, **TLS})
    return release
