"""Parses Dockerfiles: stages, instructions with build arguments filled in, and the files that .dockerignore allows."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a stage."""

    name: str
    flags: dict[str, str]  # --name=value by name
    text: str  # arguments of the instruction on one line; for ARG, NAME=value with the effective value
    line: int  # line number, from 1

    @property
    def is_exec_form(self) -> bool:
        return self.text.startswith("[")

    @property
    def words(self) -> list[str]:
        """Words of the exec form, or of the shell form as a shell splits them."""
        return list(json.loads(self.text)) if self.is_exec_form else shlex.split(self.text)


@dataclass(slots=True)
class Stage:
    """A stage of a Dockerfile."""

    base: str  # image, or name of an earlier stage, with arguments filled in
    name: str
    line: int
    instructions: list[Instruction] = field(default_factory=list)
    undeclared: list[str] = field(default_factory=list)  # names of arguments that are used without a declaration

    def all(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    path: Path
    stages: list[Stage]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def lineage(self, name: str) -> list[Stage]:
        """Returns the stage and the stages that it is based on, the lowest base first."""
        names = {stage.name for stage in self.stages}
        found = [self.stage(name)]
        while found[0].base in names:
            found.insert(0, self.stage(found[0].base))
        return found

    def images(self) -> list[str]:
        """Returns the stages' bases that are images. Bases that are earlier stages are left out."""
        names = {stage.name for stage in self.stages}
        return [stage.base for stage in self.stages if stage.base not in names]


def commands(text: str) -> list[list[str]]:
    """Splits a shell line into simple commands, and each command into words."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|"):
            found.append([])
        else:
            found[-1].append(word)
    assert all(found) and all("=" not in words[0] for words in found), f"not simple commands: {text}"
    return found


def _lines(text: str) -> list[tuple[int, str]]:
    """Returns (number of the first line, text) of each instruction, with continued lines joined and comments dropped."""
    found: list[tuple[int, str]] = []
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not parts:
            first = number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            found.append((first, " ".join(parts)))
            parts = []
    assert not parts, "the last instruction is incomplete"
    return found


def _instruction(number: int, line: str) -> Instruction:
    name, _, rest = line.partition(" ")
    flags: dict[str, str] = {}
    while match := re.match(r"--([a-z-]+)=(\S+)\s+", rest):
        flags[match[1]] = match[2]
        rest = rest[match.end() :]
    return Instruction(name.upper(), flags, rest.strip(), number)


def _fill(text: str, values: dict[str, str], undeclared: list[str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values:
            undeclared.append(name)
        return values.get(name, match[0])

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def read(path: Path, arguments: dict[str, str] | None = None) -> Dockerfile:
    """Parses a Dockerfile with these build arguments.

    An argument is visible in its stage after its ARG. FROM sees the arguments that are declared before the first stage.
    """
    given = arguments or {}
    shared: dict[str, str] = {}
    values: dict[str, dict[str, str]] = {}
    stages: list[Stage] = []
    for number, line in _lines(path.read_text()):
        each = _instruction(number, line)
        if each.name == "FROM":
            undeclared: list[str] = []
            words = _fill(each.text, shared, undeclared).split()
            name = words[2] if len(words) == 3 and words[1].upper() == "AS" else f"line-{number}"
            stages.append(Stage(words[0], name, number, undeclared=undeclared))
            values[name] = dict(values.get(words[0], {}))
        elif each.name == "ARG":
            key, _, default = each.text.partition("=")
            known = values[stages[-1].name] if stages else shared
            known[key] = given.get(key, default or (shared.get(key, "") if stages else ""))
            if stages:
                stages[-1].instructions.append(Instruction("ARG", {}, f"{key}={known[key]}", number))
        else:
            stage = stages[-1]
            known = values[stage.name]
            flags = {key: _fill(value, known, stage.undeclared) for key, value in each.flags.items()}
            text = _fill(each.text, known, stage.undeclared)
            stage.instructions.append(Instruction(each.name, flags, text, number))
            if each.name == "ENV":
                known.update(word.split("=", 1) for word in shlex.split(text))
    return Dockerfile(path, stages)


def _matches(pattern: str, path: str) -> bool:
    """Whether a .dockerignore pattern matches a path. A matched folder includes its files; ** is any number of folders."""
    parts = path.split("/")
    ends = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    expression = "/".join("\0" if part == "**" else translate(part)[4:-3].replace(".*", "[^/]*") for part in pattern.split("/"))
    expression = expression.replace("\0/", "(?:.*/)?").replace("\0", ".*")
    return any(re.fullmatch(expression, end) for end in ends)


def context_files(root: Path, folders: list[str]) -> set[str]:
    """Returns the files below these paths of `root` that .dockerignore allows in a build."""
    rules = [line.strip() for line in (root / ".dockerignore").read_text().splitlines()]
    rules = [line for line in rules if line and not line.startswith("#")]
    found = set()
    for folder in folders:
        start = root / folder
        for path in [start] if start.is_file() else start.rglob("*"):
            name = path.relative_to(root).as_posix()
            ignored = False
            for rule in rules:
                if _matches(rule.removeprefix("!"), name):
                    ignored = not rule.startswith("!")
            if path.is_file() and not ignored:
                found.add(name)
    return found
