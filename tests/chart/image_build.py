"""Builds the stages of a Dockerfile into folders without a container engine, by replaying COPY and RUN.

The files of a stage are below one folder, and absolute paths in commands are rewritten to this folder. Commands that need root or
a Linux distribution (packages, accounts, owners) are skipped; NOT_REPLAYED lists them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chart.dockerfile import Dockerfile, Instruction, Stage, context_files

NOT_REPLAYED = ("apt-get update", "groupadd ", "chown ", "python -m compileall -q --invalidation-mode unchecked-hash")
ROOTED = r"(?<![\w.])/(?:opt|app)(?=/)"


@dataclass(slots=True)
class Image:
    """The files and settings of a built stage."""

    files: Path  # root folder of the image on this machine
    folder: str = "/"  # working folder in the image
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    def place(self, path: str) -> Path:
        """Returns this machine's path for a path in the image. A relative path is below the image's working folder."""
        return self.files / os.path.normpath(os.path.join(self.folder, path)).lstrip("/")

    def here(self, text: str) -> str:
        return re.sub(ROOTED, lambda match: f"{self.files}{match[0]}", text)


class Builder:
    """Builds the stages of one Dockerfile.

    Args:
        instead: function that gets the text of each RUN instruction. It executes the instruction itself and returns True, or it
            returns False; the instruction is then replayed.
    """

    def __init__(
        self,
        dockerfile: Dockerfile,
        root: Path,
        work: Path,
        instead: Callable[[str, Image], bool] = lambda text, image: False,
    ) -> None:
        self._dockerfile, self._root, self._work, self._instead = dockerfile, root, work, instead
        self._built: dict[str, Image] = {}
        self.skipped: list[str] = []

    def build(self, name: str) -> Image:
        if name not in self._built:
            stage = self._dockerfile.stage(name)
            self._built[name] = self._start(stage)
            for instruction in stage.instructions:
                self._do(instruction, self._built[name])
        return self._built[name]

    def _start(self, stage: Stage) -> Image:
        files = self._work / stage.name
        if all(stage.base != other.name for other in self._dockerfile.stages):
            files.mkdir(parents=True)
            return Image(files)
        base = self.build(stage.base)
        shutil.copytree(base.files, files, symlinks=True, copy_function=os.link)
        inherited = (list(base.entrypoint), list(base.healthcheck), list(base.ports))
        return Image(files, base.folder, dict(base.env), dict(base.arguments), *inherited)

    def _do(self, each: Instruction, image: Image) -> None:
        match each.name:
            case "WORKDIR":
                image.folder = each.text
                image.place(".").mkdir(parents=True, exist_ok=True)
            case "ENV":
                image.env.update(word.split("=", 1) for word in each.words)
            case "ENTRYPOINT":
                image.entrypoint = each.words
            case "EXPOSE":
                image.ports += [int(word) for word in each.words]
            case "HEALTHCHECK":
                image.healthcheck = Instruction("CMD", {}, each.text.removeprefix("CMD").strip(), each.line).words
            case "COPY":
                self._copy(each, image)
            case "RUN":
                self._run(each.text, image)
            case "ARG":
                name, _, image.arguments[name] = each.text.partition("=")
            case "LABEL" | "USER" | "VOLUME":
                pass
            case _:
                raise NotImplementedError(f"line {each.line}: the replay does not support {each.name}")

    def _copy(self, each: Instruction, image: Image) -> None:
        *sources, target = each.words
        into = image.place(target)
        for source in sources:
            if "from" in each.flags:
                origin = self.build(each.flags["from"]).place(source)
                _link(origin, into / origin.name if target.endswith("/") else into)
                continue
            wanted = context_files(self._root, [source])
            if not wanted:
                raise FileNotFoundError(f"line {each.line}: {source} does not exist, or .dockerignore excludes it")
            for name in wanted:
                below = Path(name).relative_to(source)
                place = into / below if below.parts else (into / Path(name).name if target.endswith("/") else into)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._root / name, place)

    def _run(self, text: str, image: Image) -> None:
        if text.startswith(NOT_REPLAYED):
            self.skipped.append(text)
            return
        if self._instead(text, image):
            return
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` and `pip` of the base image
        own = {key: image.here(value) for key, value in image.env.items()}
        env = {**os.environ, **image.arguments, **own, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        command = ["sh", "-euc", image.here(text)]
        done = subprocess.run(command, cwd=image.place("."), env=env, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _link(origin: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if origin.is_dir():
        shutil.copytree(origin, place, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
        return
    os.link(origin, place)
