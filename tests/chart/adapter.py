"""Converts rules of prometheus-adapter to PromQL, with the template fields that the adapter's documentation lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_IF = re.compile(r'<<if eq \(index \.LabelValuesByName "(\w+)"\) "([^"]*)">>(.*?)<<end>>', re.S)


def pods_query(rule: Mapping[str, Any], namespace: str, pods: list[str]) -> str:
    """Returns the query for an HPA's metric of type Pods."""
    overrides = {each["resource"]: label for label, each in rule["resources"]["overrides"].items()}
    matchers = f'{overrides["namespace"]}="{namespace}",{overrides["pod"]}=~"{"|".join(pods)}"'
    return _filled(rule, {"LabelMatchers": matchers, "GroupBy": overrides["pod"]}, {})


def external_query(rule: Mapping[str, Any], namespace: str, selector: Mapping[str, str]) -> str:
    """Returns the query for an HPA's metric of type External."""
    labels = {**selector, "namespace": namespace}
    return _filled(rule, {"LabelMatchers": ",".join(f'{key}="{value}"' for key, value in labels.items())}, labels)


def series_of(rule: Mapping[str, Any]) -> str:
    return str(rule["seriesQuery"]).split("{")[0]


def _filled(rule: Mapping[str, Any], fields: Mapping[str, str], labels: Mapping[str, str]) -> str:
    text = _IF.sub(lambda match: match[3] if labels.get(match[1]) == match[2] else "", rule["metricsQuery"])
    for field, value in {"Series": series_of(rule), **fields}.items():
        text = text.replace(f"<<.{field}>>", value)
    assert "<<" not in text, f"the rule has an unknown template field: {text}"
    return text
