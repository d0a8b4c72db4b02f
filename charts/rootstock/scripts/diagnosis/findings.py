"""Defines the result of a check and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, WAITING, UNKNOWN, BROKEN = "ok", "waiting", "unknown", "BROKEN"


@dataclass(frozen=True)
class Finding:
    """A result of a check."""

    check: str  # name of the check
    state: str  # OK; WAITING: may become OK without an action; UNKNOWN: could not be checked; BROKEN
    what: str  # a sentence about the state
    mend: str = ""  # the remedy; "" if the state is OK


def ok(check: str, what: str) -> Finding:
    return Finding(check, OK, what)


def broken(check: str, what: str, mend: str) -> Finding:
    return Finding(check, BROKEN, what, mend)


def waiting(check: str, what: str, mend: str) -> Finding:
    return Finding(check, WAITING, what, mend)


def unknown(check: str, what: str, mend: str) -> Finding:
    return Finding(check, UNKNOWN, what, mend)


def report(title: str, findings: Sequence[Finding]) -> str:
    """Returns the report: a line per finding and a line per remedy. BROKEN findings come last, where readers of a log look first."""
    order = (OK, UNKNOWN, WAITING, BROKEN)
    shown = sorted(findings, key=lambda each: order.index(each.state))
    lines = [title, ""]
    for each in shown:
        lines.append(f"{each.state:8}  {each.check:9}  {each.what}")
        if each.mend:
            lines.append(f"{'':8}  {'':9}  mend: {each.mend}")
    counts = {state: sum(each.state == state for each in findings) for state in order}
    summary = ", ".join(f"{count} {state.lower()}" for state, count in counts.items() if count)
    return "\n".join([*lines, "", f"{len({each.check for each in findings})} checks: {summary}", ""])
