"""Tests of tracing: switched off, switched on, the sampling decision, and an unreachable collector."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from rootstock_llm.services.shared.observe.log_fields import FIELDS, trace_fields
from rootstock_llm.services.shared.observe.tracing import start_tracing
from rootstock_llm.services.shared.settings import ServiceSettings, load
from tests.services.collector import CALLER, SAMPLED, TRACE, UNSAMPLED, Collector

MODULES = (
    "rootstock_llm.services.gateway.__main__",
    "rootstock_llm.services.tokenizer.__main__",
    "rootstock_llm.services.detokenizer.__main__",
    "rootstock_llm.services.worker.__main__",
)


def settings(*argv: str) -> ServiceSettings:
    return load(ServiceSettings, "test", list(argv))


def test_tracer_and_exporter_are_not_imported_when_tracing_is_off() -> None:
    """Other modules of OpenTelemetry are not checked, because other libraries import its API and parts of its metrics."""
    code = f"""
import importlib, sys
OURS = (
    "opentelemetry.sdk.trace", "opentelemetry.exporter", "rootstock_llm.services.shared.observe.spans"
)
for name in {MODULES}:
    importlib.import_module(name)
from rootstock_llm.services.shared.settings import ServiceSettings, load
from rootstock_llm.services.shared.observe.tracing import start_tracing
assert start_tracing(load(ServiceSettings, "test", []), "test") is None
print([name for name in sys.modules if name.startswith(OURS)])
assert start_tracing(load(ServiceSettings, "test", ["--otlp-endpoint", "127.0.0.1:1"]), "test") is not None
assert all(name in sys.modules for name in OURS)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("endpoint", ["collector", "host:port", "ftp://host:1", "http://host:4317/v1/traces"])
def test_invalid_collector_endpoint_is_refused_at_the_start(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--otlp-endpoint", endpoint)
    assert "otlp_endpoint" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://[::1]:4317", "https://collector.observability.svc:4317"])
def test_valid_collector_endpoint_is_accepted(endpoint: str) -> None:
    assert settings("--otlp-endpoint", endpoint).otlp_endpoint == endpoint


@pytest.mark.parametrize(
    ("ratio", "context", "traced"),
    [
        ("1", {}, True),
        ("0", {}, False),
        ("0", {"traceparent": SAMPLED}, True),
        ("1", {"traceparent": UNSAMPLED}, False),
        ("1", {"traceparent": "00-nonsense-01"}, True),
    ],
    ids=["all", "none", "client samples", "client does not sample", "invalid context"],
)
def test_sampling_flag_of_the_client_overrides_the_sample_ratio(ratio: str, context: dict[str, str], traced: bool) -> None:
    tracing = start_tracing(settings("--otlp-endpoint", "127.0.0.1:1", "--trace-sample-ratio", ratio), "test")
    assert tracing is not None
    span = tracing.begin("request", context)
    assert (span is not None) is traced
    if span is not None:
        assert (span.trace_id == TRACE) is (context.get("traceparent") == SAMPLED)
        assert trace_fields(span.traceparent) == {"trace_id": span.trace_id}


@pytest.mark.parametrize("context", ["", "nonsense", UNSAMPLED, f"00-{'0' * 32}-{CALLER}-01"])
def test_child_span_is_made_only_for_a_sampled_trace_context(context: str) -> None:
    tracing = start_tracing(settings("--otlp-endpoint", "127.0.0.1:1"), "test")
    assert tracing is not None
    assert tracing.under("call", context) is None
    assert tracing.under("call", SAMPLED) is not None


def test_exported_spans_have_a_parent_and_the_service_name() -> None:
    with Collector() as collector:
        tracing = start_tracing(settings("--otlp-endpoint", collector.address), "test")
        assert tracing is not None
        outer = tracing.begin("outer", {"traceparent": SAMPLED, "tracestate": "vendor=1"}, {"a": 1})
        assert outer is not None
        inner = outer.child("inner", start_ns=time.time_ns())
        inner.event("something", {"n": 2})
        inner.fail("broken", "why")
        inner.end()
        inner.set({"late": True})
        outer.end()
        outer.end()
        tracing.close()
        (seen_outer,), (seen_inner,) = collector.named("outer"), collector.named("inner")
    assert (seen_outer.service, seen_outer.trace, seen_outer.parent) == ("rootstock-test", TRACE, CALLER)
    assert seen_outer.span.trace_state == "vendor=1"
    assert (seen_inner.trace, seen_inner.parent) == (TRACE, seen_outer.id)
    assert seen_inner.attributes == {"error.type": "broken"}
    assert seen_inner.events == ["something"]
    assert (seen_inner.failed, seen_outer.failed) == (True, False)


def test_unreachable_collector_causes_at_most_two_log_lines_and_no_delay(caplog: pytest.LogCaptureFixture) -> None:
    tracing = start_tracing(settings("--otlp-endpoint", "127.0.0.1:1"), "test")
    assert tracing is not None

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name.split(".")[0] in ("rootstock_llm", "opentelemetry")]

    with caplog.at_level(logging.INFO):
        for _ in range(3):
            span = tracing.begin("request", {})
            assert span is not None
            span.end()
        begun = time.monotonic()
        tracing.close()
        assert time.monotonic() - begun < 10, "the process does not wait for the collector when it ends"
    assert lines()
    assert all(record.name.startswith("rootstock_llm.services.shared.observe.span") for record in lines())
    assert len(lines()) <= 2, "one line when spans are lost, one at the end"


def test_loss_and_recovery_of_exports_are_one_log_line_each(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from rootstock_llm.services.shared.observe.spans import CollectorExporter

    sent, failed = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    results = [sent, *[failed] * 5, sent, sent]

    class Scripted(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            return results.pop(0)

    exporter = CollectorExporter(Scripted(), "there")
    with caplog.at_level(logging.INFO):
        for _ in range(8):
            exporter.export([None, None])  # type: ignore[list-item]
    said = [(record.levelname, getattr(record, FIELDS)) for record in caplog.records]
    assert said == [("WARNING", {"collector": "there"}), ("INFO", {"collector": "there", "lost": 10})]


@pytest.mark.parametrize(
    "make", [lambda: trace_fields(""), lambda: trace_fields("x" * 10_000), lambda: trace_fields(SAMPLED.upper())]
)
def test_trace_fields_are_empty_without_a_valid_trace_context(make: Callable[[], dict[str, str]]) -> None:
    assert make() == {}
