"""python -m rootstock_llm.services.tokenizer --model FOLDER"""

from __future__ import annotations

import asyncio
import functools
import sys

from prometheus_client import CollectorRegistry

from rootstock_llm.protos import tokenizer_pb2_grpc as pb_grpc
from rootstock_llm.services.shared.hf_tokenizer import TokenizerFolderError, load_tokenizer
from rootstock_llm.services.shared.memory import map_large_blocks
from rootstock_llm.services.shared.observe import log, metrics_server
from rootstock_llm.services.shared.observe.tracing import start_tracing
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.shared.rpc.grpc_server import PortGuard
from rootstock_llm.services.shared.settings import WRONG_SETTINGS, load
from rootstock_llm.services.shared.tls.certificate_files import BadTls
from rootstock_llm.services.shared.tls.metrics import TlsMetrics
from rootstock_llm.services.shared.tls.mutual_tls import mutual_tls
from rootstock_llm.services.shared.tls.roles import Role
from rootstock_llm.services.tokenizer.metrics import TokenizerMetrics
from rootstock_llm.services.tokenizer.server import TokenizerServicer
from rootstock_llm.services.tokenizer.settings import TokenizerSettings

SERVICE = "tokenizer"
# Threshold of map_large_blocks(), equal to that in render_child.py. Importing it from there would load jinja2.
MAPPED_BLOCK_BYTES = 1 << 18


async def run(settings: TokenizerSettings) -> None:
    registry = CollectorRegistry()
    tracing = start_tracing(settings, SERVICE)
    tokenizer = load_tokenizer(settings.model, settings.chat_template)
    servicer = TokenizerServicer(tokenizer, settings, TokenizerMetrics(registry), tracing)
    metrics_server.serve(registry, settings.metrics_host, settings.metrics_port)
    health = grpc_server.HealthService(SERVICE)
    add = functools.partial(pb_grpc.add_TokenizerServicer_to_server, servicer)
    stop = grpc_server.stop_signal()
    mtls = mutual_tls(settings, Role.TOKENIZER)
    guard = None if mtls is None else PortGuard(mtls, Role.GATEWAY)
    server = await grpc_server.start_server(settings.host, settings.port, health, add, settings.max_connection_age_s, guard)
    probes = await grpc_server.start_probe_port(settings.host, settings.health_port, health)
    if mtls is not None:
        registry.register(TlsMetrics(mtls))
    try:
        await servicer.start()
        await health.set_ready(True)
        await server.serve_until(stop, settings.grace_s, servicer.drain)
    finally:
        if probes is not None:
            await probes.stop(0)
        await servicer.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def main() -> None:
    grpc_server.end_on_signal()
    settings = load(TokenizerSettings, f"python -m rootstock_llm.services.{SERVICE}")
    log.configure(SERVICE, settings.log_level)
    map_large_blocks(MAPPED_BLOCK_BYTES)
    try:
        asyncio.run(run(settings))
    except (TokenizerFolderError, BadTls) as error:
        print(f"{SERVICE}: {error}", file=sys.stderr)
        raise SystemExit(WRONG_SETTINGS) from None


if __name__ == "__main__":
    main()
