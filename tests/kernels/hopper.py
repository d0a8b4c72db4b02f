"""python -m tests.kernels.hopper MODULE: compiles for an H100 or H200 each kernel that the cases of a bench module launch.

No GPU is needed: tensors have shapes and no memory, and a launch compiles the kernel instead. For each variant of
each kernel, the command prints the bytes of shared memory and, if the variant forbids fusion, the number of fused products, as
JSON. It must run in a separate process without Triton's interpreter.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from rootstock_llm.kernels.triton import launch

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def _typed(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


class HopperCompiler:
    """Compiles kernels in place of launches."""

    def __init__(self) -> None:
        # By kernel: fused multiply-adds of each variant that forbids fusion, and bytes of shared memory of each variant.
        self.fused: dict[str, list[int]] = defaultdict(list)
        self.shared: dict[str, list[int]] = defaultdict(list)
        self._known: set[str] = set()

    def compile(self, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for param in kernel.params:
            value = arguments[param.name]
            is_tensor = isinstance(value, torch.Tensor)
            fixed = isinstance(value, int) and value == 1 and not param.do_not_specialize
            if param.is_constexpr or value is None or fixed:
                signature[param.name], constants[(param.num,)] = "constexpr", value
                continue
            signature[param.name] = _typed(value)
            even = is_tensor or (isinstance(value, int) and value % 16 == 0)
            if even and not param.do_not_specialize and not param.do_not_specialize_on_alignment:
                attributes[(param.num,)] = [["tt.divisibility", 16]]
        key = f"{kernel.__name__} {signature} {constants} {attributes} {options}"
        if key not in self._known:
            self._known.add(key)
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
            compiled = triton.compile(source, target=HOPPER, options=options)
            self.shared[kernel.__name__].append(compiled.metadata.shared)
            if not options.get("enable_fp_fusion", True):
                self.fused[kernel.__name__].append(compiled.asm["ptx"].count("fma.rn"))


def main(module: str) -> None:
    compiler = HopperCompiler()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        compiler.compile(kernel, arguments, options)

    JITFunction.run = run
    launch._chains = lambda device: True  # launches are chained on Hopper
    for case in importlib.import_module(module).cases():
        case.make(torch.device("meta"))()
    print(json.dumps({"shared": compiler.shared, "fused": compiler.fused}))


if __name__ == "__main__":
    main(sys.argv[1])
