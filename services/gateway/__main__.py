"""python -m rootstock_llm.services.gateway: settings, one event loop, one gateway."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys

import uvloop

from rootstock_llm.services.gateway.admin.routes import admin_listener
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.gateway import SERVICE, Gateway
from rootstock_llm.services.gateway.http import http_server
from rootstock_llm.services.gateway.http.connection_table import raise_open_file_limit
from rootstock_llm.services.shared import settings
from rootstock_llm.services.shared.memory import map_large_blocks
from rootstock_llm.services.shared.observe import log
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger("rootstock_llm.services.gateway")

# malloc maps each larger block separately, and returns its memory to the system when it is freed.
MAPPED_BLOCK_BYTES = 1 << 20
YOUNG_OBJECTS = 10_000  # new objects between two garbage collections; a request in flight has hundreds


async def _serve(config: GatewaySettings) -> None:
    listener = http_server.bind(config.host, config.port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config)
    gc.freeze()  # garbage collections skip the imported objects, which live as long as the process
    gc.set_threshold(YOUNG_OBJECTS)
    admin_parts = (gateway.directory, gateway.aborter, gateway.bodies, gateway.dialer, gateway.access)
    async with admin_listener(config, gateway.token, *admin_parts):
        await gateway.run(listener, stop)


def main() -> int:
    config = settings.load(GatewaySettings, "python -m rootstock_llm.services.gateway")
    log.configure(SERVICE, config.log_level)
    map_large_blocks(MAPPED_BLOCK_BYTES)
    raise_open_file_limit()
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    logger.info("settings", extra=fields(**config.model_dump(exclude={"control_token", "redis_url", "state_redis_url"})))
    try:
        uvloop.run(_serve(config))
    except http_server.CannotListen as error:
        logger.error("%s", error)
        return settings.WRONG_SETTINGS
    return 0


if __name__ == "__main__":
    sys.exit(main())
