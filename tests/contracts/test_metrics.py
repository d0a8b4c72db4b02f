"""docs/reference/metrics.md has all metrics of the code, and the chart uses only existing metrics."""

from __future__ import annotations

import ast
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rootstock_llm.services.local import metrics_reference
from rootstock_llm.services.local.metrics_reference import Row
from tests.chart.promql import names

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "rootstock"
PAGE = ROOT / "docs" / "reference" / "metrics.md"
COLLECTORS = {"Collector", "Readings"}
SILENT = {"Scrapes"}  # collectors without series; Scrapes only records the times of scrapes
DIRECT = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
KINDS = {"Readings", "LabelledHistogram"}  # base classes of collectors
# Prefixes of series that come from Prometheus, from optional exporters or from the chart's recording rules.
PROMETHEUS = ("kubelet_volume_stats_", "process_", "python_", "up", "ALERTS", "kube_", "DCGM_", "rootstock:max_replicas")


def rows() -> list[Row]:
    return [row for found in metrics_reference.services().values() for row in found]


def rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Yields the location and the PromQL expression of each panel and rule."""
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            yield from ((f"{path.name}: {panel['title']}", target["expr"]) for target in panel["targets"])
    yield from ((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())


def emitted() -> set[str]:
    return {name for row in rows() for name in row.series}


def test_metrics_page_is_up_to_date() -> None:
    assert PAGE.read_text() == metrics_reference.render(), "run `make docs`"


def test_dashboards_are_up_to_date() -> None:
    written = runpy.run_path(str(CHART / "dashboards" / "build.py"))["written"]()
    assert {path: path.read_text() for path in written} == written, "run `make docs`"


def test_each_sglang_metric_has_a_counterpart_or_a_reason() -> None:
    table = metrics_reference.counterparts()
    known = emitted() | {row.name for row in rows()} | {"process_cpu_seconds_total"}
    theirs = [each.theirs for each in table]
    assert len(theirs) == len(set(theirs)) > 150
    assert [each for each in table if each.ours and each.ours not in known] == []
    assert [each for each in table if not each.ours and (not each.why or each.theirs in known)] == []
    assert {row.name for row in rows() if row.name.startswith("sglang:")} <= {
        name.removesuffix("_total").removesuffix("_info") for name in theirs
    }
    reasons = {name for each in table for name in re.findall("`(.*?)`", each.why)}
    assert reasons and reasons <= known


def test_metric_names_are_unique_and_documented() -> None:
    series = [name for row in rows() for name in row.series]
    assert len(series) == len(set(series)) and len(series) > 100
    assert [row.name for row in rows() if not row.text.endswith(".")] == []


def collecting(tree: ast.Module) -> Iterator[str]:
    """Yields the classes that are collectors or create metrics of prometheus_client."""
    library = any(isinstance(node, ast.ImportFrom) and node.module == "prometheus_client" for node in tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {re.split(r"\W", ast.unparse(base))[0] for base in node.bases}
            made = {ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
            if bases & COLLECTORS or (library and made & DIRECT):
                yield node.name


def test_metrics_page_has_every_collector() -> None:
    page = ast.parse(Path(metrics_reference.__file__).read_text())
    imported = {alias.name for node in ast.walk(page) if isinstance(node, ast.ImportFrom) for alias in node.names}
    found = {name for path in (ROOT / "services").rglob("*.py") for name in collecting(ast.parse(path.read_text()))}
    assert len(found) >= 10
    assert found - imported - KINDS - SILENT == set()


def test_dashboards_and_rules_use_existing_metrics() -> None:
    known = emitted() | {rule["record"] for rule in rules() if "record" in rule}
    found = [(where, name) for where, expression in expressions() for name in names(expression)]
    assert len(found) > 100
    assert [each for each in found if each[1] not in known and not each[1].startswith(PROMETHEUS)] == []


@pytest.mark.parametrize("path", ["files/queries.yaml", "templates/monitoring/adapter-rules.yaml"])
def test_autoscaling_queries_use_existing_metrics(path: str) -> None:
    named = set(re.findall(r"\b(?:sglang:|rootstock_(?:gateway|worker)_)\w+", (CHART / path).read_text()))
    assert named and named <= emitted()
