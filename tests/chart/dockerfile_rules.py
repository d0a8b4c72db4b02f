"""Defines rules for Dockerfiles, most of them from hadolint. Each rule yields a message per violation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.chart.dockerfile import Dockerfile, Instruction, commands, context_files

LABELS = ("title", "description", "licenses", "vendor", "version", "revision")
SECRET = re.compile(r"(token|secret|password|passwd|credential|api_?key|private)", re.IGNORECASE)
COMPILERS = re.compile(r"(?<!\S)(gcc|g\+\+|clang|build-essential|cargo|grpcio-tools|cuda-nvcc[0-9-]*|[a-z0-9.-]+-dev)(?!\S)")
PIN = re.compile(r"^[a-z0-9][a-z0-9-]*==\d[\w.+]*$")


def complaints(
    dockerfile: Dockerfile, root: Path, published: list[str], compiling: Mapping[str, frozenset[str]] | None = None
) -> list[str]:
    """Returns the violations of all rules.

    Args:
        root: The build context.
        published: Stages that become images.
        compiling: Allowed compiler packages by image.
    """
    found = [*bases(dockerfile), *stage_names(dockerfile), *arguments(dockerfile), *steps(dockerfile)]
    found += [*copies(dockerfile, root), *installs(dockerfile, root), *secrets(dockerfile)]
    for name in published:
        found += images(dockerfile, name, (compiling or {}).get(name, frozenset()))
    return found


def bases(dockerfile: Dockerfile) -> Iterator[str]:
    for image in dockerfile.images():
        _, _, tag = image.rpartition("/")[2].partition(":")
        if "@sha256:" not in image and not re.match(r"\d+\.\d+\.\d+", tag):
            yield f"{image}: the base image is not pinned; name a full version or a digest"


def stage_names(dockerfile: Dockerfile) -> Iterator[str]:
    names = [stage.name for stage in dockerfile.stages]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name}: two stages have this name"
    for stage in dockerfile.stages:
        if stage.name.startswith("line-"):
            yield f"line {stage.line}: the stage has no name; add AS NAME"


def arguments(dockerfile: Dockerfile) -> Iterator[str]:
    for stage in dockerfile.stages:
        for name in stage.undeclared:
            yield f"{stage.name}: {name} is used before an ARG or ENV has declared it"


def _runs(dockerfile: Dockerfile) -> Iterator[Instruction]:
    for stage in dockerfile.stages:
        yield from stage.all("RUN")


def steps(dockerfile: Dockerfile) -> Iterator[str]:
    for run in _runs(dockerfile):
        where = f"line {run.line}"
        if re.search(r"\b(sudo|ssh|vim|nano)\b", run.text):
            yield f"{where}: an image must not contain sudo, ssh or an editor"
        if re.search(r"(curl|wget)\b.*\|\s*(sh|bash)", run.text):
            yield f"{where}: a downloaded script is piped into a shell"
        if re.search(r"(^|&&|;)\s*cd\s", run.text):
            yield f"{where}: use WORKDIR instead of cd"
        if "777" in run.text:
            yield f"{where}: mode 777 lets all users write"
        if re.search(r"\bapt\s", run.text):
            yield f"{where}: use apt-get instead of apt"
        if "apt-get install" in run.text:
            for needed in ("apt-get update", "--yes", "--no-install-recommends", "rm -rf /var/lib/apt/lists"):
                if needed not in run.text:
                    yield f"{where}: apt-get install without {needed}"
        if re.search(r"apt-get (dist-)?upgrade", run.text):
            yield f"{where}: an upgrade of packages is not reproducible; pin a newer base image"
    for stage in dockerfile.stages:
        for each in stage.instructions:
            if each.name in ("ADD", "MAINTAINER"):
                yield f"line {each.line}: the instruction {each.name} is not allowed"
            if each.name == "WORKDIR" and not each.text.startswith("/"):
                yield f"line {each.line}: WORKDIR needs an absolute path"


def copies(dockerfile: Dockerfile, root: Path) -> Iterator[str]:
    earlier: list[str] = []
    for stage in dockerfile.stages:
        for copy in stage.all("COPY"):
            *sources, target = copy.words
            if len(sources) > 1 and not target.endswith("/"):
                yield f"line {copy.line}: the target of several sources must end with /"
            if "from" in copy.flags:
                if copy.flags["from"] not in earlier:
                    yield f"line {copy.line}: there is no earlier stage {copy.flags['from']}"
                continue
            for source in sources:
                if source in (".", "./"):
                    yield f"line {copy.line}: COPY must name its sources instead of the whole context"
                elif not (root / source).exists():
                    yield f"line {copy.line}: {source} does not exist"
                elif not context_files(root, [source]):
                    yield f"line {copy.line}: .dockerignore excludes {source}"
        earlier.append(stage.name)


def installs(dockerfile: Dockerfile, root: Path) -> Iterator[str]:
    for run in _runs(dockerfile):
        for words in commands(run.text):
            if not ("install" in words and any(word == "pip" or word.endswith("/pip") for word in words)):
                continue
            option = next((word for word in words if word in ("--requirement", "--constraint")), "")
            if "--no-deps" not in words or not option:
                yield f"line {run.line}: pip install needs --no-deps and a list of pinned distributions"
                continue
            listed = root / words[words.index(option) + 1]
            lines = [line for line in listed.read_text().splitlines() if not line.startswith("#")]
            yield from (f"{listed.name}: {line} is not pinned" for line in lines if not PIN.match(line))
            named = words[words.index(option) + 2 :]
            yield from (f"line {run.line}: {listed.name} pins no {name}" for name in named if not _pinned(name, lines))


def _pinned(name: str, lines: list[str]) -> bool:
    return any(line.startswith(f"{name}==") for line in lines)


def secrets(dockerfile: Dockerfile) -> Iterator[str]:
    for stage in dockerfile.stages:
        for each in [*stage.all("ENV"), *stage.all("ARG")]:
            for word in each.words:
                if SECRET.search(word.partition("=")[0]):
                    yield f"line {each.line}: {word.partition('=')[0]} looks like a secret, which would stay in the image"


def images(dockerfile: Dockerfile, name: str, compiling: frozenset[str]) -> Iterator[str]:
    """Checks a stage that becomes an image."""
    lineage = dockerfile.lineage(name)

    def every(kind: str) -> list[Instruction]:
        return [each for stage in lineage for each in stage.all(kind)]

    users, entrypoints, healthchecks = every("USER"), every("ENTRYPOINT"), every("HEALTHCHECK")
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1].text):
        yield f"{name}: the last USER must be UID:GID without 0"
    if len(entrypoints) != 1 or not entrypoints[0].is_exec_form or every("CMD"):
        yield f"{name}: the image needs exactly one ENTRYPOINT in exec form, and no CMD"
    if len(healthchecks) != 1 or "CMD [" not in healthchecks[0].text:
        yield f"{name}: the image needs exactly one HEALTHCHECK in exec form"
    if not every("EXPOSE"):
        yield f"{name}: the image has no EXPOSE"
    labels = " ".join(each.text for each in every("LABEL"))
    for label in LABELS:
        if f"org.opencontainers.image.{label}=" not in labels:
            yield f"{name}: the label org.opencontainers.image.{label} is missing"
    for each in every("RUN"):
        if set(COMPILERS.findall(each.text)) - compiling:
            yield f"{name}: line {each.line} installs a compiler"
