"""Tests the pages gitops.md, nodes.md and cost.md: values by the chart, objects by their schemas, rules by promtool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rootstock_llm.services.local import metrics_reference
from tests.chart.kube_schemas import faults
from tests.chart.promql import selectors
from tests.chart.release import NAME, REPO, Release, merged, refusal, render, render_anew, title
from tests.chart.test_monitoring_rules import promtool
from tests.chart.variants import ALL, values_of

PAGES = REPO / "docs" / "how-to" / "kubernetes"
SCALED = {"Deployment", "StatefulSet", "LeaderWorkerSet"}
NAMED_SECRETS = {"redis": {"passwordSecret": "named-index"}, "state": {"passwordSecret": "named-store"}}
COMPONENTS = ("gateway", "tokenizer", "detokenizer", "worker")
EVERYTHING_SCALED = {name: {"autoscaling": {"enabled": True}} for name in COMPONENTS}
FOREIGN = {"Application", "HelmRelease", "NodePool", "PrometheusRule", "VolumeSnapshot"}


def yaml_blocks(page: str) -> list[Any]:
    """Returns the documents of the page's YAML blocks."""
    found = re.findall(r"^( *)```yaml\n(.*?)^\1```", (PAGES / page).read_text(), re.M | re.S)
    texts = [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def of_kind(page: str, kind: str) -> dict[str, Any]:
    (found,) = [each for each in yaml_blocks(page) if each.get("kind") == kind]
    return dict(found)


def autoscaled(release: Release) -> set[tuple[str, str]]:
    """Returns the kind and name of each object whose replicas an autoscaler sets."""
    targets = [each["spec"]["scaleTargetRef"] for each in release.kind("HorizontalPodAutoscaler", "ScaledObject")]
    return {(target.get("kind", "Deployment"), target["name"]) for target in targets}


def with_replicas(release: Release) -> set[tuple[str, str]]:
    return {(each["kind"], each["metadata"]["name"]) for each in release.kind(*SCALED) if "replicas" in each["spec"]}


GITOPS_VALUES = [
    pytest.param(of_kind("gitops.md", "Application")["spec"]["source"]["helm"]["valuesObject"], id="the page's Application"),
    pytest.param(of_kind("gitops.md", "HelmRelease")["spec"]["values"], id="the page's HelmRelease"),
    *(pytest.param(merged(values_of(name), NAMED_SECRETS), id=name) for name in ALL),
]


@pytest.mark.by_day(one_in=4)
@pytest.mark.parametrize("values", GITOPS_VALUES)
def test_two_renderings_are_equal_when_the_values_name_the_secrets(values: dict[str, Any]) -> None:
    """Argo CD renders without a cluster, so generated passwords would differ in each rendering."""
    first, second = render_anew(values), render_anew(values)
    assert first.objects == second.objects
    assert not autoscaled(first) & with_replicas(first)


@pytest.mark.parametrize("kind", sorted(SCALED))
@pytest.mark.parametrize("engine", ["hpa", "keda"])
def test_rendering_has_no_replicas_when_autoscalers_scale_every_component(kind: str, engine: str) -> None:
    values = merged(merged(EVERYTHING_SCALED, NAMED_SECRETS), {"worker": {"kind": kind}, "autoscaling": {"engine": engine}})
    release = render(values)
    assert len(autoscaled(release)) == len(COMPONENTS)
    assert {name for _, name in with_replicas(release)} == {f"{NAME}-rootstock-redis"}


def test_two_renderings_differ_when_the_values_name_no_secret() -> None:
    """Each rendering then generates new passwords."""
    values = {"state": {"embedded": True}}
    first, second = render_anew(values).objects, render_anew(values).objects
    changed = {title(one) for one, other in zip(first, second, strict=True) if one != other}
    assert changed == {f"Secret/{NAME}-rootstock-{each}" for each in ("redis", "state")}


@pytest.mark.parametrize("page", ["gitops.md", "nodes.md", "cost.md", "backup.md"])
def test_kubernetes_objects_on_the_pages_are_valid(page: str) -> None:
    objects = [each for each in yaml_blocks(page) if "kind" in each]
    assert objects
    assert {title(each): faults(each) for each in objects if each["kind"] not in FOREIGN and faults(each)} == {}


def test_values_on_the_page_about_nodes_are_accepted() -> None:
    values = [each for each in yaml_blocks("nodes.md") if "kind" not in each]
    assert len(values) == 2
    disk = {"worker": {"kind": "StatefulSet", "cacheSize": "20Gi"}}
    assert [refusal(merged(each, disk if "modelCache" in each else {})) for each in values] == ["", ""]


def test_drain_seconds_on_the_page_about_nodes_fit_into_the_notice_of_aws() -> None:
    values = next(each for each in yaml_blocks("nodes.md") if "drainSeconds" in each)
    (worker,) = [each for each in render(values).kind("Deployment") if "-worker-" in each["metadata"]["name"]]
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == values["drainSeconds"] + 18 < 115


def cost_rules() -> list[dict[str, Any]]:
    (group,) = of_kind("cost.md", "PrometheusRule")["spec"]["groups"]
    return list(group["rules"])


def test_cost_rules_use_only_series_that_the_services_export() -> None:
    known = {name for rows in metrics_reference.services().values() for row in rows for name in row.series}
    known |= {rule["record"] for rule in cost_rules()}
    queries = re.findall(r"^```promql\n(.*?)^```", (PAGES / "cost.md").read_text(), re.M | re.S)
    named = {each.partition("{")[0] for text in [*(rule["expr"] for rule in cost_rules()), *queries] for each in selectors(text)}
    assert len(queries) == 2 and len(named) > 4
    assert named <= known


@pytest.mark.needs("promtool")
def test_cost_rules_record_the_price_of_a_million_tokens(tmp_path: Path) -> None:
    """Two workers of model demo cost 2.50 each per hour.

    Each of them reads 500 prompt tokens/s and generates 500 output tokens/s. Together they cost 5 per hour, in which they read
    3.6 million prompt tokens and generate 3.6 million output tokens.
    """
    spec = of_kind("cost.md", "PrometheusRule")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    labels = 'namespace="serving", model_name="demo", engine_type="unified"'
    busy = [f'{{{labels}, pod="{pod}"}}' for pod in "ab"]
    idle = '{namespace="serving", model_name="idle", engine_type="unified", pod="c"}'
    series = {
        **{f"sglang:num_running_reqs{each}": "8x180" for each in busy},
        **{f"sglang:{kind}_tokens_total{each}": "0+30000x180" for kind in ("generation", "prompt") for each in busy},
        f"sglang:num_running_reqs{idle}": "0x180",
        f"sglang:generation_tokens_total{idle}": "0x180",
        f"sglang:prompt_tokens_total{idle}": "0x180",
    }
    expected = {
        "rootstock:gpu_cost:hour": {"demo": 5.0, "idle": 2.5},
        "rootstock:cost_per_million_output_tokens:1h": {"demo": 5 / 3.6},
        "rootstock:cost_per_million_tokens:1h": {"demo": 5 / 7.2},
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"round({record}, 0.0001)",
                "eval_time": "2h",
                "exp_samples": [
                    {"labels": f'{{namespace="serving", model_name="{model}"}}', "value": round(value, 4)}
                    for model, value in prices.items()
                ],
            }
            for record, prices in expected.items()
        ],
    }
    config = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(config))
    done = promtool("test", "rules", str(tmp_path / "tests.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    checked = promtool("check", "rules", str(tmp_path / "rules.yaml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
