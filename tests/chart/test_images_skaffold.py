"""Tests that skaffold.yaml builds the chart's images from existing targets and deploys existing values files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.dockerfile import context_files, read
from tests.chart.pods import pods
from tests.chart.release import merged, render

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "charts/rootstock/values.yaml").read_text())
RELEASE = CONFIG["deploy"]["helm"]["releases"][0]
PROFILES = {profile["name"]: profile for profile in CONFIG["profiles"]}
COMPONENTS = ("gateway", "tokenizer", "detokenizer", "worker")


def patched(profile: str) -> dict[str, Any]:
    """Returns the configuration after a profile has replaced its sections and applied its JSON patches."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
    if not profile:
        return config
    config.update({key: value for key, value in PROFILES[profile].items() if key in ("build", "deploy")})
    for patch in PROFILES[profile].get("patches", []):
        *way, last = patch["path"].strip("/").split("/")
        place: Any = config
        for key in way:
            place = place[int(key)] if isinstance(place, list) else place[key]
        assert patch["op"] != "replace" or last in place, patch
        assert patch["op"] != "add" or last not in place, patch
        place[last] = patch["value"]
    return config


def test_skaffold_has_two_profiles() -> None:
    assert set(PROFILES) == {"cpu", "gpu"}


@pytest.mark.parametrize("profile", ["", "cpu", "gpu"])
def test_skaffold_builds_exactly_the_images_of_the_chart(profile: str) -> None:
    images = [artifact["image"] for artifact in patched(profile)["build"]["artifacts"]]
    assert images == [VALUES[component]["image"]["repository"] for component in COMPONENTS]


@pytest.mark.parametrize("profile", ["", "cpu", "gpu"])
def test_dockerfile_and_build_target_of_each_image_exist(profile: str) -> None:
    for artifact in patched(profile)["build"]["artifacts"]:
        docker = artifact["docker"]
        dockerfile = read(ROOT / artifact["context"] / docker["dockerfile"], docker.get("buildArgs", {}))
        target = docker.get("target", dockerfile.stages[-1].name)
        service = artifact["image"].partition("/")[2]
        entry = [line.words for stage in dockerfile.lineage(target) for line in stage.all("ENTRYPOINT")]
        assert entry == [["python", "-m", f"rootstock_llm.services.{service}"]]


def test_gpu_profile_builds_the_cuda_worker() -> None:
    assert patched("gpu")["build"]["artifacts"][3]["docker"]["target"] == "worker-cuda"


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_values_files_exist_and_fit_the_chart(profile: str) -> None:
    files = patched(profile)["deploy"]["helm"]["releases"][0]["valuesFiles"]
    assert files
    for file in files:
        assert set(yaml.safe_load((ROOT / file).read_text())) <= set(VALUES)
    assert (ROOT / RELEASE["chartPath"] / "Chart.yaml").is_file()


def test_release_uses_only_images_that_skaffold_builds() -> None:
    for key, template in RELEASE["setValueTemplates"].items():
        place: Any = VALUES
        for part in key.split("."):
            assert part in place, key
            place = place[part]
        component = {"tests": "gateway", "modelCache": "tokenizer"}.get(key.partition(".")[0], key.partition(".")[0])
        kind = "REPO" if key.endswith("repository") else "TAG"
        assert template == "{{.IMAGE_%s_rootstock_%s}}" % (kind, component)  # noqa: UP031
    for profile in PROFILES:
        values = dict[str, Any]()
        for file in patched(profile)["deploy"]["helm"]["releases"][0]["valuesFiles"]:
            values = merged(values, yaml.safe_load((ROOT / file).read_text()))
        for key, value in RELEASE["setValues"].items():
            values = merged(values, nested(key.split("."), value))
        for pushed_to, registry in (("registry.example.com/me/", ""), ("", "docker.io/")):  # with and without --default-repo
            named = values
            for key, template in RELEASE["setValueTemplates"].items():
                repository = pushed_to if key.endswith("repository") else ""
                named = merged(named, nested(key.split("."), repository + template.strip("{.}").lower()))
            images = {each["image"] for pod in pods(render(named)) for each in pod.containers()}
            built = {f"{registry}{pushed_to}image_repo_rootstock_{each}:image_tag_rootstock_{each}" for each in COMPONENTS}
            assert {each for each in images if "/valkey/" not in each} == built, (profile, pushed_to)


def nested(way: list[str], value: str) -> dict[str, Any]:
    return {way[0]: nested(way[1:], value) if way[1:] else value}


def test_file_sync_uses_the_image_that_reloads_changed_files() -> None:
    for artifact in patched("cpu")["build"]["artifacts"]:
        assert artifact["docker"]["target"] == "dev", "only the target `dev` reloads changed files"
        service = artifact["image"].partition("/")[2]
        rules = artifact["sync"]["manual"]
        assert [rule["src"] for rule in rules] == [f"services/{service}/**/*.py", "services/shared/**/*.py"]
        assert {rule["dest"] for rule in rules} == {"/app/rootstock_llm"}
        assert context_files(ROOT, [f"services/{service}"])


def test_port_forward_leads_to_the_gateway() -> None:
    forward = CONFIG["portForward"][0]
    assert forward["resourceName"] == f"{RELEASE['name']}-gateway"
    assert (forward["port"], forward["namespace"]) == (VALUES["gateway"]["service"]["port"], RELEASE["namespace"])
