"""Writes the page of a run, as Markdown and as JSON: versions, images, and each test's result and duration."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.kubernetes import Cluster

HEAD = """# Results on a real cluster

This page lists the results of the last run of `make cluster-test`. The run writes this page and [proof.json](proof.json) with the
same content. Each row has a test of tests/cluster, its duration while other tests ran, and its observations.
[Cluster tests](../../how-to/kubernetes/cluster-tests.md) explains the tests.
"""
NO_LINE = "without a line of its own"


@dataclass
class Proof:
    found: dict[str, Any] = field(default_factory=lambda: {"images": [], "versions": {}})

    def built(self, image: str, size: int, seconds: float) -> None:
        self.found["images"].append({"image": image, "MB": round(size / 1e6), "seconds": round(seconds)})
        print(f"{image}: {size / 1e6:.0f} MB, built in {seconds:.0f} s", flush=True)

    def versions(self, cluster: Cluster) -> None:
        node = cluster.get("nodes")["items"][0]["status"]["nodeInfo"]
        self.found["versions"] = {
            "kubernetes": node["kubeletVersion"],
            "runtime": node["containerRuntimeVersion"],
            "helm": cluster.helm("version", "--short").strip(),
            "nodes": len(cluster.nodes()),
        }

    def ready(self, seconds: float) -> None:
        """Records and prints the time from the start of the run until images and cluster are ready."""
        self.found["seconds_to_ready"] = round(seconds)
        print(f"images and cluster are ready after {seconds:.0f} s", flush=True)

    def write(self, folder: Path, lines: Path, seconds: float, status: int) -> None:
        """Writes proof.md and proof.json.

        Args:
            lines: file of JSON lines that the tests have written.
            seconds: duration of the run.
            status: exit status of pytest; the run has failed if it is not 0.
        """
        self.found |= {"date": time.strftime("%Y-%m-%d"), "minutes": round(seconds / 60, 1), "passed": status == 0}
        self.found["tests"] = gathered(lines.read_text() if lines.exists() else "")
        (folder / "proof.json").write_text(json.dumps(self.found, indent=1) + "\n")
        (folder / "proof.md").write_text(self._page())

    def _page(self) -> str:
        found = self.found
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        outcome = "all passed" if found["passed"] else "**not all passed**"
        begun = f"{found['minutes']} minutes, of which {found['seconds_to_ready']} s until images and cluster were ready"
        page = [HEAD, f"{found['date']}: {versions}; {begun}; {outcome}.\n"]
        page += ["| image | MB | built in, s |", "| --- | ---: | ---: |"]
        page += [f"| {each['image']} | {each['MB']} | {each['seconds']} |" for each in found["images"]]
        page += ["", "| test | s | observations |", "| --- | ---: | --- |"]
        page += [f"| `{each['file']}::{each['test']}` | {each['seconds']} | {_happened(each)} |" for each in found["tests"]]
        return "\n".join(page) + "\n"


def gathered(lines: str) -> list[dict[str, Any]]:
    """Returns an entry per test with file, test, outcome, seconds and lines.

    Entries are sorted by file. Tests of one file are in the order in which they wrote their first JSON line.
    """
    tests: dict[tuple[str, str], dict[str, Any]] = {}
    for row in map(json.loads, lines.splitlines()):
        key = (row.pop("file"), row.pop("test"))
        entry = tests.setdefault(key, {"file": key[0], "test": key[1], "outcome": "not ended", "seconds": 0, "lines": []})
        if line := row.pop("line", ""):
            entry["lines"].append(line)
        entry |= row
    return sorted(tests.values(), key=lambda entry: entry["file"])


def _happened(entry: dict[str, Any]) -> str:
    result = "; ".join(entry["lines"]).replace("|", "/") or NO_LINE
    return result if entry["outcome"] == "passed" else f"**{entry['outcome']}**: {result}"
