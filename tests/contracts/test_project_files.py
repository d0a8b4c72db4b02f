"""The workflow, the pre-commit hooks and the templates of .github name commands, packages and files that exist."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from tests.docs_commands.chroot import packages

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def hooks() -> list[dict[str, Any]]:
    return [hook for repo in loaded(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]


def steps_of_make_check() -> str:
    recipe = re.search(r"^check:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    return recipe[1].replace("$(PY)", ".venv/bin/python").replace("$(VENV)", ".venv")


def test_ci_workflow_runs_the_tests_with_the_packages_in_the_readme() -> None:
    (job,) = loaded(GITHUB / "workflows" / "ci.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    install = next(command for command in commands if "apt-get install" in command)
    assert set(install.rpartition("--yes ")[2].split()) == set(packages())
    assert commands[-1] == ".ci/run" and os.access(ROOT / ".ci" / "run", os.X_OK)


def test_ci_workflow_has_only_read_access_to_the_repository() -> None:
    workflow = loaded(GITHUB / "workflows" / "ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in workflow["jobs"].values())


def test_pre_commit_hooks_run_the_tools_of_make_check_without_a_download() -> None:
    check = steps_of_make_check()
    assert {repo["repo"] for repo in loaded(ROOT / ".pre-commit-config.yaml")["repos"]} == {"local"}
    for hook in hooks():
        assert hook["language"] == "system", hook["id"]
        command = hook["entry"].partition(" --force-exclude")[0].partition(" tests/")[0]
        assert command in check, f"{hook['id']}: `make check` does not run {command}"


def test_issue_templates_are_forms_with_required_fields() -> None:
    forms = [path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert {path.stem for path in forms} == {"fault", "feature"}
    for path in forms:
        form = loaded(path)
        assert {"name", "description", "body"} <= form.keys(), path.name
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(ids) == len(set(ids)) and any(field.get("validations") == {"required": True} for field in form["body"])


def test_changelog_has_an_unreleased_section_with_only_known_groups() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased = text.partition("## [Unreleased]\n")[2].partition("\n## [")[0]
    groups = re.findall(r"^### (\w+)$", unreleased, re.MULTILINE)
    assert groups and set(groups) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
