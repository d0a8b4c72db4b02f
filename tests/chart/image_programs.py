"""Checks, without a build, that every command of a Dockerfile is on the PATH that its image has at that point.

The programs of base images are listed here as far as they are used. Packages, virtual environments and copies add programs.
Programs that other programs call by name, such as dpkg by apt-get, are checked too.
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
class Place:
    """The state of a stage at an instruction."""

    programs: set[str] = field(default_factory=set)
    path: str = DEFAULT_PATH
    folder: str = "/"

    def find(self, name: str) -> str | None:
        if "/" in name:
            return name if MERGED.sub(r"/usr/\1/", name) in self.programs else None
        tried = (MERGED.sub(r"/usr/\1/", f"{folder}/{name}") for folder in self.path.split(":"))
        return next((path for path in tried if path in self.programs), None)


class Programs:
    """The check of one Dockerfile."""

    def __init__(self, dockerfile: Dockerfile) -> None:
        self._dockerfile = dockerfile
        self._places: dict[str, Place] = {}
        self.missing: list[str] = []

    def walk(self) -> list[str]:
        """Returns a sentence for each program that is not found."""
        for stage in self._dockerfile.stages:
            self._places[stage.name] = place = self._start(stage)
            for each in stage.instructions:
                self._do(each, place)
        return self.missing

    def _start(self, stage: Stage) -> Place:
        if stage.base in self._places:
            base = self._places[stage.base]
            return Place(set(base.programs), base.path, base.folder)
        programs, path = BASES[stage.base.partition("@")[0].partition(":")[0]]
        return Place(set(programs), path)

    def _do(self, each: Instruction, place: Place) -> None:
        match each.name:
            case "WORKDIR":
                place.folder = each.text
            case "ENV":
                place.path = dict(word.split("=", 1) for word in each.words).get("PATH", place.path)
            case "COPY":
                self._copy(each, place)
            case "RUN":
                for command in commands(each.text):
                    self._run(command, each, place)
            case "ENTRYPOINT":
                self._look(each.words[0], each, place)
            case "HEALTHCHECK":
                self._look(Instruction("CMD", {}, each.text.removeprefix("CMD").strip(), each.line).words[0], each, place)

    def _copy(self, each: Instruction, place: Place) -> None:
        """Adds copied programs: those below a folder of another stage, or a file of the context that becomes executable."""
        *sources, target = each.words
        if "from" in each.flags:
            theirs = self._places[each.flags["from"]].programs
            for source in (each for each in sources if each.startswith("/")):
                place.programs |= {target + path[len(source) :] for path in theirs if path.startswith(f"{source}/")}
        elif "chmod" in each.flags:
            place.programs.add(os.path.normpath(os.path.join(place.folder, target)))

    def _run(self, words: list[str], each: Instruction, place: Place) -> None:
        self._look(words[0], each, place)
        for word in words[1:]:
            if re.search(r"/bin/[\w.+-]+$", word) and words[words.index(word) - 1] == "--python":
                self._look(word, each, place)
        for name in RUNS.get(" ".join(words[:2]), ()):
            self._look(name, each, place)
        if words[:2] == ["apt-get", "install"]:
            for package in (word for word in words[2:] if not word.startswith("-")):
                place.programs |= set(PACKAGES[package])
        if words[1:3] == ["-m", "venv"]:
            made = ("python",) if "--without-pip" in words else ("python", "pip")
            place.programs |= {f"{words[-1]}/bin/{name}" for name in made}

    def _look(self, name: str, each: Instruction, place: Place) -> None:
        if place.find(name) is None:
            self.missing.append(f"line {each.line}: {name} is not on {place.path}")
