"""pytest -p tests.spread, with --dist loadfile: assigns test files to processes, and all files in EVERY_RELEASE to one process.

These files render every release of the chart, which takes as long as their tests. In one process, each release is rendered once.
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
