"""Finds the device on which steps run, and makes its streams and its weight loader."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from rootstock_llm.kernels.contracts.ops import Kernels
from rootstock_llm.kernels.contracts.step_ops import LayerKernels
from rootstock_llm.services.worker.exec.contracts.options import DeviceOptions
from rootstock_llm.services.worker.exec.kernel_set import layer_kernels, numerics
from rootstock_llm.services.worker.exec.streams.cuda_streams import CudaStreams, Streams
from rootstock_llm.services.worker.exec.streams.host_streams import HostStreams
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint
from rootstock_llm.services.worker.exec.weights.load_progress import LoadPhases
from rootstock_llm.services.worker.exec.weights.load_request import LoadTarget, load_weights
from rootstock_llm.services.worker.exec.weights.quantization import UNQUANTIZED, Quantization
from rootstock_llm.services.worker.exec.weights.source import WeightReader
from rootstock_llm.services.worker.exec.weights.weight_stream import StreamOptions, stream_weights

T = TypeVar("T")


class NoDevice(ValueError):
    """Raised if this machine does not have the device, or if steps cannot run on devices of this kind."""


def device_of(name: str) -> torch.device:
    """Returns the device with this name, and makes a GPU torch's current device.

    The index of a GPU is 0 by default. Raises NoDevice.
    """
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise NoDevice(f"no GPU for {name}: torch {torch.__version__} sees none")
        if (device.index or 0) >= torch.cuda.device_count():
            raise NoDevice(f"there is no device {name}: torch finds {torch.cuda.device_count()} GPUs")
        found = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(found)
        return found
    if device.type != "cpu":
        raise NoDevice(f"steps cannot run on the device {name}; supported: cuda, cpu")
    return device


def streams_of(device: torch.device, num_threads: int) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams(num_threads)


def load_target(device: torch.device, options: DeviceOptions) -> LoadTarget:
    def kernels(dtype: torch.dtype) -> LayerKernels:
        return layer_kernels(options.kernels, device, dtype, options.num_threads, options.deterministic)

    def streamed(
        checkpoint: Checkpoint,
        read: Callable[[WeightReader], T],
        dtype: torch.dtype,
        kernels: Kernels,
        progress: Callable[[str], None],
        phases: LoadPhases,
        quantization: Quantization = UNQUANTIZED,
    ) -> T:
        stream = StreamOptions(threads=options.load_threads)
        return stream_weights(checkpoint, read, dtype, device, kernels, stream, progress, phases, quantization=quantization)

    fingerprint = partial(numerics, options.kernels, device) if options.deterministic else None
    return LoadTarget(device, kernels, streamed if device.type == "cuda" else load_weights, fingerprint)
