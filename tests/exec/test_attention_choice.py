from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.reference import layers as reference
from services.worker.exec.attention import choose
from services.worker.exec.attention.backend import AttentionShape
from services.worker.exec.attention.choose import choose_attention

SHAPE = AttentionShape(8, 2, 64, 16, (0,), max_rows=4, max_tokens=32, max_context=64, max_pages=64)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Named:
    """Stands for a back end."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        choose, "_triton", lambda *_, deterministic=False: Named("triton in order" if deterministic else "triton")
    )


def chosen(
    name: str,
    device: torch.device,
    shape: AttentionShape = SHAPE,
    dtype: torch.dtype = torch.float16,
    deterministic: bool = False,
) -> tuple[str, list[str]]:
    told: list[str] = []
    return choose_attention(name, shape, device, dtype, reference, told.append, deterministic).name, told


def with_flashinfer(monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
    """A back end that needs no device; prepare() raises the failure."""

    def prepare(_: Any, log: Any) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    kept = choose.FlashInferAttention.__init__

    def on_the_cpu(self: Any, shape: Any, device: Any, *rest: Any) -> None:
        kept(self, shape, CPU, *rest)

    monkeypatch.setattr(choose.FlashInferAttention, "__init__", on_the_cpu)
    monkeypatch.setattr(choose.FlashInferAttention, "prepare", prepare)


def test_without_cuda_it_is_the_kernels_of_the_layers() -> None:
    name, told = chosen("auto", CPU)
    assert name == "kernels" and told == ["attention: our kernels, because the device is cpu and the other back ends need CUDA"]


def test_flashinfer_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    with_flashinfer(monkeypatch)
    assert chosen("auto", CUDA) == ("flashinfer", ["attention: flashinfer, because it is installed and serves this model"])
    assert chosen("flashinfer", CUDA) == ("flashinfer", ["attention: flashinfer, as asked for"])


def test_deterministic_is_ours_wherever_flashinfer_could_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with_flashinfer(monkeypatch)
    told = ["attention: our kernels, with sums in a fixed order"]
    assert chosen("auto", CUDA, deterministic=True) == ("triton in order", told)
    assert chosen("triton", CUDA, deterministic=True) == ("triton in order", told)
    assert chosen("auto", CPU, deterministic=True) == ("kernels", told)


@pytest.mark.parametrize(("name", "device"), [("flashinfer", CUDA), ("torch", CUDA), ("torch", CPU), ("triton", CPU)])
def test_deterministic_refuses_the_others(monkeypatch: pytest.MonkeyPatch, name: str, device: torch.device) -> None:
    with_flashinfer(monkeypatch)
    with pytest.raises(ValueError, match=f"attention back end {name} is not deterministic"):
        chosen(name, device, deterministic=True)


REASONS = {
    "head size": (replace(SHAPE, head_dim=80), torch.float16, None, "its kernels exist for head sizes"),
    "dtype": (SHAPE, torch.float32, None, "not in float32"),
    "compiler": (SHAPE, torch.float16, RuntimeError("no nvcc\nand much more"), "RuntimeError: no nvcc"),
}


@pytest.mark.parametrize(("shape", "dtype", "failure", "reason"), REASONS.values(), ids=REASONS.keys())
def test_triton_where_flashinfer_does_not_serve(
    shape: AttentionShape, dtype: torch.dtype, failure: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_flashinfer(monkeypatch, failure)
    name, told = chosen("auto", CUDA, shape, dtype)
    assert name == "triton" and len(told) == 1 and reason in told[0] and "\n" not in told[0]
    with pytest.raises(ValueError, match="attention back end flashinfer cannot be had: .*" + reason):
        chosen("flashinfer", CUDA, shape, dtype)


def test_a_failed_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    name, told = chosen("auto", CUDA)
    assert name == "triton" and "flashinfer cannot be had: ModuleNotFoundError: " in told[0]
    with pytest.raises(ValueError, match="ModuleNotFoundError"):
        chosen("flashinfer", CUDA)


def test_lack_of_memory_is_no_reason_to_choose_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with_flashinfer(monkeypatch, torch.cuda.OutOfMemoryError("full"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        chosen("auto", CUDA)


@pytest.mark.parametrize(("name", "device"), [("triton", CUDA), ("torch", CUDA), ("torch", CPU)])
def test_names(name: str, device: torch.device) -> None:
    assert chosen(name, device) == (name, [f"attention: {name}, as asked for"])


@pytest.mark.parametrize(
    ("name", "message"),
    [("flashinfer", "needs a CUDA device, not cpu"), ("triton", "needs a CUDA"), ("fast", "is none of auto, ")],
)
def test_names_that_cannot_be_had(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(name, CPU)
