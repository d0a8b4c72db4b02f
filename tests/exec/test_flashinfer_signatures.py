"""The double has the signatures of an installed FlashInfer, which the tests read from its source without importing it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.exec.flashinfer_double import DecodeWrapper, PrefillWrapper, fast_decode_plan

SPEC = importlib.util.find_spec("flashinfer")
PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
REPLACED = ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer")  # private attributes that the backend replaces
pytestmark = pytest.mark.skipif(SPEC is None, reason="flashinfer is not installed")

CASES: dict[str, tuple[str, str, str, Callable[..., Any]]] = {
    "prefill": ("prefill.py", PREFILL, "__init__", PrefillWrapper.__init__),
    "prefill plan": ("prefill.py", PREFILL, "plan", PrefillWrapper.plan),
    "prefill run": ("prefill.py", PREFILL, "run", PrefillWrapper.run),
    "decode": ("decode.py", DECODE, "__init__", DecodeWrapper.__init__),
    "decode plan": ("decode.py", DECODE, "plan", DecodeWrapper.plan),
    "decode run": ("decode.py", DECODE, "run", DecodeWrapper.run),
    "fast plan": ("decode.py", "", "fast_decode_plan", fast_decode_plan),
}


def parsed(file: str) -> tuple[ast.Module, str]:
    assert SPEC is not None and SPEC.submodule_search_locations
    text = (Path(SPEC.submodule_search_locations[0]) / file).read_text()
    return ast.parse(text), text


def functions(tree: ast.Module, owner: str, name: str) -> list[ast.FunctionDef]:
    """Returns all functions of this name, overloads first."""
    body: list[ast.stmt] = tree.body
    if owner:
        (made,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = made.body
    return [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]


def parameters_of(tree: ast.Module, owner: str, name: str) -> tuple[list[str], set[str]]:
    """Returns the names of the positional parameters in order, and the names of all parameters.

    If the function forwards keyword arguments to _plan_impl, that function's parameters are included.
    """
    arguments = functions(tree, owner, name)[-1].args
    places = [argument.arg for argument in arguments.args]
    names = {*places, *(argument.arg for argument in arguments.kwonlyargs)}
    if arguments.kwarg is not None:
        names |= parameters_of(tree, owner, "_plan_impl")[1]
    return places, names


@pytest.mark.by_day(one_in=2, seed=29)
@pytest.mark.parametrize(("file", "owner", "name", "ours"), CASES.values(), ids=CASES.keys())
def test_fake_flashinfer_library_has_the_signatures_of_the_real_library(
    file: str, owner: str, name: str, ours: Callable[..., Any]
) -> None:
    places, names = parameters_of(parsed(file)[0], owner, name)
    parameters = inspect.signature(ours).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
    assert set(own) <= names
    assert own[: min(8, len(places))] == places[:8], "the first eight parameters, which are passed by position, must be equal"


@pytest.mark.parametrize("file", ["prefill.py", "decode.py"])
def test_library_has_the_attributes_that_the_back_end_replaces(file: str) -> None:
    text = parsed(file)[1]
    assert all(f"self.{name} =" in text and f"self.{name}," in text for name in REPLACED)
