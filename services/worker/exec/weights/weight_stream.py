"""Streams a model's weights from safetensors files to allocated tensors on a device, in pieces, with several threads.

Each reader thread takes the next piece in the order of the files, reads it into a staging buffer and starts the copy to the
device. A thread has two staging buffers: it fills one of them while the device copies from the other. The calling thread waits
for the readers and reports the progress. The host memory for staging does not depend on the size of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Kernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.weights.checkpoint import FLOATS, STORED, Checkpoint, CheckpointError
from rootstock_llm.services.worker.exec.weights.load_progress import REPORT_EVERY_S, LoadMeter, LoadPhases
from rootstock_llm.services.worker.exec.weights.quantization import UNQUANTIZED, Quantization
from rootstock_llm.services.worker.exec.weights.safetensors_file import TensorFiles, TensorSpan, read_header
from rootstock_llm.services.worker.exec.weights.source import (
    Allocated,
    Filled,
    Placement,
    WeightReader,
    listed_tensors,
)

T = TypeVar("T")
BUFFERS = 2  # staging buffers per thread
ALIGNMENT = 8  # bytes; alignment of staging buffers, the size of the largest element


@dataclass(frozen=True, slots=True)
class StreamOptions:
    threads: int = 8  # number of reader threads
    staging_bytes: int = 256 << 20  # bytes of pinned host memory, shared equally by the threads


class PinnedSlab:
    """Host memory for staging. It is pinned for a GPU, so that copies run while threads read. The creator calls release()."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)

    def release(self) -> None:
        """Returns the memory to the system, also from torch's cache of pinned memory. No copy may be running."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        # torch.accelerator has the function since torch 2.12. Older CUDA builds have only the private function.
        empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
        if self._on_cuda and empty is not None:
            empty()


def buffers_of(slab: Tensor, threads: int) -> list[list[Tensor]]:
    """Cuts the slab into BUFFERS buffers per thread, all of one size. Raises ValueError if the slab is too small."""
    size = len(slab) // (threads * BUFFERS) // ALIGNMENT * ALIGNMENT
    if size == 0:
        raise ValueError(f"{len(slab)} bytes of staging memory are too few for {BUFFERS} buffers for each of {threads} threads")
    assert size * threads * BUFFERS <= len(slab), "all buffers lie in the slab"
    buffers = [slab[index * size : (index + 1) * size] for index in range(threads * BUFFERS)]
    return [buffers[first : first + BUFFERS] for first in range(0, len(buffers), BUFFERS)]


class Event(Protocol):
    """The methods of torch.cuda.Event that are used here."""

    def record(self, stream: torch.cuda.Stream | None) -> None: ...

    def synchronize(self) -> None:
        """Waits for the recorded work. Returns at once if nothing was recorded."""


class Immediate:
    """An Event for a device whose copies are done on return."""

    def record(self, stream: torch.cuda.Stream | None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def event_for(device: torch.device) -> Event:
    """Returns an event whose synchronize() lets the thread sleep instead of spin."""
    cuda: Any = torch.cuda
    return cuda.Event(blocking=True) if device.type == "cuda" else Immediate()


class Lane:
    """The staging buffers of one reader thread. A buffer is refilled only after the event that follows its copy."""

    def __init__(self, buffers: Sequence[Tensor], stream: torch.cuda.Stream | None, make_event: Callable[[], Event]) -> None:
        """
        Args:
            stream: CUDA stream of the copies, which all lanes share; None on a CPU.
            make_event: makes an event for a buffer.
        """
        self._buffers = [(buffer, make_event()) for buffer in buffers]
        self._stream = stream
        self._next = 0  # index of the buffer for the next piece
        self.piece_bytes = len(buffers[0])  # largest size of a piece

    def move(self, into: Tensor, dtype: torch.dtype, fill: Callable[[memoryview], None]) -> None:
        """Fills the next buffer and starts its copy to the device, which also converts the elements.

        Args:
            into: flat tensor on the device to be filled. It may be read after the stream is synchronized.
            dtype: dtype of the elements in the file.
            fill: writes the elements of the file to the given buffer.
        """
        buffer, copied = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        assert len(into) * dtype.itemsize <= len(buffer), "a piece fits its buffer"
        staged = buffer[: len(into) * dtype.itemsize]
        copied.synchronize()
        fill(staged.numpy().data)
        with torch.cuda.stream(self._stream):
            elements = staged.view(dtype)
            into.copy_(elements if dtype == into.dtype else elements.to(into.device, non_blocking=True), non_blocking=True)
            copied.record(self._stream)


@dataclass(frozen=True, slots=True)
class _Load:
    """One tensor to read, and the memory for it."""

    span: TensorSpan  # bytes in a file
    into: Tensor  # flat tensor on the device


@dataclass(frozen=True, slots=True)
class _TensorPiece:
    """Elements first .. first + count - 1 of a tensor."""

    load: _Load
    first: int
    count: int


def stream_weights(
    checkpoint: Checkpoint,
    read: Callable[[WeightReader], T],
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    options: StreamOptions,
    progress: Callable[[str], None],
    phases: LoadPhases,
    slab: Callable[[int, torch.device], PinnedSlab] = PinnedSlab,
    quantization: Quantization = UNQUANTIZED,
) -> T:
    """Implements WeightLoader for any device, after `device` and `options` are bound.

    Files and shapes are checked before memory is allocated on the device. Weights are quantized and packed on the device.

    Args:
        device: the device for the weights.
        options: number of threads and size of the staging memory.
        slab: allocates the staging memory.
        quantization: decides the form of the model's matrices.
    """
    with phases.timed("weights"):
        listed = listed_tensors(read, dtype, quantization)
        checkpoint.require([placement.name for placement in listed])
        spans = _spans(checkpoint, listed)
        allocated = Allocated(dtype, torch.device(device), quantization)
        read(WeightReader(allocated, reference))  # reference kernels do not pack the tensors, so that these can be filled
        loads = [_Load(spans[placement.name], placement.into) for placement in allocated.placements]
        total = sum(load.span.num_bytes for load in loads)
        _read_all(loads, torch.device(device), options, LoadMeter(total, phases.clock, progress), slab)
        phases.weight_bytes_read += total
        filled = Filled(allocated.tensors, dtype, quantization)
        del allocated, loads  # views in both would keep all unpacked tensors in memory while kernels pack copies
        return read(WeightReader(filled, kernels))


def _spans(checkpoint: Checkpoint, placements: Sequence[Placement]) -> dict[str, TensorSpan]:
    """Finds the tensors in the files' headers. Raises CheckpointError if a tensor is missing or has a wrong shape or dtype."""
    wanted = {placement.name: (checkpoint.path_of(placement.name), placement) for placement in placements}
    headers = {path: read_header(path) for path in dict.fromkeys(path for path, _ in wanted.values())}
    for name, (path, placement) in wanted.items():
        shape = placement.shape
        span = headers[path].get(name)
        if span is None:
            raise CheckpointError(f"{path} has no tensor {name}")
        if span.shape != shape:
            raise CheckpointError(f"{name} of {path} has shape {span.shape}; the config requires {shape}")
        is_float = placement.dtype in (None, torch.float32)
        if not is_float and STORED.get(span.dtype) != placement.dtype:
            kind = str(placement.dtype).removeprefix("torch.")
            raise CheckpointError(f"{name} of {path} has dtype {span.dtype}; the config requires {kind}")
        if is_float and span.dtype not in FLOATS:
            raise CheckpointError(f"{name} of {path} has dtype {span.dtype}; supported: {', '.join(FLOATS)}")
    return {name: headers[path][name] for name, (path, _) in wanted.items()}


def _read_all(
    loads: Sequence[_Load],
    device: torch.device,
    options: StreamOptions,
    meter: LoadMeter,
    slab: Callable[[int, torch.device], PinnedSlab],
) -> None:
    """Reads all tensors, and returns when they are on the device. Raises CheckpointError."""
    in_order = sorted(loads, key=lambda load: (load.span.path, load.span.begin))
    files = TensorFiles([load.span.path for load in in_order])
    try:
        staging = slab(options.staging_bytes, device)
        try:
            _run(in_order, files, buffers_of(staging.memory, options.threads), device, meter)
        finally:
            staging.release()
    finally:
        files.close()
    meter.end()


def _run(loads: Sequence[_Load], files: TensorFiles, buffers: list[list[Tensor]], device: torch.device, meter: LoadMeter) -> None:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(
            torch.cuda.current_stream(device)
        )  # running kernels may still read freed memory that now belongs to the weights
    lanes = [Lane(each, stream, partial(event_for, device)) for each in buffers]
    pieces = _PieceQueue(_pieces(loads, lanes[0].piece_bytes))
    try:
        with ThreadPoolExecutor(len(lanes), "weights") as pool:
            try:
                _wait_for([pool.submit(_reader, lane, pieces, files, meter) for lane in lanes], meter)
            finally:
                pieces.stop()
    finally:
        if stream is not None:
            stream.synchronize()
            torch.cuda.empty_cache()  # torch caches freed memory per stream, and no later work uses this stream


def _wait_for(readers: list[Future[None]], meter: LoadMeter) -> None:
    """Waits for the readers. If one of them fails, raises its error without waiting for the other readers."""
    running: set[Future[None]] = set(readers)
    while running:
        done, running = wait(running, timeout=REPORT_EVERY_S, return_when=FIRST_EXCEPTION)
        for reader in done:
            reader.result()
        meter.tick()


def _pieces(loads: Sequence[_Load], piece_bytes: int) -> Iterator[_TensorPiece]:
    for load in loads:
        max_elements, count = piece_bytes // STORED[load.span.dtype].itemsize, len(load.into)
        for first in range(0, count, max_elements):
            yield _TensorPiece(load, first, min(max_elements, count - first))


class _PieceQueue:
    """Distributes the pieces to the reader threads until stop() is called."""

    def __init__(self, pieces: Iterator[_TensorPiece]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> _TensorPiece | None:
        with self._lock:
            return None if self._stopped else next(self._pieces, None)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


def _reader(lane: Lane, pieces: _PieceQueue, files: TensorFiles, meter: LoadMeter) -> None:
    with torch.inference_mode():  # the mode is per thread, and only in it may inference tensors be written
        while (piece := pieces.take()) is not None:
            span, dtype = piece.load.span, STORED[piece.load.span.dtype]
            offset = piece.first * dtype.itemsize
            into = piece.load.into[piece.first : piece.first + piece.count]
            lane.move(into, dtype, partial(files.read, span=span, offset=offset))
            meter.added(piece.count * dtype.itemsize)
