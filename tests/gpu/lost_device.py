"""A pytest plugin that skips the remaining tests after a test has lost the device.

After an illegal address or a failed assertion in a kernel, every CUDA call of the process fails. All later tests would fail too,
and hide the test that caused the fault.
"""

from __future__ import annotations

import pytest
import torch


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    if isinstance(node, pytest.Item) and (reason := why_lost()):
        node.session.shouldfail = f"the device is lost since {node.nodeid}: {reason}"


def why_lost() -> str:
    """Returns the error with which the device refuses calls; "" if it responds or was never used."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""
