"""The metrics of TLS between services."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from rootstock_llm.services.shared.observe.readings import Reading, Readings, Value
from rootstock_llm.services.shared.tls.mutual_tls import MutualTls


def _refused(mtls: MutualTls) -> Value:
    return {(reason,): count for reason, count in mtls.refused.items()}


def _not_after(mtls: MutualTls) -> Value:
    named = mtls.files.now().named
    return 0.0 if named is None else named.not_after


class TlsMetrics(Readings[MutualTls]):
    """Metrics of a process with TLS between services. Other processes do not register them."""

    rows = (
        Reading(
            Counter,
            "rootstock_tls_refused_calls",
            "Refused calls between services, by the credential that was missing or wrong (certificate or token).",
            _refused,
            ("reason",),
        ),
        Reading(
            Gauge,
            "rootstock_tls_certificate_not_after_seconds",
            "Unix time at which the certificate of this process expires; 0 if it had expired when it was read.",
            _not_after,
        ),
        Reading(
            Gauge,
            "rootstock_tls_files_valid",
            "1 if the current TLS files are in use; 0 if the files are wrong and the earlier files are in use.",
            lambda mtls: mtls.files.valid,
        ),
    )
