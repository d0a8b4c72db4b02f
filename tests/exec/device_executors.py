"""Device executors over tiny checkpoints, alike on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from services.worker.exec.build import DeviceOptions, build_device_executor
from services.worker.exec.contracts.protocol import Executor

GRAPH_ROWS, STEP_TOKENS = 16, 512


def options_for(device: str, **changes: Any) -> DeviceOptions:
    """What has no GPU runs in torch, kernel by kernel."""
    on_gpu = device.startswith("cuda")
    plain = DeviceOptions(
        device=device,
        kernels="auto" if on_gpu else "torch",
        attention_backend="auto" if on_gpu else "torch",
        cuda_graphs=on_gpu,
        max_graph_rows=GRAPH_ROWS,
        max_tokens=STEP_TOKENS,
    )
    return replace(plain, **changes)


def executor_of(
    folder: Path,
    device: str,
    page_size: int = 4,
    max_slots: int = 16,
    num_pages: int = 1024,
    context_len: int = 512,
    dtype: str = "float32",
    check_relay: bool = True,
    **options: Any,
) -> Executor:
    """options: of DeviceOptions. check_relay: a decode of what was never sampled raises."""
    executor, _ = build_device_executor(
        model_path=str(folder),
        dtype=dtype,
        page_size=page_size,
        max_slots=max_slots,
        num_pages=num_pages,
        mem_fraction_static=0.5,
        context_len=context_len,
        options=options_for(device, **options),
        progress=lambda _: None,
        check_relay=check_relay,
    )
    return executor
