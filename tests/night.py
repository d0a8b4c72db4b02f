"""Whether it is night: `make nightly` runs what takes too long for `make test`."""

from __future__ import annotations

import os

NIGHTLY = bool(os.environ.get("ROOTSTOCK_TEST_NIGHTLY"))
