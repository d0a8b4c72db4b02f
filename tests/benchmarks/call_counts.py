"""Counts function calls and constructed objects in one process, separately for each window of a measurement.

The counts come from profile functions (`sys.setprofile`). Each Python thread has a profile function with its own counters,
because concurrent updates of shared counters would lose counts. Threads that C or C++ starts are not counted. Each resumption of
a coroutine or generator is a call, as in cProfile.

These events count as constructions:

| type | event |
|---|---|
| class, dataclass, settings | call of the `__init__` that the type resolves to |
| named tuple | call of its `__new__` or `_make` |
| subclass of an immutable type | call of its `__new__` |
| pydantic model | call of its `__init__`; also each model object, at any depth, in the result of a validation |
| protobuf message | call of `__init__` in protobuf's Python implementation; parsing a message or reading a default calls it too |

Types without a Python `__init__` or `__new__`, enum members and copies are not counted.
"""

from __future__ import annotations

import dataclasses
import inspect
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from enum import Enum, IntEnum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDERS = ("services", "kernels")  # folders whose functions and types are counted
PACKAGE = "rootstock_llm"  # holds links to the folders
MESSAGES = f"{PACKAGE}.protos"  # package of the generated protobuf messages
MAKERS = {"__init__": "__init__", "init": "__init__", "__new__": "__new__", "<lambda>": "__new__", "_make": "_make"}
VALIDATIONS = ("BaseModel.__init__", "BaseModel.model_validate", "TypeAdapter.validate_")


class Window(IntEnum):
    """Phase of a measurement. The window file contains the current phase."""

    START = 0
    CHATS = 1
    IDLE = 2
    END = 3


class WindowFile:
    """Shares the current window between the measurement and the counted processes, as a mapped file of one byte."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes([Window.START]))
        with path.open("r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)

    def get(self) -> int:
        return self._byte[0]

    def set(self, window: Window) -> None:
        self._byte[0] = window


class ThreadCounts:
    """The counts of one thread. Only its own thread writes them."""

    def __init__(self, window: WindowFile) -> None:
        self.calls: list[dict[int, int]] = [{} for _ in Window]  # per window: number of calls by id of the code object
        self.built: list[Counter[type]] = [Counter() for _ in Window]  # per window: number of constructed objects by type
        self.codes: dict[int, CodeType] = {}  # counted code objects by id; these references keep the ids valid
        self._window = window
        self._makers: dict[int, str] = {}  # by id of a code object that may be a constructor: the constructor's name (MAKERS)
        self._validations: set[int] = set()  # ids of pydantic's functions that return a validated value
        self._makes: dict[tuple[type, int], bool] = {}  # by type and code id: whether the code is the type's constructor

    def profile(self, frame: FrameType, event: str, value: Any) -> None:
        """Counts one event, as the profile function of the thread.

        Args:
            value: the returned value of a return event.
        """
        if event == "call":
            code = frame.f_code
            key = id(code)
            if key not in self.codes:
                self._classify(key, code)
            calls = self.calls[self._window.get()]
            calls[key] = calls.get(key, 0) + 1
            if (attribute := self._makers.get(key)) is not None:
                self._count_type(frame, key, attribute)
        elif event == "return" and id(frame.f_code) in self._validations:
            self._count_models(frame, value)

    def _classify(self, key: int, code: CodeType) -> None:
        self.codes[key] = code
        attribute = MAKERS.get(code.co_name)
        if attribute is not None and code.co_argcount and (code.co_name != "<lambda>" or code.co_varnames[0] == "_cls"):
            self._makers[key] = attribute
        if "/pydantic/" in code.co_filename and code.co_qualname.startswith(VALIDATIONS):
            self._validations.add(key)

    def _count_type(self, frame: FrameType, key: int, attribute: str) -> None:
        first = frame.f_locals.get(frame.f_code.co_varnames[0])
        cls = type(first) if attribute == "__init__" else first
        if not isinstance(cls, type) or issubclass(cls, Enum):  # a look-up of an enum member calls `__new__`
            return
        makes = self._makes.get((cls, key))
        if makes is None:
            function = inspect.unwrap(getattr(cls, attribute))
            makes = getattr(function, "__code__", None) is frame.f_code  # False for a base class's code, which super() calls
            self._makes[cls, key] = makes
        if makes:
            self.built[self._window.get()][cls] += 1

    def _count_models(self, frame: FrameType, value: Any) -> None:
        models = list(_models(frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else value))
        if frame.f_code.co_name == "__init__":
            models = models[1:]  # the call of __init__ has counted the outer model
        self.built[self._window.get()].update(models)


class ProcessCounts:
    """The counts of all threads of this process.

    Args:
        window: the measurement's window file.
        root: parent folder of the counted packages.
        folders: names of the counted packages.
    """

    def __init__(self, window: WindowFile, root: Path, folders: tuple[str, ...] = FOLDERS) -> None:
        self._window, self._root, self._folders = window, root, folders
        self._threads: list[ThreadCounts] = []

    def start(self) -> None:
        """Counts from now on in the calling thread and in each thread that starts later."""
        threading.setprofile(self._begin)
        sys.setprofile(self._begin)

    def stop(self) -> None:
        """Ends the counting in the calling thread and in threads that start later."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _begin(self, frame: FrameType, event: str, value: Any) -> None:
        """Installs the profile function of a new thread. Python calls this method at the thread's first event."""
        counts = ThreadCounts(self._window)
        self._threads.append(counts)
        sys.setprofile(counts.profile)
        counts.profile(frame, event, value)

    def functions(self) -> list[tuple[str, int, str, int, int]]:
        """Returns (file, first line, qualified name, calls with chats, calls in the idle window) of each counted function."""
        totals: dict[tuple[str, int, str], Counter[int]] = {}
        for counts in self._threads:
            for window in (Window.CHATS, Window.IDLE):
                for key, calls in list(counts.calls[window].items()):
                    code = counts.codes[key]
                    if code.co_name != "<module>" and (file := self._file(code)):
                        totals.setdefault((file, code.co_firstlineno, code.co_qualname), Counter())[window] += calls
        return [(*function, total[Window.CHATS], total[Window.IDLE]) for function, total in sorted(totals.items())]

    def types(self, module: str) -> list[tuple[str, str, int, int]]:
        """Returns (qualified name, kind, constructions with chats, constructions in the idle window) of each counted type."""
        totals: dict[tuple[str, str], Counter[int]] = {}
        for counts in self._threads:
            for window in (Window.CHATS, Window.IDLE):
                for cls, built in list(counts.built[window].items()):
                    home = f"{module}.__main__" if cls.__module__ == "__main__" else cls.__module__
                    if home.startswith(MESSAGES) or home.removeprefix(f"{PACKAGE}.").partition(".")[0] in self._folders:
                        totals.setdefault((f"{home}.{cls.__qualname__}", _kind(cls)), Counter())[window] += built
        return [(*each, total[Window.CHATS], total[Window.IDLE]) for each, total in sorted(totals.items())]

    def _file(self, code: CodeType) -> str:
        """Returns the code's file relative to the root; empty if the file is in none of the counted packages."""
        path = os.path.relpath(code.co_filename, self._root) if os.path.isabs(code.co_filename) else ""
        path = path.removeprefix(f"{PACKAGE}/")
        return path if path.partition("/")[0] in self._folders else ""


def _models(value: Any) -> Iterator[type]:
    """Yields the types of all pydantic models in a validated value: the outer model and the models in fields that were set."""
    if hasattr(type(value), "__pydantic_fields__"):
        yield type(value)
        for name in getattr(value, "__pydantic_fields_set__", ()):  # missing if the validation has failed
            yield from _models(value.__dict__.get(name))
    elif isinstance(value, dict):
        for each in value.values():
            yield from _models(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _models(each)


def _kind(cls: type) -> str:
    if cls.__module__.startswith(f"{MESSAGES}."):
        return "message"
    if hasattr(cls, "__pydantic_fields__"):
        return "body"
    if dataclasses.is_dataclass(cls):
        return "dataclass"
    return "named tuple" if issubclass(cls, tuple) and hasattr(cls, "_fields") else "class"
