"""Checks, without a build, that each command of a Dockerfile finds its program on the PATH of its image.

The tables below have the used programs of base images and packages. Virtual environments and COPY add programs to an image.
RUNS has programs that other programs call, such as dpkg for apt-get; they are checked too.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from tests.chart.dockerfile import Dockerfile, Instruction, Stage, commands

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEBIAN = frozenset(
    {f"/usr/bin/{name}" for name in ("sh", "apt-get", "dpkg", "mkdir", "ln", "rm", "chown")}
    | {f"/usr/sbin/{name}" for name in ("groupadd", "useradd", "nologin", "ldconfig", "start-stop-daemon")}
)
PYTHON = frozenset(f"/usr/local/bin/{name}" for name in ("python", "python3", "pip"))
# Programs and PATH of a base image, by its name without registry and tag.
BASES = {
    "python": (DEBIAN | PYTHON, f"/usr/local/bin:{DEFAULT_PATH}"),
    "debian": (DEBIAN, DEFAULT_PATH),
}
PACKAGES = {
    "g++": ("/usr/bin/g++", "/usr/bin/gcc"),
    "gcc": ("/usr/bin/gcc",),
    "python3": ("/usr/bin/python3",),
    "libc6-dev": (),
}
RUNS = {"apt-get install": ("dpkg", "sh", "ldconfig", "start-stop-daemon")}
MERGED = re.compile(r"^/(bin|sbin)/")  # these bases link /bin and /sbin to /usr


@dataclass(slots=True)
class ImageState:
    """Programs and settings of a stage's image before an instruction."""

    programs: set[str] = field(default_factory=set)  # paths of the programs in the image
    path: str = DEFAULT_PATH  # the variable PATH
    folder: str = "/"  # working folder

    def find(self, name: str) -> str | None:
        if "/" in name:
            return name if MERGED.sub(r"/usr/\1/", name) in self.programs else None
        tried = (MERGED.sub(r"/usr/\1/", f"{folder}/{name}") for folder in self.path.split(":"))
        return next((path for path in tried if path in self.programs), None)


class Programs:
    """The check of one Dockerfile."""

    def __init__(self, dockerfile: Dockerfile) -> None:
        self._dockerfile = dockerfile
        self._states: dict[str, ImageState] = {}
        self.missing: list[str] = []

    def walk(self) -> list[str]:
        """Returns a message for each program that is not found."""
        for stage in self._dockerfile.stages:
            self._states[stage.name] = state = self._start(stage)
            for each in stage.instructions:
                self._apply(each, state)
        return self.missing

    def _start(self, stage: Stage) -> ImageState:
        if stage.base in self._states:
            base = self._states[stage.base]
            return ImageState(set(base.programs), base.path, base.folder)
        programs, path = BASES[stage.base.partition("@")[0].partition(":")[0]]
        return ImageState(set(programs), path)

    def _apply(self, each: Instruction, state: ImageState) -> None:
        match each.name:
            case "WORKDIR":
                state.folder = each.text
            case "ENV":
                state.path = dict(word.split("=", 1) for word in each.words).get("PATH", state.path)
            case "COPY":
                self._copy(each, state)
            case "RUN":
                for command in commands(each.text):
                    self._run(command, each, state)
            case "ENTRYPOINT":
                self._require(each.words[0], each, state)
            case "HEALTHCHECK":
                self._require(Instruction("CMD", {}, each.text.removeprefix("CMD").strip(), each.line).words[0], each, state)

    def _copy(self, each: Instruction, state: ImageState) -> None:
        """Adds the programs below a copied folder of another stage, or a copied file that --chmod makes executable."""
        *sources, target = each.words
        if "from" in each.flags:
            theirs = self._states[each.flags["from"]].programs
            for source in (each for each in sources if each.startswith("/")):
                state.programs |= {target + path[len(source) :] for path in theirs if path.startswith(f"{source}/")}
        elif "chmod" in each.flags:
            state.programs.add(os.path.normpath(os.path.join(state.folder, target)))

    def _run(self, words: list[str], each: Instruction, state: ImageState) -> None:
        self._require(words[0], each, state)
        for word in words[1:]:
            if re.search(r"/bin/[\w.+-]+$", word) and words[words.index(word) - 1] == "--python":
                self._require(word, each, state)
        for name in RUNS.get(" ".join(words[:2]), ()):
            self._require(name, each, state)
        if words[:2] == ["apt-get", "install"]:
            for package in (word for word in words[2:] if not word.startswith("-")):
                state.programs |= set(PACKAGES[package])
        if words[1:3] == ["-m", "venv"]:
            made = ("python",) if "--without-pip" in words else ("python", "pip")
            state.programs |= {f"{words[-1]}/bin/{name}" for name in made}

    def _require(self, name: str, each: Instruction, state: ImageState) -> None:
        if state.find(name) is None:
            self.missing.append(f"line {each.line}: {name} is not on the PATH {state.path}")
