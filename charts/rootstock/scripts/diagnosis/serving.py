"""Checks names, Services, Redis servers and models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from .findings import Finding, broken, ok, unknown, waiting
from .install import COMPONENT, MODEL, UNRESOLVED, Facts, Install, Object, RedisState, is_ready, labels_of, name_of, pods_of

NETWORK = "docs/reference/kubernetes/values.md#network"
# Least similarity of a text and its round trip. Below it, the tokenizer counts as one of another model. Lossy ones are above it.
LIKE = 0.5


def dns(install: Install, facts: Facts) -> Iterator[Finding]:
    resolved = {host: why for host, why in facts.names.items() if host in install.services}
    failed = {host: why for host, why in resolved.items() if why}
    if not resolved:
        yield unknown("dns", "no name of a Service was looked up", "")
    elif not failed:
        yield ok("dns", f"{len(resolved)} names of Services resolve")
    elif len(failed) == len(resolved):
        why = next(iter(failed.values()))
        mend = (
            "let pods reach the cluster's DNS: set networkPolicy.dns to its pods or addresses; its port must be 53 or, on"
            " OpenShift, 5353 (kubectl -n kube-system get endpoints kube-dns)"
        )
        yield broken("dns", f"no name resolves: {why}", mend if install.policies else "check that the cluster's DNS runs")
    else:
        for host, why in failed.items():
            mend = f"check that this Service has ready pods: kubectl -n {install.namespace} get service,endpointslices"
            yield waiting("dns", f"{host} does not resolve: {why}", mend)


def services(install: Install, facts: Facts) -> Iterator[Finding]:
    if not facts.objects.get("services") or not facts.objects["services"].good:
        return
    there = {name_of(each): each for each in facts.items("services")}
    wrong = 0
    for host, ports in install.services.items():
        name = host.partition(".")[0]
        found = {port.get("name", ""): port["port"] for port in there.get(name, {}).get("spec", {}).get("ports", ())}
        if name not in there:
            wrong += 1
            yield broken(
                "services", f"Service {name} does not exist", "run helm upgrade, which creates the deleted Service again"
            )
        elif any(found.get(port) != number for port, number in ports.items()):
            wrong += 1
            what = f"Service {name} has the ports {found or 'none'}; gateways look up {dict(ports)} by name"
            yield broken("services", what, "restore the chart's ports: run helm upgrade, or undo the patch")
    if not wrong:
        yield ok("services", f"{len(install.services)} Services have their ports")


def redis(install: Install, facts: Facts) -> Iterator[Finding]:
    for what in install.redis:
        state = facts.redis.get(what)
        if state is None:
            yield unknown("redis", f"the address of Redis for {what} is not known", "add the key url to its Secret")
            continue
        yield _redis(what, state)


def _redis(what: str, state: RedisState) -> Finding:
    where = f"Redis for {what} at {state.address}"
    error = state.error
    if error == UNRESOLVED:
        return unknown("redis", f"{where}: its name does not resolve", "see the check dns")
    if any(word in error for word in ("WRONGPASS", "AUTH", "invalid password")):
        return broken(
            "redis", f"{where} refuses the password: {error}", "put the right password into its Secret and restart the pods"
        )
    if error and not state.wrote and "OOM" in error:
        mend = (
            "raise redis.maxMemory (or state.maxMemory) and the memory"
            " limit; docs/how-to/kubernetes/sizing.md has the needed sizes"
        )
        return broken("redis", f"{where} has no memory left: {error}", mend)
    if error:
        mend = "check its pod, its address, and the NetworkPolicies (redis.externalPort)"
        return broken("redis", f"{where} is not reachable or accepts no writes: {error}", mend)
    if state.role != "master":
        return broken("redis", f"{where} is a {state.role}, which accepts no writes", "set the primary's address")
    if state.policy not in ("", "noeviction"):
        mend = "set maxmemory-policy noeviction: evicted keys would be missing from the index or from clients' stored records"
        return broken("redis", f"{where} evicts by {state.policy}", mend)
    return ok("redis", f"{where} accepts writes")


def models(install: Install, facts: Facts) -> Iterator[Finding]:
    if facts.readiness.error == UNRESOLVED:
        yield unknown("models", "the gateway's name does not resolve", "see the check dns")
        return
    if not facts.readiness.status:
        mend = "check that a gateway's pod is ready and that the tests' pods may reach it (networkPolicy.clients)"
        yield broken("models", f"the gateway does not respond: {facts.readiness.why}", mend)
        return
    if not facts.info.good:
        yield from _without_info(install, facts)
        return
    workers = facts.info.body["workers"]
    known = {each["id"] for each in facts.info.body["models"]}
    served = 0
    for model in install.models:
        usable = [each for each in workers if each["model"] == model["name"] and each["state"] in ("ready", "silent")]
        if usable and model["name"] in known:
            served += 1
        elif not model["sleeps"]:
            yield _unserved(install, model, facts, [each["state"] for each in workers if each["model"] == model["name"]])
    yield from _tokenizers(facts)
    if served:
        yield ok("models", f"{served} of {len(install.models)} models have workers")


def _without_info(install: Install, facts: Facts) -> Iterator[Finding]:
    """Checks models only by /readiness, which needs no API key."""
    if "worker" in _missing(facts):
        for model in install.models:
            if not model["sleeps"]:
                yield _unserved(install, model, facts, ())
    elif facts.info.status in (401, 403):
        yield unknown("models", "the gateway reports its workers only to clients with an API key", "set tests.keySecret")
    else:
        what = f"the gateway does not report its workers: {facts.info.why}"
        yield waiting(
            "models",
            what,
            f"the reason is in the gateway's log: kubectl -n {install.namespace} logs -l app.kubernetes.io/component=gateway",
        )
    yield from _tokenizers(facts)


def _unserved(install: Install, model: Object, facts: Facts, states: Sequence[str]) -> Finding:
    mine = [pod for pod in pods_of(facts) if labels_of(pod).get(MODEL) == model["slug"]]
    ready = [pod for pod in mine if labels_of(pod).get(COMPONENT) in ("worker", "prefill") and is_ready(pod)]
    if ready and not states:
        return broken(
            "models",
            f"{len(ready)} workers of model {model['name']} are ready, but the gateway reaches none of them",
            _network_remedy(facts, ("gateway", "worker")),
        )
    what = f"no worker of model {model['name']} is usable" + (f" ({', '.join(sorted(set(states)))})" if states else "")
    return waiting("models", what, "see the checks pods, gpus and storage")


def _network_remedy(facts: Facts, components: Sequence[str]) -> str:
    """Returns a remedy, with the names of NetworkPolicies that select these pods and are not the chart's."""
    others = []
    for policy in facts.items("networkpolicies"):
        if labels_of(policy).get("app.kubernetes.io/part-of") == "rootstock":
            continue
        selector = policy["spec"].get("podSelector", {}).get("matchLabels", {})
        pods = [pod for pod in pods_of(facts) if labels_of(pod).get(COMPONENT) in components]
        if any(all(labels_of(pod).get(key) == value for key, value in selector.items()) for pod in pods):
            others.append(name_of(policy))
    if others:
        return (
            f"NetworkPolicy {', '.join(others)}, which is not the chart's, selects these pods: allow the connections in {NETWORK}"
        )
    return f"a NetworkPolicy or the network blocks the connection: {NETWORK} lists the needed connections and ports"


def _tokenizers(facts: Facts) -> Iterator[Finding]:
    missing = _missing(facts)
    for component in ("tokenizer", "detokenizer"):
        ready = [pod for pod in pods_of(facts) if labels_of(pod).get(COMPONENT) == component and is_ready(pod)]
        if component in missing and ready:
            what = f"{len(ready)} {component}s are ready, but the gateway reaches none of them"
            yield broken("models", what, _network_remedy(facts, ("gateway", component)))
        elif component in missing:
            yield waiting("models", f"no {component} is connected", "see the checks pods and storage")
    for name, trip in facts.texts.items():
        like = SequenceMatcher(None, trip["said"].lower(), trip["read"].lower(), autojunk=False).ratio()
        if like < LIKE or max(trip["ids"], default=0) >= trip["vocab_size"]:
            what = (
                f"tokenizers of model {name} belong to another model than its"
                f" workers: {trip['said'][:40]!r} becomes ids up to"
                f" {max(trip['ids'], default=0)} of a vocabulary of {trip['vocab_size']},"
                f" and these ids become {trip['read'][:40]!r}"
            )
            yield broken(
                "models",
                what,
                "use one image or volume: tokenizer, detokenizer and worker must read the same folder (models[].path)",
            )


def _missing(facts: Facts) -> Sequence[str]:
    """Returns the components that /readiness reports as missing."""
    return facts.readiness.body.get("missing", ()) if isinstance(facts.readiness.body, dict) else ()
