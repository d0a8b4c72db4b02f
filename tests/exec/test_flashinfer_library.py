"""The FlashInfer backend with FlashInfer's own Python code, whose compiled modules are replaced by plain torch.

The tests need the package flashinfer and run only on machines without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rootstock_llm.services.worker.exec.attention import flashinfer_limits as limits
from rootstock_llm.services.worker.exec.attention.backend import AttentionShape
from tests.all_pairs import each_value
from tests.exec import test_flashinfer_backend as steps
from tests.exec.flashinfer_double import one_row

INSTALLED = importlib.util.find_spec("flashinfer") is not None
pytestmark = pytest.mark.skipif(
    not INSTALLED or torch.cuda.is_available(), reason="flashinfer is not installed, or there is a GPU"
)

CPU, HND, CAUSAL = torch.device("cpu"), 1, 1
PLAN_ARGUMENTS = {"fa2": (19, 20), "fa3": (16,)}  # numbers of arguments of a plan in FlashInfer 0.6 and 0.7


class Unpinned(TorchFunctionMode):
    """Ignores pin_memory, because pinning memory needs a GPU driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def attend(
    q: Tensor, pools: tuple[Tensor, Tensor], columns: list[Tensor], out: Tensor, causal: bool, window: int, scale: float
) -> None:
    """Computes attention of all rows.

    Args:
        q: [T, H, D], queries.
        pools: key pool and value pool.
        columns: qo_indptr, kv_indptr, indices and last_page_len.
        out: [T, H, D], receives the results.
        causal: whether to apply a causal mask.
        window: largest distance of a key from its query; below 0 for no window.
        scale: factor of the scores.
    """
    keys, values = pools
    plan = SimpleNamespace(heads=q.shape[1], kv_heads=keys.shape[1], causal=causal, window_left=window)
    qo, kv, indices, last = (column.tolist() for column in columns)
    for row, tail in enumerate(last):
        part, pages = slice(qo[row], qo[row + 1]), indices[kv[row] : kv[row + 1]]
        length = (len(pages) - 1) * keys.shape[2] + tail
        out[part] = one_row(q[part], keys[pages], values[pages], length, scale, plan)


def prefill_module(ran: set[str], backend: str) -> Any:
    def plan(*args: Any) -> list[int]:
        assert len(args) in PLAN_ARGUMENTS[backend]
        return [0]

    def paged_run(_float: Any, _int: Any, _plan: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        qo, kv, indices, last, out, lse, mask, layout, window, _pdl, *others = rest
        assert layout == HND and lse is None
        ran.add(backend)
        attend(q, (k, v), [qo, kv, indices, last], out, mask == CAUSAL, window, scale=others[7])

    return SimpleNamespace(plan=plan, paged_run=paged_run)


def decode_module(ran: set[str]) -> Any:
    def plan(*args: Any) -> list[int]:
        assert len(args) == 15
        return [0]

    def run(_float: Any, _int: Any, _plan: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        kv, indices, last, out, lse, layout, window, _pdl, _slopes, _cap, scale, *_others = rest
        assert layout == HND and lse is None
        ran.add("decode")
        attend(q, (k, v), [torch.arange(len(kv)), kv, indices, last], out, False, window, scale)

    return SimpleNamespace(plan=plan, run=run)


@pytest.fixture
def ran() -> set[str]:
    """Names of the kernels that the library has run in the test."""
    return set()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, ran: set[str]) -> Iterator[Any]:
    module = importlib.import_module("flashinfer")
    for part in (module.prefill, module.decode):
        monkeypatch.setattr(part, "get_batch_prefill_module", lambda backend, *_: prefill_module(ran, backend))
    monkeypatch.setattr(module.decode, "get_batch_decode_module", lambda *_: decode_module(ran))
    monkeypatch.setattr(module.prefill, "determine_attention_backend", lambda *_, **__: "fa3")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    with Unpinned():
        yield module


@pytest.mark.by_day(one_in=2, seed=52)
@each_value(shape=steps.CASES, split_mixed={"two plans": True, "one plan": False})  # the double's test has the other pairs
def test_library_steps_equal_the_reference(shape: AttentionShape, split_mixed: bool, library: Any, ran: set[str]) -> None:
    steps.test_steps_equal_the_reference(shape, split_mixed, CPU, library)
    decode = "fa2" if limits.tensor_cores(shape) else "decode"
    assert ran == {"fa3", decode, decode if split_mixed else "fa2"}


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("shape", [steps.SHAPE, steps.PAIRED, replace(steps.PAIRED, windows=(0, 24))])
def test_library_graphs_compute_the_current_plan(shape: AttentionShape, library: Any, ran: set[str]) -> None:
    steps.test_graphs_with_fixed_buffers_compute_the_current_plan(shape, CPU, library)
    assert ran == {"fa2"} | (set() if limits.tensor_cores(shape) else {"decode"})
