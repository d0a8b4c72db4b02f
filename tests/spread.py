"""pytest -p tests.spread, with --dist loadfile: a process gets a file at a time, or all files that render every chart release.

A single process runs the latter, so that releases are rendered once. Rendering takes as long as the rest of such a file.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

EVERY_RELEASE = {
    f"tests/chart/test_{name}.py"
    for name in ("laws", "network_policies", "objects", "pod_security", "settings", "upgrade", "values")
}


class Spread(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "every release" if file in EVERY_RELEASE else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Spread:
    return Spread(config, log)
