"""Lists the operations of the control service by RPC name, each with its barrier (table in docs/reference/control.md)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from services.worker.loop.barrier import Barrier

BARRIERS: Mapping[str, Barrier] = MappingProxyType(
    {
        "FlushCache": Barrier.NONE,  # pages freed under a step in flight are reusable at once: one stream orders all steps
        "GetInternalState": Barrier.NONE,
        "SetInternalState": Barrier.NONE,
        "SlowDown": Barrier.NONE,
        "Pause": Barrier.DRAINED,  # the answer says that the device rests
        "Continue": Barrier.NONE,
        "StartProfile": Barrier.DRAINED,
        "StopProfile": Barrier.DRAINED,
        "FreezeGc": Barrier.NONE,
        "ReleaseMemory": Barrier.IDLE,  # what requests hold lies in that memory
        "ResumeMemory": Barrier.DRAINED,
        "SetLogLevel": Barrier.NONE,
        "TraceRequest": Barrier.NONE,
    }
)
