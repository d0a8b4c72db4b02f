"""Cost of TLS between all pods of a release."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import until
from tests.cluster.load import load_on
from tests.cluster.test_mtls import STREAMS, TLS, VALUES, prepared

pytestmark = [pytest.mark.needs("openssl"), pytest.mark.alone]
MEASURED_S = 40.0


def test_cost_of_tls_between_pods_is_measured(install: Install, tmp_path: Path, proved: Callable[[str], None]) -> None:
    """Measures requests per second of short responses with TLS and without, on the same nodes."""
    rates: dict[str, float] = {}
    release = prepared(install, tmp_path)
    for name, values in (("TLS", VALUES | TLS), ("without TLS", VALUES)):
        release.install(values)
        with load_on(release, STREAMS, max_tokens=8) as load:
            until(lambda: load.ended >= STREAMS, "the first completed requests")
            begun, before = time.monotonic(), load.ended
            time.sleep(MEASURED_S)
            rates[name] = (load.ended - before) / (time.monotonic() - begun)
        load.check()
    assert all(rates.values())
    shown = ", ".join(f"{rate:.1f} requests/s {'with TLS' if name == 'TLS' else name}" for name, rate in rates.items())
    proved(f"{STREAMS} streams of 8 tokens: {shown} (× {rates['TLS'] / rates['without TLS']:.2f})")
