"""Tests of the view of a start: one changing line on a terminal, and a line per step in other outputs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from rootstock_llm.services.local.start_view import EVERY_S, LogReader, StartView, UserRecord
from rootstock_llm.services.shared.observe.progress import Progress, read

HALF = Progress("weights", 2e9, 4e9, 4.0)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (HALF, "weights: 50 %, 2.00 of 4.00 GB in 4.0 s, 0.50 GB/s, 4 s left"),
        (Progress("weights", 0, 4e9, 4.0), "weights: 0 %, 0.00 of 4.00 GB in 4.0 s, 0.00 GB/s"),
        (Progress("weights", 28, 28, 2.0, "layers"), "weights: 100 %, 28 of 28 layers in 2.0 s, 14.0 layers/s"),
        (Progress("weights", 0, 0, 0.0), "weights: 100 %, 0.00 of 0.00 GB in 0.0 s"),
    ],
    ids=["half", "stalled", "layers", "nothing"],
)
def test_parsed_progress_line_equals_the_original_progress(progress: Progress, line: str) -> None:
    assert progress.line() == line
    assert read(line) == progress
    assert read(f"not {line}") is None


def record(message: str, **more: object) -> str:
    return json.dumps({"level": "info", "msg": message} | more) + "\n"


def test_log_reader_returns_each_record_for_users_once(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    reader = LogReader(path)
    assert reader.news() == [] and reader.last_step == ""
    path.write_text(record("for operators") + record("a step", step=True) + "a library's own line\n" + '{"msg": "cut')
    assert reader.news() == [UserRecord("a step")] and reader.last_step == "a step"
    with path.open("a") as file:
        file.write(
            '", "step": true}\n'
            + record(HALF.line())
            + record("slow", level="warning", logger="rootstock_llm.kernels.cpu")
            + record("late", level="warning", logger="rootstock_llm.services.gateway")
        )
    bar = "weights [##########          ]  50 %  2.00 of 4.00 GB, 0.50 GB/s, 4 s left"
    assert reader.news() == [UserRecord("cut"), UserRecord(bar, is_bar=True), UserRecord("slow", is_warning=True)]
    assert reader.news() == [] and reader.last_step == bar == HALF.bar()


def test_view_rewrites_one_line_on_a_terminal_and_prints_one_line_per_step_elsewhere(tmp_path: Path) -> None:
    times = [0.0]
    path, screen, file = tmp_path / "worker", Screen(), io.StringIO()
    path.write_text(record("loading", step=True))
    views = [StartView(screen, lambda: times[-1]), StartView(file, lambda: times[-1])]
    for now in (0.1, 0.2, 1.0, EVERY_S + 0.1, EVERY_S + 1):
        times.append(now)
        for view in views:
            view.waiting("worker-0", path)
    for view in views:
        view.line("  worker-0      ready")
    assert file.getvalue() == "  worker-0      loading\n  worker-0         5 s  loading\n  worker-0      ready\n"
    assert screen.getvalue().split("\r")[1:] == [
        *(f"  worker-0      {seconds:4} s  loading\x1b[K" for seconds in (0, 1, 5, 6)),
        "\x1b[K  worker-0      ready\n",
    ]


def test_view_shows_the_same_warning_of_several_workers_once(tmp_path: Path) -> None:
    for stream in (Screen(), io.StringIO()):
        view = StartView(stream)
        for name in ("worker-0", "worker-1"):
            (tmp_path / name).write_text(record("no compiler", level="warning", logger="rootstock_llm.kernels.cpu"))
            view.waiting(name, tmp_path / name)
        view.clear()
        assert stream.getvalue().count("  worker-0      no compiler\n") == 1 and stream.getvalue().count("no compiler") == 1
