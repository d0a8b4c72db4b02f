"""Headers of safetensors files are validated, and tensors are read at the offsets in the header."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError
from rootstock_llm.services.worker.exec.weights.safetensors_file import TensorFiles, TensorSpan, read_header

NAME = "x.weight"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    save_file({"a": torch.zeros(3), NAME: torch.ones(64, 96)}, tmp_path / "x")
    return tmp_path / "x"


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits the header of a file without changing its data."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def resized(header: dict[str, Any], name: str, by: int) -> None:
    header[name]["data_offsets"][1] += by


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "shape and bytes disagree": (lambda h: resized(h, NAME, -4), f"{NAME} .* has 24572 bytes"),
    "offsets beyond the end": (lambda h: resized(h, NAME, 1 << 40), f"cut off: it has .* bytes, but {NAME} ends at byte"),
    "end before begin": (lambda h: resized(h, NAME, -(1 << 40)), f"data_offsets of {NAME}"),
    "one offset": (lambda h: h[NAME]["data_offsets"].pop(), f"data_offsets of {NAME}"),
    "offsets that are strings": (lambda h: h[NAME].update(data_offsets=["0", "4"]), f"data_offsets of {NAME}"),
    "a dimension below zero": (lambda h: h[NAME].update(shape=[-64, -96]), f"shape of {NAME}"),
    "a boolean dimension": (lambda h: h[NAME].update(shape=[64, 96, True]), f"shape of {NAME}"),
    "no dtype": (lambda h: h[NAME].pop("dtype"), f"dtype and shape of {NAME}"),
    "entry that is no object": (lambda h: h.update({NAME: 3}), f"dtype and shape of {NAME}"),
    "overlap": (lambda h: h[NAME].update(data_offsets=[4, 24580]), "overlap"),
}


@pytest.mark.by_day(one_in=3, seed=44)
@pytest.mark.parametrize("case", HEADERS)
def test_header_with_a_wrong_entry_is_refused(case: str, written: Path) -> None:
    edit, message = HEADERS[case]
    edited(written, edit)
    with pytest.raises(CheckpointError, match=message):
        read_header(written)


@pytest.mark.by_day(one_in=3, seed=1)
@pytest.mark.parametrize(
    ("content", "message"),
    {
        "empty": (b"", "not a safetensors file"),
        "seven bytes": (b"1234567", "not a safetensors file"),
        "header beyond the end": (struct.pack("<Q", 100) + b"{}", "not a safetensors file"),
        "header above the cap": (struct.pack("<Q", 1 << 62), "not a safetensors file"),
        "not JSON": (struct.pack("<Q", 2) + b"{,", "not JSON"),
        "no text": (struct.pack("<Q", 2) + b"\xff\xfe", "not JSON"),
        "nested too deeply": (struct.pack("<Q", 200_000) + b"[" * 200_000, "not JSON"),
        "a list": (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        "duplicate name": (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "twice"),
    }.values(),
    ids=str,
)
def test_files_of_other_formats_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "x")


def test_header_above_the_size_limit_of_the_format_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:  # a sparse file
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(tmp_path / "x")


def test_headers_written_by_the_safetensors_library_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, 4), "c": torch.tensor(3, dtype=torch.int64)}
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    places = read_header(tmp_path / "x")
    assert {name: place.shape for name, place in places.items()} == {"a": (2, 3), "b": (0, 4), "c": ()}
    content, begin = (tmp_path / "x").read_bytes(), places["a"].begin
    assert (places["a"].dtype, content[begin : begin + 24]) == ("F32", struct.pack("<6f", *range(6)))


# Reading


def place_in(path: Path, begin: int, num_bytes: int) -> TensorSpan:
    return TensorSpan(path, "t", "U8", (num_bytes,), begin, num_bytes)


def read(path: Path, place: TensorSpan, offset: int, count: int, **options: Any) -> bytes:
    into = bytearray(count)
    files = TensorFiles([path], **options)
    try:
        files.read(memoryview(into), place, offset)
    finally:
        files.close()
    return bytes(into)


def test_tensor_read_continues_after_short_reads(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(200)))

    def three_at_most(descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        return os.preadv(descriptor, [into[0][:3]], offset)

    assert read(path, place_in(path, 10, 100), 5, 50, read_at=three_at_most) == bytes(range(15, 65))


def test_error_of_a_failed_read_names_the_file_and_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123")

    def failing(descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CheckpointError, match=r"cannot read t of .*x: .*Input/output error"):
        read(path, place_in(path, 0, 4), 0, 4, read_at=failing)
    with pytest.raises(CheckpointError, match=r"cannot open .*absent"):
        TensorFiles([path, tmp_path / "absent"])


def test_tensor_beyond_the_first_two_gigabytes_of_a_file_is_read(tmp_path: Path) -> None:
    path, pad = tmp_path / "x", 5 << 30
    header = {
        "pad": {"dtype": "U8", "shape": [pad], "data_offsets": [0, pad]},
        "t": {"dtype": "F32", "shape": [2], "data_offsets": [pad, pad + 8]},
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:  # a sparse file
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(pad, 1)
        file.write(struct.pack("<2f", 1.5, -2.0))
    place = read_header(path)["t"]
    assert place.begin > pad and read(path, place, 4, 4) == struct.pack("<f", -2.0)
