"""The streaming loader reads the same weights as the CPU's loader, in bounded memory. Its errors name the file and the tensor."""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import PackedLinear
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.models.decoder import DecoderModel
from rootstock_llm.services.worker.exec.models.registry import ARCHITECTURES, config_of
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError, read_config
from rootstock_llm.services.worker.exec.weights.load_progress import LoadPhases
from rootstock_llm.services.worker.exec.weights.load_request import load_weights
from rootstock_llm.services.worker.exec.weights.source import Allocated, Filled, RandomSource, WeightReader
from rootstock_llm.services.worker.exec.weights.weight_stream import Lane, PinnedSlab, StreamOptions, buffers_of, stream_weights
from tests.exec.tiny_models import MODELS

SMALL = StreamOptions(threads=3, staging_bytes=3 * 2 * 1000)  # pieces of 1,000 bytes, so that tensors have several
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns the folder of a model; it writes each folder only once."""
    folders: dict[tuple[str, torch.dtype], Path] = {}

    def folder(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in folders:
            folders[name, dtype] = tmp_path_factory.mktemp(name)
            MODELS[name].build(folders[name, dtype], dtype)
        return folders[name, dtype]

    return folder


@pytest.fixture
def broken(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a model's folder that the test may damage."""
    for file in saved("qwen3").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def reading(folder: Path) -> Callable[[WeightReader], DecoderModel]:
    config = config_of(read_config(folder))
    return partial(ARCHITECTURES[config.architecture].read, config=config)


def streamed(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    options: StreamOptions = SMALL,
    kernels: Any = reference,
    say: Callable[[str], None] = lambda _: None,
    slab: Callable[[int, torch.device], PinnedSlab] = PinnedSlab,
) -> DecoderModel:
    with closing(Checkpoint(folder)) as checkpoint:
        return stream_weights(checkpoint, reading(folder), dtype, device, kernels, options, say, LoadPhases(), slab)


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    with closing(Checkpoint(folder)) as checkpoint:
        return load_weights(checkpoint, reading(folder), dtype, reference, lambda _: None, LoadPhases())


def leaves(value: Any, path: str = "weights") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of every leaf of a tree of dataclasses and tuples."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif hasattr(value, "__dataclass_fields__"):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def assert_same(found: DecoderModel, expected: DecoderModel, device: torch.device) -> None:
    ours, theirs = dict(leaves(found)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, Tensor):
            assert (ours[path].dtype, ours[path].device.type) == (value.dtype, device.type), path
            assert ours[path].is_contiguous() and torch.equal(ours[path].cpu(), value), path
        else:
            assert ours[path] == value, path


# Models whose weights have different forms. Models that differ only in rope or windows are omitted, as these are in the config.
WEIGHT_FORMS = [
    "llama-untied",
    "llama-tied",
    "llama-sharded",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3.5",
    "gemma3",
    "mixtral",
    "gpt-oss",
]


@pytest.mark.by_day(one_in=2, seed=37)
@pytest.mark.parametrize("name", WEIGHT_FORMS)
def test_streamed_weights_equal_loaded_weights(name: str, saved: Callable[[str], Path], device: torch.device) -> None:
    assert_same(streamed(saved(name), device), plain(saved(name)), device)


@pytest.mark.by_day(one_in=2, seed=19)
@pytest.mark.parametrize(
    ("wanted", "stored"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_streamed_weights_are_converted_to_the_configured_dtype(
    stored: torch.dtype, wanted: torch.dtype, saved: Any, device: torch.device
) -> None:
    folder = saved("qwen2", stored)
    assert_same(streamed(folder, device, wanted), plain(folder, wanted), device)


def test_weights_can_be_streamed_in_inference_mode(saved: Callable[[str], Path], device: torch.device) -> None:
    with torch.inference_mode():
        assert_same(streamed(saved("qwen3"), device), plain(saved("qwen3")), device)


@pytest.mark.by_day(one_in=2, seed=9)
@pytest.mark.parametrize(("threads", "buffer"), [(1, 40), (1, 64 * 96 * 4 - 8), (1, 64 * 96 * 4), (4, 96), (2, 1 << 20)])
def test_weights_are_streamed_in_pieces_of_any_size(
    threads: int, buffer: int, saved: Callable[[str], Path], device: torch.device
) -> None:
    options = StreamOptions(threads, threads * 2 * buffer)
    assert_same(streamed(saved("llama-biases"), device, options=options), plain(saved("llama-biases")), device)


def test_tied_head_shares_storage_with_the_embedding(saved: Callable[[str], Path], device: torch.device) -> None:
    tied, untied = streamed(saved("llama-tied"), device), streamed(saved("llama-untied"), device)
    assert tied.head is not None and tied.head.linear.packed.data.data_ptr() == tied.embedding.packed.data.data_ptr()
    assert untied.head is not None and untied.head.linear.packed.data.data_ptr() != untied.embedding.packed.data.data_ptr()
    assert tied.num_bytes() == untied.num_bytes() - untied.embedding.packed.data.nbytes


def test_streamed_weights_are_packed_by_the_given_kernels(saved: Callable[[str], Path], device: torch.device) -> None:
    class Packing:
        """Kernels that pack a weight by reversing one of its axes."""

        def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
            return PackedLinear(weight.flip(1), bias, weight.shape[1], weight.shape[0], True)

        def pack_gated(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
            return PackedLinear(weight.flip(0), bias, weight.shape[1], weight.shape[0] // 2, True)

    found, expected = streamed(saved("qwen3"), device, kernels=Packing()), plain(saved("qwen3"))
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(ours.mixer.qkv.packed.data.cpu(), theirs.mixer.qkv.packed.data.flip(1))
        assert torch.equal(ours.mlp.gate_up.data.cpu(), theirs.mlp.gate_up.data.flip(0)) and ours.mlp.gate_up.out_features == 96


def test_streaming_releases_each_tensor_that_the_kernels_have_copied(saved: Callable[[str], Path], device: torch.device) -> None:
    given: list[weakref.ref[torch.UntypedStorage]] = []

    class Copying:
        """Kernels that pack a copy, so that each unpacked weight can be released before the next one is read."""

        def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
            assert not any(storage() for storage in given), "earlier unpacked weights must be released"
            given.append(weakref.ref(weight.untyped_storage()))
            return reference.pack_linear(weight.clone(), bias)

        pack_gated = pack_linear

    streamed(saved("llama-untied"), device, kernels=Copying())
    assert len(given) > 4


def test_weights_source_returns_an_allocated_tensor_only_once() -> None:
    allocated = Allocated(torch.float32, torch.device("cpu"))
    fused = allocated.stacked([("a", (2, 3)), ("b", (1, 3))])
    assert [(part.name, part.into.data_ptr() - fused.data_ptr()) for part in allocated.placements] == [("a", 0), ("b", 24)]
    filled = Filled(allocated.tensors, torch.float32)
    assert filled.stacked([("a", (2, 3)), ("b", (1, 3))]) is fused
    with pytest.raises(KeyError):
        filled.stacked([("a", (2, 3)), ("b", (1, 3))])


class Slabs:
    """Creates pinned slabs and logs their allocation and release."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def make(self, num_bytes: int, device: torch.device) -> PinnedSlab:
        log = self.log
        log.append(f"take {num_bytes}")

        class Logged(PinnedSlab):
            def release(self) -> None:
                log.append("release")
                super().release()

        return Logged(num_bytes, device)


def test_streaming_uses_no_more_host_memory_than_the_staging_buffers(
    saved: Callable[[str], Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs, largest, move = Slabs(), list[int](), Lane.move

    def watched(lane: Lane, into: Tensor, dtype: torch.dtype, fill: Callable[[memoryview], None]) -> None:
        largest.append(len(into) * dtype.itemsize)
        move(lane, into, dtype, fill)

    monkeypatch.setattr(Lane, "move", watched)
    weights = streamed(saved("llama-untied"), device, slab=slabs.make)
    assert slabs.log == [f"take {SMALL.staging_bytes}", "release"]
    assert max(largest) <= SMALL.staging_bytes // 6 and sum(largest) == weights.num_bytes()


class Recorded:
    """Replaces a CUDA event and logs its calls."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def record(self, stream: torch.cuda.Stream | None) -> None:
        self._log.append(f"copy {self._name}")

    def synchronize(self) -> None:
        self._log.append(f"wait {self._name}")


def test_staging_buffer_is_refilled_only_after_the_copy_from_the_buffer() -> None:
    log: list[str] = []
    names = iter("ab")
    lane = Lane(buffers_of(torch.empty(16, dtype=torch.uint8), 1)[0], None, lambda: Recorded(log, next(names)))
    into = torch.zeros(6)

    def fill(view: memoryview) -> None:
        log.append("fill")
        view[:] = struct.pack("<2f", len(log), 7.0)

    for piece in into.split(2):
        lane.move(piece, torch.float32, fill)
    assert log == ["wait a", "fill", "copy a", "wait b", "fill", "copy b", "wait a", "fill", "copy a"]
    assert into.tolist() == [2, 7, 5, 7, 8, 7]


def test_streaming_refuses_staging_buffers_that_are_too_small(saved: Callable[[str], Path], device: torch.device) -> None:
    with pytest.raises(ValueError, match="7 bytes of staging"):
        streamed(saved("qwen3"), device, options=StreamOptions(1, 7))


# Wrong files


def test_streaming_error_names_a_missing_tensor(broken: Path, device: torch.device) -> None:
    path = broken / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != NAME}, path)
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors: {NAME}"):
        streamed(broken, device)


def test_streaming_error_names_the_file_when_an_index_is_wrong(
    saved: Callable[[str], Path], tmp_path: Path, device: torch.device
) -> None:
    for file in saved("llama-sharded").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    index["weight_map"][NAME] = next(file for file in index["weight_map"].values() if file != index["weight_map"][NAME])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{index['weight_map'][NAME]} has no tensor {NAME}"):
        streamed(tmp_path, device)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(64, 97), r"shape \(64, 97\); the config requires \(64, 96\)"),
        (torch.zeros(64, 96).double(), "has dtype F64; supported"),
    ],
)
def test_streaming_allocates_no_memory_when_a_shape_or_dtype_is_wrong(
    tensor: Tensor, message: str, broken: Path, device: torch.device
) -> None:
    path, slabs = broken / "model.safetensors", Slabs()
    save_file({**load_file(path), NAME: tensor}, path)
    with pytest.raises(CheckpointError, match=f"{NAME} .*{message}"):
        streamed(broken, device, slab=slabs.make)
    assert slabs.log == []


def test_streaming_error_names_the_tensor_when_a_file_is_truncated_during_the_read(
    saved: Callable[[str], Path], broken: Path, device: torch.device
) -> None:
    """The file is cut after its header was checked."""
    path = broken / "model.safetensors"

    class Cutting(PinnedSlab):
        def __init__(self, num_bytes: int, device: torch.device) -> None:
            super().__init__(num_bytes, device)
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)

    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: it ends before the last byte of tensor model\."):
        streamed(broken, device, slab=Cutting)


def test_streaming_error_names_a_truncated_file(broken: Path, device: torch.device) -> None:
    path = broken / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        streamed(broken, device)


# Progress and time


def test_streaming_counts_the_read_bytes_and_the_time(saved: Callable[[str], Path], device: torch.device) -> None:
    said, folder, phases = list[str](), saved("qwen2", torch.bfloat16), LoadPhases()
    with closing(Checkpoint(folder)) as checkpoint:
        weights = stream_weights(checkpoint, reading(folder), torch.float32, device, reference, SMALL, said.append, phases)
    assert phases.weight_bytes_read == weights.num_bytes() // 2
    assert [name for name, _ in phases.seconds()] == ["weights", "total"]
    assert said[-1].startswith("weights: 100 %")


# Random values


@pytest.mark.by_day(one_in=3, seed=4)
@pytest.mark.parametrize("name", ["llama-biases", "llama-tied", "qwen3"])
def test_random_source_gives_the_structure_of_a_checkpoint(name: str, saved: Callable[[str], Path], device: torch.device) -> None:
    read = reading(saved(name))
    made, again, other = (read(WeightReader(RandomSource(torch.bfloat16, device, seed), reference)) for seed in (1, 1, 2))
    expected = dict(leaves(plain(saved(name), torch.bfloat16)))
    for path, value in leaves(made):
        if isinstance(value, Tensor):
            assert (value.shape, value.dtype, value.device.type) == (expected[path].shape, expected[path].dtype, device.type), (
                path
            )
            assert torch.equal(value, dict(leaves(again))[path])
        else:
            assert value == expected[path]
    assert made.num_bytes() == plain(saved(name), torch.bfloat16).num_bytes()
    assert not torch.equal(made.embedding.packed.data, other.embedding.packed.data)
    assert 0.018 < made.embedding.packed.data.float().std() < 0.022
    norms = [norm.weight for layer in made.layers for norm in (layer.input_norm, layer.post_norm)]
    norms += [norm for layer in made.layers for norm in layer.mixer.qk_norms or ()]
    assert all(bool((norm == 1).all()) for norm in (*norms, made.norm.weight))
