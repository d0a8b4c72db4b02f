"""The page of a run: versions, what was done and what happened. Written by the run, as text and as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.kubernetes import Cluster

HEAD = """# What was tried on a real cluster

Written by `make cluster-test`; the same as JSON: [proof.json](proof.json). Each line is a test of tests/cluster, and what it saw.
"""


@dataclass
class Proof:
    found: dict[str, Any] = field(default_factory=lambda: {"images": [], "versions": {}})

    def built(self, image: str, size: int, seconds: float) -> None:
        self.found["images"].append({"image": image, "MB": round(size / 1e6), "seconds": round(seconds)})

    def versions(self, cluster: Cluster) -> None:
        node = cluster.get("nodes")["items"][0]["status"]["nodeInfo"]
        self.found["versions"] = {
            "kubernetes": node["kubeletVersion"],
            "runtime": node["containerRuntimeVersion"],
            "helm": cluster.helm("version", "--short").strip(),
            "nodes": len(cluster.nodes()),
        }

    def write(self, folder: Path, lines: Path, seconds: float, status: int) -> None:
        """status: pytest's. A run that failed is written as one."""
        entries = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        self.found |= {"date": time.strftime("%Y-%m-%d"), "minutes": round(seconds / 60, 1), "passed": status == 0}
        self.found["lines"] = entries
        (folder / "proof.json").write_text(json.dumps(self.found, indent=1) + "\n")
        (folder / "proof.md").write_text(self._page())

    def _page(self) -> str:
        found = self.found
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        outcome = "all passed" if found["passed"] else "**not all passed**"
        page = [HEAD, f"{found['date']}: {versions}; {found['minutes']} minutes, {outcome}.\n"]
        page += ["| image | MB | built in, s |", "| --- | ---: | ---: |"]
        page += [f"| {each['image']} | {each['MB']} | {each['seconds']} |" for each in found["images"]]
        page += ["", "| test | what happened |", "| --- | --- |"]
        page += [f"| `{each['file']}::{each['test']}` | {each['line'].replace('|', '/')} |" for each in found["lines"]]
        return "\n".join(page) + "\n"
