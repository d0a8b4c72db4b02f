"""python -m charts.rootstock.alerts_page writes the tables of docs/reference/kubernetes/alerts.md from files/rules.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent
RULES = CHART / "files" / "rules.yaml"
PAGE = CHART.parents[1] / "docs" / "reference" / "kubernetes" / "alerts.md"
# Additional facts, for which the annotations of an alert are too short.
NOTES = {
    "RootstockAtMaximum": "The chart records `rootstock:max_replicas` for the components that it scales. Without the chart's rules, record it"
    " yourself or use kube-state-metrics.",
    "RootstockTargetDown": "A pod that downloads its model or image is not a fault, because the chart's PodMonitor selects only running pods. With another"
    " scrape configuration, kube-state-metrics shows which pods are pending.",
    "RootstockFirstTokenBudgetBurnFast": "Fewer than 20 requests in an hour do not count, as after a cold start from zero.",
    "RootstockTlsCertificateExpires": "Silence this alert if the certificates of tls.secret live for a week or less. The chart's Redis servers have"
    " no such metric; RootstockIndexDown and RootstockStoreDown cover them.",
    "RootstockGraceTooShort": "The histogram's last bound is 3600 s, so that the alert cannot fire with a longer drainSeconds.",
    "RootstockStoreMemoryHigh": "The metric exists if the store has a memory limit and its user may call INFO.",
    "RootstockStoreVolumeHigh": "The kubelet's volume metrics must be scraped. A claim of `state.volume.existingClaim` has another name; copy the"
    " rule with that name.",
}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def plain(text: str) -> str:
    """Returns an annotation with placeholders instead of its templates."""
    text = text.replace("{{ $labels.namespace }}", "NAMESPACE").replace("{{ $labels.pod }}", "POD")
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: found[1].upper(), text)
    return re.sub(r"\{\{ \$value[^}]*\}\}", "*value*", text)


def linked(text: str, names: set[str]) -> str:
    return re.sub(r"\bRootstock\w+", lambda found: f"[{found[0]}](#{found[0].lower()})" if found[0] in names else found[0], text)


def commands(text: str) -> str:
    """Returns the text with its shell commands as code."""
    return re.sub(r"(?:kubectl|rootstock) .+?(?=; |: | shows |$)", lambda found: f"`{found[0]}`", text)


def table() -> str:
    rows = [
        f"| [{each['alert']}](#{each['alert'].lower()}) | {each['labels']['severity']} | {each['for']} |" for each in alerts()
    ]
    return "\n".join(["| alert | severity | fires after |", "|---|---|---|", *rows])


def section(alert: dict[str, Any], names: set[str]) -> str:
    notes = {name: plain(text) for name, text in alert["annotations"].items()}
    note = NOTES.get(alert["alert"], "")
    return "\n\n".join(
        [
            f"## {alert['alert']}",
            linked(f"{notes['summary']} {notes['description']}", names),
            f"<!-- cluster -->\n```promql\n{alert['expr'].strip()}\n```",
            f"- **Customers notice**: {linked(notes['impact'], names)}\n"
            f"- **Confirm**: {commands(linked(notes['confirm'], names))}\n"
            f"- **Do**: {linked(notes['runbook'], names)}",
            *([linked(note, names)] if note else []),
        ]
    )


def written(page: str) -> str:
    """Returns the page with its generated parts."""
    names = {each["alert"] for each in alerts()}
    sections = "\n\n".join(section(each, names) for each in alerts())
    for name, text in (("table", table()), ("sections", sections)):
        begin, end = f"<!-- {name}: begin (made by `make docs`) -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        assert rest, f"the page has no {begin}"
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
