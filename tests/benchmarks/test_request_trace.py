"""Tests of the request trace: calls and constructions are counted by window, in all threads and in child processes."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.call_counts import ProcessCounts, Window, WindowFile
from tests.benchmarks.request_trace import belongs_to_chat, collect, listing, measure, summary, total, traces
from tests.benchmarks.request_trace_runner import ROOT, SOCKET, WINDOW, write_script
from tests.contracts.life_of_a_request import rows
from tests.night import NIGHTLY

PACKAGE = "traced_package"
PARTS = """
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple
from pydantic import BaseModel

@dataclass(frozen=True, slots=True)
class Point:
    x: int

@dataclass(frozen=True, slots=True)
class OtherPoint:
    x: int

class Pair(NamedTuple):
    left: int

PAIR = Pair(1)

class Line(BaseModel):
    text: str

class Body(BaseModel):
    lines: list[Line]

class Base:
    def __init__(self):
        self.made = True

class Derived(Base):
    def __init__(self):
        super().__init__()

class Tag(str):
    def __new__(cls, text):
        return super().__new__(cls, text)

class Color(IntEnum):
    RED = 1

class Empty:
    pass

def function():
    return 1
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("root")
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "parts.py").write_text(PARTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return importlib.import_module(f"{PACKAGE}.parts")


def counted(tmp_path: Path, parts: ModuleType, act: Callable[[], object]) -> ProcessCounts:
    """Counts ten calls of `act` in the window of the chats and one in the idle window."""
    window = WindowFile(tmp_path / "window")
    counts = ProcessCounts(window, Path(str(parts.__file__)).parents[1], (PACKAGE,))
    counts.start()
    try:
        for phase, runs in ((Window.START, 3), (Window.CHATS, 10), (Window.IDLE, 1), (Window.END, 5)):
            window.set(phase)
            for _ in range(runs):
                act()
    finally:
        counts.stop()
    return counts


def test_function_calls_are_counted_separately_for_chats_and_idle_time(tmp_path: Path, parts: ModuleType) -> None:
    functions = counted(tmp_path, parts, parts.function).functions()
    assert [(file, name, *runs) for file, _, name, *runs in functions] == [(f"{PACKAGE}/parts.py", "function", 10, 1)]


def test_function_calls_in_other_threads_are_counted(tmp_path: Path, parts: ModuleType) -> None:
    def in_thread() -> None:
        thread = threading.Thread(target=parts.function)
        thread.start()
        thread.join()

    functions = counted(tmp_path, parts, in_thread).functions()
    assert [function[2:] for function in functions] == [("function", 10, 1)]


@pytest.mark.parametrize(
    ("construct", "types"),
    [
        pytest.param(lambda parts: parts.Point(1), {"Point": "dataclass"}, id="dataclass"),
        pytest.param(
            lambda parts: (parts.Point(1), parts.OtherPoint(1)),
            {"Point": "dataclass", "OtherPoint": "dataclass"},
            id="equal dataclasses",
        ),
        pytest.param(lambda parts: parts.Pair(1), {"Pair": "named tuple"}, id="named tuple"),
        pytest.param(lambda parts: parts.PAIR._replace(left=2), {"Pair": "named tuple"}, id="replaced named tuple"),
        pytest.param(lambda parts: parts.Line(text=""), {"Line": "body"}, id="model"),
        pytest.param(lambda parts: parts.Line.model_validate({"text": ""}), {"Line": "body"}, id="validated model"),
        pytest.param(
            lambda parts: parts.Body.model_validate({"lines": [{"text": ""}]}),
            {"Body": "body", "Line": "body"},
            id="nested model",
        ),
        pytest.param(
            lambda parts: parts.Body(lines=[{"text": ""}]), {"Body": "body", "Line": "body"}, id="nested in a constructor"
        ),
        pytest.param(lambda parts: parts.Derived(), {"Derived": "class"}, id="derived class"),
        pytest.param(lambda parts: parts.Tag(""), {"Tag": "class"}, id="subclass of str"),
        pytest.param(lambda parts: parts.Color(1), {}, id="enum member"),
        pytest.param(lambda parts: parts.Empty(), {}, id="no constructor"),
    ],
)
def test_each_construction_of_an_object_is_counted_once(
    tmp_path: Path, parts: ModuleType, construct: Callable[[ModuleType], object], types: dict[str, str]
) -> None:
    expected = [(f"{PACKAGE}.parts.{name}", kind, 10, 1) for name, kind in sorted(types.items())]
    assert counted(tmp_path, parts, lambda: construct(parts)).types(PACKAGE) == expected


@pytest.mark.parametrize(
    ("with_chats", "idle", "expected"),
    [
        pytest.param(10, 0, True, id="once per chat"),
        pytest.param(9, 0, False, id="in nine chats"),
        pytest.param(10, 1, True, id="ten times as often"),
        pytest.param(119, 12, False, id="mostly periodic"),
    ],
)
def test_function_counts_as_work_of_chats_if_it_runs_ten_times_as_often_as_when_idle(
    with_chats: int, idle: int, expected: bool
) -> None:
    assert belongs_to_chat(with_chats, idle) is expected


MESSAGES = """
import sys
from pathlib import Path
from rootstock_llm.protos.detokenizer_pb2 import DecodeBatch
from tests.benchmarks.call_counts import ProcessCounts, Window, WindowFile

window = WindowFile(Path(sys.argv[1]))
counts = ProcessCounts(window, Path.cwd())
counts.start()
window.set(Window.CHATS)
DecodeBatch.FromString(DecodeBatch().SerializeToString())
counts.stop()
print(counts.types("messages"))
"""


def test_protobuf_messages_are_counted_when_constructed_or_parsed(tmp_path: Path) -> None:
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    command = [sys.executable, "-c", MESSAGES, str(tmp_path / WINDOW)]
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str([("rootstock_llm.protos.detokenizer_pb2.DecodeBatch", "message", 2, 0)])


def sent(module: str, **found: Any) -> dict[str, Any]:
    return {"module": module, "functions": [], "types": [], **found}


def test_traces_merge_child_processes_into_services() -> None:
    shared = ["shared/a.py", 1, "f", 10, 0]
    by_process = traces(
        [
            sent("rootstock_llm.services.local", functions=[["local/a.py", 1, "f", 10, 0]]),
            sent("rootstock_llm.services.gateway", functions=[shared, ["gateway/a.py", 1, "g", 10, 5]]),
            sent("rootstock_llm.services.tokenizer", types=[["rootstock_llm.services.tokenizer.a.Job", "dataclass", 10, 0]]),
            sent("rootstock_llm.services.tokenizer.render_child", functions=[shared, ["tokenizer/b.py", 7, "A.h", 20, 1]]),
            sent("rootstock_llm.services.worker", types=[["rootstock_llm.protos.worker_pb2.Submit", "message", 10, 0]]),
            sent("rootstock_llm.services.detokenizer"),
        ]
    )
    assert by_process["gateway"].files == {"shared/a.py"}
    assert by_process["tokenizer"].functions == {"shared/a.py:1 f", "tokenizer/b.py:7 A.h"}
    everything = total(by_process)
    assert everything.files == {"shared/a.py", "tokenizer/b.py"}
    assert everything.types == {"rootstock_llm.services.tokenizer.a.Job"}
    assert everything.messages == {"rootstock_llm.protos.worker_pb2.Submit"}
    assert summary(by_process).splitlines()[-1].split() == ["distinct", "2", "2", "1", "1"]
    assert "  rootstock_llm.services.tokenizer.a.Job  (dataclass)" in listing(by_process).splitlines()


def test_traces_refuse_a_missing_service() -> None:
    with pytest.raises(RuntimeError, match="these services sent no counts: worker, detokenizer"):
        traces([sent("rootstock_llm.services.gateway"), sent("rootstock_llm.services.tokenizer")])


def test_runner_sends_the_counts_of_a_process_that_writes_no_files(tmp_path: Path) -> None:
    """Runs a process like the tokenizer's rendering process: with an empty environment and a file size limit of 0."""
    setup = {"templates": {"default": "{{ messages[0].content }}"}, "special_tokens": {}, "max_chars": 100, "max_messages": 1}
    limits = {"memory_bytes": 1 << 30, "seconds": 60.0, "start_seconds": 60.0}
    messages = json.dumps([{"role": "user", "content": "word"}]).encode()
    header = {"sizes": [len(messages), 0, 0], "add_generation_prompt": False, "continue_final_message": False}
    window = WindowFile(tmp_path / WINDOW)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET))
        listener.listen()
        child = subprocess.Popen(
            [write_script(tmp_path), "-m", "rootstock_llm.services.tokenizer.render_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
        )
        with child:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps({**setup, **limits}).encode() + b"\n")
            child.stdin.flush()
            assert json.loads(child.stdout.readline()) == {"error": None}
            for phase, runs in ((Window.CHATS, 10), (Window.IDLE, 1)):
                window.set(phase)
                for _ in range(runs):
                    child.stdin.write(json.dumps(header).encode() + b"\n" + messages)
                    child.stdin.flush()
                    assert child.stdout.read(json.loads(child.stdout.readline())["size"]) == b"word"
            window.set(Window.END)
            (found,) = collect(listener)
            child.stdin.close()
    assert found["module"] == "rootstock_llm.services.tokenizer.render_child"
    calls = {name: counts for file, _, name, *counts in found["functions"] if file == "services/tokenizer/render_child.py"}
    assert calls["Renderer.render"] == [10, 1]
    assert "Renderer.__init__" not in calls


@pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
def test_page_about_the_life_of_a_request_names_every_type_of_a_chat() -> None:
    named = {name for row in rows() for name in row.types}
    found = {name.rpartition(".")[2].lstrip("_") for name in total(traces(measure())).types}
    assert found and found <= named, sorted(found - named)
