"""Tests the chart's scripts as init containers and test pods run them: python -c TEXT ARGUMENTS."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.shared.hf_tokenizer import VOCABULARIES, TokenizerFolderError, load_tokenizer

SCRIPTS = Path(__file__).parents[2] / "charts" / "rootstock" / "scripts"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", (SCRIPTS / f"{script}.py").read_text(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False)


def wait_for_copy(folder: Path, monkeypatch: pytest.MonkeyPatch, copy: Callable[[], None]) -> None:
    """Runs wait_for_model.py in this process for a folder that no prefetch Job fills.

    Args:
        copy: function that replaces each pause of the script.
    """
    monkeypatch.setattr(sys, "argv", ["-c", str(folder), ""])
    monkeypatch.setattr(time, "sleep", lambda _: copy())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    runpy.run_path(str(SCRIPTS / "wait_for_model.py"))


class TestWaitForModel:
    def test_wait_script_waits_until_the_marker_file_names_the_models_source(self, tmp_path: Path) -> None:
        (tmp_path / ".source").write_text("org/old")
        command = [sys.executable, "-c", (SCRIPTS / "wait_for_model.py").read_text(), str(tmp_path), "org/new"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert "waiting for org/new" in process.stdout.readline()
            (tmp_path / ".source").write_text("org/new")
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()

    @pytest.mark.parametrize("pattern", VOCABULARIES)
    def test_wait_script_ends_with_the_services_message_when_the_folder_needs_a_conversion(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
    ) -> None:
        for name in ("config.json", pattern.replace("*", "tokenizer")):
            (tmp_path / name).write_text("{}")
        with pytest.raises(TokenizerFolderError) as raised:
            load_tokenizer(tmp_path)
        with pytest.raises(SystemExit) as ended:
            wait_for_copy(tmp_path, monkeypatch, lambda: None)
        assert ended.value.code == str(raised.value)

    def test_wait_script_keeps_waiting_while_files_arrive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("config.json", "tokenizer.model"):
            (tmp_path / name).write_text("{}")
        weights = tmp_path / "model.safetensors"

        def copy() -> None:
            weights.write_bytes(b"w" * (1 + (weights.stat().st_size if weights.exists() else 0)))
            if weights.stat().st_size == 20:
                (tmp_path / "tokenizer.json").write_text("{}")

        wait_for_copy(tmp_path, monkeypatch, copy)
        assert (tmp_path / "tokenizer.json").exists()

    def test_wait_script_returns_when_the_model_folder_is_complete(self, tmp_path: Path) -> None:
        for name in ("config.json", "tokenizer.json"):
            (tmp_path / name).write_text("{}")
        assert run("wait_for_model", str(tmp_path), "").returncode == 0


@contextmanager
def gateway(answers: dict[str, tuple[int, dict[str, Any]]]) -> Iterator[tuple[str, list[tuple[str, str, dict[str, Any]]]]]:
    """Runs an HTTP server with one response per path. Yields its URL, and (path, authorization, body) of each request."""
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
    def test_chat_script_sends_the_api_key_in_the_request_to_each_model(self) -> None:
        with gateway({"/v1/chat/completions": (200, USAGE)}) as (url, asked):
            done = run("test_chat", url, "a", "org/b", API_KEY="one")
        assert done.returncode == 0, done.stderr
        assert [body["model"] for _, _, body in asked] == ["a", "org/b"]
        assert {key for _, key, _ in asked} == {"Bearer one"}

    def test_chat_script_sends_a_completion_request_when_the_model_has_no_chat_template(self) -> None:
        with gateway({"/v1/chat/completions": (400, {}), "/v1/completions": (200, USAGE)}) as (url, asked):
            assert run("test_chat", url, "a", API_KEY="").returncode == 0
        assert [(path, key) for path, key, _ in asked] == [("/v1/chat/completions", ""), ("/v1/completions", "")]

    def test_chat_script_sends_an_embedding_request_when_the_model_generates_no_text(self) -> None:
        refused = {f"/v1/{way}": (400, {"error": {"code": "unsupported_model"}}) for way in ("chat/completions", "completions")}
        with gateway({**refused, "/v1/embeddings": (200, {"data": [{"embedding": [0.5, 1.0]}]})}) as (url, asked):
            done = run("test_chat", url, "bge", API_KEY="")
        assert done.returncode == 0 and done.stdout.endswith("bge: 2 values of a vector\n")
        assert asked[-1][2] == {"model": "bge", "input": "1, 2, 3,"}
        with gateway({**refused, "/v1/embeddings": (400, {"error": "none"})}) as (url, _):
            assert run("test_chat", url, "a", API_KEY="").returncode == 1

    def test_chat_script_fails_at_once_when_the_gateway_refuses_the_request(self) -> None:
        with gateway({"/v1/chat/completions": (401, {"error": "no such key"})}) as (url, _):
            done = run("test_chat", url, "a", API_KEY="")
        assert done.returncode == 1
        assert "no such key" in done.stdout

    def test_chat_script_fails_when_the_response_is_empty(self) -> None:
        with gateway({"/v1/chat/completions": (200, {"usage": {"completion_tokens": 0}})}) as (url, _):
            assert run("test_chat", url, "a", API_KEY="").returncode == 1


class TestReadiness:
    def test_readiness_script_ignores_services_that_are_not_listed(self) -> None:
        with gateway({"/readiness": (503, {"missing": ["worker"]})}) as (url, _):
            assert run("test_readiness", url, "tokenizer", "detokenizer").returncode == 0

    def test_readiness_script_waits_for_the_listed_services(self) -> None:
        answers: dict[str, tuple[int, dict[str, Any]]] = {"/readiness": (503, {"missing": ["worker"]})}
        with gateway(answers) as (url, asked):
            command = [sys.executable, "-c", (SCRIPTS / "test_readiness.py").read_text(), url, "worker"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            try:
                assert "missing: worker" in process.stdout.readline()
                answers["/readiness"] = (200, {"missing": []})
                assert process.wait(60) == 0
            finally:
                process.kill()
                process.wait()
        assert len(asked) >= 2
