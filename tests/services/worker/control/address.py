"""Builds loopback addresses of a control service for tests."""

from __future__ import annotations

from rootstock_llm.services.worker.control.server import ControlAddress


def control_at(
    port: int = 0, host: str = "127.0.0.1", token: str = "", token_file: str = "", profile_dir: str = "build/profiles"
) -> ControlAddress:
    return ControlAddress(host, port, token, token_file, profile_dir)
