"""Completion scripts for shells, made from the parser, so that Tab offers the words that `--help` lists."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SHELLS = ("bash", "fish", "zsh")


@dataclass(frozen=True, slots=True)
class Word:
    """A flag or an argument of a command."""

    names: tuple[str, ...]  # all spellings of a flag; empty for an argument
    value_kind: str  # "file", "text", or empty for a flag without a value
    choices: tuple[str, ...]  # allowed values; empty if any value is allowed
    text: str  # help text


@dataclass(frozen=True, slots=True)
class CommandWords:
    name: str
    text: str
    words: tuple[Word, ...]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell that runs the script")


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    return {"bash": _bash, "fish": _fish, "zsh": _zsh}[shell](list(commands_of(parser)))


def commands_of(parser: argparse.ArgumentParser) -> Iterator[CommandWords]:
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    texts = {choice.dest: choice.help or "" for choice in subparsers._choices_actions}
    parsers: Mapping[str, argparse.ArgumentParser] = subparsers.choices
    for name, subparser in parsers.items():
        yield CommandWords(name, texts[name], tuple(_word(action) for action in subparser._actions))


def _word(action: argparse.Action) -> Word:
    is_file = action.type is Path or "FILE" in (action.metavar or "")
    value_kind = "" if action.nargs == 0 else "file" if is_file else "text"
    text = (action.help or action.dest.replace("_", " ")) % vars(action)
    return Word(tuple(action.option_strings), value_kind, tuple(str(each) for each in action.choices or ()), text)


def _plain(text: str) -> str:
    """Returns the text without characters that have a meaning in one of the shells."""
    return re.sub(r"[\s%'\"\[\]:`$\\]+", " ", text).strip()


def _bash(commands: list[CommandWords]) -> str:
    cases = "\n".join(_bash_case(command) for command in commands)
    return f"""\
# bash: source <(rootstock completion bash)
_rootstock() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words= files=0
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(command.name for command in commands)} --help --version" -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word") $([ "$files" = 0 ] || compgen -f -- "$word"))
}}
complete -F _rootstock rootstock
"""


def _bash_case(command: CommandWords) -> str:
    values = [
        f"                {'|'.join(word.names)}) {_bash_value(word)} ;;"
        for word in command.words
        if word.names and word.value_kind
    ]
    free = [choice for word in command.words if not word.names for choice in word.choices]
    files = " files=$((COMP_CWORD > 2))" if any(word.value_kind == "file" and not word.names for word in command.words) else ""
    offered = " ".join([*free, *(name for word in command.words for name in word.names)])
    return "\n".join(
        [
            f"        {command.name})",
            '            case "$before" in',
            *values,
            "            esac",
            f'            words="{offered}"{files} ;;',
        ]
    )


def _bash_value(word: Word) -> str:
    if word.choices:
        return f'COMPREPLY=($(compgen -W "{" ".join(word.choices)}" -- "$word")); return'
    return 'COMPREPLY=($(compgen -f -- "$word")); return' if word.value_kind == "file" else "return"


def _fish(commands: list[CommandWords]) -> str:
    lines = ["# fish: rootstock completion fish | source", "complete -c rootstock -f"]
    for command in commands:
        lines.append(f"complete -c rootstock -n __fish_use_subcommand -a {command.name} -d '{_plain(command.text)}'")
        lines += [_fish_line(command.name, word) for word in command.words]
    return "\n".join(lines) + "\n"


def _fish_line(command: str, word: Word) -> str:
    parts = [f"complete -c rootstock -n '__fish_seen_subcommand_from {command}'"]
    parts += [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in word.names]
    parts += ["-r" if word.value_kind == "file" else "-x"] if word.names and word.value_kind else []
    parts += ["-F"] if word.value_kind == "file" else []
    parts += [f"-a '{' '.join(word.choices)}'"] if word.choices else []
    return " ".join([*parts, f"-d '{_plain(word.text)}'"])


def _zsh(commands: list[CommandWords]) -> str:
    names = "\n".join(f"        '{command.name}:{_plain(command.text)}'" for command in commands)
    cases = "\n".join(_zsh_case(command) for command in commands)
    return f"""\
#compdef rootstock
# zsh: source <(rootstock completion zsh), after compinit
_rootstock() {{
    local -a commands=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=${{words[2]}}
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
compdef _rootstock rootstock
"""


def _zsh_case(command: CommandWords) -> str:
    positions = {id(word): position for position, word in enumerate((word for word in command.words if not word.names), 1)}
    arguments = " \\\n            ".join(line for word in command.words for line in _zsh_words(word, positions.get(id(word), 0)))
    return f"        {command.name}) _arguments \\\n            {arguments} ;;"


def _zsh_words(word: Word, position: int) -> list[str]:
    """Returns the lines of one word for zsh. `position` counts the arguments from 1; it is 0 for a flag."""
    values = f"({' '.join(word.choices)})" if word.choices else "_files" if word.value_kind == "file" else " "
    if not word.names:
        return [f"'{position}:{_plain(word.text)}:{values}'"]
    value = f":value:{values}" if word.value_kind else ""
    return [f"'{name}[{_plain(word.text)}]{value}'" for name in word.names]
