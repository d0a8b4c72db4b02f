"""python -m rootstock_llm.services.local.metrics_reference prints docs/reference/metrics.md from the metrics of the services.

It starts no service.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from rootstock_llm.services.detokenizer.session import DetokenizerMetrics
from rootstock_llm.services.gateway.dispatch.fleet_collector import FleetCollector
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics, KeyMetrics, QueueMetrics, RequestMetrics, StoreMetrics
from rootstock_llm.services.shared.observe.histogram import LabelledHistogram
from rootstock_llm.services.shared.observe.readings import Readings
from rootstock_llm.services.shared.tls.metrics import TlsMetrics
from rootstock_llm.services.tokenizer.metrics import TokenizerMetrics
from rootstock_llm.services.worker.index.metrics import PublisherMetrics
from rootstock_llm.services.worker.metrics.executor_metrics import ExecutorMetrics
from rootstock_llm.services.worker.metrics.grammar_metrics import GrammarMetrics
from rootstock_llm.services.worker.metrics.loading_metrics import LoadMetrics, ReloadMetrics
from rootstock_llm.services.worker.metrics.peer_metrics import PeerMetrics, PeerReadMetrics
from rootstock_llm.services.worker.metrics.phase import LifeMetrics
from rootstock_llm.services.worker.metrics.scheduler_metrics import WorkerMetrics

COUNTERPARTS = Path(__file__).with_name("metrics_of_sglang.toml")
HEAD = """# Metrics

This page lists every metric of every process. `make docs` writes it from the code that defines the metrics.

A gateway serves `/metrics` on its HTTP port; the chart uses only port 9104. The other services serve it on `--metrics-port`. The
series of a counter ends in `_total`, that of an info in `_info`. A histogram has the series `_bucket`, `_sum` and `_count`. All
processes also export Prometheus's `process_*`, and workers `python_*`.

[Alerts](kubernetes/alerts.md) and [autoscaling](../how-to/kubernetes/autoscaling.md) explain the metrics that they use. The
dashboards are in `charts/rootstock/dashboards`.
"""
SERIES = {"counter": ("_total",), "info": ("_info",), "histogram": ("_bucket", "_sum", "_count")}
OF_SGLANG = """
## SGLang's metrics

This table has all metrics of SGLang and their counterparts here. A worker exports the metrics of its own work, also those that
another process exports in SGLang. Equal names have equal meanings; labels may differ.

"""
UNITS = ("seconds", "bytes", "tokens", "blocks", "chars")  # if a metric's name contains one of these words, the word is the unit
UNNAMED = {  # units of metrics whose names contain no unit
    "sglang:token_usage": "0 to 1",
    "sglang:cache_hit_rate": "0 to 1",
    "sglang:new_token_ratio": "0 to 1",
    "sglang:spec_accept_length": "tokens",
    "sglang:spec_accept_rate": "0 to 1",
    "sglang:gen_throughput": "tokens per second",
    "sglang:fwd_occupancy": "0 to 100",
    "sglang:context_len": "tokens",
    "sglang:page_size": "tokens",
    "sglang:decode_sum_seq_lens": "tokens",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A metric in the table of its service."""

    name: str  # name without _total, _info or _bucket
    kind: str  # type in Prometheus: counter, gauge, histogram or info
    labels: tuple[str, ...]
    text: str  # help text

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the metric's time series in Prometheus."""
        return tuple(self.name + end for end in SERIES.get(self.kind, ("",)))

    @property
    def unit(self) -> str:
        return UNNAMED.get(self.name) or next((unit for unit in UNITS if unit in self.name.split("_")), "")


def services() -> dict[str, list[Row]]:
    """Returns the metrics by service, sorted by name. TLS metrics, which all services have, are a separate entry."""
    found = {
        "gateway": [
            *_attributes_of(GatewayMetrics(CollectorRegistry())),
            *_described(QueueMetrics, KeyMetrics, StoreMetrics, FleetCollector),
        ],
        "tokenizer": _attributes_of(TokenizerMetrics(CollectorRegistry())),
        "detokenizer": _attributes_of(DetokenizerMetrics(CollectorRegistry())),
        "worker": _described(
            WorkerMetrics,
            GrammarMetrics,
            LoadMetrics,
            ReloadMetrics,
            LifeMetrics,
            ExecutorMetrics,
            PeerMetrics,
            PeerReadMetrics,
            PublisherMetrics,
        ),
        "each service with TLS": _described(TlsMetrics),
    }
    return {name: sorted(rows, key=lambda row: row.name) for name, rows in found.items()}


def _attributes_of(metrics: object) -> list[Row]:
    """Returns the metrics among the attributes of an object."""
    out: list[Row] = []
    for each in vars(metrics).values():
        if isinstance(each, MetricWrapperBase):
            out += (_row(metric, each._labelnames) for metric in each.describe())
        elif isinstance(each, LabelledHistogram):
            out += map(_row, each.describe())
        elif isinstance(each, RequestMetrics):
            out += _attributes_of(each)
    return out


def _described(*collectors: type[Readings[Any]] | type[WorkerMetrics] | type[GrammarMetrics]) -> list[Row]:
    return [_row(metric) for collector in collectors for metric in collector.describe()]


def _row(metric: Metric, labels: tuple[str, ...] | None = None) -> Row:
    """Returns the row of a metric.

    Reads label names from a private attribute, because a metric without samples has no public one.
    """
    names = getattr(metric, "_labelnames", ()) if labels is None else labels
    return Row(metric.name, metric.type, tuple(names), metric.documentation)


def render() -> str:
    return HEAD + "".join(_section(name, rows) for name, rows in services().items()) + OF_SGLANG + _section_of_sglang()


def _section(name: str, rows: list[Row]) -> str:
    lines = [
        f"\n## {name[0].upper()}{name[1:]}\n",
        "| metric | type | unit | labels | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        shown = row.series[0] if row.kind != "histogram" else row.name
        lines.append(f"| `{shown}` | {row.kind} | {row.unit} | {labels} | {row.text} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Counterpart:
    """A metric of SGLang and its counterpart."""

    theirs: str  # SGLang's name; that of a histogram has no suffix (_bucket, _sum, _count)
    ours: str  # name here; empty: there is no counterpart
    why: str = ""  # why there is no counterpart


def counterparts() -> list[Counterpart]:
    """Returns all rows of services/local/metrics_of_sglang.toml, sorted by SGLang's name."""
    table = tomllib.loads(COUNTERPARTS.read_text())
    rows = [Counterpart(name, name) for name in table["same"]]
    rows += [Counterpart(name, ours) for name, ours in table["named"].items()]
    rows += [Counterpart(name, "", group["why"]) for group in table["absent"] for name in group["names"]]
    return sorted(rows, key=lambda row: row.theirs)


def _section_of_sglang() -> str:
    lines = ["| SGLang | here |", "| --- | --- |"]
    for row in counterparts():
        ours = "the same" if row.ours == row.theirs else f"`{row.ours}`" if row.ours else f"– {row.why}"
        lines.append(f"| `{row.theirs}` | {ours} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
