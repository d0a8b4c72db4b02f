"""A double of NIXL's agent. It reads memory of another process over loopback, with the metadata of that memory.

The environment variable NIXL_FAKE of the process selects a fault:

| value | fault |
|---|---|
| `broken` | The library cannot be loaded. |
| `blind` | There is no UCX backend. |
| `stuck` | No read ends. |
| `late` | Only the first two reads of an agent end. |
| `wrong` | Reads return zeros instead of the remote bytes. |
| `refuses` | No memory can be registered. |
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from typing import Any

FAULT = os.environ.get("NIXL_FAKE", "")
if FAULT == "broken":
    raise ImportError("libuct.so.0: cannot open shared object file")
_METADATA = struct.Struct("<16sHQQ")  # agent, port, address, size
_REQUEST = struct.Struct("<QQ")  # address, size


class nixl_agent_config:
    def __init__(self, backends: list[str]) -> None:
        self.backends = backends


class Handle:
    def __init__(self, target: Any, port: int, asked: tuple[int, int], local: int) -> None:
        self.is_stuck = False
        self._target, self._port, self._asked, self._local = target, port, asked, local

    def begin(self) -> str:
        if self.is_stuck:
            return "PROC"
        with socket.create_connection(("127.0.0.1", self._port)) as asking:
            asking.sendall(_REQUEST.pack(*self._asked))
            data = asking.makefile("rb").read(self._asked[1])
        if len(data) < self._asked[1]:
            return "ERR"
        ctypes.memmove(self._local, data if FAULT != "wrong" else bytes(len(data)), len(data))
        return "DONE"

    def release(self) -> None:
        if self.is_stuck and self._target.others:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")


class nixl_agent:
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self.backends = {} if FAULT == "blind" else dict.fromkeys(config.backends, 1)
        self.name, self.others, self._reads = name, dict[bytes, list[tuple[int, int, int]]](), 0
        self._registered: list[tuple[int, int]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def register_memory(self, memory: Any, mem_type: str, backends: list[str]) -> Any:
        assert mem_type == "DRAM" and backends == ["UCX"]
        if FAULT == "refuses":
            raise RuntimeError("NIXL_ERR_BACKEND")
        self._registered += [(address, size) for address, size, _, _ in memory]
        return memory

    def deregister_memory(self, memory: Any, backends: list[str]) -> None:
        for address, size, _, _ in memory:
            self._registered.remove((address, size))

    def get_partial_agent_metadata(self, memory: Any, inc_conn_info: bool, backends: list[str]) -> bytes:
        ((address, size, _, _),) = memory
        return _METADATA.pack(self.name.encode()[:16], self._listener.getsockname()[1], address, size)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        try:
            name, *where = _METADATA.unpack(metadata)
        except struct.error:
            raise RuntimeError("NIXL_ERR_MISMATCH")
        self.others.setdefault(name, []).append(tuple(where))
        return bytes(name)

    def remove_remote_agent(self, name: bytes) -> None:
        del self.others[name]

    def get_xfer_descs(self, memory: Any, mem_type: str) -> Any:
        return [tuple(map(int, row)) for row in memory]

    def initialize_xfer(self, operation: str, here: Any, there: Any, name: bytes, backends: list[str]) -> Handle:
        ((local, size, _),), ((remote, remote_size, _),) = here, there
        assert operation == "READ" and size == remote_size
        for port, address, known in self.others[name]:
            if address <= remote and remote + size <= address + known:
                return Handle(self, port, (remote, size), local)
        raise RuntimeError("NIXL_ERR_NOT_FOUND")

    def transfer(self, handle: Handle) -> str:
        self._reads += 1
        handle.is_stuck = FAULT == "stuck" or (FAULT == "late" and self._reads > 2)
        return handle.begin()

    def check_xfer_state(self, handle: Handle) -> str:
        return "PROC"

    def _serve(self) -> None:
        while True:
            asking, _ = self._listener.accept()
            with asking:
                address, size = _REQUEST.unpack(asking.makefile("rb").read(_REQUEST.size))
                if any(first <= address and address + size <= first + has for first, has in self._registered):
                    asking.sendall(ctypes.string_at(address, size))
