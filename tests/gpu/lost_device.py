"""A pytest plugin: when a test has left the process without its device, those that remain are not begun.

After an illegal address or a failed assertion in a kernel every call of CUDA fails. Whatever came next would fail with it, and
hide which test it was.
"""

from __future__ import annotations

import pytest
import torch


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    if isinstance(node, pytest.Item) and (reason := why_lost()):
        node.session.shouldfail = f"the device is lost since {node.nodeid}: {reason}"


def why_lost() -> str:
    """Empty where the device still answers, or was never asked."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""
