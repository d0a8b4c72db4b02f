"""Checks that Prometheus has the release's series and that autoscalers get their metrics."""

from __future__ import annotations

from collections.abc import Iterator

from .findings import Finding, broken, ok, unknown
from .install import Facts, Install, name_of


def scrape(install: Install, facts: Facts) -> Iterator[Finding]:
    if not install.scrapes:
        return
    if not facts.series.good:
        mend = (
            "set autoscaling.prometheusUrl to its address inside the cluster, and autoscaling.prometheusAuth to its credentials"
        )
        refused = facts.series.status in (400, 401, 403) or "certificate" in facts.series.why.lower()
        if install.unshown and refused:
            what = f"Prometheus at {install.prometheus} requires credentials that only KEDA has ({install.unshown}): {facts.series.why}"
            yield unknown("scrape", what, "see the check scaling for the metrics of ScaledObjects")
            return
        find = broken if install.sure else unknown
        yield find("scrape", f"Prometheus at {install.prometheus} does not respond: {facts.series.why}", mend)
        return
    found = {each["metric"].get("component", ""): float(each["value"][1]) for each in facts.series.body["data"]["result"]}
    wanted = ("gateway", "tokenizer", "detokenizer", *(["worker"] if any(not each["sleeps"] for each in install.models) else []))
    absent = [each for each in wanted if f"rootstock-{each}" not in found]
    down = [each for each in wanted if found.get(f"rootstock-{each}") == 0]
    if absent:
        mend = (
            "its selectors must match the PodMonitor (monitoring.podMonitor.enabled"
            " and .labels, e.g. release: prometheus); without"
            " the operator, its scrape configuration must set the labels namespace, pod and component"
        )
        yield broken("scrape", f"Prometheus has no series of {', '.join(absent)} in {install.namespace}", mend)
    if down:
        what = f"Prometheus has the pods of {', '.join(down)} as targets but cannot scrape any of them"
        yield broken(
            "scrape", what, "networkPolicy.monitoring must allow Prometheus; by default it allows the namespace `monitoring`"
        )
    if not absent and not down:
        yield ok("scrape", f"Prometheus scrapes {', '.join(wanted)}")


def scaling(install: Install, facts: Facts) -> Iterator[Finding]:
    names = install.scaled["names"]
    if not names:
        return
    found = [*(_adapter(install, facts) if install.scaled["engine"] == "hpa" else _keda(install, facts))]
    there = {name_of(each): each for each in facts.items("horizontalpodautoscalers")}
    for name in names:
        hpa = there.get(name) or there.get(f"keda-hpa-{name}")
        for each in (hpa or {}).get("status", {}).get("conditions", ()):
            if (
                each["type"] in ("ScalingActive", "AbleToScale")
                and each["status"] == "False"
                and each["reason"] != "ScalingDisabled"
            ):
                mend = "check the adapter's rules, metrics-server (for CPU) and scrapes: docs/how-to/kubernetes/autoscaling.md#when-it-does-not-scale"
                found.append(broken("scaling", (f"HPA {name_of(hpa or {})}: {each['reason']}: {each.get('message', '')}"), mend))
    yield from found or [ok("scaling", f"{len(names)} autoscalers get their metrics")]


def _adapter(install: Install, facts: Facts) -> Iterator[Finding]:
    if not install.scaled["selector"] or not facts.groups.good:
        return
    groups = {each["name"] for each in facts.groups.body["groups"]}
    mend = "install prometheus-adapter with the chart's rules (docs/how-to/kubernetes/autoscaling.md#hpa-with-prometheus-adapter)"
    for group in ("external.metrics.k8s.io", "custom.metrics.k8s.io"):
        if group not in groups:
            yield broken("scaling", f"no API of the cluster serves {group}, so HPAs get no metrics of the models", mend)
            return
    if facts.external.status == 403:
        what = f"the test may not read external metrics: {facts.external.why}"
        yield unknown(
            "scaling", what, "the tests' Role lacks external.metrics.k8s.io: run helm upgrade with an account that may grant it"
        )
    elif not facts.external.good:
        yield broken("scaling", f"external metrics are missing: {facts.external.why}", f"{mend} and check its pod")
    elif not facts.external.body.get("items"):
        what = f"the adapter does not serve {install.scaled['metric']}"
        yield broken(
            "scaling", what, f"its rules belong to another release or to earlier models, or Prometheus has no series: {mend}"
        )


def _keda(install: Install, facts: Facts) -> Iterator[Finding]:
    if facts.groups.good and "keda.sh" not in {each["name"] for each in facts.groups.body["groups"]}:
        yield broken("scaling", "the cluster has no KEDA", "install KEDA, or set autoscaling.engine to hpa")
        return
    for each in facts.items("scaledobjects"):
        for condition in each.get("status", {}).get("conditions", ()):
            if name_of(each) in install.scaled["names"] and (condition["type"], condition["status"]) == ("Ready", "False"):
                what = f"ScaledObject {name_of(each)}: {condition.get('reason', '')}: {condition.get('message', '')}"
                yield broken(
                    "scaling",
                    what,
                    "check autoscaling.prometheusUrl and prometheusAuth; the reason is in kubectl -n keda logs deploy/keda-operator",
                )
