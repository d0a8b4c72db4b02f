"""How an executor for a device is made; see the worker's settings of the same names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """device: as torch names it; "cpu" runs the same code on a CPU, slowly. kernels: auto (triton on a GPU, else torch), triton
    or torch. cuda_graphs: capture decode steps, up to max_graph_rows rows. max_tokens: of one step; a larger one is computed
    in pieces. max_whole_tokens: the same of a model whose prompts are not cut; 0: max_tokens. load_threads: that read weights."""

    device: str = "cuda:0"
    attention_backend: str = "auto"
    kernels: str = "auto"
    cuda_graphs: bool = True
    max_graph_rows: int = 256
    max_tokens: int = 8192
    max_whole_tokens: int = 0
    load_threads: int = 8
