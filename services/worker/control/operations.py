"""The operations of the control service by RPC name, with the barrier of each one (table in docs/reference/control.md)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from services.worker.loop.inbox import Barrier

BARRIERS: Mapping[str, Barrier] = MappingProxyType(
    {
        # Pages that a step in flight reads may be reused at once, because one stream orders all steps.
        "FlushCache": Barrier.NONE,
        "GetInternalState": Barrier.NONE,
        "SetInternalState": Barrier.NONE,
        "SlowDown": Barrier.NONE,
        "Pause": Barrier.DRAINED,  # the response means that the device is idle
        "Continue": Barrier.NONE,
        "StartProfile": Barrier.DRAINED,
        "StopProfile": Barrier.DRAINED,
        "FreezeGc": Barrier.NONE,
        "ReleaseMemory": Barrier.IDLE,  # the memory of requests is part of it
        "ResumeMemory": Barrier.DRAINED,
        "SetLogLevel": Barrier.NONE,
        "TraceRequest": Barrier.NONE,
    }
)
