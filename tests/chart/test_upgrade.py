"""Tests `helm upgrade`: from the previous version, to the next version, and with changed values."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.immutable import current, differences, fixed_fields, golden, replaced_at_upgrade
from tests.chart.laws import offences
from tests.chart.live_release import rendered_over
from tests.chart.pods import MODEL
from tests.chart.release import CHART, Release, ci_names, ci_values, merged, render, repeatable, title
from tests.chart.variants import VARIANTS, model, values_of

# Changed values by case. Changes of storage classes and of worker.kind are no cases, because they create new objects.
CHANGES: dict[str, dict[str, Any]] = {
    "image tag": {"image": {"tag": "9.9.9"}},
    "registry": {"image": {"registry": "mirror.example.com"}},
    "replicas": {"gateway": {"replicas": 5}, "worker": {"replicas": 4}},
    "settings": {"worker": {"settings": {"max_running_requests": 7}}, "gateway": {"settings": {"retry_after_s": 3}}},
    "drain": {"drainSeconds": 300},
    "labels": {"worker": {"podLabels": {"team": "a"}}, "gateway": {"podLabels": {"team": "a"}}},
    "resources": {"worker": {"resources": {"requests": {"cpu": "9"}}}},
    "log level": {"logLevel": "warning"},
    "discovery": {"gateway": {"discovery": "k8s"}},
    "monitoring": VARIANTS["monitoring"],
    "access": VARIANTS["access"],
}
STARTS = ("defaults", "stateful-set", "prefetch", "leader-worker-set", "two-models")


def release_of(name: str, over: dict[str, Any] | None = None, chart: Path = CHART) -> Release:
    values = values_of(name)
    return render(merged(values, over or {}), chart=chart, upgrade=over is not None)


@pytest.fixture(scope="module")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the chart with a newer chart version and newer images."""
    copy = tmp_path_factory.mktemp("charts") / "rootstock"
    shutil.copytree(CHART, copy)
    about = yaml.safe_load((copy / "Chart.yaml").read_text())
    (copy / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "99.0.0", "appVersion": "99.0.0"}))
    return copy


def test_immutable_fields_equal_those_of_earlier_versions() -> None:
    """If this fails, users of earlier versions cannot upgrade. Give the object a new name instead, and document it."""
    assert differences(golden(), current()) == []


def test_recorded_immutable_fields_cover_every_object() -> None:
    """If this fails, run `python -m tests.chart.immutable`, which adds new objects to immutable.json."""
    old, new = golden(), current()
    assert {name: missing for name in new if (missing := sorted(set(new[name]) - set(old.get(name, {}))))} == {}


def test_comparison_of_immutable_fields_reports_a_changed_selector() -> None:
    new = current()
    new["defaults"]["Deployment/llm-rootstock-gateway"] = {"spec.selector": {"matchLabels": {"app": "other"}}}
    assert len(differences(golden(), new)) == 1


def test_gateway_role_exists_with_every_kind_of_discovery() -> None:
    """The Role exists even if the chosen discovery does not need it.

    A rollback deletes all objects that are not in the older manifest. The pods of the newer release still need the Role, until
    they have completed their streams.
    """
    watching, naming = render({"gateway": {"discovery": "k8s"}}), render({})
    for kind in ("Role", "RoleBinding"):
        assert [title(each) for each in naming.kind(kind) if "test" not in title(each)] == [
            title(each) for each in watching.kind(kind) if "test" not in title(each)
        ]
        assert naming.has(kind, "llm-rootstock-gateway")


def conflicts(before: Release, after: Release) -> list[str]:
    return differences({"": fixed_fields(before)}, {"": fixed_fields(after)})


def test_next_version_changes_no_immutable_field(next_version: Path) -> None:
    assert offences(lambda name, before: conflicts(before, release_of(name, {}, next_version))) == {}


def test_next_version_removes_no_object(next_version: Path) -> None:
    def law(name: str, before: Release) -> Iterator[str]:
        after = {title(each) for each in release_of(name, {}, next_version).objects}
        yield from (title(each) for each in before.objects if each["kind"] != "Job" and title(each) not in after)

    assert offences(law) == {}


@pytest.mark.by_day(one_in=2, seed=16)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_value_changes_no_immutable_field(change: str) -> None:
    assert offences(lambda start, before: conflicts(before, release_of(start, CHANGES[change])), STARTS) == {}


@pytest.mark.parametrize(("start", "kind"), [("defaults", "Deployment"), ("local-disks", "StatefulSet")])
def test_prefill_workers_can_be_added_and_removed(start: str, kind: str) -> None:
    """Upgrades from a release without prefill workers to one with them, and back."""
    before, after = release_of(start), release_of(start, {"worker": {"prefill": {"replicas": 1}}})
    assert conflicts(before, after) == []
    new = {title(each) for each in after.objects} - {title(each) for each in before.objects}
    assert f"{kind}/llm-rootstock-prefill-demo" in new and not {title(each) for each in before.objects} - {
        title(each) for each in after.objects
    }


def test_new_model_leaves_other_models_unchanged() -> None:
    before, after = render({"models": [model("a")]}), render({"models": [model("new"), model("a")]})
    kept = [each for each in before.objects if each["metadata"]["labels"].get(MODEL) == "a"]
    assert {each["kind"] for each in kept} >= {"Deployment", "ConfigMap", "PodDisruptionBudget"}
    for each in kept:
        assert after.get(each["kind"], each["metadata"]["name"]) == each, title(each)


def test_model_volume_is_kept_after_uninstall() -> None:
    claim = render(VARIANTS["shared-cache"]).get("PersistentVolumeClaim", "llm-rootstock-models")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_upgrade_reuses_passwords_and_scaled_replicas() -> None:
    values = merged(VARIANTS["kept"], {"worker": {"autoscaling": {"enabled": True}}})
    installed = render(values)
    worker = installed.get("Deployment", "llm-rootstock-worker-demo")
    secrets = [installed.get("Secret", f"llm-rootstock-{each}") for each in ("redis", "state")]
    first = {title(each): each["data"]["password"] for each in secrets}
    assert len(set(first.values())) == 2 and "replicas" not in worker["spec"]
    scaled = {**worker, "spec": {**worker["spec"], "replicas": 3}}
    for there, kept in (([*secrets, scaled], True), ([], False)):
        again = {title(each): each for each in rendered_over(there, values)}
        assert [again[name]["data"]["password"] == password for name, password in first.items()] == [kept, kept]
        assert again[title(worker)]["spec"].get("replicas") == (3 if kept else None)


@pytest.mark.parametrize(("engine", "least", "replicas"), [("hpa", 2, 2), ("keda", 2, 2), ("keda", 0, 0)])
def test_upgrade_starts_the_least_replicas_of_a_scaled_component_without_pods(engine: str, least: int, replicas: int) -> None:
    """An HPA does not scale a component from 0."""
    stopped = render({"worker": {"replicas": 0}}).get("Deployment", "llm-rootstock-worker-demo")
    scaled = {"worker": {"autoscaling": {"enabled": True, "minReplicas": least}}, "gateway": {"queueTimeoutSeconds": 300}}
    upgraded = {title(each): each for each in rendered_over([stopped], merged(scaled, {"autoscaling": {"engine": engine}}))}
    assert upgraded[title(stopped)]["spec"]["replicas"] == replicas


def test_install_and_upgrade_render_the_same_objects() -> None:
    def law(name: str, first: Release) -> Iterator[str]:
        second = render(ci_values(name), upgrade=True)
        kept, again = ([each for each in repeatable(one.objects) if not replaced_at_upgrade(each)] for one in (first, second))
        yield from (title(each) for each in [*kept, *again] if (each in kept) != (each in again))
        if [title(each) for each in kept] != [title(each) for each in again]:
            yield "the upgrade renders the objects in another order"

    assert offences(law, ci_names()) == {}
