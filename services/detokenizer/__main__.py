"""python -m rootstock_llm.services.detokenizer --model FOLDER"""

from __future__ import annotations

import asyncio
import functools
import sys

from prometheus_client import CollectorRegistry

from rootstock_llm.protos import detokenizer_pb2_grpc as pb_grpc
from rootstock_llm.services.detokenizer.server import DetokenizerServicer
from rootstock_llm.services.detokenizer.session import DetokenizerMetrics
from rootstock_llm.services.detokenizer.settings import DetokenizerSettings
from rootstock_llm.services.shared.hf_tokenizer import TokenizerFolderError, load_tokenizer
from rootstock_llm.services.shared.observe import log, metrics_server
from rootstock_llm.services.shared.observe.tracing import start_tracing
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.shared.rpc.grpc_server import PortGuard
from rootstock_llm.services.shared.settings import WRONG_SETTINGS, load
from rootstock_llm.services.shared.tls.certificate_files import BadTls
from rootstock_llm.services.shared.tls.metrics import TlsMetrics
from rootstock_llm.services.shared.tls.mutual_tls import mutual_tls
from rootstock_llm.services.shared.tls.roles import Role

SERVICE = "detokenizer"


async def run(settings: DetokenizerSettings) -> None:
    registry = CollectorRegistry()
    tracing = start_tracing(settings, SERVICE)
    servicer = DetokenizerServicer(load_tokenizer(settings.model), settings, DetokenizerMetrics(registry), tracing)
    metrics_server.serve(registry, settings.metrics_host, settings.metrics_port)
    health = grpc_server.HealthService(SERVICE)
    add = functools.partial(pb_grpc.add_DetokenizerServicer_to_server, servicer)
    stop = grpc_server.stop_signal()
    mtls = mutual_tls(settings, Role.DETOKENIZER)
    guard = None if mtls is None else PortGuard(mtls, Role.GATEWAY)
    server = await grpc_server.start_server(settings.host, settings.port, health, add, settings.max_connection_age_s, guard)
    probes = await grpc_server.start_probe_port(settings.host, settings.health_port, health)
    if mtls is not None:
        registry.register(TlsMetrics(mtls))
    await health.set_ready(True)
    await server.serve_until(stop, settings.grace_s, servicer.drain)
    if probes is not None:
        await probes.stop(0)
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


def main() -> None:
    grpc_server.end_on_signal()
    settings = load(DetokenizerSettings, f"python -m rootstock_llm.services.{SERVICE}")
    log.configure(SERVICE, settings.log_level)
    try:
        asyncio.run(run(settings))
    except (TokenizerFolderError, BadTls) as error:
        print(f"{SERVICE}: {error}", file=sys.stderr)
        raise SystemExit(WRONG_SETTINGS) from None


if __name__ == "__main__":
    main()
