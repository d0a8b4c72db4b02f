"""A test double that replaces FlashInfer 0.6.4 on machines without a GPU.

It has the signatures and checks of the library's wrappers, detects host waits, and computes attention in plain torch from the
device buffers that a kernel would read.

Memory that is allocated with a device argument counts as device memory. Memory that is allocated with pin_memory counts as pinned
host memory. All other memory counts as pageable.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.exec.flashinfer_schedules import decode_bytes, fa2_bytes, fa3_bytes

DEVICE_SMS = 132
DEVICE_FUNCTIONS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.arange)


class HostWaits(Exception):
    """Raised for a call with which the library copies from the device to the host, so that the host waits."""


class Ledger(TorchFunctionMode):
    """Records which memory counts as device memory and as pinned memory.

    It keeps references to this memory, so that no address is reused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._device: dict[int, Tensor] = {}
        self._pinned: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in DEVICE_FUNCTIONS and isinstance(made, Tensor):
            if "pin_memory" in kwargs:
                self._pinned[made.untyped_storage().data_ptr()] = made
            elif kwargs.get("device") is not None:
                self.adopt(made)
        return made

    def adopt(self, tensor: Tensor) -> Tensor:
        """Registers a tensor as device memory."""
        self._device[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def on_device(self, tensor: Tensor) -> bool:
        return tensor.is_cuda or tensor.untyped_storage().data_ptr() in self._device

    def pinned(self, tensor: Tensor) -> bool:
        return not self.on_device(tensor) and (tensor.untyped_storage().data_ptr() in self._pinned or tensor.is_pinned())


class Library:
    """Replaces the module flashinfer, which an attention backend imports."""

    def __init__(self, device: torch.device) -> None:
        self.ledger, self.device = Ledger(), device
        self.pageable: list[str] = []  # names of columns that were copied to the device from pageable memory
        self.planned: list[str] = []  # description of each plan
        self.plans = 0
        made = {"library": self}
        self.BatchPrefillWithPagedKVCacheWrapper = type("Prefill", (PrefillWrapper,), made)
        self.BatchDecodeWithPagedKVCacheWrapper = type("Decode", (DecodeWrapper,), made)
        self.fast_decode_plan = fast_decode_plan

    def to_host(self, tensor: Tensor, what: str) -> Tensor:
        if self.ledger.on_device(tensor):
            raise HostWaits(f"the library reads {what}, which is in device memory, on the host")
        return tensor

    def to_device(self, tensor: Tensor, what: str) -> Tensor:
        if self.ledger.on_device(tensor):
            return tensor
        if not self.ledger.pinned(tensor):
            self.pageable.append(what)
        return self.ledger.adopt(tensor.to(self.device).clone())


def columns_checked(columns: dict[str, Tensor]) -> None:
    for name, column in columns.items():
        assert column.dtype == torch.int32 and column.dim() == 1 and column.is_contiguous(), name
        if name.endswith("indptr"):
            assert bool((column.diff() >= 0).all()), f"{name} must not decrease"


def lengths(kv_indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all()), "a last page must have 1 to page_size tokens"
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + last_page_len


class Wrapper:
    """Base class of PrefillWrapper and DecodeWrapper."""

    library: Library

    def _start(self, float_workspace_buffer: Tensor, kv_layout: str, graph: bool) -> None:
        assert kv_layout in ("NHD", "HND") and self.library.ledger.on_device(float_workspace_buffer)
        assert float_workspace_buffer.data_ptr() % 16 == 0
        self.device, self._kv_layout, self._use_cuda_graph = float_workspace_buffer.device, kv_layout, graph
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8, device=self.device)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self._plan: SimpleNamespace | None = None

    def _schedule(self, needed: tuple[int, int]) -> None:
        """Copies a plan's schedule to the device, after checking that the workspaces are large enough.

        The double's schedule is only the number of the plan.

        Args:
            needed: (float bytes, int bytes) of workspace that the plan needs.
        """
        library, host, device = self.library, self._pin_memory_int_workspace_buffer, self._int_workspace_buffer
        assert library.ledger.pinned(host) and library.ledger.on_device(device) and len(host) >= len(device)
        for size, buffer in zip(needed, (self._float_workspace_buffer, device), strict=True):
            if size > len(buffer):
                raise MemoryError(f"Buffer overflow when allocating memory: {size} of {len(buffer)} bytes")
        library.plans += 1
        self._number = library.plans
        host[:8].view(torch.int64)[0] = self._number
        device[:8].copy_(host[:8])

    def _attend(self, q: Tensor, pools: tuple[Tensor, Tensor], out: Tensor, scale: float) -> None:
        plan = self._plan
        assert plan is not None, "plan info is not initialized"
        assert self._int_workspace_buffer[:8].view(torch.int64).item() == self._number, (
            "the device buffer must have the schedule of the last plan"
        )
        k, v = pools
        assert self._kv_layout == "HND" and k.stride() == v.stride() and k.shape[2] == plan.page_size
        assert q.stride(-1) == 1 and q.shape == out.shape and out.is_contiguous() and (q.stride(0) * q.itemsize) % 16 == 0
        assert q.shape[1:] == (plan.heads, plan.dim) and k.shape[1] == plan.kv_heads and k.shape[3] == plan.dim
        if q.dtype != plan.dtype or k.dtype != plan.dtype or out.dtype != plan.dtype:
            raise ValueError("q or the pool has another dtype than the plan")
        columns = [self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf, self._paged_kv_indices_buf]
        if self._tensor_cores:
            columns.append(self._qo_indptr_buf)
        assert all(self.library.ledger.on_device(column) for column in columns)
        kv, last, indices, *ragged = (column.tolist() for column in columns)
        qo = ragged[0] if ragged else list(range(len(kv)))  # the kernel without tensor cores has one query token per row
        assert kv == plan.kv_indptr, "the device columns must equal the planned columns"
        assert len(q) == qo[-1], "q must have the planned number of tokens"
        for row in range(len(last)):
            part, pages = slice(qo[row], qo[row + 1]), indices[kv[row] : kv[row + 1]]
            assert all(0 <= page < len(k) for page in pages)
            out[part] = one_row(q[part], k[pages], v[pages], (len(pages) - 1) * plan.page_size + last[row], scale, plan)


def one_row(q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float, plan: SimpleNamespace) -> Tensor:
    """Computes the attention of one row.

    Args:
        q: [t, H, D], queries of the sequence's last t tokens.
        keys: [pages, G, S, D], keys of the sequence.
        values: [pages, G, S, D], values of the sequence.
        length: number of tokens of the sequence.
        scale: factor of the scores.
        plan: the plan, with sizes and mask.
    """
    count, group = len(q), plan.heads // plan.kv_heads
    flat = [pool.transpose(0, 1).flatten(1, 2)[:, :length].float().repeat_interleave(group, 0) for pool in (keys, values)]
    scores = torch.einsum("thd,hsd->hts", q.float(), flat[0]) * scale
    distance = torch.arange(length - count, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if plan.causal:
        hidden |= distance < 0
    if plan.window_left >= 0:
        hidden |= distance > plan.window_left
    return torch.einsum("hts,hsd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), flat[1]).to(q.dtype)


class PrefillWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        assert not use_cuda_graph and backend in ("auto", "fa2", "fa3")
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._tensor_cores = True
        self._backend = "fa3" if backend == "auto" else backend

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        library = self.library
        assert max_token_per_sequence is None and max_sequence_kv is None, (
            "FlashInfer 0.6.4 fails with unbound local variables for these arguments"
        )
        columns = {"qo_indptr": qo_indptr, "kv_indptr": paged_kv_indptr, "last_page_len": paged_kv_last_page_len}
        for name, column in columns.items():
            library.to_host(column, name)
        columns_checked({**columns, "indices": paged_kv_indices})
        kv_lens = lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)
        if seq_lens is not None:
            assert torch.equal(library.to_host(seq_lens, "seq_lens"), kv_lens)
            kv_lens = seq_lens
        assert len(kv_lens) <= 32768
        library.to_device(kv_lens, "kv_lens")
        self._qo_indptr_buf = library.to_device(qo_indptr, "qo_indptr")
        self._paged_kv_indptr_buf = library.to_device(paged_kv_indptr, "paged_kv_indptr")
        self._paged_kv_indices_buf = library.to_device(paged_kv_indices, "paged_kv_indices")
        self._paged_kv_last_page_len_buf = library.to_device(paged_kv_last_page_len, "paged_kv_last_page_len")
        assert bool((qo_indptr.diff() <= kv_lens).all()) and qo_indptr[0] == 0
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        qo, kv = qo_indptr.tolist(), paged_kv_indptr.tolist()
        needed = (
            fa2_bytes(qo, kv, shape, window_left, False, DEVICE_SMS)
            if self._backend == "fa2"
            else fa3_bytes(qo, shape, DEVICE_SMS)
        )
        self._schedule(needed)
        self._plan = planned(shape, kv, causal, window_left, q_data_type, kv_data_type, sm_scale)
        library.planned.append(f"prefill {self._backend} {len(kv) - 1}")

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        skip_softmax_threshold_scale_factor=None,
    ):
        self._attend(q, paged_kv_cache, out, scaled(self._plan, q_scale, k_scale))
        return out


class DecodeWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        assert backend in ("auto", "fa2")
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._tensor_cores, self._cached_module = use_tensor_cores, None
        self._fixed_batch_size = 0
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            assert all(self.library.ledger.on_device(buffer) for buffer in buffers)
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
            self._qo_indptr_buf = torch.arange(self._fixed_batch_size + 1, dtype=torch.int32, device=self.device)
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        library, batch_size = self.library, len(last_page_len)
        if self._use_cuda_graph:
            self._check_graph(batch_size, indices)
            self._paged_kv_indptr_buf.copy_(library.to_device(indptr, "indptr"))
            self._paged_kv_last_page_len_buf.copy_(library.to_device(last_page_len, "last_page_len"))
            self._paged_kv_indices_buf[: len(indices)].copy_(library.to_device(indices, "indices"))
        else:
            self._paged_kv_indptr_buf = library.to_device(indptr, "indptr")
            self._paged_kv_indices_buf = library.to_device(indices, "indices")
            self._paged_kv_last_page_len_buf = library.to_device(last_page_len, "last_page_len")
            self._qo_indptr_buf = library.to_device(torch.arange(batch_size + 1, dtype=torch.int32), "qo_indptr of plan()")
        indptr, last_page_len = library.to_host(indptr, "indptr"), library.to_host(last_page_len, "last_page_len")
        if seq_lens is not None:
            assert torch.equal(library.to_host(seq_lens, "seq_lens"), lengths(indptr, last_page_len, page_size))
        self._cached_module = (window_left >= 0, q_data_type)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._finish(shape, indptr, last_page_len, indices, window_left, q_data_type, kv_data_type, sm_scale)
        library.planned.append(f"plan {'graph' if self._use_cuda_graph else 'decode'} {batch_size}")

    def _check_graph(self, batch_size: int, indices: Tensor) -> None:
        if batch_size != self._fixed_batch_size:
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(self._paged_kv_indices_buf):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")

    def _finish(self, shape, indptr, last_page_len, indices, window_left, q_dtype, kv_dtype, sm_scale) -> None:
        columns_checked({"indptr": indptr, "last_page_len": last_page_len, "indices": indices})
        heads, kv_heads, _, page_size = shape
        lengths(indptr, last_page_len, page_size)
        kv, graph = indptr.tolist(), self._use_cuda_graph
        if self._tensor_cores:
            needed = fa2_bytes(list(range(len(kv))), kv, shape, window_left, graph, DEVICE_SMS)
        else:
            assert heads // kv_heads in (1, 2, 3, 4, 8), "Unsupported group_size"
            needed = decode_bytes(kv, shape, graph, DEVICE_SMS)
        self._schedule(needed)
        self._plan = planned(shape, kv, False, window_left, q_dtype, kv_dtype, sm_scale)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=1,
        skip_softmax_threshold_scale_factor=None,
    ):
        self._attend(q, paged_kv_cache, out, scaled(self._plan, q_scale, k_scale))
        return out


def fast_decode_plan(
    self,
    indptr,
    indices,
    last_page_len,
    num_qo_heads,
    num_kv_heads,
    head_dim,
    page_size,
    pos_encoding_mode="NONE",
    window_left=-1,
    logits_soft_cap=None,
    q_data_type=None,
    kv_data_type=None,
    data_type=None,
    sm_scale=None,
    rope_scale=None,
    rope_theta=None,
    non_blocking=True,
    fixed_split_size=None,
    disable_split_kv=False,
    global_override_indptr_cpu=None,
):
    library, batch_size = self.library, len(last_page_len)
    assert self._cached_module == (window_left >= 0, q_data_type), "an earlier plan() must have loaded the kernels"
    if self._use_cuda_graph:
        self._check_graph(batch_size, indices)
    else:
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
        self._paged_kv_last_page_len_buf = last_page_len
        if self._tensor_cores:
            self._qo_indptr_buf = library.to_device(torch.arange(batch_size + 1, dtype=torch.int32), "qo_indptr of a fast plan")
    host = library.to_host(indptr if global_override_indptr_cpu is None else global_override_indptr_cpu, "indptr")
    if self._tensor_cores and page_size != 1:
        library.to_host(last_page_len, "last_page_len")
    shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
    self._finish(shape, host, last_page_len, indices, window_left, q_data_type, kv_data_type, sm_scale)
    library.planned.append(f"fast {'graph' if self._use_cuda_graph else 'decode'} {batch_size}")


def planned(shape, kv_indptr, causal, window_left, q_dtype, kv_dtype, sm_scale) -> SimpleNamespace:
    heads, kv_heads, dim, page_size = shape
    assert heads % kv_heads == 0 and dim in (64, 128, 256) and q_dtype in (torch.float16, torch.bfloat16) and kv_dtype == q_dtype
    names = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page_size": page_size, "kv_indptr": kv_indptr, "dtype": q_dtype}
    return SimpleNamespace(**names, causal=causal, window_left=window_left, sm_scale=sm_scale or 1 / math.sqrt(dim))


def scaled(plan: Any, q_scale: float | None, k_scale: float | None) -> float:
    return plan.sm_scale * (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
