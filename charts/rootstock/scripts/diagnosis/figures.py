"""Checks that Prometheus has the release's series and that autoscalers get their metrics."""

from __future__ import annotations

from collections.abc import Iterator

from .findings import Finding, broken, ok, unknown
from .install import Facts, Install, name_of


def scrape(install: Install, facts: Facts) -> Iterator[Finding]:
    if not install.scrapes:
        return
    if not facts.series.good:
        mend = "autoscaling.prometheusUrl is its address as pods have it; autoscaling.prometheusAuth is how to get in"
        refused = facts.series.status in (400, 401, 403) or "certificate" in facts.series.why.lower()
        if install.unshown and refused:
            told = f"Prometheus at {install.prometheus} asks for what KEDA has ({install.unshown}): {facts.series.why}"
            yield unknown("scrape", told, "whether ScaledObjects get their figures stands under scaling")
            return
        find = broken if install.sure else unknown
        yield find("scrape", f"Prometheus at {install.prometheus} does not answer: {facts.series.why}", mend)
        return
    found = {each["metric"].get("component", ""): float(each["value"][1]) for each in facts.series.body["data"]["result"]}
    wanted = ("gateway", "tokenizer", "detokenizer", *(["worker"] if any(not each["sleeps"] for each in install.models) else []))
    absent = [each for each in wanted if f"rootstock-{each}" not in found]
    down = [each for each in wanted if found.get(f"rootstock-{each}") == 0]
    if absent:
        mend = (
            "its selectors must take the PodMonitor (monitoring.podMonitor.enabled"
            " and .labels, e.g. release: prometheus); without"
            " the operator its scrape must set the labels namespace, pod and component"
        )
        yield broken("scrape", f"Prometheus has no series of {', '.join(absent)} in {install.namespace}", mend)
    if down:
        told = f"Prometheus knows the pods of {', '.join(down)} and cannot scrape any of them"
        yield broken(
            "scrape", told, "networkPolicy.monitoring must let Prometheus in; it holds the namespace `monitoring` by default"
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
                mend = (
                    "docs/how-to/kubernetes/autoscaling.md#when-it-does-not-scale: rules of the adapter, metrics-server for CPU, scrapes"
                )
                found.append(broken("scaling", (f"HPA {name_of(hpa or {})}: {each['reason']}: {each.get('message', '')}"), mend))
    yield from found or [ok("scaling", f"{len(names)} autoscalers get their figures")]


def _adapter(install: Install, facts: Facts) -> Iterator[Finding]:
    if not install.scaled["selector"] or not facts.groups.good:
        return
    groups = {each["name"] for each in facts.groups.body["groups"]}
    mend = "install prometheus-adapter with the chart's rules (docs/how-to/kubernetes/autoscaling.md#hpa-with-prometheus-adapter)"
    for group in ("external.metrics.k8s.io", "custom.metrics.k8s.io"):
        if group not in groups:
            yield broken("scaling", f"nothing in the cluster answers for {group}: HPAs get no figures of the models", mend)
            return
    if facts.external.status == 403:
        told = f"external metrics may not be asked for: {facts.external.why}"
        yield unknown("scaling", told, "the tests' Role lacks external.metrics.k8s.io: helm upgrade by who may grant it")
    elif not facts.external.good:
        yield broken("scaling", f"external metrics do not come: {facts.external.why}", f"{mend}; is its pod up?")
    elif not facts.external.body.get("items"):
        told = f"the adapter knows no {install.scaled['metric']}"
        yield broken("scaling", told, (f"its rules are not this release's, or of older models, or Prometheus has no series: {mend}"))


def _keda(install: Install, facts: Facts) -> Iterator[Finding]:
    if facts.groups.good and "keda.sh" not in {each["name"] for each in facts.groups.body["groups"]}:
        yield broken("scaling", "there is no KEDA in the cluster", "install it, or set autoscaling.engine to hpa")
        return
    for each in facts.items("scaledobjects"):
        for condition in each.get("status", {}).get("conditions", ()):
            if name_of(each) in install.scaled["names"] and (condition["type"], condition["status"]) == ("Ready", "False"):
                told = f"ScaledObject {name_of(each)}: {condition.get('reason', '')}: {condition.get('message', '')}"
                yield broken(
                    "scaling", told, "autoscaling.prometheusUrl and prometheusAuth; kubectl -n keda logs deploy/keda-operator"
                )
