"""Tests of exit statuses and outputs of the program."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rootstock_llm.services.cli import reference
from rootstock_llm.services.cli.commands import COMMANDS, EXITS
from rootstock_llm.services.cli.program import main
from rootstock_llm.services.cli.shared.exits import Exit
from rootstock_llm.services.cli.shared.terminal import Terminal
from tests.interrupts import hear_interrupts
from tests.services.cli.fake_server import FakeServer

ROOT = Path(__file__).resolve().parents[3]
CHAT = ["chat", "-m", "Hi"]


def started(*arguments: str, **pipes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rootstock_llm.services.cli", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.DEVNULL, preexec_fn=hear_interrupts, **pipes)


@pytest.mark.parametrize(
    ("behaviour", "status", "message"),
    [
        ("401", Exit.FAILED, "set ROOTSTOCK_API_KEY"),
        ("503", Exit.FAILED, "rootstock status"),
        ("500", Exit.FAILED, "see the server's log"),
        ("stream error", Exit.FAILED, "(lost): ask again"),
        ("truncated", Exit.CUT_OFF, "ask again"),
    ],
    ids=["no-key", "unavailable", "fault", "error-in-stream", "cut-off"],
)
def test_program_reports_a_server_fault_by_the_exit_status_and_one_sentence(
    server: FakeServer, capsys: pytest.CaptureFixture[str], behaviour: str, status: Exit, message: str
) -> None:
    server.behaviours = [behaviour, behaviour]
    for command in (CHAT, ["complete", "Hi"]):
        assert main(command) == status
        errors = capsys.readouterr().err
        assert message in errors and errors.count("\n") == 1 and errors.startswith("rootstock: ")


def test_program_reports_an_unreachable_server(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (CHAT, ["models"], ["status", "--once"], ["bench"]):
        assert main([*command, "--url", "http://127.0.0.1:1"]) == Exit.UNREACHABLE
        assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err


def test_program_exits_with_the_usage_status_when_a_value_is_wrong(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ("ftp://nowhere", "http://h:port", "http://a..b", "http://a b", f"http://{'a' * 64}", "http://h/é")
    urls = [[*CHAT, "--url", url] for url in wrong]
    for command in (*urls, [*CHAT, "--api-key-file", "/no/such/file"], ["chat", "-m", " "], ["complete", ""]):
        assert main(command) == Exit.USAGE
        assert capsys.readouterr().err.count("\n") == 1
    assert server.bodies == []


def test_program_exits_with_the_usage_status_when_the_command_line_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """No flag takes an API key, because other users can see the arguments of a process."""
    for command in ("", "nothing", "chat --api-key sesame", "chat --extra-body {", "status --watch --once"):
        with pytest.raises(SystemExit) as caught:
            main(command.split())
        assert caught.value.code == Exit.USAGE
        refusal = capsys.readouterr().err
        assert refusal.startswith("rootstock") and refusal.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("bench --concurency 3", "rootstock bench: unknown flag --concurency; did you mean --concurrency?"),
        ("bench --concurency=3", "rootstock bench: unknown flag --concurency; did you mean --concurrency?"),
        (
            "keys new a --requests_per_minute 3",
            "rootstock keys new: unknown flag --requests_per_minute; did you mean --requests-per-minute?",
        ),
        ("--versoin", "rootstock: unknown flag --versoin; did you mean --version?"),
        ("models --frobnicate sesame", "rootstock models: unknown flag --frobnicate; --help lists the flags."),
    ],
    ids=["value", "equals sign", "underscores", "before the command", "no similar flag"],
)
def test_program_suggests_the_nearest_flag_when_a_flag_is_unknown(
    words: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert (caught.value.code, capsys.readouterr().err) == (Exit.USAGE, f"{nearest}\n")


def test_program_closes_the_request_on_ctrl_c(server: FakeServer) -> None:
    server.behaviours = ["hangs"]
    process = started(*CHAT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(3) == " a0"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (Exit.INTERRUPTED, "")
    assert server.client_closed.wait(30)


def test_program_closes_the_request_when_stdout_is_closed(server: FakeServer) -> None:
    read, write = os.pipe()
    os.close(read)
    process = started(*CHAT, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == Exit.READER_GONE


@pytest.mark.parametrize("words", [CHAT, [*CHAT, "--json"], ["models"], ["completion", "bash"]], ids=" ".join)
def test_program_reports_a_full_disk_in_one_sentence(server: FakeServer, words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        process = started(*words, stdout=full.fileno(), stderr=subprocess.PIPE)
        errors = process.communicate(timeout=60)[1]
    assert errors.startswith("rootstock: the output cannot be written (No space left on device)") and errors.count("\n") == 1
    assert process.returncode == Exit.FAILED


def test_program_reads_the_key_from_the_environment_or_a_file(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("of-a-file\n")
    assert main(CHAT) == Exit.DONE
    monkeypatch.setenv("ROOTSTOCK_API_KEY", "of-the-environment")
    assert main(CHAT) == Exit.DONE
    assert main([*CHAT, "--api-key-file", str(tmp_path / "key")]) == Exit.DONE
    assert server.keys == ["", "Bearer of-the-environment", "Bearer of-a-file"]


def test_chat_and_complete_commands_print_text_or_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-tokens", "2", "--temperature", "0", "--stop", "a", "--stop", "b", "--extra-body", '{"top_k": 1}']
    assert main([*CHAT, "-s", "Be brief.", *flags]) == Exit.DONE
    assert capsys.readouterr().out == " a0 a1\n"
    assert main(["complete", "Once", "--max-tokens", "2", "--json"]) == Exit.DONE
    message = json.loads(capsys.readouterr().out)
    assert (message["text"], message["finish_reason"], message["usage"]["completion_tokens"]) == (" a0 a1", "length", 2)
    first, second = server.bodies
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert (first["model"], first["temperature"], first["stop"], first["top_k"]) == ("fake", 0, ["a", "b"], 1)
    assert (second["prompt"], "temperature" in second) == ("Once", False)


def test_chat_command_sends_text_from_a_pipe(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("From a pipe."))
    assert main(["chat"]) == Exit.DONE
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "From a pipe."}]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "shown"),
    [
        (Screen(), {}, "\x1b[31ma�[2Jb\x1b[0m"),
        (Screen(), {"NO_COLOR": "1"}, "a�[2Jb"),
        (Screen(), {"TERM": "dumb"}, "a�[2Jb"),
        (io.StringIO(), {}, "a\x1b[2Jb"),
    ],
    ids=["terminal", "no-colour", "dumb", "pipe"],
)
def test_output_has_colours_only_on_terminals_and_control_characters_only_in_pipes(
    stream: io.StringIO, environment: dict[str, str], shown: str
) -> None:
    Terminal(stream, environment).write("a\x1b[2Jb", "red")
    assert stream.getvalue() == shown


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["models/absent", "--no-demo"], Exit.FAILED, "models/absent: this folder does not exist"),
        (["--model", "models/absent"], Exit.FAILED, "models/absent: this folder does not exist"),
        (["models/demo", "--prot", "1"], Exit.USAGE, "did you mean --port? `rootstock serve --help` lists them."),
        (["models/demo", "more"], Exit.USAGE, "`rootstock serve --help` lists them."),
    ],
    ids=["model", "flag", "misspelt flag", "two models"],
)
def test_serve_command_passes_arguments_to_the_launcher(
    words: list[str], status: Exit, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["serve", *words]) == status
    assert message in capsys.readouterr().err


def test_help_of_the_serve_command_lists_the_flags_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert not end.value.code
    said = capsys.readouterr().out
    assert said.startswith("usage: rootstock serve ") and "--port" in said and "--worker-flags" in said


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        text = capsys.readouterr().out
        assert caught.value.code == 0 and max(map(len, text.splitlines())) <= 80, text


def test_cli_page_matches_the_code_and_lists_every_exit_status() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert page == reference.render(), "run `make docs`"
    assert [int(line.split()[0]) for line in EXITS.splitlines()[1:]] == [*Exit]


def test_program_imports_only_the_standard_library_at_the_start() -> None:
    """A command that needs other libraries, such as bench, imports them when it runs."""
    foreign = "{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'__main__'}"
    code = f"import sys, rootstock_llm.services.cli.program; print(*{foreign})"
    result = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.split() == ["rootstock_llm"]
