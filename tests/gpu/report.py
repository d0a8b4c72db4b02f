"""Writes the report of a GPU check as Markdown and as JSON, with the results that exist so far."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu.image import differing
from tests.gpu.parts import Part
from tests.gpu.results import Result, Source, State, Status
from tests.gpu.targets import Judged, judge

Facts = Mapping[str, Any]
SHOWN_KERNELS = 8
NOT_RUN = "not run yet"
KERNEL_COLUMNS = ("kernel", "share of device time", "calls per step", "mean µs")


def write_report(
    folder: Path, facts: Facts, source: Source, state: State, parts: Sequence[Part], pins: Mapping[str, str]
) -> Path:
    """Writes the two files of the report, whose names have the device and the date. Each file is replaced atomically.

    Args:
        pins: package versions of the worker's image.

    Returns:
        Path of the Markdown file, which has only the results of this device.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    stem = folder / f"report-{slug}-{state.begun}"
    folder.mkdir(parents=True, exist_ok=True)
    results = state.on(facts["device"])
    judged = judge(results, facts["device"])
    _replace(stem.with_name(stem.name + ".json"), json.dumps(_as_json(facts, source, state, judged, pins), indent=1))
    path = stem.with_name(stem.name + ".md")
    _replace(path, "\n".join(_lines(facts, source, state, parts, judged, pins)) + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


def _as_json(facts: Facts, source: Source, state: State, judged: Sequence[Judged], pins: Mapping[str, str]) -> dict[str, Any]:
    return {
        "machine": dict(facts),
        "image": dict(pins),
        "source": asdict(source),
        "date": state.begun,
        "parts": [asdict(result) for result in state.results.values()],
        "targets": [{**asdict(entry), "met": entry.is_met} for entry in judged],
    }


def _lines(
    facts: Facts, source: Source, state: State, parts: Sequence[Part], judged: Sequence[Judged], pins: Mapping[str, str]
) -> list[str]:
    runs = [(part, result) for part in parts for result in _variants(part, state, facts["device"])]
    lines = [f"# GPU check: {facts['device']}, {state.begun}", ""]
    lines += _table(("what", "value", "the image has"), _facts(facts, source, state.begun, pins))
    lines += _other_than_shipped(facts, pins)
    lines += ["", "## Parts", ""]
    lines += _table(("part", "what it does", "result", "seconds", "tests"), [_part(*run, source, facts) for run in runs])
    lines += ["", "## Targets", ""]
    lines += _table(("figure", "target on an H200", "measured", "on", "met"), [_target(entry) for entry in judged])
    lines += _missed(judged)
    for part, result in runs:
        if result is not None and result.outcome:
            lines += _figures(part, result)
    for _, result in runs:
        if result is not None and result.status in (Status.FAILED, Status.TIMED_OUT, Status.PARTLY):
            lines += ["", f"## {result.label}: {result.status}", "", "```", result.tail.replace("```", "'''"), "```"]
    return lines


def _variants(part: Part, state: State, device: str) -> list[Result | None]:
    """Returns the results of a part on a device: first those with the part's present flags, then the others, sorted by flags.

    Returns [None] if the part has no result on this device.
    """
    found = [result for result in state.on(device) if result.part == part.name]
    return [*sorted(found, key=lambda result: (result.flags != part.flags, result.flags))] or [None]


def _facts(facts: Facts, source: Source, date: str, pins: Mapping[str, str]) -> list[tuple[str, str, str]]:
    device = f"{facts['device']}, {facts.get('memory_gib', '?')} GiB, {facts.get('multiprocessors', '?')} multiprocessors"
    rows = [("device", device), ("driver", str(facts.get("driver", "unknown"))), ("python", facts["python"])]
    rows += [("system", facts["system"]), *sorted(facts["versions"].items())]
    rows += [("commit", source.commit), ("files", source.digest), ("date", date)]
    return [(what, value, pins.get(what, "")) for what, value in rows]


def _other_than_shipped(facts: Facts, pins: Mapping[str, str]) -> list[str]:
    others = differing(facts["versions"], pins)
    return ["", f"**Not what ships.** Measured with {'; '.join(others)} as in the worker's image."] if others else []


def _part(part: Part, result: Result | None, source: Source, facts: Facts) -> tuple[str, ...]:
    if result is None:
        return part.label, part.about, NOT_RUN, "", ""
    others = [] if result.source == source else [f"files {result.source.digest}"]
    others += [f"{name} {version}" for name, version in result.versions.items() if facts["versions"].get(name) != version]
    other = f" ({', '.join(others)})" if others else ""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.counts.items()))
    return result.label, part.about, f"{result.status}{other}", f"{result.seconds:.0f}", counts


def _target(entry: Judged) -> tuple[str, ...]:
    unit = f" {entry.target.unit}" if entry.target.unit else ""
    measured = "not measured" if entry.value is None else f"{entry.value:.4g}{unit}"
    met = {None: "", True: "yes", False: "no"}[entry.is_met]
    if entry.value is None:
        return entry.words, f"{entry.target.bound}{unit}", measured, "", ""
    return entry.words, f"{entry.target.bound}{unit}", measured, entry.device, met or "not judged"


def _missed(judged: Sequence[Judged]) -> list[str]:
    lines: list[str] = []
    for entry in judged:
        if entry.is_met is False:
            lines += ["", f"### Missed: {entry.words}", "", f"Next step: {entry.next_step}.", ""]
            rows = [_kernel(*kernel) for kernel in entry.profile[:SHOWN_KERNELS]]
            lines += _table(KERNEL_COLUMNS, rows) if rows else []
    return lines


def _kernel(name: str, share: float, calls: float = 0.0, mean_us: float = 0.0) -> tuple[str, ...]:
    return name, f"{share:.1%}", f"{calls:.4g}", f"{mean_us:.4g}"


def _figures(part: Part, result: Result) -> list[str]:
    outcome = result.outcome
    alone = [f"{name.replace('_', ' ')} {_cell(value)}" for name, value in outcome.items() if isinstance(value, int | float)]
    lines = ["", f"## {result.label}", "", "; ".join([str(outcome.get("how", part.about)), *alone]), "", f"On {result.device}."]
    for table in _tables(outcome):
        lines += ["", f"**{table['title']}**", ""] if table["title"] else [""]
        lines += _table(table["columns"], table["rows"])
    for note in outcome.get("notes", []):
        lines += ["", note]
    return lines


def _tables(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tables of a benchmark's JSON (tests.benchmarks.gpu.journal).

    If the JSON has no `tables`, each of its members that is a list of objects is one table.
    """
    if "tables" in outcome:
        return list(outcome["tables"])
    found = []
    for name, rows in outcome.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            columns = list(rows[0])
            found.append(
                {"title": name, "columns": columns, "rows": [[row.get(column, "") for column in columns] for row in rows]}
            )
    return found


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return [*lines, *(f"| {' | '.join(_cell(value) for value in row)} |" for row in rows)]


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
