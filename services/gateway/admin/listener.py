"""Runs the operators' HTTP API beside the gateway, on a port of its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from services.gateway.admin.operations import Operations
from services.gateway.admin.routes import AdminApi
from services.gateway.admin.worker_directory import WorkerDirectory
from services.gateway.admin.workers import ControlledWorkers
from services.gateway.config.settings import GatewaySettings
from services.gateway.http import http_server
from services.gateway.http.side_listener import served_beside
from services.gateway.observe.access_log import AccessLog
from services.gateway.request.abort import Aborter
from services.gateway.request.body_budget import BodyBudget
from services.shared.observe.log_fields import fields
from services.shared.rpc.control_token import require_token_beyond_loopback
from services.shared.rpc.dialer import IN_THE_CLEAR, Dialer

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def admin_listener(
    config: GatewaySettings,
    token: str,
    directory: WorkerDirectory,
    aborter: Aborter,
    bodies: BodyBudget,
    dialer: Dialer = IN_THE_CLEAR,
    access: AccessLog | None = None,
) -> AsyncIterator[None]:
    """Serves while the block runs; does nothing where settings switch it off. Operations in flight at the end are cut off.

    Raises CannotListen, also for settings that would let strangers in.
    """
    if not config.admin_port:
        yield
        return
    try:
        require_token_beyond_loopback("admin_host", config.admin_host, token)
    except ValueError as error:
        raise http_server.CannotListen(str(error)) from None
    workers = ControlledWorkers(token, dialer)
    operations = Operations(directory, workers, aborter, config.control_timeout_s, config.salt_cache_by_key)
    async with served_beside(
        AdminApi(operations, bodies, token, access or AccessLog("off")), config.admin_host, config.admin_port
    ):
        logger.info("admin API", extra=fields(host=config.admin_host, port=config.admin_port))
        yield
