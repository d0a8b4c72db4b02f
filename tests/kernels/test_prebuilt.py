"""Checks prebuilt kernels: the best one for the CPU is used without a compiler, and builds of other sources are ignored.

Also checks the folders in which kernels are built if no prebuilt ones exist.
"""

from __future__ import annotations

import platform
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rootstock_llm.kernels.cpu import build
from rootstock_llm.kernels.cpu.build import VARIANTS, buildable, cpu_features, runnable
from rootstock_llm.kernels.cpu.library import CpuKernels
from tests.kernels.compiled import COMPILED

V2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def test_list_of_runnable_variants_begins_with_the_best_variant() -> None:
    for machine, features, best in (
        ("x86_64", V2, "x86-64-v2"),
        ("x86_64", V3, "x86-64-v3"),
        ("x86_64", V3 - {"fma"}, "x86-64-v2"),
        ("x86_64", V4, "x86-64-v4"),
        ("x86_64", V4 | {"avx512_vnni"}, "x86-64-v4-vnni"),
        ("x86_64", V4 | {"avx512_bf16", "avx512_vnni", "amx_tile"}, "x86-64-v4-bf16"),
        ("x86_64", V3 | {"avx512_bf16"}, "x86-64-v3"),
        ("aarch64", {"fp", "asimd"}, "armv8-a"),
    ):
        assert runnable(machine, frozenset(features))[0].name == best, sorted(features)


def test_list_of_runnable_variants_is_empty_when_the_cpu_lacks_the_baseline() -> None:
    assert runnable("x86_64", frozenset({"sse2"})) == []


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS))
        yield


@pytest.fixture(scope="module")
def best_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    COMPILED.mkdir(parents=True, exist_ok=True)
    made = build.prebuild(runnable(platform.machine(), cpu_features())[0], COMPILED)
    return Path(shutil.copy(made, tmp_path_factory.mktemp("prebuilt")))


@pytest.fixture
def no_compiler(best_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(path: Path) -> Path:
        raise AssertionError("the test must not compile")

    monkeypatch.setattr(build, "PREBUILT", best_build.parent)
    monkeypatch.setattr(build, "_compile", none)
    monkeypatch.setattr(build, "_cache_folders", lambda: [])


@pytest.mark.usefixtures("no_compiler")
def test_prebuilt_library_is_used_without_a_compiler(best_build: Path) -> None:
    assert build.built_library() == best_build
    x, out = torch.randn(3, 64), torch.empty(3, 64)
    CpuKernels(best_build, 1).rms_norm(out, x, torch.ones(64), 1e-6)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))


@pytest.mark.usefixtures("no_compiler")
def test_prebuilt_library_is_ignored_when_the_sources_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "src"
    shutil.copytree(build.SOURCES, sources)
    with (sources / "draw.cpp").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(build.BuildFailed):
        build.built_library()


@pytest.mark.usefixtures("no_compiler")
def test_next_prebuilt_variant_is_used_when_the_best_variant_is_missing(
    best_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    better = VARIANTS[0].__class__("better", platform.machine(), ("-O3",), frozenset())
    monkeypatch.setattr(build, "runnable", lambda machine, features: [better, *runnable(machine, features)])
    assert build.built_library() == best_build


@pytest.mark.parametrize("home", [None, "/" + "x" * 300], ids=["missing", "unreadable"])
def test_kernels_are_built_in_the_checkout_when_the_home_folder_is_not_usable(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user id without an account has no home folder. The name of the other folder is too long to be read, also for root."""

    def no_account(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    def compile_nothing(compiler: str, options: tuple[str, ...], target: Path) -> None:
        target.touch()
        compiled.append(target)

    compiled: list[Path] = []
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "none")
    monkeypatch.setattr(build, "PROJECT", tmp_path)
    monkeypatch.setattr(build, "_compiler", lambda: "g++")
    monkeypatch.setattr(build, "_compile", compile_nothing)
    monkeypatch.setattr(pwd, "getpwuid", no_account)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    assert [build.built_library(), build.built_library()] == compiled * 2
    assert [path.parent for path in compiled] == [tmp_path / "build" / "kernels"]


def test_build_fails_when_no_folder_for_libraries_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "none")
    monkeypatch.setattr(build, "PROJECT", tmp_path)
    monkeypatch.setattr(build, "_compiler", lambda: "g++")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    with pytest.raises(build.BuildFailed, match="set XDG_CACHE_HOME"):
        build.built_library()


def test_list_of_buildable_variants_ends_with_the_baseline() -> None:
    assert buildable()[-1].name in ("x86-64-v2", "armv8-a")
