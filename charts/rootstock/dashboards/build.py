"""Defines the Grafana dashboards. `python charts/rootstock/dashboards/build.py` writes a .json file for each to this folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
NS = 'namespace=~"$namespace"'
GW = f'{NS},model=~"$model"'  # selector for series with the label `model`
KEYED = f'{GW},key!=""'
WK = f'{NS},model_name=~"$model"'  # selector for series of workers
WINDOW = "$__rate_interval"
WIDTH, HEIGHT = 8, 7  # grid units; a Grafana row has 24 columns


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard."""

    title: str
    text: str  # description
    unit: str  # Grafana's id of the unit
    queries: dict[str, str]  # legend → PromQL
    kind: str = "timeseries"  # timeseries, stat or heatmap
    stack: bool = False
    most: float | None = None  # upper end of the axis; None: automatic


@dataclass(frozen=True)
class Dashboard:
    """A dashboard, which becomes one file."""

    name: str  # name of the file without suffix
    title: str
    text: str  # description
    panels: list[Panel] = field(default_factory=list)


def quantile(q: float, series: str, labels: str, by: str = "") -> str:
    return f"histogram_quantile({q}, sum by (le{f', {by}' if by else ''}) (rate({series}_bucket{{{labels}}}[{WINDOW}])))"


def quantiles(series: str, labels: str) -> dict[str, str]:
    return {f"p{round(100 * q)}": quantile(q, series, labels) for q in (0.5, 0.9, 0.99)}


def heatmap(title: str, text: str, series: str, labels: str) -> Panel:
    query = f"sum by (le) (increase({series}_bucket{{{labels}}}[{WINDOW}]))"
    return Panel(title, text, "s", {"{{le}}": query}, kind="heatmap")


def rate(series: str, labels: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({series}{{{labels}}}[{WINDOW}]))"


PROMPT_TOKENS = f"({rate('sglang:prompt_tokens_total', WK, 'pod')} > 0)"
REQUESTS = f'{GW},route!~"/health.*|/readiness|/ready|/metrics|other"'
GATEWAY = "rootstock_gateway_"
OPEN = f"sglang:num_running_reqs{{{WK}}} + sglang:num_queue_reqs{{{WK}}}"

OVERVIEW = Dashboard(
    "overview",
    "Rootstock / Overview",
    "What clients see, over all models of a namespace.",
    [
        Panel("Requests by code", "HTTP answers per second, without probes.", "reqps",
              {"{{code}}": rate(f"{GATEWAY}requests_total", REQUESTS, "code")}, stack=True),
        Panel("Errors of the server", "Share of requests with a 5xx; a month's objective allows 0.5 % by default.", "percentunit",
              {"1 h, {{model}}": f"rootstock:failed_requests:ratio_rate1h{{{NS}}}",
               "5 m, {{model}}": f"rootstock:failed_requests:ratio_rate5m{{{NS}}}"}),
        Panel("Late first tokens", "Share of requests whose first token came after the objective's time, 2.5 s by default; 5 % may.",
              "percentunit",
              {"1 h, {{model}}": f"rootstock:late_requests:ratio_rate1h{{{GW}}}",
               "5 m, {{model}}": f"rootstock:late_requests:ratio_rate5m{{{GW}}}"}, most=1),
        Panel("Refused for want of a worker", "Choices that got 503 with Retry-After, per second.", "reqps",
              {"{{reason}}": rate(f"{GATEWAY}refusals_total", NS, "reason")}),
        Panel("Time to first token", "Arrival at the gateway to the first decoded token.", "s",
              quantiles(f"{GATEWAY}time_to_first_token_seconds", GW)),
        Panel("Time between tokens", "Between two decoded tokens of a choice.", "s",
              quantiles(f"{GATEWAY}inter_token_latency_seconds", GW)),
        Panel("Time of a request", "Arrival to last byte.", "s", quantiles(f"{GATEWAY}e2e_request_latency_seconds", GW)),
        Panel("Goodput", "Answers per second whose first token came within 2.5 s, and all.", "reqps",
              {"within 2.5 s": rate(f"{GATEWAY}time_to_first_token_seconds_bucket", f'{GW},le="2.5"'),
               "all": rate(f"{GATEWAY}time_to_first_token_seconds_count", GW)}),
        Panel("Requests in flight and waiting", "In gateways; those that wait have no worker yet.", "short",
              {"in flight": f"sum({GATEWAY}requests_in_flight{{{NS}}})",
               "waiting, {{model}}": f"sum by (model) ({GATEWAY}queue_length{{{GW}}})"}),
        Panel("Time in the gateway's queue", "Of choices that had to wait for a worker with room.", "s",
              quantiles(f"{GATEWAY}queue_time_seconds", NS)),
        Panel("Workers", "As the gateways see them; the least that any gateway sees.", "short",
              {"{{model}}, {{state}}": f"min by (model, state) ({GATEWAY}workers{{{GW}}})"}),
        Panel("Tokens", "Prompt, cached and output tokens per second.", "short",
              {kind: rate(f"{GATEWAY}{kind}_tokens_total", GW) for kind in ("prompt", "cached", "output")}),
        Panel("Ended by clients", "Requests whose client went away, by how far they had come, per second.", "reqps",
              {"{{phase}}": rate(f"{GATEWAY}aborts_total", NS, "phase")}),
        Panel("Tokenizer calls", "By gRPC status, per second.", "reqps",
              {"{{rpc}}, {{code}}": rate("rootstock_tokenizer_requests_total", NS, "rpc, code")}),
        Panel("Time of a tokenizer call", "Encoding and chat templates.", "s",
              quantiles("rootstock_tokenizer_request_seconds", NS)),
        Panel("Time of a detokenizer batch", "One batch of all streams of a gateway.", "s",
              quantiles("rootstock_detokenizer_batch_seconds", NS)),
        Panel("Requests by key", "Generation requests that began, per second; the ten keys with most.", "reqps",
              {"{{key}}": f"topk(10, {rate(f'{GATEWAY}key_requests_total', NS, 'key')})"}, stack=True),
        Panel("Tokens by key", "Prompt and output tokens per second; the ten keys with most.", "short",
              {"{{key}}, prompt": f"topk(10, {rate(f'{GATEWAY}prompt_tokens_total', KEYED, 'key')})",
               "{{key}}, output": f"topk(10, {rate(f'{GATEWAY}output_tokens_total', KEYED, 'key')})"}),
        Panel("Time to first token by key", "The 90th percentile of each key that has a label of its own.", "s",
              {"{{key}}": quantile(0.9, f"{GATEWAY}time_to_first_token_seconds", KEYED, "key")}),
        Panel("Refused by a key's limit", "Requests per second that got 429, by the limit.", "reqps",
              {"{{limit}}": rate(f"{GATEWAY}rate_limited_total", NS, "limit")}, stack=True),
        Panel("Keys' file and shares", "1 where the file of keys is valid, and where Redis shares their limits; the least.", "short",
              {"file": f"min({GATEWAY}key_file_valid{{{NS}}})", "shares": f"min({GATEWAY}key_shares_up{{{NS}}})"}, most=1),
        Panel("Batches", "Batches at work, and their lines that are being answered.", "short",
              {"batches": f"sum({GATEWAY}batches_running{{{NS}}})",
               "lines": f"sum({GATEWAY}batch_lines_in_flight{{{NS}}})"}),
        Panel("Batch lines", "Results per second by outcome, and tries that found no worker.", "reqps",
              {"{{outcome}}": rate(f"{GATEWAY}batch_lines_total", NS, "outcome"),
               "retries": rate(f"{GATEWAY}batch_retries_total", NS)}, stack=True),
        Panel("Background responses", "Ended per second by status, and those at work or waiting.", "short",
              {"{{status}}": rate(f"{GATEWAY}background_responses_total", NS, "status"),
               "running": f"sum({GATEWAY}background_running{{{NS}}})"}),
        Panel("Memory of the store", "Share of its limit; at 1 new records are refused.", "percentunit",
              {"{{namespace}}": f"max by (namespace) ({GATEWAY}store_memory_used_bytes{{{NS}}} / {GATEWAY}store_memory_max_bytes{{{NS}}})"},
              most=1),
        Panel("Time to first token by model", "The 90th percentile.", "s",
              {"{{model}}": quantile(0.9, f"{GATEWAY}time_to_first_token_seconds", GW, "model")}),
    ],
)  # fmt: skip

ENGINE = Dashboard(
    "engine",
    "Rootstock / Engine",
    "What workers do, one line for each.",
    [
        Panel("Running", "Requests that run, and the limit of one worker.", "short",
              {"{{pod}}": f"sglang:num_running_reqs{{{WK}}}", "limit": f"max(rootstock_worker_max_running_requests{{{WK}}})"}),
        Panel("Waiting", "Requests that wait in a worker: for memory, and for a grammar.", "short",
              {"{{pod}}": f"sglang:num_queue_reqs{{{WK}}}", "{{pod}}, grammar": f"sglang:num_grammar_queue_reqs{{{WK}}}"}),
        Panel("KV pool in use", "Share that running requests hold.", "percentunit", {"{{pod}}": f"sglang:token_usage{{{WK}}}"},
              most=1),
        Panel("Output", "Tokens per second.", "short", {"{{pod}}": rate("sglang:generation_tokens_total", WK, "pod")},
              stack=True),
        Panel("Tokens computed", "By what computes them; prefill_cache is what a hit saved.", "short",
              {"{{mode}}": rate("sglang:realtime_tokens_total", WK, "mode")}),
        Panel("Steps", "Forward passes per second.", "ops", {"{{pod}}": rate("rootstock_worker_forward_steps_total", WK, "pod")}),
        Panel("Retractions", "Requests per second that lost their memory to others, and those displaced by priority.", "reqps",
              {"{{pod}}": rate("sglang:num_retracted_requests_total", WK, "pod"),
               "{{pod}}, displaced": rate("rootstock_worker_preempted_requests_total", WK, "pod")}),
        Panel("Hit rate", "Share of admitted prompt tokens that were cached.", "percentunit",
              {"{{pod}}": f"{rate('sglang:cached_tokens_total', WK, 'pod')} / {PROMPT_TOKENS}",
               "30 m, {{model_name}}": f"rootstock:hit_rate:ratio_rate30m{{{WK}}}"}, most=1),
        Panel("Evictions", "Tokens of KV per second that left the radix tree.", "short",
              {"{{pod}}": rate("sglang:evicted_tokens_total", WK, "pod")}),
        Panel("KV pool", "Tokens: in use, cached, free.", "short",
              {"in use": f"sum(sglang:kv_used_tokens{{{WK}}})", "cached": f"sum(sglang:kv_evictable_tokens{{{WK}}})",
               "free": f"sum(sglang:kv_available_tokens{{{WK}}})"}, stack=True),
        Panel("Sessions", "Open sessions, and tokens that they hold.", "short",
              {"sessions": f"sum(rootstock_worker_sessions{{{WK}}})", "tokens": f"sum(rootstock_worker_session_tokens{{{WK}}})"}),
        Panel("Admission", "Share of remaining output that admission reserves.", "percentunit",
              {"{{pod}}": f"sglang:new_token_ratio{{{WK}}}"}, most=1),
        heatmap("Time to first token", "At the worker.", "sglang:time_to_first_token_seconds", WK),
        heatmap("Time between tokens", "At the worker.", "sglang:inter_token_latency_seconds", WK),
        heatmap("Time in the worker's queue", "Arrival to first step.", "sglang:queue_time_seconds", WK),
        Panel("Hung", "1 while a worker's loop does not turn.", "short", {"{{pod}}": f"rootstock_worker_hung{{{WK}}}"}, most=1),
        Panel("Aborted", "Requests per second that ended without a whole answer.", "reqps",
              {"{{pod}}": rate("sglang:num_aborted_requests_total", WK, "pod")}),
        Panel("Resumed", "Requests per second that came with output from another worker.", "reqps",
              {"{{pod}}": rate("rootstock_worker_resumed_requests_total", WK, "pod")}),
        Panel("Time in steps", "Share of the time, by the kind of step.", "percentunit",
              {"{{pod}}, {{category}}": rate("sglang:forward_execution_seconds_total", WK, "pod, category")}, stack=True),
        Panel("Bubbles", "Share of the time in which requests ran and no step was in flight; waiting for messages comes beside it.",
              "percentunit",
              {"{{pod}}": rate("rootstock_worker_bubble_seconds_total", WK, "pod"),
               "{{pod}}, idle": rate("sglang:scheduler_idle_seconds_total", WK, "pod")}),
        Panel("Stages of a request", "The 90th percentile: until the first step, to the first token, to the end.", "s",
              {"{{stage}}": quantile(0.9, "sglang:per_stage_req_latency_seconds", WK, "stage")}),
        Panel("Grammars", "Requests per second with one, of these those that found it compiled, and those that came to nothing.", "reqps",
              {"asked for": rate("sglang:num_grammar_total", WK), "compiled already": rate("sglang:num_grammar_cache_hit_total", WK),
               "aborted": rate("sglang:num_grammar_aborted_total", WK)}),
        Panel("Compiling a grammar", "From its first asker to its being there.", "s",
              quantiles("sglang:grammar_compilation_time_seconds", WK)),
        Panel("Draft tokens", "Verified tokens per second, and those that were accepted.", "short",
              {"drafted": rate("rootstock_worker_drafted_tokens_total", WK),
               "accepted": f"sum(rate(rootstock_worker_drafted_tokens_total{{{WK}}}[{WINDOW}]) * sglang:spec_accept_rate{{{WK}}})"}),
        Panel("Accepted draft tokens", "Share of the draft tokens, lately, and tokens per verification.", "short",
              {"share, {{pod}}": f"sglang:spec_accept_rate{{{WK}}}", "length, {{pod}}": f"sglang:spec_accept_length{{{WK}}}"}),
        Panel("Host tier", "Share of the host memory tier in use.", "percentunit",
              {"{{pod}}": f"sglang:hicache_host_used_tokens{{{WK}}} / clamp_min(sglang:hicache_host_total_tokens{{{WK}}}, 1)"}, most=1),
        Panel("Writes to the storage tier", "Tokens of KV per second that were written, and that were dropped.", "short",
              {"written": rate("sglang:backuped_tokens_total", WK), "dropped": rate("rootstock_worker_unstored_tokens_total", WK)}),
        Panel("Retracted tokens", "Of prompts and outputs of requests that lost their memory, per second.", "short",
              {"prompt": rate("sglang:num_retracted_input_tokens_total", WK),
               "output": rate("sglang:num_retracted_output_tokens_total", WK)}),
    ],
)  # fmt: skip

ROUTING = Dashboard(
    "cache-and-routing",
    "Rootstock / Cache and routing",
    "Where gateways send requests, why, and how fresh what they know is.",
    [
        Panel("Why a worker was picked", "Choices per second by reason; prefix is a cache hit that was expected.", "reqps",
              {"{{reason}}": rate(f"{GATEWAY}routing_decisions_total", NS, "reason")}, stack=True),
        Panel("Predicted and actual hits", "Prompt tokens per second that routing took to be cached, and that were.", "short",
              {"predicted": rate(f"{GATEWAY}predicted_cached_tokens_total", NS),
               "actual": rate(f"{GATEWAY}cached_tokens_total", NS)}),
        Panel("Error of the prediction", "Predicted less actual, as a share of prompt tokens.", "percentunit",
              {"error": f"({rate(f'{GATEWAY}predicted_cached_tokens_total', NS)} - {rate(f'{GATEWAY}cached_tokens_total', NS)})"
                        f" / ({rate(f'{GATEWAY}prompt_tokens_total', NS)} > 0)"}),
        Panel("Skew", "Most requests on a worker, over the mean of all; 1 is even, 0 idle.", "short",
              {"{{model_name}}": f"max by (model_name) ({OPEN}) / clamp_min(avg by (model_name) ({OPEN}), 1)"}),
        Panel("Index lag", "Time since a gateway's copy had all that Redis had.", "s",
              {"{{pod}}": f"{GATEWAY}index_lag_seconds{{{NS}}}"}),
        Panel("Redis", "1 where it answers: gateways and workers.", "short",
              {"{{pod}}": f"{GATEWAY}index_up{{{NS}}} or rootstock_worker_redis_up{{{NS}}}",
               "{{pod}}, store": f"{GATEWAY}store_up{{{NS}}}"}, most=1),
        Panel("Blocks in the index", "Of 64 tokens, in a gateway's copy; speculative ones were sent and not yet confirmed.",
              "short",
              {"{{pod}}": f"{GATEWAY}index_blocks{{{NS}}}",
               "{{pod}}, speculative": f"{GATEWAY}index_speculative_blocks{{{NS}}}"}),
        Panel("Events", "Batches per second: told by workers, read by gateways.", "ops",
              {"told": rate("rootstock_worker_index_events_total", NS), "read": rate(f"{GATEWAY}index_events_total", NS)}),
        Panel("Reloads", "Per hour: blocks of a worker read as a whole, of those after a gap, index begun anew by a worker.",
              "short",
              {"loads": f"sum(increase({GATEWAY}index_loads_total{{{NS}}}[1h]))",
               "after gaps": f"sum(increase({GATEWAY}index_gaps_total{{{NS}}}[1h]))",
               "generations": f"sum(increase(rootstock_worker_index_generations_total{{{NS}}}[1h]))"}),
        Panel("Not yet published", "Changes of blocks that Redis has yet to be told.", "short",
              {"{{pod}}": f"rootstock_worker_index_pending_blocks{{{NS}}}"}),
        Panel("Publication failures", "Times per second that Redis was away, and changes lost by that.", "ops",
              {"failures": rate("rootstock_worker_index_failures_total", NS),
               "changes": rate("rootstock_worker_index_dropped_changes_total", NS)}),
        Panel("Circuit breakers", "Workers by the state of their breaker, the most over gateways.", "short",
              {"{{state}}": f"max by (state) ({GATEWAY}breakers{{{NS}}})"}),
        Panel("Moves", "Choices per second that went to another worker, by cause.", "reqps",
              {"{{cause}}, {{state}}": rate(f"{GATEWAY}moves_total", NS, "cause, state")}),
        Panel("Sent again", "Calls or choices, by service, per second.", "reqps",
              {"{{service}}": rate(f"{GATEWAY}retries_total", NS, "service")}),
        Panel("Connections", "Replicas that a gateway is connected to, the least over gateways.", "short",
              {"{{service}}": f"min by (service) ({GATEWAY}connected{{{NS}}})"}),
    ],
)  # fmt: skip

AUTOSCALING = Dashboard(
    "autoscaling",
    "Rootstock / Autoscaling",
    "Demand against replicas. docs/how-to/kubernetes/autoscaling.md explains the figures.",
    [
        Panel("Demand and workers", "Workers that are enough for what arrives and waits, those that serve, those that load.",
              "short",
              {"enough, {{model}}": f"rootstock:enough_workers{{{GW}}}", "serve, {{model}}": f"rootstock:workers{{{GW}}}",
               "load, {{model}}": f"rootstock:loading_workers{{{GW}}}"}),
        Panel("Waiting", "Requests in gateways' and workers' queues.", "short",
              {"{{model}}": f"rootstock:waiting_requests{{{GW}}}"}),
        Panel("Running", "Requests against what can run.", "short",
              {"run, {{model}}": f"rootstock:running_requests{{{GW}}}", "slots, {{model}}": f"rootstock:slots{{{GW}}}"}),
        Panel("Slots in use", "What the HPA holds at runningShare.", "percentunit",
              {"{{model}}": f"rootstock:running_requests{{{GW}}} / rootstock:slots{{{GW}}}"}, most=1),
        Panel("KV pool in use", "Mean over workers; what the HPA holds at tokenUsage.", "percentunit",
              {"{{model_name}}": f"avg by (model_name) (sglang:token_usage{{{WK}}})"}, most=1),
        Panel("Arriving and ending", "Requests per second; apart, the backlog grows or shrinks.", "reqps",
              {"arriving, {{model}}": f"rootstock:arriving_requests:rate2m{{{GW}}}",
               "ending, {{model}}": f"rootstock:ended_requests:rate2m{{{GW}}}"}),
        Panel("Share of arrivals", "Of what runs, the share that is not a backlog being worked off.", "percentunit",
              {"{{model}}": f"rootstock:arrival_share{{{GW}}}"}, most=1),
        Panel("Workers by phase", "From the process's start; pods that wait for a node are not among them.", "short",
              {"{{phase}}": f"sum by (phase) (rootstock_worker_phase{{{WK}}})"}, stack=True),
        Panel("Cold start", "From a process's first answer to ready; images and nodes come on top.", "s",
              {"{{pod}}": f"rootstock_worker_cold_start_seconds{{{WK}}}"}),
        Panel("Requests in flight per gateway", "What gateways are scaled by, with CPU.", "short",
              {"{{pod}}": f"{GATEWAY}requests_in_flight{{{NS}}}"}),
        Panel("CPU of gateways", "Cores.", "short",
              {"{{pod}}": f'rate(process_cpu_seconds_total{{{NS},component="rootstock-gateway"}}[{WINDOW}])'}),
        Panel("Memory of workers", "Resident bytes of the process.", "bytes",
              {"{{pod}}": f'process_resident_memory_bytes{{{NS},component="rootstock-worker"}}'}),
    ],
)  # fmt: skip

PREFILL = Dashboard(
    "prefill-and-decode",
    "Rootstock / Prefill and decode",
    "Workers that compute prompts against those that decode. docs/how-to/kubernetes/prefill-and-decode.md explains the figures.",
    [
        Panel("Waiting", "Tokens of requests in workers' queues; what prefill workers are scaled by, for each of them.", "short",
              {"{{engine_type}}": f"sum by (engine_type) (rootstock_worker_waiting_tokens{{{WK}}})"}),
        Panel("Busy", "Share of the time in which a worker computes, the mean; the other figure of prefill workers.", "percentunit",
              {"{{engine_type}}": f"avg by (engine_type) (sum by (pod, engine_type) (rate(sglang:forward_execution_seconds_total{{{WK}}}[{WINDOW}])))"}),
        Panel("KV pool in use", "The mean; what those that decode are scaled by.", "percentunit",
              {"{{engine_type}}": f"avg by (engine_type) (sglang:token_usage{{{WK}}})"}, most=1),
        Panel("Running", "Requests that run.", "short",
              {"{{engine_type}}": f"sum by (engine_type) (sglang:num_running_reqs{{{WK}}})"}),
        Panel("Prompt tokens computed", "Per second. What those that decode compute are short prompts, and those that found nobody else.",
              "short",
              {"{{engine_type}}": rate("sglang:realtime_tokens_total", f'{WK},mode="prefill_compute"', "engine_type")}),
        Panel("Handed over", "Choices per second that went on at another worker: from a room with their KV, or from none.", "reqps",
              {"{{source}}": rate(f"{GATEWAY}handovers_total", NS, "source")}, stack=True),
        Panel("KV read", "Tokens per second that came from prefill workers.", "short",
              {"{{pod}}": rate("rootstock_worker_pulled_tokens_total", WK, "pod")}, stack=True),
        Panel("Speed of reads", "At which KV came from prefill workers lately; before the first read, what is guessed.", "Bps",
              {"{{pod}}": f"rootstock_worker_pull_bytes_per_second{{{WK}}}"}),
        Panel("Rooms", "Prompts whose KV is kept for those that decode.", "short",
              {"{{pod}}": f"rootstock_worker_rooms{{{WK}}}"}),
        Panel("In vain", "Per second: rooms that nobody came for in time, reads that brought nothing. Such prompts are computed again.",
              "ops",
              {"expired": rate("rootstock_worker_rooms_expired_total", WK),
               "refused": rate("rootstock_worker_refused_pulls_total", WK)}),
    ],
)  # fmt: skip



def dcgm(series: str) -> str:
    """Returns the query by pod, GPU and node.

    The exporter names the GPU's pod in the label `pod`, or in `exported_pod` if the scrape configuration sets `pod` itself.
    """
    exported = f'label_replace({series}{{exported_{NS}}}, "pod", "$1", "exported_pod", "(.+)")'
    return f'max by (pod, gpu, Hostname) ({exported} or {series}{{{NS},exported_namespace="",pod!=""}})'


AT_GPU = "{{pod}}, {{Hostname}} {{gpu}}"
GPUS = Dashboard(
    "gpus",
    "Rootstock / GPUs",
    "The GPUs of a namespace's pods, by NVIDIA's DCGM exporter.",
    [
        Panel("Busy", "Share of the time in which a kernel runs.", "percent", {AT_GPU: dcgm("DCGM_FI_DEV_GPU_UTIL")}, most=100),
        Panel("Tensor cores", "Share of cycles in which they compute; low in decode, which waits for memory.", "percentunit",
              {AT_GPU: dcgm("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")}, most=1),
        Panel("Memory bus", "Share of cycles in which it carries data; high in decode.", "percentunit",
              {AT_GPU: dcgm("DCGM_FI_PROF_DRAM_ACTIVE")}, most=1),
        Panel("Memory in use", "Weights, KV pool, graphs.", "mbytes", {AT_GPU: dcgm("DCGM_FI_DEV_FB_USED")}),
        Panel("Power", "Of each GPU.", "watt", {AT_GPU: dcgm("DCGM_FI_DEV_POWER_USAGE")}),
        Panel("Temperature", "Of each GPU; clocks fall near its limit.", "celsius", {AT_GPU: dcgm("DCGM_FI_DEV_GPU_TEMP")}),
        Panel("Clock", "MHz of the multiprocessors.", "short", {AT_GPU: dcgm("DCGM_FI_DEV_SM_CLOCK")}),
        Panel("Xid errors", "The last one's number; 0: none. 79 is a GPU that fell off the bus; 48, 63 and 94 are of its memory.", "short",
              {AT_GPU: dcgm("DCGM_FI_DEV_XID_ERRORS")}),
    ],
)  # fmt: skip

DASHBOARDS = (OVERVIEW, ENGINE, ROUTING, AUTOSCALING, PREFILL, GPUS)


def panel_json(panel: Panel, number: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0 if panel.title != "Error of the prediction" else -1}
    if panel.most is not None:
        defaults["max"] = panel.most
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.kind == "heatmap":
        options = {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Blues"}}
    else:
        stacking = {"mode": "normal" if panel.stack else "none"}
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stack else 5,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": stacking,
        }
    targets = [
        {"refId": chr(65 + n), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "range": True,
         "format": "heatmap" if panel.kind == "heatmap" else "time_series"}
        for n, (legend, expr) in enumerate(panel.queries.items())
    ]  # fmt: skip
    per_row = 24 // WIDTH
    grid = {"h": HEIGHT, "w": WIDTH, "x": WIDTH * (number % per_row), "y": HEIGHT * (number // per_row)}
    return {
        "id": number + 1, "type": panel.kind, "title": panel.title, "description": panel.text, "datasource": DATASOURCE,
        "gridPos": grid, "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options, "targets": targets,
    }  # fmt: skip


def variables() -> list[dict[str, Any]]:
    def query(name: str, text: str) -> dict[str, Any]:
        return {
            "name": name, "type": "query", "datasource": DATASOURCE, "query": {"query": text, "refId": name}, "definition": text,
            "refresh": 2, "sort": 1, "includeAll": True, "multi": True, "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }  # fmt: skip

    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "data source", "current": {}},
        query("namespace", "label_values(rootstock_gateway_requests_in_flight, namespace)"),
        query("model", 'label_values(rootstock_gateway_queue_length{namespace=~"$namespace"}, model)'),
    ]


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": f"rootstock-{dashboard.name}", "title": dashboard.title, "description": dashboard.text, "tags": ["rootstock"],
        "schemaVersion": 39, "version": 1, "editable": True, "graphTooltip": 1, "refresh": "30s", "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"}, "annotations": {"list": []}, "templating": {"list": variables()},
        "links": [{"type": "dashboards", "tags": ["rootstock"], "title": "Rootstock", "asDropdown": True, "includeVars": True}],
        "panels": [panel_json(panel, number) for number, panel in enumerate(dashboard.panels)],
    }  # fmt: skip


def written() -> dict[Path, str]:
    """Returns the content of each file. Each panel has one line, so that diffs are readable."""
    out = {}
    for dashboard in DASHBOARDS:
        whole = dashboard_json(dashboard)
        panels = ",\n  ".join(json.dumps(panel) for panel in whole.pop("panels"))
        head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in whole.items())
        out[HERE / f"{dashboard.name}.json"] = f'{{{head},\n "panels": [\n  {panels}\n ]}}\n'
    return out


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
