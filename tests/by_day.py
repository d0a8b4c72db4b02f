"""Tests of which half of the cases, or a quarter, run by day (tests/night.py): tables whose rows take one way through the code
and differ in values alone. docs/develop.md says what holds the others by day."""

from __future__ import annotations

HALF = frozenset(
    (
        "tests/chart/test_images_rules.py::test_what_is_wrong_is_found",
        "tests/chart/test_monitoring_rules.py::test_an_alert_fires_when_it_must_and_not_before",
        "tests/chart/test_network_policies.py::test_the_graph_is_the_data_flow",
        "tests/chart/test_pod_security.py::test_each_control_sees_what_it_is_about",
        "tests/chart/test_templates.py::test_what_is_not_asked_for_is_not_there",
        "tests/chart/test_values.py::test_the_schema_refuses",
        "tests/chart/test_values.py::test_the_templates_refuse",
        "tests/contracts/test_worker_messages.py::test_looking_into_a_message_is_noticed",
        "tests/core/test_rules_control.py::TestRetune::test_what_cannot_be_is_refused_by_name_and_changes_nothing",
        "tests/exec/peers/test_peer_reader.py::TestSickPeers::test_one_that_answers_wrongly_is_said_once",
        "tests/exec/peers/test_peer_reader.py::TestSickPeers::test_what_is_no_address_is_said",
        "tests/exec/peers/test_room_server.py::TestFrames::test_a_bad_one_ends_its_connection_alone",
        "tests/exec/peers/test_room_server.py::test_what_is_not_theirs_is_not_read",
        "tests/exec/test_bad_checkpoints.py::test_wrong_configs",
        "tests/exec/test_gpu_benchmarks_toy.py::test_it_runs",
        "tests/exec/test_memory_budget.py::test_bytes_for_the_pool",
        "tests/exec/test_pools.py::test_free_memory",
        "tests/exec/test_safetensors_file.py::test_a_file_that_is_no_safetensors",
        "tests/exec/test_safetensors_file.py::test_a_header_that_is_wrong",
        "tests/exec/test_scheduler_parity.py::test_sixteen_ragged_requests_at_once",
        "tests/grammar/test_schema_keywords.py::test_what_is_not_enforced_is_refused_with_its_place",
        "tests/services/detokenizer/test_stop_hold.py::test_hold",
        "tests/services/gateway/admin/test_admin.py::test_a_wrong_body_is_400_and_reaches_no_worker",
        "tests/services/gateway/api/test_anthropic.py::test_what_is_not_served_is_refused_by_its_name",
        "tests/services/gateway/api/test_responses.py::test_what_is_not_served_is_refused_by_its_name",
        "tests/services/gateway/api/test_sglang_bad_input.py::test_generate",
        "tests/services/gateway/dispatch/test_refusals_by_workers.py::test_the_field_is_the_clients",
        "tests/services/gateway/keys/test_key_table.py::test_what_is_wrong_is_refused_with_its_place",
        "tests/services/tokenizer/pieces/test_pattern.py::test_what_is_not_understood_is_said",
        "tests/services/tokenizer/test_parity.py::test_chat",
        "tests/services/tokenizer/test_parity.py::test_encode",
        "tests/services/tokenizer/test_server.py::test_a_refusal_names_the_field",
        "tests/services/worker/control/test_control_command_line.py::test_words_are_a_request",
        "tests/services/worker/control/test_control_command_line.py::test_wrong_words_are_refused",
        "tests/services/worker/front/test_wire_submit.py::test_a_bad_field_is_named",
        "tests/sim/test_fleet_roles.py::test_whoever_dies_answers_stay_whole",
        "tests/sim/test_simulator_trace.py::test_a_bad_line_is_named_with_its_fault",
    )
)
QUARTER = frozenset(
    (
        "tests/exec/test_parity.py::test_prompt_in_chunks",
        "tests/exec/test_scheduler_parity.py::test_a_prompt_cut_at_every_size_from_one_page_up",
    )
)
