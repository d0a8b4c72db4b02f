"""Configuration of all tests.

- Without a GPU, Triton's interpreter runs the kernels. TRITON_INTERPRET must be set here, because Triton reads this variable when
  it is first imported.
- Long files run first. With several processes, a long file at the end would run while the other processes are idle.
- A skip that tests/skips.py does not list is a failure. The summary at the end counts the listed skips.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.night import select_by_day
from tests.skips import allowed, missing_program

LONG_FILES = {
    "test_admin.py",
    "test_background.py",
    "test_batches.py",
    "test_cache_groups.py",
    "test_cache_units.py",
    "test_cli.py",
    "test_config_file.py",
    "test_connection.py",
    "test_control_executor.py",
    "test_control_live.py",
    "test_control_process.py",
    "test_deterministic.py",
    "test_deterministic_triton.py",
    "test_deterministic_triton_executor.py",
    "test_device_graphs.py",
    "test_device_speculation.py",
    "test_dispatch_hedging.py",
    "test_docs_commands.py",
    "test_draft_controller.py",
    "test_drain.py",
    "test_draws_through_verification.py",
    "test_everything_on.py",
    "test_faults.py",
    "test_fetch.py",
    "test_fleet_cli.py",
    "test_fleet_control.py",
    "test_fleet_policies.py",
    "test_fleet_roles.py",
    "test_foreign_keys.py",
    "test_fuzz.py",
    "test_gated_delta.py",
    "test_generated_schemas.py",
    "test_gitops.py",
    "test_gpu_check.py",
    "test_grammar_jumps.py",
    "test_grammar_pool.py",
    "test_history.py",
    "test_hybrid_speculation.py",
    "test_images_replay.py",
    "test_images_rules.py",
    "test_kv_events.py",
    "test_laws.py",
    "test_long_runs.py",
    "test_make_run.py",
    "test_memory.py",
    "test_model_drafters.py",
    "test_monitoring_queries.py",
    "test_monitoring_rules.py",
    "test_mutual_tls.py",
    "test_network_policies.py",
    "test_objects.py",
    "test_openapi.py",
    "test_parity.py",
    "test_prebuilt.py",
    "test_prefill_decode.py",
    "test_prefill_decode_states.py",
    "test_processes.py",
    "test_random_weights.py",
    "test_responses.py",
    "test_scheduler_parity.py",
    "test_scheduler_properties.py",
    "test_signs_of_life.py",
    "test_simulator_fit.py",
    "test_simulator_grammars.py",
    "test_simulator_policies.py",
    "test_slow_readers.py",
    "test_speculation.py",
    "test_start_ends.py",
    "test_store_damage.py",
    "test_store_deaths.py",
    "test_tiers.py",
    "test_tracing_gateway.py",
    "test_triton_attention.py",
    "test_triton_select_tokens.py",
    "test_upgrade.py",
    "test_values.py",
    "test_weights.py",
}

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Several test processes share a core, so a waiting OpenMP thread must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOGC", "400")  # Helm's engine is written in Go. By default, a quarter of its time is garbage collection.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # tests serve gRPC and start processes; see services/local/__init__.py
gc.disable()  # until collection ends: objects of imports and parameters are never freed, so garbage collection only costs time
settings.register_profile("no test asserts on time", deadline=None)
settings.load_profile("no test asserts on time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select_by_day(config, items)
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    for item in items:
        for mark in item.iter_markers("needs"):
            if reason := missing_program(mark.args):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_unlisted(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_unlisted(report)
    return report


def _refuse_unlisted(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and allowed(_reason(report), report.nodeid) is None:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped for a reason that tests/skips.py does not list: {_reason(report)}"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = Counter(allowed(_reason(report), report.nodeid) for report in terminalreporter.stats.get("skipped", []))
    for skip, count in skipped.most_common():
        if skip is not None:
            terminalreporter.write_line(f"skipped: {count} × {skip.reason} (missing: {skip.missing})")
