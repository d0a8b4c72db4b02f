"""Collects all seeded faults, and defines the areas, each with the test files that must find its faults."""

from __future__ import annotations

from tests.mutants.faults.chart import CHART
from tests.mutants.faults.core import CORE
from tests.mutants.faults.exec import EXEC
from tests.mutants.faults.fetch import FETCH
from tests.mutants.faults.gateway import GATEWAY
from tests.mutants.faults.grammar import GRAMMAR
from tests.mutants.faults.kernels import KERNELS
from tests.mutants.faults.loads import LOADS
from tests.mutants.faults.parsers import PARSERS
from tests.mutants.faults.peers import PEERS
from tests.mutants.faults.speculation import SPECULATION
from tests.mutants.faults.tiers import TIERS
from tests.mutants.faults.worker import WORKER

KERNELS_TOO = (
    "triton_step",
    "triton_layers",
    "triton_experts",
    "top_n_sigma",
    "triton_select_tokens",
    "triton_attention",
    "deterministic_triton",
    "triton_measure_logprobs",
)
AREAS: dict[str, tuple[str, ...]] = {
    "chart": (
        *(
            f"tests/chart/test_{name}.py"
            for name in (
                "objects",
                "templates",
                "values",
                "pod_security",
                "network_policies",
                "overlay",
                "settings",
                "upgrade",
                "images_rules",
            )
        ),
        "tests/contracts/test_chart_schema.py",
    ),
    "fetch": ("tests/services/shared/test_fetch.py",),
    "kernels": tuple(
        f"tests/kernels/test_{name}.py"
        for name in ("cpu_kernels", "coded_experts", "coded_linear", "deterministic_kernels", "experts", *KERNELS_TOO)
    ),
    "core": (
        *(
            f"tests/core/test_rules_{name}.py"
            for name in ("grammar", "logprobs", "experts", "finish", "priorities", "policies", "queue")
        ),
        *(
            f"tests/core/test_rules_{name}.py"
            for name in ("budgets", "cache", "control", "sessions", "shares", "resume", "paced_chunks", "peers", "scores")
        ),
    ),
    "tiers": (
        *(
            f"tests/core/test_{name}.py"
            for name in (
                "rules_tiers",
                "rules_tier_blocks",
                "rules_salts",
                "rules_imports",
                "rules_import_limits",
                "page_keys",
                "host_index",
                "rates",
                "lanes",
            )
        ),
        "tests/exec/tiers/test_redis_page_store.py",
        "tests/exec/tiers/test_salted_segments.py",
        "tests/exec/tiers/test_block_log.py",
        "tests/exec/tiers/test_segment_store.py",
        "tests/services/worker/test_tier_options.py",
        "tests/exec/tiers/test_disk_faults.py",
        "tests/exec/tiers/test_store_damage.py",
    ),
    "loads": (
        "tests/core/test_rules_early_loads.py",
        "tests/exec/test_layer_loads.py",
        "tests/exec/test_page_mover.py",
        "tests/kernels/test_page_pieces.py",
        "tests/exec/test_tiers.py",
        "tests/exec/test_device_graphs.py",
    ),
    "peers": (
        "tests/core/test_rules_peers.py",
        "tests/core/test_rules_chunks.py",
        "tests/services/gateway/dispatch/test_dispatch_prefill.py",
        "tests/services/gateway/dispatch/test_dispatch_ahead.py",
        "tests/services/gateway/routing/test_pick_prefill.py",
        "tests/exec/test_page_mover.py",
        "tests/exec/remote_kv/test_kv_server.py",
        "tests/exec/remote_kv/test_peer_reader.py",
        "tests/exec/remote_kv/test_shared_memory.py",
        "tests/exec/remote_kv/test_nixl.py",
    ),
    "speculation": (
        "tests/core/test_draft_controller.py",
        "tests/services/worker/grammar/test_grammar_matcher.py",
        "tests/exec/test_model_drafters.py",
        "tests/exec/test_ngrams.py",
        "tests/exec/test_speculation.py",
        "tests/exec/test_hybrid_speculation.py",
        "tests/exec/test_device_speculation.py",
        "tests/core/test_rules_guesses.py",
    ),
    "grammar": ("tests/grammar/test_schema_keywords.py", "tests/grammar/test_text_grammars.py"),
    "gateway": (
        *(f"tests/services/gateway/api/test_{name}.py" for name in ("bad_input", "sglang_bad_input", "constraints")),
        *(f"tests/services/gateway/api/test_{name}.py" for name in ("limits_walked", "known_fields", "sglang_clients", "score")),
        "tests/services/gateway/api/test_routed_experts.py",
        "tests/contracts/test_sampling_parameters.py",
        "tests/services/gateway/test_sampling_parameters.py",
        "tests/services/gateway/routing/test_routing_policies.py",
        "tests/services/gateway/discovery/test_discovery.py",
        "tests/services/gateway/discovery/test_discovery_kubernetes.py",
        "tests/services/gateway/routing/test_fair_queue.py",
        "tests/services/gateway/dispatch/test_placement.py",
        "tests/services/gateway/http/test_connection.py",
        "tests/services/gateway/http/test_disconnects.py",
        "tests/services/gateway/http/test_pipelining.py",
        "tests/services/gateway/remote/test_encode_stream.py",
        "tests/services/gateway/remote/test_replicas.py",
        "tests/services/gateway/store/test_redis_store.py",
        "tests/services/gateway/admin/test_admin.py",
        *(f"tests/services/gateway/playground/test_{name}.py" for name in ("pages", "report")),
        "tests/services/worker/front/test_wire_submit.py",
        "tests/services/worker/front/test_limits_walked.py",
    ),
    "parsers": tuple(
        f"tests/services/gateway/output/test_{name}.py"
        for name in ("broken_calls", "drawn_calls", "odd_outputs", "rendered_calls", "structural_tags")
    ),
    "worker": (
        "tests/contracts/test_worker_defaults.py",
        "tests/services/worker/test_engine_config.py",
        "tests/exec/test_weight_stream.py",
        "tests/services/tokenizer/test_history.py",
        "tests/services/tokenizer/test_render_child.py",
        "tests/services/tokenizer/test_render_pool.py",
        "tests/services/worker/front/test_outbox.py",
        "tests/services/worker/loop/test_progress.py",
        "tests/services/worker/test_draft_folder.py",
        "tests/services/tokenizer/test_encoding_pieces.py",
        "tests/services/detokenizer/test_text.py",
        "tests/services/shared/test_probe.py",
        "tests/services/worker/control/test_control_command_line.py",
        "tests/services/worker/front/test_server.py",
        "tests/services/worker/identity/test_sampling_defaults.py",
        "tests/services/worker/test_peer_options.py",
    ),
    "groups": (
        "tests/core/test_cache_units.py",
        "tests/core/test_tiered_units.py",
        "tests/exec/test_unit_tiers.py",
        "tests/exec/test_pools.py",
        "tests/exec/test_passes.py",
        "tests/exec/test_device_memory.py",
        "tests/exec/test_parity.py",
        "tests/kernels/test_gated_delta.py",
    ),
    "exec": (
        *(
            f"tests/exec/test_{name}.py"
            for name in ("sampler", "penalties", "slots", "logprobs", "scores", "embedding_pool", "quantized")
        ),
        "tests/exec/test_expert_record.py",
        "tests/exec/test_flashinfer_backend.py",
        "tests/kernels/test_sampling_twin.py",
        "tests/kernels/test_cpu_kernels.py",
    ),
}

FAULTS = (*CHART, *FETCH, *KERNELS, *CORE, *GATEWAY, *GRAMMAR, *EXEC, *SPECULATION, *TIERS, *LOADS, *PEERS, *PARSERS, *WORKER)
