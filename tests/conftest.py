"""Where there is no GPU, Triton's interpreter runs its kernels: chosen when triton is first imported, by whatever test.

Files that take long come first: with several processes, one would wait at the end for whoever has such a file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LONG_FILES = {
    "test_images_replay.py",
    "test_long_runs.py",
    "test_grammar_pool.py",
    "test_gpu_check.py",
    "test_scheduler_properties.py",
}

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # tests serve gRPC and start processes: see services/local/__init__.py


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
