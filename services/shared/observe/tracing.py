"""Starts tracing, and loads OpenTelemetry only if tracing is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rootstock_llm.services.shared.observe.spans import Tracing
    from rootstock_llm.services.shared.settings import ServiceSettings


def start_tracing(settings: ServiceSettings, service: str) -> Tracing | None:
    """Returns a Tracing, which the caller must close, or None if the settings name no collector."""
    if not settings.otlp_endpoint:
        return None
    from rootstock_llm.services.shared.observe.spans import tracing_to

    return tracing_to(settings.otlp_endpoint, service, settings.trace_sample_ratio)
