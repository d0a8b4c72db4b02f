"""The Hugging Face hub, or a mirror of it: https://huggingface.co/docs/hub/api."""

from __future__ import annotations

import os
import urllib.parse
from typing import Any

from services.shared.fetch.files import File, is_wanted, unequal
from services.shared.fetch.http_client import Headers, answer_json


class Hub:
    """All files are of one commit; the hub says sha256 of large ones, git's sums of the others."""

    mark = ".source"

    def __init__(self, source: str) -> None:
        self.wanted = source
        self._name, _, revision = source.partition("@")
        self._revision = revision or "main"
        self._endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")

    def _headers(self) -> Headers:
        token = os.environ.get("HF_TOKEN")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def files(self) -> list[File]:
        revision = urllib.parse.quote(self._revision, safe="")
        about = answer_json(f"{self._endpoint}/api/models/{self._name}/revision/{revision}?blobs=true", self._headers())
        return [self._file(about["sha"], each) for each in about["siblings"] if is_wanted(each["rfilename"])]

    def _file(self, commit: str, about: dict[str, Any]) -> File:
        large, name = about.get("lfs") or {}, about["rfilename"]
        size = int(large.get("size") or about["size"])
        wrong = unequal("sha1", about["blobId"], lambda path: f"blob {path.stat().st_size}\0".encode())
        if large:
            wrong = unequal("sha256", large["sha256"])
        url = f"{self._endpoint}/{self._name}/resolve/{commit}/{urllib.parse.quote(name)}"
        return File(name, size, commit, url, self._headers, wrong)
