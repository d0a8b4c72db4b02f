"""Checks the health of a service once and exits with a status, for an image's HEALTHCHECK and for use in a shell.

    python -m rootstock_llm.services.shared.rpc.probe 127.0.0.1:7003 --service worker     gRPC health; without --service: liveness
    python -m rootstock_llm.services.shared.rpc.probe http://127.0.0.1:8000/health        HTTP GET

Exit status 0: the service is serving, or the HTTP status is 200 to 399. Exit status 1: any other result, with one line on stderr.
Exit status 2: a wrong command line.
"""

from __future__ import annotations

import argparse
import http.client
import sys
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootstock_llm.services.shared.rpc.grpc_server import LIVENESS

SERVING, FAILING = 0, 1


class NotServing(Exception):
    """The service is not serving. The message has its state or the error."""


def check_grpc(target: str, service: str, timeout_s: float) -> None:
    """Asks the gRPC health service at host:port. Raises NotServing unless the service is SERVING."""
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status
        except grpc.RpcError as error:
            raise NotServing(f"{target}: {error.code().name}: {error.details()}") from None
    if status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        raise NotServing(f"{target}: {service or 'liveness'} is {name}")


def check_http(url: str, timeout_s: float) -> None:
    """Sends a GET request without proxies and redirects. Raises NotServing unless the status is 200 to 399."""
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connect(parts.netloc, timeout=timeout_s)
        connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise NotServing(f"{url}: {error or type(error).__name__}") from None
    if not 200 <= status < 400:
        raise NotServing(f"{url}: status {status}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rootstock_llm.services.shared.rpc.probe", description="Checks the health of a service once."
    )
    parser.add_argument("target", help="host:port of a gRPC health service, or an http:// or https:// URL")
    parser.add_argument("--service", default=LIVENESS, help="name in the gRPC health service; empty: liveness")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="seconds to wait for the response")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.target.startswith(("http://", "https://")):
            check_http(arguments.target, arguments.timeout_s)
        else:
            check_grpc(arguments.target, arguments.service, arguments.timeout_s)
    except NotServing as failure:
        print(failure, file=sys.stderr)
        return FAILING
    return SERVING


if __name__ == "__main__":
    sys.exit(main())
