"""Describes the operations of the gateway's own state and pages: health, readiness, metrics, documentation, playground."""

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
_TAKES = {JSON: IntakeReport}
_OF_PAGES = ("content-security-policy", "x-content-type-options", "referrer-policy", "cache-control")
_PLAYGROUND = ApiOperation(
    "get", PLAYGROUND, _TAG, "The playground", {HTML: str}, statuses=(503,), keyed=False, headers=_OF_PAGES
)
_METRICS = ApiOperation("get", METRICS, _TAG, "Prometheus metrics", {TEXT: str}, statuses=(503,), keyed=False)
OPERATIONS = (
    ApiOperation("get", HEALTH, _TAG, "Liveness", {JSON: Health}, keyed=False),
    ApiOperation(
        "get",
        READINESS,
        _TAG,
        "Whether the gateway can serve requests at once, and the missing services",
        _READY,
        others={503: _READY},
        keyed=False,
    ),
    ApiOperation(
        "get", READY, _TAG, "Whether the gateway accepts requests, for load balancers", _TAKES, others={503: _TAKES}, keyed=False
    ),
    ApiOperation("get", DOCS, _TAG, "The API reference as a page", {HTML: str}, statuses=(503,), keyed=False, headers=_OF_PAGES),
    ApiOperation("get", DOCUMENT, _TAG, "The OpenAPI document", {JSON: dict[str, Any]}, statuses=(503,), keyed=False),
)


def operations(metrics: bool, playground: bool) -> tuple[ApiOperation, ...]:
    """Returns the operations. `metrics` and `playground` are True if the gateway serves them on its HTTP port."""
    return (*OPERATIONS, *([_METRICS] if metrics else []), *([_PLAYGROUND] if playground else []))
