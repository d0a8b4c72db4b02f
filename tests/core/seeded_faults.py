"""Replaces text in a function by a fault, for tests that check whether the product's own assertions find the fault."""

from __future__ import annotations

import inspect
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRODUCT = Path(__file__).resolve().parents[2] / "services"


@dataclass(frozen=True)
class Fault:
    """A fault in one function."""

    name: str
    function: Callable[..., Any]
    right: str  # text that occurs once in the function's source
    wrong: str  # text that replaces `right`
    law: str  # regular expression that the message of the failing assertion must match


def _faulty(fault: Fault) -> Callable[..., Any]:
    function = inspect.unwrap(fault.function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.right) == 1, f"{function.__qualname__} must contain {fault.right!r} exactly once"
    path = inspect.getsourcefile(function)
    assert path is not None
    made: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{source.replace(fault.right, fault.wrong)}", path, "exec")
    exec(code, function.__globals__, made)  # noqa: S102 - this file's own text
    found: Callable[..., Any] = made[function.__name__]
    return found


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Plants the fault for the duration of the block. All references see it, because the function's code object is replaced."""
    function: Any = inspect.unwrap(fault.function)
    right = function.__code__
    function.__code__ = _faulty(fault).__code__
    try:
        yield
    finally:
        function.__code__ = right


def law_broken(fault: Fault, scenario: Callable[[], object]) -> str:
    """Runs the scenario with the fault, and returns the text of the product's assertion that fails.

    Raises AssertionError if no assertion fails, or if the failed assertion is outside of the product.
    """
    with planted(fault):
        try:
            scenario()
        except AssertionError as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            assert Path(last.filename).resolve().is_relative_to(PRODUCT), f"{last.filename}: {error}"
            return str(error)
    raise AssertionError(f"no assertion failed: {fault.name}")
