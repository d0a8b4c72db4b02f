"""Tests the Kubernetes objects on the page load-balancers.md: they are valid and target the chart's objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.shared.limits import MAX_BODY_BYTES, MAX_FILE_BYTES
from tests.chart.kube_schemas import faults
from tests.chart.release import CHART, NAMESPACE, REPO, refusal, render

PAGE = REPO / "docs" / "how-to" / "kubernetes" / "load-balancers.md"
ROUTED = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway", "namespace": "infra"}]}}


def documents() -> Iterator[dict[str, Any]]:
    for block in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        yield from yaml.safe_load_all(block)


def objects() -> list[dict[str, Any]]:
    return [each for each in documents() if "kind" in each]


def test_objects_on_the_load_balancer_page_are_valid() -> None:
    assert len(objects()) == 4
    assert {each["kind"]: found for each in objects() if (found := faults(each))} == {}


def test_values_on_the_load_balancer_page_are_accepted() -> None:
    values = [each for each in documents() if "kind" not in each]
    assert values and [why for each in values if (why := refusal(each))] == []


def test_policies_on_the_page_refer_to_objects_of_the_chart() -> None:
    release, outside = render(ROUTED), {("Gateway", "gateway")}
    for each in objects():
        targets = each["spec"].get("targetRefs") or [each["spec"]["targetRef"]]
        for target in targets:
            there = release.has(target["kind"], target["name"]) and each["metadata"]["namespace"] == NAMESPACE
            assert there or (target["kind"], target["name"]) in outside, target


def test_balancer_template_has_the_gateways_defaults() -> None:
    """The chart's template repeats the gateway's defaults, because it uses them for settings without a value."""
    template = (CHART / "templates" / "gateway" / "_balancer.tpl").read_text()
    assert f"default {MAX_BODY_BYTES} $settings.max_body_bytes" in template
    assert f"default {MAX_FILE_BYTES} $settings.max_file_bytes" in template
    fields = GatewaySettings.model_fields
    assert [fields[name].default for name in ("max_body_bytes", "max_file_bytes")] == [MAX_BODY_BYTES, MAX_FILE_BYTES]
    assert f"default {fields['request_timeout_s'].default:.0f} .Values.gateway.settings.request_timeout_s" in template
