"""python -m diagnosis INSTALL GATEWAY reports faults of a release with their remedies.

INSTALL is a file with the expected state, GATEWAY the URL of the gateway. The exit status is 0 if no finding is BROKEN or WAITING.
The checks repeat until one condition is true:

1. No finding is BROKEN or WAITING.
2. The findings have not changed for SETTLED_S and none is WAITING.
3. PATIENCE_S have passed, which is less than the timeout of `helm test` (5 minutes).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from .checks import diagnose
from .findings import BROKEN, WAITING, Finding, report
from .install import Install
from .look import look

PATIENCE_S = float(os.environ.get("DIAGNOSIS_PATIENCE_S", "240"))  # seconds
SETTLED_S = min(45.0, PATIENCE_S / 2)  # seconds without a change after which findings are final
PERIOD_S = min(5.0, PATIENCE_S / 4)  # seconds between two runs of the checks


def watch(install: Install, gateway: str) -> list[Finding]:
    """Repeats the checks, prints changed findings, and returns the last findings."""
    begun = since = time.monotonic()
    before: set[tuple[str, str]] = set()
    while True:
        findings = diagnose(install, look(install, gateway, os.environ))
        bad = {(each.check, each.what) for each in findings if each.state in (BROKEN, WAITING)}
        now = time.monotonic()
        if bad != before:
            before, since = bad, now
            print(*(f"{now - begun:4.0f} s  {check}: {what}" for check, what in sorted(bad)), sep="\n", flush=True)
        settled = now - since >= SETTLED_S and not any(each.state == WAITING for each in findings)
        if not bad or settled or now - begun >= PATIENCE_S:
            return findings
        time.sleep(PERIOD_S)


def main() -> int:
    expected = json.loads(Path(sys.argv[1]).read_text())
    install = Install.of(expected)
    findings = watch(install, sys.argv[2])
    print(report(f"diagnosis of release {install.instance} in namespace {install.namespace}", findings), flush=True)
    return int(any(each.state in (BROKEN, WAITING) for each in findings))


sys.exit(main())
