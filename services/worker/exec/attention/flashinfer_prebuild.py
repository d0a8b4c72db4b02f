"""python -m rootstock_llm.services.worker.exec.attention.flashinfer_prebuild: compiles FlashInfer's modules without a GPU.

Image builds run this command. At run time, the library then loads the compiled modules from its own folder, without a compiler
and on a read-only disk. There is no list of modules to maintain: FlashInferAttention runs with a replacement of the library
(RecordingLibrary) that records the modules that each plan would load. Compiling needs nvcc (CUDA_HOME or PATH), a C++ compiler
and ninja; MAX_JOBS limits the number of compilers. See docs/design/flashinfer.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.attention.backend import AttentionBatch, AttentionShape
from rootstock_llm.services.worker.exec.attention.flashinfer_backend import FlashInferAttention
from rootstock_llm.services.worker.exec.attention.flashinfer_limits import DTYPES, HEAD_DIMS

DECODE = "decode"
GROUPS = (1, 2, 4, 8)  # query heads per key/value head, below and above the threshold for tensor cores
WINDOWS = (0, 64)  # a module depends on the existence of a window, not on its size
DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True)
class Module:
    """A unit that the library compiles and loads separately."""

    kernels: str  # fa2 or fa3 for prefill kernels, decode for decode kernels on CUDA cores
    dtype: torch.dtype
    index: torch.dtype  # dtype of indptr
    head_dim: int
    windowed: bool  # whether attention has a sliding window

    def load(self, library: Any) -> None:
        """Loads the module with the function that plan() of FlashInfer's wrappers calls.

        The library compiles a missing module first, if compiling is allowed.
        """
        arguments = (self.dtype, self.dtype, self.dtype, self.index, self.head_dim, self.head_dim, 0, self.windowed, False)
        if self.kernels == DECODE:
            library.decode.get_batch_decode_module(*arguments)
        else:
            library.prefill.get_batch_prefill_module(self.kernels, *arguments, False)


class RecordingLibrary:
    """Replaces the library FlashInfer. Records the modules that the library's plans would load, and computes nothing."""

    def __init__(self, auto: Sequence[str]) -> None:
        self.modules: dict[Module, None] = {}
        self._auto = auto  # kernels that the library may choose for `auto`

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: Tensor, layout: str, backend: str) -> _Wrapper:
        return _Wrapper(self.modules, self._auto if backend == "auto" else (backend,), 1)

    def BatchDecodeWithPagedKVCacheWrapper(
        self, workspace: Tensor, layout: str, backend: str, use_tensor_cores: bool = False, **_: Any
    ) -> _Wrapper:
        return _Wrapper(self.modules, (backend,) if use_tensor_cores else (DECODE,), 0)

    def fast_decode_plan(self, wrapper: _Wrapper, *columns: Any, **_: Any) -> None:
        """Records nothing, because the first plan of the wrapper has recorded its module."""


@dataclass
class _Wrapper:
    """Replaces a wrapper of the library, and records the modules that its plans would load."""

    modules: dict[Module, None]  # RecordingLibrary.modules, to which plan() adds
    kernels: Sequence[str]  # Module.kernels that the library may choose for this wrapper
    indptr_index: int  # index of kv_indptr in the arguments of plan()

    def plan(self, *columns: Any, window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype, **_: Any) -> None:
        index, head_dim = columns[self.indptr_index].dtype, columns[self.indptr_index + 5]
        if q_data_type != kv_data_type:
            raise ValueError(f"queries are {q_data_type} and keys are {kv_data_type}; modules are compiled for equal dtypes only")
        for kernels in self.kernels:
            self.modules[Module(kernels, q_data_type, index, head_dim, window_left >= 0)] = None

    def run(self, *_: Any, **__: Any) -> None: ...


def needed_modules(head_dims: Iterable[int], dtypes: Iterable[torch.dtype], archs: Iterable[str]) -> list[Module]:
    """Returns every module that FlashInferAttention loads for models with these head sizes and dtypes.

    Args:
        archs: GPU architectures, such as "8.0" and "9.0a".

    Raises:
        Unsupported: FlashInfer has no kernels for a head size or dtype.
    """
    majors = {arch.partition(".")[0] for arch in archs}
    library = RecordingLibrary([kernels for kernels, there in (("fa2", majors - {"9"}), ("fa3", majors & {"9"})) if there])
    for head_dim, dtype, group in product(head_dims, dtypes, GROUPS):
        shape = AttentionShape(group, 1, head_dim, head_dim, 16, WINDOWS, max_rows=8, max_tokens=64, max_context=64, max_pages=32)
        backend = FlashInferAttention(shape, torch.device("cpu"), dtype, reference, library)
        backend.prepare(lambda line: None)
        backend.plan(_graph_of_one_row())
    return sorted(library.modules, key=str)


def _graph_of_one_row() -> AttentionBatch:
    zeros = torch.zeros(1, dtype=torch.int32)
    rows = RaggedRows(zeros.view(1, 1), zeros - 1, zeros, zeros + 1, zeros, zeros, zeros.long(), 1)
    return AttentionBatch(np.zeros(1, np.int32), np.ones(1, np.int32), 0, rows, graph=1)


def missing(library: Any, modules: Iterable[Module]) -> list[Any]:
    """Returns the library's specs of the modules that are not compiled. FLASHINFER_DISABLE_JIT must be set."""
    found = []
    for module in modules:
        try:
            module.load(library)
        except library.jit.MissingJITCacheError as error:
            found.append(error.spec)
    return found


def missing_in_wheels(library: Any, modules: Iterable[Module], arch: str) -> list[str]:
    """Returns the names of the modules that no installed wheel has in compiled form for a GPU architecture.

    No module is loaded, because loading needs a GPU driver. FLASHINFER_DISABLE_JIT must be set. The library must have version 0.7
    or later, which reads compiled modules from several wheels.
    """
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    environment = library.jit.env
    wheels, environment.FLASHINFER_AOT_PROVIDERS = environment.FLASHINFER_AOT_PROVIDERS, ()
    try:
        specs = missing(library, modules)
    finally:
        environment.FLASHINFER_AOT_PROVIDERS = wheels
    return [spec.name for spec in specs if not environment.get_aot_artifacts(spec.name)]


def build(library: Any, specs: Sequence[Any], folder: Path, log: Callable[[str], None]) -> None:
    """Compiles all modules in one run, then copies each to folder/NAME/NAME.so.

    Raises:
        RuntimeError: a compilation failed; the message has the compiler's output.
    """
    library.jit.build_jit_specs(list(specs), verbose=False)
    for spec in specs:
        target = folder / spec.name / f"{spec.name}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, target)
        log(f"{target.stat().st_size:>12,} bytes  {spec.name}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashinfer_prebuild", description="Compiles FlashInfer's modules without a GPU.")
    parser.add_argument(
        "--archs",
        required=True,
        help="GPU architectures to compile for, separated by commas, such as 8.0,9.0a,10.0f",
    )
    parser.add_argument("--head-dims", default=",".join(map(str, HEAD_DIMS)), help="head sizes of models, default %(default)s")
    parser.add_argument("--dtypes", default=",".join(DTYPES_BY_NAME), help="dtypes of models, default %(default)s")
    parser.add_argument(
        "--out", type=Path, help="folder for the compiled modules; default: the folder from which the library loads them"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the modules that are not compiled, and exit")
    parser.add_argument(
        "--check",
        action="store_true",
        help="print the names of the modules that no installed wheel has, and exit; exit status 1 if there are any",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    archs = options.archs.split(",")
    # The library reads both variables when it is imported and before it compiles.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(archs)
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    import flashinfer as library

    head_dims = [int(size) for size in options.head_dims.split(",")]
    dtypes = [DTYPES_BY_NAME[name] for name in options.dtypes.split(",")]
    if options.check:
        absent = [
            (arch, name) for arch in archs for name in missing_in_wheels(library, needed_modules(head_dims, dtypes, [arch]), arch)
        ]
        print("\n".join([f"{len(absent)} modules for {options.archs} are in no installed wheel", *map(" ".join, absent)]))
        return 1 if absent else 0
    modules = needed_modules(head_dims, dtypes, archs)
    specs = missing(library, modules)
    print(f"{len(modules)} modules for {options.archs}, {len(specs)} to be compiled", flush=True)
    if options.list:
        print("\n".join(spec.name for spec in specs))
        return 0
    began = time.monotonic()
    build(library, specs, options.out or library.jit.env.FLASHINFER_AOT_DIR, print)
    print(f"compiled in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
