"""Chooses the attention back end of a worker, when it starts and when its weights are resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rootstock_llm.kernels.contracts.step_ops import LayerKernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.attention.backend import AttentionBackend, AttentionShape, KernelAttention
from rootstock_llm.services.worker.exec.attention.flashinfer_backend import FlashInferAttention
from rootstock_llm.services.worker.exec.attention.flashinfer_limits import Unsupported

AUTO, FLASHINFER, TRITON, TORCH = "auto", "flashinfer", "triton", "torch"
NAMES = (AUTO, FLASHINFER, TRITON, TORCH)
Log = Callable[[str], None]


def choose_attention(
    name: str,
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    kernels: LayerKernels,
    log: Log,
    deterministic: bool = False,
) -> AttentionBackend:
    """Returns the attention back end for a model.

    Args:
        name: one of NAMES. `auto` is flashinfer on a CUDA device if it is installed and supports the shape, otherwise triton.
            On a CPU, `auto` is the kernels of the model's layers.
        log: receives a line with the choice and its reason, and lines about the loading of kernels.
        deterministic: whether the back end must be deterministic. This allows only triton on a CUDA device, and only the kernels
            of the model's layers on a CPU.

    Raises:
        ValueError: the name is unknown, or the back end is not available or not deterministic; the message has the reason.
    """
    if name not in NAMES:
        raise ValueError(f"attention back end {name!r} is unknown; the back ends are {', '.join(NAMES)}")
    if deterministic:
        return _deterministic(name, shape, device, kernels, log)
    if name == AUTO:
        return _automatic(shape, device, dtype, kernels, log)
    if name != TORCH and device.type != "cuda":
        raise ValueError(f"attention back end {name} needs a CUDA device, not {device.type}")
    if name == FLASHINFER:
        made = _flashinfer(shape, device, dtype, kernels, log)
        if isinstance(made, str):
            raise ValueError(f"attention back end flashinfer is not available: {made}")
        log("attention: flashinfer, as configured")
        return made
    log(f"attention: {name}, as configured")
    return _triton(shape, device) if name == TRITON else KernelAttention(reference, TORCH)


def _deterministic(name: str, shape: AttentionShape, device: torch.device, kernels: LayerKernels, log: Log) -> AttentionBackend:
    """Returns the back end of deterministic mode. Raises ValueError if `name` is another back end."""
    ours = AUTO if device.type != "cuda" else TRITON
    if name not in (AUTO, ours):
        raise ValueError(f"attention back end {name} is not deterministic: how it splits keys depends on the rows of a step")
    log("attention: our kernels, with sums in a fixed order")
    return KernelAttention(kernels) if ours == AUTO else _triton(shape, device, deterministic=True)


def _automatic(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kernels: LayerKernels, log: Log
) -> AttentionBackend:
    if device.type != "cuda":
        log(f"attention: our kernels, because the device is {device.type} and the other back ends need CUDA")
        return KernelAttention(kernels)
    made = _flashinfer(shape, device, dtype, kernels, log)
    if isinstance(made, str):
        log(f"attention: triton, because flashinfer is not available: {made}")
        return _triton(shape, device)
    log("attention: flashinfer, because it is installed and supports this model")
    return made


def _flashinfer(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kernels: LayerKernels, log: Log
) -> FlashInferAttention | str:
    """Returns FlashInfer's back end, ready for its first step, or the reason why it is not available.

    Most exceptions become a reason, because FlashInfer imports many other libraries and runs a compiler, which may be missing.

    Raises:
        torch.cuda.OutOfMemoryError: the library's buffers do not fit into the device's memory.
        RuntimeError: the device itself has failed, so that no back end can run on it.
    """
    try:
        backend = FlashInferAttention(shape, device, dtype, kernels, _imported())
        backend.prepare(log)
    except Unsupported as refusal:
        return refusal.reason
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as failure:
        cuda: Any = torch.cuda
        if cuda.is_initialized():
            torch.cuda.synchronize(device)  # raises if the device itself has failed
        return f"{type(failure).__name__}: {_first_line(failure)}"
    return backend


def _imported() -> Any:
    import flashinfer

    return flashinfer


def _first_line(failure: Exception) -> str:
    return next(iter(str(failure).splitlines()), "")[:300]


def _triton(shape: AttentionShape, device: torch.device, deterministic: bool = False) -> AttentionBackend:
    from rootstock_llm.services.worker.exec.attention.triton_backend import TritonAttention

    return TritonAttention(shape, device, deterministic)
