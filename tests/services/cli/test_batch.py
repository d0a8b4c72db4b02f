"""Batches over OpenAI's files and batches: what is sent, what is waited for, what is told of the end."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.cli.batch import command, passing
from services.cli.commands import COMMANDS
from services.cli.program import main
from services.cli.shared.exits import Exit

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}
OUTPUT = b'{"custom_id": "a"}\n' * 5000


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Batches(ThreadingHTTPServer):
    """Keeps one file and one batch. statuses: of the batch, one for each look, the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses = ["completed"]
        self.uploads: list[bytes] = []
        self.asked: list[tuple[str, str, Any]] = []
        self.refuses_uploads = False
        self.missing = 0  # bytes that an answer promises and has not
        self.away = 0  # looks at a batch that find nobody

    def batch(self) -> dict[str, Any]:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        counts = {"total": 3, "completed": 1, "failed": 1}
        faults = {"data": [{"line": 2, "message": "no body"}]} if status == "failed" else None
        files = {"output_file_id": "file-out", "error_file_id": None}
        return {"id": "batch_1", "status": status, "request_counts": counts, "errors": faults, **files}


class Handler(BaseHTTPRequestHandler):
    server: Batches

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path, None))
        if self.path.endswith("/content"):
            self._send(200, OUTPUT, self.server.missing)
            self.close_connection = True
        elif self.path.startswith("/v1/files/"):
            self._json({"id": "file-out", "bytes": len(OUTPUT)})
        elif self.server.away:
            self.server.away -= 1
            self._send(503, b'{"error": {"message": "the store is away"}}')
        elif self.path.startswith("/v1/batches?"):
            self._json({"data": [self.server.batch()], "has_more": "after" not in self.path})
        else:
            self._json(self.server.batch())

    def do_POST(self) -> None:
        if self.server.refuses_uploads and self.path == "/v1/files":
            self._send(413, b'{"error": {"message": "too large"}}')
            self.close_connection = True
            return
        content = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/files":
            self.server.uploads.append(content)
            self._json({"id": "file-in"})
            return
        self.server.asked.append(("POST", self.path, json.loads(content)))
        self._json(self.server.batch())

    def _json(self, answer: Any) -> None:
        self._send(200, json.dumps(answer).encode())

    def _send(self, status: int, content: bytes, missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content) + missing))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Batches]:
    monkeypatch.setattr(command, "LOOK_EVERY_S", 0.0)
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_text(json.dumps(LINE) + "\n")
    with Batches() as server:
        monkeypatch.setenv("ROOTSTOCK_URL", "http://{}:{}".format(*server.server_address))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_examples_of_help(batches: Batches, capsys: pytest.CaptureFixture[str]) -> None:
    batches.statuses = ["validating", "in_progress", "completed"]
    for example in COMMANDS["batch"].examples:
        assert main(example.split()[1:]) == Exit.DONE
    assert capsys.readouterr().out == "batch_1  completed  2 of 3 lines, 1 failed\n" * 3
    (upload,) = batches.uploads
    assert b'name="purpose"\r\n\r\nbatch\r\n' in upload and b'filename="requests.jsonl"' in upload
    assert json.dumps(LINE).encode() in upload
    body = {"input_file_id": "file-in", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert batches.asked[0] == ("POST", "/v1/batches", body)
    assert batches.asked[-1] == ("GET", "/v1/batches?limit=100&after=batch_1", None)


def test_a_batch_that_does_not_complete_is_a_failure(batches: Batches, capsys: pytest.CaptureFixture[str]) -> None:
    batches.statuses = ["validating", "failed"]
    assert main(["batch", "status", "batch_1", "--wait"]) == Exit.FAILED
    assert capsys.readouterr().err == "line 2: no body\n"


def test_results_are_streamed_and_those_that_are_not_there_told(
    batches: Batches, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    assert main(["batch", "results", "batch_1"]) == Exit.DONE
    assert capsysbinary.readouterr().out == OUTPUT
    assert main(["batch", "results", "batch_1", "-o", "out.jsonl"]) == Exit.DONE
    assert (tmp_path / "out.jsonl").read_bytes() == OUTPUT
    assert main(["batch", "results", "batch_1", "--errors"]) == Exit.FAILED
    batches.statuses = ["in_progress"]
    assert main(["batch", "results", "batch_1"]) == Exit.FAILED
    assert b"no line failed" in (told := capsysbinary.readouterr().err) and b"the batch is in_progress: wait" in told


def test_a_terminal_sees_a_file_pass(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(passing, "SHOW_EVERY_S", 0.0)
    assert main(["batch", "submit", "requests.jsonl"]) == Exit.DONE
    assert main(["batch", "results", "batch_1", "-o", "out.jsonl"]) == Exit.DONE
    shown = screen.getvalue().split("\x1b[K")
    assert any(each.startswith("\rupload [####################] 100 %") for each in shown)
    assert any(each.startswith("\rresults [####################] 100 %") for each in shown) and shown[-2:] == ["\r", ""]


def test_a_file_that_is_refused_while_it_is_sent(batches: Batches, capsys: pytest.CaptureFixture[str]) -> None:
    batches.refuses_uploads = True
    with Path("large.jsonl").open("wb") as file:
        file.write(json.dumps(LINE).encode() + b"\n")
        file.truncate(64 << 20)
    assert main(["batch", "submit", "large.jsonl"]) == Exit.FAILED
    assert "413 (too large): send less at once" in capsys.readouterr().err


def test_a_file_that_holds_no_requests_is_not_sent(batches: Batches) -> None:
    for further in ([], ["--endpoint", "/v1/completions"]):
        assert main(["batch", "submit", "none.jsonl", *further]) == Exit.USAGE
    for content in (b"", b"{", b"[]\n", b"{}\n"):
        Path("bad.jsonl").write_bytes(content)
        assert main(["batch", "submit", "bad.jsonl"]) == Exit.USAGE
    assert main(["batch", "cancel"]) == Exit.USAGE
    assert batches.uploads == []


def test_results_that_are_cut_off_leave_those_that_were_there(batches: Batches, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_bytes(b"before")
    batches.missing = 100
    assert main(["batch", "results", "batch_1", "-o", "out.jsonl"]) == Exit.CUT_OFF
    assert main(["batch", "results", "batch_1"]) == Exit.CUT_OFF
    assert (tmp_path / "out.jsonl").read_bytes() == b"before"


def test_a_store_that_is_away_for_a_moment_ends_no_wait(batches: Batches) -> None:
    batches.statuses = ["in_progress", "in_progress", "completed"]
    submitted = ["batch", "submit", "requests.jsonl", "--wait"]
    batches.away = 2
    assert main(submitted) == Exit.DONE
    batches.statuses, batches.away = ["in_progress"], 1000
    assert main([*submitted, "--timeout", "0.2"]) == Exit.FAILED
