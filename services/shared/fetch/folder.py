"""A folder of a volume that others share."""

from __future__ import annotations

import os
from pathlib import Path

from services.shared.fetch.files import File


class Folder:
    """Its mark is a fingerprint of names, sizes and times."""

    mark = ".copied"

    def __init__(self, source: str) -> None:
        self._root = Path(source)

    @property
    def wanted(self) -> str:
        return "".join(
            f"{path.relative_to(self._root)} {about.st_size} {about.st_mtime_ns}\n" for path, about in self._there().items()
        )

    def files(self) -> list[File]:
        return [
            File(str(path.relative_to(self._root)), about.st_size, str(about.st_mtime_ns), path.as_uri(), dict, lambda _: "")
            for path, about in self._there().items()
        ]

    def _there(self) -> dict[Path, os.stat_result]:
        files = (path for path in self._root.rglob("*") if path.is_file() and ".cache" not in path.parts)
        return {path: path.stat() for path in sorted(files)}
