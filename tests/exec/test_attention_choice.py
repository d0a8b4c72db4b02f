from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.attention import choose
from rootstock_llm.services.worker.exec.attention.backend import AttentionShape
from rootstock_llm.services.worker.exec.attention.choose import choose_attention

SHAPE = AttentionShape(8, 2, 64, 64, 16, (0,), max_rows=4, max_tokens=32, max_context=64, max_pages=64)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Named:
    """Replaces an attention backend. The test only reads its name."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture(autouse=True)
def named_backends(monkeypatch: pytest.MonkeyPatch) -> None:
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
    messages: list[str] = []
    return choose_attention(name, shape, device, dtype, reference, messages.append, deterministic).name, messages


def with_flashinfer(monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
    """Makes the FlashInfer backend available without a device. Its prepare() raises `failure`, if given."""

    def prepare(_: Any, log: Any) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    kept = choose.FlashInferAttention.__init__

    def on_the_cpu(self: Any, shape: Any, device: Any, *rest: Any) -> None:
        kept(self, shape, CPU, *rest)

    monkeypatch.setattr(choose.FlashInferAttention, "__init__", on_the_cpu)
    monkeypatch.setattr(choose.FlashInferAttention, "prepare", prepare)


def test_auto_setting_chooses_our_kernels_without_cuda() -> None:
    name, messages = chosen("auto", CPU)
    assert name == "kernels"
    assert messages == ["attention: our kernels, because the device is cpu and the other back ends need CUDA"]


def test_auto_setting_chooses_flashinfer_when_flashinfer_supports_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with_flashinfer(monkeypatch)
    assert chosen("auto", CUDA) == ("flashinfer", ["attention: flashinfer, because it is installed and supports this model"])
    assert chosen("flashinfer", CUDA) == ("flashinfer", ["attention: flashinfer, as configured"])


def test_deterministic_mode_chooses_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with_flashinfer(monkeypatch)
    messages = ["attention: our kernels, with sums in a fixed order"]
    assert chosen("auto", CUDA, deterministic=True) == ("triton in order", messages)
    assert chosen("triton", CUDA, deterministic=True) == ("triton in order", messages)
    assert chosen("auto", CPU, deterministic=True) == ("kernels", messages)


@pytest.mark.parametrize(("name", "device"), [("flashinfer", CUDA), ("torch", CUDA), ("torch", CPU), ("triton", CPU)])
def test_deterministic_mode_refuses_other_back_ends(monkeypatch: pytest.MonkeyPatch, name: str, device: torch.device) -> None:
    with_flashinfer(monkeypatch)
    with pytest.raises(ValueError, match=f"attention back end {name} is not deterministic"):
        chosen(name, device, deterministic=True)


REASONS = {
    "head size": (replace(SHAPE, head_dim=80, value_dim=80), torch.float16, None, "its kernels exist for head sizes"),
    "value size": (
        replace(SHAPE, value_dim=128),
        torch.float16,
        None,
        "values must have the size of keys; the sizes are 128 and 64",
    ),
    "sinks": (replace(SHAPE, has_sinks=True), torch.float16, None, "no attention sinks"),
    "score cap": (replace(SHAPE, has_softcap=True), torch.float16, None, "no score caps"),
    "dtype": (SHAPE, torch.float32, None, "not in float32"),
    "compiler": (SHAPE, torch.float16, RuntimeError("no nvcc\nand much more"), "RuntimeError: no nvcc"),
}


@pytest.mark.parametrize(("shape", "dtype", "failure", "reason"), REASONS.values(), ids=REASONS.keys())
def test_auto_setting_chooses_triton_when_flashinfer_does_not_support_the_model(
    shape: AttentionShape, dtype: torch.dtype, failure: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_flashinfer(monkeypatch, failure)
    name, messages = chosen("auto", CUDA, shape, dtype)
    assert name == "triton" and len(messages) == 1 and reason in messages[0] and "\n" not in messages[0]
    with pytest.raises(ValueError, match="attention back end flashinfer is not available: .*" + reason):
        chosen("flashinfer", CUDA, shape, dtype)


def test_auto_setting_logs_a_failed_import_of_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    name, messages = chosen("auto", CUDA)
    assert name == "triton" and "flashinfer is not available: ModuleNotFoundError: " in messages[0]
    with pytest.raises(ValueError, match="ModuleNotFoundError"):
        chosen("flashinfer", CUDA)


def test_auto_setting_raises_an_error_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with_flashinfer(monkeypatch, torch.cuda.OutOfMemoryError("full"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        chosen("auto", CUDA)


@pytest.mark.parametrize(("name", "device"), [("triton", CUDA), ("torch", CUDA), ("torch", CPU)])
def test_configured_back_end_is_chosen(name: str, device: torch.device) -> None:
    assert chosen(name, device) == (name, [f"attention: {name}, as configured"])


@pytest.mark.parametrize(
    ("name", "message"),
    [("flashinfer", "needs a CUDA device, not cpu"), ("triton", "needs a CUDA"), ("fast", "the back ends are auto, ")],
)
def test_unavailable_back_ends_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(name, CPU)
