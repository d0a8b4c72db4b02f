"""Tests the alerting and recording rules with promtool. Each alert fires in its scenario, and none in a healthy system."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.observe.metrics import BACKGROUND_ENDS, REFUSALS, GatewayMetrics
from rootstock_llm.services.local.ports import HOST
from rootstock_llm.services.worker.settings import WorkerSettings
from tests.chart.alert_scenarios import FIRST, FIRSTS, GRACE, LATENCY, SCENARIOS, WELL, Scenario
from tests.chart.prometheus import Prometheus
from tests.chart.release import CHART, REPO, merged, render
from tests.chart.variants import VARIANTS
from tests.e2e.system import wait_until

RULES = CHART / "files" / "rules.yaml"
ALERTS_PAGE = REPO / "docs" / "reference" / "kubernetes" / "alerts.md"
SCALING_PAGE = REPO / "docs" / "how-to" / "kubernetes" / "autoscaling.md"
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)


def world(differs: dict[str, str], expected: list[tuple[str, set[str]]]) -> dict[str, Any]:
    """Returns a promtool test.

    Args:
        differs: series that replace those of a healthy system, by name.
        expected: (time, names of the alerts that must fire then).
    """
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
    """Runs promtool tests and returns the failures; "" if all pass."""
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
def test_no_alert_fires_in_a_healthy_system(tmp_path: Path) -> None:
    assert run_tests(tmp_path, world({}, [("30m", set()), ("2h", set())])) == ""


@pytest.mark.needs("promtool")
def test_alerts_ignore_one_late_response_of_an_idle_model(tmp_path: Path) -> None:
    assert run_tests(tmp_path, world({FIRST: "0x600", FIRSTS: "0x10 1x600"}, [("15m", set()), ("2h", set())])) == ""


@pytest.mark.by_day(one_in=2, seed=76)
@pytest.mark.needs("promtool")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[f"{n}-{each.alert}" for n, each in enumerate(SCENARIOS)])
def test_alert_fires_at_its_time_and_not_before(scenario: Scenario, tmp_path: Path) -> None:
    assert run_tests(tmp_path, played(scenario)) == ""


@pytest.mark.needs("promtool")
def test_grace_alert_fires_when_requests_outlast_a_grace_period_of_five_minutes(tmp_path: Path) -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.series("demo", "").answered(1, 0, 1, since_arrival=500.0)
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    buckets = {each.labels["le"]: each.value for each in samples if LATENCY.startswith(f"{each.name}{{")}
    absent = {f'{LATENCY}"{bound}"}}': "_x600" for bound in ("60", "300")}
    slow = {f'{LATENCY}"{bound}"}}': f"0+{60 * value:.0f}x600" for bound, value in buckets.items()}
    assert run_tests(tmp_path, world({**absent, **slow, GRACE: "300x600"}, [("90m", {"RootstockGraceTooShort"})])) == ""


@pytest.mark.needs("promtool")
def test_scenario_fails_when_its_alert_does_not_fire(tmp_path: Path) -> None:
    quiet = Scenario(SCENARIOS[0].alert, {})
    assert "FAILED" in run_tests(tmp_path, played(quiet))


def test_every_alert_has_a_scenario_and_a_severity_and_a_section_on_the_page() -> None:
    assert {scenario.alert for scenario in SCENARIOS} == {each["alert"] for each in alerts()}
    anchors = {heading.strip().lower() for heading in re.findall(r"^## (.+)$", ALERTS_PAGE.read_text(), re.M)}
    for each in alerts():
        assert each["labels"]["severity"] in ("critical", "warning")
        assert set(each["annotations"]) == {"summary", "description", "impact", "confirm", "runbook", "runbook_url"}
        page, anchor = each["annotations"]["runbook_url"].split("#")
        assert (REPO / page, anchor) == (ALERTS_PAGE, each["alert"].lower())
        assert anchor in anchors
    assert ALERTS_PAGE.read_text() == runpy.run_path(str(CHART / "alerts_page.py"))["written"](ALERTS_PAGE.read_text())


SETTING = re.compile(r"\b(?:worker|gateway)\.settings\.(\w+)")
BARE = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")  # name of a setting, a reason label or a metric
VALUE = re.compile(r"\b(?:[a-z]+[A-Za-z]*\.)+[a-z]\w*\b|\b[a-z]+[A-Z]\w*\b")


def test_runbooks_mention_only_existing_settings_and_values() -> None:
    settings = {*WorkerSettings.model_fields, *GatewaySettings.model_fields}
    values = set(paths(yaml.safe_load((CHART / "values.yaml").read_text())))
    known = {*REFUSALS, *BACKGROUND_ENDS, "sglang_token_usage", "context_len"} | settings
    unknown = []
    for each in alerts():
        text = " ".join(each["annotations"][name] for name in ("summary", "description", "impact", "runbook"))
        text = re.sub(r"\{\{.*?\}\}|docs/\S+", "", text)
        unknown += [name for name in SETTING.findall(text) if name not in settings]
        text = SETTING.sub("", text)
        unknown += [name for name in BARE.findall(text) if name not in known]
        unknown += [name for name in VALUE.findall(text) if name not in values and name != "keys.json"]
    assert not unknown


def paths(values: Any, before: str = "") -> Iterator[str]:
    """Yields the name and the dotted path of each key in the values."""
    for name, value in values.items() if isinstance(values, dict) else ():
        yield name
        yield before + name
        yield from paths(value, f"{before}{name}.")


def test_confirming_commands_of_alerts_have_a_namespace() -> None:
    for each in alerts():
        for command in re.findall(r"kubectl (.+?)(?:;|$)", each["annotations"]["confirm"]):
            assert command.startswith(("-n {{ $labels.namespace }} ", "get podmonitor --all-namespaces")), each["alert"]


def without_links(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rules without runbook links, as the chart renders them without the value runbookUrl."""
    for rule in (rule for group in groups for rule in group["rules"]):
        rule.get("annotations", {}).pop("runbook_url", None)
    return groups


def of_release(rules: str, namespace: str = "serving", name: str = "llm-rootstock") -> str:
    """Returns the rules with their objectives limited to the gateways of one release."""
    rules = rules.replace('namespace=~".*",pod=~".*"', f'namespace="{namespace}",pod=~"{name}-gateway-.+"')
    rules = rules.replace('{release="all"}', f'{{namespace="{namespace}",release="{name}"}}')
    return rules.replace("labels: {release: all}", f"labels: {{release: {name}}}")


@pytest.mark.needs("promtool")
def test_objectives_of_a_release_apply_only_to_this_release(tmp_path: Path) -> None:
    """Two releases have equal failure ratios but different objectives, so only one burns its budget.

    The releases are in one namespace, then in two.
    """
    strict, lenient = {"availability": 0.999}, {"availability": 0.9}
    for name, namespaces in (("one", ("serving", "serving")), ("two", ("serving", "testing"))):
        files, series = [], {}
        for namespace, release, objectives in zip(namespaces, ("strict", "lenient"), (strict, lenient), strict=True):
            values = {"monitoring": {"rules": {"enabled": True, "objectives": objectives}}}
            (found,) = render(values, name=release).kind("PrometheusRule")
            file = tmp_path / f"{name}-{release}.yaml"
            file.write_text(yaml.safe_dump(found["spec"]).replace('namespace="serving"', f'namespace="{namespace}"'))
            files.append(file.name)
            gateway = f'namespace="{namespace}",pod="{release}-rootstock-gateway-0",route="/v1/completions",model="demo"'
            for code, values_ in (("200", "0+980x600"), ("500", "0+20x600")):
                series[f'rootstock_gateway_requests_total{{{gateway},code="{code}"}}'] = values_
        test = {
            "interval": "1m",
            "input_series": [{"series": each, "values": values} for each, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (release) (ALERTS{alertstate="firing",alertname="RootstockErrorBudgetBurnFast"})',
                    "eval_time": "2h",
                    "exp_samples": [{"labels": '{release="strict-rootstock"}', "value": 1}],
                }
            ],
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"rule_files": files, "evaluation_interval": "30s", "tests": [test]}))
        done = promtool("test", "rules", str(file))
        assert done.returncode == 0, done.stdout + done.stderr


def test_chart_installs_exactly_the_rules_file() -> None:
    values = {"monitoring": {"rules": {"enabled": True, "labels": {"release": "prometheus"}}}}
    (rule,) = render(merged(values, {"worker": {"prefill": {"replicas": 1}}})).kind("PrometheusRule")
    assert rule["spec"] == {"groups": without_links(yaml.safe_load(of_release(RULES.read_text()))["groups"])}
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    (usual,) = render(values).kind("PrometheusRule")
    *groups, last = rule["spec"]["groups"]
    assert usual["spec"] == {"groups": groups} and last["name"] == "rootstock.prefill"


OBJECTIVES = {"availability": 0.95, "ttftSeconds": 5, "ttftShare": 0.99}  # availability equals the default of ttftShare


@pytest.mark.needs("promtool")
def test_chart_writes_objectives_and_links_and_replica_limits_into_the_rules(tmp_path: Path) -> None:
    page = "https://wiki.example.com/alerts"
    rules = {"enabled": True, "runbookUrl": page, "objectives": OBJECTIVES}
    certificates = {"enabled": True, "issuerRef": {"name": "a"}, "duration": "72h", "renewBefore": "24h"}
    values = merged(VARIANTS["apart-by-hpa"], {"monitoring": {"rules": rules}, "tls": {"certManager": certificates}})
    (found,) = render(values).kind("PrometheusRule")
    *groups, limits = found["spec"]["groups"]
    by_name = {rule.get("alert") or rule["record"]: rule for group in groups for rule in group["rules"]}
    fast, late = by_name["RootstockErrorBudgetBurnFast"], by_name["RootstockFirstTokenBudgetBurnSlow"]
    assert fast["expr"].count("14.4 * 0.05") == 2 and "95 % succeed" in fast["annotations"]["description"]
    assert late["expr"].count("6 * 0.01 ") + late["expr"].count("6 * 0.01\n") == 2
    assert "after 5 s; the objective is that 99 % come" in late["annotations"]["description"]
    assert by_name["RootstockTlsCertificateExpires"]["expr"].endswith("< 43200")
    assert ',le="5.0"}' in by_name["rootstock:late_requests:ratio_rate6h"]["expr"]
    links = {rule["annotations"]["runbook_url"] for name, rule in by_name.items() if "alert" in rule}
    assert {link.partition("#")[0] for link in links} == {page} and len(links) == len(alerts())
    most = {(each["labels"]["component"], each["labels"].get("model")): each["expr"] for each in limits["rules"]}
    assert most[("rootstock-worker", "demo")] == "vector(6)" and most[("rootstock-prefill", "demo")] == "vector(4)"
    assert most[("rootstock-gateway", None)] == "vector(8)" and len(most) == 5
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(found["spec"]))
    assert promtool("check", "rules", str(file)).returncode == 0


@pytest.mark.needs("prometheus")
def test_pod_monitor_scrapes_only_running_pods(tmp_path: Path) -> None:
    """Runs Prometheus with the PodMonitor's relabelings, and with those of the page for a Prometheus without the operator."""
    (monitor,) = render({"monitoring": {"serviceMonitor": {"enabled": True, "interval": "7s"}}}).kind("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["interval"] == "7s", "the old name of the value must still set the interval"
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    relabel = [{names.get(key, key): value for key, value in each.items()} for each in endpoint["relabelings"]]
    component = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
    targets = [
        {
            "targets": [f"{HOST}:{number}"],
            "labels": {
                "__meta_kubernetes_namespace": "serving",
                "__meta_kubernetes_pod_name": "w",
                "__meta_kubernetes_pod_phase": phase,
                "__meta_kubernetes_pod_label_app_kubernetes_io_name": "rootstock",
                "__meta_kubernetes_pod_container_port_name": "metrics",
                component: "worker",
                "phase": phase,
            },
        }
        for number, phase in enumerate(("Pending", "Running"), 1)
    ]
    (page,) = re.findall(r"^```yaml\n(scrape_configs:.*?)^```", SCALING_PAGE.read_text(), re.M | re.S)
    ((discovered,),) = yaml.safe_load(page).values()
    assert discovered.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    scrapes = [{"job_name": "pods", "relabel_configs": relabel}, discovered]
    with Prometheus(tmp_path, [{**each, "static_configs": targets} for each in scrapes]) as prometheus:
        wait_until(lambda: len(prometheus.query("up")) == 2, 30, "a scrape by each of both jobs")
        found = {labels.pop("job"): labels for labels, value in prometheus.query("up") if value == 0}
    seen = {"phase": "Running", "component": "rootstock-worker"}
    assert {job: {key: labels.get(key) for key in seen} for job, labels in found.items()} == {"pods": seen, "rootstock": seen}
    assert (found["rootstock"]["namespace"], found["rootstock"]["pod"]) == ("serving", "w")


GPU = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="node-a",'
SHOWN = {  # case: labels of the exporter's series, whether the dashboard shows the GPU
    "honoured": ('namespace="serving",pod="worker-0"}', True),
    "renamed": ('exported_namespace="serving",exported_pod="worker-0",namespace="gpu-operator",pod="dcgm-x"}', True),
    "of another namespace": ('exported_namespace="train",exported_pod="worker-0",namespace="serving",pod="dcgm-x"}', False),
    "of nobody": ('namespace="gpu-operator",pod="dcgm-x"}', False),
}


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("name", SHOWN)
def test_gpu_dashboard_shows_gpus_by_pod(name: str, tmp_path: Path) -> None:
    labels, shown = SHOWN[name]
    dashboard = json.loads((CHART / "dashboards" / "gpus.json").read_text())
    query = dashboard["panels"][0]["targets"][0]["expr"].replace("$namespace", "serving")
    samples = [{"labels": '{gpu="0",Hostname="node-a",pod="worker-0"}', "value": 7}] if shown else []
    test = {
        "interval": "1m",
        "input_series": [{"series": GPU + labels, "values": "7x10"}],
        "promql_expr_test": [{"expr": query, "eval_time": "5m", "exp_samples": samples}],
    }
    assert run_tests(tmp_path, test) == ""
