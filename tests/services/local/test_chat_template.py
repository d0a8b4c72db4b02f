"""Tests `make run` with --chat-template, and the first question to a model without a chat template."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.local import demo
from services.local.plan import num_ports, parts
from services.local.settings import LocalSettings
from services.shared.hf_tokenizer import TokenizerFolderError, has_chat_template, load_tokenizer
from services.shared.settings import of_values
from tests.services.tokenizer.model_folders import CHATML, byte_level


def test_plan_gives_the_template_to_tokenizers_and_workers_when_set(tmp_path: Path) -> None:
    settings = of_values(LocalSettings, {"model": str(tmp_path), "chat_template": "own.jinja", "workers": 2, "tokenizers": 2})
    started = parts(settings, str(tmp_path), list(range(1, num_ports(settings) + 1)))
    given = {part.command.name for part in started if "--chat-template own.jinja" in " ".join(part.command.argv)}
    assert given == {"tokenizer-0", "tokenizer-1", "worker-0", "worker-1"}


def test_load_tokenizer_replaces_all_templates_when_a_file_is_given(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}é", encoding="utf-8")
    for name, template in (("with", CHATML), ("without", None)):
        folder = byte_level(tmp_path / name, template)
        assert has_chat_template(folder) == (template is not None)
        assert load_tokenizer(folder, str(own)).chat_templates == {"default": "{{ messages[0].content }}é"}


@pytest.mark.parametrize(("content", "fault"), [(None, "is not readable: No such file"), (b"\xff", "is not UTF-8 text")])
def test_load_tokenizer_names_an_unreadable_template_file(tmp_path: Path, content: bytes | None, fault: str) -> None:
    folder, own = byte_level(tmp_path / "model"), tmp_path / "own.jinja"
    if content is not None:
        own.write_bytes(content)
    with pytest.raises(TokenizerFolderError, match=f"^--chat-template {own} {fault}"):
        load_tokenizer(folder, str(own))


@contextmanager
def api(asked: list[tuple[str, dict[str, Any]]]) -> Iterator[int]:
    """Yields the port of a server that records requests and streams one piece of text."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, body))
            choice = {"delta": {"content": "42"}} if "chat" in self.path else {"text": "Paris"}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_first_question_is_a_completion_when_the_model_has_no_chat_template() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    with api(asked) as port:
        assert demo.ask(port, "m", demo.PROMPT, chats=False) == "Paris"
        assert demo.ask(port, "m") == "42"
    (completion, body), (chat, _) = asked
    assert (completion, chat) == ("/v1/completions", "/v1/chat/completions")
    assert body["prompt"] == demo.PROMPT and "messages" not in body
