"""Runs the operators' HTTP API beside the gateway, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from services.gateway import http_server
from services.gateway.admin import AdminApi
from services.gateway.admin_workers import ControlledWorkers
from services.gateway.settings import GatewaySettings
from services.shared.control_token import read_token, require_token_beyond_loopback
from services.shared.log import fields

logger = logging.getLogger(__name__)

CLOSE_S = 0.4


@contextlib.asynccontextmanager
async def admin_listener(config: GatewaySettings) -> AsyncIterator[None]:
    """Serves while the block runs; does nothing where settings switch it off. Operations in flight at the end are cut off.

    Raises CannotListen, also for settings that would let strangers in or leave nothing to operate.
    """
    if not config.admin_port:
        yield
        return
    token = _token(config)
    listener = http_server.bind(config.admin_host, config.admin_port)
    workers = ControlledWorkers(config.worker_control_addresses, token)
    server = http_server.build(AdminApi(workers, token, config.control_timeout_s))
    serving = asyncio.create_task(server.serve([listener]))
    logger.info("admin API", extra=fields(host=config.admin_host, port=config.admin_port))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait((serving,), timeout=CLOSE_S)
        server.force_exit = True
        serving.cancel()
        await asyncio.wait((serving,), timeout=CLOSE_S)
        await workers.close()


def _token(config: GatewaySettings) -> str:
    if not config.worker_control_addresses:
        raise http_server.CannotListen("admin_port is set, but worker_control_addresses names no worker")
    try:
        token = read_token(config.control_token, config.control_token_file)
        require_token_beyond_loopback("admin_host", config.admin_host, token)
    except ValueError as error:
        raise http_server.CannotListen(str(error)) from None
    return token
