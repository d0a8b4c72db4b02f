"""python -m rootstock_llm.services.local: starts the system on this machine, as `rootstock serve` and `make run` do."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rootstock_llm.services.local.ends import Memory, num_memory_kills
from rootstock_llm.services.local.model_folder import NoModel, model_folder, weight_bytes
from rootstock_llm.services.local.plan import (
    Part,
    log_folder,
    num_gpus,
    num_ports,
    parts,
    settings_of,
    state_folder,
    worker_settings,
)
from rootstock_llm.services.local.ports import free_ports, why_not_listen
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.local.start import Start
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.shared.settings import WRONG_SETTINGS
from rootstock_llm.services.worker.exec.pools.host_memory import free_memory
from rootstock_llm.services.worker.text.tokenizer_folder import with_tokenizer

INTERRUPTED = 130  # exit status after Ctrl-C, as in a shell: 128 + SIGINT


async def run(settings: LocalSettings) -> int:
    """Starts all processes, runs until a signal, and stops them. Raises ValueError or OSError if the settings are wrong.

    Returns:
        The exit status: 0 after a signal, 1 if the start fails.
    """
    needs_weights = worker_settings(settings).executor != "fake"
    model_path = with_tokenizer(model_folder(settings.model, needs_weights))
    memory = Memory(weight_bytes(model_path), free_memory(), num_memory_kills())
    if needs_weights:
        _check_memory(settings, model_path, memory)
    started = parts(settings, str(model_path), free_ports(num_ports(settings), {settings.port, settings.admin_port}))
    _check_ports(started)
    _make_folders(settings)
    start = Start(settings, model_path, started, memory)
    stop = asyncio.create_task(grpc_server.stop_signal().wait())
    serving = asyncio.create_task(start.run())
    await asyncio.wait((stop, serving), return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    (failure,) = await asyncio.gather(serving, return_exceptions=True)
    begun = time.monotonic()
    await start.supervisor.stop()
    print(f"\nstopped {len(start.supervisor.children)} processes in {time.monotonic() - begun:.1f} s")
    if isinstance(failure, asyncio.CancelledError):
        return 0
    print(f"cannot serve: {failure or repr(failure)}", file=sys.stderr)
    return 1


def _check_memory(settings: LocalSettings, model_path: Path, memory: Memory) -> None:
    """Refuses a model on a machine without GPUs if one copy of the weights per worker exceeds the free memory. Raises NoModel."""
    workers = len(settings.worker_roles)
    if num_gpus() or memory.model_bytes * workers <= memory.free_bytes:
        return
    raise NoModel(
        f"{model_path}: the weights take {memory.model_bytes / 1e9:.2f} GB for each of {workers} workers, and"
        f" {memory.free_bytes / 1e9:.2f} GB of memory is free."
        " Choose a smaller model or fewer workers, or end other programs."
    )


def _check_ports(started: list[Part]) -> None:
    """Checks that the gateways can listen on the ports that the user chose. Raises ValueError."""
    for part in started:
        gateway = part.settings
        if gateway is None:
            continue
        if fault := why_not_listen(gateway.host, gateway.port):
            free = max(1024, gateway.port) + 1
            raise ValueError(f"port {gateway.port} {fault}; choose another one: --port {free} (make run PORT={free})")
        if gateway.admin_port and (fault := why_not_listen(gateway.admin_host, gateway.admin_port)):
            raise ValueError(f"admin port {gateway.admin_port} {fault}; choose another one with --admin-port")


def _make_folders(settings: LocalSettings) -> None:
    """Creates the folders for logs and state. Raises ValueError, which names the setting, if a folder is not writable."""
    folders = {"log_dir": log_folder(settings)} | ({"state_dir": state_folder(settings)} if settings.state_dir else {})
    for name, folder in folders.items():
        flag = f"--{name.replace('_', '-')}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{flag} {folder} cannot be created: {str(error.strerror).lower()}; choose another folder") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{flag} {folder} is not writable; choose another folder")


def serve(words: Sequence[str]) -> int:
    """Runs `rootstock serve [MODEL] [FLAGS]`: the first argument is the model unless it is a flag. Returns the exit status."""
    model = ["--model", words[0]] if words and not words[0].startswith("-") else []
    return main([*model, *words[bool(model) :]], "rootstock serve")


def main(argv: Sequence[str] | None = None, prog: str = "local") -> int:
    """Runs the launcher until a signal and returns the exit status. `prog` is the launcher's name in messages."""
    logging.basicConfig(level="WARNING", format="  %(message)s")
    if sys.platform != "linux":
        print(
            "cannot serve: the services need Linux. On macOS, use `docker compose up`; on Windows, also WSL 2.", file=sys.stderr
        )
        return 1
    try:
        settings = settings_of(LocalSettings, prog, sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return WRONG_SETTINGS
    try:
        return asyncio.run(run(settings))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # during a download
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
