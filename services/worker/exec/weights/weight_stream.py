"""Reads a decoder's weights from safetensors straight into their fused places on a device, in pieces, by several threads.

Host memory is bounded by the staging buffers whatever the model's size. The threads read where the files are (one piece
each, in the files' order) and start the copies; the thread that asked waits for them and tells the progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels
from kernels.reference import layers as reference
from services.worker.exec.weights.checkpoint import FLOATS, Checkpoint, CheckpointError
from services.worker.exec.weights.decoder_destination import Allocated, Filled, Placement
from services.worker.exec.weights.families import DecoderConfig
from services.worker.exec.weights.load_meter import REPORT_EVERY_S, LoadMeter
from services.worker.exec.weights.load_phases import LoadPhases
from services.worker.exec.weights.safetensors_file import TensorFiles, TensorPlace, read_header
from services.worker.exec.weights.staging import Lane, PinnedSlab, buffers_of, event_for
from services.worker.exec.weights.weights import DecoderWeights, assemble, required_tensors, tensor_prefix


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """staging_bytes: pinned host memory, of all threads together."""

    threads: int = 8
    staging_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class _Load:
    """One tensor: from where in the files to where on the device."""

    place: TensorPlace
    into: Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """first, count: elements of the tensor."""

    load: _Load
    first: int
    count: int


def stream_decoder_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    options: StreamOptions,
    progress: Callable[[str], None],
    phases: LoadPhases,
    slab: Callable[[int, torch.device], PinnedSlab] = PinnedSlab,
) -> DecoderWeights:
    """What load_weights gives, on the device. Files and shapes are checked before memory is taken there.

    kernels: those that will read the weights; packing runs on the device. Counts as the phase "weights". progress: called
    with a line every few seconds, from any thread. Raises CheckpointError.
    """
    prefix = tensor_prefix(checkpoint)
    with phases.timed("weights"):
        checkpoint.require(required_tensors(config, prefix))
        expected = _laid_out(config, prefix, dtype, torch.device("meta"))
        places = _places(checkpoint, expected.placements)
        laid_out = _laid_out(config, prefix, dtype, torch.device(device))
        loads = [_Load(places[placement.name], placement.into) for placement in laid_out.placements]
        total = sum(load.place.num_bytes for load in loads)
        _read_all(loads, torch.device(device), options, LoadMeter(total, phases.clock, progress), slab)
        phases.weight_bytes_read += total
        return assemble(Filled(laid_out.tensors), config, prefix, kernels)


def _laid_out(config: DecoderConfig, prefix: str, dtype: torch.dtype, device: torch.device) -> Allocated:
    allocated = Allocated(dtype, device)
    assemble(allocated, config, prefix, reference)  # reference keeps what it packs as it is
    return allocated


def _places(checkpoint: Checkpoint, placements: Sequence[Placement]) -> dict[str, TensorPlace]:
    """Where each tensor lies. Raises CheckpointError if it does not lie there, or not as the config has it."""
    wanted = {placement.name: (checkpoint.path_of(placement.name), placement.shape) for placement in placements}
    headers = {path: read_header(path) for path in dict.fromkeys(path for path, _ in wanted.values())}
    for name, (path, shape) in wanted.items():
        place = headers[path].get(name)
        if place is None:
            raise CheckpointError(f"{path} does not hold {name}")
        if place.shape != shape:
            raise CheckpointError(f"{name} of {path} has shape {place.shape}, the config asks for {shape}")
        if place.dtype not in FLOATS:
            raise CheckpointError(f"{name} of {path} is {place.dtype}; supported: {', '.join(FLOATS)}")
    return {name: headers[path][name] for name, (path, _) in wanted.items()}


def _read_all(
    loads: Sequence[_Load],
    device: torch.device,
    options: StreamOptions,
    meter: LoadMeter,
    slab: Callable[[int, torch.device], PinnedSlab],
) -> None:
    """Returns once every byte is where it belongs. Raises CheckpointError."""
    in_order = sorted(loads, key=lambda load: (load.place.path, load.place.begin))
    files = TensorFiles([load.place.path for load in in_order])
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
        stream.wait_stream(torch.cuda.current_stream(device))  # whose work may still be using what the weights' memory was
    lanes = [Lane(each, stream, partial(event_for, device)) for each in buffers]
    pieces = _Pieces(_pieces(loads, lanes[0].piece_bytes))
    try:
        with ThreadPoolExecutor(len(lanes), "weights") as pool:
            try:
                _attend([pool.submit(_reader, lane, pieces, files, meter) for lane in lanes], meter)
            finally:
                pieces.stop()
    finally:
        if stream is not None:
            stream.synchronize()
            torch.cuda.empty_cache()  # what conversions took on this stream serves no other


def _attend(readers: list[Future[None]], meter: LoadMeter) -> None:
    """Raises what a reader has raised, and does not wait for the others then."""
    left: set[Future[None]] = set(readers)
    while left:
        done, left = wait(left, timeout=REPORT_EVERY_S, return_when=FIRST_EXCEPTION)
        for reader in done:
            reader.result()
        meter.tick()


def _pieces(loads: Sequence[_Load], piece_bytes: int) -> Iterator[_Piece]:
    for load in loads:
        most, count = piece_bytes // FLOATS[load.place.dtype].itemsize, len(load.into)
        for first in range(0, count, most):
            yield _Piece(load, first, min(most, count - first))


class _Pieces:
    """Deals the pieces out to threads, until stop()."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> _Piece | None:
        with self._lock:
            return None if self._stopped else next(self._pieces, None)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


def _reader(lane: Lane, pieces: _Pieces, files: TensorFiles, meter: LoadMeter) -> None:
    with torch.inference_mode():  # per thread; the destination may have been made under it
        while (piece := pieces.take()) is not None:
            place, dtype = piece.load.place, FLOATS[piece.load.place.dtype]
            offset = piece.first * dtype.itemsize
            into = piece.load.into[piece.first : piece.first + piece.count]
            lane.move(into, dtype, partial(files.read, place=place, offset=offset))
            meter.added(piece.count * dtype.itemsize)
