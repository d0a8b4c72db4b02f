"""Tests that completion scripts offer the words that --help lists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rootstock_llm.services.cli.commands import build_parser
from rootstock_llm.services.cli.completion import commands_of, script

ROOT = Path(__file__).resolve().parents[3]


def offered(*words: str) -> set[str]:
    """Returns the completions that bash offers for the last word."""
    line = f"COMP_WORDS=(rootstock {' '.join(words)}); COMP_CWORD={len(words)}; _rootstock; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    code = f"{script('bash', build_parser())}\n{line}"
    result = subprocess.run(["bash", "--norc", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert result.stderr == ""
    return set(result.stdout.split())


def test_bash_completion_offers_commands_and_flags_and_values() -> None:
    assert offered("c") == {"chat", "complete", "completion", "control"}
    assert offered("bench", "--workload", "m") == {"multi-turn"}
    assert offered("completion", "''") >= {"bash", "fish", "zsh"}
    assert offered("chat", "--url", "''") == set()
    assert offered("batch", "s") == {"submit", "status"} and "pyproject.toml" in offered("batch", "submit", "pypr")
    for command in commands_of(build_parser()):
        assert offered(command.name, "-") == {name for word in command.words for name in word.names}


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_completion_script_contains_every_flag(shell: str) -> None:
    text = script(shell, build_parser())
    flags = {name for command in commands_of(build_parser()) for word in command.words for name in word.names}
    found = {flag for flag in flags if (f"-l {flag[2:]} " in text or f"-s {flag[1:]} " in text or f"'{flag}[" in text)}
    assert found == flags
    assert text.count("'") % 2 == 0
    if shell == "fish":  # without -x, fish offers files for every value
        assert "-l workload -x -a 'random" in text and "-l api-key-file -r -F" in text
    for case in text.split(";;") if shell == "zsh" else ():
        positions = re.findall(r"'(\d+):", case.partition("_arguments")[2])
        assert positions == [str(position) for position in range(1, len(positions) + 1)], "each argument has its own position"
