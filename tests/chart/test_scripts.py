"""The Python that the chart's init containers, prefetch Job and test pods run, as they run it: python -c TEXT ARGUMENTS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "charts" / "rootstock" / "scripts"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", (SCRIPTS / f"{script}.py").read_text(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, env={**os.environ, **environment}, check=False)


class TestCopyModel:
    def test_copies_once_and_again_after_a_change(self, tmp_path: Path) -> None:
        source, target = tmp_path / "models" / "a", tmp_path / "cache" / "a"
        (source / ".cache").mkdir(parents=True)
        (source / ".cache" / "lock").write_text("")
        (source / "model.safetensors").write_text("one")
        target.parent.mkdir()
        assert "copying" in run("copy_model", str(source), str(target)).stdout
        assert (target / "model.safetensors").read_text() == "one"
        assert not (target / ".cache").exists()
        assert "up to date" in run("copy_model", str(source), str(target)).stdout
        (source / "model.safetensors").write_text("three")
        assert "copying" in run("copy_model", str(source), str(target)).stdout
        assert (target / "model.safetensors").read_text() == "three"

    def test_a_copy_cut_short_is_made_again(self, tmp_path: Path) -> None:
        source, target = tmp_path / "a", tmp_path / "b"
        source.mkdir()
        target.mkdir()
        (source / "model.safetensors").write_text("whole")
        (target / "model.safetensors").write_text("who")
        assert run("copy_model", str(source), str(target)).returncode == 0
        assert (target / "model.safetensors").read_text() == "whole"


class TestWaitForModel:
    def test_waits_for_the_mark_of_the_source_that_is_wanted(self, tmp_path: Path) -> None:
        (tmp_path / ".source").write_text("org/old")
        command = [sys.executable, "-c", (SCRIPTS / "wait_for_model.py").read_text(), str(tmp_path), "org/new"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert "waiting for org/new" in process.stdout.readline()
            (tmp_path / ".source").write_text("org/new")
            assert process.wait(15) == 0
        finally:
            process.kill()
            process.wait()

    def test_a_model_that_is_there_needs_no_mark(self, tmp_path: Path) -> None:
        for name in ("config.json", "tokenizer.json"):
            (tmp_path / name).write_text("{}")
        assert run("wait_for_model", str(tmp_path), "").returncode == 0


class TestPrefetch:
    HUB = """
import time
from pathlib import Path
from types import SimpleNamespace
class HfApi:
    def model_info(self, name, *, revision, files_metadata):
        files = [("config.json", 100), ("model.safetensors", 1_000_000_000), ("weights.bin", 7)]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files])
def snapshot_download(name, *, revision, local_dir, allow_patterns):
    assert "*.safetensors" in allow_patterns and not any(p.endswith((".bin", ".pt")) for p in allow_patterns)
    if name == "org/gone":
        raise OSError("404")
    Path(local_dir).mkdir(parents=True, exist_ok=True)
    (Path(local_dir) / "config.json").write_text(f"{name} {revision}")
    if name == "org/large":
        half = Path(local_dir) / ".cache" / "half"
        half.parent.mkdir()
        with half.open("wb") as file:
            file.truncate(510_000_000)
        time.sleep(0.5)  # the download: nothing else says that it lasts
"""

    def test_marks_what_is_whole_and_leaves_it(self, tmp_path: Path) -> None:
        (tmp_path / "huggingface_hub.py").write_text(self.HUB)
        a, b = tmp_path / "a", tmp_path / "b"
        arguments = (str(a), "org/a", str(b), "org/b@v2")
        assert run("prefetch", *arguments, PYTHONPATH=str(tmp_path)).returncode == 0
        assert [(a / "config.json").read_text(), (b / "config.json").read_text()] == ["org/a None", "org/b v2"]
        assert [(a / ".source").read_text(), (b / ".source").read_text()] == ["org/a", "org/b@v2"]
        assert "downloading" not in run("prefetch", *arguments, PYTHONPATH=str(tmp_path)).stdout

    def test_a_download_tells_how_far_it_has_come(self, tmp_path: Path) -> None:
        (tmp_path / "huggingface_hub.py").write_text(self.HUB)
        (tmp_path / "a").mkdir()
        told = run("prefetch", str(tmp_path / "a"), "org/large", PYTHONPATH=str(tmp_path), PREFETCH_REPORT_S="0.05").stdout
        assert "1.00 GB" in told and "50 %, 0.51 of 1.00 GB, " in told and " s left" in told

    def test_a_failed_download_leaves_no_mark(self, tmp_path: Path) -> None:
        (tmp_path / "huggingface_hub.py").write_text(self.HUB)
        folder = tmp_path / "a"
        folder.mkdir()
        (folder / ".source").write_text("org/old")
        assert run("prefetch", str(folder), "org/gone", PYTHONPATH=str(tmp_path)).returncode != 0
        assert not (folder / ".source").exists()


@contextmanager
def gateway(answers: dict[str, tuple[int, dict[str, Any]]]) -> Iterator[tuple[str, list[tuple[str, str, dict[str, Any]]]]]:
    """An HTTP server with one answer for each path; its URL, and (path, authorization, body) of what it was asked."""
    asked: list[tuple[str, str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = answers[self.path]
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.path, self.headers.get("Authorization") or "", json.loads(body or b"{}")))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


USAGE = {"usage": {"completion_tokens": 8}}


class TestChat:
    def test_asks_each_model_with_its_key(self) -> None:
        with gateway({"/v1/chat/completions": (200, USAGE)}) as (url, asked):
            done = run("test_chat", url, "a", "org/b", API_KEY="one")
        assert done.returncode == 0, done.stderr
        assert [body["model"] for _, _, body in asked] == ["a", "org/b"]
        assert {key for _, key, _ in asked} == {"Bearer one"}

    def test_a_model_without_a_template_completes(self) -> None:
        with gateway({"/v1/chat/completions": (400, {}), "/v1/completions": (200, USAGE)}) as (url, asked):
            assert run("test_chat", url, "a", API_KEY="").returncode == 0
        assert [(path, key) for path, key, _ in asked] == [("/v1/chat/completions", ""), ("/v1/completions", "")]

    def test_a_refusal_fails_at_once(self) -> None:
        with gateway({"/v1/chat/completions": (401, {"error": "no such key"})}) as (url, _):
            done = run("test_chat", url, "a", API_KEY="")
        assert done.returncode == 1
        assert "no such key" in done.stdout

    def test_an_empty_answer_fails(self) -> None:
        with gateway({"/v1/chat/completions": (200, {"usage": {"completion_tokens": 0}})}) as (url, _):
            assert run("test_chat", url, "a", API_KEY="").returncode == 1


class TestReadiness:
    def test_what_is_not_wanted_may_be_missing(self) -> None:
        with gateway({"/readiness": (503, {"missing": ["worker"]})}) as (url, _):
            assert run("test_readiness", url, "tokenizer", "detokenizer").returncode == 0

    def test_waits_for_what_is_wanted(self) -> None:
        answers: dict[str, tuple[int, dict[str, Any]]] = {"/readiness": (503, {"missing": ["worker"]})}
        with gateway(answers) as (url, asked):
            command = [sys.executable, "-c", (SCRIPTS / "test_readiness.py").read_text(), url, "worker"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            try:
                assert "missing: worker" in process.stdout.readline()
                answers["/readiness"] = (200, {"missing": []})
                assert process.wait(15) == 0
            finally:
                process.kill()
                process.wait()
        assert len(asked) >= 2
