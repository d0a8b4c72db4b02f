"""Tests of the command `rootstock batch` with a fake server of files and batches."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.cli.batch import command, transfer
from rootstock_llm.services.cli.commands import COMMANDS
from rootstock_llm.services.cli.program import main
from rootstock_llm.services.cli.shared.exits import Exit

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}
OUTPUT = b'{"custom_id": "a"}\n' * 5000


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Batches(ThreadingHTTPServer):
    """A fake server with one file and one batch."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses = ["completed"]  # the batch's status at each request; the last one repeats
        self.uploads: list[bytes] = []
        self.asked: list[tuple[str, str, Any]] = []  # method, path and JSON body of each request except uploads
        self.refuses_uploads = False
        self.missing = 0  # bytes by which a response is shorter than its content-length
        self.away = 0  # number of next requests for a batch that get status 503

    def batch(self) -> dict[str, Any]:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        counts = {"total": 3, "completed": 1, "failed": 1}
        faults = {"data": [{"line": 2, "message": "no body"}]} if status == "failed" else None
        files = {"output_file_id": "file-out", "error_file_id": None}
        return {"id": "batch_1", "status": status, "request_counts": counts, "errors": faults, **files}


class Handler(BaseHTTPRequestHandler):
    server: Batches

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

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
    monkeypatch.setattr(command, "POLL_S", 0.0)
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_text(json.dumps(LINE) + "\n")
    with Batches() as server:
        monkeypatch.setenv("ROOTSTOCK_URL", "http://{}:{}".format(*server.server_address))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_batch_command_succeeds_with_each_example_of_the_help_text(batches: Batches, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_batch_command_with_wait_exits_with_failure_when_the_batch_fails(
    batches: Batches, capsys: pytest.CaptureFixture[str]
) -> None:
    batches.statuses = ["validating", "failed"]
    assert main(["batch", "status", "batch_1", "--wait"]) == Exit.FAILED
    assert capsys.readouterr().err == "line 2: no body\n"


def test_batch_command_reads_the_file_or_the_id_after_a_flag(batches: Batches) -> None:
    assert main(["batch", "submit", "--wait", "requests.jsonl"]) == Exit.DONE
    assert len(batches.uploads) == 1
    assert main(["batch", "status", "--json", "batch_1"]) == Exit.DONE
    assert batches.asked[-1][1] == "/v1/batches/batch_1"


def test_batch_results_command_prints_or_writes_results_and_reports_missing_results(
    batches: Batches, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    assert main(["batch", "results", "batch_1"]) == Exit.DONE
    assert capsysbinary.readouterr().out == OUTPUT
    assert main(["batch", "results", "batch_1", "-o", "out.jsonl"]) == Exit.DONE
    assert (tmp_path / "out.jsonl").read_bytes() == OUTPUT
    assert main(["batch", "results", "batch_1", "--errors"]) == Exit.FAILED
    batches.statuses = ["in_progress"]
    assert main(["batch", "results", "batch_1"]) == Exit.FAILED
    assert b"no line of the batch failed" in (errors := capsysbinary.readouterr().err)
    assert b"the batch is in_progress: wait" in errors


def test_upload_and_download_show_progress_on_a_terminal(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(transfer, "SHOW_EVERY_S", 0.0)
    assert main(["batch", "submit", "requests.jsonl"]) == Exit.DONE
    assert main(["batch", "results", "batch_1", "-o", "out.jsonl"]) == Exit.DONE
    shown = screen.getvalue().split("\x1b[K")
    assert any(each.startswith("\rupload [####################] 100 %") for each in shown)
    assert any(each.startswith("\rresults [####################] 100 %") for each in shown) and shown[-2:] == ["\r", ""]


def test_batch_submit_command_reports_the_servers_refusal_during_an_upload(
    batches: Batches, capsys: pytest.CaptureFixture[str]
) -> None:
    batches.refuses_uploads = True
    with Path("large.jsonl").open("wb") as file:
        file.write(json.dumps(LINE).encode() + b"\n")
        file.truncate(64 << 20)
    assert main(["batch", "submit", "large.jsonl"]) == Exit.FAILED
    assert "413 (too large): send a smaller request" in capsys.readouterr().err


def test_batch_submit_command_uploads_nothing_when_the_file_is_missing_or_invalid(batches: Batches) -> None:
    for further in ([], ["--endpoint", "/v1/completions"]):
        assert main(["batch", "submit", "none.jsonl", *further]) == Exit.USAGE
    for content in (b"", b"{", b"[]\n", b"{}\n"):
        Path("bad.jsonl").write_bytes(content)
        assert main(["batch", "submit", "bad.jsonl"]) == Exit.USAGE
    assert main(["batch", "cancel"]) == Exit.USAGE
    assert batches.uploads == []


def test_batch_submit_command_refuses_a_pipe_as_the_file_of_requests(
    batches: Batches, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.write(write, json.dumps(LINE).encode() + b"\n")
    os.close(write)
    assert main(["batch", "submit", f"/dev/fd/{read}"]) == Exit.USAGE
    os.close(read)
    assert "is not a regular file" in capsys.readouterr().err and batches.uploads == []


def test_batch_submit_command_uploads_a_file_whose_name_is_not_text(batches: Batches) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    Path("requests.jsonl").rename(name)
    assert main(["batch", "submit", name]) == Exit.DONE
    assert b'filename="caf?.jsonl"' in batches.uploads[0]


def test_batch_results_command_keeps_the_old_file_when_the_download_is_cut_off(batches: Batches, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_bytes(b"before")
    batches.missing = 100
    assert main(["batch", "results", "batch_1", "-o", "out.jsonl"]) == Exit.CUT_OFF
    assert main(["batch", "results", "batch_1"]) == Exit.CUT_OFF
    assert (tmp_path / "out.jsonl").read_bytes() == b"before"


def test_batch_command_keeps_waiting_when_the_server_is_unavailable_for_a_moment(batches: Batches) -> None:
    batches.statuses = ["in_progress", "in_progress", "completed"]
    submitted = ["batch", "submit", "requests.jsonl", "--wait"]
    batches.away = 2
    assert main(submitted) == Exit.DONE
    batches.statuses, batches.away = ["in_progress"], 1000
    assert main([*submitted, "--timeout", "0.2"]) == Exit.FAILED
