"""Chooses the kernels of a device: Triton on a GPU, C++ on a CPU, or the reference kernels in torch if a setting says so."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from rootstock_llm import kernels
from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from rootstock_llm.kernels.contracts.step_ops import BringPieces, LayerKernels
from rootstock_llm.kernels.cpu import load_copies, load_kernels, load_sampling
from rootstock_llm.kernels.cpu.build import built_library, cpu_features
from rootstock_llm.kernels.cpu.copies import CpuCopies
from rootstock_llm.kernels.reference import layers as reference

TRITON_SOURCES = Path(kernels.__file__).parent / "triton"
AUTO, TRITON, CPP, TORCH = "auto", "triton", "cpp", "torch"


@dataclass(frozen=True, slots=True)
class KernelSet:
    layers: LayerKernels
    sampling: SampleKernels


def _chosen(name: str, device: torch.device) -> str:
    """Resolves `auto` to triton or cpp, and returns any other known name unchanged. Raises ValueError for an unknown name."""
    if name not in (AUTO, TRITON, CPP, TORCH):
        raise ValueError(f"there are no kernels named {name}; supported: {AUTO}, {TRITON}, {CPP}, {TORCH}")
    return name if name != AUTO else TRITON if device.type == "cuda" else CPP


def layer_kernels(
    name: str, device: torch.device, dtype: torch.dtype, num_threads: int, deterministic: bool = False
) -> LayerKernels:
    """Returns the kernels of a model's layers.

    Args:
        dtype: dtype of the model.
        num_threads: threads of C++ kernels.
        deterministic: whether the bits of a row's result must depend only on that row.

    Raises:
        ValueError: the name is unknown, or kernels of this kind have no deterministic mode.
    """
    chosen = _chosen(name, device)
    if chosen == CPP:
        return load_kernels(num_threads, dtype, deterministic)
    if chosen == TORCH:
        if deterministic:
            raise ValueError(
                "kernels named torch have no deterministic mode: the sums of a row depend on the number of rows of a step"
            )
        return reference
    from rootstock_llm.kernels.triton.layers.layers import TritonLayers

    return TritonLayers(device, deterministic)


def copies(name: str, device: torch.device) -> CpuCopies | None:
    """Returns the C++ functions that copy pages between a CPU's pool and the other tiers.

    Returns:
        None if the device is not a CPU, or if the kernels are named torch. numpy then copies the pages of a CPU's pool.

    Raises:
        ValueError: the name is unknown.
    """
    return load_copies() if _chosen(name, device) == CPP and device.type == "cpu" else None


def bring_pieces(name: str, device: torch.device) -> BringPieces | None:
    """Returns the kernel that copies pages from host memory to a GPU's pools, one group of layers per launch.

    Returns:
        None if the device is not a GPU, or if the kernels are not Triton's.

    Raises:
        ValueError: the name is unknown.
    """
    if _chosen(name, device) != TRITON or device.type != "cuda":
        return None
    from rootstock_llm.kernels.triton.page_pieces import bring_pieces as bring

    return bring


def numerics(name: str, device: torch.device, dtype: torch.dtype, context_len: int, page_size: int) -> str:
    """Returns the fingerprint of deterministic kernels. Workers with equal fingerprints compute equal bits for a row.

    It is a digest of:

    - the model's dtype and torch's version, because torch computes the cosines and sines of the rotary embedding
    - for C++ kernels: their machine code, the CPU's instruction sets and the C library, which computes logarithms
    - for Triton kernels: their sources, the compiler, the GPU, and context and page size, which decide where keys are split
    """
    parts = [str(dtype), torch.__version__]
    if _chosen(name, device) == TRITON:
        parts += [f"{context_len} in {page_size}", *_compiled_for(device)]
        code = b"".join(path.read_bytes() for path in sorted(TRITON_SOURCES.rglob("*.py")))
    else:
        parts += [platform.machine(), *sorted(cpu_features()), *platform.libc_ver()]
        code = built_library().read_bytes()
    return hashlib.sha256(code + "\n".join(parts).encode()).hexdigest()[:16]


def _compiled_for(device: torch.device) -> tuple[str, ...]:
    """Returns the versions of Triton and CUDA and the GPU's compute capability."""
    import triton

    if device.type != "cuda":
        return triton.__version__, "interpreted"
    return triton.__version__, str(torch.version.cuda), str(torch.cuda.get_device_capability(device))


def sample_kernels(name: str, device: torch.device, num_threads: int, max_rows: int, vocab_size: int) -> SampleKernels:
    """Returns the sampling kernels. Raises ValueError for an unknown name.

    Args:
        max_rows: largest number of rows of one launch.
    """
    chosen = _chosen(name, device)
    if chosen == TORCH:
        return reference
    if chosen == CPP:
        return load_sampling(num_threads)
    from rootstock_llm.kernels.triton.sampling.sampling import TritonSampling

    return TritonSampling(max_rows, vocab_size, device)
