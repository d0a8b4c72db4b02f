"""Faults that a gateway's state shows, each with its remedy. `helm test` diagnoses the same faults from inside the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rootstock_llm.services.cli.status.gateway_state import GatewayState, Surroundings, Worker

SERVING = frozenset(("ready", "silent"))  # states in which a worker may serve requests
FULL = 0.98  # used share of a KV pool from which the pool counts as full
UNSCRAPED_S = 300.0  # seconds without a scrape of the metrics after which a sentence reports it
DAY_S = 86400.0
EXPIRY_WARNING_S = 7 * 86400.0  # troubles() warns if the certificate expires within this time, in seconds


def troubles(state: GatewayState) -> list[str]:
    """Returns a sentence for each fault, with its remedy or the place that shows its cause."""
    surroundings = state.surroundings
    return [
        *_text_services(state),
        *_names(surroundings),
        *_stores(surroundings),
        *_files(surroundings),
        *_models(state),
        *_workers(state),
    ]


def _text_services(state: GatewayState) -> Iterator[str]:
    for service, count in (("tokenizer", state.tokenizers), ("detokenizer", state.detokenizers)):
        if not count:
            yield f"no {service} is connected: see whether its pod is ready and whether the gateway can reach it (helm test)"


def _names(surroundings: Surroundings) -> Iterator[str]:
    if surroundings.unresolved:
        names = " and ".join(surroundings.unresolved)
        yield f"DNS names of {names} do not resolve: check the cluster's DNS and networkPolicy.dns (helm test: dns)"
    if surroundings.scraped_s_ago is not None and surroundings.scraped_s_ago > UNSCRAPED_S:
        minutes = f"{surroundings.scraped_s_ago / 60:.0f} minutes"
        yield f"this gateway's metrics have not been scraped for {minutes}: autoscalers and alerts lack them (helm test: scrape)"


def _stores(surroundings: Surroundings) -> Iterator[str]:
    if surroundings.index is False:
        yield "Redis does not respond: requests are routed by load only. Check its pod, password and port (helm test: redis)"
    elif surroundings.limits is False:
        yield "limits of API keys are not shared in Redis: each gateway applies its own part of each limit (helm test: redis)"
    if surroundings.kept is False:
        yield "the state store does not respond: nothing is stored, and batches make no progress (helm test: redis)"


def _files(surroundings: Surroundings) -> Iterator[str]:
    for valid, what in (
        (surroundings.key_file_valid, "the file of API keys is"),
        (surroundings.tls_files_valid, "the TLS files are"),
    ):
        if valid is False:
            yield f"{what} wrong, and the earlier content stays in use: see the gateway's log"
    ends = surroundings.certificate_ends_in_s
    if ends is not None and ends < EXPIRY_WARNING_S:
        when = f"expires in {ends / DAY_S:.1f} days" if ends > 0 else "has expired"
        yield f"the gateway's certificate for other services {when}: check its renewal"


def _models(state: GatewayState) -> Iterator[str]:
    if not state.models:
        yield "no model is known: no worker has connected since the gateway started"
    for model in state.models:
        workers = [worker for worker in state.workers if worker.model == model]
        if any(worker.state in SERVING for worker in workers):
            continue
        waiting = f", and {state.waiting} requests wait" if state.waiting else ""
        yield f"no worker of {model} is ready ({_states(workers)}){waiting}: see its pods (helm test: gpus, storage, pods)"


def _workers(state: GatewayState) -> Iterator[str]:
    for worker in state.workers:
        if worker.state == "hung":
            yield f"{worker.name} hangs: its log has the stacks of its threads, and the kubelet is about to restart it"
        elif worker.state == "unused":
            yield f"{worker.name} gets no requests for a while, because it had faults: see its log"
        elif worker.kv_use is not None and worker.kv_use > FULL and worker.waiting:
            yield f"{worker.name} has no free KV for the {worker.waiting} queued requests: add workers, or lower max_tokens"


def _states(workers: list[Worker]) -> str:
    counts = Counter(worker.state for worker in workers)
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "there is no worker"
