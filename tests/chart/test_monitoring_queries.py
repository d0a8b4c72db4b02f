"""Tests every PromQL expression of the chart with a Prometheus that scrapes a running system under a small load."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import yaml

from rootstock_llm.services.local import metrics_reference
from rootstock_llm.services.local.ports import HOST
from tests.chart import adapter
from tests.chart.prometheus import Prometheus
from tests.chart.promql import selectors
from tests.chart.release import BACKLOG, CHART, NAME, NAMESPACE, merged, refusal, render
from tests.chart.test_monitoring_rules import RULES, alerts, rules
from tests.e2e.system import System, wait_until

pytestmark = pytest.mark.needs("prometheus", "promtool")

MODEL = "demo"
HPA = {"worker": {"autoscaling": {"enabled": True}}, "gateway": {"autoscaling": {"enabled": True}}}
APART = {"worker": {"prefill": {"autoscaling": {"enabled": True}}}}
KEDA = {**HPA, "autoscaling": {"engine": "keda"}, "gateway": {"autoscaling": {"enabled": True}, "queueTimeoutSeconds": 300}}

# Selectors that may find no series in this test, with the reason.
NOT_WHILE_WELL = {
    'rootstock_gateway_requests_total{pod=~".*",code=~"5..",route!~"/health.*|/readiness|/ready|/metrics|other"}': "none failed",
    'kubelet_volume_stats_used_bytes{persistentvolumeclaim=~"data-.*state-0"}': "there is no kubelet",
    "kubelet_volume_stats_capacity_bytes": "there is no kubelet",
    'kube_pod_status_phase{phase="Pending"}': "there is no kube-state-metrics",
    "rootstock:max_replicas": "the chart's rules record it only for autoscaled workers",
    "rootstock_tls_files_valid": "these services speak in the clear",
    "rootstock_tls_certificate_not_after_seconds": "these services speak in the clear",
    "rootstock_gateway_tls_failures_total": "these services speak in the clear",
}
SGLANG_DASHBOARD = (
    "histogram_quantile(0.99, sum by (le) (rate(sglang:e2e_request_latency_seconds_bucket[1m])))",
    "avg(rate(sglang:e2e_request_latency_seconds_sum[1m]) / rate(sglang:e2e_request_latency_seconds_count[1m]))",
    'sum(increase(sglang:e2e_request_latency_seconds_bucket{model_name=~"demo"}[1m])) by (le)',
    "histogram_quantile(0.9, sum by (le) (rate(sglang:time_to_first_token_seconds_bucket[1m])))",
    "avg(rate(sglang:time_to_first_token_seconds_sum[1m]) / rate(sglang:time_to_first_token_seconds_count[1m]))",
    'sum by(le) (increase(sglang:time_to_first_token_seconds_bucket{model_name=~"demo"}[1m]))',
    "sglang:num_running_reqs",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
    "sglang:num_queue_reqs",
)


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))}


def panel_queries(others: tuple[str, ...] = ("gpus",)) -> list[tuple[str, str, str]]:
    """Returns (dashboard, panel, PromQL with Grafana's variables filled in) of each query.

    Args:
        others: dashboards to omit, because they show series of other exporters.
    """
    out = []
    for name, dashboard in dashboards().items():
        if name in others:
            continue
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$namespace", NAMESPACE).replace("$model", MODEL)
                out.append((name, panel["title"], query.replace("$__rate_interval", "5m")))
    return out


def keda_queries(values: dict[str, Any] = KEDA) -> dict[str, str]:
    """Returns the queries of KEDA's triggers by name."""
    triggers = [trigger for each in render(values).kind("ScaledObject") for trigger in each["spec"]["triggers"]]
    return {each["name"]: each["metadata"]["query"] for each in triggers if each["type"] == "prometheus"}


def adapter_rules(over: dict[str, Any] | None = None) -> dict[str, list[dict[str, Any]]]:
    release = render(merged({"autoscaling": {"adapterRules": True}}, over or {}))
    (found,) = [each for each in release.kind("ConfigMap") if each["metadata"]["name"].endswith("-adapter-rules")]
    return dict(yaml.safe_load(found["data"]["config.yaml"]))


def adapter_config_map(rules: Any, name: str = NAME) -> dict[str, Any]:
    """Returns the ConfigMap with the adapter's configuration."""
    release = render({"autoscaling": {"adapterRules": rules}}, name=name)
    (found,) = [each for each in release.kind("ConfigMap") if "rules:" in each["data"].get("config.yaml", "")]
    return found


def hpa_metrics() -> list[dict[str, Any]]:
    return [metric for each in render(HPA).kind("HorizontalPodAutoscaler") for metric in each["spec"]["metrics"]]


@dataclass
class Watched:
    system: System
    prometheus: Prometheus
    pods: dict[str, list[str]]  # names of pods by component


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("prometheus")
    quick = folder / "rules.yaml"
    quick.write_text(re.sub(r"interval: \d+s", "interval: 2s", RULES.read_text()))
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "alice", "key": KEY}]}))
    env = {"ROOTSTOCK_API_KEYS_FILE": str(keys)}
    with System(tmp_path_factory.mktemp("watched"), env, workers=2, max_total_tokens=4096, log_level="info") as system:
        scrapes, pods = [], dict[str, list[str]]()
        for name, part in system.parts.items():
            if part.metrics_url:
                component = name.split("-")[0]
                pods.setdefault(component, []).append(f"{name}-pod")
                labels = {"namespace": NAMESPACE, "pod": f"{name}-pod", "component": f"rootstock-{component}"}
                target = part.metrics_url.removeprefix("http://").removesuffix("/metrics")
                scrapes.append({"job_name": name, "static_configs": [{"targets": [target], "labels": labels}]})
        limit_store(system)
        with Prometheus(folder, scrapes, [quick], every="2s") as prometheus:
            wait_until(lambda: len(prometheus.query("up == 1")) == len(scrapes), 60, "the first scrape of all targets")
            until = time.monotonic() + LOAD_S
            while not all(prometheus.query(each) for each in WANTED):
                assert time.monotonic() < until, [each for each in WANTED if not prometheus.query(each)]
                load(system)
            yield Watched(system, prometheus, pods)


def limit_store(system: System) -> None:
    """Sets the state store's memory limit, as the chart does."""
    argv = system.parts["gateway"].command.argv
    redis.Redis.from_url(argv[argv.index("--state-redis-url") + 1]).config_set("maxmemory", str(1 << 30))


KEY = "rsk-alice"
LOAD_S = 120.0
WANTED = (  # expressions that have results only after two scrapes, or after one or two evaluations of rules
    "rootstock_worker_cold_start_seconds",
    "rate(sglang:e2e_request_latency_seconds_count[1m]) > 0",
    "rate(rootstock_gateway_inter_token_latency_seconds_count[1m]) > 0",
    "rate(rootstock_tokenizer_requests_total[1m]) > 0",
    "rate(rootstock_gateway_key_requests_total[1m]) > 0",
    "rootstock:arriving_requests:rate2m > 0",
    "rootstock:hit_rate:ratio_rate30m",
    "rate(rootstock_gateway_aborts_total[1m]) > 0",
    "rootstock:failed_requests:ratio_rate6h >= 0",
)


def load(system: System) -> None:
    """Sends requests of two conversations, which may go to one worker.

    Also disconnects one request early, and sends one for an unknown model.
    """

    def ask(number: int) -> int:
        prompt = f"Conversation {number % 2}: " + f"{number % 2} went to the market and bought a gateway. " * 40
        return system.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 8}, key=KEY)[0]

    disconnect_early(system)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {200}
    time.sleep(1.0)  # half a scrape interval; more requests would not change the result
    assert system.post("/v1/completions", {"model": "nobody", "prompt": "x"}, key=KEY)[0] == 404


def disconnect_early(system: System) -> None:
    """Sends a request and closes the connection after the first byte of the response."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection((HOST, system.port), timeout=5) as client:
        fields = f"host: x\r\nx-api-key: {KEY}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n"
        client.sendall(head.encode() + body)
        client.recv(1)


def plain(selector: str) -> str:
    return re.sub(rf'namespace=~?"({NAMESPACE}|\.\*)",', "", selector)


def test_expressions_use_only_existing_series(watched: Watched) -> None:
    expressions = [query for *_, query in panel_queries()] + [rule["expr"] for rule in rules()]
    expressions += [*keda_queries().values(), *adapter_queries(watched).values(), *SGLANG_DASHBOARD]
    wanted = {selector for expression in expressions for selector in selectors(expression)}
    assert len(wanted) > 100
    missing = sorted(selector for selector in wanted if not watched.prometheus.query(selector))
    unexplained = [each for each in missing if plain(each) not in NOT_WHILE_WELL]
    assert unexplained == []


def test_every_dashboard_panel_shows_data(watched: Watched) -> None:
    empty = [(name, title, query) for name, title, query in panel_queries() if not watched.prometheus.query(query)]
    assert empty == []


def test_recording_rules_give_series_and_no_alert_fires(watched: Watched) -> None:
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    assert [name for name in recorded if not watched.prometheus.query(name)] == []
    assert watched.prometheus.query('ALERTS{alertstate="firing"}') == []
    for rule in alerts():
        watched.prometheus.query(rule["expr"])


def test_keda_queries_return_one_number_or_nothing(watched: Watched) -> None:
    queries = keda_queries()
    assert set(queries) == {"backlog", "running", "token-usage", "streams"}
    for query in queries.values():
        assert [labels for labels, _ in watched.prometheus.query(query)] == [{}]
        for other in (query.replace(f'"{NAMESPACE}"', '"nowhere"'), query.replace(f'"{MODEL}"', '"nobody"')):
            if other != query:
                assert watched.prometheus.query(other) == [], "without series, a query returns nothing instead of 0"


def with_present_role(query: str) -> str:
    """Replaces the query's role, prefill or decode, by `unified`, because the running workers have this role."""
    return re.sub(r'engine_type="(prefill|decode)"', 'engine_type="unified"', query)


def test_keda_query_selects_one_role_when_prefill_and_decode_workers_are_separate(watched: Watched) -> None:
    queries, usual = keda_queries(merged(KEDA, APART)), keda_queries()
    assert set(queries) == {*usual, "waiting-tokens", "busy"}
    roles = {name: set(re.findall(r'engine_type="(\w+)"', query)) for name, query in queries.items()}
    assert roles == {
        **{name: {"decode"} for name in ("backlog", "running", "token-usage")},
        **{name: {"prefill"} for name in ("waiting-tokens", "busy")},
        "streams": set(),
    }
    now = time.time()
    for name, query in queries.items():
        ((labels, value),) = watched.prometheus.query(with_present_role(query), at=now)
        assert labels == {}
        if name in usual:  # all running workers have one role, so the result equals that of the query without a role
            assert [(labels, pytest.approx(value))] == watched.prometheus.query(usual[name], at=now), name
    for name in ("waiting-tokens", "busy"):
        assert watched.prometheus.query(queries[name]) == [], "without series of prefill workers, the query returns nothing"


def test_keda_queries_are_empty_when_worker_series_are_missing(watched: Watched) -> None:
    """A query returns nothing if gateways report workers that Prometheus does not scrape, and 0 only if there are no workers."""
    queries = keda_queries()
    for name in ("running", "token-usage"):
        unseen = queries[name].replace("(sglang:", "(nobody_scrapes:")
        assert unseen != queries[name] and watched.prometheus.query(unseen) == []
        without = unseen.replace("rootstock_gateway_workers{", "0 * rootstock_gateway_workers{")
        assert [value for _, value in watched.prometheus.query(without)] == [0]


def adapter_queries(watched: Watched) -> dict[str, str]:
    """Returns the adapter's queries by the HPA's metric name."""
    found, out = adapter_rules(), {}
    for rule in found["rules"]:
        component = "gateway" if "gateway" in rule["name"]["as"] else "worker"
        out[rule["name"]["as"]] = adapter.pods_query(rule, NAMESPACE, watched.pods[component])
    for rule in found["externalRules"]:
        out[rule["name"]["as"]] = adapter.external_query(rule, NAMESPACE, {"model": MODEL})
    return out


def test_prometheus_adapter_serves_every_metric_of_the_hpa(watched: Watched) -> None:
    queries = adapter_queries(watched)
    for metric in hpa_metrics():
        if metric["type"] == "Pods":
            name = metric["pods"]["metric"]["name"]
            component = "gateway" if "gateway" in name else "worker"
            answers = watched.prometheus.query(queries[name])
            assert sorted(labels["pod"] for labels, _ in answers) == sorted(watched.pods[component]), name
        elif metric["type"] == "External":
            asked = metric["external"]["metric"]
            (rule,) = [rule for rule in adapter_rules()["externalRules"] if rule["name"]["as"] == asked["name"]]
            query = adapter.external_query(rule, NAMESPACE, asked["selector"]["matchLabels"])
            assert len(watched.prometheus.query(query)) == 1
    for rules_of in adapter_rules().values():
        for rule in rules_of:
            assert watched.prometheus.query(rule["seriesQuery"]), rule["seriesQuery"]


def test_prometheus_adapter_serves_metrics_of_prefill_workers(watched: Watched) -> None:
    rules = {rule["name"]["as"]: rule for rule in adapter_rules(APART)["rules"]}
    release = render(merged(HPA, APART))
    asked = release.get("HorizontalPodAutoscaler", "llm-rootstock-prefill-demo")["spec"]["metrics"]
    assert len(asked) == 2
    for metric in asked:
        rule = rules[metric["pods"]["metric"]["name"]]
        answers = watched.prometheus.query(adapter.pods_query(rule, NAMESPACE, watched.pods["worker"]))
        assert sorted(labels["pod"] for labels, _ in answers) == sorted(watched.pods["worker"])
        assert watched.prometheus.query(rule["seriesQuery"]), rule["seriesQuery"]
    (backlog,) = [rule for rule in adapter_rules(APART)["externalRules"] if rule["name"]["as"] == BACKLOG]
    query = adapter.external_query(backlog, NAMESPACE, {"model": MODEL})
    assert 'engine_type="decode"' in query and len(watched.prometheus.query(with_present_role(query))) == 1


@pytest.mark.parametrize(
    ("rules", "namespace", "name"),
    [
        pytest.param(True, None, "llm-rootstock-adapter-rules", id="adapterRules is a boolean"),
        pytest.param({"enabled": True}, None, "llm-rootstock-adapter-rules", id="no namespace"),
        pytest.param({"enabled": True, "namespace": NAMESPACE}, NAMESPACE, "llm-rootstock-adapter-rules", id="the release's"),
        pytest.param(
            {"enabled": True, "namespace": "monitoring"}, "monitoring", "serving.llm-rootstock-adapter-rules", id="the adapter's"
        ),
        pytest.param({"enabled": True, "namespace": "monitoring", "name": "rules"}, "monitoring", "rules", id="a name"),
    ],
)
def test_object_of_the_adapter_rules_has_the_configured_namespace_and_name(rules: Any, namespace: str | None, name: str) -> None:
    metadata = adapter_config_map(rules)["metadata"]
    assert (metadata.get("namespace"), metadata["name"]) == (namespace, name)


@pytest.mark.parametrize("rules", [False, {"enabled": False}, {"enabled": False, "namespace": "monitoring"}, None, {}])
def test_chart_omits_adapter_rules_when_disabled(rules: Any) -> None:
    assert not [
        each for each in render({"autoscaling": {"adapterRules": rules}}).kind("ConfigMap") if "config.yaml" in each["data"]
    ]


def test_adapter_rules_of_two_releases_in_one_namespace_have_different_names() -> None:
    into = {"enabled": True, "namespace": "monitoring"}
    assert adapter_config_map(into, "one")["metadata"]["name"] != adapter_config_map(into, "two")["metadata"]["name"]


def test_adapter_rules_have_only_keys_of_the_adapters_configuration() -> None:
    """prometheus-adapter does not start with an unknown key."""
    (text,) = adapter_config_map({"enabled": True, "namespace": "monitoring"})["data"].values()
    config = yaml.safe_load(text)
    assert config.keys() == {"rules", "externalRules"}
    for rule in (*config["rules"], *config["externalRules"]):
        assert rule.keys() == {"seriesQuery", "resources", "name", "metricsQuery"}
        assert rule["resources"].keys() == {"overrides"} and rule["name"].keys() == {"as"}


@pytest.mark.parametrize(
    "rules", ["yes", {"enabled": "yes"}, {"namespace": "Monitoring"}, {"namespace": "a.b"}, {"namspace": "monitoring"}]
)
def test_schema_refuses_invalid_values_of_adapter_rules(rules: Any) -> None:
    assert "adapterRules" in refusal({"autoscaling": {"adapterRules": rules}})


def test_sglang_dashboard_queries_return_data(watched: Watched) -> None:
    assert [query for query in SGLANG_DASHBOARD if not watched.prometheus.query(query)] == []
    assert MODEL in watched.prometheus.label_values("model_name")


@pytest.mark.parametrize("name", ["gateway", "tokenizer", "detokenizer", "worker-0"])
def test_promtool_accepts_the_services_metrics(watched: Watched, name: str) -> None:
    """Some metrics have names that SGLang defines. promtool may object only to these."""
    with urllib.request.urlopen(watched.system.parts[name].metrics_url, timeout=5) as response:
        text = response.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30, check=False)
    findings = [line for line in (done.stdout + done.stderr).decode().splitlines() if line.strip()]
    assert [line for line in findings if not line.startswith("sglang:")] == []
    of_sglang = {line.split(" ", 1)[1] for line in findings if line.startswith("sglang:")}
    # SGLang exports distributions over routing keys as gauges with the names of a histogram's series.
    assert of_sglang <= {
        "metric names should not contain ':'",
        "metric name should not include type 'histogram'",
        'non-histogram and non-summary metrics should not have "_count" suffix',
        'non-histogram metrics should not have "le" label',
    }


def test_query_returns_nothing_for_an_unknown_series(watched: Watched) -> None:
    assert selectors('sum by (x) (rate(a:b_total{c="d{e}"}[5m])) / on (x) f{g!=""} > 2 or vector(1)') == {
        'a:b_total{c="d{e}"}',
        'f{g!=""}',
    }
    assert watched.prometheus.query("rootstock_gateway_requests_totals") == []


def test_metrics_page_has_every_emitted_series(watched: Watched) -> None:
    known = {name for rows in metrics_reference.services().values() for row in rows for name in row.series}
    own = re.compile(r"sglang:|rootstock_(gateway|tokenizer|detokenizer|worker)_")
    emitted = {name for name in watched.prometheus.label_values("__name__") if own.match(name) and not name.endswith("_created")}
    assert len(emitted) > 100
    assert emitted - known == set()


def test_every_panel_has_a_unit_and_a_description_and_a_namespace_variable() -> None:
    for name, dashboard in dashboards().items():
        assert [each["name"] for each in dashboard["templating"]["list"]] == ["datasource", "namespace", "model"]
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
        for panel in dashboard["panels"]:
            assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], (name, panel["title"])
            assert all("$namespace" in target["expr"] for target in panel["targets"]), (name, panel["title"])
            assert panel["datasource"]["uid"] == "${datasource}"


def test_chart_installs_dashboards_and_scrapes_every_component() -> None:
    release = render(
        {
            "monitoring": {
                "dashboards": {"enabled": True, "dcgm": True},
                "podMonitor": {"enabled": True, "labels": {"release": "p"}},
            },
            "worker": {"prefill": {"replicas": 1}},
        }
    )
    installed = {
        key.removeprefix("rootstock-").removesuffix(".json"): json.loads(text)
        for each in release.kind("ConfigMap")
        if "-dashboard-" in each["metadata"]["name"]
        for key, text in each["data"].items()
    }
    assert installed == dashboards()
    (monitor,) = release.kind("PodMonitor")
    ports = {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]}
    for each in release.kind("Deployment", "StatefulSet"):
        component = each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        named = {
            port.get("name")
            for container in each["spec"]["template"]["spec"]["containers"]
            for port in container.get("ports", ())
        }
        if component != "redis":
            assert ports <= named, component
