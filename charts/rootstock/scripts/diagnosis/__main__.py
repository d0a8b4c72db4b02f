"""python -m diagnosis INSTALL GATEWAY: what is wrong with an installation, and how to mend it. Status 0 where all is well.

INSTALL: a file with what the chart has installed. It looks again until all is well, until what is broken has stayed as it is for
a while and nothing is on its way, or until its patience ends, which is below the time that `helm test` gives a pod (5 minutes).
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

PATIENCE_S = float(os.environ.get("DIAGNOSIS_PATIENCE_S", "240"))
SETTLED_S = min(45.0, PATIENCE_S / 2)
PERIOD_S = min(5.0, PATIENCE_S / 4)


def watch(install: Install, gateway: str) -> list[Finding]:
    """The last findings. Tells what it waits for."""
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
    told = json.loads(Path(sys.argv[1]).read_text())
    install = Install.of(told)
    findings = watch(install, sys.argv[2])
    print(report(f"diagnosis of release {install.instance} in namespace {install.namespace}", findings), flush=True)
    return int(any(each.state in (BROKEN, WAITING) for each in findings))


sys.exit(main())
