"""Builds executors of tiny checkpoints in the same way for a CPU and a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.protocol import Executor

GRAPH_ROWS, STEP_TOKENS = 16, 512


def options_for(device: str, **changes: Any) -> DeviceOptions:
    """Returns DeviceOptions for a device. On a CPU, torch's reference kernels run without graphs."""
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
    """Builds an executor.

    Args:
        folder: folder of the model.
        device: torch device, such as "cuda".
        page_size: tokens per KV page.
        max_slots: number of slots.
        num_pages: pages of the KV pool.
        context_len: context length in tokens.
        dtype: dtype of weights and KV.
        check_relay: whether decoding a slot without a sampled token raises.
        options: further fields of DeviceOptions.
    """
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
