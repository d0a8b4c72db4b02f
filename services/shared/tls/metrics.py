"""What a process tells of its TLS between services."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from services.shared.observe.readings import Reading, Readings, Value
from services.shared.tls.mutual_tls import MutualTls


def _refused(mtls: MutualTls) -> Value:
    return {(reason,): count for reason, count in mtls.refused.items()}


def _not_after(mtls: MutualTls) -> Value:
    named = mtls.files.now().named
    return 0.0 if named is None else named.not_after


class TlsMetrics(Readings[MutualTls]):
    """Of a process that has TLS between services; of others there is nothing to tell."""

    rows = (
        Reading(
            Counter,
            "rootstock_tls_refused_calls",
            "Calls between services that were refused, by what was wrong.",
            _refused,
            ("reason",),
        ),
        Reading(
            Gauge,
            "rootstock_tls_certificate_not_after_seconds",
            "When the certificate that this process shows expires, in Unix time; 0: it had when it was read.",
            _not_after,
        ),
        Reading(
            Gauge,
            "rootstock_tls_files_valid",
            "1: what its TLS files hold is used; 0: it is wrong, and what they held before is.",
            lambda mtls: mtls.files.valid,
        ),
    )
