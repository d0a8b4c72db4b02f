"""Defines the series of a healthy system, and for each alert the changed series that must make the alert fire.

Values are in promtool's notation: the series `a+bxn` begins at a and increases n times by b, once per minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GATEWAY = 'namespace="serving",pod="gateway-0"'
WORKER = 'namespace="serving",pod="worker-0",model_name="demo"'
ANSWERS = f'rootstock_gateway_requests_total{{{GATEWAY},route="/v1/chat/completions",model="demo",code='
LATENCY = f"rootstock_gateway_e2e_request_latency_seconds_bucket{{{GATEWAY},le="
LIMIT = f'rootstock_worker_max_running_requests{{{WORKER},component="rootstock-worker"}}'
MOST = 'rootstock:max_replicas{namespace="serving",component="rootstock-worker",model="demo"}'  # recorded by the chart
GRACE = f"rootstock_gateway_grace_period_seconds{{{GATEWAY}}}"
FIRST = f'rootstock_gateway_time_to_first_token_seconds_bucket{{{GATEWAY},model="demo",le="2.5"}}'
FIRSTS = f'rootstock_gateway_time_to_first_token_seconds_count{{{GATEWAY},model="demo"}}'
HITS, PROMPTS = f"sglang:cached_tokens_total{{{WORKER}}}", f"sglang:prompt_tokens_total{{{WORKER}}}"
QUEUE = f'rootstock_gateway_queue_length{{{GATEWAY},model="demo"}}'
USABLE = f'rootstock_gateway_workers{{{GATEWAY},model="demo",state="usable"}}'
RETRACTED = f"sglang:num_retracted_requests_total{{{WORKER}}}"
USAGE = f"sglang:token_usage{{{WORKER}}}"
LAG = f"rootstock_gateway_index_lag_seconds{{{GATEWAY}}}"
GATEWAY_REDIS, WORKER_REDIS = (
    f"rootstock_gateway_index_up{{{GATEWAY}}}",
    'rootstock_worker_redis_up{namespace="serving",pod="worker-0"}',
)
HUNG = f"rootstock_worker_hung{{{WORKER}}}"
UP = 'up{namespace="serving",pod="worker-0",component="rootstock-worker"}'
PENDING = 'kube_pod_status_phase{namespace="serving",pod="worker-0",phase="Pending"}'  # from kube-state-metrics
FOREIGN_UP = 'up{namespace="serving",pod="other-0",component="other"}'
MOVES = f'rootstock_gateway_moves_total{{{GATEWAY},cause="drain",state='
BREAKERS = f'rootstock_gateway_breakers{{{GATEWAY},state="open"}}'
REFUSALS = f'rootstock_gateway_refusals_total{{{GATEWAY},reason="queue_full"}}'
PAUSED = f'rootstock_gateway_refusals_total{{{GATEWAY},reason="paused"}}'
STORE_USED, STORE_MAX = (
    f"rootstock_gateway_store_memory_used_bytes{{{GATEWAY}}}",
    f"rootstock_gateway_store_memory_max_bytes{{{GATEWAY}}}",
)
CLAIM = 'namespace="serving",persistentvolumeclaim="data-rootstock-state-0"'
VOLUME_USED, VOLUME_MAX = f"kubelet_volume_stats_used_bytes{{{CLAIM}}}", f"kubelet_volume_stats_capacity_bytes{{{CLAIM}}}"
BATCHES = f"rootstock_gateway_batches_running{{{GATEWAY}}}"
BATCH_LINES = f'rootstock_gateway_batch_lines_total{{{GATEWAY},outcome="completed"}}'
BACKGROUND = f"rootstock_gateway_background_responses_total{{{GATEWAY},status="
DROPPED, WRITTEN = f"rootstock_worker_unstored_tokens_total{{{WORKER}}}", f"sglang:backuped_tokens_total{{{WORKER}}}"
ACCEPTED, DRAFTED = f"sglang:spec_accept_rate{{{WORKER}}}", f"rootstock_worker_drafted_tokens_total{{{WORKER}}}"
EXPIRED = 'rootstock_worker_rooms_expired_total{namespace="serving",pod="prefill-0",model_name="demo",engine_type="prefill"}'
REFUSED_READS = f"rootstock_worker_refused_pulls_total{{{WORKER}}}"
FILES_VALID, NOT_AFTER = f"rootstock_tls_files_valid{{{GATEWAY}}}", f"rootstock_tls_certificate_not_after_seconds{{{GATEWAY}}}"
TLS_FAILURES = f'rootstock_gateway_tls_failures_total{{{GATEWAY},service="worker"}}'
STORE = f"rootstock_gateway_store_up{{{GATEWAY}}}"
KEY_FILE, KEY_SHARES = f"rootstock_gateway_key_file_valid{{{GATEWAY}}}", f"rootstock_gateway_key_shares_up{{{GATEWAY}}}"

WELL: Mapping[str, str] = {
    QUEUE: "0x600",
    f"sglang:num_queue_reqs{{{WORKER}}}": "0x600",
    f"sglang:num_running_reqs{{{WORKER}}}": "10x600",
    LIMIT: "64x600",
    MOST: "4x600",
    FIRST: "0+59x600",
    FIRSTS: "0+60x600",
    f"sglang:e2e_request_latency_seconds_count{{{WORKER}}}": "0+60x600",
    f'rootstock_worker_phase{{{WORKER},phase="loading"}}': "0x600",
    USABLE: "1x600",
    f'rootstock_gateway_workers{{{GATEWAY},model="demo",state="unusable"}}': "0x600",
    RETRACTED: "0+1x600",
    f"sglang:num_requests_total{{{WORKER}}}": "0+60x600",
    USAGE: "0.7x600",
    HITS: "0+600x600",
    PROMPTS: "0+1000x600",
    LAG: "0.2x600",
    GATEWAY_REDIS: "1x600",
    WORKER_REDIS: "1x600",
    f'{ANSWERS}"200"}}': "0+1000x600",
    f'{ANSWERS}"400"}}': "0+500x600",
    f'{ANSWERS}"503"}}': "0+1x600",
    f'rootstock_gateway_requests_total{{{GATEWAY},route="/readiness",model="other",code="503"}}': "0+60x600",
    HUNG: "0x600",
    UP: "1x600",
    FOREIGN_UP: "0x600",
    f'{MOVES}"new"}}': "0+10x600",
    f'{MOVES}"begun"}}': "0x600",
    f'{LATENCY}"60"}}': "0+60x600",
    f'{LATENCY}"300"}}': "0+60x600",
    f'{LATENCY}"+Inf"}}': "0+60x600",
    GRACE: "120x600",
    BREAKERS: "0x600",
    REFUSALS: "0x600",
    PAUSED: "0+600x600",
    STORE_USED: "1000x600",
    STORE_MAX: "2000x600",
    VOLUME_USED: "1000x600",
    VOLUME_MAX: "2000x600",
    BATCHES: "1x600",
    BATCH_LINES: "0+1x600",
    f'{BACKGROUND}"failed"}}': "0+1x600",
    f'{BACKGROUND}"completed"}}': "0+60x600",
    DROPPED: "0+10x600",
    WRITTEN: "0+1000x600",
    ACCEPTED: "0.6x600",
    DRAFTED: "0+600x600",
    EXPIRED: "0x5 3x600",  # increases once
    REFUSED_READS: "0x5 3x600",
    KEY_FILE: "1x600",
    KEY_SHARES: "1x600",
    STORE: "1x600",
    FILES_VALID: "1x600",
    NOT_AFTER: "2592000x600",  # seconds: the certificate expires a month after the start of the test
    TLS_FAILURES: "0x5 3x600",
}


@dataclass(frozen=True)
class Scenario:
    """The series with which an alert must fire.

    The other series are those of WELL.
    """

    alert: str  # name of the alert
    differs: Mapping[str, str]  # series that replace those of WELL, by name
    at: str = "30m"  # time at which the alert must fire
    before: str = ""  # time at which the alert must not fire yet; "": not checked
    others: frozenset[str] = frozenset()  # names of the alerts that must fire too


SLOW, LATE = "RootstockErrorBudgetBurnSlow", "RootstockFirstTokenBudgetBurnSlow"
SCENARIOS = (
    Scenario("RootstockQueueGrowing", {QUEUE: "0+5x600"}, before="8m"),
    Scenario("RootstockNoReadyWorker", {QUEUE: "3x600", USABLE: "0x600"}, before="8m"),
    Scenario("RootstockRetractionStorm", {RETRACTED: "0+30x600"}, before="8m"),
    Scenario("RootstockKVFull", {USAGE: "0.7x5 0.98x600"}, before="12m"),
    Scenario("RootstockHitRateCollapse", {HITS: "0+600x420 252000+20x180"}, "8h", before="7h"),
    Scenario("RootstockIndexLag", {LAG: "0+1x600"}, before="12m"),
    Scenario("RootstockIndexDown", {GATEWAY_REDIS: "1x5 0x600"}, before="8m"),
    Scenario("RootstockIndexDown", {WORKER_REDIS: "1x5 0x600"}, before="8m"),
    Scenario("RootstockErrorBudgetBurnFast", {f'{ANSWERS}"503"}}': "0+300x600"}, before="2m", others=frozenset({SLOW})),
    Scenario(SLOW, {f'{ANSWERS}"500"}}': "0+80x600"}, before="14m"),
    Scenario("RootstockFirstTokenBudgetBurnFast", {FIRST: "0+5x600"}, before="2m", others=frozenset({LATE})),
    Scenario(LATE, {FIRST: "0+30x600"}, before="14m"),
    Scenario("RootstockAtMaximum", {MOST: "1x600"}, before="14m"),
    Scenario("RootstockWorkerHung", {HUNG: "0x28 1x600"}, before="27m"),
    Scenario("RootstockTargetDown", {UP: "1x5 0x600"}, before="8m"),
    Scenario("RootstockTargetDown", {UP: "0x600", PENDING: "1x20 0x600"}, before="24m"),  # no alert while the pod is pending
    Scenario("RootstockMetricsMissing", {QUEUE: "0x5 _x600"}, before="14m"),
    Scenario("RootstockMetricsMissing", {QUEUE: "0x60 _x600"}, "80m", before="69m"),
    Scenario("RootstockMetricsMissing", {LIMIT: "64x5 _x600"}, before="14m"),
    Scenario("RootstockGraceExceeded", {f'{MOVES}"begun"}}': "0x20 2x600"}, before="19m"),
    Scenario("RootstockGraceTooShort", {f'{LATENCY}"60"}}': "0+50x600"}, "60m", before="25m"),
    Scenario("RootstockBreakerOpen", {BREAKERS: "0x10 1x600"}, before="11m"),
    Scenario("RootstockQueueRefused", {REFUSALS: "0+30x600"}, before="4m"),
    Scenario("RootstockStoreMemoryHigh", {STORE_USED: "1000x5 1700x600"}, before="18m"),
    Scenario("RootstockStoreVolumeHigh", {VOLUME_USED: "1000x5 1700x600"}, before="18m"),
    Scenario("RootstockBatchesStalled", {BATCH_LINES: "0x600"}, "80m", before="29m"),
    Scenario("RootstockBackgroundFailing", {f'{BACKGROUND}"failed"}}': "0+20x600"}, before="4m"),
    Scenario("RootstockTierDropsWrites", {DROPPED: "0+500x600"}, "80m", before="29m"),
    Scenario("RootstockDraftsRejected", {ACCEPTED: "0.05x600"}, "80m", before="29m"),
    Scenario("RootstockKeyFileInvalid", {KEY_FILE: "1x5 0x600"}, before="8m"),
    Scenario("RootstockKeySharesDown", {KEY_SHARES: "1x5 0x600"}, before="8m"),
    Scenario("RootstockStoreDown", {STORE: "1x5 0x600"}, before="8m"),
    Scenario("RootstockTlsFilesInvalid", {FILES_VALID: "1x5 0x600"}, before="8m"),
    Scenario("RootstockTlsCertificateExpires", {NOT_AFTER: "606000x600"}, before="19m"),
    Scenario("RootstockTlsFailures", {TLS_FAILURES: "0x5 1+1x600"}, before="14m"),
    Scenario("RootstockPrefillNotRead", {EXPIRED: "0x5 1+1x600"}, before="14m"),
    Scenario("RootstockPrefillReadsRefused", {REFUSED_READS: "0x5 1+1x600"}, before="14m"),
)
