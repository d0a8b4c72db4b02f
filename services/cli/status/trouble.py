"""What is wrong by what a gateway tells, and where to look: what `helm test` diagnoses, as far as it is seen from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from services.cli.status.standing import Standing, Worker

SERVING = frozenset(("ready", "silent"))
FULL = 0.98  # of a KV pool


def troubles(standing: Standing) -> list[str]:
    """A sentence for each, with where to look; empty where all is well."""
    return [*_front(standing), *_models(standing), *_workers(standing)]


def _front(standing: Standing) -> Iterator[str]:
    for service, count in (("tokenizer", standing.tokenizers), ("detokenizer", standing.detokenizers)):
        if not count:
            yield f"no {service} is connected: is its pod ready, and may the gateway reach it (helm test says which)?"


def _models(standing: Standing) -> Iterator[str]:
    if not standing.models:
        yield "no model is known: no worker has connected since the gateway began"
    for model in standing.models:
        mine = [worker for worker in standing.workers if worker.model == model]
        if any(worker.state in SERVING for worker in mine):
            continue
        waiting = f", and {standing.waiting} requests wait" if standing.waiting else ""
        yield f"no worker of {model} can answer ({_states(mine)}){waiting}: look at its pods"


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
