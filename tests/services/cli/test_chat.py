"""Tests of the conversation at a terminal: earlier turns, commands, failed turns and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rootstock_llm.services.cli.chat.conversation import Conversation
from rootstock_llm.services.cli.chat.repl import Repl
from rootstock_llm.services.cli.shared.exits import Exit
from rootstock_llm.services.cli.shared.flags import Target
from rootstock_llm.services.cli.shared.server import Server
from rootstock_llm.services.cli.shared.terminal import Terminal
from tests.interrupts import hear_interrupts
from tests.services.cli.fake_server import FakeServer

ROOT = Path(__file__).resolve().parents[3]


class ReplSession:
    """The chat command with typed lines instead of a terminal."""

    def __init__(self, server: FakeServer, on_write: Callable[[str], None] = lambda text: None) -> None:
        class Out(io.StringIO):
            def write(self, text: str) -> int:
                on_write(text)
                return super().write(text)

        self.out, self.err = Out(), io.StringIO()
        self.conversation = Conversation("fake", "Be brief.", {"max_tokens": 3})
        self._server = Server(Target(server.url))

    def type(self, *lines: str | BaseException) -> Exit:
        """Runs the command with these lines and the end of the input. Reading an exception in `lines` raises the exception."""
        remaining = iter((*lines, EOFError()))

        def read(prompt: str) -> str:
            line = next(remaining)
            if isinstance(line, BaseException):
                raise line
            return line

        return Repl(self._server, self.conversation, read, Terminal(self.out, {}), Terminal(self.err, {}), True).run()

    def history(self) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in self.conversation.messages]


def test_chat_sends_earlier_turns_until_the_reset_command(server: FakeServer) -> None:
    repl = ReplSession(server)
    assert repl.type("One \\", "two", "", "Three", "/reset", "Four") == Exit.DONE
    assert [len(body["messages"]) for body in server.bodies] == [2, 4, 2]
    assert server.bodies[1]["messages"][1:3] == [
        {"role": "user", "content": "One \ntwo"},
        {"role": "assistant", "content": " a0 a1 a2"},
    ]
    assert repl.history() == [("system", "Be brief."), ("user", "Four"), ("assistant", " a0 a1 a2")]
    assert repl.out.getvalue().count(" a0 a1 a2\n") == 3 and "10 tokens in" in repl.err.getvalue()


def test_chat_drops_a_failed_turn_and_continues(server: FakeServer) -> None:
    server.behaviours = ["ok", "503", "truncated", "stream error", "ok"]
    repl = ReplSession(server)
    assert repl.type("One", "Two", "Three", "Four", "Five") == Exit.DONE
    assert [content for role, content in repl.history() if role == "user"] == ["One", "Five"]
    assert repl.err.getvalue().count("rootstock: ") == 3


def test_ctrl_c_stops_the_answer_and_the_chat_continues(server: FakeServer) -> None:
    """The partial answer stays in the conversation. Ctrl-C at the input prompt has no effect."""
    presses = [True]

    def press(text: str) -> None:
        if "a1" in text and presses:
            presses.pop()
            raise KeyboardInterrupt

    server.behaviours = ["hangs", "ok"]
    repl = ReplSession(server, press)
    assert repl.type("One", KeyboardInterrupt(), "Two", "/exit", "not sent") == Exit.DONE
    assert server.client_closed.wait(30), "the client closes the stream"
    assert repl.history()[1:] == [("user", "One"), ("assistant", " a0 a1"), ("user", "Two"), ("assistant", " a0 a1 a2")]


def test_chat_commands_print_results_and_errors(server: FakeServer, tmp_path: Path) -> None:
    repl, file = ReplSession(server), tmp_path / "chat.json"
    repl.type(
        "/model nope", "/model fake", "/system Be kind.", "/no", "/save", f"/save {tmp_path}/no/where", "Hi", f"/save {file}"
    )
    saved = json.loads(file.read_text())
    assert (saved["model"], saved["messages"][0]) == ("fake", {"role": "system", "content": "Be kind."})
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    errors = repl.err.getvalue()
    for text in (
        "there is no model nope; the models are: fake (this one)",
        "there is no command /no",
        "name a file",
        "cannot be written",
        "1 turns in",
    ):
        assert text in errors


def test_chat_continues_when_the_file_to_save_is_in_the_home_of_an_unknown_user(server: FakeServer) -> None:
    repl = ReplSession(server)
    assert repl.type("/save ~no-such-user/chat.json", "Hi", "/exit") == Exit.DONE
    assert "~no-such-user/chat.json cannot be written" in repl.err.getvalue()
    assert repl.history()[1:] == [("user", "Hi"), ("assistant", " a0 a1 a2")]


def test_chat_process_continues_after_ctrl_c_on_a_terminal(server: FakeServer) -> None:
    server.behaviours = ["hangs", "ok"]
    terminal, program_end = pty.openpty()
    command = [sys.executable, "-m", "rootstock_llm.services.cli", "chat", "--max-tokens", "3"]
    pipes = {"stdin": program_end, "stdout": program_end, "stderr": program_end}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=hear_interrupts, **pipes)
    os.close(program_end)
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(terminal, 4096).decode(errors="replace")
        seen = seen.partition(text)[2]

    try:
        until("> ")
        os.write(terminal, b"Hi\n")
        until("a1")
        process.send_signal(signal.SIGINT)
        until("(stopped)")
        until("> ")
        os.write(terminal, b"Again\n")
        until(" a2")
        until("> ")
        os.write(terminal, b"/exit\n")
        assert process.wait(30) == Exit.DONE
    finally:
        process.kill()
        os.close(terminal)
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["Hi", " a0 a1", "Again"]
