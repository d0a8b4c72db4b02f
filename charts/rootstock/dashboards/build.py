"""Defines the Grafana dashboards. `python charts/rootstock/dashboards/build.py` writes a .json file for each to this folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
NS = 'namespace=~"$namespace"'  # selector for series of the chosen namespaces
GW = f'{NS},model=~"$model"'  # selector for series with the label `model`
KEYED = f'{GW},key!=""'  # selector for series of API keys with their own label
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
    most: float | None = None  # upper end of the axis; None: Grafana chooses it


@dataclass(frozen=True)
class Dashboard:
    """A Grafana dashboard, which is written to one file."""

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
    "Requests, latency and errors as clients see them, for all models of a namespace.",
    [
        Panel("Requests by code", "HTTP responses per second by status code, without probes.", "reqps",
              {"{{code}}": rate(f"{GATEWAY}requests_total", REQUESTS, "code")}, stack=True),
        Panel("Errors of the server", "Share of requests with a 5xx status. The default objective allows 0.5 % per month.", "percentunit",
              {"1 h, {{model}}": f"rootstock:failed_requests:ratio_rate1h{{{NS}}}",
               "5 m, {{model}}": f"rootstock:failed_requests:ratio_rate5m{{{NS}}}"}),
        Panel("Late first tokens", "Share of requests whose first token was later than the objective, 2.5 s by default. 5 % may be late.",
              "percentunit",
              {"1 h, {{model}}": f"rootstock:late_requests:ratio_rate1h{{{GW}}}",
               "5 m, {{model}}": f"rootstock:late_requests:ratio_rate5m{{{GW}}}"}, most=1),
        Panel("Refused without a worker", "Choices per second that got 503 with Retry-After, because no worker took them.", "reqps",
              {"{{reason}}": rate(f"{GATEWAY}refusals_total", NS, "reason")}),
        Panel("Time to first token", "Time from arrival at the gateway to the first decoded token.", "s",
              quantiles(f"{GATEWAY}time_to_first_token_seconds", GW)),
        Panel("Time between tokens", "Time between two decoded tokens of a choice.", "s",
              quantiles(f"{GATEWAY}inter_token_latency_seconds", GW)),
        Panel("Time of a request", "Time from arrival to the last byte of the response.", "s", quantiles(f"{GATEWAY}e2e_request_latency_seconds", GW)),
        Panel("Goodput", "Responses per second: those whose first token came within 2.5 s, and all.", "reqps",
              {"within 2.5 s": rate(f"{GATEWAY}time_to_first_token_seconds_bucket", f'{GW},le="2.5"'),
               "all": rate(f"{GATEWAY}time_to_first_token_seconds_count", GW)}),
        Panel("Requests in flight and waiting", "Requests in gateways, and those of them that wait for a worker.", "short",
              {"in flight": f"sum({GATEWAY}requests_in_flight{{{NS}}})",
               "waiting, {{model}}": f"sum by (model) ({GATEWAY}queue_length{{{GW}}})"}),
        Panel("Time in the gateway's queue", "Time that choices waited for a worker with free slots.", "s",
              quantiles(f"{GATEWAY}queue_time_seconds", NS)),
        Panel("Workers", "Workers by the state that a gateway sees: the smallest number of any gateway.", "short",
              {"{{model}}, {{state}}": f"min by (model, state) ({GATEWAY}workers{{{GW}}})"}),
        Panel("Tokens", "Prompt, cached and output tokens per second.", "short",
              {kind: rate(f"{GATEWAY}{kind}_tokens_total", GW) for kind in ("prompt", "cached", "output")}),
        Panel("Ended by clients", "Requests per second whose client disconnected, by phase of the request.", "reqps",
              {"{{phase}}": rate(f"{GATEWAY}aborts_total", NS, "phase")}),
        Panel("Tokenizer calls", "Calls per second by gRPC status.", "reqps",
              {"{{rpc}}, {{code}}": rate("rootstock_tokenizer_requests_total", NS, "rpc, code")}),
        Panel("Time of a tokenizer call", "Duration of an encoding or of a chat template.", "s",
              quantiles("rootstock_tokenizer_request_seconds", NS)),
        Panel("Time of a detokenizer batch", "Duration of one detokenizer batch, which has new tokens of many choices of one gateway.", "s",
              quantiles("rootstock_detokenizer_batch_seconds", NS)),
        Panel("Requests by key", "Started generation requests per second of the ten API keys with the most requests.", "reqps",
              {"{{key}}": f"topk(10, {rate(f'{GATEWAY}key_requests_total', NS, 'key')})"}, stack=True),
        Panel("Tokens by key", "Prompt and output tokens per second of the ten API keys with the most tokens.", "short",
              {"{{key}}, prompt": f"topk(10, {rate(f'{GATEWAY}prompt_tokens_total', KEYED, 'key')})",
               "{{key}}, output": f"topk(10, {rate(f'{GATEWAY}output_tokens_total', KEYED, 'key')})"}),
        Panel("Time to first token by key", "The 90th percentile of each API key with its own label.", "s",
              {"{{key}}": quantile(0.9, f"{GATEWAY}time_to_first_token_seconds", KEYED, "key")}),
        Panel("Refused by a key's limit", "Requests per second that got 429, by the exceeded limit.", "reqps",
              {"{{limit}}": rate(f"{GATEWAY}rate_limited_total", NS, "limit")}, stack=True),
        Panel("API key file and shared limits", "Whether the file of API keys is valid, and whether limits are shared in Redis. 1: in all gateways; 0: not in every gateway.", "short",
              {"file": f"min({GATEWAY}key_file_valid{{{NS}}})", "shares": f"min({GATEWAY}key_shares_up{{{NS}}})"}, most=1),
        Panel("Batches", "Running batches, and their lines in flight.", "short",
              {"batches": f"sum({GATEWAY}batches_running{{{NS}}})",
               "lines": f"sum({GATEWAY}batch_lines_in_flight{{{NS}}})"}),
        Panel("Batch lines", "Results per second by outcome, and repeated attempts at lines.", "reqps",
              {"{{outcome}}": rate(f"{GATEWAY}batch_lines_total", NS, "outcome"),
               "retries": rate(f"{GATEWAY}batch_retries_total", NS)}, stack=True),
        Panel("Background responses", "Ended background responses per second by status, and the number that run or wait.", "short",
              {"{{status}}": rate(f"{GATEWAY}background_responses_total", NS, "status"),
               "running": f"sum({GATEWAY}background_running{{{NS}}})"}),
        Panel("Memory of the store", "Used share of the store's memory limit. At 1, new records are refused.", "percentunit",
              {"{{namespace}}": f"max by (namespace) ({GATEWAY}store_memory_used_bytes{{{NS}}} / {GATEWAY}store_memory_max_bytes{{{NS}}})"},
              most=1),
        Panel("Time to first token by model", "The 90th percentile.", "s",
              {"{{model}}": quantile(0.9, f"{GATEWAY}time_to_first_token_seconds", GW, "model")}),
    ],
)  # fmt: skip

ENGINE = Dashboard(
    "engine",
    "Rootstock / Engine",
    "Activity of the workers, one line per worker.",
    [
        Panel("Running", "Running requests, and the limit of one worker.", "short",
              {"{{pod}}": f"sglang:num_running_reqs{{{WK}}}", "limit": f"max(rootstock_worker_max_running_requests{{{WK}}})"}),
        Panel("Waiting", "Requests that wait in a worker for memory, and those that wait for a grammar.", "short",
              {"{{pod}}": f"sglang:num_queue_reqs{{{WK}}}", "{{pod}}, grammar": f"sglang:num_grammar_queue_reqs{{{WK}}}"}),
        Panel("KV pool in use", "Share of the KV pool that running requests use.", "percentunit", {"{{pod}}": f"sglang:token_usage{{{WK}}}"},
              most=1),
        Panel("Output", "Tokens per second.", "short", {"{{pod}}": rate("sglang:generation_tokens_total", WK, "pod")},
              stack=True),
        Panel("Tokens computed", "Tokens per second by kind of computation. prefill_cache: prompt tokens that prefix hits saved.", "short",
              {"{{mode}}": rate("sglang:realtime_tokens_total", WK, "mode")}),
        Panel("Steps", "Forward passes per second.", "ops", {"{{pod}}": rate("rootstock_worker_forward_steps_total", WK, "pod")}),
        Panel("Retractions", "Requests per second that were retracted for lack of memory, and those preempted by more urgent requests.", "reqps",
              {"{{pod}}": rate("sglang:num_retracted_requests_total", WK, "pod"),
               "{{pod}}, preempted": rate("rootstock_worker_preempted_requests_total", WK, "pod")}),
        Panel("Hit rate", "Share of admitted prompt tokens that were cached.", "percentunit",
              {"{{pod}}": f"{rate('sglang:cached_tokens_total', WK, 'pod')} / {PROMPT_TOKENS}",
               "30 m, {{model_name}}": f"rootstock:hit_rate:ratio_rate30m{{{WK}}}"}, most=1),
        Panel("Evictions", "Tokens of KV per second that were evicted from the radix cache.", "short",
              {"{{pod}}": rate("sglang:evicted_tokens_total", WK, "pod")}),
        Panel("KV pool", "Tokens of KV: in use, cached and free.", "short",
              {"in use": f"sum(sglang:kv_used_tokens{{{WK}}})", "cached": f"sum(sglang:kv_evictable_tokens{{{WK}}})",
               "free": f"sum(sglang:kv_available_tokens{{{WK}}})"}, stack=True),
        Panel("Cache groups in use", "Share of each pool that running requests use, for models with windowed or recurrent layers.", "percentunit",
              {"{{pod}}, pages": f"sglang:full_token_usage{{{WK}}}", "{{pod}}, windows": f"sglang:swa_token_usage{{{WK}}}",
               "{{pod}}, states": f"sglang:mamba_usage{{{WK}}}"}, most=1),
        Panel("Missed hits", "Cached tokens per second that were computed again, because a window or a state was not cached.", "short",
              {"{{pod}}, windows": rate("rootstock_worker_window_missed_tokens_total", WK, "pod"),
               "{{pod}}, states": rate("rootstock_worker_state_missed_tokens_total", WK, "pod")}),
        Panel("Sessions", "Open sessions, and the tokens that they store.", "short",
              {"sessions": f"sum(rootstock_worker_sessions{{{WK}}})", "tokens": f"sum(rootstock_worker_session_tokens{{{WK}}})"}),
        Panel("Admission", "New-token ratio: share of the remaining output for which admission reserves memory.", "percentunit",
              {"{{pod}}": f"sglang:new_token_ratio{{{WK}}}"}, most=1),
        heatmap("Time to first token", "Time from arrival at the worker to the first token.", "sglang:time_to_first_token_seconds", WK),
        heatmap("Time between tokens", "Time between two tokens of a request at the worker.", "sglang:inter_token_latency_seconds", WK),
        heatmap("Time in the worker's queue", "Time from arrival at the worker to the first step.", "sglang:queue_time_seconds", WK),
        Panel("Hung", "1 while the scheduler loop of a worker makes no progress.", "short", {"{{pod}}": f"rootstock_worker_hung{{{WK}}}"}, most=1),
        Panel("Aborted", "Requests per second that ended without a complete response.", "reqps",
              {"{{pod}}": rate("sglang:num_aborted_requests_total", WK, "pod")}),
        Panel("Resumed", "Requests per second that arrived with output from another worker.", "reqps",
              {"{{pod}}": rate("rootstock_worker_resumed_requests_total", WK, "pod")}),
        Panel("Time in steps", "Share of the time that steps take, by kind of step.", "percentunit",
              {"{{pod}}, {{category}}": rate("sglang:forward_execution_seconds_total", WK, "pod, category")}, stack=True),
        Panel("Bubbles", "Share of the time with running requests and no step in flight. idle: share of the time in which the scheduler loop waits for messages.",
              "percentunit",
              {"{{pod}}": rate("rootstock_worker_bubble_seconds_total", WK, "pod"),
               "{{pod}}, idle": rate("sglang:scheduler_idle_seconds_total", WK, "pod")}),
        Panel("Stages of a request", "90th percentile of each stage: until the first step, until the first token, until the end.", "s",
              {"{{stage}}": quantile(0.9, "sglang:per_stage_req_latency_seconds", WK, "stage")}),
        Panel("Grammars", "Requests per second with a grammar, those whose grammar was compiled already, and aborted ones.", "reqps",
              {"with a grammar": rate("sglang:num_grammar_total", WK), "compiled already": rate("sglang:num_grammar_cache_hit_total", WK),
               "aborted": rate("sglang:num_grammar_aborted_total", WK)}),
        Panel("Compiling a grammar", "Time from the first request with a grammar until the grammar is compiled.", "s",
              quantiles("sglang:grammar_compilation_time_seconds", WK)),
        Panel("Draft tokens", "Verified and accepted draft tokens per second.", "short",
              {"drafted": rate("rootstock_worker_drafted_tokens_total", WK),
               "accepted": f"sum(rate(rootstock_worker_drafted_tokens_total{{{WK}}}[{WINDOW}]) * sglang:spec_accept_rate{{{WK}}})"}),
        Panel("Accepted draft tokens", "Accepted share of recent draft tokens, and mean tokens per verification.", "short",
              {"share, {{pod}}": f"sglang:spec_accept_rate{{{WK}}}", "length, {{pod}}": f"sglang:spec_accept_length{{{WK}}}"}),
        Panel("Balance of experts", "Mean number of rows per expert divided by the largest number, since the last record began. 0: no record.",
              "percentunit", {"{{pod}}": f"rootstock_worker_expert_balancedness{{{WK}}}"}, most=1),
        Panel("Host tier", "Share of the host memory tier in use.", "percentunit",
              {"{{pod}}": f"sglang:hicache_host_used_tokens{{{WK}}} / clamp_min(sglang:hicache_host_total_tokens{{{WK}}}, 1)"}, most=1),
        Panel("Writes to the storage tier", "Tokens of KV per second that were written, and those that were dropped.", "short",
              {"written": rate("sglang:backuped_tokens_total", WK), "dropped": rate("rootstock_worker_unstored_tokens_total", WK)}),
        Panel("Retracted tokens", "Prompt and output tokens per second of retracted requests.", "short",
              {"prompt": rate("sglang:num_retracted_input_tokens_total", WK),
               "output": rate("sglang:num_retracted_output_tokens_total", WK)}),
    ],
)  # fmt: skip

ROUTING = Dashboard(
    "cache-and-routing",
    "Rootstock / Cache and routing",
    "Routing decisions of gateways, their reasons, and the age of the prefix index.",
    [
        Panel("Why a worker was picked", "Choices per second by reason. prefix: a cache hit was expected.", "reqps",
              {"{{reason}}": rate(f"{GATEWAY}routing_decisions_total", NS, "reason")}, stack=True),
        Panel("Predicted and actual hits", "Prompt tokens per second that routing predicted as cached, and those that were cached.", "short",
              {"predicted": rate(f"{GATEWAY}predicted_cached_tokens_total", NS),
               "actual": rate(f"{GATEWAY}cached_tokens_total", NS)}),
        Panel("Error of the prediction", "Predicted minus actual cached tokens, as a share of prompt tokens.", "percentunit",
              {"error": f"({rate(f'{GATEWAY}predicted_cached_tokens_total', NS)} - {rate(f'{GATEWAY}cached_tokens_total', NS)})"
                        f" / ({rate(f'{GATEWAY}prompt_tokens_total', NS)} > 0)"}),
        Panel("Skew", "Largest number of requests of a worker, divided by the mean of all workers. 1: evenly spread; 0: idle.", "short",
              {"{{model_name}}": f"max by (model_name) ({OPEN}) / clamp_min(avg by (model_name) ({OPEN}), 1)"}),
        Panel("Index lag", "Time since a gateway's copy of the index was equal to the index in Redis.", "s",
              {"{{pod}}": f"{GATEWAY}index_lag_seconds{{{NS}}}"}),
        Panel("Redis", "1 if Redis responds to this gateway or worker.", "short",
              {"{{pod}}": f"{GATEWAY}index_up{{{NS}}} or rootstock_worker_redis_up{{{NS}}}",
               "{{pod}}, store": f"{GATEWAY}store_up{{{NS}}}"}, most=1),
        Panel("Blocks in the index", "Blocks of 64 tokens in a gateway's copy. speculative: expected after a routed request and not confirmed yet.",
              "short",
              {"{{pod}}": f"{GATEWAY}index_blocks{{{NS}}}",
               "{{pod}}, speculative": f"{GATEWAY}index_speculative_blocks{{{NS}}}"}),
        Panel("Events", "Event batches per second: published by workers, and read by gateways.", "ops",
              {"published": rate("rootstock_worker_index_events_total", NS), "read": rate(f"{GATEWAY}index_events_total", NS)}),
        Panel("Reloads", "Per hour: full reloads of a worker's blocks, those of them after a gap, and new generations of workers' indexes.",
              "short",
              {"loads": f"sum(increase({GATEWAY}index_loads_total{{{NS}}}[1h]))",
               "after gaps": f"sum(increase({GATEWAY}index_gaps_total{{{NS}}}[1h]))",
               "generations": f"sum(increase(rootstock_worker_index_generations_total{{{NS}}}[1h]))"}),
        Panel("Not yet published", "Changes of blocks that a worker has not yet published to Redis.", "short",
              {"{{pod}}": f"rootstock_worker_index_pending_blocks{{{NS}}}"}),
        Panel("Publication failures", "Failed publications per second, and changes of blocks that were lost by them.", "ops",
              {"failures": rate("rootstock_worker_index_failures_total", NS),
               "changes": rate("rootstock_worker_index_dropped_changes_total", NS)}),
        Panel("Circuit breakers", "Workers by the state of their circuit breaker: the largest number of any gateway.", "short",
              {"{{state}}": f"max by (state) ({GATEWAY}breakers{{{NS}}})"}),
        Panel("Moves", "Choices per second that moved to another worker, by cause.", "reqps",
              {"{{cause}}, {{state}}": rate(f"{GATEWAY}moves_total", NS, "cause, state")}),
        Panel("Retries", "Calls and choices per second that were sent again, by service.", "reqps",
              {"{{service}}": rate(f"{GATEWAY}retries_total", NS, "service")}),
        Panel("Connections", "Replicas to which a gateway is connected: the smallest number of any gateway.", "short",
              {"{{service}}": f"min by (service) ({GATEWAY}connected{{{NS}}})"}),
    ],
)  # fmt: skip

AUTOSCALING = Dashboard(
    "autoscaling",
    "Rootstock / Autoscaling",
    "Demand against replicas. docs/how-to/kubernetes/autoscaling.md explains the figures.",
    [
        Panel("Demand and workers", "Workers that the arriving and waiting requests need, serving workers, and loading workers.",
              "short",
              {"needed, {{model}}": f"rootstock:enough_workers{{{GW}}}", "serving, {{model}}": f"rootstock:workers{{{GW}}}",
               "loading, {{model}}": f"rootstock:loading_workers{{{GW}}}"}),
        Panel("Waiting", "Requests in the queues of gateways and workers.", "short",
              {"{{model}}": f"rootstock:waiting_requests{{{GW}}}"}),
        Panel("Running", "Running requests, and the slots of all workers.", "short",
              {"running, {{model}}": f"rootstock:running_requests{{{GW}}}", "slots, {{model}}": f"rootstock:slots{{{GW}}}"}),
        Panel("Slots in use", "Running requests as a share of all slots. The HPA's target is runningShare.", "percentunit",
              {"{{model}}": f"rootstock:running_requests{{{GW}}} / rootstock:slots{{{GW}}}"}, most=1),
        Panel("KV pool in use", "Share of the KV pool in use, mean of all workers. The HPA's target is tokenUsage.", "percentunit",
              {"{{model_name}}": f"avg by (model_name) (sglang:token_usage{{{WK}}})"}, most=1),
        Panel("Arriving and ending", "Requests per second. If the lines differ, the backlog grows or shrinks.", "reqps",
              {"arriving, {{model}}": f"rootstock:arriving_requests:rate2m{{{GW}}}",
               "ending, {{model}}": f"rootstock:ended_requests:rate2m{{{GW}}}"}),
        Panel("Share of arrivals", "Share of the running requests that arrivals alone would keep running. The rest is a backlog.", "percentunit",
              {"{{model}}": f"rootstock:arrival_share{{{GW}}}"}, most=1),
        Panel("Workers by phase", "Workers by phase since the start of their process. Pods that wait for a node are not counted.", "short",
              {"{{phase}}": f"sum by (phase) (rootstock_worker_phase{{{WK}}})"}, stack=True),
        Panel("Cold start", "Time from the first response of a worker's process until it is ready, without the time for its node and image.", "s",
              {"{{pod}}": f"rootstock_worker_cold_start_seconds{{{WK}}}"}),
        Panel("Requests in flight per gateway", "The number by which gateways are scaled, in addition to CPU.", "short",
              {"{{pod}}": f"{GATEWAY}requests_in_flight{{{NS}}}"}),
        Panel("CPU of gateways", "Used cores.", "short",
              {"{{pod}}": f'rate(process_cpu_seconds_total{{{NS},component="rootstock-gateway"}}[{WINDOW}])'}),
        Panel("Memory of workers", "Resident memory of the worker process.", "bytes",
              {"{{pod}}": f'process_resident_memory_bytes{{{NS},component="rootstock-worker"}}'}),
    ],
)  # fmt: skip

PREFILL = Dashboard(
    "prefill-and-decode",
    "Rootstock / Prefill and decode",
    "Prefill workers and decode workers. docs/how-to/kubernetes/prefill-and-decode.md explains the figures.",
    [
        Panel("Waiting", "Tokens of requests in workers' queues. Their number per prefill worker is a target of autoscaling.", "short",
              {"{{engine_type}}": f"sum by (engine_type) (rootstock_worker_waiting_tokens{{{WK}}})"}),
        Panel("Busy", "Mean share of the time in which a worker computes, a target of autoscaling for prefill workers.", "percentunit",
              {"{{engine_type}}": f"avg by (engine_type) (sum by (pod, engine_type) (rate(sglang:forward_execution_seconds_total{{{WK}}}[{WINDOW}])))"}),
        Panel("KV pool in use", "Share of the KV pool in use, mean of all workers, a target of autoscaling for decode workers.", "percentunit",
              {"{{engine_type}}": f"avg by (engine_type) (sglang:token_usage{{{WK}}})"}, most=1),
        Panel("Running", "Running requests.", "short",
              {"{{engine_type}}": f"sum by (engine_type) (sglang:num_running_reqs{{{WK}}})"}),
        Panel("Prompt tokens computed", "Prompt tokens computed per second. Decode workers compute short prompts, and prompts for which no prefill worker was free.",
              "short",
              {"{{engine_type}}": rate("sglang:realtime_tokens_total", f'{WK},mode="prefill_compute"', "engine_type")}),
        Panel("Handed over", "Choices per second that continued on a decode worker: with a KV reservation (room), or without one.", "reqps",
              {"{{source}}": rate(f"{GATEWAY}handovers_total", NS, "source")}, stack=True),
        Panel("KV read", "Tokens of KV per second that were read from prefill workers.", "short",
              {"{{pod}}": rate("rootstock_worker_pulled_tokens_total", WK, "pod")}, stack=True),
        Panel("Speed of reads", "Recent speed of KV reads from prefill workers. Before the first read, it is an assumed value.", "Bps",
              {"{{pod}}": f"rootstock_worker_pull_bytes_per_second{{{WK}}}"}),
        Panel("KV reservations", "Prompts whose KV is reserved for decode workers.", "short",
              {"{{pod}}": f"rootstock_worker_rooms{{{WK}}}"}),
        Panel("Unused and refused KV", "Per second: expired KV reservations, and reads that returned no page. Such prompts are computed again.",
              "ops",
              {"expired": rate("rootstock_worker_rooms_expired_total", WK),
               "refused": rate("rootstock_worker_refused_pulls_total", WK)}),
    ],
)  # fmt: skip


def dcgm(series: str) -> str:
    """Returns the PromQL query of a metric of NVIDIA's DCGM exporter, by pod, GPU and node.

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
        Panel("Tensor cores", "Share of cycles in which tensor cores compute. Low in decode, which waits for memory.", "percentunit",
              {AT_GPU: dcgm("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")}, most=1),
        Panel("Memory bus", "Share of cycles in which the memory bus transfers data. High in decode.", "percentunit",
              {AT_GPU: dcgm("DCGM_FI_PROF_DRAM_ACTIVE")}, most=1),
        Panel("Memory in use", "Memory in use by weights, KV pool and graphs.", "mbytes", {AT_GPU: dcgm("DCGM_FI_DEV_FB_USED")}),
        Panel("Power", "Power of each GPU.", "watt", {AT_GPU: dcgm("DCGM_FI_DEV_POWER_USAGE")}),
        Panel("Temperature", "Temperature of each GPU. Near the limit, the GPU lowers its clock.", "celsius", {AT_GPU: dcgm("DCGM_FI_DEV_GPU_TEMP")}),
        Panel("Clock", "Clock of the multiprocessors in MHz.", "short", {AT_GPU: dcgm("DCGM_FI_DEV_SM_CLOCK")}),
        Panel("Xid errors", "Number of the last Xid error; 0: no error. 79: the GPU has fallen off the bus. 48, 63 and 94: memory errors.", "short",
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
        content = dashboard_json(dashboard)
        panels = ",\n  ".join(json.dumps(panel) for panel in content.pop("panels"))
        head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        out[HERE / f"{dashboard.name}.json"] = f'{{{head},\n "panels": [\n  {panels}\n ]}}\n'
    return out


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
