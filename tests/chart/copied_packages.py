"""Replaces pip in replayed image builds: copies packages of this environment, because pip takes most of a minute.

Only the distributions of the requirements file are copied, in the version that is installed here, as hard links if possible.
Nightly runs use pip itself.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.chart.image_build import Image

_INSTALL = re.compile(r"pip --python (\S+) install --no-deps --requirement (\S+)")
_VENV = re.compile(r"python -m venv( --without-pip)? (\S+)")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def copy_packages(text: str, image: Image) -> bool:
    """Executes a RUN instruction that installs packages or creates an environment. Returns False for other instructions."""
    if all(map(_VENV.fullmatch, text.split(" && "))):
        for flag, folder in _VENV.findall(text):
            subprocess.run([sys.executable, "-m", "venv", *flag.split(), image.place(folder)], check=True, timeout=60)
        return True
    found = _INSTALL.match(text)
    if found is None:
        return False
    python, requirements = (image.place(path) for path in found.groups())
    into = python.parent.parent / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    names = [match[0] for line in requirements.read_text().splitlines() if (match := _NAME.match(line))]
    assert names, requirements
    for name in names:
        _copy(importlib.metadata.distribution(name), into)
    return True


def _copy(distribution: importlib.metadata.Distribution, into: Path) -> None:
    """Copies a distribution's files below site-packages. Its command-line programs are not copied, as services use none."""
    for file in distribution.files or ():
        origin, place = Path(str(distribution.locate_file(file))), into / file
        if ".." not in file.parts and origin.exists():  # the list of files names bytecode that may not exist
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(origin, place)


def _link(origin: Path, place: Path) -> None:
    """Links or copies a file. A link is safe, because compilation writes bytecode to new files."""
    try:
        os.link(origin, place)
    except OSError:  # another file system
        shutil.copy2(origin, place)
