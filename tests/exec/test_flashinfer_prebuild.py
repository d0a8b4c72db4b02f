"""Tests that the prebuild compiles exactly the modules that the backend needs, and that FlashInfer finds them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rootstock_llm.services.worker.exec.attention.flashinfer_limits import DTYPES, HEAD_DIMS, Unsupported
from rootstock_llm.services.worker.exec.attention.flashinfer_prebuild import DECODE, Module, build, main, missing, needed_modules
from tests.exec import test_flashinfer_backend as steps
from tests.exec import test_flashinfer_library as through_library

INSTALLED = through_library.INSTALLED
NO_GPU = pytest.mark.skipif(not INSTALLED or torch.cuda.is_available(), reason="flashinfer is not installed, or there is a GPU")
CPU, HALF = torch.device("cpu"), torch.float16


def test_needed_modules_cover_every_kind_of_step_with_and_without_a_window() -> None:
    found = {(each.kernels, each.windowed) for each in needed_modules([128], [torch.bfloat16], ["8.0", "9.0a"])}
    assert found == {(kernels, windowed) for kernels in (DECODE, "fa2", "fa3") for windowed in (False, True)}


def test_needed_modules_include_hopper_kernels_only_for_hopper() -> None:
    assert {each.kernels for each in needed_modules([64], [HALF], ["8.0", "10.0f"])} == {DECODE, "fa2"}


def test_needed_modules_cover_every_head_size_and_dtype() -> None:
    found = needed_modules(HEAD_DIMS, DTYPES, ["9.0a"])
    assert {(each.head_dim, each.dtype) for each in found} == {(size, dtype) for size in HEAD_DIMS for dtype in DTYPES}
    assert {each.index for each in found} == {torch.int32} and len(found) == len(HEAD_DIMS) * len(DTYPES) * 6


def test_unsupported_head_sizes_are_refused() -> None:
    with pytest.raises(Unsupported):
        needed_modules([96], [HALF], ["9.0a"])


class MissingJITCacheError(RuntimeError):
    """Replaces FlashInfer's error for a missing module; it has the module's spec."""

    def __init__(self, spec: Any) -> None:
        super().__init__("JIT compilation is disabled")
        self.spec = spec


class Compiler:
    """Replaces FlashInfer: it has the modules in `has`, and compiles others into its folder."""

    def __init__(self, folder: Path, has: set[str]) -> None:
        self._folder, self._has = folder, has
        self.env = SimpleNamespace(FLASHINFER_AOT_DIR=folder / "aot")
        self.jit = SimpleNamespace(MissingJITCacheError=MissingJITCacheError, build_jit_specs=self._build, env=self.env)
        self.prefill = SimpleNamespace(get_batch_prefill_module=self._load)
        self.decode = SimpleNamespace(get_batch_decode_module=lambda *arguments: self._load(DECODE, *arguments))

    def _load(self, kernels: str, dtype: torch.dtype, *rest: Any) -> None:
        name = f"{kernels}_{rest[3]}_{rest[6]}"
        if name not in self._has:
            raise MissingJITCacheError(SimpleNamespace(name=name, jit_library_path=self._folder / f"{name}.so"))

    def _build(self, specs: list[Any], verbose: bool) -> None:
        for spec in specs:
            spec.jit_library_path.write_bytes(spec.name.encode())


def test_only_missing_modules_are_compiled_into_the_folder_of_the_library(tmp_path: Path) -> None:
    library, lines = Compiler(tmp_path, {"fa2_64_False"}), []
    specs = missing(library, needed_modules([64], [HALF], ["8.0"]))
    build(library, specs, tmp_path / "out", lines.append)
    names = {"decode_64_False", "decode_64_True", "fa2_64_True"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert all((tmp_path / "out" / name / f"{name}.so").read_bytes() == name.encode() for name in names)
    assert len(lines) == 3 and all("bytes" in line for line in lines)


def test_command_lists_missing_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = Compiler(tmp_path, set())
    monkeypatch.setitem(sys.modules, "flashinfer", cast(ModuleType, library))
    for name in ("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.setenv(name, "")
    arguments = ["--archs", "8.0,9.0a", "--head-dims", "64", "--dtypes", "float16"]
    assert main([*arguments, "--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "6 modules for 8.0,9.0a, 6 to be compiled" and "fa3_64_True" in printed
    assert not library.env.FLASHINFER_AOT_DIR.exists()
    assert main(arguments) == 0
    assert len(list(library.env.FLASHINFER_AOT_DIR.glob("*/*.so"))) == 6


def test_command_lists_the_modules_that_the_wheels_lack_for_each_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels fa3 exist only for Hopper. The check must not load the wheels' modules."""
    library = Compiler(tmp_path, set())
    wheels = {"8.0": {"decode_64_False", "decode_64_True", "fa2_64_False"}, "9.0a": {f"fa3_64_{each}" for each in (False, True)}}
    library.env.FLASHINFER_AOT_PROVIDERS = ("both",)

    def artifacts(name: str) -> tuple[str, ...]:
        return library.env.FLASHINFER_AOT_PROVIDERS if name in wheels[os.environ["FLASHINFER_CUDA_ARCH_LIST"]] else ()

    library.env.get_aot_artifacts = artifacts
    monkeypatch.setitem(sys.modules, "flashinfer", cast(ModuleType, library))
    for name in ("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.setenv(name, "")
    arguments = ["--check", "--head-dims", "64", "--dtypes", "float16", "--archs"]
    assert main([*arguments, "8.0,9.0a"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "8.0 fa2_64_True",
        *(f"9.0a {kernels}_64_{each}" for kernels in (DECODE, "fa2") for each in (False, True)),
    ]
    wheels["8.0"].add("fa2_64_True")
    assert main([*arguments, "8.0"]) == 0 and library.env.FLASHINFER_AOT_PROVIDERS == ("both",)


def test_missing_modules_are_counted_only_when_jit_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's tests skip a case if `uncompiled()` is above 0. It counts missing modules only if JIT is disabled."""
    library = Compiler(
        tmp_path, {f"{kernels}_128_{windowed}" for kernels in (DECODE, "fa2", "fa3") for windowed in (False, True)}
    )
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert steps.uncompiled(library, 128, torch.bfloat16, "9.0") == 0
    assert steps.uncompiled(library, 64, torch.bfloat16, "9.0") == 6
    assert (
        steps.uncompiled(library, 64, torch.bfloat16, "9.0", (0,))
        == steps.uncompiled(library, 64, torch.bfloat16, "9.0", (5,))
        == 3
    )
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    assert steps.uncompiled(library, 64, torch.bfloat16, "9.0") == 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Module]]:
    """The compiled modules that FlashInfer's Python code requests during the test."""
    module, found = importlib.import_module("flashinfer"), set()
    for part, name, place in (
        (module.prefill, "get_batch_prefill_module", 1),
        (module.decode, "get_batch_prefill_module", 1),
        (module.decode, "get_batch_decode_module", 0),
    ):
        inner = getattr(part, name)

        def record(*arguments: Any, inner: Any = inner, place: int = place) -> Any:
            kernels = arguments[0] if place else DECODE
            query, keys, out, index, head_dim, _, posenc, windowed, capped, *half_sums = arguments[place:]
            assert query == keys == out and posenc == 0 and not capped and not any(half_sums)
            found.add(Module(kernels, query, index, head_dim, windowed))
            return inner(*arguments)

        monkeypatch.setattr(part, name, record)
    yield found


library, ran = through_library.library, through_library.ran  # fixtures


@NO_GPU
def test_library_requests_only_known_modules(library: Any, asked: set[Module]) -> None:
    """Runs steps and graphs with different windows, and with head groups for kernels with and without tensor cores."""
    for shape in steps.CASES.values():
        for split_mixed in (False, True):
            steps.test_steps_equal_the_reference(shape, split_mixed, CPU, library)
    for shape in (steps.SHAPE, steps.PAIRED):
        steps.test_graphs_with_fixed_buffers_compute_the_current_plan(shape, CPU, library)
    sizes, dtypes = {each.head_dim for each in asked}, {each.dtype for each in asked}
    assert asked <= set(needed_modules(sizes, dtypes, ["8.0", "9.0a"]))
    assert {each.kernels for each in asked} == {DECODE, "fa2", "fa3"}


@NO_GPU
def test_library_loads_a_prebuilt_module_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's own code finds the prebuilt file. The file is empty, so the test replaces the call that loads it."""
    module = importlib.import_module("flashinfer")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setattr(module.jit.env, "FLASHINFER_AOT_DIR", tmp_path)
    monkeypatch.setattr(module.jit.core, "check_cuda_arch", lambda: None)
    wanted = Module(DECODE, HALF, torch.int32, 64, True)
    (spec,) = missing(module, [wanted])
    place = tmp_path / spec.name / f"{spec.name}.so"
    place.parent.mkdir()
    place.touch()
    opened = []
    monkeypatch.setattr(type(spec), "load", lambda self, path=None: opened.append(path) or FakeModule())
    assert missing(module, [wanted]) == [] and opened == [place]


class FakeModule:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None
