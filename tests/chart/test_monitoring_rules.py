"""Rules, by Prometheus's own tools: they are valid, each alert fires when it must, and none does when all is well."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.alert_scenarios import SCENARIOS, WELL, Scenario
from tests.chart.release import CHART, REPO, merged, render

RULES = CHART / "files" / "rules.yaml"
ALERTS_PAGE = REPO / "docs" / "kubernetes" / "alerts.md"
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)


def world(differs: dict[str, str], expected: list[tuple[str, set[str]]]) -> dict[str, Any]:
    """expected: when, and which alerts fire then."""
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in {**WELL, **differs}.items()],
        "promql_expr_test": [
            {
                "expr": FIRING,
                "eval_time": at,
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)],
            }
            for at, firing in expected
        ],
    }


def played(scenario: Scenario) -> dict[str, Any]:
    expected = [(scenario.before, set[str]())] if scenario.before else []
    return world(dict(scenario.differs), [*expected, (scenario.at, {scenario.alert, *scenario.others})])


def run_tests(folder: Path, *tests: dict[str, Any], every: str = "30s") -> str:
    """What failed, empty if nothing did."""
    (folder / "rules.yaml").write_text(RULES.read_text())
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": every, "tests": list(tests)}))
    done = promtool("test", "rules", str(file))
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.needs("promtool")
def test_rules_are_valid() -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("promtool")
def test_nothing_fires_while_all_is_well(tmp_path: Path) -> None:
    assert run_tests(tmp_path, world({}, [("30m", set()), ("2h", set())])) == ""


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[f"{n}-{each.alert}" for n, each in enumerate(SCENARIOS)])
def test_an_alert_fires_when_it_must_and_not_before(scenario: Scenario, tmp_path: Path) -> None:
    assert run_tests(tmp_path, played(scenario)) == ""


@pytest.mark.needs("promtool")
def test_a_scenario_fails_where_its_alert_does_not_fire(tmp_path: Path) -> None:
    quiet = Scenario(SCENARIOS[0].alert, {})
    assert "FAILED" in run_tests(tmp_path, played(quiet))


def test_every_alert_has_a_scenario_a_severity_and_a_page() -> None:
    assert {scenario.alert for scenario in SCENARIOS} == {each["alert"] for each in alerts()}
    anchors = {heading.strip().lower() for heading in re.findall(r"^## (.+)$", ALERTS_PAGE.read_text(), re.M)}
    for each in alerts():
        assert each["labels"]["severity"] in ("critical", "warning")
        assert set(each["annotations"]) == {"summary", "description", "runbook", "runbook_url"}
        page, anchor = each["annotations"]["runbook_url"].split("#")
        assert (REPO / page, anchor) == (ALERTS_PAGE, each["alert"].lower())
        assert anchor in anchors
        assert each["expr"] in ALERTS_PAGE.read_text()


def test_the_chart_installs_exactly_these_rules() -> None:
    values = {"monitoring": {"rules": {"enabled": True, "labels": {"release": "prometheus"}}}}
    (rule,) = render(merged(values, {"worker": {"prefill": {"replicas": 1}}})).kind("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    (usual,) = render(values).kind("PrometheusRule")
    *groups, last = rule["spec"]["groups"]
    assert usual["spec"] == {"groups": groups} and last["name"] == "rootstock.prefill"
