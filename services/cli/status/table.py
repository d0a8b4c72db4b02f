"""The state of a gateway as lines of text that fit the width of a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap

from rootstock_llm.services.cli.shared.terminal import Terminal, harmless
from rootstock_llm.services.cli.status.gateway_state import GatewayState, Worker
from rootstock_llm.services.cli.status.trouble import troubles

GAP = "  "
LEAST_NAME = 10  # smallest width of the column with the workers' names, in characters
COLOURS = {"ready": "green", "lost": "red", "gone": "red", "hung": "red"}  # by worker state; other states are yellow


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table to the right of the worker's name."""

    title: str
    value: Callable[[Worker], str]
    is_text: bool = False  # text is aligned to the left, numbers to the right


def lines(state: GatewayState, url: str, terminal: Terminal) -> list[str]:
    wrong = [terminal.painted(part, "yellow") for text in troubles(state) for part in wrap(harmless(text), terminal.width)]
    return [*_head(state, url, terminal), "", *_rows(state, terminal), "", _foot(state), *wrong]


def _head(state: GatewayState, url: str, terminal: Terminal) -> list[str]:
    ready = sum(worker.state == "ready" for worker in state.workers)
    models = ", ".join(state.models) or "no model yet"
    first = _cut(f"{url}{GAP}{models}", terminal.width)
    return [terminal.painted(first, "bold"), f"{len(state.workers)} workers, {ready} ready"]


def _foot(state: GatewayState) -> str:
    connected = f"tokenizers {state.tokenizers}{GAP}detokenizers {state.detokenizers}"
    return f"queue {state.waiting}{GAP}{connected}"


def _columns(state: GatewayState) -> list[Column]:
    """Returns the columns: MODEL only if there are several models, ROLE only if a worker only prefills or only decodes."""
    optional = [Column("MODEL", lambda w: _cut(w.model, 12), True)] if len({w.model for w in state.workers} - {"-"}) > 1 else []
    optional += [Column("ROLE", lambda w: harmless(w.role), True)] if {w.role for w in state.workers} - {"both", "-"} else []
    return [
        *optional,
        Column("STATE", lambda w: harmless(w.state), True),
        Column("RUN", lambda w: _count(w.running)),
        Column("WAIT", lambda w: _count(w.waiting)),
        Column("KV", lambda w: _percent(w.kv_use)),
        Column("HITS", lambda w: _percent(w.hit_rate)),
        Column("TOK/S", lambda w: "-" if w.tokens_per_second is None else f"{w.tokens_per_second:.0f}"),
        Column("RETR", lambda w: _count(w.retractions)),
    ]


def _rows(state: GatewayState, terminal: Terminal) -> list[str]:
    columns, workers = _columns(state), state.workers
    cells = [[column.value(worker) for column in columns] for worker in workers]
    widths = [max(len(text) for text in (column.title, *texts)) for column, *texts in zip(columns, *cells, strict=True)]
    free = terminal.width - sum(widths) - len(GAP) * len(widths)
    width = min(max([len("WORKER"), *(len(worker.name) for worker in workers)]), max(free, LEAST_NAME))
    titles = [column.title for column in columns]
    shown = [_line("WORKER".ljust(width), titles, columns, widths)]
    for worker, texts in zip(workers, cells, strict=True):
        line = _line(_cut(worker.name, width).ljust(width), texts, columns, widths)
        colour = COLOURS.get(worker.state, "yellow")
        shown.append(line.replace(f" {worker.state} ", f" {terminal.painted(worker.state, colour)} ", 1))
    return shown


def _line(name: str, texts: list[str], columns: list[Column], widths: list[int]) -> str:
    aligned = [
        text.ljust(width) if column.is_text else text.rjust(width)
        for text, column, width in zip(texts, columns, widths, strict=True)
    ]
    return GAP.join([name, *aligned])


def _cut(text: str, width: int) -> str:
    """Shortens a name in the middle, because the end of a pod's name identifies the pod."""
    text = harmless(text)
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
