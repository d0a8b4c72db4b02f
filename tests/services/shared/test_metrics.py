from __future__ import annotations

import urllib.request

from prometheus_client import CollectorRegistry, Gauge

from rootstock_llm.services.local.ports import HOST
from rootstock_llm.services.shared.observe import metrics_server

PROMETHEUS_ASKS = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5"


def test_metric_name_keeps_the_colon_when_openmetrics_is_preferred() -> None:
    registry = CollectorRegistry()
    Gauge("sglang:num_running_reqs", "Requests that run.", registry=registry).set(3)
    server = metrics_server.serve(registry, HOST, 0)
    try:
        url = f"http://{HOST}:{server.server_address[1]}/metrics"
        for accept in (PROMETHEUS_ASKS, "*/*"):
            with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=60) as response:
                assert response.headers["content-type"].startswith("text/plain")
                assert "\nsglang:num_running_reqs 3.0\n" in response.read().decode()
    finally:
        server.shutdown()
        server.server_close()
