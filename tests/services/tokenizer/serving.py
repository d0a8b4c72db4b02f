"""Runs the tokenizer service in this process on a free loopback port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from rootstock_llm.protos import tokenizer_pb2_grpc as pb_grpc
from rootstock_llm.services.shared.hf_tokenizer import load_tokenizer
from rootstock_llm.services.shared.observe.spans import Tracing
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.tokenizer.metrics import TokenizerMetrics
from rootstock_llm.services.tokenizer.server import TokenizerServicer
from rootstock_llm.services.tokenizer.settings import TokenizerSettings


@dataclass(frozen=True)
class Serving:
    stub: Any
    registry: CollectorRegistry
    servicer: TokenizerServicer

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"rootstock_tokenizer_{name}", labels) or 0.0


@contextlib.asynccontextmanager
async def serving(folder: Path, tracing: Tracing | None = None, **settings: Any) -> AsyncIterator[Serving]:
    registry = CollectorRegistry()
    config = TokenizerSettings(model=folder, **settings)
    servicer = TokenizerServicer(load_tokenizer(folder, config.chat_template), config, TokenizerMetrics(registry), tracing)
    server = grpc.aio.server(options=grpc_server.SERVER_OPTIONS)
    pb_grpc.add_TokenizerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await servicer.start()
    await server.start()
    try:
        async with grpc_server.channel(f"127.0.0.1:{port}") as channel:
            yield Serving(pb_grpc.TokenizerStub(channel), registry, servicer)  # type: ignore[no-untyped-call]
    finally:
        await server.stop(None)
        await servicer.stop()
