"""Chooses the name of a worker in logs, metrics and folders."""

from __future__ import annotations

import socket

from rootstock_llm.services.worker.settings import WorkerSettings


def worker_id(settings: WorkerSettings) -> str:
    return settings.worker_id or f"{socket.gethostname()}-{settings.port}"
