"""Describes the operations that are not part of a model API: health, readiness, metrics, API reference and playground."""

from __future__ import annotations

from typing import Any

from rootstock_llm.services.gateway.api.document.answer import Health, IntakeReport, ReadinessReport
from rootstock_llm.services.gateway.api.document.operation import HTML, JSON, TEXT, ApiOperation

PLAYGROUND = "/"
HEALTH = "/health"
READINESS = "/readiness"
READY = "/ready"
METRICS = "/metrics"
DOCS = "/docs"
DOCUMENT = "/openapi.json"

_TAG = "Operations"
_READY = {JSON: ReadinessReport}
_INTAKE = {JSON: IntakeReport}
_OF_PAGES = ("content-security-policy", "x-content-type-options", "referrer-policy", "cache-control")
_PLAYGROUND = ApiOperation(
    "get", PLAYGROUND, _TAG, "The playground", {HTML: str}, statuses=(503,), requires_key=False, headers=_OF_PAGES
)
_METRICS = ApiOperation("get", METRICS, _TAG, "Prometheus metrics", {TEXT: str}, statuses=(503,), requires_key=False)
OPERATIONS = (
    ApiOperation("get", HEALTH, _TAG, "Liveness", {JSON: Health}, requires_key=False),
    ApiOperation(
        "get",
        READINESS,
        _TAG,
        "Whether the gateway can serve requests at once, and the missing services",
        _READY,
        other_contents={503: _READY},
        requires_key=False,
    ),
    ApiOperation(
        "get",
        READY,
        _TAG,
        "Whether the gateway accepts requests, for load balancers",
        _INTAKE,
        other_contents={503: _INTAKE},
        requires_key=False,
    ),
    ApiOperation(
        "get", DOCS, _TAG, "The API reference as a page", {HTML: str}, statuses=(503,), requires_key=False, headers=_OF_PAGES
    ),
    ApiOperation("get", DOCUMENT, _TAG, "The OpenAPI document", {JSON: dict[str, Any]}, statuses=(503,), requires_key=False),
)


def operations(metrics: bool, playground: bool) -> tuple[ApiOperation, ...]:
    """Returns the operations.

    Args:
        metrics: Whether the HTTP port serves /metrics.
        playground: Whether the HTTP port serves the playground.
    """
    return (*OPERATIONS, *([_METRICS] if metrics else []), *([_PLAYGROUND] if playground else []))
