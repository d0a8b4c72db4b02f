"""Faults that a gateway's state shows, each with its remedy. `helm test` diagnoses the same faults from inside the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rootstock_llm.services.cli.status.standing import Standing, Surroundings, Worker

SERVING = frozenset(("ready", "silent"))
FULL = 0.98  # used share of a KV pool from which the pool counts as full
UNSCRAPED_S = 300.0  # seconds without a scrape of the metrics that are reported
DAY_S, SOON_S = 86400.0, 7 * 86400.0


def troubles(standing: Standing) -> list[str]:
    """Returns a sentence for each fault, with the place to look at."""
    around = standing.surroundings
    return [*_front(standing), *_names(around), *_stores(around), *_files(around), *_models(standing), *_workers(standing)]


def _front(standing: Standing) -> Iterator[str]:
    for service, count in (("tokenizer", standing.tokenizers), ("detokenizer", standing.detokenizers)):
        if not count:
            yield f"no {service} is connected: is its pod ready, and may the gateway reach it (helm test says which)?"


def _names(around: Surroundings) -> Iterator[str]:
    if around.unresolved:
        names = " and ".join(around.unresolved)
        yield f"names of {names} cannot be looked up: is DNS up, and does networkPolicy.dns let it be asked (helm test: dns)?"
    if around.scraped_s_ago is not None and around.scraped_s_ago > UNSCRAPED_S:
        minutes = f"{around.scraped_s_ago / 60:.0f} minutes"
        yield f"this gateway's metrics have not been scraped for {minutes}: autoscalers and alerts miss them (helm test: scrape)"


def _stores(around: Surroundings) -> Iterator[str]:
    if around.index is False:
        yield "Redis does not respond: requests are routed by load alone. Look at its pod, password and port (helm test: redis)"
    elif around.limits is False:
        yield "limits of API keys are not shared in Redis: each gateway keeps its part of them (helm test: redis)"
    if around.kept is False:
        yield "the state store does not respond: nothing is stored, and batches make no progress (helm test: redis)"


def _files(around: Surroundings) -> Iterator[str]:
    for valid, what in ((around.key_file_valid, "API keys"), (around.tls_files_valid, "certificates")):
        if valid is False:
            yield f"the files of {what} are wrong, and what they held before is in use: the gateway's log says where"
    ends = around.certificate_ends_in_s
    if ends is not None and ends < SOON_S:
        when = f"expires in {ends / DAY_S:.1f} days" if ends > 0 else "has expired"
        yield f"the certificate that the gateway shows other services {when}: is it being renewed?"


def _models(standing: Standing) -> Iterator[str]:
    if not standing.models:
        yield "no model is known: no worker has connected since the gateway began"
    for model in standing.models:
        mine = [worker for worker in standing.workers if worker.model == model]
        if any(worker.state in SERVING for worker in mine):
            continue
        waiting = f", and {standing.waiting} requests wait" if standing.waiting else ""
        yield f"no worker of {model} can answer ({_states(mine)}){waiting}: its pods say why (helm test: gpus, storage, pods)"


def _workers(standing: Standing) -> Iterator[str]:
    for worker in standing.workers:
        if worker.state == "hung":
            yield f"{worker.name} hangs: its log has the stacks of its threads, and the kubelet is about to restart it"
        elif worker.state == "unused":
            yield f"{worker.name} gets no requests after faults of its own: its log says which"
        elif worker.kv_use is not None and worker.kv_use > FULL and worker.waiting:
            yield f"{worker.name} has no memory left for the {worker.waiting} that wait there: more workers, or shorter answers"


def _states(workers: list[Worker]) -> str:
    counts = Counter(worker.state for worker in workers)
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "there is none"
