"""What is shown while a system starts: a bar at a terminal, lines now and then elsewhere."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from services.local.start_view import EVERY_S, StartView, last_words
from services.shared.observe.progress import Progress, read

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
def test_a_line_is_read_as_it_was_written(progress: Progress, line: str) -> None:
    assert progress.line() == line
    assert read(line) == progress
    assert read(f"not {line}") is None


def log(path: Path, *messages: str) -> Path:
    lines = [json.dumps({"msg": message}) for message in messages]
    path.write_text("\n".join([*lines, "a library's own line", '{"msg": "cut']))
    return path


def test_last_words_of_a_log(tmp_path: Path) -> None:
    assert last_words(tmp_path / "none") == ""
    assert last_words(log(tmp_path / "a", "one", "two")) == "two"
    bar = "weights [##########          ]  50 %  2.00 of 4.00 GB, 0.50 GB/s, 4 s left"
    assert last_words(log(tmp_path / "b", HALF.line())) == bar == HALF.bar()


def test_a_terminal_has_one_line_and_others_one_now_and_then(tmp_path: Path) -> None:
    times = [0.0]
    path, screen, file = log(tmp_path / "worker", "loading"), Screen(), io.StringIO()
    views = [StartView(screen, lambda: times[-1]), StartView(file, lambda: times[-1])]
    for now in (0.1, 0.2, 1.0, EVERY_S, EVERY_S + 1):
        times.append(now)
        for view in views:
            view.waiting("worker-0", path)
    for view in views:
        view.line("  worker-0      ready")
    assert file.getvalue() == "  worker-0         5 s  loading\n  worker-0      ready\n"
    assert screen.getvalue().split("\r")[1:] == [
        *(f"  worker-0      {seconds:4} s  loading\x1b[K" for seconds in (0, 1, 5, 6)),
        "\x1b[K  worker-0      ready\n",
    ]
