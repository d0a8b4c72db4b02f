"""One line of a function replaced by a wrong one, for tests that ask whether the product notices by itself."""

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
    """In the source of `function` the text `right`, which stands there once, becomes `wrong`. law: words of the assert that is
    to trip."""

    name: str
    function: Callable[..., Any]
    right: str
    wrong: str
    law: str


def _faulty(fault: Fault) -> Callable[..., Any]:
    function = inspect.unwrap(fault.function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.right) == 1, f"{fault.right!r} does not stand once in {function.__qualname__}"
    path = inspect.getsourcefile(function)
    assert path is not None
    made: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{source.replace(fault.right, fault.wrong)}", path, "exec")
    exec(code, function.__globals__, made)  # noqa: S102 - this file's own text
    found: Callable[..., Any] = made[function.__name__]
    return found


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The product has the fault meanwhile: the code object of the function is another one, wherever it is bound already."""
    function: Any = inspect.unwrap(fault.function)
    right = function.__code__
    function.__code__ = _faulty(fault).__code__
    try:
        yield
    finally:
        function.__code__ = right


def law_broken(fault: Fault, scenario: Callable[[], object]) -> str:
    """The words of the product's own assert that trips with the fault; an assert of a test's is none."""
    with planted(fault):
        try:
            scenario()
        except AssertionError as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            assert Path(last.filename).is_relative_to(PRODUCT), f"{last.filename}: {error}"
            return str(error)
    raise AssertionError(f"nothing noticed: {fault.name}")
