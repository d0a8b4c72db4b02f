"""pytest -p tests.as_it_goes: prints each failure with its text when it happens, and each test that took a minute or more.

A run of many hours then shows its findings even if it is interrupted.
"""

from __future__ import annotations

import pytest

LONG_S = 60.0  # a test that took at least this many seconds is printed


class AsItGoes:
    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._print(f"FAILED ({report.when}) {report.nodeid}\n{report.longreprtext}")
        elif report.duration >= LONG_S:
            self._print(f"{report.duration:.0f} s ({report.when}) {report.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._print(f"FAILED (collection) {report.nodeid}\n{report.longreprtext}")

    def _print(self, text: str) -> None:
        self._terminal.ensure_newline()
        self._terminal.write_line(text)
        self._terminal.flush()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin in the main process. A worker process of xdist has no terminal; the main process gets its reports."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(AsItGoes(terminal))
