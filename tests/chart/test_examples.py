"""Tests that the values files of examples/values install without changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.chart.pods import pod, pods
from tests.chart.release import REPO, Values, lint_findings, refusal, render

FOLDER = REPO / "examples" / "values"
FILES = sorted(FOLDER.glob("*.yaml"))
SERVICES = ("gateway", "tokenizer", "detokenizer", "worker")


def values_of(name: str) -> Values:
    return dict(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_example_values_files_are_accepted_without_a_lint_finding(file: Path) -> None:
    values = values_of(file.stem)
    assert refusal(values) == ""
    assert lint_findings(values) == []
    assert f"-f {file.relative_to(REPO)}" in file.read_text(), "the file must have the command that installs it"


def test_values_file_for_a_kind_cluster_runs_one_pod_of_each_service_without_a_gpu() -> None:
    release = render(values_of("kind"))
    assert [pod(release, service).owner["spec"]["replicas"] for service in SERVICES] == [1, 1, 1, 1]
    limits = [container["resources"]["limits"] for each in pods(release) for container in each.containers()]
    assert limits and not any("nvidia.com/gpu" in each for each in limits)


def test_values_for_one_gpu_give_the_worker_a_gpu_and_a_disk() -> None:
    worker = pod(render(values_of("one-gpu")), "worker")
    assert str(worker.container()["resources"]["limits"]["nvidia.com/gpu"]) == "1"
    (claim,) = worker.owner["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "50Gi"


def test_values_for_prefill_and_decode_scale_both_kinds_of_workers() -> None:
    release = render(values_of("prefill-decode"))
    scalers = {each["metadata"]["name"]: each["spec"] for each in release.kind("HorizontalPodAutoscaler")}
    ranges = {name: (spec["minReplicas"], spec["maxReplicas"]) for name, spec in scalers.items()}
    assert [limits for name, limits in ranges.items() if "worker" in name] == [(2, 8)]
    assert [limits for name, limits in ranges.items() if "prefill" in name] == [(1, 4)]
