"""The scheduler's counters and gauges, for metrics, load reports and the simulator.

A field that is exported as a metric is annotated with ExportedAs. The worker's metrics exporter reads the annotations by
exported_fields(), because the core does not import Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, get_type_hints


@dataclass(slots=True)
class Counters:
    """Counts of the scheduler's events since the start of the process.

    The component that causes an event increments the counter. StepStats has a field of the same name for each counter.
    """

    requests_total: int = 0  # received requests, refused ones included
    resumed_total: int = 0  # requests that arrived with output that another worker had sampled
    aborts_total: int = 0  # requests that ended with an error or a cancellation
    prompt_tokens_total: int = 0  # prompt tokens of requests at their first admission
    cached_tokens_total: int = 0  # prompt tokens that a prefix hit covered at the first admission
    generated_tokens_total: int = 0  # output tokens, including tokens that a grammar forced
    retractions_total: int = 0  # retractions of running requests, for lack of memory or by a pause
    retracted_input_tokens_total: int = 0  # prompt tokens of retracted requests, counted at each retraction
    retracted_output_tokens_total: int = 0  # output tokens of retracted requests, counted at each retraction
    preemptions_total: int = 0  # running requests that a more urgent request displaced
    grammars_total: int = 0  # requests with a grammar
    grammar_hits_total: int = 0  # requests whose grammar had been compiled before they arrived
    grammar_aborts_total: int = 0  # aborted requests with a grammar
    verified_rows_total: int = 0  # decode rows with draft tokens
    drafted_tokens_total: int = 0  # draft tokens of decode rows
    accepted_tokens_total: int = 0  # draft tokens that verification accepted


COUNTER_NAMES = tuple(field.name for field in fields(Counters))


@dataclass(frozen=True, slots=True)
class ExportedAs:
    """The metric that exports a field of StepStats."""

    metric: str  # name without the suffix _total of counters
    text: str  # help text
    in_pages: bool = False  # whether the field counts pages, which the exporter converts to tokens


@dataclass(frozen=True, slots=True)
class StepStats:
    """Current values of the gauges and the counters. A counter's name ends in _total. Memory is in pages."""

    num_running: Annotated[int, ExportedAs("sglang:num_running_reqs", "Running requests.")]
    max_running_requests: Annotated[
        int, ExportedAs("rootstock_worker_max_running_requests", "Largest number of running requests.")
    ]
    num_waiting: int
    num_gated: Annotated[int, ExportedAs("sglang:num_grammar_queue_reqs", "Requests that wait for their grammar.")]
    num_retracted: Annotated[int, ExportedAs("sglang:num_retracted_reqs", "Retracted requests that wait for admission.")]
    waiting_tokens: Annotated[int, ExportedAs("rootstock_worker_waiting_tokens", "Prompt and output tokens of waiting requests.")]
    pages_leased: int
    pages_cached: int
    pages_evictable: Annotated[int, ExportedAs("sglang:kv_evictable_tokens", "Tokens of cached KV that can be evicted.", True)]
    pages_free: Annotated[int, ExportedAs("sglang:kv_available_tokens", "Tokens of free KV.", True)]
    new_token_ratio: Annotated[
        float, ExportedAs("sglang:new_token_ratio", "Share of the remaining output that admission reserves.")
    ]
    batch_is_full: bool
    paused: bool
    refuses_new: bool  # whether max_queued_requests is 0
    running_by_key: tuple[int, ...]  # running requests per routing key; keys without running requests are left out
    requests_by_key: tuple[int, ...]  # running and waiting requests per routing key; keys without requests are left out
    num_sessions: Annotated[int, ExportedAs("rootstock_worker_sessions", "Open sessions.")]
    session_tokens: Annotated[int, ExportedAs("rootstock_worker_session_tokens", "Tokens of context that sessions store.")]
    requests_total: Annotated[int, ExportedAs("sglang:num_requests", "Received requests.")]
    aborts_total: Annotated[
        int, ExportedAs("sglang:num_aborted_requests", "Requests that ended with an error or a cancellation.")
    ]
    prompt_tokens_total: Annotated[int, ExportedAs("sglang:prompt_tokens", "Prompt tokens of admitted requests.")]
    cached_tokens_total: Annotated[int, ExportedAs("sglang:cached_tokens", "Prompt tokens that a prefix hit covered.")]
    generated_tokens_total: Annotated[int, ExportedAs("sglang:generation_tokens", "Output tokens.")]
    retractions_total: Annotated[int, ExportedAs("sglang:num_retracted_requests", "Retractions of running requests.")]
    retracted_input_tokens_total: Annotated[
        int, ExportedAs("sglang:num_retracted_input_tokens", "Prompt tokens of retracted requests.")
    ]
    retracted_output_tokens_total: Annotated[
        int, ExportedAs("sglang:num_retracted_output_tokens", "Output tokens of retracted requests.")
    ]
    grammars_total: Annotated[int, ExportedAs("sglang:num_grammar", "Requests with a grammar.")]
    grammar_hits_total: Annotated[
        int, ExportedAs("sglang:num_grammar_cache_hit", "Requests whose grammar was compiled when they arrived.")
    ]
    grammar_aborts_total: Annotated[
        int,
        ExportedAs(
            "sglang:num_grammar_aborted",
            "Requests with a grammar that ended with an error or a cancellation, including refused grammars.",
        ),
    ]
    preemptions_total: Annotated[
        int, ExportedAs("rootstock_worker_preempted_requests", "Requests displaced by more urgent ones.")
    ]
    resumed_total: Annotated[
        int, ExportedAs("rootstock_worker_resumed_requests", "Requests that arrived with output from another worker.")
    ]
    verified_rows_total: Annotated[int, ExportedAs("sglang:spec_verify_calls", "Decode rows with draft tokens.")]
    drafted_tokens_total: Annotated[int, ExportedAs("rootstock_worker_drafted_tokens", "Draft tokens that were verified.")]
    accepted_tokens_total: Annotated[int, ExportedAs("rootstock_worker_accepted_tokens", "Draft tokens that were accepted.")]
    evicted_pages_total: Annotated[int, ExportedAs("sglang:evicted_tokens", "Tokens of KV evicted from the radix tree.", True)]

    # In these public names of fields and metrics, "room" means KV reservation.
    num_rooms: Annotated[int, ExportedAs("rootstock_worker_rooms", "Open KV reservations for decode workers.")]
    rooms_total: Annotated[
        int, ExportedAs("rootstock_worker_rooms_opened", "KV reservations that were opened for decode workers.")
    ]
    expired_rooms_total: Annotated[
        int, ExportedAs("rootstock_worker_rooms_expired", "KV reservations that reached their time limit.")
    ]

    expert_balancedness: Annotated[
        float,
        ExportedAs(
            "rootstock_worker_expert_balancedness",
            "Balance of the experts since the last expert distribution record began: mean number of rows of a layer's experts"
            " divided by their largest number, as a mean over the sparse layers. 1: all experts compute equally many rows. 0: no"
            " rows yet.",
        ),
    ] = 0.0
    window_units: Annotated[
        int,
        ExportedAs("sglang:max_total_num_tokens_swa", "Tokens that the window units can hold; 0 without window units.", True),
    ] = 0
    window_units_free: Annotated[
        int, ExportedAs("sglang:swa_available_tokens", "Tokens of free KV of windowed layers.", True)
    ] = 0
    window_units_evictable: Annotated[
        int, ExportedAs("sglang:swa_evictable_tokens", "Tokens of cached KV of windowed layers that can be evicted.", True)
    ] = 0
    window_units_quarantined: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_window_quarantined_tokens",
            "Tokens of KV of windowed layers that imports from other tiers are writing.",
            True,
        ),
    ] = 0
    window_evicted_units_total: Annotated[
        int, ExportedAs("rootstock_worker_window_evicted_tokens", "Tokens of KV of windowed layers that were evicted.", True)
    ] = 0
    states: Annotated[int, ExportedAs("rootstock_worker_states", "Size of the pool of states of recurrent layers.")] = 0
    states_free: Annotated[int, ExportedAs("sglang:mamba_available_tokens", "Free states of recurrent layers.")] = 0
    states_evictable: Annotated[
        int, ExportedAs("sglang:mamba_evictable_tokens", "Cached states of recurrent layers that can be evicted.")
    ] = 0
    states_quarantined: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_quarantined_states", "States of recurrent layers that imports from other tiers are writing."
        ),
    ] = 0
    states_evicted_total: Annotated[
        int, ExportedAs("rootstock_worker_evicted_states", "States of recurrent layers that were evicted.")
    ] = 0
    window_missed_pages_total: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_window_missed_tokens",
            "Prompt tokens with cached KV that were computed again, because no page end after them had a cached window.",
            True,
        ),
    ] = 0
    state_missed_pages_total: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_state_missed_tokens",
            "Prompt tokens with cached KV that were computed again, because no page end after them had a cached state.",
            True,
        ),
    ] = 0
    pages_quarantined: Annotated[
        int, ExportedAs("rootstock_worker_quarantined_tokens", "Tokens of KV that imports from other tiers are writing.", True)
    ] = 0
    host_pages: Annotated[int, ExportedAs("sglang:hicache_host_total_tokens", "Size of the host tier in tokens.", True)] = 0
    host_pages_used: Annotated[
        int,
        ExportedAs(
            "sglang:hicache_host_used_tokens",
            "Tokens of KV in the host tier. A window unit or a state counts as the pages that it takes.",
            True,
        ),
    ] = 0
    host_salts: Annotated[int, ExportedAs("rootstock_worker_host_salts", "Cache salts with KV in the host tier.")] = 0
    host_over_quota_pages_total: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_host_over_quota_tokens",
            "Tokens of KV evicted from the host tier because their cache salt was at its quota.",
            True,
        ),
    ] = 0
    storage_pages: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_storage_tokens",
            "Tokens of KV in the storage tier. A window unit or a state counts as the pages that it takes.",
            True,
        ),
    ] = 0
    storage_bytes: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_storage_bytes",
            "Bytes of the storage tier: of all files on the disk, or of the pages in Redis that this worker can read.",
        ),
    ] = 0
    storage_salts: Annotated[int, ExportedAs("rootstock_worker_storage_salts", "Cache salts with KV in the storage tier.")] = 0
    storage_over_quota_pages_total: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_storage_over_quota_tokens",
            "Tokens of KV removed from the storage tier because their cache salt was at its quota.",
            True,
        ),
    ] = 0
    storage_deleted_pages_total: Annotated[
        int, ExportedAs("rootstock_worker_storage_deleted_tokens", "Tokens of KV deleted from the storage tier on demand.", True)
    ] = 0
    num_importing: Annotated[
        int, ExportedAs("rootstock_worker_importing_requests", "Requests that wait for a prefix from another tier.")
    ] = 0
    backed_up_pages_total: Annotated[
        int, ExportedAs("sglang:hicache_backup_tokens", "Tokens of KV copied to the host tier.", True)
    ] = 0
    stored_pages_total: Annotated[
        int, ExportedAs("sglang:backuped_tokens", "Tokens of KV written to the storage tier.", True)
    ] = 0
    lost_pages_total: Annotated[
        int, ExportedAs("rootstock_worker_lost_tokens", "Tokens of KV evicted before their copy to the host tier.", True)
    ] = 0
    unstored_pages_total: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_unstored_tokens",
            "Tokens of KV that were not written to the storage tier because it failed or was too slow.",
            True,
        ),
    ] = 0
    loaded_pages_total: Annotated[int, ExportedAs("sglang:load_back_tokens", "Tokens of KV read from the host tier.", True)] = 0
    fetched_pages_total: Annotated[
        int, ExportedAs("sglang:prefetched_tokens", "Tokens of KV read from the storage tier.", True)
    ] = 0
    pulled_pages_total: Annotated[
        int, ExportedAs("rootstock_worker_pulled_tokens", "Tokens of KV read from prefill workers.", True)
    ] = 0
    prefetched_pages_total: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_prefetched_tokens",
            "Tokens of KV read from prefill workers that were still computing the rest of the prompt.",
            True,
        ),
    ] = 0
    refused_pulls_total: Annotated[
        int, ExportedAs("rootstock_worker_refused_pulls", "Reads from prefill workers that returned no page.")
    ] = 0
    load_bytes_s: Annotated[
        float,
        ExportedAs(
            "rootstock_worker_load_bytes_per_second",
            "Rate of recent reads from the host tier; before the first read, an assumed rate.",
        ),
    ] = 0.0
    fetch_bytes_s: Annotated[
        float,
        ExportedAs(
            "rootstock_worker_fetch_bytes_per_second",
            "Rate of recent reads from the storage tier; before the first read, an assumed rate.",
        ),
    ] = 0.0
    pull_bytes_s: Annotated[
        float,
        ExportedAs(
            "rootstock_worker_pull_bytes_per_second",
            "Rate of recent reads from the fastest prefill worker; before the first read, an assumed rate.",
        ),
    ] = 0.0
    # Estimates for a prefix of LOOKED_AT_PAGES pages (core/tiers/tiers.py).
    pulls_lose: bool = False  # whether reading the prefix from the fastest remote worker is slower than computing it
    # Share (0 to 1) of the prefix's computing time that a read from the tier saves; None: no step was measured yet.
    host_saves: float | None = None
    storage_saves: float | None = None
    recomputed_pages_total: Annotated[
        int,
        ExportedAs(
            "rootstock_worker_recomputed_tokens",
            "Tokens whose KV was computed although another tier had it when their request was admitted.",
            True,
        ),
    ] = 0
    given_up_operations_total: Annotated[
        int, ExportedAs("rootstock_worker_late_imports", "Reads from another tier for which requests stopped waiting.")
    ] = 0
    failed_operations_total: Annotated[
        int, ExportedAs("rootstock_worker_failed_copies", "Copies between tiers that moved only some or none of their pages.")
    ] = 0
    host_evicted_pages_total: Annotated[
        int, ExportedAs("rootstock_worker_host_evicted_tokens", "Tokens of KV evicted from the host tier.", True)
    ] = 0

    @property
    def pages_used(self) -> int:
        """Number of pages that running requests use: leased pages, and cached pages that are pinned."""
        return self.pages_leased + self.pages_cached - self.pages_evictable

    @property
    def window_units_used(self) -> int:
        """Number of window units that running requests use: units of slots, and cached units that are pinned."""
        return self.window_units - self.window_units_free - self.window_units_evictable - self.window_units_quarantined

    @property
    def states_used(self) -> int:
        """Number of states that running requests use: states of slots, and cached states that are pinned."""
        return self.states - self.states_free - self.states_evictable - self.states_quarantined


def exported_fields() -> dict[str, ExportedAs]:
    """Returns the annotation of each StepStats field that is exported as a metric."""

    def marks() -> Iterator[tuple[str, ExportedAs]]:
        for name, hint in get_type_hints(StepStats, include_extras=True).items():
            yield from ((name, mark) for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, ExportedAs))

    return dict(marks())
